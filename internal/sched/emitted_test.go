package sched

import (
	"bytes"
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/room"
)

// An answer that goes on after any of its tokens, with a room or computed here, is the undisturbed one.
func TestAnswerGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rng := newRand(t, 5)
		w := newWorld(t, worldConfig{sim: sim.Config{EOSEvery: 40, Recheck: true}})
		defer w.close()
		const most = 50
		for i, s := range []engine.Sampling{
			{}, {Temperature: 1, Seed: 9}, {Temperature: 0.8, TopP: 0.9, TopK: 5, Seed: 1 << 30}, {Temperature: 1.3, FrequencyPenalty: 1, PresencePenalty: 0.5, RepetitionPenalty: 1.2, Seed: 3},
		} {
			r := w.req(tokens(rng, []int{1, 64, 65, 200}[i]), most)
			r.Sampling, r.Stop = s, []string{"e."}
			whole, err := w.d.Submit(context.Background(), local(r))
			if err != nil {
				t.Fatal(err)
			}
			want := read(t, whole, 1)
			if want.err != nil || len(want.tokens[0]) < 3 {
				t.Fatalf("undisturbed: %+v", want)
			}
			for k := 1; k < len(want.tokens[0]); k++ {
				m := w.req(append(slices.Clone(r.Prompt), want.tokens[0][:k]...), most-k)
				m.Emitted, m.Sampling, m.Stop, m.WholeTokens = k, s, r.Stop, true
				d, p := w.both(context.Background(), m)
				if a := read(t, p, 1); a.err != nil {
					t.Fatal(a.err)
				}
				l, err := w.d.Submit(context.Background(), local(m))
				if err != nil {
					t.Fatal(err)
				}
				for how, a := range map[string]answer{"room": read(t, d, 1), "local": read(t, l, 1)} {
					if a.err != nil || !slices.Equal(a.tokens[0], want.tokens[0][k:]) || a.finish[0] != want.finish[0] {
						t.Errorf("sampling %d, after %d of %d tokens, %s: %v %v %s, want %v %s", i, k, len(want.tokens[0]), how, a.err, a.tokens[0], a.finish[0], want.tokens[0][k:], want.finish[0])
					}
				}
			}
		}
	})
}

// local is r for a worker that computes the prompt itself.
func local(r *Request) *Request {
	m := *r
	m.ID, m.Bootstrap = "local-"+r.ID, nil
	return &m
}

// Where steps have bits of their own, the prompt has the chunks that it had, and the answer's tokens short ones.
func TestEmittedTokensHaveChunksOfTheirOwn(t *testing.T) {
	for _, c := range []struct {
		prompt, emitted, step int
		want                  []int
	}{
		{1, 0, 32, []int{0}},
		{300, 0, 32, []int{0, 128, 256, 299}},
		{300, 1, 32, []int{0, 128, 256, 299, 300}},
		{200, 70, 32, []int{0, 128, 199, 231, 263, 269}},
		{1, 40, 32, []int{0, 32, 40}},
		{200, 70, 0, []int{0, 128, 256, 269}},
		{200, 70, 500, []int{0, 128, 199, 269}},
	} {
		k := core{info: engine.Info{ChunkTokens: 128, StepTokens: c.step}}
		if got := k.bounds(&Request{Prompt: make([]engine.Token, c.prompt+c.emitted), Emitted: c.emitted}); !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

func TestEmittedIsChecked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, worldConfig{})
		defer w.close()
		for _, change := range []func(r *Request){
			func(r *Request) { r.Emitted = -1 }, func(r *Request) { r.Emitted = 10 }, func(r *Request) { r.Emitted, r.N = 2, 2 },
		} {
			r := w.req(tokens(rand.New(rand.NewPCG(1, 1)), 10), 5)
			change(r)
			for _, s := range []Scheduler{w.d, w.p} {
				if _, err := s.Submit(context.Background(), r); err == nil || room.CauseOf(err).Code != room.CodeInvalid {
					t.Errorf("%d emitted, n %d: %v", r.Emitted, r.N, err)
				}
			}
		}
	})
}

// With whole tokens, an output may begin anew after any event: together they tell the same text and tokens.
func TestOutputGoesOn(t *testing.T) {
	alphabet := []string{"a", "b", "ab", "E", "EN", "D", "ü", "\xc3", "\xbc", "\xe4\xb8", "\x96", "世", "\xff", "", "x"}
	cuts, held := 0, 0
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 3))
		stops := []string{"END", "ba", "bü"}[rng.IntN(3):]
		var pieces [][]byte
		for range 1 + rng.IntN(12) {
			p := []byte(alphabet[rng.IntN(len(alphabet))] + alphabet[rng.IntN(len(alphabet))])
			pieces = append(pieces, p)
		}
		want, stop := naive(stops, bytes.Join(pieces, nil))
		var text strings.Builder
		var ids []engine.Token
		var last Event
		o := newOutput(stops, 1<<20, true)
		for at := 0; last.Finish == ""; {
			ev, ok := o.push(TokenEvent{ID: engine.Token(at), Bytes: append([]byte(nil), at2(pieces, at)...)}, at == len(pieces))
			at++
			if !ok {
				continue
			}
			text.WriteString(ev.Text)
			for _, tk := range ev.Tokens {
				ids = append(ids, tk.ID)
			}
			if last = ev; ev.Finish == "" && len(ev.Tokens) == 0 {
				t.Fatalf("seed %d: text without its tokens: %+v", seed, ev)
			}
			if ev.Finish == "" && rng.IntN(2) == 0 { // another worker goes on with what was told
				next := int(ids[len(ids)-1]) + 1
				cuts++
				if next < at {
					held++
				}
				o, at = newOutput(stops, 1<<20, true), next
			}
		}
		for i, id := range ids {
			if int(id) != i {
				t.Fatalf("seed %d: tokens %v", seed, ids)
			}
		}
		if text.String() != want || last.MatchedStop != stop || last.Finish != FinishStop {
			t.Fatalf("seed %d: %q with stops %q: %q (%+v), want %q", seed, pieces, stops, text.String(), last, want)
		}
	}
	if cuts < 1000 || held < 100 {
		t.Errorf("%d cuts, %d with tokens held back: too few to show anything", cuts, held)
	}
}

// at2 is piece i, nothing after the last.
func at2(pieces [][]byte, i int) []byte {
	if i < len(pieces) {
		return pieces[i]
	}
	return nil
}
