package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestLocalFallback: the only prefill worker is killed with requests on it, and the decode worker computes their prompts itself: each
// answer is the undisturbed one.
func TestLocalFallback(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "tcp", model: "seed=1", prefill: []string{"--sim", "seed=1,prefill-chunk=100ms"}, router: []string{"--local-fallback"}})
	usable(t, s)
	workers, err := s.Router.Get(t.Context(), "/workers")
	if err != nil || strings.Count(string(workers), `"kind":"baton"`) != 2 {
		t.Fatalf("the workers' kinds: %s, %v", workers, err)
	}
	const n, promptLen, max = 6, 320, 8 // 20 chunks of 100 ms each
	answers := make(chan error, n)
	for i := range n {
		go func() {
			p := prompt(i, promptLen)
			ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
			defer stop()
			if a := complete(ctx, s.URL(), p, max, nil); !a.ok() || !a.Done || a.Text != m.text(p, max) {
				answers <- fmt.Errorf("request %d: %v, text %q, want %q", i, a, a.Text, m.text(p, max))
				return
			}
			answers <- nil
		}()
	}
	eventually(t, settleTime, func(ctx context.Context) error { // it computes the first of them
		w, err := s.Prefills[0].Inspect(ctx)
		if err == nil && w.Rooms.Live == 0 {
			err = fmt.Errorf("no room yet")
		}
		return err
	})
	s.Prefills[0].Kill()
	for range n {
		if err := <-answers; err != nil {
			t.Error(err)
		}
	}
	serves(t, s, m, 100, 4, promptLen, max) // without any prefill worker
}
