package room

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestChaos runs hundreds of rooms on both sides at once, through two registries with a
// network of goroutines between them: late, doubled and reordered messages, broken writes,
// cancels, drops, aborts before the room exists, sessions that end in the middle, transports
// that fence and transports that only drain. Afterwards every promise of design's list
// that can be seen here is checked. -seed repeats the random decisions.
func TestChaos(t *testing.T) {
	s := *seed
	if s == 0 {
		s = rand.Uint64()
	}
	synctest.Test(t, func(t *testing.T) { newChaos(t, s).run(400) })
}

// chaos is one world. Time is the bubble's.
type chaos struct {
	t        *testing.T
	seed     uint64
	snd, rcv *Registry
	sessions [5]*chaosSession
	wg       sync.WaitGroup // every goroutine but the registries'
}

// chaosSession is what some rooms share. After down nothing is delivered.
type chaosSession struct {
	mu   sync.Mutex
	down bool
}

func (s *chaosSession) alive() bool { s.mu.Lock(); defer s.mu.Unlock(); return !s.down }

// chaosRoom is the shell of a room on both sides; decisions are made before it starts, so
// that they depend on the seed alone.
type chaosRoom struct {
	c       *chaos
	key     Key
	chunks  int
	session *chaosSession
	fences  bool // the transport's revoke is a fence
	rng     *rand.Rand

	mu        sync.Mutex // rng and everything below
	revoked   bool
	closed    bool // the session is closed at the transport: writes begun from now on break
	freed     bool
	landed    []int
	inFlight  int // writes that may store bytes
	terminals [3]int
	forgets   [3]int
	acks      int
}

func newChaos(t *testing.T, seed uint64) *chaos {
	c := &chaos{t: t, seed: seed}
	bounds := map[State]time.Duration{StateBootstrapping: 3 * time.Second, StateTransferring: 2 * time.Second}
	c.snd = NewRegistry(Config{Side: SideSender, Log: quiet(), Bounds: bounds, Shards: 4,
		Execute: func(r *Room, e Event, fx Effects) []Event { return r.Value().(*chaosRoom).sender(r, fx) }})
	c.rcv = NewRegistry(Config{Side: SideReceiver, Log: quiet(), Bounds: bounds, Shards: 4,
		Execute: func(r *Room, e Event, fx Effects) []Event { return r.Value().(*chaosRoom).receiver(r, e, fx) }})
	for i := range c.sessions {
		c.sessions[i] = &chaosSession{}
	}
	return c
}

func (c *chaos) errorf(format string, args ...any) {
	c.t.Errorf("seed %d: "+format, append([]any{c.seed}, args...)...)
}

func (c *chaos) run(n int) {
	defer c.snd.Close()
	defer c.rcv.Close()
	rng := rand.New(rand.NewPCG(c.seed, 1))
	rooms := make([]*chaosRoom, n)
	for i := range rooms {
		r := &chaosRoom{c: c, key: Key{Room: uint64(i / 2), Gen: uint32(i % 2)}, chunks: 1 + rng.IntN(4),
			session: c.sessions[rng.IntN(len(c.sessions))], fences: rng.IntN(2) == 0, rng: rand.New(rand.NewPCG(c.seed, uint64(i)))}
		rooms[i] = r
		c.after(r.ms(2000), r.openSender)
		c.after(r.ms(2000), r.openReceiver)
		if r.chance(4) {
			c.after(r.ms(4000), func() { r.apply(c.rcv, Event{Kind: EvCancel, Cause: &Cause{Code: CodeClientGone}}) })
		}
		if r.chance(8) {
			c.after(r.ms(4000), func() { r.apply(c.snd, Event{Kind: EvCancel, Cause: &Cause{Code: CodeEngine}}) })
		}
		if r.chance(8) {
			c.after(r.ms(4000), r.abort)
		}
	}
	for i, s := range c.sessions {
		if i%2 == 0 {
			c.after(time.Duration(rng.IntN(4000))*time.Millisecond, func() { c.end(s, rooms) })
		}
	}
	ctx, stop := context.WithTimeout(c.t.Context(), time.Minute)
	defer stop()
	c.wg.Wait()
	// What a lost session leaves in quarantine was fenced; nothing else may be left.
	if err := errors.Join(c.snd.Drain(ctx), c.rcv.Drain(ctx)); err != nil {
		c.errorf("%v", err)
	}
	synctest.Wait()
	for _, r := range rooms {
		r.check()
	}
	checkIdleAfterRelease(c.t, c.snd)
	checkIdleAfterRelease(c.t, c.rcv)
	snd, rcv := c.snd.Stats(), c.rcv.Stats()
	c.t.Logf("seed %d: sender %d of %d, %v; receiver %d of %d, %v", c.seed, snd.Succeeded, snd.Opened, snd.Failed, rcv.Succeeded, rcv.Opened, rcv.Failed)
	if rcv.Succeeded < uint64(n/20) || len(rcv.Failed) < 3 || len(snd.Failed) < 3 {
		c.errorf("too tame to prove anything")
	}
}

