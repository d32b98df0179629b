package llamacpp

import (
	"math"
	"slices"
	"testing"

	"github.com/baton-pd/baton/internal/engine"
)

// generate draws n tokens with the given sampling from a prompt on a fresh sequence.
func generate(t *testing.T, e *Engine, s engine.Sampling, n int, replay ...engine.Token) []engine.Token {
	t.Helper()
	e.FreeSeq(0)
	sm, err := e.NewSampler(s)
	if err != nil {
		t.Fatal(err)
	}
	defer sm.Close()
	head := []engine.Token{5, 6, 7, 8, 9, 10, 11, 12}
	for _, r := range replay {
		sm.Accept(r)
		head = append(head, r)
	}
	last := head[len(head)-1]
	if err := e.Prefill(t.Context(), 0, head[:len(head)-1], 0); err != nil {
		t.Fatal(err)
	}
	var out []engine.Token
	for pos := len(head) - 1; len(out) < n; pos++ {
		got, err := e.Step(t.Context(), []engine.Row{{Token: last, Pos: pos, Sampler: sm}})
		if err != nil {
			t.Fatal(err)
		}
		last = got[0].Token
		out = append(out, last)
	}
	return out
}

func TestSamplingBySeed(t *testing.T) {
	e := openTiny(t, nil)
	hot := func(seed uint32) engine.Sampling { return engine.Sampling{Temperature: 1.5, Seed: seed} }
	for _, seed := range []uint32{0, 1, 42, math.MaxUint32} {
		a, b := generate(t, e, hot(seed), 40), generate(t, e, hot(seed), 40)
		if !slices.Equal(a, b) {
			t.Errorf("seed %d gave two answers:\n%v\n%v", seed, a, b)
		}
	}
	if slices.Equal(generate(t, e, hot(1), 40), generate(t, e, hot(2), 40)) {
		t.Error("seeds 1 and 2 gave the same answer")
	}
}

func TestFiltersLeaveTheBest(t *testing.T) {
	e := openTiny(t, nil)
	want := generate(t, e, engine.Sampling{}, 30)
	for name, s := range map[string]engine.Sampling{
		"top_k 1":          {Temperature: 2, TopK: 1},
		"tiny top_p":       {Temperature: 2, TopP: 1e-6},
		"min_p 1":          {Temperature: 2, MinP: 1},
		"tiny temperature": {Temperature: 1e-4},
		"chain greedy":     {LogitBias: map[engine.Token]float32{300 - 20: 0}},
		"negative":         {Temperature: -1},
	} {
		if got := generate(t, e, s, 30); !slices.Equal(got, want) {
			t.Errorf("%s: %v, greedy %v", name, got, want)
		}
	}
}

func TestBiasPenaltyAndEnd(t *testing.T) {
	e := openTiny(t, nil)
	plain := generate(t, e, engine.Sampling{}, 30)
	never := map[engine.Token]float32{}
	for _, tok := range plain {
		never[tok] = float32(math.Inf(-1))
	}
	for _, tok := range generate(t, e, engine.Sampling{LogitBias: never}, 30) {
		if _, ok := never[tok]; ok {
			t.Errorf("token %d in spite of its bias", tok)
		}
	}
	for _, tok := range generate(t, e, engine.Sampling{Temperature: 1, LogitBias: map[engine.Token]float32{77: 1000}}, 10) {
		if tok != 77 {
			t.Errorf("token %d, not the one with the large bias", tok)
		}
	}
	// A large presence penalty forbids repetition, also of replayed tokens.
	strict := engine.Sampling{PresencePenalty: 100}
	all := generate(t, e, strict, 60)
	if n := len(slices.Compact(slices.Sorted(slices.Values(all)))); n != 60 {
		t.Errorf("%d different tokens of 60 under a presence penalty", n)
	}
	if resumed := generate(t, e, strict, 30, all[:30]...); !slices.Equal(resumed, all[30:]) {
		t.Logf("resumed %v, whole %v", resumed, all[30:]) // bits may differ: chunk instead of steps
		for _, tok := range resumed {
			if slices.Contains(all[:30], tok) {
				t.Errorf("token %d came again after resumption", tok)
			}
		}
	}
	// The end token is made certain, then forbidden.
	end := e.Info().EOS
	certain := map[engine.Token]float32{end: 1000}
	if got := generate(t, e, engine.Sampling{LogitBias: certain}, 1)[0]; !e.Tokenizer().IsEOG(got) {
		t.Errorf("token %d, not the end", got)
	}
	for _, temp := range []float32{0, 1.5} {
		for _, tok := range generate(t, e, engine.Sampling{Temperature: temp, LogitBias: certain, IgnoreEOS: true}, 50) {
			if e.Tokenizer().IsEOG(tok) {
				t.Errorf("end token %d in spite of IgnoreEOS", tok)
			}
		}
	}
}

