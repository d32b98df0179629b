package room

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"
)

// Config of a [Registry]. Only Side is needed.
type Config struct {
	// Side says which machine every room of this registry is.
	Side Side
	// Execute does what a step asks for. It runs under the room's lock, on whatever
	// goroutine applied the event: it must not block, must not apply an event to any
	// room, and may read the room. The events it returns are applied next, under the
	// same lock hold. nil: nothing is executed.
	Execute func(r *Room, e Event, fx Effects) []Event
	// Peer names the other worker for causes that do not; may be nil. Like Execute.
	Peer func(r *Room) string
	// TombstoneTTL is how long an ended room refuses its key, and how long an abort
	// waits for its room. 0: 60 s.
	TombstoneTTL time.Duration
	// Bounds limits the stay in a non-terminal state, besides the room's own
	// deadline. Absent or 0: no further bound.
	Bounds map[State]time.Duration
	// Shards is rounded up to a power of two. 0: 64.
	Shards int
	// MaxTombstones bounds each kind, ended and aborted; the oldest go first, each shard
	// holding its share. 0: 131072.
	MaxTombstones int
	// Observe sees every room's life; nil costs one comparison an event.
	Observe Observer
	// Log gets one line a failed room. nil: slog.Default().
	Log *slog.Logger
}

// Registry holds the rooms of one side. Safe for concurrent use.
//
// Lock order: a room's lock, then a shard's. The registry never holds two rooms'
// locks, nor calls out under a shard's.
type Registry struct {
	side    Side
	execute func(*Room, Event, Effects) []Event
	peer    func(*Room) string
	observe Observer
	ttl     time.Duration
	bounds  [StateSuccess + 1]time.Duration
	log     *slog.Logger
	base    time.Time // every stored time counts from here, on the monotonic clock
	shards  []shard
	shift   uint
	maxTomb int // of one kind in one shard

	live    atomic.Int64
	idle    idleGate
	counted counters

	armed  atomic.Int64  // when the deadline loop will wake by itself
	poke   chan struct{} // capacity 1: wake it earlier
	closed atomic.Bool
	stop   chan struct{}
	ended  chan struct{} // closed when the loop has returned
}

// shard holds the rooms whose keys hash to it; all fields under mu.
type shard struct {
	mu      sync.Mutex
	rooms   map[Key]*Room
	due     dueHeap
	endedAt graveyard // rooms that were forgotten; the cause is theirs
	aborted graveyard // aborts that came before their room
	_       [40]byte
}

