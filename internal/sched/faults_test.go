package sched

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/room"
)

// K7: whatever a request is waiting for, it ends at its deadline and says where it was.
func TestDeadlineInEveryPhase(t *testing.T) {
	const limit = 3 * time.Second
	for _, c := range []struct {
		phase  string
		world  worldConfig
		setup  func(*world)
		decode bool // the request watched is on the decode worker
	}{
		{"bootstrapping", worldConfig{}, func(w *world) { w.hubs.noGrant = true }, true},
		{"bootstrapping", worldConfig{}, func(w *world) { w.hubs.noGrant = true }, false},
		{"transferring", worldConfig{}, func(w *world) { w.hubs.hold = true }, true},
		{"transferring", worldConfig{}, func(w *world) { w.hubs.hold = true }, false},
		{"prefilling", worldConfig{sim: sim.Config{PrefillChunkTime: time.Hour}}, nil, false},
		{"transferring", worldConfig{sim: sim.Config{PrefillChunkTime: time.Hour}}, nil, true},
		{"waiting", worldConfig{sim: sim.Config{PrefillChunkTime: time.Hour}, prefill: PrefillConfig{MaxActive: 1}}, func(w *world) { w.occupy(50) }, false},
		{"prealloc", worldConfig{sim: sim.Config{KVCells: 200}}, func(w *world) { w.hubs.noGrant = true; w.occupy(150) }, true},
		{"decoding", worldConfig{sim: sim.Config{StepTime: time.Hour}}, nil, true},
		// The older one keeps all cells and never ends.
		{"preempted", worldConfig{sim: sim.Config{KVCells: 260, StepTime: 100 * time.Millisecond}, decode: DecodeConfig{GrowReserve: 1}},
			func(w *world) { w.occupy(140) }, true},
	} {
		side := "prefill"
		if c.decode {
			side = "decode"
		}
		t.Run(c.phase+" "+side, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, c.world)
				defer w.close()
				if c.setup != nil {
					c.setup(w)
				}
				r := w.req(tokens(newRand(t, 3), 101), 100)
				later := *r // the other side's: whose deadline it is must be clear
				r.Deadline = time.Now().Add(limit)
				var s, other Stream
				var err, err2 error
				if c.decode {
					s, err = w.d.Submit(context.Background(), r)
					other, err2 = w.p.Submit(context.Background(), &later)
				} else {
					other, err2 = w.d.Submit(context.Background(), &later)
					s, err = w.p.Submit(context.Background(), r)
				}
				if err != nil || err2 != nil {
					t.Fatal(err, err2)
				}
				began := time.Now()
				a := read(t, s, 1)
				if a.err == nil || a.err.Code != room.CodeDeadline || a.err.Phase != c.phase {
					t.Errorf("ended with %v, want deadline in phase %s", a.err, c.phase)
				}
				if took := a.at.Sub(began); took != limit {
					t.Errorf("ended after %v, the deadline was %v", took, limit)
				}
				other.Close()
				w.leave()
			})
		})
	}
}

// occupy submits an older request of n tokens that is in the way; leave takes it away.
func (w *world) occupy(n int) {
	r := w.req(tokens(newRand(w.t, 77), n), 120)
	r.ID = "occupant"
	w.both(context.Background(), r)
	synctest.Wait()
}

func (w *world) leave() {
	for _, c := range []*core{&w.d.core, &w.p.core} {
		c.mu.Lock()
		l := c.live["occupant"]
		c.mu.Unlock()
		if l != nil {
			l.Close()
		}
	}
}

// A cancel ends a running engine call that works for nobody else, at once.
func TestCancelInterruptsTheEngine(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  sim.Config
		s    func(w *world, d, p Stream) Stream
	}{
		{"chunk", sim.Config{PrefillChunkTime: time.Hour}, func(_ *world, _, p Stream) Stream { return p }},
		{"step", sim.Config{StepTime: time.Hour}, func(_ *world, d, _ Stream) Stream { return d }},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, worldConfig{sim: c.cfg})
				defer w.close()
				r := w.req(tokens(newRand(t, 1), 200), 10)
				d, p := w.both(context.Background(), r)
				synctest.Wait()
				began := time.Now()
				s := c.s(w, d, p)
				s.Cancel(&room.Cause{Code: room.CodeAborted, Detail: "test"})
				s.Cancel(&room.Cause{Code: room.CodeInternal, Detail: "a later cause"})
				if a := read(t, s, 1); a.err == nil || a.err.Code != room.CodeAborted {
					t.Errorf("ended with %v", a.err)
				}
				if took := time.Since(began); took != 0 {
					t.Errorf("took %v", took)
				}
				d.Close()
				p.Close()
			})
		})
	}
}

func TestAStepGoesOnForTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: sim.Config{StepTime: 100 * time.Millisecond}})
		defer w.close()
		rng := newRand(t, 2)
		a, b := w.req(tokens(rng, 20), 5), w.req(tokens(rng, 20), 5)
		ad, ap := w.both(context.Background(), a)
		bd, bp := w.both(context.Background(), b)
		advance(150 * time.Millisecond)
		ad.Close()
		began := time.Now()
		w.check(b, read(t, bd, 1))
		if took := time.Since(began); took > 450*time.Millisecond {
			t.Errorf("the other row took %v", took)
		}
		ap.Close()
		bp.Close()
	})
}

func TestContextAndAbortEndARequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: sim.Config{StepTime: time.Second, PrefillChunkTime: time.Second}})
		defer w.close()
		ctx, cancel := context.WithCancel(context.Background())
		r := w.req(tokens(newRand(t, 4), 50), 10)
		d, p := w.both(ctx, r)
		synctest.Wait() // the fake has no tombstones: both ends must exist
		if n := w.p.Abort("nobody", nil); n != 0 {
			t.Errorf("aborted %d", n)
		}
		if n := w.p.Abort(r.ID, &room.Cause{Code: room.CodeAborted, Detail: "by hand"}); n != 1 {
			t.Errorf("aborted %d", n)
		}
		if a := read(t, p, 1); a.err == nil || a.err.Code != room.CodeAborted || a.err.Detail != "by hand" {
			t.Errorf("prefill ended with %v", a.err)
		}
		// The room carries the cause to the other side.
		if a := read(t, d, 1); a.err == nil || a.err.Code != room.CodeAborted {
			t.Errorf("decode ended with %v", a.err)
		}
		r = w.req(tokens(newRand(t, 4), 50), 10)
		d, p = w.both(ctx, r)
		cancel()
		if a := read(t, d, 1); a.err == nil || a.err.Code != room.CodeClientGone {
			t.Errorf("decode ended with %v", a.err)
		}
		p.Close()
		d1, p1 := w.both(context.Background(), w.req(tokens(newRand(t, 4), 50), 10))
		d2, p2 := w.both(context.Background(), w.req(tokens(newRand(t, 4), 50), 10))
		if n := w.d.Abort("", nil); n != 2 {
			t.Errorf("abort all hit %d", n)
		}
		for _, s := range []Stream{d1, d2} {
			if a := read(t, s, 1); a.err == nil || a.err.Code != room.CodeAborted {
				t.Errorf("ended with %v", a.err)
			}
		}
		p1.Close()
		p2.Close()
	})
}

// K5, K6: requests cancelled at any moment leave nothing behind, and the others' answers are right.
func TestCancellationStorm(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			rng := newRand(t, seed)
			w := newWorld(t, worldConfig{
				sim:     costs(sim.Config{KVCells: 150 + rng.IntN(300), ChunkTokens: 16, MaxSeqs: 2 + rng.IntN(8), EOSEvery: 100, Recheck: true}),
				pcells:  100 + rng.IntN(300),
				prefill: PrefillConfig{MaxActive: 1 + rng.IntN(4)},
				decode:  DecodeConfig{GrowReserve: 1 + rng.IntN(20), MaxRunning: 1 + rng.IntN(8)},
			})
			defer w.close()
			w.hubs.staging = 1 + rng.IntN(4)
			done := make(chan func(), 60)
			for range cap(done) {
				r := w.req(tokens(rng, 1+rng.IntN(90)), 1+rng.IntN(40))
				r.N = 1 + rng.IntN(2)
				r.Deadline = time.Now().Add(time.Duration(1+rng.IntN(3000)) * time.Millisecond)
				when, which := time.Duration(rng.IntN(300))*time.Millisecond, rng.IntN(4)
				start := time.Duration(rng.IntN(200)) * time.Millisecond
				go func() { done <- w.storm(r, start, when, which) }()
			}
			for range cap(done) {
				(<-done)()
			}
		})
	}
}

