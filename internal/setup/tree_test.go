package setup

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// tree is an artifact of which whole directories are taken.
func tree(t *testing.T) (artifact, []byte) {
	b := zipped(t, entry{".pkg.libs/libmain.so", bodyA, ""}, entry{".pkg.libs/plugins/one.so", bodyB, ""}, entry{".pkg.libs/plugins/two.so", bodyB, ""},
		entry{"pkg.libs/ucx/libdeep.so.1", bodyA, ""}, entry{"pkg.libs/libaws-big.so", bodyA, ""}, entry{"pkg/__init__.py", "x", ""},
		entry{"pkg.libs/../../escaped.so", bodyA, ""}, entry{"/pkg.libs/rooted.so", bodyA, ""})
	return artifact{what: "test tree", key: "tree-1", kind: "nixl", client: "pip", spec: "test-tree==1.0",
		archive: "test_tree-1.0-py3-none-any.whl", size: int64(len(b)), sum: sum(b),
		trees: []string{".pkg.libs/lib", ".pkg.libs/plugins/one.so", "pkg.libs/"}, leave: []string{"pkg.libs/libaws-"}}, b
}

func TestTree(t *testing.T) {
	a, b := tree(t)
	served := clients(t, "", serve)
	put(t, served, a.archive, b)
	cache := t.TempDir()
	if err := installAll(context.Background(), cache, []artifact{a}, testOut{t}); err != nil {
		t.Fatal(err)
	}
	got := left(t, a.dir(cache))
	want := []string{".pkg.libs", ".pkg.libs/libmain.so", ".pkg.libs/plugins", ".pkg.libs/plugins/one.so", "pkg.libs", "pkg.libs/ucx", "pkg.libs/ucx/libdeep.so.1", stampName}
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Errorf("taken %q, want %q", got, want)
	}
	if err := verifyInstalled(a, a.dir(cache)); err != nil {
		t.Errorf("verify: %v", err)
	}
	deep := filepath.Join(a.dir(cache), "pkg.libs/ucx/libdeep.so.1")
	if err := os.WriteFile(deep, []byte("changed in place"[:len(bodyA)]), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := verifyInstalled(a, a.dir(cache)); err == nil {
		t.Error("a damaged file of the tree was not found")
	}
	if err := os.Remove(deep); err != nil {
		t.Fatal(err)
	}
	if err := verifyInstalled(a, a.dir(cache)); err == nil {
		t.Error("a missing file of the tree was not found")
	}
}

type testOut struct{ t *testing.T }

func (o testOut) Write(p []byte) (int, error) { o.t.Logf("%s", p); return len(p), nil }

func TestLocateNIXL(t *testing.T) {
	t.Setenv("VIRTUAL_ENV", t.TempDir())
	cache := t.TempDir()
	path, err := LocateNIXL(cache)
	if err == nil && filepath.IsAbs(path) {
		t.Logf("this machine has it in %s", path)
	} else if !errors.Is(err, ErrNotInstalled) {
		t.Errorf("nothing there: %v, want %v", err, ErrNotInstalled)
	}
	lib := filepath.Join(os.Getenv("VIRTUAL_ENV"), "lib/python3.11/site-packages", nixlLibs, "libnixl_capi.so")
	if err := errors.Join(os.MkdirAll(filepath.Dir(lib), 0o755), os.WriteFile(lib, []byte("x"), 0o644)); err != nil {
		t.Fatal(err)
	}
	if path, err = LocateNIXL(cache); err != nil || path != lib {
		t.Errorf("located %q, %v; want %q", path, err, lib)
	}
	if _, _, err := plan(Options{NoModel: true, With: []string{"mooncake"}}); err == nil {
		t.Error("an unknown part was accepted")
	}
	if err := nixlHere("darwin", "arm64"); err == nil {
		t.Error("the wheel was taken for another platform")
	}
}
