package router

import (
	"context"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
)

// TestLargeAnswers: answers that are judged beside are judged the same.
func TestLargeAnswers(t *testing.T) {
	large := strings.Replace(chatAnswer, "{", `{"more":"`+strings.Repeat("x", 2*judgeInline)+`",`, 1)
	inBubble(t, Config{MaxRetries: -1}, []script{okPrefill}, []script{say(200, large)}, func(t *testing.T, b *bed, p, d []*fake) {
		b.chat().ok(t, large)
		d[0].set(say(200, large[:len(large)-1]))
		b.chat().fails(t, 502, "protocol")
		d[0].set(say(200, strings.Replace(large, `"stop"`, `"abort"`, 1)))
		if g := b.chat(); g.status == 200 {
			t.Errorf("an aborted answer: %d", g.status)
		}
	})
}

// TestNobodyWaitsForAVerdict: the end of an attempt does not wait until a large answer has been judged, but the router's end does.
func TestNobodyWaitsForAVerdict(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		// A form that is read slowly, for seconds, and turns out to be malformed at its end.
		body := []byte(`{"Text":"x","x":[` + strings.Repeat("123,", 8<<20) + `]`)
		c := &call{kind: openai.KindGenerate, parsed: &parsed{choices: 1}}
		ctx, cancel := context.WithCancelCause(context.Background())
		a := &attempt{r: b.r, c: c, ctx: ctx, cancel: cancel}
		a.decode = leg{a: a, w: b.r.all()[0]}
		if !b.r.group.enter() {
			t.Fatal("the router has ended")
		}
		defer b.r.group.leave()
		if _, e, err := a.decode.judged(body); e != nil || err == nil {
			t.Errorf("while the attempt runs: %v, %v; want an error", e, err)
		}
		cancel(routerFailure(room.CodeDeadline, false, "the end"))
		if u, e, err := a.decode.judged(body); u != (usage{}) || e != nil || err != nil {
			t.Errorf("after its end: %v, %v, %v; want no verdict", u, e, err)
		}
	})
}
