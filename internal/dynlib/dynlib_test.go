package dynlib

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

func TestFind(t *testing.T) {
	dir := t.TempDir()
	write := func(name string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("not a library"), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	var nf *NotFoundError
	if _, err := Find(dir, "x"); !errors.Is(err, ErrNotFound) || !errors.As(err, &nf) || nf.Near != "" {
		t.Errorf("nothing there: %v", err)
	}
	file := FileName("x")
	ext := filepath.Ext(file)
	versioned := strings.TrimSuffix(file, ext) + ".v1" + ext
	write(versioned)
	if _, err := Find(dir, "x"); !errors.As(err, &nf) || nf.Near != versioned || !strings.Contains(err.Error(), "make a link") {
		t.Errorf("only a versioned name: %v", err)
	}
	if err := os.Symlink("gone", filepath.Join(dir, file)); err != nil {
		t.Fatal(err)
	}
	if _, err := Find(dir, "x"); !errors.Is(err, ErrNotFound) {
		t.Errorf("a broken link: %v", err)
	}
	if err := os.Mkdir(filepath.Join(dir, FileName("d")), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Find(dir, "d"); !errors.Is(err, ErrNotFound) {
		t.Errorf("a directory: %v", err)
	}
	want := write(FileName("y"))
	if got, err := Find(dir, "y"); err != nil || got != want {
		t.Errorf("%s (%v), want %s", got, err, want)
	}
}

func TestOpenRefusesWhatIsNoLibrary(t *testing.T) {
	path := filepath.Join(t.TempDir(), FileName("bad"))
	if err := os.WriteFile(path, []byte("not a library"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{path, path + ".none"} {
		var oe *OpenError
		if _, err := Open(p); !errors.As(err, &oe) || oe.Path != p || oe.Reason == "" {
			t.Errorf("%s: %v", p, err)
		}
	}
}

// libm is a library that every Linux system has.
func libm(t *testing.T) string {
	if runtime.GOOS != "linux" {
		t.Skip("looks for libm.so.6")
	}
	return "libm.so.6"
}

func TestSymbols(t *testing.T) {
	l, err := Open(libm(t), "cos", "sqrt")
	if err != nil {
		t.Fatal(err)
	}
	var sqrt func(float64) float64
	if err := l.Func(&sqrt, "sqrt"); err != nil || sqrt(81) != 9 {
		t.Errorf("sqrt: %v", err)
	}
	var ms *MissingSymbolsError
	err = l.Check("cos", "no_such_a", "sqrt", "no_such_b")
	if !errors.As(err, &ms) || len(ms.Names) != 2 || !strings.Contains(err.Error(), "no_such_a, no_such_b") {
		t.Errorf("two of four are missing: %v", err)
	}
	if _, err := Open(libm(t), "no_such_a", "no_such_b"); !errors.As(err, &ms) || len(ms.Names) != 2 {
		t.Errorf("open: %v", err)
	}
	if err := l.Func(&sqrt, "no_such_a"); !errors.As(err, &ms) {
		t.Errorf("func: %v", err)
	}
	if addr, err := l.Symbol("cos"); err != nil || addr == 0 {
		t.Errorf("symbol: %v %v", addr, err)
	}
}
