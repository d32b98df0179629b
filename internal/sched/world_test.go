package sched

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/room"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is one prefill and one decode worker on sim engines and fake hubs.
type world struct {
	t      testing.TB
	cfg    sim.Config // of both; the hook only of the one that has it
	hubs   *fakeHubs
	p      *Prefill
	d      *Decode
	pe, de *sim.Engine
	dreg   *prometheus.Registry
	preg   *prometheus.Registry
	rooms  uint64
}

type worldConfig struct {
	sim          sim.Config
	phook, dhook func(sim.Call) error
	pcells       int // KVCells of the prefill engine; default: sim's
	prefill      PrefillConfig
	decode       DecodeConfig
}

func newWorld(t testing.TB, c worldConfig) *world {
	t.Helper()
	w := &world{t: t, cfg: c.sim, hubs: newFakeHubs(), dreg: prometheus.NewRegistry(), preg: prometheus.NewRegistry()}
	open := func(cfg sim.Config, hook func(sim.Call) error) *sim.Engine {
		cfg.Hook = hook
		e, err := sim.Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	pcfg := c.sim
	if c.pcells > 0 {
		pcfg.KVCells = c.pcells
	}
	w.pe, w.de = open(pcfg, c.phook), open(c.sim, c.dhook)
	c.prefill.Engine, c.prefill.Senders, c.prefill.Registerer = w.pe, fakeSenders{w.hubs}, w.preg
	c.decode.Engine, c.decode.Receivers, c.decode.Registerer = w.de, fakeReceivers{w.hubs}, w.dreg
	w.p, w.d = NewPrefill(c.prefill), NewDecode(c.decode)
	return w
}

// close ends both workers and compares everything with the idle baseline.
func (w *world) close() {
	w.t.Helper()
	w.baseline()
	_ = w.p.Close()
	_ = w.d.Close()
	if n := w.pe.UsedCells() + w.de.UsedCells(); n != 0 {
		w.t.Errorf("%d KV cells still used", n)
	}
	_ = w.pe.Close()
	_ = w.de.Close()
}

// baseline: every stream is closed, so nothing may be held.
func (w *world) baseline() {
	w.t.Helper()
	want := Snapshot{Role: "prefill", CellsTotal: w.pe.Info().KVCells}
	if got := w.p.Snapshot(); got != want {
		w.t.Errorf("prefill is not idle: %+v", got)
	}
	want = Snapshot{Role: "decode", CellsTotal: w.de.Info().KVCells}
	if got := w.d.Snapshot(); got != want {
		w.t.Errorf("decode is not idle: %+v", got)
	}
	w.hubs.mu.Lock()
	defer w.hubs.mu.Unlock()
	if len(w.hubs.rooms)+w.hubs.staged+w.hubs.landing != 0 {
		w.t.Errorf("hubs are not idle: %d rooms, %d staged, %d landing", len(w.hubs.rooms), w.hubs.staged, w.hubs.landing)
	}
	for _, c := range []*core{&w.p.core, &w.d.core} {
		c.mu.Lock()
		if len(c.live) != 0 {
			w.t.Errorf("%s: %d live requests", c.side, len(c.live))
		}
		c.mu.Unlock()
	}
}

// req makes a request with a room; the caller may change it before it is submitted.
func (w *world) req(prompt []engine.Token, maxTokens int) *Request {
	w.rooms++
	return &Request{
		ID: fmt.Sprintf("r%d", w.rooms), Prompt: prompt, N: 1, MaxTokens: maxTokens,
		Bootstrap: &Bootstrap{Key: room.Key{Room: w.rooms}, Host: "127.0.0.1", Port: 1}, Deadline: time.Now().Add(time.Hour),
	}
}

// both submits r to both workers, decode first, as a router may.
func (w *world) both(ctx context.Context, r *Request) (d, p Stream) {
	w.t.Helper()
	d, err := w.d.Submit(ctx, r)
	if err != nil {
		w.t.Fatalf("decode: %v", err)
	}
	if p, err = w.p.Submit(ctx, r); err != nil {
		w.t.Fatalf("prefill: %v", err)
	}
	return d, p
}

// answer is what a stream said.
type answer struct {
	text   []string // by choice
	tokens [][]engine.Token
	finish []FinishReason
	err    *room.Cause
	at     time.Time // when the consumer heard of the end
}

func same(a, b answer) bool {
	a.at = b.at
	return reflect.DeepEqual(a, b)
}

// read takes a stream to its end and closes it; it checks the promises of Stream.
func read(t testing.TB, s Stream, n int) answer {
	t.Helper()
	a := answer{text: make([]string, n), tokens: make([][]engine.Token, n), finish: make([]FinishReason, n)}
	for {
		ev, err := s.Next(context.Background())
		if err != nil {
			a.at = time.Now()
			if !errors.Is(err, io.EOF) {
				a.err = room.CauseOf(err)
			}
			break
		}
		if a.finish[ev.Choice] != "" {
			t.Errorf("choice %d goes on after its finish", ev.Choice)
		}
		a.text[ev.Choice] += ev.Text
		for _, tk := range ev.Tokens {
			a.tokens[ev.Choice] = append(a.tokens[ev.Choice], tk.ID)
		}
		a.finish[ev.Choice] = ev.Finish
	}
	s.Close()
	for i, f := range a.finish {
		if a.err == nil && f == "" {
			t.Errorf("choice %d ended without a finish and without an error", i)
		}
	}
	if ev, err := s.Next(context.Background()); err == nil {
		t.Errorf("an event after the end: %+v", ev)
	}
	return a
}

// check compares a with what the model says.
func (w *world) check(r *Request, a answer) {
	w.t.Helper()
	if a.err != nil {
		w.t.Errorf("%s: %v", r.ID, a.err)
		return
	}
	for i := range r.N {
		s := r.Sampling
		s.Seed += uint32(i)
		s.IgnoreEOS = s.IgnoreEOS || r.IgnoreEOS
		want, finish := sim.Expected(w.cfg, r.Prompt, r.MaxTokens, s), FinishLength
		if k := len(want) - 1; w.de.Tokenizer().IsEOG(want[k]) {
			want, finish = want[:k], FinishStop
		}
		if !reflect.DeepEqual(append([]engine.Token{}, a.tokens[i]...), append([]engine.Token{}, want...)) || a.finish[i] != finish {
			w.t.Errorf("%s choice %d, prompt of %d: %d tokens %v, %s\nwant %d tokens %v, %s", r.ID, i, len(r.Prompt), len(a.tokens[i]), a.tokens[i], a.finish[i], len(want), want, finish)
		}
	}
}

// tokens is a prompt of n tokens that no other call gives.
func tokens(rng *rand.Rand, n int) []engine.Token {
	out := make([]engine.Token, n)
	for i := range out {
		out[i] = engine.Token(3 + rng.IntN(250))
	}
	return out
}

func newRand(t testing.TB, seed uint64) *rand.Rand {
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 1))
}