// NewRegistry starts the deadline goroutine; Close ends it. It panics on a Side that
// has no machine.
func NewRegistry(c Config) *Registry {
	if c.Side != SideSender && c.Side != SideReceiver {
		panic(fmt.Sprintf("room: no machine for side %v", c.Side))
	}
	if c.TombstoneTTL <= 0 {
		c.TombstoneTTL = time.Minute
	}
	if c.Shards <= 0 {
		c.Shards = 64
	}
	if c.MaxTombstones <= 0 {
		c.MaxTombstones = 1 << 17
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	logShards := bits.Len(uint(c.Shards - 1))
	g := &Registry{
		side: c.Side, execute: c.Execute, peer: c.Peer, observe: c.Observe, ttl: c.TombstoneTTL, log: c.Log,
		base:   time.Now(),
		shards: make([]shard, 1<<logShards), shift: uint(64 - logShards),
		maxTomb: max(1, (c.MaxTombstones+1<<logShards-1)>>logShards),
		poke:    make(chan struct{}, 1), stop: make(chan struct{}), ended: make(chan struct{}),
	}
	for s, d := range c.Bounds {
		if s < StateSuccess && !s.Terminal() {
			g.bounds[s] = d
		}
	}
	for i := range g.shards {
		g.shards[i].rooms = make(map[Key]*Room)
	}
	g.armed.Store(math.MinInt64)
	go g.run()
	return g
}

// Close stops the deadline goroutine and waits for it. Rooms that are still live stay
// as they are; events can still be applied to them, only deadlines do not come any more.
// No room is made after it has returned.
func (g *Registry) Close() {
	if g.closed.CompareAndSwap(false, true) {
		for i := range g.shards { // an Open that saw false is done when its shard is free
			g.shards[i].mu.Lock()
			g.shards[i].mu.Unlock()
		}
		close(g.stop)
	}
	<-g.ended
}

// now is the time since base.
func (g *Registry) now() time.Duration { return time.Since(g.base) }

func (g *Registry) shard(k Key) *shard {
	h := (k.Room ^ uint64(k.Gen)<<40) * 0x9e3779b97f4a7c15
	return &g.shards[h>>g.shift]
}

// Open makes a room of chunks >= 1 chunks that ends by deadline. A key that is live or
// ended within TombstoneTTL is refused with CodeDuplicate; after Close every key is,
// with CodeShutdown. A room whose abort came first is born failed: Done is closed, and
// Execute has seen FxTerminal. Errors are *Cause.
func (g *Registry) Open(key Key, deadline time.Time, chunks int, value any) (*Room, error) {
	refuse := func(code Code, detail string) (*Room, error) {
		return nil, &Cause{Code: code, Side: g.side, Phase: "opening", Key: key, Detail: detail}
	}
	switch {
	case chunks < 1 || chunks > math.MaxInt32:
		return refuse(CodeInternal, fmt.Sprintf("a room of %d chunks", chunks))
	case deadline.IsZero():
		return refuse(CodeInternal, "a room without a deadline")
	}
	now := g.now()
	r := &Room{reg: g, key: key, value: value, opened: int64(now), deadline: int64(deadline.Sub(g.base)), heapAt: -1}
	if g.side == SideSender {
		r.snd = NewSender(chunks)
	} else {
		r.rcv = NewReceiver(chunks)
	}
	r.word.Store(uint64(StateBootstrapping))
	due := g.dueIn(r, StateBootstrapping, int64(now))
	r.due = due // others may move it once the room is in the map

	// Held across the insertion, so that whoever finds the room of an earlier abort
	// waits until it has failed.
	r.mu.Lock()
	sh := g.shard(key)
	sh.mu.Lock()
	if g.closed.Load() { // under the shard's lock: see Close
		sh.mu.Unlock()
		r.mu.Unlock()
		return refuse(CodeShutdown, "the worker is ending")
	}
	if sh.rooms[key] != nil {
		sh.mu.Unlock()
		r.mu.Unlock()
		return refuse(CodeDuplicate, "the room id is in use; a router must give each request a fresh bootstrap_room")
	}
	if _, ok := sh.endedAt.get(key, int64(now)); ok {
		sh.mu.Unlock()
		r.mu.Unlock()
		return refuse(CodeDuplicate, fmt.Sprintf("the room id ended less than %v ago; a router must give each request a fresh bootstrap_room", g.ttl))
	}
	early, abortedBefore := sh.aborted.take(key, int64(now))
	sh.rooms[key] = r
	g.live.Add(1)
	if !abortedBefore {
		sh.due.push(r)
	}
	sh.mu.Unlock()
	r.instance = g.counted.opened.Add(1)
	if g.observe != nil {
		g.observe.Opened(r, chunks)
	}
	failed := false
	if abortedBefore {
		// The abort was acked when it was remembered.
		_, failed = r.apply(Event{Kind: g.abortKind(), Cause: early}, ^(FxSendAck | FxSendAbort))
	}
	r.mu.Unlock()
	if failed {
		g.logFailed(r)
	}
	g.wakeFor(due)
	return r, nil
}

// abortKind is how the other side's failure reaches this side's machine.
func (g *Registry) abortKind() EventKind {
	if g.side == SideSender {
		return EvAbort
	}
	return EvRemoteFailed
}

// Get is the room under key, nil if there is none (not yet, or not any more).
func (g *Registry) Get(key Key) *Room {
	sh := g.shard(key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	return sh.rooms[key]
}

// Ended reports whether key ended within TombstoneTTL and is forgotten, and with which
// cause (nil: success).
func (g *Registry) Ended(key Key) (*Cause, bool) {
	sh := g.shard(key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	return sh.endedAt.get(key, int64(g.now()))
}

// Abort applies the other side's abort (sender) or failure (receiver) to the room
// under key and returns its effects and true. Without a room it returns false: a key that
// ended stays ended, any other is remembered, so that its room will be born failed.
// On the sender side the effects then hold FxSendAck, which nobody has executed:
// nothing is or will be outstanding, so the caller should ack.
func (g *Registry) Abort(key Key, c *Cause) (Effects, bool) {
	now := int64(g.now())
	sh := g.shard(key)
	sh.mu.Lock()
	r := sh.rooms[key]
	var fx Effects
	if r == nil {
		if g.side == SideSender {
			fx = FxSendAck
		}
		if _, ok := sh.endedAt.get(key, now); ok {
			fx |= FxStale
		} else if _, ok := sh.aborted.get(key, now); ok {
			fx |= FxDuplicate
		} else {
			evicted := sh.aborted.put(key, c, now+int64(g.ttl), g.maxTomb)
			g.counted.evicted.Add(uint64(evicted))
		}
	}
	sh.mu.Unlock()
	if r == nil {
		g.count(fx)
		g.wakeFor(now + int64(g.ttl+g.tombSlack()))
		return fx, false
	}
	return r.Apply(Event{Kind: g.abortKind(), Cause: c}), true
}

// Range calls f for every room until it returns false. Rooms opened or forgotten
// meanwhile may be missed or seen. No lock is held while f runs.
func (g *Registry) Range(f func(*Room) bool) {
	var rooms []*Room
	for i := range g.shards {
		sh := &g.shards[i]
		rooms = rooms[:0]
		sh.mu.Lock()
		for _, r := range sh.rooms {
			rooms = append(rooms, r)
		}
		sh.mu.Unlock()
		for _, r := range rooms {
			if !f(r) {
				return
			}
		}
	}
}

// forget drops a finished room and leaves its tombstone. Runs under the room's lock.
func (g *Registry) forget(r *Room) {
	if g.observe != nil {
		g.observe.Forgotten(r)
	}
	now := int64(g.now())
	sh := g.shard(r.key)
	sh.mu.Lock()
	delete(sh.rooms, r.key)
	evicted := sh.endedAt.put(r.key, r.Cause(), now+int64(g.ttl), g.maxTomb)
	sh.mu.Unlock()
	g.counted.evicted.Add(uint64(evicted))
	g.wakeFor(now + int64(g.ttl+g.tombSlack()))
	if g.live.Add(-1) == 0 {
		g.idle.open()
	}
}

// Drain waits until no room is live: every one terminal, drained and released. The caller
// stops opening rooms first.
func (g *Registry) Drain(ctx context.Context) error {
	for {
		ch := g.idle.next()
		left := g.live.Load()
		if left == 0 {
			return nil
		}
		select {
		case <-ch:
		case <-ctx.Done():
			return fmt.Errorf("drain the %v rooms, %d still live: %w", g.side, left, context.Cause(ctx))
		}
	}
}

// idleGate wakes those that wait for the last room.
type idleGate struct {
	mu sync.Mutex
	ch chan struct{} // nil: nobody waits
}

func (i *idleGate) next() <-chan struct{} {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.ch == nil {
		i.ch = make(chan struct{})
	}
	return i.ch
}

func (i *idleGate) open() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.ch != nil {
		close(i.ch)
		i.ch = nil
	}
}

// logFailed writes the one line of a failed room; without any lock.
func (g *Registry) logFailed(r *Room) {
	c := r.Cause()
	level := slog.LevelWarn
	switch c.Code {
	case CodeAborted, CodeClientGone, CodeShutdown:
		level = slog.LevelInfo
	}
	g.log.LogAttrs(context.Background(), level, "room failed",
		slog.Uint64("room", r.key.Room), slog.Uint64("generation", uint64(r.key.Gen)),
		slog.String("side", g.side.String()), slog.String("phase", c.Phase),
		slog.String("cause", string(c.Code)), slog.String("found_by", c.Side.String()),
		slog.String("peer", c.Peer), slog.String("detail", c.Detail))
}
