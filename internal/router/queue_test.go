package router

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/router/admission"
)

// arrivals remembers the order in which a worker got requests, by their X-Who.
type arrivals struct {
	mu  sync.Mutex
	who []string
}

func (a *arrivals) script(s script) script {
	return func(w http.ResponseWriter, r *http.Request, l *leg1) {
		a.mu.Lock()
		a.who = append(a.who, l.header.Get("X-Who"))
		a.mu.Unlock()
		s(w, r, l)
	}
}

// later sends a request in a goroutine of its own and returns when it is at a worker or waits.
func (b *bed) later(wg *sync.WaitGroup, who, body string, header ...string) <-chan got {
	out := make(chan got, 1)
	wg.Go(func() { out <- b.post(b.t.Context(), "/v1/chat/completions", body, append(header, "X-Who", who)...) })
	synctest.Wait()
	return out
}

// One at a time: keys in turn, within a key by priority; all are answered in the end.
func TestQueueIsFair(t *testing.T) {
	var order arrivals
	inBubble(t, Config{MaxInflight: 1}, []script{okPrefill}, []script{order.script(after(time.Second, okAnswer))}, func(t *testing.T, b *bed, p, d []*fake) {
		var wg sync.WaitGroup
		var all []<-chan got
		all = append(all, b.later(&wg, "first", chatBody))
		for i := range 4 {
			all = append(all, b.later(&wg, fmt.Sprint("a", i), chatBody, "Authorization", "Bearer a"))
		}
		all = append(all, b.later(&wg, "a-urgent", chatBody, "Authorization", "Bearer a", HeaderPriority, "1"))
		for i := range 2 {
			all = append(all, b.later(&wg, fmt.Sprint("b", i), chatBody, "Authorization", "Bearer b"))
		}
		all = append(all, b.later(&wg, "b-urgent", strings.Replace(chatBody, "{", `{"priority":1,`, 1), "Authorization", "bearer b"))
		if g := b.get("/metrics"); !strings.Contains(g.body, "baton_router_queued_requests 8") {
			t.Error("the queue is not seen in the metrics")
		}
		if g := b.get("/server_info"); !strings.Contains(g.body, `"waiting":8`) {
			t.Errorf("nor in /server_info: %s", g.body)
		}
		wg.Wait()
		for _, c := range all {
			(<-c).ok(t, chatAnswer)
		}
		want := []string{"first", "a-urgent", "b-urgent", "a0", "b0", "a1", "b1", "a2", "a3"}
		if !slices.Equal(order.who, want) {
			t.Errorf("order %v, want %v", order.who, want)
		}
	})
}

// A request that is still waiting when its time is over says so.
func TestDeadlineInTheQueue(t *testing.T) {
	inBubble(t, Config{MaxInflight: 1}, []script{okPrefill}, []script{silent}, func(t *testing.T, b *bed, p, d []*fake) {
		var wg sync.WaitGroup
		first := b.later(&wg, "first", chatBody, HeaderTimeout, "5000")
		g := b.chat(HeaderTimeout, "2000")
		if e := g.fails(t, 504, "deadline"); e.Error.Phase != "queued" || e.Error.Side != "router" {
			t.Errorf("%s", g.body)
		}
		if g.took < 2*time.Second || g.took > 2*time.Second+deadlineSlack {
			t.Errorf("took %v", g.took)
		}
		if n := d[0].count(); n != 1 {
			t.Errorf("%d requests were sent", n)
		}
		wg.Wait()
		(<-first).fails(t, 504, "deadline")
		// The time in the queue is part of the deadline that workers are told.
		d[0].set(after(time.Second, okAnswer))
		first = b.later(&wg, "first", chatBody)
		second := b.later(&wg, "second", chatBody, HeaderTimeout, "3000")
		wg.Wait()
		(<-first).ok(t, chatAnswer)
		(<-second).ok(t, chatAnswer)
		if l := d[0].leg(-1); l.header.Get(HeaderTimeout) != "2000" {
			t.Errorf("the worker was told %s ms", l.header.Get(HeaderTimeout))
		}
		if log := b.log.String(); !strings.Contains(log, "queue_ms=1000") {
			t.Errorf("the log does not tell how long it waited: %s", log)
		}
	})
}

// Each client that leaves the queue makes room at once, and no worker hears of it.
func TestLeavingTheQueue(t *testing.T) {
	inBubble(t, Config{MaxInflight: 1, MaxQueue: 1}, []script{okPrefill}, []script{after(2*time.Second, okAnswer)}, func(t *testing.T, b *bed, p, d []*fake) {
		var wg sync.WaitGroup
		first := b.later(&wg, "first", chatBody)
		for range 3 {
			ctx, cancel := context.WithCancel(t.Context())
			wg.Go(func() { b.post(ctx, "/v1/chat/completions", chatBody) })
			synctest.Wait()
			g := b.chat()
			g.fails(t, 429, "capacity")
			if g.header.Get("Retry-After") != "1" {
				t.Errorf("Retry-After %q", g.header.Get("Retry-After"))
			}
			cancel()
			synctest.Wait()
			if s := b.r.queue.Stats(); s.Waiting != 0 {
				t.Errorf("%+v", s)
			}
		}
		last := b.later(&wg, "last", chatBody)
		wg.Wait()
		(<-first).ok(t, chatAnswer)
		(<-last).ok(t, chatAnswer)
		if d[0].count() != 2 || len(d[0].aborts)+len(p[0].aborts) != 0 {
			t.Errorf("%d requests, aborts %v %v", d[0].count(), d[0].aborts, p[0].aborts)
		}
	})
}

