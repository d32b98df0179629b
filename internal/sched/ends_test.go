package sched

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

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
		decode bool   // the request watched is on the decode worker
		says   string // what the error says it waited for
	}{
		{"bootstrapping", worldConfig{}, func(w *world) { w.hubs.noGrant = true }, true, "landing pages"},
		{"bootstrapping", worldConfig{}, func(w *world) { w.hubs.noGrant = true }, false, "the decode worker's grant"},
		{"transferring", worldConfig{}, func(w *world) { w.hubs.hold = true }, true, "the prompt's KV"},
		{"transferring", worldConfig{}, func(w *world) { w.hubs.hold = true }, false, "the last chunks"},
		{"prefilling", worldConfig{sim: sim.Config{PrefillChunkTime: time.Hour}}, nil, false, "its prompt computed"},
		{"transferring", worldConfig{sim: sim.Config{PrefillChunkTime: time.Hour}}, nil, true, "the prompt's KV"},
		{"waiting", worldConfig{sim: sim.Config{PrefillChunkTime: time.Hour}, prefill: PrefillConfig{MaxActive: 1}}, func(w *world) { w.occupy(50) }, false, "KV cells"},
		{"prealloc", worldConfig{sim: sim.Config{KVCells: 200}}, func(w *world) { w.hubs.noGrant = true; w.occupy(150) }, true, "KV cells"},
		{"decoding", worldConfig{sim: sim.Config{StepTime: time.Hour}}, nil, true, "was decoding"},
		// The older one keeps all cells and never ends.
		{"preempted", worldConfig{sim: sim.Config{KVCells: 260, StepTime: 100 * time.Millisecond}, decode: DecodeConfig{GrowReserve: 1}},
			func(w *world) { w.occupy(140) }, true, "swapped out"},
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
				} else if !strings.Contains(a.err.Detail, c.says) {
					t.Errorf("the error is %q and does not say %q", a.err.Detail, c.says)
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
		a, b := w.req(tokens(rng, 20), 100), w.req(tokens(rng, 20), 100)
		ad, ap := w.both(context.Background(), a)
		bd, bp := w.both(context.Background(), b)
		for _, s := range []Stream{ad, bd} { // both are in the batch
			if _, err := s.Next(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
		advance(50 * time.Millisecond)
		ad.Close() // returns when the row has left, at the end of the step
		began, pieces := time.Now(), 0
		for time.Since(began) < time.Second {
			if _, err := bd.Next(context.Background()); err != nil {
				t.Fatal(err)
			}
			pieces++
		}
		if pieces < 9 { // an interrupted step would have to be made again
			t.Errorf("the other row got %d tokens in a second", pieces)
		}
		bd.Close()
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
