package sglang

import "sync"

// actions runs functions in order on one goroutine, outside of room locks.
type actions struct {
	mu     sync.Mutex
	more   sync.Cond
	queue  []func()
	closed bool
	wg     sync.WaitGroup
}

func newActions() *actions {
	a := &actions{}
	a.more.L = &a.mu
	a.wg.Go(a.run)
	return a
}

func (a *actions) do(f func()) {
	a.mu.Lock()
	a.queue = append(a.queue, f)
	a.mu.Unlock()
	a.more.Signal()
}

func (a *actions) run() {
	for {
		a.mu.Lock()
		for len(a.queue) == 0 && !a.closed {
			a.more.Wait()
		}
		list := a.queue
		a.queue = nil
		a.mu.Unlock()
		if len(list) == 0 {
			return
		}
		for _, f := range list {
			f()
		}
	}
}

// close runs what is queued and ends. Later actions never run.
func (a *actions) close() {
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	a.more.Signal()
	a.wg.Wait()
}
