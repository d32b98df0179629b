package router

import (
	"context"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
)

// A leg that has read its error answer, and is about to report it, is worth waiting for.
func TestEchoDoesNotOvertakeTheCause(t *testing.T) {
	a := &attempt{r: &Router{}, c: &call{parsed: &parsed{prompts: 1}}}
	a.prefill.a, a.decode.a = a, a
	a.ctx, a.cancel = context.WithCancelCause(t.Context())
	defer a.stopTimer()
	own := func(code room.Code, derived bool) *failure {
		return &failure{err: openai.FromCause(&room.Cause{Code: code}), derived: derived}
	}
	a.decode.enter(legAnswer)
	a.decode.end()
	a.fail(&a.prefill, own(room.CodeAborted, true))
	a.fail(&a.decode, own(room.CodeDeadline, false))
	if got := failureOf(a.ctx).cause().Code; got != room.CodeDeadline {
		t.Errorf("the cause is %s, want the decode worker's own", got)
	}
}

// Nothing more can come of a leg that did its part.
func TestEchoOfFinishedLegIsTheCause(t *testing.T) {
	aborted := `{"error":{"message":"aborted by the other side","cause":"aborted","phase":"transferring"}}`
	inBubble(t, Config{}, []script{okPrefill}, []script{after(causeGrace, say(499, aborted))}, func(t *testing.T, b *bed, p, d []*fake) {
		if g := b.chat(); g.status != 499 || g.took > causeGrace {
			t.Errorf("%d after %v", g.status, g.took)
		}
	})
}

// What one worker tells of the other is the other's fault: the retry avoids that one.
func TestRetryAvoidsWhomTheCauseNames(t *testing.T) {
	told := `{"error":{"message":"prefill of a chunk: out of memory","cause":"engine_failed","side":"prefill","phase":"prefilling","retryable":true}}`
	inBubble(t, Config{Policy: PolicyRoundRobin}, []script{silent, okPrefill}, []script{say(500, told)}, func(t *testing.T, b *bed, p, d []*fake) {
		d[0].set(func(w http.ResponseWriter, r *http.Request, l *leg1) {
			if d[0].count() == 1 {
				after(time.Millisecond, say(500, told))(w, r, l) // when prefill has its request, too
			} else {
				okAnswer(w, r, l)
			}
		})
		g := b.chat()
		synctest.Wait() // the fake decode worker does not need its prefill worker to answer
		if g.status != 200 || p[0].count() != 1 || p[1].count() != 1 {
			t.Fatalf("got %d %s; the prefill workers saw %d and %d requests", g.status, g.body, p[0].count(), p[1].count())
		}
	})
}
