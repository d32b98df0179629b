package room

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func openRoom(t *testing.T, g *Registry, k Key, chunks int, value any) *Room {
	t.Helper()
	r, err := g.Open(k, time.Now().Add(time.Hour), chunks, value)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestFollowUps: what the executor returns is applied under the same lock hold, before
// anybody is woken, and Apply's answer is about its own event.
func TestFollowUps(t *testing.T) {
	var seen []string
	g := NewRegistry(Config{Side: SideReceiver, Log: quiet(), Execute: func(r *Room, e Event, fx Effects) []Event {
		seen = append(seen, fmt.Sprintf("%v %v/%v %v", e.Kind, r.State(), r.Drain(), fx))
		if isClosed(r.Done()) {
			t.Error("woken before the effects were executed")
		}
		if fx.Has(FxTerminal) && (r.State() != StateFailed || r.Cause() == nil) {
			t.Errorf("executed before it was published: %v", r.State())
		}
		if fx.Has(FxRevoke) {
			return []Event{{Kind: EvFenced}}
		}
		return nil
	}})
	defer g.Close()
	r := openRoom(t, g, Key{Room: 1}, 2, nil)
	granted, done := r.Granted(), r.Done()
	r.Apply(Event{Kind: EvGranted})
	<-granted
	if fx := r.Apply(Event{Kind: EvCancel}); fx != FxSendAbort|FxRevoke|FxTerminal {
		t.Errorf("own effects %v", fx)
	}
	<-done
	<-r.Done()
	want := []string{
		"granted waiting/live send_grant",
		"cancel failed/pending send_abort|revoke|terminal",
		"fenced failed/done free_transfer",
	}
	if !slices.Equal(seen, want) {
		t.Errorf("executed %q, want %q", seen, want)
	}
}

// TestEndlessExecutor: an executor that never stops asking is cut off, and reported.
func TestEndlessExecutor(t *testing.T) {
	var log bytes.Buffer
	calls := 0
	g := NewRegistry(Config{Side: SideSender, Log: slog.New(slog.NewTextHandler(&log, nil)), Execute: func(*Room, Event, Effects) []Event {
		calls++
		return []Event{{Kind: EvGrant}, {Kind: EvGrant}}
	}})
	defer g.Close()
	openRoom(t, g, Key{Room: 1}, 1, nil).Apply(Event{Kind: EvGrant})
	if calls != maxFollowUps+1 || !strings.Contains(log.String(), "executor never ends") {
		t.Errorf("%d calls, log %q", calls, log.String())
	}
}

// TestCauseIsCompleted: the room fills in what it knows and leaves the shared cause alone.
func TestCauseIsCompleted(t *testing.T) {
	g := NewRegistry(Config{Side: SideSender, Log: quiet(), Peer: func(r *Room) string { return r.Value().(string) }})
	defer g.Close()
	shared := &Cause{Code: CodePeerLost, Detail: "stream ended"}
	before := *shared
	for i, want := range []string{"10.0.0.1:1", "10.0.0.2:2"} {
		k := Key{Room: uint64(i), Gen: 3}
		r := openRoom(t, g, k, 1, want)
		r.Apply(Event{Kind: EvGrant})
		r.Apply(Event{Kind: EvPeerLost, Cause: shared})
		c := r.Cause()
		if *c != (Cause{Code: CodePeerLost, Side: SideSender, Phase: "waiting", Key: k, Peer: want, Detail: "stream ended"}) {
			t.Errorf("%+v", c)
		}
		if !errors.Is(c, &Cause{Code: CodePeerLost}) || errors.Is(c, &Cause{Code: CodeAborted}) {
			t.Error("a cause does not match its code")
		}
	}
	if *shared != before {
		t.Errorf("the shared cause was written to: %+v", shared)
	}
	r := openRoom(t, g, Key{Room: 9}, 4, "")
	r.Apply(Event{Kind: EvGrant})
	r.Apply(Event{Kind: EvBegin, Chunk: 0})
	r.Apply(Event{Kind: EvDrop, Chunk: 2})
	if c := r.Cause(); c.Code != CodeChunkDropped || !strings.Contains(c.Detail, "(chunk 2 of 4)") {
		t.Errorf("%+v", c)
	}
	remote := &Cause{Code: CodeEngine, Side: SideReceiver, Phase: "decoding", Key: Key{Room: 10}, Peer: "p:1", Retryable: true}
	r = openRoom(t, g, Key{Room: 10}, 1, "elsewhere")
	r.Apply(Event{Kind: EvAbort, Cause: remote})
	if *r.Cause() != *remote {
		t.Errorf("a complete cause was changed: %+v", r.Cause())
	}
}

// TestOneLineAFailedRoom: logged once, counted once, whatever comes later; a code that
// a peer invented is not a new counter.
func TestOneLineAFailedRoom(t *testing.T) {
	var log bytes.Buffer
	g := NewRegistry(Config{Side: SideSender, Log: slog.New(slog.NewTextHandler(&log, nil))})
	defer g.Close()
	for i, code := range []Code{CodeAborted, CodeEngine, "made_up"} {
		r := openRoom(t, g, Key{Room: uint64(i)}, 1, nil)
		r.Apply(Event{Kind: EvCancel, Cause: &Cause{Code: code}})
		r.Apply(Event{Kind: EvDeadline})
		r.Apply(Event{Kind: EvAbort})
		r.Apply(Event{Kind: EvRelease})
		r.Apply(Event{Kind: EvCancel})
	}
	if n := strings.Count(log.String(), "room failed"); n != 3 || strings.Count(log.String(), "\n") != 3 {
		t.Errorf("%d lines: %s", n, log.String())
	}
	s := g.Stats()
	if len(s.Failed) != 3 || s.Failed[CodeAborted] != 1 || s.Failed[CodeEngine] != 1 || s.Failed["other"] != 1 {
		t.Errorf("%v", s.Failed)
	}
	if s.LateCauses != 6 || s.Stale != 3 || s.Rooms() != 0 || s.Tombstones != 3 || s.Opened != 3 {
		t.Errorf("%+v", s)
	}
}

func TestOpenRefuses(t *testing.T) {
	g := NewRegistry(Config{Side: SideReceiver, Log: quiet()})
	later := time.Now().Add(time.Hour)
	try := func(k Key, deadline time.Time, chunks int) Code {
		_, err := g.Open(k, deadline, chunks, nil)
		var c *Cause
		if !errors.As(err, &c) || c.Side != SideReceiver || c.Key != k || c.Detail == "" {
			t.Errorf("error %#v", err)
			return ""
		}
		return c.Code
	}
	if _, err := g.Open(Key{Room: 1}, later, 1, nil); err != nil {
		t.Fatal(err)
	}
	for name, got := range map[string][2]Code{
		"live":        {try(Key{Room: 1}, later, 1), CodeDuplicate},
		"no chunk":    {try(Key{Room: 2}, later, 0), CodeInternal},
		"no deadline": {try(Key{Room: 2}, time.Time{}, 1), CodeInternal},
	} {
		if got[0] != got[1] {
			t.Errorf("%s: %q, want %q", name, got[0], got[1])
		}
	}
	g.Get(Key{Room: 1}).Apply(Event{Kind: EvRelease})
	if c := try(Key{Room: 1}, later, 1); c != CodeDuplicate {
		t.Errorf("ended: %q", c)
	}
	if c, ok := g.Ended(Key{Room: 1}); !ok || c == nil || c.Code != CodeAborted {
		t.Errorf("ended: %v %v", c, ok)
	}
	g.Close()
	g.Close()
	if c := try(Key{Room: 3}, later, 1); c != CodeShutdown {
		t.Errorf("closed: %q", c)
	}
	defer func() {
		if recover() == nil {
			t.Error("a registry without a machine was made")
		}
	}()
	NewRegistry(Config{Side: SideRouter})
}

// TestClosedStaysUsable: Close invents no events, and what is live can still end.
func TestClosedStaysUsable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewRegistry(Config{Side: SideSender, Log: quiet()})
		r, err := g.Open(Key{Room: 1}, time.Now().Add(time.Second), 1, nil)
		if err != nil {
			t.Fatal(err)
		}
		g.Close()
		<-time.After(time.Minute)
		if r.State() != StateBootstrapping {
			t.Errorf("%v", r.State())
		}
		r.Apply(Event{Kind: EvRelease})
		if err := g.Drain(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewRegistry(Config{Side: SideSender, Log: quiet()})
		defer g.Close()
		a, b := openRoom(t, g, Key{Room: 1}, 1, nil), openRoom(t, g, Key{Room: 2}, 1, nil)
		a.Apply(Event{Kind: EvGrant})
		a.Apply(Event{Kind: EvBegin})
		a.Apply(Event{Kind: EvRelease})
		b.Apply(Event{Kind: EvRelease})
		ctx, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		if err := g.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "1 still live") {
			t.Errorf("%v", err)
		}
		for range 3 {
			go func() {
				if err := g.Drain(t.Context()); err != nil {
					t.Error(err)
				}
			}()
		}
		synctest.Wait()
		a.Apply(Event{Kind: EvSettle})
		synctest.Wait() // the three return, or the bubble never ends
	})
}

