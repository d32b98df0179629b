package sched

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/room"
)

// layered is a model of 4 layers that leave one by one.
func layered(c sim.Config) sim.Config {
	c.Layers, c.LayerGroup = 4, 1
	return c
}

// TestLayersLeaveWhenComputed: the parts of a chunk leave after a quarter, a half, three quarters and all of its time, and what
// the request waits beyond compute is what its last part takes, until the room has ended, not until somebody has heard so. Without
// layers a chunk leaves when its time is over.
func TestLayersLeaveWhenComputed(t *testing.T) {
	for _, group := range []int{0, 1} {
		synctest.Test(t, func(t *testing.T) {
			cfg := layered(sim.Config{ChunkTokens: 10, PrefillChunkTime: 80 * time.Millisecond})
			cfg.LayerGroup = group
			w := newWorld(t, worldConfig{sim: cfg})
			defer w.close()
			w.hubs.hold, w.hubs.lag = true, 2*time.Millisecond
			r := w.req(tokens(newRand(t, 1), 21), 5)
			began := time.Now()
			d, p := w.both(context.Background(), r)
			advance(160*time.Millisecond + 7*time.Millisecond + w.hubs.lag)
			w.hubs.flow(r.Bootstrap.Key) // 7 ms after the end of the last chunk
			if a := read(t, p, 1); a.err != nil {
				t.Error(a.err)
			}
			w.check(r, read(t, d, 1))
			if group == 0 && len(w.hubs.parted) > 0 {
				t.Errorf("parts %v of an engine without layers", w.hubs.parted)
			}
			for k, part := range w.hubs.parted {
				if at := part.at.Sub(began); part.chunk != k/4 || at != time.Duration(k+1)*20*time.Millisecond {
					t.Errorf("part %d is of chunk %d and left after %v", k, part.chunk, at)
				}
			}
			if n := len(w.hubs.parted); group == 1 && n != 8 {
				t.Errorf("%d parts", n)
			}
			if sum := total(t, w.preg, "baton_kv_exposed_transfer_seconds"); sum != 0.007 {
				t.Errorf("the prefill side says that %v s were exposed", sum)
			}
			if n := metric(t, w.dreg, "baton_kv_exposed_transfer_seconds"); n != 1 {
				t.Errorf("%v observations on the decode side", n)
			}
		})
	}
}

// TestImportsGiveWay: who hears on the other side that the last chunk has landed has the core before the imports have it, once a request.
func TestImportsGiveWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var imports atomic.Int64
		w := newWorld(t, worldConfig{sim: sim.Config{ChunkTokens: 10}, dhook: func(c sim.Call) error {
			imports.Add(b2i(c.Op == sim.OpImport))
			return nil
		}})
		defer w.close()
		w.hubs.hold = true
		var before []int64 // imports
		w.d.giveWay = func() { before = append(before, imports.Load()) }
		r := w.req(tokens(newRand(t, 1), 31), 2)
		d, p := w.both(context.Background(), r)
		synctest.Wait()
		if len(before) > 0 {
			t.Error("gave way when nothing had landed")
		}
		w.hubs.flow(r.Bootstrap.Key)
		if a := read(t, p, 1); a.err != nil {
			t.Error(a.err)
		}
		w.check(r, read(t, d, 1))
		if len(before) != 1 || before[0] != 0 || imports.Load() != 3 {
			t.Errorf("gave way after %v imports, of %d", before, imports.Load())
		}
	})
}

// total is the sum of a histogram's observations.
func total(t testing.TB, reg *prometheus.Registry, name string) (sum float64) {
	fams, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range fams {
		if f.GetName() == name {
			for _, m := range f.Metric {
				sum += m.GetHistogram().GetSampleSum()
			}
		}
	}
	return sum
}

