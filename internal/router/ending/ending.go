// Package ending has a context that costs little to make, to watch and to leave: a router makes two for each request, and watches them from several sides.
//
// It has no deadline, no values and no parent; who wants one lets a [Hook] of the parent end it. Its error is what it was ended with, and so is [context.Cause].
// Package context's functions take it as any context, and hear of its end without a goroutine, see [Context.AfterFunc].
package ending

import (
	"context"
	"sync"
	"time"
)

// Context ends when End is first called. The zero value is ready, and must not be copied. Its methods are safe for concurrent use.
type Context struct {
	mu    sync.Mutex
	done  chan struct{} // made when it is first asked for
	err   error         // what it has ended with; nil: it has not
	first *Hook         // of those that wait for the end
}

var _ context.Context = (*Context)(nil)

// Hook is a function that is to run when a Context ends. It belongs to at most one at a time.
type Hook struct {
	Run        func() // in a goroutine of its own, once
	prev, next *Hook
	on         bool
}

// End ends the context with err, which is not nil, unless it has ended.
func (c *Context) End(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	c.err = err
	if c.done != nil {
		close(c.done)
	}
	for h := c.first; h != nil; {
		next := h.next
		h.prev, h.next, h.on = nil, nil, false
		go h.Run()
		h = next
	}
	c.first = nil
}

// Watch has h run when the context ends; at once if it has ended.
func (c *Context) Watch(h *Hook) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		go h.Run()
		return
	}
	h.on, h.next = true, c.first
	if c.first != nil {
		c.first.prev = h
	}
	c.first = h
}

// Unwatch takes h back. false: it runs, has run, or was never given.
func (c *Context) Unwatch(h *Hook) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !h.on {
		return false
	}
	if h.prev == nil {
		c.first = h.next
	} else {
		h.prev.next = h.next
	}
	if h.next != nil {
		h.next.prev = h.prev
	}
	h.prev, h.next, h.on = nil, nil, false
	return true
}

// AfterFunc is [context.AfterFunc], which calls it.
func (c *Context) AfterFunc(f func()) (stop func() bool) {
	h := &Hook{Run: f}
	c.Watch(h)
	return func() bool { return c.Unwatch(h) }
}

// Deadline implements [context.Context]: there is none.
func (*Context) Deadline() (at time.Time, ok bool) { return at, false }

// Value implements [context.Context]: there is none.
func (*Context) Value(any) any { return nil }

// Err is what the context has ended with; nil: it has not.
func (c *Context) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Done implements [context.Context].
func (c *Context) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done == nil {
		c.done = make(chan struct{})
		if c.err != nil {
			close(c.done)
		}
	}
	return c.done
}
