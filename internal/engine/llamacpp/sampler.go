package llamacpp

import (
	"fmt"
	"math"
	"slices"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/hybridgroup/yzma/pkg/llama"
)

// sampler is the state of one choice. Plain greedy needs none: chain is 0 and the
// row's maximum is taken in Go.
//
// Each draw has a random number of its own, made of the seed and the number of tokens before it. The library's
// sampler has a generator that moves on only at draws with a choice to make, so tokens alone would not tell where it is.
type sampler struct {
	chain  llama.Sampler // penalties and filters, without the draw
	draws  bool          // the choice ends with a draw
	seed   uint32
	before uint32 // tokens sampled or accepted
	closed bool
}

// sample takes row i of the last batch.
func (s *sampler) sample(ctx llama.Context, i int32) engine.Token {
	if s.draws {
		n := int32(llama.SamplerChainN(s.chain))
		llama.SamplerChainAdd(s.chain, llama.SamplerInitDist(drawSeed(s.seed, s.before)))
		defer func() { llama.SamplerFree(llama.SamplerChainRemove(s.chain, n)) }()
	}
	s.before++
	return engine.Token(llama.SamplerSample(s.chain, ctx, i)) // which the chain accepts
}

// drawSeed seeds the draw after so many tokens: splitmix64's finaliser, so that neighbours have nothing in common.
func drawSeed(seed, before uint32) uint32 {
	x := uint64(seed)<<32 | uint64(before)
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	if out := uint32(x >> 32); out != randomSeed {
		return out
	}
	return randomSeed - 1
}

// Accept implements [engine.Sampler].
func (s *sampler) Accept(t engine.Token) {
	s.before++
	if s.chain != 0 && !s.closed {
		llama.SamplerAccept(s.chain, llama.Token(t))
	}
}

// Close implements [engine.Sampler]. Idempotent.
func (s *sampler) Close() {
	if !s.closed && s.chain != 0 {
		llama.SamplerFree(s.chain)
	}
	s.closed = true
}

// randomSeed is the seed that the library takes as "choose one yourself".
const randomSeed = llama.DefaultSeed

// NewSampler implements [engine.Compute]. The order of the steps is: penalties (over all
// tokens of the answer), logit bias, top k, top p, min p, temperature, draw.
func (e *Engine) NewSampler(s engine.Sampling) (engine.Sampler, error) {
	if err := e.checkSampling(s); err != nil {
		return nil, err
	}
	bias := e.biases(s)
	penalties := s.RepetitionPenalty != 0 && s.RepetitionPenalty != 1 || s.FrequencyPenalty != 0 || s.PresencePenalty != 0
	if s.Temperature <= 0 && len(bias) == 0 && !penalties {
		return &sampler{}, nil
	}
	vocab := int32(e.info.VocabSize)
	chain := llama.SamplerChainInit(llama.SamplerChainDefaultParams())
	if penalties {
		repeat := s.RepetitionPenalty
		if repeat == 0 {
			repeat = 1
		}
		llama.SamplerChainAdd(chain, llama.SamplerInitPenalties(vocab, int32(e.info.ContextLen), repeat, s.FrequencyPenalty, s.PresencePenalty))
	}
	if len(bias) > 0 {
		llama.SamplerChainAdd(chain, llama.SamplerInitLogitBias(vocab, int32(len(bias)), &bias[0])) // copied by the library
	}
	if s.Temperature <= 0 {
		llama.SamplerChainAdd(chain, llama.SamplerInitGreedy())
		return &sampler{chain: chain}, nil
	}
	if s.TopK > 0 && s.TopK < e.info.VocabSize {
		llama.SamplerChainAdd(chain, llama.SamplerInitTopK(int32(s.TopK)))
	}
	if s.TopP > 0 && s.TopP < 1 {
		llama.SamplerChainAdd(chain, llama.SamplerInitTopP(s.TopP, 1))
	}
	if s.MinP > 0 {
		llama.SamplerChainAdd(chain, llama.SamplerInitMinP(s.MinP, 1))
	}
	llama.SamplerChainAdd(chain, llama.SamplerInitTemp(s.Temperature))
	return &sampler{chain: chain, draws: true, seed: s.Seed}, nil
}

// checkSampling refuses what would make the library abort or choose nonsense.
func (e *Engine) checkSampling(s engine.Sampling) error {
	for _, v := range []struct {
		name        string
		v, min, max float32
	}{
		{"temperature", s.Temperature, -math.MaxFloat32, 100},
		{"top_p", s.TopP, 0, 1},
		{"min_p", s.MinP, 0, 1},
		{"repetition penalty", s.RepetitionPenalty, 0, 100},
		{"frequency penalty", s.FrequencyPenalty, -100, 100},
		{"presence penalty", s.PresencePenalty, -100, 100},
	} {
		if !(v.v >= v.min && v.v <= v.max) { // also refuses NaN
			return fmt.Errorf("llamacpp: %s %v is not in [%v, %v]", v.name, v.v, v.min, v.max)
		}
	}
	for t, b := range s.LogitBias {
		if t < 0 || int(t) >= e.info.VocabSize {
			return fmt.Errorf("llamacpp: logit bias for token %d, the vocabulary has %d", t, e.info.VocabSize)
		}
		if b != b || b > 1e6 {
			return fmt.Errorf("llamacpp: logit bias %v for token %d", b, t)
		}
	}
	return nil
}

// biases lists the logit biases in token order, with the end tokens excluded on demand.
func (e *Engine) biases(s engine.Sampling) []llama.LogitBias {
	var out []llama.LogitBias
	for t, b := range s.LogitBias {
		if !s.IgnoreEOS || !e.tok.IsEOG(t) {
			out = append(out, llama.LogitBias{Token: llama.Token(t), Bias: b})
		}
	}
	slices.SortFunc(out, func(a, b llama.LogitBias) int { return int(a.Token) - int(b.Token) })
	if s.IgnoreEOS {
		for t, eog := range e.tok.eog {
			if eog {
				out = append(out, llama.LogitBias{Token: llama.Token(t), Bias: float32(math.Inf(-1))})
			}
		}
	}
	return out
}
