package setup

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// entry is one file of a test archive; link makes it a symbolic link.
type entry struct{ name, body, link string }

func tgz(t *testing.T, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	zw := gzip.NewWriter(&b)
	tw := tar.NewWriter(zw)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Mode: 0o644, Size: int64(len(e.body)), Typeflag: tar.TypeReg}
		if e.link != "" {
			h.Typeflag, h.Linkname = tar.TypeSymlink, e.link
		}
		if err := tw.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(tw, e.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(tw.Close(), zw.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func zipped(t *testing.T, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	zw := zip.NewWriter(&b)
	for _, e := range entries {
		w, err := zw.Create(e.name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := zw.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

const (
	bodyA = "the first file"
	bodyB = "the second file, longer"
)

// library is an artifact like the engine library, small, with its archive.
func library(t *testing.T) (artifact, []byte) {
	b := tgz(t, entry{"package/README.md", "hello", ""}, entry{"package/bins/a.so.1", bodyA, ""}, entry{"package/bins/b.so", bodyB, ""})
	return artifact{what: "test library", key: "lib-1", kind: "lib", client: "npm", spec: "@test/lib@1.0.0",
		archive: "test-lib-1.0.0.tgz", size: int64(len(b)), sum: sum(b), inner: "package/bins",
		files: []fileSum{{"a.so.1", int64(len(bodyA)), sum([]byte(bodyA))}, {"b.so", int64(len(bodyB)), sum([]byte(bodyB))}},
		links: map[string]string{"a.so": "a.so.1"}}, b
}

func model(t *testing.T) (artifact, []byte) {
	b := zipped(t, entry{"pkg/m.gguf", bodyA, ""}, entry{"pkg/__init__.py", "x", ""})
	return artifact{what: "test model", key: "model-1", kind: "models", client: "pip", spec: "test-model==1.0",
		archive: "test_model-1.0-py3-none-any.whl", size: int64(len(b)), sum: sum(b), inner: "pkg",
		files: []fileSum{{"m.gguf", int64(len(bodyA)), sum([]byte(bodyA))}}}, b
}

// clients makes the only npm and python3 on PATH shell scripts, and gives the directory
// in which they find archives to "download".
func clients(t *testing.T, npm, python string) (served string) {
	t.Helper()
	bin, served := t.TempDir(), t.TempDir()
	for name, script := range map[string]string{"npm": npm, "python3": python} {
		if script != "" {
			if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Setenv("PATH", bin)
	t.Setenv("SERVED", served)
	return served
}

// Both clients are run in the directory that the archive shall go to.
const serve = `echo fetched >>"$SERVED/calls"; /bin/cp "$SERVED"/*.tgz "$SERVED"/*.whl . 2>/dev/null; exit 0`

func put(t *testing.T, dir, name string, b []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
		t.Fatal(err)
	}
}

// left lists everything in the cache but the lock file.
func left(t *testing.T, dir string) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && path != dir && d.Name() != "setup.lock" {
			rel, _ := filepath.Rel(dir, path)
			names = append(names, rel)
		}
		return err
	})
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return names
}

func TestInstall(t *testing.T) {
	lib, libBytes := library(t)
	mod, modBytes := model(t)
	served := clients(t, serve, serve)
	put(t, served, lib.archive, libBytes)
	put(t, served, mod.archive, modBytes)
	dir := t.TempDir()
	var out bytes.Buffer
	want := []artifact{lib, mod}
	if err := ensure(t.Context(), dir, want, Options{Out: &out}); err != nil {
		t.Fatal(err)
	}
	p := locate(dir, want, Paths{})
	if b, err := os.ReadFile(filepath.Join(p.LibDir, "a.so")); err != nil || string(b) != bodyA {
		t.Errorf("through the link: %q (%v)", b, err)
	}
	if b, err := os.ReadFile(p.Model); err != nil || string(b) != bodyA {
		t.Errorf("model: %q (%v)", b, err)
	}
	for _, s := range []string{"test library: fetching @test/lib@1.0.0 with npm", "test library: checking", "test model: ready in"} {
		if !strings.Contains(out.String(), s) {
			t.Errorf("%q is not in the output:\n%s", s, &out)
		}
	}
	for _, name := range left(t, dir) {
		if strings.HasPrefix(name, tempPrefix) || strings.Contains(name, "README") || strings.Contains(name, "__init__") {
			t.Errorf("left over: %s", name)
		}
	}
	// A second run fetches nothing and says nothing.
	out.Reset()
	clients(t, "exit 1", "exit 1")
	if err := ensure(t.Context(), dir, want, Options{Out: &out, Offline: true}); err != nil || out.Len() > 0 {
		t.Errorf("second run: %v, %q", err, &out)
	}
}

func TestDamageIsFoundAndRepaired(t *testing.T) {
	lib, libBytes := library(t)
	served := clients(t, serve, "")
	put(t, served, lib.archive, libBytes)
	dir := t.TempDir()
	if err := ensure(t.Context(), dir, []artifact{lib}, Options{Out: io.Discard}); err != nil {
		t.Fatal(err)
	}
	at := lib.dir(dir)
	file := filepath.Join(at, "a.so.1")
	later := func() error { return os.Chtimes(file, time.Unix(1, 0), time.Unix(1, 0)) }
	if err := later(); err != nil {
		t.Fatal(err)
	}
	if err := verifyInstalled(lib, at); err != nil {
		t.Errorf("another time on the same content: %v", err)
	}
	for name, damage := range map[string]func() error{
		"content":       func() error { return errors.Join(os.WriteFile(file, []byte("THE FIRST FILE"), 0o644), later()) },
		"size":          func() error { return os.Truncate(file, 3) },
		"missing":       func() error { return os.Remove(file) },
		"a directory":   func() error { return errors.Join(os.Remove(file), os.Mkdir(file, 0o755)) },
		"link":          func() error { return os.Remove(filepath.Join(at, "a.so")) },
		"stamp":         func() error { return os.WriteFile(filepath.Join(at, stampName), []byte("{"), 0o644) },
		"other version": func() error { return os.WriteFile(filepath.Join(at, stampName), []byte("{}"), 0o644) },
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		if err := ensure(t.Context(), dir, []artifact{lib}, Options{Offline: true}); !errors.Is(err, ErrNotInstalled) {
			t.Errorf("%s: %v", name, err)
		}
		if err := ensure(t.Context(), dir, []artifact{lib}, Options{Out: io.Discard}); err != nil {
			t.Errorf("%s: repair: %v", name, err)
		}
		if b, err := os.ReadFile(file); err != nil || string(b) != bodyA {
			t.Errorf("%s: after repair %q (%v)", name, b, err)
		}
	}
}

func TestFetchErrors(t *testing.T) {
	lib, _ := library(t)
	mod, _ := model(t)
	say := func(s string) string { return fmt.Sprintf("echo '%s' >&2; exit 1", s) }
	for name, c := range map[string]struct {
		a           artifact
		npm, python string
		kind        error
		says        string
	}{
		"no npm":            {lib, "", "", ErrClientMissing, "install npm"},
		"no python":         {mod, "", "", ErrClientMissing, "install Python 3 with pip"},
		"no pip":            {mod, "", say("/usr/bin/python3: No module named pip"), ErrClientMissing, "install Python 3 with pip"},
		"npm offline":       {lib, say("npm error code ENOTFOUND"), "", ErrNoNetwork, "check the network"},
		"npm refused":       {lib, say("npm error FetchError: connect ECONNREFUSED"), "", ErrNoNetwork, "ECONNREFUSED"},
		"pip offline":       {mod, "", say("NewConnectionError: Failed to establish: Temporary failure in name resolution"), ErrNoNetwork, "proxy or mirror"},
		"npm disk full":     {lib, say("npm error nospc ENOSPC: no space left on device, write"), "", ErrDiskFull, "free some space"},
		"pip disk full":     {mod, "", say("ERROR: Could not install: [Errno 28] No space left on device"), ErrDiskFull, "BATON_CACHE"},
		"unknown":           {lib, say("npm error code E404"), "", nil, "E404"},
		"nothing delivered": {lib, "exit 0", "", nil, "left no test-lib-1.0.0.tgz"},
	} {
		clients(t, c.npm, c.python)
		dir := t.TempDir()
		err := ensure(t.Context(), dir, []artifact{c.a}, Options{Out: io.Discard})
		var fe *FetchError
		if !errors.As(err, &fe) || c.kind != nil && !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		if l := left(t, dir); len(l) > 0 {
			t.Errorf("%s: left over: %v", name, l)
		}
	}
}

func TestBadArchives(t *testing.T) {
	good, goodBytes := library(t)
	a, b := entry{"package/bins/a.so.1", bodyA, ""}, entry{"package/bins/b.so", bodyB, ""}
	for name, c := range map[string]struct {
		bytes []byte
		kind  error // nil: it is fine
	}{
		"file missing":        {tgz(t, a), ErrArchive},
		"longer file":         {tgz(t, a, entry{b.name, bodyB + "!", ""}), ErrArchive},
		"link for a file":     {tgz(t, a, entry{b.name, "", "/etc/passwd"}), ErrArchive},
		"elsewhere":           {tgz(t, a, entry{"package/bins/../bins/b.so", bodyB, ""}), ErrArchive},
		"no archive":          {[]byte("this is not an archive at all"), gzip.ErrHeader},
		"cut":                 {goodBytes[:len(goodBytes)-20], io.ErrUnexpectedEOF},
		"paths that lead out": {tgz(t, entry{"../../evil", "x", ""}, entry{"/tmp/evil", "x", ""}, a, b), nil},
		"doubled":             {tgz(t, a, b, entry{b.name, bodyA, ""}), nil},
	} {
		served := clients(t, serve, "")
		put(t, served, good.archive, c.bytes)
		art := good
		art.sum = sum(c.bytes)
		dir := t.TempDir()
		err := ensure(t.Context(), dir, []artifact{art}, Options{Out: io.Discard})
		if c.kind == nil != (err == nil) || c.kind != nil && !errors.Is(err, c.kind) {
			t.Errorf("%s: %v", name, err)
		}
		if l := left(t, dir); c.kind != nil && len(l) > 0 || strings.Contains(strings.Join(l, " "), "evil") {
			t.Errorf("%s: left over: %v", name, l)
		}
	}
}

func TestChecksums(t *testing.T) {
	good, goodBytes := library(t)
	served := clients(t, serve, "")
	put(t, served, good.archive, goodBytes)
	otherFile := good
	otherFile.files = []fileSum{{"a.so.1", int64(len(bodyA)), sum([]byte("else"))}, good.files[1]}
	otherArchive := good
	otherArchive.sum = sum([]byte("else"))
	for name, c := range map[string]struct {
		a    artifact
		file string
		got  string
	}{
		"archive": {otherArchive, good.archive, good.sum},
		"file":    {otherFile, "a.so.1", good.files[0].sum},
	} {
		dir := t.TempDir()
		err := ensure(t.Context(), dir, []artifact{c.a}, Options{Out: io.Discard})
		var ce *ChecksumError
		if !errors.As(err, &ce) || ce.File != c.file || ce.Got != c.got || ce.Want != sum([]byte("else")) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && (!strings.Contains(err.Error(), ce.Got) || !strings.Contains(err.Error(), ce.Want)) {
			t.Errorf("%s: both sums are not told: %v", name, err)
		}
		if l := left(t, dir); len(l) > 0 {
			t.Errorf("%s: left over: %v", name, l)
		}
	}
}

// TestCancelEndsTheClient: the client and its children are gone and nothing stays.
func TestCancelEndsTheClient(t *testing.T) {
	lib, _ := library(t)
	served := clients(t, `echo $$ >"$SERVED/pid"; echo part >half; /bin/sleep 1000 & wait`, "")
	if err := syscall.Mkfifo(filepath.Join(served, "pid"), 0o644); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("user left")
	var wg sync.WaitGroup
	var pid int
	wg.Go(func() {
		b, err := os.ReadFile(filepath.Join(served, "pid")) // blocks until the client runs
		if _, serr := fmt.Sscan(string(b), &pid); err != nil || serr != nil {
			t.Error(err, serr)
		}
		cancel(gone)
	})
	err := ensure(ctx, dir, []artifact{lib}, Options{Out: io.Discard})
	wg.Wait()
	if !errors.Is(err, gone) {
		t.Errorf("%v", err)
	}
	if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("the client %d is still there: %v", pid, err)
	}
	if l := left(t, dir); len(l) > 0 {
		t.Errorf("left over: %v", l)
	}
}

func TestLeftOversAreSwept(t *testing.T) {
	lib, libBytes := library(t)
	served := clients(t, serve, "")
	put(t, served, lib.archive, libBytes)
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, tempPrefix+"123", "ready"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := ensure(t.Context(), dir, []artifact{lib}, Options{Out: io.Discard}); err != nil {
		t.Fatal(err)
	}
	for _, name := range left(t, dir) {
		if strings.HasPrefix(name, tempPrefix) {
			t.Errorf("left over: %s", name)
		}
	}
}

// TestTwoSetUps: the second waits and finds the work done.
func TestTwoSetUps(t *testing.T) {
	lib, libBytes := library(t)
	served := clients(t, serve, "")
	put(t, served, lib.archive, libBytes)
	dir := t.TempDir()
	unlock, err := lock(t.Context(), filepath.Join(dir, "setup.lock"), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	waiting, said := io.Pipe()
	errs := make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		errs <- ensure(t.Context(), dir, []artifact{lib}, Options{Out: said})
		said.Close()
	})
	line := make([]byte, 200)
	n, err := waiting.Read(line)
	if err != nil || !strings.Contains(string(line[:n]), "another set-up is running") {
		t.Errorf("%q (%v)", line[:n], err)
	}
	if err := install(t.Context(), dir, lib, io.Discard); err != nil {
		t.Fatal(err)
	}
	if err := unlock(); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(waiting)
	wg.Wait()
	if err != nil || len(rest) > 0 {
		t.Errorf("the second set-up did something: %q (%v)", rest, err)
	}
	if err := <-errs; err != nil {
		t.Error(err)
	}
	calls, err := os.ReadFile(filepath.Join(served, "calls"))
	if err != nil || string(calls) != "fetched\n" {
		t.Errorf("the client was called: %q (%v)", calls, err)
	}
	// Waiting ends with the context.
	unlock, err = lock(t.Context(), filepath.Join(dir, "setup.lock"), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := lock(ctx, filepath.Join(dir, "setup.lock"), io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("wait for the lock: %v", err)
	}
	if err := unlock(); err != nil {
		t.Error(err)
	}
}

func TestProgressLines(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "part", make([]byte, 1500000))
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		stop := showProgress(artifact{what: "model", size: 3000000}, dir, &out)
		<-time.After(5 * time.Second)
		stop()
		if want := "model: 1.5 of 3 MB, 2 s\nmodel: 1.5 of 3 MB, 4 s\n"; out.String() != want {
			t.Errorf("%q", out.String())
		}
	})
}

