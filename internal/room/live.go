package room

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Room is one live machine of a [Registry]: the only thing that changes it is
// Apply, under its lock. Everything that is read without the lock is published in
// atomics, so no reader ever waits for an executor.
type Room struct {
	reg      *Registry
	key      Key
	value    any
	opened   int64 // nanoseconds since the registry's base, as every time here
	deadline int64

	// word is state, drain and outstanding writes, written under mu, read anywhere.
	word    atomic.Uint64
	cause   atomic.Pointer[Cause] // written under mu, once, before word says Failed
	granted gate                  // opened when the room leaves Bootstrapping
	done    gate                  // opened when the room is terminal

	mu  sync.Mutex
	snd Sender   // used if the registry's side is SideSender
	rcv Receiver // used otherwise
	due int64    // when EvDeadline comes: min(deadline, entry of this state + its bound)

	heapAt int32 // index in the shard's heap, -1: not in it; guarded by the shard's lock

	observed uint32 // steps that Observe has seen; under mu
	instance uint64 // which room of the registry, from 1; set by Open under mu
}

// maxFollowUps bounds the events that one event may bring about through Execute. The
// machines need two; more than this is an executor that never ends.
const maxFollowUps = 64

// Key is the room's name.
func (r *Room) Key() Key { return r.key }

// Value is what Open was given.
func (r *Room) Value() any { return r.value }

// Deadline is the absolute end of the room, whatever its state.
func (r *Room) Deadline() time.Time { return r.reg.base.Add(time.Duration(r.deadline)) }

// Opened is when the room was made.
func (r *Room) Opened() time.Time { return r.reg.base.Add(time.Duration(r.opened)) }

// State is a lock-free read. A room that reads Failed has its Cause.
func (r *Room) State() State { return State(r.word.Load() & 0xff) }

// Drain is what a terminal room still waits for; a lock-free read.
func (r *Room) Drain() Drain { return Drain(r.word.Load() >> 8 & 0xff) }

// Outstanding is the number of writes begun and not settled; 0 on the receiver
// side. A lock-free read.
func (r *Room) Outstanding() int { return int(r.word.Load() >> 32) }

// Cause is the first reason, complete with side, phase and key; nil unless the
// room has failed. Shared and read-only. A lock-free read.
func (r *Room) Cause() *Cause {
	if r.State() != StateFailed {
		return nil // it may be there already, a moment before the state
	}
	return r.cause.Load()
}

// Done is closed once, when the room is terminal and everything that follows from
// that was executed.
func (r *Room) Done() <-chan struct{} { return r.done.wait() }

// Granted is closed once, when the room leaves Bootstrapping, either way.
func (r *Room) Granted() <-chan struct{} { return r.granted.wait() }

// Apply gives the room one event, executes the effects, then the events that the
// executor returned, and returns the effects of e alone. It never blocks on more
// than the room's lock. Do not call it for the same room from inside Execute, nor
// while holding a lock that Execute takes.
func (r *Room) Apply(e Event) Effects {
	r.mu.Lock()
	fx, failed := r.apply(e, ^Effects(0))
	r.mu.Unlock()
	if failed {
		r.reg.logFailed(r)
	}
	return fx
}

// apply runs under r.mu. failed: the room has just failed, to be logged without the
// lock. mask takes effects away from e's own.
func (r *Room) apply(e Event, mask Effects) (own Effects, failed bool) {
	was := r.State()
	own, queue := r.one(e, mask)
	for n := 0; len(queue) > 0; n++ {
		if n == maxFollowUps {
			r.reg.log.Error("executor never ends; its events are dropped", "room", r.key.String(), "event", queue[0].Kind.String())
			break
		}
		_, more := r.one(queue[0], ^Effects(0))
		queue = append(queue[1:], more...)
	}
	now := r.State()
	if was == StateBootstrapping && now != was {
		r.granted.open()
	}
	if !was.Terminal() && now.Terminal() {
		r.done.open()
		failed = now == StateFailed
	}
	return own, failed
}

// one steps the machine, publishes, and executes.
func (r *Room) one(e Event, mask Effects) (fx Effects, more []Event) {
	before := r.word.Load()
	was := State(before & 0xff)
	var now State
	var drain Drain
	var out int
	var cause *Cause
	if r.reg.side == SideSender {
		r.snd, fx = r.snd.Step(e)
		now, drain, out, cause = r.snd.state, r.snd.drain, r.snd.Outstanding(), r.snd.cause
	} else {
		r.rcv, fx = r.rcv.Step(e)
		now, drain, cause = r.rcv.state, r.rcv.drain, r.rcv.cause
	}
	all := fx
	fx &= mask
	if now == StateFailed && was != StateFailed {
		r.cause.Store(r.complete(cause, e, was))
	}
	r.word.Store(uint64(now) | uint64(drain)<<8 | uint64(uint32(out))<<32)
	if r.reg.observe != nil {
		r.stepped(e, before, fx, all&^mask)
	}
	if now != was {
		r.reg.moved(r, now)
	}
	if fx == 0 {
		return fx, nil
	}
	r.reg.count(fx)
	if r.reg.execute != nil {
		more = r.reg.execute(r, e, fx)
	}
	if fx&FxForget != 0 {
		r.reg.forget(r)
	}
	return fx, more
}

// complete copies c and fills in what only the room knows.
func (r *Room) complete(c *Cause, e Event, was State) *Cause {
	full := *c
	if e.Cause == nil && (e.Kind == EvBegin || e.Kind == EvSettleError || e.Kind == EvDrop || e.Kind == EvLanded) {
		full.Detail = fmt.Sprintf("%s (chunk %d of %d)", full.Detail, e.Chunk, r.chunks())
	}
	if e.Cause == nil && e.Kind == EvDeadline {
		full.Detail = fmt.Sprintf("%s after %v", full.Detail, (r.reg.now() - time.Duration(r.opened)).Round(time.Millisecond))
	}
	if full.Code == "" {
		full.Code = CodeInternal
	}
	if full.Side == 0 {
		full.Side = r.reg.side
	}
	if full.Phase == "" {
		full.Phase = was.String()
	}
	if full.Key == (Key{}) {
		full.Key = r.key
	}
	if full.Peer == "" && r.reg.peer != nil {
		full.Peer = r.reg.peer(r)
	}
	return &full
}

func (r *Room) chunks() int {
	if r.reg.side == SideSender {
		return r.snd.Chunks()
	}
	return r.rcv.Chunks()
}

// gate is a channel that is made when somebody first waits for it, and closed once.
// Most rooms of a large queue are waited for by one goroutine or none, and an
// unmade channel saves 96 bytes.
type gate struct{ ch atomic.Value }

var opened = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

func (g *gate) wait() <-chan struct{} {
	c := g.ch.Load()
	if c == nil {
		if fresh := make(chan struct{}); g.ch.CompareAndSwap(nil, fresh) {
			return fresh
		}
		c = g.ch.Load()
	}
	return c.(chan struct{})
}

// open is called at most once.
func (g *gate) open() {
	if !g.ch.CompareAndSwap(nil, opened) {
		close(g.ch.Load().(chan struct{}))
	}
}
