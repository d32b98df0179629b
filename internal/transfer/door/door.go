// Package door takes a target's connections from its listener and holds those that have not yet said what they want.
package door

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// The pause after an error of accept, which doubles while errors follow each other.
const (
	shortest = 5 * time.Millisecond
	longest  = time.Second
)

// Config of a door; all of it is needed.
type Config[C comparable] struct {
	Listener io.Closer
	Accept   func() (C, error) // the listener's
	Limit    int               // connections that may be at the door at once
	Refused  *atomic.Uint64    // counts those that were too many
	Refuse   func(C)           // closes one
	Serve    func(C)           // takes over one, on a goroutine of its own
	Go       func(func())      // starts goroutines that the target waits for
}

// Door is the door of one target. A connection is at it from Accept until Pass.
type Door[C comparable] struct {
	cfg  Config[C]
	done chan struct{} // closed by Close; wakes the accept loop out of a pause

	mu     sync.Mutex // innermost; Refuse is called under it
	closed bool
	at     map[C]struct{}
}

// New makes an open door.
func New[C comparable](cfg Config[C]) *Door[C] {
	return &Door[C]{cfg: cfg, done: make(chan struct{}), at: make(map[C]struct{})}
}

// Run lets connections in until Close.
func (d *Door[C]) Run() { accept(d.cfg.Accept, d.done, d.admit) }

// admit hands c to Serve, or refuses it.
func (d *Door[C]) admit(c C) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || len(d.at) >= d.cfg.Limit {
		if !d.closed {
			d.cfg.Refused.Add(1)
		}
		d.cfg.Refuse(c)
		return
	}
	d.at[c] = struct{}{}
	d.cfg.Go(func() { d.cfg.Serve(c) })
}

// Pass takes c, whose end is its server's from here on, from the door. False: the door is closed, and may have
// refused c. Idempotent.
func (d *Door[C]) Pass(c C) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.at, c)
	return !d.closed
}

// Close refuses who is at the door and closes the listener. Once.
func (d *Door[C]) Close() error {
	d.mu.Lock()
	d.closed = true
	close(d.done)
	for c := range d.at {
		d.cfg.Refuse(c)
	}
	d.mu.Unlock()
	if err := d.cfg.Listener.Close(); err != nil {
		return fmt.Errorf("close listener: %w", err)
	}
	return nil
}

// accept gives admit each connection that next returns, one after the other, until the listener is closed or
// done is. An error such as too many open files is waited out, so that the loop never dies before its target.
func accept[C any](next func() (C, error), done <-chan struct{}, admit func(C)) {
	pause := shortest
	for {
		c, err := next()
		if err == nil {
			pause = shortest
			admit(c)
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		select {
		case <-done:
			return
		case <-time.After(pause):
			pause = min(2*pause, longest)
		}
	}
}
