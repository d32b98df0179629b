package sched

import (
	"context"
	"errors"
	"fmt"
	"io"
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

// Kinds of faults that others reported (docs/reported.md), in the schedulers. Time is the bubble's.

// bubble runs cases side by side, each in a bubble of its own.
func bubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

func TestReportedK1PageReuse(t *testing.T) {
	// The reader is a user of the pages too: a request that ends while the engine imports from them.
	bubble(t, "aborted while the engine imports", func(t *testing.T) {
		streams := make(chan Stream, 1)
		var w *world
		var held atomic.Int64
		w = newWorld(t, worldConfig{sim: costs(sim.Config{}), dhook: func(c sim.Call) error {
			if c.Op == sim.OpImport && c.Pos == 64 {
				d := <-streams
				d.Cancel(&room.Cause{Code: room.CodeClientGone, Detail: "test"})
				synctest.Wait() // whatever the end sets in motion has happened
				w.hubs.mu.Lock()
				held.Store(int64(w.hubs.landing))
				w.hubs.mu.Unlock()
			}
			return nil
		}})
		defer w.close()
		d, p := w.both(context.Background(), w.req(tokens(newRand(t, 1), 200), 5))
		streams <- d
		if a := read(t, d, 1); a.err == nil || a.err.Code != room.CodeClientGone {
			t.Errorf("ended with %v", a.err)
		}
		p.Close()
		if n := held.Load(); n != 1 {
			t.Errorf("%d rooms held their pages while the engine read them, want 1", n)
		}
	})
}

func TestReportedK5CancelRace(t *testing.T) {
	bubble(t, "late and early cancels aim at nobody", func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: costs(sim.Config{})})
		defer w.close()
		rng := newRand(t, 1)
		first := w.req(tokens(rng, 100), 5)
		if n := w.d.Abort(first.ID, nil) + w.p.Abort(first.ID, nil); n != 0 { // the edge remembers early ones, with the client's id
			t.Errorf("an abort before its request hit %d", n)
		}
		fd, fp := w.both(context.Background(), first)
		w.check(first, read(t, fd, 1))
		read(t, fp, 1)
		again := w.req(tokens(rng, 100), 50)
		again.ID = first.ID
		d, p := w.both(context.Background(), again)
		advance(20 * time.Millisecond)
		for range 3 {
			fd.Cancel(&room.Cause{Code: room.CodeAborted, Detail: "late"})
			fp.Cancel(&room.Cause{Code: room.CodeAborted, Detail: "late"})
			fd.Close()
			fp.Close()
		}
		w.check(again, read(t, d, 1))
		read(t, p, 1)
	})
	bubble(t, "gone before it was submitted", func(t *testing.T) {
		var calls atomic.Int64
		hook := func(sim.Call) error { calls.Add(1); return nil }
		w := newWorld(t, worldConfig{sim: costs(sim.Config{}), phook: hook, dhook: hook})
		defer w.close()
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		r := w.req(tokens(newRand(t, 1), 200), 5)
		local := *r
		local.ID, local.Bootstrap = "local", nil
		for _, x := range []struct {
			s Scheduler
			r *Request
		}{{w.d, r}, {w.p, r}, {w.d, &local}} {
			st, err := x.s.Submit(ctx, x.r)
			if err == nil {
				_, err = st.Next(context.Background())
				st.Close()
			}
			if c := room.CauseOf(err); c.Code != room.CodeClientGone {
				t.Errorf("ended with %v", c)
			}
		}
		if n := calls.Load(); n != 0 {
			t.Errorf("the engine was called %d times for a client that had gone", n)
		}
	})
}

func TestReportedK6ForgottenResource(t *testing.T) {
	// The exit that is easily forgotten: of two choices one is in host memory, because it was swapped out, and the other one
	// alone holds the cells of their prompt.
	bubble(t, "cancelled while swapped out", func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: costs(sim.Config{KVCells: 85, ChunkTokens: 8, Recheck: true}), decode: DecodeConfig{GrowReserve: 8}})
		defer w.close()
		rng := newRand(t, 1)
		older, younger := w.req(tokens(rng, 30), 30), w.req(tokens(rng, 30), 30)
		younger.N = 2
		od, op := w.both(context.Background(), older)
		yd, yp := w.both(context.Background(), younger)
		before := w.d.Snapshot()
		for i := 0; before.Running != 2 || before.SeqsUsed != 2; i++ { // three choices, two of them resident
			if advance(time.Millisecond); i == 1000 {
				t.Fatal("nothing was swapped out: the test tests nothing")
			}
			before = w.d.Snapshot()
		}
		yd.Close()
		if s := w.d.Snapshot(); s.Running != 1 || s.SeqsUsed != 1 || s.CellsUsed >= before.CellsUsed-29 {
			t.Errorf("before %+v, after the close %+v", before, s)
		}
		w.check(older, read(t, od, 1))
		op.Close()
		yp.Close()
	})
}

