package sched

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/engine/sim"
)

// A prompt that waits for its turn is rid of at once when its client leaves: it holds nothing of the
// engine, so it need not wait until the chunk of another is computed.
func TestWaitingPromptLeavesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rng := newRand(t, 9)
		w := newWorld(t, worldConfig{sim: sim.Config{PrefillChunkTime: 10 * time.Second, ChunkTokens: 64}, prefill: PrefillConfig{MaxActive: 1}})
		defer w.close()
		first := w.req(tokens(rng, 100), 1)
		fd, fp := w.both(context.Background(), first)
		advance(time.Second) // its first chunk is being computed
		r := w.req(tokens(rng, 100), 1)
		d, p := w.both(context.Background(), r)
		advance(time.Second)
		if s := w.p.Snapshot(); s.Waiting != 1 || s.Running != 1 {
			t.Fatalf("not waiting: %+v", s)
		}
		left := time.Now()
		p.Close()
		d.Close()
		if took := time.Since(left); took > 100*time.Millisecond {
			t.Errorf("the waiting prompt held on for %v", took)
		}
		if s := w.p.Snapshot(); s.Waiting != 0 || s.Running != 1 {
			t.Errorf("afterwards: %+v", s)
		}
		// The line goes on past it.
		last := w.req(tokens(rng, 100), 1)
		ld, lp := w.both(context.Background(), last)
		for _, s := range []Stream{fp, lp} {
			if a := read(t, s, 1); a.err != nil {
				t.Error(a.err)
			}
		}
		w.check(first, read(t, fd, 1))
		w.check(last, read(t, ld, 1))
	})
}
