package sched

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/engine/sim"
)

// inOrder fails unless each of the times was reached, and not before the one in front of it.
func inOrder(t *testing.T, who string, times ...time.Time) {
	t.Helper()
	for i, at := range times {
		if at.IsZero() || i > 0 && at.Before(times[i-1]) {
			t.Errorf("%s: time %d of %v", who, i, times)
			return
		}
	}
}

// What is told of a request's way, on both sides and of a prompt that is computed on the decode side.
func TestTimesOfARequest(t *testing.T) {
	for _, group := range []int{0, 1} {
		synctest.Test(t, func(t *testing.T) {
			cfg := costs(sim.Config{ChunkTokens: 16})
			cfg.Layers, cfg.LayerGroup = 4, group // 0: a chunk leaves whole
			w := newWorld(t, worldConfig{sim: cfg})
			defer w.close()
			r := w.req(tokens(newRand(t, 1), 60), 5) // 59 tokens of KV: 4 chunks
			ds, ps := w.both(context.Background(), r)
			lr := *r
			lr.ID, lr.Bootstrap = "local", nil
			ls, err := w.d.Submit(context.Background(), &lr)
			if err != nil {
				t.Fatal(err)
			}
			w.check(r, read(t, ds, 1))
			read(t, ps, 1)
			read(t, ls, 1)
			for _, s := range []Stream{ds, ps, ls} {
				s.Close()
			}
			p, d, l := ps.Phases(), ds.Phases(), ls.Phases()
			inOrder(t, "prefill", p.Submitted, p.Granted, p.Reserved, p.Sent, p.Transferred, p.Ended)
			inOrder(t, "prefill, computation", p.Reserved, p.Computed, p.Transferred)
			inOrder(t, "decode", d.Submitted, d.Reserved, d.Granted, d.Landed, d.Transferred, d.FirstToken, d.Ended)
			inOrder(t, "local", l.Submitted, l.Reserved, l.Transferred, l.FirstToken, l.Ended)
			for who, ph := range map[string]Phases{"prefill": p, "decode": d, "local": l} {
				if len(ph.Chunks) != 4 {
					t.Errorf("%s: %d chunks", who, len(ph.Chunks))
				}
				for i, c := range ph.Chunks {
					inOrder(t, who, c.From, c.To)
					if took := c.To.Sub(c.From) > 0; took == (who == "decode") || i > 0 && c.From.Before(ph.Chunks[i-1].To) {
						t.Errorf("%s: chunk %d: %v", who, i, ph.Chunks)
					}
				}
			}
		})
	}
}

// What is kept of a long prompt is bounded, and still covers all of it.
func TestChunkTimesAreBounded(t *testing.T) {
	l, at := &life{}, time.Unix(0, 0)
	for i := range 1000 {
		l.chunkTime(at.Add(time.Duration(i)*time.Second), at.Add(time.Duration(i+1)*time.Second))
	}
	c := l.Phases().Chunks
	if len(c) != maxChunkTimes || c[0].From != at || c[len(c)-1].From != at.Add((maxChunkTimes-1)*time.Second) || c[len(c)-1].To != at.Add(1000*time.Second) {
		t.Errorf("%d chunks, last %v", len(c), c[len(c)-1])
	}
}
