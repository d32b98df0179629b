// Package dynlib finds, opens and checks shared libraries that are loaded at run
// time (no cgo, no link-time dependency).
//
// A library that lacks functions is refused with one [MissingSymbolsError] that
// names all of them, so that a wrong release is recognised at a glance. Nothing
// here panics on a bad file, and nothing is ever unloaded: code of a C library
// may still be on another thread's stack.
package dynlib

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/ebitengine/purego"
)

// ErrNotFound: no file of that library is in the directory.
var ErrNotFound = errors.New("shared library not found")

// NotFoundError says where a library was looked for. It matches [ErrNotFound].
type NotFoundError struct {
	Dir  string
	File string // the name looked for, e.g. "libllama.so"
	Near string // a versioned sibling that is there, e.g. "libllama.v0.5.0.so"; "" if none
}

// Error says what to do where a near miss is there.
func (e *NotFoundError) Error() string {
	msg := fmt.Sprintf("shared library %s not found in %s", e.File, e.Dir)
	if e.Near != "" {
		msg += fmt.Sprintf("; %s is there: make a link to it with the name %s", e.Near, e.File)
	}
	return msg
}

// Is makes errors.Is(err, ErrNotFound) hold.
func (e *NotFoundError) Is(target error) bool { return target == ErrNotFound }

// OpenError is a file that the dynamic loader refused.
type OpenError struct {
	Path   string
	Reason string // the loader's own words
}

// Error keeps the loader's words.
func (e *OpenError) Error() string {
	return fmt.Sprintf("open shared library %s: %s", e.Path, e.Reason)
}

// MissingSymbolsError lists every function that a library should have and has not.
type MissingSymbolsError struct {
	Path  string
	Names []string
}

// Error lists all of them.
func (e *MissingSymbolsError) Error() string {
	return fmt.Sprintf("shared library %s is of another release: it lacks %d function(s): %s",
		e.Path, len(e.Names), strings.Join(e.Names, ", "))
}

// FileName is the platform's file name of a library: "llama" gives "libllama.so",
// "libllama.dylib" or "llama.dll".
func FileName(name string) string {
	switch runtime.GOOS {
	case "darwin":
		return "lib" + name + ".dylib"
	case "windows":
		return name + ".dll"
	default:
		return "lib" + name + ".so"
	}
}

// Find gives the absolute path of the library called name in dir. Links are followed
// only to see that they lead to a regular file.
func Find(dir, name string) (string, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("find library %s: %w", name, err)
	}
	file := FileName(name)
	path := filepath.Join(abs, file)
	if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() {
		return path, nil
	}
	missing := &NotFoundError{Dir: abs, File: file}
	ext := filepath.Ext(file)
	if near, _ := filepath.Glob(filepath.Join(abs, strings.TrimSuffix(file, ext)+".*"+ext)); len(near) > 0 {
		missing.Near = filepath.Base(near[0])
	}
	return "", missing
}

// Lib is an opened library. It stays loaded until the process ends.
type Lib struct {
	Path   string
	handle uintptr
}

// Open loads the library at path (absolute, from [Find]) with its symbols kept
// local, and checks that it has all of the named functions.
func Open(path string, symbols ...string) (*Lib, error) {
	handle, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, &OpenError{Path: path, Reason: err.Error()}
	}
	l := &Lib{Path: path, handle: handle}
	if err := l.Check(symbols...); err != nil {
		return nil, err
	}
	return l, nil
}

// Check reports the functions that l lacks, all in one [MissingSymbolsError].
func (l *Lib) Check(symbols ...string) error {
	var missing []string
	for _, s := range symbols {
		if _, err := purego.Dlsym(l.handle, s); err != nil {
			missing = append(missing, s)
		}
	}
	if missing != nil {
		return &MissingSymbolsError{Path: l.Path, Names: missing}
	}
	return nil
}

// Symbol is the address of a function of l.
func (l *Lib) Symbol(name string) (uintptr, error) {
	addr, err := purego.Dlsym(l.handle, name)
	if err != nil {
		return 0, &MissingSymbolsError{Path: l.Path, Names: []string{name}}
	}
	return addr, nil
}

// Func sets *fn, a pointer to a func variable, to the function called name. The
// Go signature must match the C prototype: arguments and result of basic types,
// pointers and strings.
func (l *Lib) Func(fn any, name string) error {
	addr, err := l.Symbol(name)
	if err != nil {
		return err
	}
	purego.RegisterFunc(fn, addr)
	return nil
}