func TestReportedK8Deadlock(t *testing.T) {
	// The report: pool of 64, two rooms of 30 that grow to 40. One is set back after its transfer, which must not lead
	// through its room again: that has succeeded and could never be left.
	bubble(t, "two rooms of 30 grow to 40 in a pool of 64", func(t *testing.T) {
		rng := newRand(t, 1)
		var swaps atomic.Int64
		w := newWorld(t, worldConfig{sim: sim.Config{KVCells: 64, ChunkTokens: 8, Recheck: true, StepTime: 50 * time.Millisecond}, decode: DecodeConfig{GrowReserve: 3, ImportsPerStep: 4},
			dhook: func(c sim.Call) error { swaps.Add(b2i(c.Op == sim.OpSwapOut)); return nil }})
		defer w.close()
		a, b := w.req(tokens(rng, 30), 10), w.req(tokens(rng, 30), 10)
		ad, ap := w.both(context.Background(), a)
		bd, bp := w.both(context.Background(), b)
		w.check(a, read(t, ad, 1))
		w.check(b, read(t, bd, 1))
		read(t, ap, 1)
		read(t, bp, 1)
		if swaps.Load() == 0 {
			t.Error("nothing was set back after its transfer")
		}
		if n := len(w.hubs.sent); n != 2*4 {
			t.Errorf("%d chunks were sent, want each of the 8 once", n)
		}
	})
	// Each worker takes the two requests in another order, and has room for one: neither may hold what the other waits for.
	bubble(t, "crosswise", func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: costs(sim.Config{KVCells: 64, ChunkTokens: 8, Recheck: true}), prefill: PrefillConfig{MaxActive: 1}})
		defer w.close()
		w.hubs.staging = 1
		rng := newRand(t, 1)
		a, b := w.req(tokens(rng, 50), 10), w.req(tokens(rng, 50), 10)
		var ss []Stream
		for _, x := range []struct {
			s Scheduler
			r *Request
		}{{w.d, a}, {w.p, b}, {w.d, b}, {w.p, a}} {
			s, err := x.s.Submit(context.Background(), x.r)
			if err != nil {
				t.Fatal(err)
			}
			ss = append(ss, s)
			synctest.Wait()
		}
		began := time.Now()
		w.check(a, read(t, ss[0], 1))
		w.check(b, read(t, ss[2], 1))
		read(t, ss[1], 1)
		read(t, ss[3], 1)
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("took %v", took)
		}
	})
	// The first in line has its grant and never gets its KV, but holds cells; the second does not fit beside it. Small ones
	// pass both, and take cells back from the first where they grow; the second has its turn in the end.
	bubble(t, "a head that never loads", func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: costs(sim.Config{KVCells: 100, ChunkTokens: 16, Recheck: true}), decode: DecodeConfig{GrowReserve: 2}})
		defer w.close()
		rng := newRand(t, 1)
		dead, large := w.req(tokens(rng, 60), 20), w.req(tokens(rng, 70), 10)
		dead.Deadline = time.Now().Add(30 * time.Second)
		dd, err := w.d.Submit(context.Background(), dead) // no prefill side
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		ld, lp := w.both(context.Background(), large)
		synctest.Wait()
		began := time.Now()
		for range 12 {
			r := w.req(tokens(rng, 30), 20)
			d, p := w.both(context.Background(), r)
			w.check(r, read(t, d, 1))
			read(t, p, 1)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("12 small requests took %v", took)
		}
		if metric(t, w.dreg, "baton_preemptions_total") == 0 {
			t.Error("no cells were taken back: the test tests less than it says")
		}
		w.check(large, read(t, ld, 1))
		read(t, lp, 1)
		if a := read(t, dd, 1); a.err == nil || a.err.Code != room.CodeDeadline {
			t.Errorf("the silent one ended with %v", a.err)
		}
	})
}