// storm runs one request on both sides and cancels it in one of four ways.
func (w *world) storm(r *Request, start, when time.Duration, which int) func() {
	advance(start)
	r.Deadline = r.Deadline.Add(start)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	d, err := w.d.Submit(ctx, r)
	if err != nil {
		return func() { w.t.Errorf("decode: %v", err) }
	}
	p, err := w.p.Submit(ctx, r)
	if err != nil {
		d.Close()
		return func() { w.t.Errorf("prefill: %v", err) }
	}
	switch which {
	case 1:
		time.AfterFunc(when, cancel)
	case 2:
		time.AfterFunc(when, func() { p.Cancel(nil) })
	case 3:
		time.AfterFunc(when, func() { w.d.Abort(r.ID, nil) })
	}
	a := read(w.t, d, r.N)
	late := a.at.Sub(r.Deadline)
	pa := read(w.t, p, r.N)
	return func() {
		if late > 0 {
			w.t.Errorf("%s ended %v after its deadline: %v", r.ID, late, a.err)
		}
		for _, e := range []*room.Cause{a.err, pa.err} {
			if e != nil && e.Code != room.CodeDeadline && e.Code != room.CodeAborted && e.Code != room.CodeClientGone {
				w.t.Errorf("%s: %v", r.ID, e)
			}
		}
		if a.err == nil {
			w.check(r, a)
		}
	}
}

// Whatever engine call fails, its request fails with that cause, the others go on, and nothing is held.
func TestEngineFailures(t *testing.T) {
	broken := errors.New("broken")
	for _, op := range []sim.Op{sim.OpPrefill, sim.OpExport, sim.OpImport, sim.OpStep, sim.OpNewSampler, sim.OpCopySeq, sim.OpSwapOut, sim.OpSwapIn} {
		for nth := int64(1); nth <= 3; nth++ {
			t.Run(fmt.Sprintf("%s %d", op, nth), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var calls atomic.Int64
					hook := func(c sim.Call) error {
						if c.Op == op && calls.Add(1) == nth {
							return broken
						}
						return nil
					}
					w := newWorld(t, worldConfig{sim: costs(sim.Config{KVCells: 90, ChunkTokens: 8, Recheck: true}), phook: hook, dhook: hook,
						decode: DecodeConfig{GrowReserve: 2}})
					defer w.close()
					rng := newRand(t, uint64(nth))
					done := make(chan func() bool, 6)
					for range cap(done) {
						r := w.req(tokens(rng, 10+rng.IntN(15)), 15)
						r.N = 2
						d, p := w.both(context.Background(), r)
						go func() {
							a, pa := read(t, d, 2), read(t, p, 2)
							done <- func() bool { return w.brokenOrRight(r, a, pa) }
						}()
					}
					failed := 0
					for range cap(done) {
						failed += int(b2i((<-done)()))
					}
					if failed == 0 || (failed > 1 && op != sim.OpStep) {
						t.Errorf("%d requests failed", failed)
					}
				})
			})
		}
	}
}

func (w *world) brokenOrRight(r *Request, a, pa answer) (failed bool) {
	for _, e := range []*room.Cause{a.err, pa.err} {
		if e != nil && e.Code != room.CodeEngine {
			w.t.Errorf("%s: %v", r.ID, e)
		}
	}
	if a.err != nil {
		return true
	}
	w.check(r, a)
	return pa.err != nil
}

// The engine says that cells ran out although the account says no: the youngest makes room.
func TestEngineShortOfCells(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls atomic.Int64
		w := newWorld(t, worldConfig{sim: costs(sim.Config{}), dhook: func(c sim.Call) error {
			if c.Op == sim.OpStep && c.Rows > 1 && calls.Add(1)%3 == 0 {
				return engine.ErrNoCells
			}
			return nil
		}})
		defer w.close()
		rng := newRand(t, 1)
		done := make(chan func(), 4)
		for range cap(done) {
			r := w.req(tokens(rng, 30), 20)
			d, p := w.both(context.Background(), r)
			go func() {
				a := read(t, d, 1)
				read(t, p, 1)
				done <- func() { w.check(r, a) }
			}()
		}
		for range cap(done) {
			(<-done)()
		}
		if metric(t, w.dreg, "baton_preemptions_total") == 0 {
			t.Error("nothing was preempted")
		}
	})
}

