package router

import (
	"net/http"
	"strings"
	"testing"
	"time"
)

// Readiness follows the last usable pair within 2 s, both ways, whichever leg it is and however it goes.
func TestReadiness(t *testing.T) {
	const token = "an-admin-token-of-some-length"
	hang := func(_ http.ResponseWriter, req *http.Request) { <-req.Context().Done() }
	sick := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }
	health := func(f *fake, h func(http.ResponseWriter, *http.Request)) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.health = h
	}
	drain := func(verb string) func(b *bed, f *fake) {
		return func(b *bed, f *fake) {
			leg := map[byte]string{'p': "prefill", 'd': "decode"}[f.addr[0]]
			if g := b.post(b.t.Context(), "/workers/"+leg+"-"+f.addr+"/"+verb, "", "Authorization", "Bearer "+token); g.status != 200 {
				b.t.Fatalf("%s: %d %s", verb, g.status, g.body)
			}
		}
	}
	for name, c := range map[string]struct {
		away, back func(b *bed, f *fake)
		why        string
	}{
		"killed":          {func(_ *bed, f *fake) { f.kill() }, func(_ *bed, f *fake) { f.start() }, "connection refused"},
		"stopped":         {func(_ *bed, f *fake) { health(f, hang) }, func(_ *bed, f *fake) { health(f, nil) }, "no answer to a probe for "},
		"says it is sick": {func(_ *bed, f *fake) { health(f, sick) }, func(_ *bed, f *fake) { health(f, nil) }, "status 500"},
		"drained":         {drain("drain"), drain("undrain"), "draining"},
		"ejected": {func(b *bed, f *fake) {
			f.set(say(500, `{"error":{"message":"oom"}}`))
			b.chat()
		}, func(_ *bed, f *fake) {
			f.set(okAnswer)
			<-time.After(3 * time.Second) // the ejection's time
		}, "ejected for "},
	} {
		for _, leg := range []string{"prefill", "decode"} {
			t.Run(name+"/"+leg, func(t *testing.T) {
				inBubble(t, Config{AdminToken: token, EjectAfter: 1, EjectTime: 3 * time.Second, MaxRetries: -1}, []script{okPrefill}, []script{after(100*time.Millisecond, okAnswer)}, func(t *testing.T, b *bed, p, d []*fake) {
					f := p[0]
					if leg == "decode" {
						f = d[0]
					}
					until := func(status int) got {
						t.Helper()
						for start := time.Now(); ; <-time.After(10 * time.Millisecond) {
							g := b.get("/health")
							if g.status == status {
								return g
							}
							if time.Since(start) > 2*time.Second {
								t.Fatalf("after 2 s it still is %d %s", g.status, g.body)
							}
						}
					}
					until(200)
					<-time.After(1234 * time.Millisecond)
					c.away(b, f)
					if g := until(503); !strings.Contains(g.body, "no "+leg+" worker is up: "+f.addr+" (") || !strings.Contains(g.body, c.why) {
						t.Errorf("it says %s; want %q", g.body, c.why)
					}
					<-time.After(1234 * time.Millisecond)
					c.back(b, f)
					until(200)
				})
			})
		}
	}
}

// One worker of a leg away is no reason; two that do not fit each other are.
func TestReadinessCountsPairs(t *testing.T) {
	hang := func(_ http.ResponseWriter, req *http.Request) { <-req.Context().Done() }
	inBubble(t, Config{}, []script{okPrefill, okPrefill}, []script{okAnswer, okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		for _, f := range []*fake{p[0], d[1]} {
			f.mu.Lock()
			f.health = hang
			f.mu.Unlock()
		}
		for range 100 {
			<-time.After(50 * time.Millisecond)
			if g := b.get("/health"); g.status != 200 {
				t.Fatalf("%d %s", g.status, g.body)
			}
		}
		if g := b.get("/health"); !strings.Contains(g.body, `"decode":1,"prefill":1`) {
			t.Error(g.body)
		}
	})
	inBubble(t, Config{Dynamic: true}, nil, nil, func(t *testing.T, b *bed, _, _ []*fake) {
		p, d := b.net.worker(t, "p:80", okPrefill), b.net.worker(t, "d:80", okAnswer)
		t.Cleanup(p.kill)
		t.Cleanup(d.kill)
		if err := b.r.SetWorkers("here", []Backend{{URL: "http://p:80", Kind: KindVLLM}}, []Backend{{URL: "http://d:80", Kind: KindBaton}}); err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Second)
		if g := b.get("/health"); g.status != 503 || !strings.Contains(g.body, "of one kind") {
			t.Errorf("%d %s", g.status, g.body)
		}
	})
}

// A router that is about to close says so at once, and still serves.
func TestDrainIsNotReady(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		b.r.Drain()
		b.get("/health").fails(t, 503, "shutdown")
		b.chat().ok(t, chatAnswer)
	})
}
