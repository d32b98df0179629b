package router

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestOutlier(t *testing.T) {
	const after, base = 3, 5 * time.Second
	start := time.Unix(1000, 0)
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	var o outlier
	fail := func(s, began, weight int) time.Duration { return o.failed(at(s), at(began), weight, after, base) }
	if fail(1, 0, soleWeight)+fail(2, 0, soleWeight) != 0 || o.left(at(2)) != 0 {
		t.Fatal("ejected after two failures")
	}
	o.succeeded(at(3))
	if fail(4, 3, soleWeight)+fail(5, 3, soleWeight) != 0 {
		t.Fatal("a success did not clear")
	}
	if d := fail(6, 3, soleWeight); d != base || o.left(at(6)) != base || o.left(at(11)) != 0 {
		t.Fatalf("third in a row: %v, left %v", d, o.left(at(6)))
	}
	if d := fail(7, 3, soleWeight); d != 0 {
		t.Fatalf("a straggler made it %v", d)
	}
	if d := fail(12, 11, soleWeight); d != 2*base {
		t.Fatalf("on probation: %v", d)
	}
	for i, want := range []time.Duration{4, 8, 16, 16} {
		if d := fail(100*(i+1), 100*(i+1), soleWeight); d != want*base {
			t.Fatalf("ejection %d: %v", i+3, d)
		}
	}
	o.succeeded(at(401)) // begun before it was ejected: it proves nothing of probation
	if o.left(at(402)) == 0 {
		t.Fatal("a straggler's success ended the ejection")
	}
	o.succeeded(at(1000))
	if fail(1001, 1001, soleWeight) != 0 || o.left(at(1001)) != 0 {
		t.Fatal("not cleared after probation")
	}
	o = outlier{}
	o.succeeded(at(10))
	for range 20 {
		if fail(11, 9, sharedWeight) != 0 {
			t.Fatal("blamed for the other leg's failure, although it has done its part since")
		}
	}
	for i := range 2*after - 1 {
		if fail(12, 11, sharedWeight) != 0 {
			t.Fatalf("ejected by %d shared failures", i+1)
		}
	}
	if fail(12, 11, sharedWeight) == 0 || o.failed(at(90), at(90), soleWeight, -1, base) != 0 {
		t.Fatal("not ejected, or although that is off")
	}
}

// One of two workers of a leg fails every request although its health probes succeed: no client sees it, and it soon is asked no more.
func TestFailingWorkerIsEjected(t *testing.T) {
	ok := after(time.Millisecond, okPrefill)
	for name, bad := range map[string]script{
		"400 for all":         say(400, `{"error":{"message":"no such field"}}`),
		"404 for all":         say(404, `{"object":"error","message":"no such model"}`),
		"422 for all":         say(422, `{"detail":"unprocessable"}`),
		"500 for all":         say(500, "boom"),
		"resets":              reset,
		"finish abort":        say(200, genAbort),
		"empty":               say(200, ""),
		"not JSON":            say(200, "<html>"),
		"stream of garbage":   sse("data: {\"choices\":\n\n"),
		"stream without end":  sse(": ping\n\n"),
		"redirects":           say(302, "", "Location", "http://elsewhere/"),
		"finish error":        sse("data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"error\"}]}\n\n", done),
		"error event at once": sse("data: {\"error\":{\"message\":\"oom\"}}\n\n", done),
	} {
		for _, leg := range []string{"prefill", "decode"} {
			if name == "stream without end" && leg == "prefill" {
				continue // a prefill worker owes no finish
			}
			t.Run(leg+" "+name, func(t *testing.T) {
				p, d := []script{ok, ok}, []script{after(time.Millisecond, okAnswer), after(time.Millisecond, okAnswer)}
				if leg == "prefill" {
					p[0], d[0], d[1] = bad, after(10*time.Millisecond, okAnswer), after(10*time.Millisecond, okAnswer)
				} else {
					d[0] = bad
				}
				inBubble(t, Config{Policy: PolicyRoundRobin}, p, d, func(t *testing.T, b *bed, p, d []*fake) {
					one := d[0]
					if leg == "prefill" {
						one = p[0]
					}
					for range 20 {
						b.chat().ok(t, chatAnswer)
					}
					if n := one.count(); n == 0 || n > 3 {
						t.Errorf("the bad worker got %d requests", n)
					}
					if !strings.Contains(b.log.String(), "worker is ejected") {
						t.Errorf("log:\n%s", b.log)
					}
					one.set(okAnswer) // healed: probation brings it back
					<-time.After(b.r.cfg.EjectTime)
					before := one.count()
					for range 8 {
						b.chat().ok(t, chatAnswer)
					}
					if one.count() == before {
						t.Error("a healed worker gets no requests")
					}
				})
			})
		}
	}
}