func TestRange(t *testing.T) {
	g := NewRegistry(Config{Side: SideSender, Log: quiet()})
	defer g.Close()
	for i := range 500 {
		openRoom(t, g, Key{Room: uint64(i) << 20, Gen: uint32(i)}, 1, i)
	}
	seen := make(map[int]bool)
	g.Range(func(r *Room) bool { seen[r.Value().(int)] = true; return len(seen) < 300 })
	if len(seen) != 300 {
		t.Errorf("%d rooms seen", len(seen))
	}
	g.Range(func(r *Room) bool { r.Apply(Event{Kind: EvRelease}); return true }) // no lock is held
	if s := g.Stats(); s.Rooms() != 0 || s.Tombstones != 500 {
		t.Errorf("%+v", s)
	}
}

func TestTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewRegistry(Config{Side: SideSender, Log: quiet()})
		defer g.Close()
		<-time.After(time.Second)
		now, end := time.Now(), time.Now().Add(42*time.Second)
		r, err := g.Open(Key{Room: 1}, end, 1, nil)
		if err != nil {
			t.Fatal(err)
		}
		if !r.Opened().Equal(now) || !r.Deadline().Equal(end) || r.Key() != (Key{Room: 1}) {
			t.Errorf("%v %v %v", r.Opened(), r.Deadline(), r.Key())
		}
		<-time.After(3 * time.Second)
		if s := g.Stats(); s.OldestAge[StateBootstrapping] != 3*time.Second || s.Live[StateBootstrapping] != 1 {
			t.Errorf("%+v", s)
		}
	})
}