func TestPlatforms(t *testing.T) {
	for platform, says := range map[string]string{
		"linux/arm64": "@node-llama-cpp/linux-arm64@3.22.1", "darwin/arm64": "untried", "plan9/386": "no engine library is known",
	} {
		goos, arch, _ := strings.Cut(platform, "/")
		_, err := engineFor(goos, arch)
		var ue *UnsupportedError
		if !errors.As(err, &ue) || ue.Platform != platform || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), "--lib-dir") {
			t.Errorf("%s: %v", platform, err)
		}
	}
	if _, err := engineFor("linux", "amd64"); err != nil {
		t.Error(err)
	}
}

func TestOwnLibrary(t *testing.T) {
	dir := t.TempDir()
	o := Options{Dir: t.TempDir(), LibDir: dir, NoModel: true}
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "--lib-dir") {
		t.Errorf("an empty directory: %v", err)
	}
	put(t, dir, "libllama.v0.5.0.so", []byte("x"))
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "make a link") {
		t.Errorf("a versioned name only: %v", err)
	}
	for _, name := range []string{"libllama.so", "libggml.so", "libggml-base.so"} {
		put(t, dir, name, []byte("x"))
	}
	if p, err := Run(t.Context(), o); err != nil || p != (Paths{LibDir: dir}) {
		t.Errorf("%+v (%v)", p, err)
	}
}