// A request that is wrong is refused by all, and blames nobody.
func TestClientsFaultBlamesNobody(t *testing.T) {
	wrong := say(400, `{"error":{"message":"bad temperature"}}`)
	inBubble(t, Config{Policy: PolicyRoundRobin}, []script{okPrefill, okPrefill}, []script{wrong, wrong}, func(t *testing.T, b *bed, p, d []*fake) {
		for range 20 {
			if e := b.chat().fails(t, 400, "invalid_request"); !strings.Contains(e.Error.Message, "bad temperature") {
				t.Fatalf("message %q", e.Error.Message)
			}
		}
		if n := d[0].count() + d[1].count(); n != 40 {
			t.Errorf("%d legs for 20 requests: want two opinions each", n)
		}
		for _, w := range b.r.all() {
			w.outlier.mu.Lock()
			points := w.outlier.points
			w.outlier.mu.Unlock()
			if points != 0 || w.outlier.left(time.Now()) != 0 {
				t.Errorf("%s is blamed", w.name)
			}
		}
	})
}

// The other opinion may break off, or not come: the client is told what it has seen to happen.
func TestSecondOpinionFails(t *testing.T) {
	wrong := say(400, `{"error":{"message":"bad temperature"}}`)
	inBubble(t, Config{Policy: PolicyRoundRobin}, []script{okPrefill}, []script{after(time.Millisecond, wrong), sse(role, token, errReset)}, func(t *testing.T, b *bed, p, d []*fake) {
		b.chatStream().breaks(t, role+token, "peer_lost")
		d[1].set(say(500, "boom"))
		b.chat() // either may be first
		b.chat().fails(t, 400, "invalid_request")
		d[1].set(silent)
		g := b.chat(HeaderTimeout, "1000")
		if g.status != 400 && g.status != 504 || g.took > 1500*time.Millisecond {
			t.Errorf("%d after %v: %s", g.status, g.took, g.body)
		}
	})
}

// Backpressure passes through with its Retry-After and ejects nobody.
func TestBackpressureBlamesNobody(t *testing.T) {
	for _, status := range []int{429, 503} {
		busy := say(status, `{"error":{"message":"queue full"}}`, "Retry-After", "7")
		inBubble(t, Config{Policy: PolicyRoundRobin}, []script{okPrefill}, []script{busy, busy}, func(t *testing.T, b *bed, p, d []*fake) {
			for range 10 {
				if g := b.chat(); g.status != status || g.header.Get("Retry-After") != "7" {
					t.Fatalf("%d, Retry-After %q: %s", g.status, g.header.Get("Retry-After"), g.body)
				}
			}
			if d[0].count() != 10 || d[1].count() != 10 {
				t.Errorf("requests: d0 %d, d1 %d", d[0].count(), d[1].count())
			}
		})
	}
}

// The last usable worker is tried, ejected or not.
func TestLastWorkerIsTried(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{after(time.Millisecond, say(500, "boom"))}, func(t *testing.T, b *bed, p, d []*fake) {
		for range 6 {
			b.chat().fails(t, 500, "engine_failed")
		}
		if d[0].count() != 6 || b.r.decodes.workers()[0].outlier.left(time.Now()) == 0 {
			t.Fatalf("%d requests, ejected for %v", d[0].count(), b.r.decodes.workers()[0].outlier.left(time.Now()))
		}
		d[0].set(okAnswer)
		b.chat().ok(t, chatAnswer)
	})
	// A retry may go to an ejected worker, too.
	inBubble(t, Config{Policy: PolicyRoundRobin, EjectTime: time.Hour}, []script{okPrefill}, []script{after(time.Millisecond, say(500, "boom")), after(2*time.Millisecond, okAnswer)}, func(t *testing.T, b *bed, p, d []*fake) {
		for range 8 {
			b.chat().ok(t, chatAnswer)
		}
		d[1].set(after(time.Millisecond, say(500, "boom")))
		d[0].set(okAnswer)
		b.chat().ok(t, chatAnswer)
	})
}

