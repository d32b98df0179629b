package sched

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/room"
)

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
		var running atomic.Bool
		w := newWorld(t, worldConfig{sim: costs(sim.Config{ChunkTokens: 8, Recheck: true}), dhook: func(c sim.Call) error {
			short := c.Op == sim.OpStep && c.Rows > 1 || c.Op == sim.OpImport || c.Op == sim.OpPrefill || c.Op == sim.OpSwapIn
			if running.Store(running.Load() || c.Op == sim.OpStep); short && running.Load() && calls.Add(1)%3 == 0 {
				return engine.ErrNoCells
			}
			return nil
		}})
		defer w.close()
		rng := newRand(t, 1)
		done := make(chan func(), 6)
		first := w.req(tokens(rng, 5), 400) // somebody is always running
		fd, fp := w.both(context.Background(), first)
		defer fp.Close()
		if _, err := fd.Next(context.Background()); err != nil {
			t.Fatal(err)
		}
		for i := range cap(done) {
			r := w.req(tokens(rng, 30), 20)
			go func() {
				if i%2 == 0 {
					r.Bootstrap = nil
				}
				d, err := w.d.Submit(context.Background(), r)
				if err != nil {
					t.Error(err)
				}
				if r.Bootstrap != nil {
					p, err := w.p.Submit(context.Background(), r)
					if err != nil {
						t.Error(err)
					}
					defer p.Close()
				}
				a := read(t, d, 1)
				done <- func() { w.check(r, a) }
			}()
		}
		for range cap(done) {
			(<-done)()
		}
		if metric(t, w.dreg, "baton_preemptions_total") == 0 {
			t.Error("nothing was preempted")
		}
		fd.Close()
		synctest.Wait()
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

// An engine that never has cells, against our account, fails the request instead of turning for ever.
func TestEngineNeverHasCells(t *testing.T) {
	for _, op := range []sim.Op{sim.OpPrefill, sim.OpImport, sim.OpStep} {
		synctest.Test(t, func(t *testing.T) {
			hook := func(c sim.Call) error {
				if c.Op == op {
					return engine.ErrNoCells
				}
				return nil
			}
			w := newWorld(t, worldConfig{sim: costs(sim.Config{}), phook: hook, dhook: hook})
			defer w.close()
			r := w.req(tokens(newRand(t, 1), 100), 5)
			local := *r
			local.ID, local.Bootstrap = "local", nil
			d, p := w.both(context.Background(), r)
			l, err := w.d.Submit(context.Background(), &local)
			if err != nil {
				t.Fatal(err)
			}
			if a := read(t, d, 1); a.err == nil || a.err.Code != room.CodeEngine {
				t.Errorf("%s: ended with %v", op, a.err)
			}
			if a := read(t, l, 1); op != sim.OpImport && (a.err == nil || a.err.Code != room.CodeEngine) {
				t.Errorf("%s: the local one ended with %v", op, a.err)
			}
			p.Close()
		})
	}
}

func TestPrefillLoopPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: costs(sim.Config{}), phook: func(c sim.Call) error {
			if c.Op == sim.OpExport && c.Pos > 0 {
				panic("a bug")
			}
			return nil
		}})
		d, p := w.both(context.Background(), w.req(tokens(newRand(t, 1), 200), 5))
		for _, s := range []Stream{p, d} {
			if a := read(t, s, 1); a.err == nil || a.err.Code != room.CodeEngine {
				t.Errorf("ended with %v", a.err)
			}
		}
		if w.p.Healthy() == nil || w.d.Healthy() != nil {
			t.Errorf("health: prefill %v, decode %v", w.p.Healthy(), w.d.Healthy())
		}
		_ = w.p.Close()
		_ = w.d.Close()
	})
}
