package llamacpp

import (
	"context"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"crypto/sha256"

	"github.com/baton-pd/baton/internal/dynlib"
	_ "github.com/baton-pd/baton/internal/dynlib/needffi" // a missing libffi is told, not panicked about
	"github.com/ebitengine/purego"
	"github.com/hybridgroup/yzma/pkg/llama"
)

// symbols.txt lists what the Go binding takes from each library: lines of "library
// function". A release that lacks one is refused with all missing names.
//
//go:embed symbols.txt
var symbolList string

// ErrLibrary: the engine library is not the release that this program was built for.
var ErrLibrary = errors.New("llamacpp: unsuitable engine library")

// library is the loaded llama.cpp; there is one a process.
type library struct {
	dir      string
	name     string // "llamacpp v0.5.0 (ggml ..., sha256:...)"
	strlen   uintptr
	tokenize func(vocab uintptr, text *byte, textLen int32, tokens *int32, maxTokens int32, addSpecial, parseSpecial bool) int32
}

var loaded struct {
	sync.Mutex
	lib *library
	err error // a failed load is final: the library may be half initialised
}

// load opens the library in dir, once a process.
func load(dir string) (*library, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("engine library directory: %w", err)
	}
	loaded.Lock()
	defer loaded.Unlock()
	switch {
	case loaded.err != nil:
		return nil, loaded.err
	case loaded.lib == nil:
		lib, final, err := loadOnce(abs)
		if final {
			loaded.err = err
		}
		if err != nil {
			return nil, err
		}
		loaded.lib = lib
	case loaded.lib.dir != abs:
		return nil, fmt.Errorf("%w: %s is loaded already, one process cannot also use %s", ErrLibrary, loaded.lib.dir, abs)
	}
	return loaded.lib, nil
}

// loadOnce checks before it loads. final: the process cannot try again.
func loadOnce(dir string) (lib *library, final bool, err error) {
	lib = &library{dir: dir}
	var main, base *dynlib.Lib
	for _, name := range []string{"ggml-base", "ggml", "llama"} {
		path, err := dynlib.Find(dir, name)
		if err != nil {
			return nil, false, fmt.Errorf("%w: %w", ErrLibrary, err)
		}
		l, err := dynlib.Open(path, symbolsOf(name)...)
		if err != nil {
			return nil, false, fmt.Errorf("%w: %w", ErrLibrary, err)
		}
		switch name {
		case "ggml-base":
			base = l
		case "llama":
			main = l
		}
	}
	if err := main.Func(&lib.tokenize, "llama_tokenize"); err != nil {
		return nil, false, fmt.Errorf("%w: %w", ErrLibrary, err)
	}
	if lib.strlen, err = purego.Dlsym(purego.RTLD_DEFAULT, "strlen"); err != nil {
		return nil, false, fmt.Errorf("%w: C library: %w", ErrLibrary, err)
	}
	if lib.name, err = describe(main, base); err != nil {
		return nil, false, err
	}
	// An abort of the library must not start a debugger to print its stack.
	if err := os.Setenv("GGML_NO_BACKTRACE", "1"); err != nil {
		return nil, false, fmt.Errorf("set GGML_NO_BACKTRACE: %w", err)
	}
	if err := llama.Load(dir); err != nil {
		return nil, true, fmt.Errorf("%w: %w", ErrLibrary, err)
	}
	llama.LogSet(purego.NewCallback(forwardLog))
	if err := sane(llama.ContextDefaultParams()); err != nil {
		return nil, true, err
	}
	llama.Init()
	if llama.GGMLBackendDeviceCount() == 0 {
		return nil, true, fmt.Errorf("%w: no compute backend for this processor in %s", ErrLibrary, dir)
	}
	return lib, false, nil
}

// sane recognises a release whose structs are shifted against the binding's: its
// symbols all exist, and its defaults land in the wrong fields.
func sane(p llama.ContextParams) error {
	if p.TypeK == llama.GGMLTypeF16 && p.TypeV == llama.GGMLTypeF16 && p.AbortCallback == 0 &&
		p.AbortCallbackData == 0 && p.Offload_kqv == 1 && p.Embeddings == 0 && p.NSeqMax == 1 &&
		p.NBatch > 0 && p.NUbatch > 0 && p.NUbatch <= p.NBatch && p.KVUnified <= 1 && p.Samplers == 0 && p.NSamplers == 0 {
		return nil
	}
	return fmt.Errorf("%w: its default parameters make no sense (type_k=%d type_v=%d offload_kqv=%d n_batch=%d n_seq_max=%d): "+
		"another release than the Go binding's", ErrLibrary, p.TypeK, p.TypeV, p.Offload_kqv, p.NBatch, p.NSeqMax)
}

func symbolsOf(lib string) []string {
	var names []string
	for line := range strings.Lines(symbolList) {
		if l, sym, ok := strings.Cut(strings.TrimSpace(line), " "); ok && l == lib {
			names = append(names, sym)
		}
	}
	return names
}

// describe names the build: versions as the library tells them and the start of the
// SHA-256 of its main file, because the KV block format may differ between builds of
// one version.
func describe(main, base *dynlib.Lib) (string, error) {
	version := func(l *dynlib.Lib, symbol string) string {
		var f func() string
		if l.Func(&f, symbol) != nil {
			return "unknown"
		}
		return f()
	}
	f, err := os.Open(main.Path)
	if err != nil {
		return "", fmt.Errorf("fingerprint engine library: %w", err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("fingerprint engine library: %w", err)
	}
	return fmt.Sprintf("llamacpp %s (ggml %s, sha256:%s)", version(main, "llama_version"),
		version(base, "ggml_version"), hex.EncodeToString(h.Sum(nil))[:16]), nil
}

// logSink is where the library's lines go; nil drops them. It is one a process, like
// the library: the last Open with a logger sets it.
var logSink atomic.Pointer[slog.Logger]

// logPart joins the pieces of a line; the library calls from several threads.
var logPart struct {
	sync.Mutex
	text strings.Builder
}

const maxLogLine = 4096

// forwardLog is called by the library. It must not block or panic. The library's own
// debug lines, thousands a context, are dropped.
func forwardLog(level int32, text *byte, _ uintptr) uintptr {
	log := logSink.Load()
	if log == nil || text == nil || level == int32(llama.LogLevelDebug) || !log.Enabled(context.Background(), slog.LevelDebug) {
		return 0
	}
	logPart.Lock()
	defer logPart.Unlock()
	s := goString(text)
	if logPart.text.Len() < maxLogLine {
		logPart.text.WriteString(s)
	}
	if strings.HasSuffix(s, "\n") {
		log.Debug(strings.TrimSpace(logPart.text.String()), "source", "llama.cpp", "level_there", level)
		logPart.text.Reset()
	}
	return 0
}

// goString copies a C string.
func goString(p *byte) string {
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(p), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(p, n))
}
