package router

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// Each leg is counted once, by how it ended, with the time of those that did their part.
func TestLegsAreCounted(t *testing.T) {
	inBubble(t, Config{MaxRetries: -1, DecodePolicy: "random", EjectAfter: 1}, []script{okPrefill}, []script{sse(time.Second, role, token, last, done)}, func(t *testing.T, b *bed, p, d []*fake) {
		b.chatStream().ok(t, role+token+last+done)
		p[0].set(silent)
		d[0].set(silent)
		b.chat(HeaderTimeout, "1000").fails(t, 504, "deadline") // both are let go
		d[0].set(say(500, "boom"))
		b.chat().fails(t, 500, "engine_failed") // decode fails and is ejected; prefill is let go
		p[0].set(say(400, `{"error":{"message":"no"}}`))
		d[0].set(silent)
		b.chat().fails(t, 400, "invalid_request")
		synctest.Wait()
		text := b.get("/metrics").body
		for _, want := range []string{
			`baton_router_legs_total{leg="prefill",outcome="ok",policy="least-inflight",worker="p0:80"} 1`,
			`baton_router_legs_total{leg="prefill",outcome="failed",policy="least-inflight",worker="p0:80"} 1`,
			`baton_router_legs_total{leg="prefill",outcome="let_go",policy="least-inflight",worker="p0:80"} 2`,
			`baton_router_legs_total{leg="decode",outcome="ok",policy="random",worker="d0:80"} 1`,
			`baton_router_legs_total{leg="decode",outcome="failed",policy="random",worker="d0:80"} 1`,
			`baton_router_legs_total{leg="decode",outcome="let_go",policy="random",worker="d0:80"} 2`,
			`baton_router_leg_seconds_count{leg="decode",worker="d0:80"} 1`,
			`baton_router_leg_seconds_sum{leg="decode",worker="d0:80"} 1`,
			`baton_router_leg_first_token_seconds_count{worker="d0:80"} 1`,
			`baton_router_leg_first_token_seconds_sum{worker="d0:80"} 1`,
			`baton_router_ejections_total{leg="decode",worker="d0:80"} 1`,
			`baton_router_ejections_total{leg="prefill",worker="p0:80"} 0`,
			`baton_router_worker_ejected{leg="decode",worker="d0:80"} 1`,
			`baton_router_worker_ejected{leg="prefill",worker="p0:80"} 0`,
		} {
			if !strings.Contains(text, want+"\n") {
				t.Errorf("metrics lack %s", want)
			}
		}
		if t.Failed() {
			t.Log(text)
		}
		<-time.After(time.Minute)
		if text = b.get("/metrics").body; !strings.Contains(text, `baton_router_worker_ejected{leg="decode",worker="d0:80"} 0`) {
			t.Errorf("still ejected:\n%s", text)
		}
	})
}

// A worker that has left has no series any more, also when its last legs end badly at that moment; one that comes back begins anew.
func TestSeriesOfAWorkerThatLeft(t *testing.T) {
	inBubble(t, Config{MaxRetries: -1, EjectAfter: 1}, []script{okPrefill}, []script{okStream}, func(t *testing.T, b *bed, p, d []*fake) {
		b.chatStream().ok(t, role+token+last+done)
		d[0].set(after(time.Second, say(500, "boom")))
		ended := make(chan got, 8)
		for range cap(ended) {
			go func() { ended <- b.chat() }()
		}
		synctest.Wait() // all of them are at the worker
		w := b.r.decodes.workers()[0]
		if err := b.r.SetWorkers(SourceStatic, backends(p...), nil); err != nil {
			t.Fatal(err)
		}
		for range cap(ended) {
			(<-ended).fails(t, 500, "engine_failed")
		}
		<-time.After(time.Minute)
		b.r.strike(w, time.Now(), soleWeight, "judged after it was forgotten")
		if text := b.get("/metrics").body; strings.Contains(text, "d0:80") || !strings.Contains(text, "p0:80") {
			t.Errorf("series of the worker that left, or none of the other:\n%s", text)
		}
		d[0].set(okStream)
		if err := b.r.SetWorkers(SourceStatic, backends(p...), backends(d...)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		b.chatStream().ok(t, role+token+last+done)
		if text := b.get("/metrics").body; !strings.Contains(text, `baton_router_legs_total{leg="decode",outcome="ok",policy="least-inflight",worker="d0:80"} 1`) {
			t.Errorf("the worker that came back does not count:\n%s", text)
		}
	})
}
