package llamacpp

import (
	"bytes"
	"slices"
	"testing"

	"github.com/baton-pd/baton/internal/engine"
)

// An answer goes on in another context as if it had not left the first: its tokens, computed in batches of
// Info.StepTokens, have the KV of its steps to the last bit.
func TestShortPrefillIsSteps(t *testing.T) {
	e := open(t, nil)
	const answer = 70
	for _, n := range []int{1, 60, 201} {
		p := prompt(t, e, n)
		kv := func(seq engine.Seq) []byte {
			b := make([]byte, e.ChunkBytes(answer))
			if err := e.Export(seq, n-1, n-1+answer, [][]byte{b}); err != nil {
				t.Fatal(err)
			}
			return b
		}
		e.FreeSeq(0)
		prefill(t, e, 0, p[:n-1])
		all := append(slices.Clone(p), decode(t, e, 0, p[n-1], n-1, answer)...)
		want := kv(0)
		next := decode(t, e, 0, all[n-1+answer], n-1+answer, 10)
		batches := func(most int) engine.Seq {
			e.FreeSeq(1)
			prefill(t, e, 1, p[:n-1])
			for a := n - 1; a < n-1+answer; {
				b := min(a+most, n-1+answer)
				if err := e.Prefill(t.Context(), 1, all[a:b], a); err != nil {
					t.Fatal(err)
				}
				a = b
			}
			return 1
		}
		if got := batches(e.Info().StepTokens); !bytes.Equal(kv(got), want) {
			t.Errorf("prompt of %d: batches of %d tokens do not give the steps' bits", n, e.Info().StepTokens)
		} else if got := decode(t, e, 1, all[n-1+answer], n-1+answer, 10); !slices.Equal(got, next) {
			t.Errorf("prompt of %d: went on with %v, want %v", n, got, next)
		}
		if got := batches(answer); bytes.Equal(kv(got), want) {
			// So it is on the machines tried, and why StepTokens is there; other kernels may do better.
			t.Logf("prompt of %d: one batch of %d tokens gives the steps' bits, too", n, answer)
		}
	}
}

// A sampler that was told the tokens so far draws what the one that made them draws next, also where filters
// sometimes leave nothing to draw.
func TestDrawsGoOn(t *testing.T) {
	e := openTiny(t, nil)
	for name, s := range map[string]engine.Sampling{
		"hot":       {Temperature: 1.5, Seed: 7},
		"one left":  {Temperature: 1, Seed: 7, TopP: 0.02},
		"penalties": {Temperature: 1.2, Seed: 9, PresencePenalty: 1.5, RepetitionPenalty: 1.3, MinP: 0.05},
		"greedy":    {FrequencyPenalty: 2},
	} {
		t.Run(name, func(t *testing.T) {
			whole, later := newSampler(t, e, s), newSampler(t, e, s)
			e.FreeSeq(0)
			last := engine.Token(9)
			step := func(seq engine.Seq, sm engine.Sampler, pos int) engine.Token {
				got, err := e.Step(t.Context(), []engine.Row{{Seq: seq, Token: last, Pos: pos, Sampler: sm}})
				if err != nil {
					t.Fatal(err)
				}
				return got[0].Token
			}
			for pos := range 30 {
				last = step(0, whole, pos)
				later.Accept(last)
			}
			e.FreeSeq(1)
			if err := e.CopySeq(0, 1); err != nil {
				t.Fatal(err)
			}
			for pos := 30; pos < 60; pos++ {
				want := step(0, whole, pos)
				if got := step(1, later, pos); got != want {
					t.Fatalf("token %d is %d, want %d", pos, got, want)
				}
				last = want
			}
			if a, b := whole.(*sampler).before, later.(*sampler).before; a != b || a != 60 && s.Temperature > 0 {
				t.Errorf("draws %d and %d of 60: each must have its own number", a, b)
			}
		})
	}
}

func newSampler(t *testing.T, e *Engine, s engine.Sampling) engine.Sampler {
	t.Helper()
	sm, err := e.NewSampler(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sm.Close)
	return sm
}

func TestDrawSeeds(t *testing.T) {
	seen := map[uint32]bool{}
	for seed := range uint32(50) {
		for n := range uint32(200) {
			v := drawSeed(seed, n)
			if v == randomSeed {
				t.Fatalf("seed %d, token %d: the library would choose one itself", seed, n)
			}
			seen[v] = true
		}
	}
	if len(seen) < 9990 { // 10,000 of 2^32: about 0.01 repetitions
		t.Errorf("only %d different seeds of 10,000", len(seen))
	}
}