func TestWrongBytesFromThePeer(t *testing.T) {
	for _, off := range []int{5, 40} { // header, KV
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, worldConfig{sim: costs(sim.Config{})})
			defer w.close()
			w.hubs.corrupt = func(key room.Key, i int, b []byte) {
				if key.Room == 1 && i == 1 {
					b[off] ^= 1
				}
			}
			rng := newRand(t, 1)
			bad, good := w.req(tokens(rng, 200), 20), w.req(tokens(rng, 200), 20)
			bd, bp := w.both(context.Background(), bad)
			gd, gp := w.both(context.Background(), good)
			a := read(t, bd, 1)
			if off < 16 {
				if a.err == nil || a.err.Code != room.CodeTransferFailed {
					t.Errorf("a chunk with a wrong header: %v", a.err)
				}
			} else if a.err != nil || reflect.DeepEqual(a.tokens[0], sim.Expected(w.cfg, bad.Prompt, 20)) {
				t.Errorf("one wrong KV byte was not seen: %v", a.err)
			}
			w.check(good, read(t, gd, 1))
			bp.Close()
			gp.Close()
		})
	}
}

// K9, K11: a loop that dies is seen at once, and nobody waits for it.
func TestLoopPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var armed atomic.Bool
		w := newWorld(t, worldConfig{sim: costs(sim.Config{}), dhook: func(c sim.Call) error {
			if armed.Load() && c.Op == sim.OpStep {
				panic("a bug")
			}
			return nil
		}})
		rng := newRand(t, 1)
		var ds, ps []Stream
		for range 3 {
			d, p := w.both(context.Background(), w.req(tokens(rng, 40), 100))
			ds, ps = append(ds, d), append(ps, p)
		}
		if err := w.d.Healthy(); err != nil {
			t.Errorf("unhealthy before: %v", err)
		}
		armed.Store(true)
		for _, d := range ds {
			if a := read(t, d, 1); a.err == nil || a.err.Code != room.CodeEngine {
				t.Errorf("ended with %v", a.err)
			}
		}
		if w.d.Healthy() == nil {
			t.Error("a dead loop is healthy")
		}
		if _, err := w.d.Submit(context.Background(), w.req(tokens(rng, 40), 1)); !errors.Is(err, &room.Cause{Code: room.CodeEngine}) {
			t.Errorf("submit to a dead loop: %v", err)
		}
		for _, p := range ps {
			p.Close()
		}
		if err := w.d.Close(); err != nil {
			t.Error(err)
		}
		_ = w.p.Close()
	})
}

// An engine call that never returns: clients still get their error by the deadline, and
// the worker says that it is ill.
func TestEngineHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		let := make(chan struct{})
		w := newWorld(t, worldConfig{decode: DecodeConfig{StallAfter: time.Second}, dhook: func(c sim.Call) error {
			if c.Op == sim.OpStep {
				<-let
			}
			return nil
		}})
		defer w.close()
		r := w.req(tokens(newRand(t, 1), 40), 5)
		r.Deadline = time.Now().Add(2 * time.Second)
		d, p := w.both(context.Background(), r)
		_, err := d.Next(context.Background())
		if !errors.Is(err, &room.Cause{Code: room.CodeDeadline}) || time.Now().After(r.Deadline) {
			t.Errorf("ended with %v", err)
		}
		if w.d.Healthy() == nil {
			t.Error("a stalled engine is healthy")
		}
		close(let)
		d.Close()
		p.Close()
		if err := w.d.Healthy(); err != nil {
			t.Errorf("unhealthy after the stall: %v", err)
		}
	})
}