// TestDeadlinesAreExact: thousands of rooms with random deadlines and state changes end
// at the very moment that the limits say, and at the end nothing is left of them.
func TestDeadlinesAreExact(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const rooms = 3000
		bounds := map[State]time.Duration{StateBootstrapping: 40 * time.Second, StateWaitingForInput: 7 * time.Second}
		ends := make([]time.Time, rooms)
		g := NewRegistry(Config{Side: SideSender, Log: quiet(), Bounds: bounds, TombstoneTTL: time.Minute, Shards: 5,
			Execute: func(r *Room, e Event, fx Effects) []Event {
				if fx.Has(FxTerminal) && e.Kind == EvDeadline {
					ends[r.Value().(int)] = time.Now()
				}
				return nil
			}})
		defer g.Close()
		rng := rand.New(rand.NewPCG(1, 2))
		want := make([]time.Time, rooms)
		for i := range rooms {
			if i%10 == 0 {
				<-time.After(time.Duration(rng.IntN(1000)) * time.Millisecond)
			}
			now := time.Now()
			deadline := now.Add(time.Duration(rng.IntN(100_000)) * time.Millisecond)
			r, err := g.Open(Key{Room: uint64(i)}, deadline, 1, i)
			if err != nil {
				t.Fatal(err)
			}
			switch rng.IntN(4) {
			case 0: // stays in bootstrapping
				want[i] = earliest(deadline, now.Add(bounds[StateBootstrapping]))
			case 1: // granted: a shorter bound from now on
				r.Apply(Event{Kind: EvGrant})
				want[i] = earliest(deadline, now.Add(bounds[StateWaitingForInput]))
			case 2: // transferring: no bound but the deadline
				r.Apply(Event{Kind: EvGrant})
				r.Apply(Event{Kind: EvBegin})
				want[i] = deadline
			default: // ends by itself
				r.Apply(Event{Kind: EvCancel})
			}
		}
		<-time.After(2 * time.Minute)
		synctest.Wait()
		for i := range want {
			if !ends[i].Equal(want[i]) {
				t.Fatalf("room %d ended at %v, want %v", i, ends[i], want[i])
			}
		}
		checkIdleAfterRelease(t, g)
	})
}

