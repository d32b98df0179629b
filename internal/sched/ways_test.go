package sched

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/engine/sim"
)

// TestWays: live requests are told of as they are, ended ones are kept, and only the latest.
func TestWays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rng := newRand(t, 6)
		w := newWorld(t, worldConfig{sim: sim.Config{PrefillChunkTime: 10 * time.Millisecond, StepTime: time.Millisecond, ChunkTokens: 16}})
		defer w.close()
		r := w.req(tokens(rng, 40), 5)
		d, p := w.both(context.Background(), r)
		advance(25 * time.Millisecond) // two of three chunks are computed (fake time)
		pw, dw := w.p.Ways(), w.d.Ways()
		if len(pw) != 1 || pw[0].ID != r.ID || pw[0].Room != r.Bootstrap.Key.Room || pw[0].Phase != "prefilling" || len(pw[0].Times.Chunks) != 2 || pw[0].ChunksTotal != 3 || pw[0].PromptTokens != 40 {
			t.Errorf("prefill: %+v", pw)
		}
		if len(dw) != 1 || dw[0].Phase != "transferring" || dw[0].ChunksTotal != 3 || dw[0].Tokens != 0 {
			t.Errorf("decode: %+v", dw)
		}
		read(t, p, 1)
		w.check(r, read(t, d, 1))
		synctest.Wait()
		if dw = w.d.Ways(); len(dw) != 1 || dw[0].Phase != "ended" || dw[0].Cause != nil || dw[0].Tokens != 5 || len(dw[0].Times.Chunks) != 3 || dw[0].Times.Ended.IsZero() {
			t.Errorf("decode at the end: %+v", dw)
		}
		d, err := w.d.Submit(context.Background(), w.req(tokens(rng, 4), 1)) // nobody sends its KV
		if err != nil {
			t.Fatal(err)
		}
		d.Close()
		if dw = w.d.Ways(); len(dw) != 2 || dw[1].Cause == nil || dw[1].Cause.Code != "client_gone" || dw[1].Phase != "ended" {
			t.Errorf("decode after a failure: %+v", dw)
		}
		for i := range keepWays + 5 {
			w.d.ended.add(&Way{ID: fmt.Sprint(i)})
		}
		if dw = w.d.Ways(); len(dw) != keepWays || dw[0].ID != "5" || dw[keepWays-1].ID != fmt.Sprint(keepWays+4) {
			t.Errorf("%d ways are kept, %s to %s", len(dw), dw[0].ID, dw[len(dw)-1].ID)
		}
	})
}