func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: sim.Config{KVCells: 100, ContextLen: 200, MaxSeqs: 4}, prefill: PrefillConfig{MaxQueue: 3}, decode: DecodeConfig{MaxQueue: 3}})
		defer w.close()
		w.hubs.noGrant = true
		rng := newRand(t, 1)
		for name, c := range map[string]struct {
			code room.Code
			mod  func(*Request)
		}{
			"empty prompt":     {room.CodeInvalid, func(r *Request) { r.Prompt = nil }},
			"too long":         {room.CodeInvalid, func(r *Request) { r.Prompt = tokens(rng, 200) }},
			"larger than KV":   {room.CodeCapacity, func(r *Request) { r.Prompt = tokens(rng, 150) }},
			"no choices":       {room.CodeInvalid, func(r *Request) { r.N = 0 }},
			"negative":         {room.CodeInvalid, func(r *Request) { r.MaxTokens = -1 }},
			"no deadline":      {room.CodeInvalid, func(r *Request) { r.Deadline = time.Time{} }},
			"no id":            {room.CodeInvalid, func(r *Request) { r.ID = "" }},
			"not a token":      {room.CodeInvalid, func(r *Request) { r.Prompt = []engine.Token{4, 99999} }},
			"negative token":   {room.CodeInvalid, func(r *Request) { r.Prompt = []engine.Token{-1} }},
			"too many choices": {room.CodeInvalid, func(r *Request) { r.N = 5 }},
		} {
			r := w.req(tokens(rng, 10), 5)
			c.mod(r)
			if _, err := w.d.Submit(context.Background(), r); !errors.Is(err, &room.Cause{Code: c.code}) {
				t.Errorf("decode, %s: %v", name, err)
			}
			if name == "too many choices" {
				continue
			}
			if _, err := w.p.Submit(context.Background(), r); !errors.Is(err, &room.Cause{Code: c.code}) {
				t.Errorf("prefill, %s: %v", name, err)
			}
		}
		local := w.req(tokens(rng, 10), 5)
		local.Bootstrap = nil
		if _, err := w.p.Submit(context.Background(), local); !errors.Is(err, &room.Cause{Code: room.CodeInvalid}) {
			t.Errorf("prefill without a room: %v", err)
		}
		w.queueFull(rng)
	})
}

func (w *world) queueFull(rng *rand.Rand) {
	t := w.t
	var open []Stream
	add := func(s Scheduler, r *Request) error {
		st, err := s.Submit(context.Background(), r)
		if err == nil {
			open = append(open, st)
		}
		synctest.Wait()
		return err
	}
	r := w.req(tokens(rng, 60), 30)
	if err := add(w.p, r); err != nil {
		t.Error(err)
	}
	if err := add(w.p, r); !errors.Is(err, &room.Cause{Code: room.CodeDuplicate}) {
		t.Errorf("the same id twice: %v", err)
	}
	same := w.req(tokens(rng, 60), 30)
	same.Bootstrap = r.Bootstrap
	if err := add(w.p, same); !errors.Is(err, &room.Cause{Code: room.CodeDuplicate}) {
		t.Errorf("the same room twice: %v", err)
	}
	full := 0
	for range 6 {
		for _, s := range []Scheduler{w.p, w.d} {
			if err := add(s, w.req(tokens(rng, 60), 30)); err != nil {
				full++
				if c := room.CauseOf(err); c.Code != room.CodeCapacity || !c.Retryable {
					t.Errorf("queue full: %v", err)
				}
			}
		}
	}
	if full != 4+2 { // prefill takes 2 more; decode runs 1 and queues 3
		t.Errorf("%d were refused", full)
	}
	for _, s := range open {
		s.Close()
	}
}

func TestCloseEndsEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: costs(sim.Config{KVCells: 300})})
		rng := newRand(t, 1)
		var all []Stream
		for range 10 {
			d, p := w.both(context.Background(), w.req(tokens(rng, 100), 50))
			all = append(all, d, p)
		}
		advance(20 * time.Millisecond)
		closed := make(chan struct{})
		go func() { _ = w.p.Close(); close(closed) }()
		_ = w.d.Close()
		<-closed
		for _, s := range all {
			if a := read(t, s, 1); a.err != nil && a.err.Code != room.CodeShutdown {
				t.Errorf("ended with %v", a.err)
			}
		}
		if _, err := w.d.Submit(context.Background(), w.req(tokens(rng, 10), 1)); !errors.Is(err, &room.Cause{Code: room.CodeShutdown}) {
			t.Errorf("submit after close: %v", err)
		}
		w.close()
	})
}