func TestNothingThere(t *testing.T) {
	t.Setenv("BATON_CACHE", t.TempDir())
	clients(t, "exit 1", "exit 1")
	for name, do := range map[string]func() (Paths, error){
		"locate":  func() (Paths, error) { return Locate("") },
		"offline": func() (Paths, error) { return Run(t.Context(), Options{Offline: true}) },
	} {
		p, err := do()
		if !errors.Is(err, ErrNotInstalled) || p != (Paths{}) || !strings.Contains(err.Error(), "baton setup") {
			t.Errorf("%s: %+v (%v)", name, p, err)
		}
	}
}

func TestDiskFull(t *testing.T) {
	err := diskError(fmt.Errorf("write: %w", syscall.ENOSPC))
	if !errors.Is(err, ErrDiskFull) || !strings.Contains(err.Error(), "free some space") {
		t.Error(err)
	}
	if plain := errors.New("else"); !errors.Is(diskError(plain), plain) || errors.Is(diskError(plain), ErrDiskFull) {
		t.Error("another error was taken for a full disk")
	}
	// On a file system of its own this is what a write gives.
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip(err)
	}
	defer full.Close()
	if _, err := full.Write([]byte("x")); !errors.Is(diskError(err), ErrDiskFull) {
		t.Error(err)
	}
}

// TestSumsOfTheRealFiles guards the table against typing errors where a set-up was made.
func TestSumsOfTheRealFiles(t *testing.T) {
	dir, err := DefaultDir()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Locate(""); err != nil {
		t.Skipf("no set-up to compare with: %v", err)
	}
	engine, err := engineHere()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []artifact{engine, defaultModel} {
		for _, f := range a.files {
			if err := checkSum(t.Context(), filepath.Join(a.dir(dir), f.name), f.sum); err != nil {
				t.Error(err)
			}
		}
	}
}
