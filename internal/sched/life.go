package sched

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// life is one live request: its context, its phase, its first cause and the events
// its consumer has not taken. It is the [Stream].
//
// How a request ends: fail stores the first cause and ends ctx. The request's driver
// goroutine sees ctx end, lets go of everything (the room, the engine's memory by
// way of the loop) and closes ended. A request that finished well ends the same way,
// without a cause. There is no other way out.
type life struct {
	req    *Request
	side   room.Side
	census *census
	// ctx ends with the request: by its deadline, its client, or fail.
	ctx  context.Context
	stop context.CancelFunc
	// over is closed by the engine loop when it holds nothing of the request any
	// more and never will again.
	over     chan struct{}
	released bool // over is closed; loop only

	mu       sync.Mutex
	phase    phase
	times    Phases
	events   []Event
	finished int // choices whose Finish was pushed
	cause    *room.Cause
	roomed   bool // a room was opened: the hub logs its failure
	tokens   int  // generated, for metrics

	wake  chan struct{} // capacity 1: events, cause or end
	ended chan struct{} // closed by the driver
}

var _ Stream = (*life)(nil)

func newLife(parent context.Context, r *Request, side room.Side, c *census, first phase) *life {
	ctx, stop := context.WithDeadline(parent, r.Deadline)
	l := &life{
		req: r, side: side, census: c, ctx: ctx, stop: stop, phase: first,
		over: make(chan struct{}), wake: make(chan struct{}, 1), ended: make(chan struct{}),
	}
	l.times.Submitted = time.Now()
	c[first].Add(1)
	return l
}

// dead reports whether the request must not use the engine any more.
func (l *life) dead() bool { return l.ctx.Err() != nil }

func (l *life) key() room.Key {
	if l.req.Bootstrap == nil {
		return room.Key{}
	}
	return l.req.Bootstrap.Key
}

// enter moves the request to a phase; after phaseEnded it stays there.
func (l *life) enter(p phase) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.phase == phaseEnded || l.phase == p {
		return
	}
	l.census[l.phase].Add(-1)
	l.phase = p
	if p != phaseEnded {
		l.census[p].Add(1)
	}
}

// mark sets one of the request's times if it is not set yet.
func (l *life) mark(f func(*Phases) *time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t := f(&l.times); t.IsZero() {
		*t = time.Now()
	}
}

// fail ends the request with cause c unless it has ended or failed before. Missing
// fields of c are filled in; c itself is not changed.
func (l *life) fail(c *room.Cause) {
	l.mu.Lock()
	if l.cause == nil && l.finished < l.req.N && l.phase != phaseEnded {
		full := *c
		if full.Side == 0 {
			full.Side = l.side
		}
		if full.Phase == "" {
			full.Phase = l.phase.String()
		}
		if full.Key == (room.Key{}) {
			full.Key = l.key()
		}
		if !l.times.FirstToken.IsZero() {
			full.Retryable = false // the client may have seen a part of the answer
		}
		l.cause = &full
	}
	failed := l.cause != nil
	l.mu.Unlock()
	if failed {
		l.stop()
		l.notify()
	}
}

// failCtx turns the end of ctx into a cause, if nothing has before.
func (l *life) failCtx() {
	err := context.Cause(l.ctx)
	var c *room.Cause
	switch {
	case errors.As(err, &c):
	case errors.Is(err, context.DeadlineExceeded):
		l.mu.Lock()
		where, took := l.phase, time.Since(l.times.Submitted)
		l.mu.Unlock()
		c = &room.Cause{Code: room.CodeDeadline, Detail: fmt.Sprintf("the request's deadline passed after %s while it %s", took.Round(time.Millisecond), where.doing())}
	default:
		c = &room.Cause{Code: room.CodeClientGone, Detail: "the client ended the request"}
	}
	l.fail(c)
}

// push hands an event to the consumer; after a failure it is dropped. A Finish
// ends the choice; the last one makes the request safe from fail.
func (l *life) push(ev Event) {
	l.mu.Lock()
	if l.cause == nil && l.phase != phaseEnded {
		l.events = append(l.events, ev)
		if ev.Finish != "" {
			l.finished++
		}
	}
	l.mu.Unlock()
	l.notify()
}

func (l *life) notify() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// failure is the first cause, or nil.
func (l *life) failure() *room.Cause {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cause
}

// Next implements [Stream].
func (l *life) Next(ctx context.Context) (Event, error) {
	for {
		l.mu.Lock()
		switch {
		case len(l.events) > 0:
			ev := l.events[0]
			l.events = l.events[1:]
			l.mu.Unlock()
			return ev, nil
		case l.cause != nil:
			defer l.mu.Unlock()
			return Event{}, l.cause
		case l.phase == phaseEnded:
			l.mu.Unlock()
			return Event{}, io.EOF
		}
		l.mu.Unlock()
		select {
		case <-l.wake:
		case <-l.ended:
		case <-ctx.Done():
			return Event{}, ctx.Err()
		}
	}
}

// Cancel implements [Stream].
func (l *life) Cancel(c *room.Cause) {
	if c == nil {
		c = &room.Cause{Code: room.CodeAborted, Detail: "the request was cancelled"}
	}
	l.fail(c)
}

// Close implements [Stream].
func (l *life) Close() {
	l.fail(&room.Cause{Code: room.CodeClientGone, Detail: "the client closed the stream"})
	<-l.ended
}

// Phases implements [Stream].
func (l *life) Phases() Phases {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.times
	t.Chunks = slices.Clone(t.Chunks) // the last one may still grow
	return t
}

// chunkTime notes a chunk of the prompt.
func (l *life) chunkTime(from, to time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(l.times.Chunks); n == maxChunkTimes {
		l.times.Chunks[n-1].To = to
		return
	}
	l.times.Chunks = append(l.times.Chunks, ChunkTime{from, to})
}

// firstToken notes the request's first token, once.
func (l *life) firstToken(m *metrics, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.times.FirstToken.IsZero() {
		l.times.FirstToken = now
		m.ttft.Observe(now.Sub(l.times.Submitted).Seconds())
	}
}

func (l *life) countToken() {
	l.mu.Lock()
	l.tokens++
	l.mu.Unlock()
}