// A room without staging memory holds up neither the engine nor the others for good.
func TestStagingShortage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var chunks atomic.Int64
		w := newWorld(t, worldConfig{sim: costs(sim.Config{}), phook: func(c sim.Call) error { chunks.Add(b2i(c.Op == sim.OpPrefill)); return nil }})
		defer w.close()
		w.hubs.staging, w.hubs.hold = 1, true
		rng := newRand(t, 1)
		a, b := w.req(tokens(rng, 257), 5), w.req(tokens(rng, 257), 5)
		ad, ap := w.both(context.Background(), a)
		bd, bp := w.both(context.Background(), b)
		advance(time.Second)
		if n := chunks.Load(); n != 8 {
			t.Errorf("%d of 8 chunks were computed while staging was stuck", n)
		}
		w.hubs.mu.Lock()
		w.hubs.hold = false
		w.hubs.mu.Unlock()
		w.hubs.flow(a.Bootstrap.Key)
		w.hubs.flow(b.Bootstrap.Key)
		w.check(a, read(t, ad, 1))
		w.check(b, read(t, bd, 1))
		for _, p := range []Stream{ap, bp} {
			if x := read(t, p, 1); x.err != nil || x.finish[0] != FinishLength {
				t.Errorf("prefill: %+v", x)
			}
		}
		if w.hubs.waitings == 0 {
			t.Error("nobody waited for staging: the test tests nothing")
		}
	})
}

// Running streams keep their pace while long prompts land.
func TestImportsDoNotStallRunningStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: sim.Config{StepTime: 10 * time.Millisecond, ImportTime: 5 * time.Millisecond}})
		defer w.close()
		rng := newRand(t, 1)
		r := w.req(tokens(rng, 10), 200)
		d, p := w.both(context.Background(), r)
		if _, err := d.Next(context.Background()); err != nil {
			t.Fatal(err)
		}
		var long []Stream
		for range 3 {
			x, y := w.both(context.Background(), w.req(tokens(rng, 2000), 1))
			long = append(long, x, y)
		}
		worst, last := time.Duration(0), time.Now()
		for range 150 {
			if _, err := d.Next(context.Background()); err != nil {
				t.Fatal(err)
			}
			worst, last = max(worst, time.Since(last)), time.Now()
		}
		if worst > 20*time.Millisecond { // two imports and a step
			t.Errorf("the worst gap was %v", worst)
		}
		for _, s := range append(long, d, p) {
			s.Close()
		}
	})
}

// K12 on the real path: the model ends with its first token.
func TestFirstTokenEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: costs(sim.Config{EOSAt: 99})})
		defer w.close()
		for i, local := range []bool{false, true} {
			r := w.req(tokens(newRand(t, 1), 100), 10)
			r.N = 1 + i
			var p Stream
			d, err := Stream(nil), error(nil)
			if local {
				r.Bootstrap = nil
				d, err = w.d.Submit(context.Background(), r)
			} else {
				d, p = w.both(context.Background(), r)
				defer p.Close()
			}
			if err != nil {
				t.Fatal(err)
			}
			a := read(t, d, r.N)
			if a.err != nil || a.text[0] != "" || len(a.tokens[0]) != 0 || a.finish[0] != FinishStop || d.Phases().FirstToken.IsZero() {
				t.Errorf("%+v", a)
			}
			r = w.req(tokens(newRand(t, 1), 100), 4)
			r.IgnoreEOS = true
			d, p2 := w.both(context.Background(), r)
			w.check(r, read(t, d, 1))
			p2.Close()
		}
	})
}

func TestContextEndIsLength(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: sim.Config{ContextLen: 64, ChunkTokens: 16}})
		defer w.close()
		for _, n := range []int{10, 62, 63} {
			r := w.req(tokens(newRand(t, 1), n), 0)
			d, p := w.both(context.Background(), r)
			a := read(t, d, 1)
			p.Close()
			if a.err != nil || a.finish[0] != FinishLength || len(a.tokens[0]) != 64-n {
				t.Errorf("prompt of %d: %+v", n, a)
			}
		}
	})
}

