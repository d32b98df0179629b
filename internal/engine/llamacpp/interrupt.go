package llamacpp

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/baton-pd/baton/internal/engine"
)

// interrupt stops a running computation when its context ends. The library asks
// strlen(page): 0 goes on, 1 stops.
type interrupt struct {
	page []byte         // mapped, not Go memory: the library keeps its address
	word *atomic.Uint32 // the first four bytes of page

	mu  sync.Mutex
	gen uint64 // guarded by mu; the computation that word is for. A late wake-up of an earlier one changes nothing
}

func newInterrupt() (*interrupt, error) {
	page, err := syscall.Mmap(-1, 0, 4096, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("llamacpp: map the interrupt page: %w", err)
	}
	return &interrupt{page: page, word: (*atomic.Uint32)(unsafe.Pointer(&page[0]))}, nil
}

func (in *interrupt) address() uintptr { return uintptr(unsafe.Pointer(&in.page[0])) }

// arm lets the end of ctx stop the computation that follows, until disarm.
func (in *interrupt) arm(ctx context.Context) (stop func() bool) {
	gen := in.next()
	return context.AfterFunc(ctx, func() { in.fire(gen) })
}

func (in *interrupt) disarm(stop func() bool) {
	stop()
	in.next()
}

// next ends a computation, and lets the one begin whose number it gives.
func (in *interrupt) next() uint64 {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.gen++
	in.word.Store(0)
	return in.gen
}

// fire stops computation gen, if it is the present one.
func (in *interrupt) fire(gen uint64) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.gen == gen {
		in.word.Store(1) // bytes 01 00 00 00: a string of length 1
	}
}

// free unmaps the page; the library must have forgotten it.
func (in *interrupt) free() error { return syscall.Munmap(in.page) }

// interrupted is the error of a computation that ctx ended.
func interrupted(ctx context.Context) error {
	return fmt.Errorf("%w: %w", engine.ErrInterrupted, context.Cause(ctx))
}
