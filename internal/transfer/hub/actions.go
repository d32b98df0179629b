package hub

import "sync"

// actions is one goroutine that runs functions in order. It takes what must not run
// under a room's lock or inside a transport's callback. The functions do not block on peers.
type actions struct {
	mu     sync.Mutex
	more   *sync.Cond
	q      []func()
	closed bool
	ended  bool // run has returned, or is about to without looking at q again
	done   chan struct{}
}

func newActions() *actions {
	a := &actions{done: make(chan struct{})}
	a.more = sync.NewCond(&a.mu)
	go a.run()
	return a
}

func (a *actions) run() {
	defer close(a.done)
	a.mu.Lock()
	defer a.mu.Unlock()
	for {
		for len(a.q) == 0 {
			if a.closed {
				a.ended = true
				return
			}
			a.more.Wait()
		}
		f := a.q[0]
		a.q = a.q[1:]
		a.mu.Unlock()
		f()
		a.mu.Lock()
	}
}

// do enqueues f and never waits: the caller may hold a lock that a queued function wants. Once
// the goroutine has ended, f runs at once; then nothing else runs beside it that minds.
func (a *actions) do(f func()) {
	a.mu.Lock()
	if a.ended {
		a.mu.Unlock()
		f()
		return
	}
	a.q = append(a.q, f)
	a.more.Signal()
	a.mu.Unlock()
}

// close runs what is queued, also by those queued functions, and waits.
func (a *actions) close() {
	a.mu.Lock()
	a.closed = true
	a.more.Signal()
	a.mu.Unlock()
	<-a.done
}