func TestMetricsAgree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: costs(sim.Config{})})
		defer w.close()
		rng := newRand(t, 1)
		gauges := []string{"num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs", "num_running_reqs", "num_queue_reqs"}
		r := w.req(tokens(rng, 100), 20)
		d, p := w.both(context.Background(), r)
		advance(40 * time.Millisecond)
		if n := metric(t, w.dreg, "baton_num_running_reqs"); n != 1 {
			t.Errorf("%v running", n)
		}
		read(t, d, 1)
		read(t, p, 1)
		d, p = w.both(context.Background(), w.req(tokens(rng, 100), 20))
		d.Close()
		p.Close()
		for _, g := range gauges {
			if n := metric(t, w.dreg, "baton_"+g); n != 0 {
				t.Errorf("%s is %v when idle", g, n)
			}
		}
		for _, g := range []string{"num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs", "num_running_reqs", "num_queue_reqs"} {
			if n := metric(t, w.preg, "baton_"+g); n != 0 {
				t.Errorf("%s is %v when idle", g, n)
			}
		}
		for name, want := range map[string]float64{"requests_total": 2, "prompt_tokens_total": 100, "generation_tokens_total": 20,
			"time_to_first_token_seconds": 1, "inter_token_latency_seconds": 19, "e2e_request_latency_seconds": 1} {
			if n := metric(t, w.dreg, "baton_"+name); n != want {
				t.Errorf("%s is %v, want %v", name, n, want)
			}
		}
	})
}

// K8: a blocked head is passed by those that fit, but not for ever.
func TestLineAges(t *testing.T) {
	var l line[int]
	l.push(100)
	passed := 0
	for i := range 1000 {
		l.push(i % 10)
		x, ok := l.next(func(n int) bool { return n < 50 })
		if !ok {
			break
		}
		if x != i%10 {
			t.Fatalf("got %d, want %d", x, i%10)
		}
		passed++
	}
	if passed != maxBypass {
		t.Errorf("the head was passed %d times, want %d", passed, maxBypass)
	}
	if x, ok := l.next(func(int) bool { return true }); !ok || x != 100 {
		t.Errorf("then %d %v", x, ok)
	}
}

// Any mix of requests that each fit alone ends, whatever the pools are.
func TestEveryRequestEnds(t *testing.T) {
	for seed := range uint64(30) {
		synctest.Test(t, func(t *testing.T) {
			rng := newRand(t, 1000+seed)
			cells := 20 + rng.IntN(120)
			w := newWorld(t, worldConfig{
				sim:    costs(sim.Config{KVCells: cells, ChunkTokens: 1 + rng.IntN(20), MaxSeqs: 1 + rng.IntN(5), ContextLen: 100}),
				pcells: cells, prefill: PrefillConfig{MaxActive: 1 + rng.IntN(3)},
				decode: DecodeConfig{GrowReserve: 1 + rng.IntN(30), MaxRunning: 1 + rng.IntN(5), ImportsPerStep: 1 + rng.IntN(3)},
			})
			defer w.close()
			w.hubs.staging = 1 + rng.IntN(3)
			done := make(chan func(), 40)
			began := time.Now()
			for range cap(done) {
				n := 1 + rng.IntN(min(cells, 90)-2)
				r := w.req(tokens(rng, n), 1+rng.IntN(min(cells, 99)-n))
				r.N = 1 + rng.IntN(min(w.de.Info().MaxSeqs, cells-n))
				if rng.IntN(4) == 0 {
					r.Bootstrap = nil
				}
				go func() {
					d, err := w.d.Submit(context.Background(), r)
					if err != nil {
						done <- func() { t.Errorf("decode: %v", err) }
						return
					}
					if r.Bootstrap != nil {
						p, err := w.p.Submit(context.Background(), r)
						if err != nil {
							d.Close()
							done <- func() { t.Errorf("prefill: %v", err) }
							return
						}
						defer p.Close()
					}
					a := read(t, d, r.N)
					done <- func() { w.check(r, a) }
				}()
			}
			for range cap(done) {
				(<-done)()
			}
			if took := time.Since(began); took > 5*time.Minute {
				t.Errorf("took %v: somebody waited for a deadline", took)
			}
			synctest.Wait()
		})
	}
}
