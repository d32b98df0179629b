package sched

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// loop is the goroutine that owns an engine context. Others hand it functions with
// post; between two of its own turns it runs them in order. It sleeps when a turn
// found nothing to do, and wakes by a post: it never polls.
//
// An engine call runs inside call, which names the requests it works for. When all of
// them have ended, kick interrupts it.
type loop struct {
	wake chan struct{} // capacity 1
	gone chan struct{} // closed when the goroutine has returned

	mu     sync.Mutex
	inbox  []func()           // guarded by mu
	forWho []*life            // requests of the running engine call, guarded by mu
	cancel context.CancelFunc // of the running engine call, guarded by mu
	since  time.Time          // start of the current turn; zero: asleep; guarded by mu
	quit   bool               // guarded by mu
	dead   *room.Cause        // why the goroutine died; guarded by mu
}

func newLoop() *loop {
	return &loop{wake: make(chan struct{}, 1), gone: make(chan struct{})}
}

// post runs f on the loop's goroutine. After the loop's end f is dropped.
func (l *loop) post(f func()) {
	l.mu.Lock()
	if !l.quit && l.dead == nil {
		l.inbox = append(l.inbox, f)
	}
	l.mu.Unlock()
	l.poke()
}

func (l *loop) poke() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// kick tells the loop that a request has ended, and interrupts the engine if it
// works for nobody any more.
func (l *loop) kick() {
	l.mu.Lock()
	if l.cancel != nil && allDead(l.forWho) {
		l.cancel()
	}
	l.mu.Unlock()
	l.poke()
}

func allDead(ls []*life) bool {
	for _, l := range ls {
		if !l.dead() {
			return false
		}
	}
	return true
}

// call runs one engine call for these requests; loop goroutine only.
func (l *loop) call(who []*life, f func(context.Context) error) error {
	ctx, cancel := context.WithCancel(context.Background())
	l.mu.Lock()
	l.forWho, l.cancel = who, cancel
	if allDead(who) {
		cancel()
	}
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		l.forWho, l.cancel = nil, nil
		l.mu.Unlock()
		cancel()
	}()
	return f(ctx)
}

// stop ends the loop after its current turn and waits for it.
func (l *loop) stop() {
	l.mu.Lock()
	l.quit = true
	l.mu.Unlock()
	l.poke()
	<-l.gone
}

// run is the goroutine. turn does a bounded piece of work and reports whether there
// is more; after is called when it has returned; died hears of a panic and its stack, before gone closes.
func (l *loop) run(turn func() bool, after func(), died func(c *room.Cause, stack []byte)) {
	defer close(l.gone)
	defer func() {
		if p := recover(); p != nil {
			c := &room.Cause{Code: room.CodeEngine, Detail: fmt.Sprintf("the engine loop died: %v", p), Retryable: true}
			l.mu.Lock()
			l.dead, l.inbox = c, nil
			l.mu.Unlock()
			died(c, debug.Stack())
		}
	}()
	for {
		l.mu.Lock()
		todo, quit := l.inbox, l.quit
		l.inbox, l.since = nil, time.Now()
		l.mu.Unlock()
		if quit {
			return
		}
		for _, f := range todo {
			f()
		}
		more := turn() || len(todo) > 0
		after()
		if more {
			continue
		}
		l.mu.Lock()
		l.since = time.Time{}
		l.mu.Unlock()
		<-l.wake
	}
}

// healthy is nil while the loop lives and no turn of it takes longer than limit.
func (l *loop) healthy(limit time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dead != nil {
		return l.dead
	}
	if !l.since.IsZero() && time.Since(l.since) > limit {
		return &room.Cause{Code: room.CodeEngine, Detail: fmt.Sprintf("the engine has been busy with one call for %s", time.Since(l.since).Round(time.Millisecond))}
	}
	return nil
}