// TestLayeredAnswersAreExact: with little staging memory, so that some chunks leave by layers and some whole, among requests that
// end before their time.
func TestLayeredAnswersAreExact(t *testing.T) {
	for seed := range uint64(4) {
		synctest.Test(t, func(t *testing.T) {
			rng := newRand(t, seed)
			w := newWorld(t, worldConfig{sim: costs(layered(sim.Config{ChunkTokens: 16, Recheck: true}))})
			defer w.close()
			w.hubs.staging, w.hubs.hold = 1+int(seed), true
			stop := make(chan struct{})
			defer close(stop)
			go w.hubs.flowAll(stop, 3*time.Millisecond)
			done := make(chan func(), 24)
			for i := range cap(done) {
				r := w.req(tokens(rng, 1+rng.IntN(90)), 1+rng.IntN(20))
				d, p := w.both(context.Background(), r)
				gone := i%4 == 3
				if gone {
					after := time.Duration(rng.IntN(60)) * time.Millisecond
					go func() { advance(after); p.Close() }()
				}
				go func() {
					pa, da := read(t, p, 1), read(t, d, 1)
					done <- func() {
						if !gone || da.err == nil {
							w.check(r, da)
						}
						if !gone && pa.err != nil {
							t.Error(pa.err)
						}
					}
				}()
			}
			for range cap(done) {
				(<-done)()
			}
			parted, sent := 0, len(w.hubs.sent)
			for k, part := range w.hubs.parted {
				if k == 0 || w.hubs.parted[k-1].key != part.key || w.hubs.parted[k-1].chunk != part.chunk {
					parted++
				}
			}
			if parted == 0 || seed == 0 && parted >= sent {
				t.Errorf("%d of %d chunks left by layers: the test tests nothing", parted, sent)
			}
		})
	}
}

// flowAll lands what every room holds, again and again.
func (h *fakeHubs) flowAll(stop <-chan struct{}, every time.Duration) {
	for {
		select {
		case <-stop:
			return
		case <-time.After(every):
		}
		h.mu.Lock()
		for _, r := range h.rooms {
			(&fakeSending{r}).land()
		}
		h.mu.Unlock()
	}
}

// faulty calls computed for the groups it is told, whatever is computed.
type faulty struct {
	*sim.Engine
	groups []int
}

func (f faulty) PrefillLayers(ctx context.Context, seq engine.Seq, tokens []engine.Token, pos int, computed func(g int) error) error {
	k := 0
	return f.Engine.PrefillLayers(ctx, seq, tokens, pos, func(int) error {
		if k == len(f.groups) {
			return nil
		}
		k++
		return computed(f.groups[k-1])
	})
}

// TestEngineWithWrongLayersIsRefused: groups out of order, twice, not there or missing fail the request, and nothing is held.
func TestEngineWithWrongLayersIsRefused(t *testing.T) {
	for name, groups := range map[string][]int{"order": {0, 2}, "not first": {1}, "twice": {0, 0}, "unknown": {0, 1, 2, 4}, "negative": {-1}, "missing": {0, 1, 2}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, worldConfig{sim: costs(layered(sim.Config{ChunkTokens: 8}))})
				defer w.close()
				_ = w.p.Close()
				w.p = NewPrefill(PrefillConfig{Engine: faulty{w.pe, groups}, Senders: fakeSenders{w.hubs}})
				r := w.req(tokens(newRand(t, 1), 20), 5)
				d, p := w.both(context.Background(), r)
				a := read(t, p, 1)
				if a.err == nil || a.err.Code != room.CodeEngine || !strings.Contains(a.err.Detail, "layer group") {
					t.Errorf("prefill: %v", a.err)
				}
				if a := read(t, d, 1); a.err == nil {
					t.Error("decode answered")
				}
			})
		})
	}
}

// TestLayeredChunkFails: an engine that fails or a client that leaves in the middle of a chunk, after some layers have left.
func TestLayeredChunkFails(t *testing.T) {
	broken := errors.New("broken")
	for nth := int64(1); nth <= 9; nth++ {
		t.Run(fmt.Sprint(nth), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var exports atomic.Int64
				w := newWorld(t, worldConfig{sim: costs(layered(sim.Config{ChunkTokens: 8})), phook: func(c sim.Call) error {
					if c.Op == sim.OpExport && exports.Add(1) == nth {
						return broken
					}
					return nil
				}})
				defer w.close()
				r := w.req(tokens(rand.New(rand.NewPCG(1, 2)), 30), 5)
				d, p := w.both(context.Background(), r)
				if a := read(t, p, 1); a.err == nil || a.err.Code != room.CodeEngine {
					t.Errorf("prefill: %v", a.err)
				}
				if a := read(t, d, 1); a.err == nil {
					t.Error("decode answered")
				}
				if n := len(w.hubs.parted); n != int(nth-1) {
					t.Errorf("%d parts left before export %d failed", n, nth)
				}
				next := w.req(tokens(rand.New(rand.NewPCG(1, 3)), 30), 5)
				d, p = w.both(context.Background(), next)
				advance(time.Duration(nth) * 200 * time.Microsecond) // of 2.2 ms a chunk
				p.Close()
				if a := read(t, d, 1); a.err == nil {
					t.Error("decode answered a request whose prefill side left")
				}
			})
		})
	}
}