// Workers have at most so many at a time; the one that comes free is used, and a busy model blocks no other.
func TestLimitPerWorker(t *testing.T) {
	inBubble(t, Config{MaxPerWorker: 2}, []script{okPrefill}, []script{after(time.Second, okAnswer), after(time.Second, okAnswer)}, func(t *testing.T, b *bed, p, d []*fake) {
		b.r.decodes.workers()[0].models, b.r.decodes.workers()[1].models = []string{"m"}, []string{"other"}
		var wg sync.WaitGroup
		for range 6 {
			b.later(&wg, "m", chatBody)
		}
		if d[0].count() != 2 || d[1].count() != 0 {
			t.Fatalf("at work: %d and %d", d[0].count(), d[1].count())
		}
		other := b.later(&wg, "other", strings.Replace(chatBody, `"m"`, `"other"`, 1))
		if d[1].count() != 1 {
			t.Error("a request for an idle worker waits for those that want the busy one")
		}
		start := time.Now()
		wg.Wait()
		if took := time.Since(start); took != 3*time.Second || d[0].count() != 6 {
			t.Errorf("%d requests two at a time took %v", d[0].count(), took)
		}
		(<-other).ok(t, chatAnswer)
		// A model that nobody has is for a worker to refuse.
		b.post(t.Context(), "/v1/chat/completions", strings.Replace(chatBody, `"m"`, `"none"`, 1)).ok(t, chatAnswer)
	})
}

// Requests that wait for busy workers fail as soon as none of these is left, and go on when one comes back.
func TestWaitingForWorkersThatGo(t *testing.T) {
	inBubble(t, Config{MaxPerWorker: 1, MaxRetries: -1}, []script{okPrefill}, []script{silent}, func(t *testing.T, b *bed, p, d []*fake) {
		var wg sync.WaitGroup
		first := b.later(&wg, "first", chatBody)
		waits := b.later(&wg, "waits", chatBody)
		start := time.Now()
		d[0].setHealth(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
		g := <-waits
		g.fails(t, 503, "unavailable")
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("failed after %v", took)
		}
		d[0].kill()
		wg.Wait()
		if g := <-first; g.status/100 != 5 {
			t.Errorf("%d %s", g.status, g.body)
		}
	})
}

// A retry waits for a worker that it may use, holds no second place, and is not behind those that wait.
func TestRetryWaitsForAnotherWorker(t *testing.T) {
	inBubble(t, Config{MaxPerWorker: 1, MaxInflight: 2, DecodePolicy: PolicyRoundRobin, EjectAfter: -1}, []script{okPrefill, okPrefill, okPrefill}, []script{
		after(time.Second, say(500, "boom")), after(3*time.Second, okAnswer),
	}, func(t *testing.T, b *bed, p, d []*fake) {
		var wg sync.WaitGroup
		retried := b.later(&wg, "retried", chatBody)
		steady := b.later(&wg, "steady", chatBody)
		third := b.later(&wg, "third", chatBody, HeaderTimeout, "1000")
		wg.Wait()
		(<-steady).ok(t, chatAnswer)
		g := <-retried
		g.ok(t, chatAnswer)
		if g.took != 6*time.Second {
			t.Errorf("took %v: one second at the bad worker, two of waiting, three at the good one", g.took)
		}
		(<-third).fails(t, 504, "deadline")
		if s := b.r.queue.Stats(); s != (admission.Stats{}) {
			t.Errorf("left: %+v", s)
		}
	})
}

func TestPriorityIsChecked(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		for _, v := range []string{"high", "101", "-101", "1.5"} {
			b.chat(HeaderPriority, v).fails(t, 400, "invalid_request")
			if v != "high" {
				b.post(t.Context(), "/v1/chat/completions", strings.Replace(chatBody, "{", `{"priority":`+v+`,`, 1)).fails(t, 400, "invalid_request")
			}
		}
		b.post(t.Context(), "/v1/chat/completions", strings.Replace(chatBody, "{", `{"priority":null,`, 1), HeaderPriority, "-100").ok(t, chatAnswer)
	})
}

// The router's own probe is not turned away by a full queue.
func TestProbeOfAFullRouter(t *testing.T) {
	inBubble(t, Config{MaxInflight: 1, MaxQueue: -1}, []script{say(200, genAnswer)}, []script{after(time.Second, say(200, genAnswer))}, func(t *testing.T, b *bed, p, d []*fake) {
		var wg sync.WaitGroup
		wg.Go(func() { b.post(t.Context(), "/generate", `{"text":"a"}`) })
		synctest.Wait()
		if g := b.get("/health_generate"); g.status != 200 {
			t.Errorf("%d %s", g.status, g.body)
		}
		wg.Wait()
	})
}

// A prefill leg that ends after its answer frees its worker when it ends, not when the next request does.
func TestLateLegFreesItsWorker(t *testing.T) {
	inBubble(t, Config{MaxPerWorker: 1}, []script{after(600*time.Millisecond, okPrefill)}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		b.chat().ok(t, chatAnswer)
		g := b.chat()
		g.ok(t, chatAnswer)
		if g.took != 600*time.Millisecond {
			t.Errorf("the second request took %v", g.took)
		}
		if n := d[0].count(); n != 2 {
			t.Errorf("%d requests", n)
		}
		<-time.After(time.Second)
	})
}
