package sched

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/room"
)

// A peer that says nothing holds cells, but never those that a running stream needs.
func TestSilentPeerDoesNotStopARunningStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: costs(sim.Config{KVCells: 100, ChunkTokens: 16, Recheck: true}), decode: DecodeConfig{GrowReserve: 2}})
		defer w.close()
		rng := newRand(t, 1)
		older, r := w.req(tokens(rng, 60), 20), w.req(tokens(rng, 30), 40)
		od, err := w.d.Submit(context.Background(), older) // without its prefill side, for now
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		began := time.Now()
		d, p := w.both(context.Background(), r)
		w.check(r, read(t, d, 1))
		if took := time.Since(began); took > time.Second {
			t.Errorf("took %v", took)
		}
		if metric(t, w.dreg, "baton_preemptions_total") == 0 {
			t.Error("nothing was preempted: the test tests nothing")
		}
		op, err := w.p.Submit(context.Background(), older)
		if err != nil {
			t.Fatal(err)
		}
		w.check(older, read(t, od, 1))
		op.Close()
		p.Close()
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

// Errors of the hub end the request with the hub's cause.
func TestHubErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: costs(sim.Config{})})
		defer w.close()
		w.hubs.bufErr = &room.Cause{Code: room.CodeCapacity, Detail: "no staging memory is that large"}
		for _, n := range []int{1, 100} {
			d, p := w.both(context.Background(), w.req(tokens(newRand(t, 1), n), 5))
			for _, s := range []Stream{p, d} {
				if a := read(t, s, 1); a.err == nil || a.err.Code != room.CodeCapacity {
					t.Errorf("prompt of %d: ended with %v", n, a.err)
				}
			}
		}
		w.hubs.openErr = &room.Cause{Code: room.CodeShutdown, Detail: "closing"}
		r := w.req(tokens(newRand(t, 1), 10), 5)
		if _, err := w.p.Submit(context.Background(), r); !errors.Is(err, &room.Cause{Code: room.CodeShutdown}) {
			t.Errorf("submit: %v", err)
		}
		d, err := w.d.Submit(context.Background(), r)
		if err != nil {
			t.Fatal(err)
		}
		if a := read(t, d, 1); a.err == nil || a.err.Code != room.CodeShutdown {
			t.Errorf("ended with %v", a.err)
		}
	})
}
