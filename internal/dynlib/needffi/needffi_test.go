package needffi_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/dynlib/needffi"
	_ "github.com/jupiterrider/ffi" // the binding that panics without libffi
)

func TestThere(t *testing.T) {
	if err := needffi.Check(); err != nil {
		t.Error(err)
	}
}

// TestMissingIsTold starts this test binary with a broken libffi in front of the real one.
// Were the package initialised after the binding, the binding's panic would come first.
func TestMissingIsTold(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the dynamic loader's search path is Linux's")
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "libffi.so.8"), []byte("not a library"), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "-test.run=TestThere")
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+dir)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != needffi.ExitCode {
		t.Errorf("ended with %v", err)
	}
	if text := string(out); !strings.Contains(text, "libffi8") || strings.Contains(text, "panic") || strings.Contains(text, "goroutine") {
		t.Errorf("it said:\n%s", text)
	}
}