func (c *chaos) after(d time.Duration, f func()) {
	c.wg.Go(func() {
		<-time.After(d)
		f()
	})
}

func (r *chaosRoom) ms(n int) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return time.Duration(r.rng.IntN(n*1000)) * time.Microsecond
}

func (r *chaosRoom) chance(n int) bool { r.mu.Lock(); defer r.mu.Unlock(); return r.rng.IntN(n) == 0 }

// send delivers f late, perhaps twice, unless the session has ended by then.
func (r *chaosRoom) send(f func()) {
	for range 1 + map[bool]int{true: 1}[r.chance(5)] {
		r.c.after(r.ms(200), func() {
			if r.session.alive() {
				f()
			}
		})
	}
}

func (r *chaosRoom) apply(g *Registry, e Event) {
	if room := g.Get(r.key); room != nil {
		room.Apply(e)
	}
}

// own is the owner: it waits for the end, and lets go, sometimes before.
func (r *chaosRoom) own(room *Room) {
	if r.chance(10) {
		r.c.after(r.ms(3000), func() { room.Apply(Event{Kind: EvRelease}) })
	}
	r.c.wg.Go(func() {
		<-room.Done()
		if !isClosed(room.Granted()) || !room.State().Terminal() || (room.Cause() == nil) != (room.State() == StateSuccess) {
			r.c.errorf("room %v woke its owner in %v with cause %v", r.key, room.State(), room.Cause())
		}
		<-time.After(r.ms(500))
		room.Apply(Event{Kind: EvRelease})
	})
}

func (r *chaosRoom) openSender() {
	room, err := r.c.snd.Open(r.key, time.Now().Add(4*time.Second), r.chunks, r)
	if err != nil {
		r.c.errorf("open sender: %v", err)
		return
	}
	r.own(room)
	r.c.wg.Go(func() {
		<-room.Granted()
		for i := range r.chunks { // one connection, so the writes are in order
			<-time.After(r.ms(100))
			if r.chance(40) {
				room.Apply(Event{Kind: EvDrop, Chunk: i})
				return
			}
			if !room.Apply(Event{Kind: EvBegin, Chunk: i}).Has(FxWrite) {
				return
			}
			r.mu.Lock()
			r.inFlight++
			late := r.closed
			r.mu.Unlock()
			<-time.After(r.ms(300))
			r.write(room, i, late)
		}
	})
}

// write stores chunk i unless it breaks, and settles.
func (r *chaosRoom) write(room *Room, i int, broken bool) {
	broken = broken || r.chance(40)
	r.mu.Lock()
	broken = broken || r.fences && r.revoked
	if !broken && r.freed {
		r.c.errorf("room %v: chunk %d was stored into freed pages", r.key, i)
	}
	r.mu.Unlock()
	if !broken {
		r.apply(r.c.rcv, Event{Kind: EvLanded, Chunk: i, Last: i == r.chunks-1})
	}
	r.mu.Lock()
	r.inFlight--
	r.mu.Unlock()
	if broken {
		room.Apply(Event{Kind: EvSettleError, Chunk: i})
	} else {
		room.Apply(Event{Kind: EvSettle, Chunk: i})
	}
}

func (r *chaosRoom) openReceiver() {
	room, err := r.c.rcv.Open(r.key, time.Now().Add(4*time.Second), r.chunks, r)
	if err != nil {
		r.c.errorf("open receiver: %v", err)
		return
	}
	r.own(room)
	if !r.session.alive() {
		room.Apply(Event{Kind: EvPeerLost})
		return
	}
	r.c.after(r.ms(100), func() {
		room.Apply(Event{Kind: EvGranted})
		if !r.session.alive() { // it ended between the grant and here, or before
			room.Apply(Event{Kind: EvPeerLost})
			r.fence()
		}
	})
}

// abort is the decode side's, at any time.
func (r *chaosRoom) abort() {
	c := &Cause{Code: CodeAborted, Side: SideReceiver, Detail: "chaos"}
	if room := r.c.rcv.Get(r.key); room != nil {
		room.Apply(Event{Kind: EvCancel, Cause: c})
	} else if r.session.alive() {
		r.c.snd.Abort(r.key, c)
	}
}

// sender executes under the room's lock.
func (r *chaosRoom) sender(room *Room, fx Effects) []Event {
	r.note(SideSender, fx)
	if fx.Has(FxSendFailed) {
		c := room.Cause()
		r.send(func() { r.apply(r.c.rcv, Event{Kind: EvRemoteFailed, Cause: c}) })
	}
	if fx.Has(FxSendAck) {
		if room.Outstanding() != 0 {
			r.c.errorf("room %v acked with %d writes outstanding", r.key, room.Outstanding())
		}
		r.send(r.ack)
	}
	return nil
}

