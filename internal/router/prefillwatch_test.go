package router

import (
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// drip answers with JSON in pieces.
func drip(parts ...any) script {
	return func(w http.ResponseWriter, r *http.Request, _ *leg1) {
		w.Header().Set("Content-Type", "application/json")
		writeParts(w, r, parts)
	}
}

// A prefill worker that is silent, at first or later on, is given up after its own limits, and both legs are released; the request is tried on
// another pair.
func TestPrefillLimits(t *testing.T) {
	const first, gap = 3 * time.Second, time.Second
	waits := after(10*time.Second, okAnswer) // a decode worker whose KV does not come
	for name, c := range map[string]struct {
		p     script
		after time.Duration
		flag  string
		phase string
	}{
		"no head":           {silent, first, "--prefill-first-byte-timeout", "waiting_for_headers"},
		"no event":          {sse(nil), first, "--prefill-first-byte-timeout", "reading_answer"},
		"pings":             {sse(time.Second, ": ping\n\n", time.Second, ": ping\n\n", nil), first, "--prefill-first-byte-timeout", "reading_answer"},
		"no body":           {drip("", nil), first, "--prefill-first-byte-timeout", "reading_answer"},
		"half a body":       {drip(2*time.Second, genAnswer[:9], nil), 2*time.Second + gap, "--prefill-gap-timeout", "reading_answer"},
		"silent later":      {sse(2*time.Second, role, nil), 2*time.Second + gap, "--prefill-gap-timeout", "reading_answer"},
		"only pings later":  {sse(role, 500*time.Millisecond, ": ping\n\n", 400*time.Millisecond, ": ping\n\n", nil), gap, "--prefill-gap-timeout", "reading_answer"},
		"slow but it lives": {drip(2900*time.Millisecond, chatAnswer[:9], 900*time.Millisecond, chatAnswer[9:20], 900*time.Millisecond, chatAnswer[20:]), 0, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			config := Config{PrefillFirstByteTimeout: first, PrefillGapTimeout: gap, HealthInterval: time.Hour, MaxRetries: -1}
			inBubble(t, config, []script{c.p}, []script{waits}, func(t *testing.T, b *bed, p, d []*fake) {
				start := time.Now()
				g := b.chat()
				if c.flag == "" {
					g.ok(t, chatAnswer)
					return
				}
				e := g.fails(t, 504, "deadline")
				if g.took != c.after || e.Error.Side != "prefill" || e.Error.Peer != "p0:80" || e.Error.Room == "" || e.Error.Phase != c.phase || !strings.Contains(e.Error.Message, c.flag) {
					t.Errorf("after %v, want %v: %s", g.took, c.after, g.body)
				}
				<-time.After(time.Second)
				p[0].released(0, start, c.after+time.Second)
				d[0].released(0, start, c.after+time.Second)
			})
			if c.flag == "" {
				return
			}
			config.MaxRetries = 0
			inBubble(t, config, []script{c.p, okPrefill}, []script{silent, after(20*time.Millisecond, okAnswer)}, func(t *testing.T, b *bed, p, d []*fake) {
				b.chat().ok(t, chatAnswer)
				if p[1].count() != 1 {
					t.Errorf("the other prefill worker got %d requests: %s", p[1].count(), b.log)
				}
				<-time.After(time.Second)
			})
		})
	}
}

// A prefill worker that is silent although decode has its KV costs nobody the answer: its leg alone is ended and released.
func TestSilentPrefillAfterItsWork(t *testing.T) {
	decode := sse(role, token, 5*time.Second, last, done)
	inBubble(t, Config{PrefillFirstByteTimeout: 2 * time.Second, HealthInterval: time.Hour}, []script{silent}, []script{decode}, func(t *testing.T, b *bed, p, d []*fake) {
		start := time.Now()
		ended := make(chan got, 1)
		go func() { ended <- b.chatStream() }()
		<-time.After(3 * time.Second)
		p[0].released(0, start, 2*time.Second)
		synctest.Wait()
		if d[0].leg(0).closed || len(d[0].aborts) > 0 {
			t.Error("the decode leg was ended, too")
		}
		(<-ended).ok(t, role+token+last+done)
		if m := b.get("/metrics").body; !strings.Contains(m, `baton_router_worker_errors_total{cause="deadline",leg="prefill",worker="p0:80"} 1`) {
			t.Error("not counted")
		}
		<-time.After(2 * time.Second)
	})
}
