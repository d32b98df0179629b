// Package needffi turns a missing libffi into a readable message.
//
// The binding of llama.cpp loads libffi while the process initialises and panics
// with a stack trace when it is not there, before main can say a word. Go
// initialises a package once its imports are, in the order of import paths; this
// one needs no more than that binding does and sorts before it, so its own check
// runs first. A test holds that order. Import it wherever the binding is linked in.
package needffi

import (
	"fmt"
	"os"
	"runtime"

	"github.com/ebitengine/purego"
)

// ExitCode is the exit status of a process that ends because libffi is missing.
const ExitCode = 69 // EX_UNAVAILABLE of sysexits.h

// Hint says which package brings libffi.
const Hint = "install it (Debian, Ubuntu: apt install libffi8; Fedora: dnf install libffi; " +
	"Arch: pacman -S libffi; openSUSE: zypper install libffi8) and start again"

// Check reports whether libffi can be loaded; the error names the package to install.
func Check() error {
	if runtime.GOOS != "linux" && runtime.GOOS != "freebsd" {
		return nil // the binding brings its own copy
	}
	if _, err := purego.Dlopen("libffi.so.8", purego.RTLD_LAZY); err != nil {
		return fmt.Errorf("libffi.so.8, which the engine library is called through, cannot be loaded: %w\n%s", err, Hint)
	}
	return nil
}

func init() {
	if err := Check(); err != nil {
		fmt.Fprintln(os.Stderr, "baton:", err)
		os.Exit(ExitCode)
	}
}
