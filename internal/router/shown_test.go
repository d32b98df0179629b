package router

import (
	"context"
	"sync"
	"testing"
	"time"
)

// A worker that answers nothing, not even an abort, does not keep others from being told: when many clients leave at once, all
// prefill legs are released within a second.
func TestStuckAbortsHinderNobody(t *testing.T) {
	const clients = 4 * releaseAtOnce
	inBubble(t, Config{}, []script{silent}, []script{silent}, func(t *testing.T, b *bed, p, d []*fake) {
		d[0].mu.Lock()
		d[0].stuck = true
		d[0].mu.Unlock()
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		var wg sync.WaitGroup
		for range clients {
			wg.Go(func() { b.post(ctx, "/v1/chat/completions", streamBody) })
		}
		<-time.After(time.Second)
		left := time.Now()
		leave()
		wg.Wait()
		<-time.After(10 * time.Second)
		for i := range clients {
			p[0].released(i, left, time.Second)
		}
	})
}