func (r *chaosRoom) ack() {
	r.mu.Lock()
	if r.inFlight > 0 {
		r.c.errorf("room %v: ack arrives with %d writes in flight", r.key, r.inFlight)
	}
	r.acks++
	r.mu.Unlock()
	if room := r.c.rcv.Get(r.key); room != nil && room.State() == StateFailed {
		room.Apply(Event{Kind: EvAck})
	}
}

// receiver executes under the room's lock.
func (r *chaosRoom) receiver(room *Room, e Event, fx Effects) (more []Event) {
	r.note(SideReceiver, fx)
	if fx.Has(FxSendGrant) {
		r.send(r.grantArrives)
	}
	if fx.Has(FxSendAbort) {
		c := room.Cause()
		r.send(func() {
			if fx, known := r.c.snd.Abort(r.key, c); !known && fx.Has(FxSendAck) {
				r.send(r.ack)
			}
		})
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if fx.Has(FxLanded) {
		r.landed = append(r.landed, e.Chunk)
	}
	if fx.Has(FxRevoke) {
		r.revoked = true
		if r.fences && r.inFlight == 0 {
			more = append(more, Event{Kind: EvFenced})
		}
	}
	if fx.Has(FxFreeTransfer) {
		if r.freed {
			r.c.errorf("room %v: pages freed twice", r.key)
		}
		r.freed = true
	}
	return more
}

// grantArrives finds the sender, or waits for its request as the hub does.
func (r *chaosRoom) grantArrives() {
	if room := r.c.snd.Get(r.key); room != nil {
		room.Apply(Event{Kind: EvGrant})
		return
	}
	if c, ended := r.c.snd.Ended(r.key); ended {
		r.send(func() { r.apply(r.c.rcv, Event{Kind: EvRemoteFailed, Cause: c}) })
		return
	}
	r.c.after(10*time.Millisecond, func() {
		if r.session.alive() {
			r.grantArrives()
		}
	})
}

func (r *chaosRoom) note(side Side, fx Effects) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if fx.Has(FxTerminal) {
		r.terminals[side]++
	}
	if fx.Has(FxForget) {
		r.forgets[side]++
	}
}

// end of a session: both sides hear of it, and the receiver is fenced once no write of the
// session can store a byte any more.
func (c *chaos) end(s *chaosSession, rooms []*chaosRoom) {
	s.mu.Lock()
	s.down = true
	s.mu.Unlock()
	for _, r := range rooms {
		if r.session == s {
			r.apply(c.snd, Event{Kind: EvPeerLost})
			r.apply(c.rcv, Event{Kind: EvPeerLost})
			r.fence()
		}
	}
}

func (r *chaosRoom) fence() {
	r.c.wg.Go(func() {
		for {
			r.mu.Lock()
			r.closed = true // whoever is inside may still store
			left := r.inFlight
			r.mu.Unlock()
			if left == 0 {
				r.apply(r.c.rcv, Event{Kind: EvFenced})
				return
			}
			<-time.After(10 * time.Millisecond)
		}
	})
}

// check is after everything has ended.
func (r *chaosRoom) check() {
	for _, side := range []Side{SideSender, SideReceiver} {
		if r.terminals[side] != 1 || r.forgets[side] != 1 {
			r.c.errorf("room %v, %v: %d terminals, %d forgets", r.key, side, r.terminals[side], r.forgets[side])
		}
	}
	sent, okSent := r.c.snd.Ended(r.key)
	got, okGot := r.c.rcv.Ended(r.key)
	if !okSent || !okGot {
		r.c.errorf("room %v left no tombstone", r.key)
	}
	if (got == nil) != (len(r.landed) == r.chunks) {
		r.c.errorf("room %v: %d of %d chunks, cause %v", r.key, len(r.landed), r.chunks, got)
	}
	for i, n := range r.landed {
		if i != n {
			r.c.errorf("room %v: chunks landed as %v", r.key, r.landed)
		}
	}
	// The sender cannot succeed unless the bytes were stored; they may have come too late.
	if sent == nil && got != nil && got.Code == CodeTransferFailed {
		r.c.errorf("room %v: success on one side, %v on the other", r.key, got)
	}
	for _, c := range []*Cause{sent, got} {
		if c != nil && (c.Code == "" || c.Side == 0 || c.Phase == "" || c.Key != r.key || c.Detail == "" && c.Code != CodeClientGone && c.Code != CodeEngine) {
			r.c.errorf("room %v: incomplete cause %+v", r.key, c)
		}
	}
	if r.inFlight != 0 {
		r.c.errorf("room %v: %s", r.key, fmt.Sprint(r.inFlight, " writes in flight"))
	}
}
