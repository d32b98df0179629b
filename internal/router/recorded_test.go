package router

import (
	"context"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/router/record"
)

const (
	usageEvent  = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2,\"total_tokens\":7}}\n\n"
	usageAnswer = `{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":3}}`
	genUsage    = `{"text":"hello","meta_info":{"id":"x","finish_reason":{"type":"length","length":1},"prompt_tokens":6,"completion_tokens":4}}`
)

// recordAt waits until the n-th request has a record that has ended, and returns it.
func (b *bed) recordAt(n int) record.Record {
	b.t.Helper()
	synctest.Wait()
	all := b.r.journal.Latest(1000)
	if len(all) < n || all[n-1].Outcome == "" {
		b.t.Fatalf("request %d has not ended: %d records", n, len(all))
	}
	return all[n-1]
}

// TestRecordOfAStream: the times of a request that is tried twice are those that its workers took.
func TestRecordOfAStream(t *testing.T) {
	slow := sse(30*time.Millisecond, role, 10*time.Millisecond, token, 50*time.Millisecond, last, usageEvent, done)
	prefills := []script{after(20*time.Millisecond, okAnswer)}
	inBubble(t, Config{Policy: PolicyRoundRobin}, prefills, []script{after(5*time.Millisecond, reset), slow}, func(t *testing.T, b *bed, _, _ []*fake) {
		g := b.chatStream("X-Request-Id", "mine")
		if g.status != http.StatusOK || g.err != nil {
			t.Fatalf("got %+v", g)
		}
		r := b.recordAt(1)
		if len(r.Attempts) != 2 {
			t.Fatalf("attempts %+v", r.Attempts)
		}
		a, z := r.Attempts[0], r.Attempts[1]
		if a.Cause == nil || a.Cause.Code != "peer_lost" || a.Cause.Worker != "d0:80" || a.Decode != "d0:80" || a.End < 5*time.Millisecond {
			t.Errorf("first attempt %+v, cause %+v", a, a.Cause)
		}
		if z.Cause != nil || z.Prefill != "p0:80" || z.Decode != "d1:80" || z.PrefillEnd-z.Start != 20*time.Millisecond ||
			z.FirstToken-z.Start != 40*time.Millisecond || z.End-z.Start != 90*time.Millisecond || z.Room == a.Room {
			t.Errorf("second attempt %+v", z)
		}
		if r.FirstByte-z.Start != 30*time.Millisecond || r.End != z.End || r.Outcome != record.OK || r.Cause != nil || r.Status != http.StatusOK ||
			r.Tokens != 2 || r.PromptTokens != 5 || r.Events != 5 || !r.Stream || r.Model != "m" || r.Path != "/v1/chat/completions" {
			t.Errorf("record %+v", r)
		}
	})
}

// TestRecordOfAnswers: usage of answers in every form, and what kind of end each had.
func TestRecordOfAnswers(t *testing.T) {
	inBubble(t, Config{MaxRetries: -1}, []script{okAnswer}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		n := 0
		for _, c := range []struct {
			name           string
			prefill        script
			decode         script
			path, body     string
			outcome, cause string
			tokens         int
		}{
			{"chat", okAnswer, say(200, usageAnswer), "/v1/chat/completions", chatBody, record.OK, "", 3},
			{"generate", okAnswer, say(200, genUsage), "/generate", `{"text":"a"}`, record.OK, "", 4},
			{"generate, a list", okAnswer, say(200, "["+genUsage+","+genUsage+"]"), "/generate", `{"text":["a","b"]}`, record.OK, "", 8},
			{"usage that makes no sense", okAnswer, say(200, `{"text":"a","usage":{"completion_tokens":"many"},"meta_info":{"finish_reason":{"type":"stop"},"completion_tokens":{}}}`), "/generate", `{"text":"a"}`, record.OK, "", 0},
			{"bad body", okAnswer, okAnswer, "/generate", `{`, record.Refused, "invalid_request", 0},
			{"broken stream", okAnswer, sse(role, token, errReset), "/v1/chat/completions", streamBody, record.StreamError, "peer_lost", 0},
			{"prefill fails", say(500, `{"error":{"message":"no"}}`), silent, "/v1/chat/completions", chatBody, record.Failed, "engine_failed", 0},
		} {
			p[0].set(c.prefill)
			d[0].set(c.decode)
			b.post(t.Context(), c.path, c.body)
			n++
			r := b.recordAt(n)
			cause := ""
			if r.Cause != nil {
				cause = r.Cause.Code
			}
			if r.Outcome != c.outcome || r.Tokens != c.tokens || (cause == "") != (c.cause == "") {
				t.Errorf("%s: outcome %q, cause %q, %d tokens: %+v", c.name, r.Outcome, cause, r.Tokens, r)
			}
			if c.cause != "" && cause != c.cause {
				t.Errorf("%s: cause %q, want %q", c.name, cause, c.cause)
			}
		}
	})
}

// TestRecordOfOneUnderWay: a request that hangs is in the journal as it is, and its end is recorded when its client leaves.
func TestRecordOfOneUnderWay(t *testing.T) {
	inBubble(t, Config{MaxInflight: 1}, []script{okAnswer}, []script{sse(role, token, nil)}, func(t *testing.T, b *bed, _, _ []*fake) {
		ctx, leave := context.WithCancel(t.Context())
		ended := make(chan struct{})
		for range 2 {
			go func() {
				b.post(ctx, "/v1/chat/completions", streamBody)
				ended <- struct{}{}
			}()
			synctest.Wait()
		}
		all := b.r.journal.Latest(10)
		if len(all) != 2 || all[0].Phase() != "streaming" || all[0].Events != 2 || all[1].Phase() != "queued" {
			t.Fatalf("records %+v", all)
		}
		leave()
		<-ended
		<-ended
		for n := range 2 {
			if r := b.recordAt(n + 1); r.Outcome != record.ClientGone || r.Cause == nil || r.Cause.Code != "client_gone" {
				t.Errorf("record %+v, cause %+v", r, r.Cause)
			}
		}
		if n := b.r.journal.Live(); n != 0 {
			t.Errorf("%d requests are live", n)
		}
	})
}
