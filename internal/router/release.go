package router

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/openai"
)

const (
	// releaseTimeout bounds the telling of workers that an attempt has ended.
	releaseTimeout = 3 * time.Second
	// releaseAtOnce is how many such requests are at one worker at a time: one that does not answer them keeps no other's waiting.
	releaseAtOnce = 64
)

// group owns what outlives or must outlast its starter: members are goroutines started by spawn and
// attempts between enter and leave.
type group struct {
	mu     sync.Mutex
	closed bool
	wg     sync.WaitGroup
}

// enter makes the caller a member until it calls leave; false once the group is closed.
func (g *group) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.wg.Add(1)
	return true
}

func (g *group) leave() { g.wg.Done() }

// spawn starts f as a member. Only members may call it (the count is not 0 then, so that
// close still waits), and New, which precedes close.
func (g *group) spawn(f func()) { g.wg.Go(f) }

// close refuses new members and waits until none is left.
func (g *group) close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.wg.Wait()
}

// release tells both workers of an ended attempt to forget it, in the background. Legs that ended by
// themselves hold nothing any more: naming them could only hit another request of
// the same name.
func (r *Router) release(a *attempt) {
	for _, l := range []*leg{&a.prefill, &a.decode} {
		r.releaseLeg(l)
	}
}

// releaseLeg tells one of them.
func (r *Router) releaseLeg(l *leg) {
	if l.over.Load() || !l.w.aborts() || l.told.Swap(true) {
		return
	}
	for _, name := range l.a.names {
		r.group.spawn(func() { r.abortAt(l.w, name, l.a) })
	}
}

// abortAt posts one abort_request. The room makes sure that it cannot hit the client's next
// request, which may have the same id. A request that decode serves alone has no room, but an id of its own.
func (r *Router) abortAt(w *worker, rid string, a *attempt) {
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	result := "failed"
	select {
	case w.releases <- struct{}{}:
		defer func() { <-w.releases }()
		what := map[string]any{"rid": rid}
		if a.prefill.w != noWorker {
			what["bootstrap_room"] = a.rooms[0]
		}
		body, _ := openai.Marshal(what) // always marshals
		if got, err := w.ask(ctx, http.MethodPost, "/abort_request", body, drainLimit); err == nil && got.status/100 == 2 {
			result = "ok"
		}
	case <-ctx.Done():
	}
	r.rested(w) // it may have left, and nobody else closes the connection
	r.m.releases.WithLabelValues(w.side.String(), result).Inc()
}