// advance lets d of the bubble's fake time pass.
func advance(d time.Duration) { <-time.After(d) }

// costs make sim take time, so that things overlap.
func costs(c sim.Config) sim.Config {
	c.PrefillChunkTime, c.PrefillTokenTime = time.Millisecond, 100*time.Microsecond
	c.StepTime, c.StepRowTime = 2*time.Millisecond, 100*time.Microsecond
	c.ImportTime, c.ExportTime, c.SwapTime = 200*time.Microsecond, 100*time.Microsecond, time.Millisecond
	return c
}

func TestAnswersAreExact(t *testing.T) {
	for _, conc := range []int{1, 4, 8, 32} {
		t.Run(fmt.Sprint(conc), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rng := newRand(t, uint64(conc))
				w := newWorld(t, worldConfig{sim: costs(sim.Config{EOSEvery: 60, Recheck: conc < 8})})
				defer w.close()
				done := make(chan func(), conc)
				for i := range conc {
					n := []int{1, 2, 64, 65, 66, 129, 700}[i%7]
					if i%11 == 3 {
						n = 1 + rng.IntN(1800)
					}
					r := w.req(tokens(rng, n), 1+rng.IntN(60))
					if i%3 == 2 {
						r.Sampling = engine.Sampling{Temperature: 0.9, TopP: 0.95, Seed: uint32(i), FrequencyPenalty: 0.2}
					}
					if i%5 == 4 {
						r.N = 3
					}
					d, p := w.both(context.Background(), r)
					m := *r
					m.ID, m.Bootstrap = "local-"+r.ID, nil
					local, err := w.d.Submit(context.Background(), &m)
					if err != nil {
						t.Fatal(err)
					}
					go func() {
						pa, da, la := read(t, p, r.N), read(t, d, r.N), read(t, local, r.N)
						done <- func() {
							w.check(r, da)
							w.check(&m, la)
							if pa.err != nil || !same(da, la) {
								t.Errorf("%s: prefill %v, pd and local differ: %v", r.ID, pa.err, !same(da, la))
							}
						}
					}()
				}
				for range conc {
					(<-done)()
				}
			})
		})
	}
}

func TestShortPromptIsNotStarvedByALongOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rng := newRand(t, 5)
		var chunks atomic.Int64
		w := newWorld(t, worldConfig{
			sim:   sim.Config{PrefillChunkTime: 10 * time.Millisecond, ChunkTokens: 64},
			phook: func(c sim.Call) error { chunks.Add(b2i(c.Op == sim.OpPrefill)); return nil },
		})
		defer w.close()
		long, short := w.req(tokens(rng, 2000), 1), w.req(tokens(rng, 40), 1)
		ld, lp := w.both(context.Background(), long)
		advance(25 * time.Millisecond) // the long one is in its third chunk (fake time)
		before := chunks.Load()
		sd, sp := w.both(context.Background(), short)
		if a := read(t, sp, 1); a.err != nil || chunks.Load()-before > 3 {
			t.Errorf("the short prompt took %d chunks (%v)", chunks.Load()-before, a.err)
		}
		w.check(short, read(t, sd, 1))
		if a := read(t, lp, 1); a.err != nil {
			t.Error(a.err)
		}
		w.check(long, read(t, ld, 1))
	})
}

func b2i(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// A stream of short prompts must not starve a long one either.
func TestLongPromptIsNotStarvedByShortOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rng := newRand(t, 6)
		w := newWorld(t, worldConfig{sim: sim.Config{PrefillChunkTime: 10 * time.Millisecond, StepTime: time.Millisecond}, prefill: PrefillConfig{MaxActive: 2}})
		defer w.close()
		long := w.req(tokens(rng, 640), 1)
		ld, lp := w.both(context.Background(), long)
		stop, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				case <-time.After(8 * time.Millisecond): // faster than the engine
				}
				r := w.req(tokens(rng, 40), 1)
				r.Deadline = time.Now().Add(time.Second)
				d, err := w.d.Submit(context.Background(), r)
				if err != nil {
					continue
				}
				p, err := w.p.Submit(context.Background(), r)
				if err != nil {
					d.Close()
					continue
				}
				go func() { read(t, p, 1) }()
				go func() { read(t, d, 1) }()
			}
		}()
		began := time.Now()
		read(t, lp, 1)
		if took := time.Since(began); took > 300*time.Millisecond { // 10 chunks, every second turn
			t.Errorf("the long prompt took %v", took)
		}
		close(stop)
		<-ended
		w.check(long, read(t, ld, 1))
		advance(2 * time.Second) // fake time: the rest ends by its deadline
		synctest.Wait()
	})
}

func TestPreemptedAnswersAreExact(t *testing.T) {
	var preemptions float64
	for seed := range uint64(12) {
		synctest.Test(t, func(t *testing.T) {
			rng := newRand(t, seed)
			cells := 120 + rng.IntN(100)
			w := newWorld(t, worldConfig{
				sim:    costs(sim.Config{KVCells: cells, ChunkTokens: 16, EOSEvery: 200, Recheck: true, MaxSeqs: 6}),
				decode: DecodeConfig{GrowReserve: 4, MaxRunning: 1 + rng.IntN(6)},
			})
			defer w.close()
			done := make(chan func(), 20)
			for i := range cap(done) {
				r := w.req(tokens(rng, 1+rng.IntN(60)), 1+rng.IntN(60))
				r.N = 1 + rng.IntN(3)
				r.Sampling = engine.Sampling{Temperature: float32(i % 2), Seed: uint32(i)}
				if i%4 == 3 {
					r.Bootstrap = nil
				}
				d, err := w.d.Submit(context.Background(), r)
				if err != nil {
					t.Fatal(err)
				}
				go func() {
					if r.Bootstrap != nil {
						p, err := w.p.Submit(context.Background(), r)
						if err != nil {
							t.Error(err)
							return
						}
						defer read(t, p, r.N)
					}
					a := read(t, d, r.N)
					done <- func() { w.check(r, a) }
				}()
			}
			for range cap(done) {
				(<-done)()
			}
			preemptions += metric(t, w.dreg, "baton_preemptions_total")
			synctest.Wait()
		})
	}
	if preemptions == 0 {
		t.Error("nothing was ever preempted: the test tests nothing")
	}
}

// metric reads one value of a registry (sum over labels).
func metric(t testing.TB, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	fams, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range fams {
		if f.GetName() != name {
			continue
		}
		sum := 0.0
		for _, m := range f.Metric {
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
		return sum
	}
	t.Fatalf("no metric %s", name)
	return 0
}

func TestStopStringsAndChoices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, worldConfig{sim: costs(sim.Config{})})
		defer w.close()
		rng := newRand(t, 9)
		r := w.req(tokens(rng, 100), 50)
		full := sim.Expected(w.cfg, r.Prompt, 50)
		var text strings.Builder
		for _, tk := range full {
			text.Write(w.de.Tokenizer().Piece(tk))
		}
		stop := text.String()[20:25]
		r.Stop = []string{stop, "never seen"}
		d, p := w.both(context.Background(), r)
		read(t, p, 1)
		a := read(t, d, 1)
		want, _, _ := strings.Cut(text.String(), stop)
		if a.text[0] != want || a.finish[0] != FinishStop {
			t.Errorf("got %q %s, want %q", a.text[0], a.finish[0], want)
		}
	})
}