func TestSamplingIsChecked(t *testing.T) {
	e := openTiny(t, nil)
	nan := float32(math.NaN())
	for _, s := range []engine.Sampling{
		{Temperature: nan}, {Temperature: 1e9}, {TopP: -0.1}, {TopP: 1.1}, {TopP: nan}, {MinP: 2}, {RepetitionPenalty: -1},
		{FrequencyPenalty: nan}, {PresencePenalty: 1e9}, {LogitBias: map[engine.Token]float32{-1: 0}},
		{LogitBias: map[engine.Token]float32{286: 0}}, {LogitBias: map[engine.Token]float32{5: nan}},
		{LogitBias: map[engine.Token]float32{5: float32(math.Inf(1))}},
	} {
		if sm, err := e.NewSampler(s); err == nil {
			sm.Close()
			t.Errorf("%+v was accepted", s)
		}
	}
}

func TestLogprobs(t *testing.T) {
	e := openTiny(t, nil)
	all := e.Info().VocabSize
	for _, s := range []engine.Sampling{{}, {Temperature: 1.5, TopK: 20, Seed: 3}} {
		sm, err := e.NewSampler(s)
		if err != nil {
			t.Fatal(err)
		}
		defer sm.Close()
		e.FreeSeq(0)
		for pos := range 10 {
			row := engine.Row{Token: 9, Pos: pos, Sampler: sm, Logprobs: all + 1}
			if pos == 5 {
				row.Logprobs = 1
			}
			got, err := e.Step(t.Context(), []engine.Row{row})
			if err != nil {
				t.Fatal(err)
			}
			if pos == 5 {
				if got[0].Top != nil || got[0].Logprob >= 0 {
					t.Errorf("one logprob: %+v", got[0])
				}
				continue
			}
			var sum float64
			for i, l := range got[0].Top {
				sum += math.Exp(float64(l.Logprob))
				if i > 0 && l.Logprob > got[0].Top[i-1].Logprob {
					t.Errorf("entry %d is more likely than the one before", i)
				}
				if l.Token == got[0].Token && l.Logprob != got[0].Logprob {
					t.Errorf("the chosen token's logprob is %v and %v", got[0].Logprob, l.Logprob)
				}
			}
			if len(got[0].Top) != all || math.Abs(sum-1) > 1e-5 {
				t.Errorf("%d of %d probabilities add up to %v", len(got[0].Top), all, sum)
			}
			if s.Temperature == 0 && got[0].Top[0].Token != got[0].Token {
				t.Errorf("greedy chose %d, most likely is %d", got[0].Token, got[0].Top[0].Token)
			}
		}
	}
}

func TestLargest(t *testing.T) {
	logits := []float32{3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, float32(math.Inf(-1))}
	order := []engine.Token{5, 7, 4, 8, 10, 2, 0, 9, 6, 1, 3, 11}
	for k := -1; k <= 20; k++ {
		want := order[:max(0, min(k, len(order)))]
		if got := largest(logits, k); !slices.Equal(got, want) {
			t.Errorf("k=%d: %v, want %v", k, got, want)
		}
	}
}

func TestArgmax(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	for _, c := range []struct {
		logits []float32
		best   int
		ok     bool
	}{
		{[]float32{1, 3, 3, 2}, 1, true},
		{[]float32{-5, -inf, -4}, 2, true},
		{[]float32{1, nan, 2}, 0, false},
		{[]float32{nan, nan}, 0, false},
		{[]float32{1, inf}, 1, false},
		{[]float32{-inf, -inf}, 0, false},
	} {
		if best, ok := argmax(c.logits); ok != c.ok || ok && best != c.best {
			t.Errorf("%v: %d, %v", c.logits, best, ok)
		}
	}
}