func earliest(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// checkIdleAfterRelease settles and releases everything, lets the tombstones expire, and
// wants the memory of a new registry.
func checkIdleAfterRelease(t *testing.T, g *Registry) {
	t.Helper()
	g.Range(func(r *Room) bool {
		r.Apply(Event{Kind: EvRelease})
		for r.Outstanding() > 0 {
			r.Apply(Event{Kind: EvSettle})
		}
		return true
	})
	<-time.After(g.ttl + g.tombSlack() + time.Millisecond)
	synctest.Wait()
	s := g.Stats()
	if s.Rooms() != 0 || s.Tombstones != 0 || s.Outstanding != 0 || s.Undrained != 0 {
		t.Errorf("not idle: %+v", s)
	}
	for i := range g.shards {
		sh := &g.shards[i]
		if len(sh.rooms) != 0 || sh.due != nil || sh.endedAt.m != nil || sh.endedAt.q != nil || sh.aborted.m != nil {
			t.Errorf("shard %d is not idle: %d rooms, %d due", i, len(sh.rooms), len(sh.due))
		}
	}
	if n := g.armed.Load(); n != math.MaxInt64 {
		t.Errorf("the idle loop would wake at %v", time.Duration(n))
	}
}

func TestGraveyard(t *testing.T) {
	var y graveyard
	key := func(i int) Key { return Key{Room: uint64(i)} }
	evicted := 0
	for i := range 1000 {
		evicted += y.put(key(i), nil, int64(i+10), 100)
		if i%3 == 0 {
			if _, ok := y.take(key(i), int64(i)); !ok {
				t.Fatalf("key %d is not there", i)
			}
		}
		if len(y.q)-y.head > 100 || len(y.q) > 300 || len(y.m) > 100 {
			t.Fatalf("queue %d of %d, map %d", len(y.q)-y.head, len(y.q), len(y.m))
		}
	}
	if evicted == 0 || evicted > 667 {
		t.Errorf("%d evicted", evicted)
	}
	if _, ok := y.get(key(998), 1007); !ok {
		t.Error("forgotten too early")
	}
	if _, ok := y.get(key(998), 1008); ok {
		t.Error("remembered too long")
	}
	// A key that was taken and remembered again keeps its later end.
	y = graveyard{}
	y.put(key(1), nil, 10, 9)
	y.take(key(1), 5)
	y.put(key(1), nil, 20, 9)
	if next := y.expire(10); next != 20 {
		t.Errorf("next %d", next)
	}
	if _, ok := y.get(key(1), 19); !ok {
		t.Error("the first end buried the second life")
	}
	if next := y.expire(20); next != math.MaxInt64 || y.m != nil {
		t.Errorf("next %d, %d left", next, len(y.m))
	}
}

func TestHeap(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var h dueHeap
	live := make(map[*Room]bool)
	for range 5000 {
		switch r := anyRoom(live); {
		case r == nil || rng.IntN(3) > 0:
			r := &Room{due: rng.Int64N(1000), heapAt: -1}
			h.push(r)
			live[r] = true
		case rng.IntN(2) == 0:
			h.remove(r)
			h.remove(r) // once is enough
			delete(live, r)
		default:
			h.earlier(r, rng.Int64N(1000))
		}
	}
	for last := int64(-1); len(h) > 0; {
		top := h[0]
		if top.at < last || int(top.r.heapAt) != 0 {
			t.Fatalf("%d after %d, index %d", top.at, last, top.r.heapAt)
		}
		last = top.at
		h.remove(top.r)
		delete(live, top.r)
	}
	if len(live) != 0 || h != nil {
		t.Errorf("%d rooms were lost", len(live))
	}
}

func anyRoom(m map[*Room]bool) *Room {
	for r := range m {
		return r
	}
	return nil
}

// TestCosts holds what does not depend on the machine: memory of a live room, and that a
// step of a live room allocates nothing.
func TestCosts(t *testing.T) {
	const rooms = 50_000
	before := heapBytes()
	g := NewRegistry(Config{Side: SideSender, Log: quiet(), Execute: func(*Room, Event, Effects) []Event { return nil }})
	defer g.Close()
	live := make([]*Room, rooms)
	for i := range live {
		live[i] = openRoom(t, g, Key{Room: uint64(i)}, 1<<20, nil)
		_, _ = live[i].Done(), live[i].Granted()
	}
	if n := (heapBytes() - before - 8*rooms) / rooms; n > 640 {
		t.Errorf("%d bytes a live room with both channels in use, want 640 at most", n)
	}
	r := live[0]
	r.Apply(Event{Kind: EvGrant})
	i := 0
	if n := testing.AllocsPerRun(100, func() {
		r.Apply(Event{Kind: EvBegin, Chunk: i})
		r.Apply(Event{Kind: EvSettle, Chunk: i})
		i++
	}); n != 0 {
		t.Errorf("%v allocations a chunk", n)
	}
	if r.State() != StateTransferring || r.Outstanding() != 0 {
		t.Errorf("%v, %d outstanding", r.State(), r.Outstanding())
	}
}