// A worker that answers neither requests nor probes: what waits for it is tried elsewhere, in seconds, not at the deadline. With two
// requests a second at most two are slow and none fails.
func TestHungDecodeCostsAtMostTwoSlowRequests(t *testing.T) {
	for name, stream := range map[string]bool{"whole": false, "stream": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{}, []script{okPrefill, okPrefill}, []script{after(300*time.Millisecond, okStream), after(300*time.Millisecond, okStream)}, func(t *testing.T, b *bed, p, d []*fake) {
				if !stream {
					d[1].set(after(300*time.Millisecond, okAnswer))
				}
				d[0].set(silent)
				d[0].setHealth(hung)
				results := make(chan got)
				const requests = 40
				for range requests {
					go func() {
						if stream {
							results <- b.chatStream()
						} else {
							results <- b.chat()
						}
					}()
					<-time.After(500 * time.Millisecond)
				}
				slow := 0
				for range requests {
					g := <-results
					if g.err != nil || g.status != 200 {
						t.Fatalf("%d %s %v", g.status, g.body, g.err)
					}
					if g.took > time.Second {
						slow++
					}
					if g.took > 8*time.Second {
						t.Errorf("took %v", g.took)
					}
				}
				if slow < 1 || slow > 2 {
					t.Errorf("%d slow requests", slow)
				}
				<-time.After(time.Second)
				for i := range d[0].count() {
					d[0].released(i, d[0].leg(i).at, 8*time.Second)
				}
			})
		})
	}
}

// The same on the prefill side, and a stream that runs is left alone.
func TestHungPrefill(t *testing.T) {
	inBubble(t, Config{Policy: PolicyRoundRobin}, []script{silent, okPrefill}, []script{after(5*time.Second, okStream)}, func(t *testing.T, b *bed, p, d []*fake) {
		p[0].setHealth(hung)
		d[0].set(func(w http.ResponseWriter, r *http.Request, l *leg1) {
			if l.bootHost() == "boot0" {
				silent(w, r, l) // no KV comes
				return
			}
			okStream(w, r, l)
		})
		for range 2 {
			if g := b.chatStream(); g.status != 200 || g.err != nil || g.took > 8*time.Second {
				t.Fatalf("%d %s after %v", g.status, g.body, g.took)
			}
		}
		synctest.Wait()
		if p[1].count() < 2 {
			t.Errorf("requests: p0 %d, p1 %d", p[0].count(), p[1].count())
		}
	})
	inBubble(t, Config{}, []script{okPrefill}, []script{sse(role, token, 20*time.Second, last, done), okStream}, func(t *testing.T, b *bed, p, d []*fake) {
		d[0].setHealth(hung)
		b.chatStream().ok(t, role+token+last+done)
	})
}

// bootHost is the request's bootstrap host.
func (l *leg1) bootHost() string {
	var s string
	_ = json.Unmarshal(l.fields["bootstrap_host"], &s)
	return s
}

// While a worker is ejected and the other is full, requests wait; the end of the ejection is the end of their wait, not the next
// answer of the other.
func TestEjectionEndsWakeTheQueue(t *testing.T) {
	c := Config{Policy: PolicyRoundRobin, MaxPerWorker: 1, EjectTime: 3 * time.Second, MaxRetries: -1}
	inBubble(t, c, []script{okPrefill, okPrefill, okPrefill}, []script{say(500, "boom"), after(time.Minute, okAnswer)}, func(t *testing.T, b *bed, p, d []*fake) {
		long := make(chan got)
		d[1].set(okAnswer)
		for range 6 { // in turn: three failures of d0
			b.chat()
		}
		if left := b.r.decodes.workers()[0].outlier.left(time.Now()); left != 3*time.Second {
			t.Fatalf("ejected for %v", left)
		}
		d[1].set(after(time.Minute, okAnswer))
		go func() { long <- b.chat() }()
		synctest.Wait()
		d[0].set(okAnswer)
		g := b.chat()
		g.ok(t, chatAnswer)
		if g.took < 2900*time.Millisecond || g.took > 3500*time.Millisecond {
			t.Errorf("waited %v for the end of an ejection of 3 s", g.took)
		}
		(<-long).ok(t, chatAnswer)
	})
}