// firstTokens are the ways to end at token 1. first is the token that the model would give.
var firstTokens = []struct {
	name   string
	edit   func(r *Request, first string)
	ctx    bool // the prompt fills the context but for one token
	finish FinishReason
	text   bool // the token is part of the answer
}{
	{"eos", func(*Request, string) {}, false, FinishStop, false},
	{"eos of two choices", func(r *Request, _ string) { r.N = 2 }, false, FinishStop, false},
	{"eos with logprobs", func(r *Request, _ string) { r.Logprobs = 3 }, false, FinishStop, false},
	{"eos ignored, length", func(r *Request, _ string) { r.IgnoreEOS, r.MaxTokens, r.Logprobs = true, 1, 2 }, false, FinishLength, true},
	{"stop string", func(r *Request, s string) { r.IgnoreEOS, r.Stop = true, []string{s} }, false, FinishStop, false},
	{"stop string at the limit", func(r *Request, s string) { r.IgnoreEOS, r.MaxTokens, r.Stop = true, 1, []string{s} }, false, FinishStop, false},
	{"length under a penalty", func(r *Request, _ string) {
		r.IgnoreEOS, r.MaxTokens = true, 1
		r.Sampling = engine.Sampling{Temperature: 0.9, Seed: 7, FrequencyPenalty: 0.5, PresencePenalty: 0.5}
	}, false, FinishLength, true},
	{"the context ends", func(r *Request, _ string) { r.IgnoreEOS, r.MaxTokens = true, 0 }, true, FinishLength, true},
}

// Whatever ends an answer at its first token, the answer is the one of a single node: events, logprobs, finish. One step
// is computed, on the decode side, however the prompt falls into chunks.
func TestReportedK12FirstToken(t *testing.T) {
	for _, c := range firstTokens {
		for _, n := range []int{1, 2, 16, 17, 18, 33, 50} {
			if c.ctx && n != 50 {
				continue
			}
			bubble(t, fmt.Sprintf("%s/prompt of %d", c.name, n), func(t *testing.T) {
				cfg := costs(sim.Config{ChunkTokens: 16, ContextLen: 64, EOSAt: n - 1, Recheck: true})
				if n == 1 {
					cfg.EOSAt, cfg.EOSEvery = 0, 1 // position 0 can not be named: every token is EOS
				}
				if c.ctx {
					cfg.ContextLen = n + 1
				}
				prompt, first := asciiFirst(t, cfg, n)
				var steps atomic.Int64
				w := newWorld(t, worldConfig{sim: cfg, dhook: func(k sim.Call) error {
					if k.Op == sim.OpStep {
						steps.Add(int64(k.Rows))
					}
					return nil
				}})
				defer w.close()
				r := w.req(prompt, 10)
				c.edit(r, first)
				local := *r
				local.ID, local.Bootstrap = "local", nil
				d, p := w.both(context.Background(), r)
				pd := events(t, d)
				if got := steps.Load(); got != int64(r.N) {
					t.Errorf("%d rows were computed for %d choices of one token", got, r.N)
				}
				leg := events(t, p)
				for _, ev := range leg {
					if ev.Finish != FinishLength || ev.Text != "" || len(ev.Tokens) != 0 || len(leg) != r.N {
						t.Errorf("the prefill leg says %+v", leg)
					}
				}
				l, err := w.d.Submit(context.Background(), &local)
				if err != nil {
					t.Fatal(err)
				}
				if single := events(t, l); !reflect.DeepEqual(pd, single) {
					t.Errorf("two workers: %+v\none worker:  %+v", pd, single)
				}
				text, finished := "", 0
				for _, ev := range pd {
					text += ev.Text
					finished += int(b2i(ev.Finish == c.finish))
				}
				if finished != r.N || (text != "") != c.text {
					t.Errorf("%q, %d choices of %d ended with %s: %+v", text, finished, r.N, c.finish, pd)
				}
			})
		}
	}
}

// asciiFirst is a prompt of n tokens whose greedy first token, if it is not EOS, is a printable character.
func asciiFirst(t *testing.T, cfg sim.Config, n int) ([]engine.Token, string) {
	t.Helper()
	for seed := range uint64(1000) {
		prompt := tokens(rand.New(rand.NewPCG(seed, 2)), n)
		if b := sim.Expected(cfg, prompt, 1, engine.Sampling{IgnoreEOS: true})[0] - 3; b >= '!' && b <= '~' {
			return prompt, string(rune(b))
		}
	}
	t.Fatal("no prompt found")
	return nil, ""
}

// events reads a stream to its end, which must be a clean one, and closes it.
func events(t *testing.T, s Stream) (all []Event) {
	t.Helper()
	defer s.Close()
	for {
		ev, err := s.Next(context.Background())
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, ev)
	}
}
