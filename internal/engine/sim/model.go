package sim

import (
	"encoding/binary"
	"math"
	"slices"

	"github.com/baton-pd/baton/internal/engine"
)

// mix is the finaliser of splitmix64: every input bit reaches every output bit.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// chainStart is the digest of an empty sequence.
func chainStart(seed uint64) uint64 { return mix(seed ^ 0x9e3779b97f4a7c15) }

// fillCell writes the KV bytes that follow chain with token t: for each layer the
// K of all heads, then the V of all heads.
func fillCell(c *Config, chain uint64, t engine.Token, cell []byte) {
	base := mix(chain ^ mix(uint64(uint32(t))+0x632be59bd9b4e019))
	var word [8]byte
	for off, block := 0, 0; off < len(cell); block++ {
		// A block is one head's K or V in one layer: its own stream.
		stream := mix(base + uint64(block)*0x9e3779b97f4a7c15)
		for end := off + c.HeadDim; off < end; {
			stream += 0x9e3779b97f4a7c15
			binary.LittleEndian.PutUint64(word[:], mix(stream))
			off += copy(cell[off:end], word[:])
		}
	}
}

// foldCell adds one position's bytes to the digest of the positions before it.
func foldCell(chain uint64, cell []byte) uint64 {
	h := chain
	for len(cell) >= 8 {
		h = mix(h ^ binary.LittleEndian.Uint64(cell))
		cell = cell[8:]
	}
	if len(cell) > 0 {
		var word [8]byte
		copy(word[:], cell)
		h = mix(h ^ binary.LittleEndian.Uint64(word[:]) ^ uint64(len(cell))<<56)
	}
	return mix(h + 0xd6e8feb86659fd93)
}

// alphabet is what the model writes: its length is prime, so any stride visits all of it.
const alphabet = "abcdefghijklmnopqrstuvwxyz ,."

// candidates is the number of tokens with a chance at each step.
const candidates = 8

type candidate struct {
	t     engine.Token
	logit float64 // ln of the raw probability, before any sampling parameter
}

// nextCandidates derives the raw distribution from the KV digest: probabilities
// 1/2, 1/4, ... most likely first. pos is the position of the last token.
func nextCandidates(c *Config, chain uint64, pos int, ignoreEOS bool) []candidate {
	h := mix(chain ^ 0xa0761d6478bd642f)
	list := make([]candidate, 0, candidates+1)
	eos := (c.EOSAt > 0 && pos == c.EOSAt) || (c.EOSEvery > 0 && (h>>32)%uint64(c.EOSEvery) == 0)
	if eos && !ignoreEOS {
		list = append(list, candidate{t: tokEOS})
	}
	start, stride := h%uint64(len(alphabet)), 1+(h>>16)%uint64(len(alphabet)-1)
	for k := uint64(0); len(list) < candidates; k++ {
		list = append(list, candidate{t: byteToken(alphabet[(start+k*stride)%uint64(len(alphabet))])})
	}
	for i := range list {
		list[i].logit = -math.Ln2 * float64(min(i+1, candidates-1))
	}
	return list
}

// sampler chooses among candidates by every parameter of engine.Sampling.
type sampler struct {
	s     engine.Sampling
	seen  map[engine.Token]int // tokens accepted or sampled, for the penalties
	draws uint64               // random numbers used
}

func newSampler(s engine.Sampling) *sampler {
	return &sampler{s: s, seen: map[engine.Token]int{}}
}

// Accept counts a token as if it had been drawn here.
func (s *sampler) Accept(t engine.Token) {
	s.seen[t]++
	s.draws++
}

// Close has nothing to free.
func (s *sampler) Close() {}

// sample draws the token that follows chain. The logprobs are of the raw distribution.
func (s *sampler) sample(c *Config, chain uint64, pos, logprobs int) engine.Sampled {
	raw := nextCandidates(c, chain, pos, s.s.IgnoreEOS)
	work := slices.Clone(raw)
	for t, b := range s.s.LogitBias {
		if !slices.ContainsFunc(work, func(x candidate) bool { return x.t == t }) && b > 0 && t >= 0 && int(t) < vocabSize {
			work = append(work, candidate{t: t, logit: -20}) // unlikely, unless the bias says otherwise
		}
	}
	for i := range work {
		work[i].logit = s.adjust(work[i])
	}
	// A total order: the map above has none.
	slices.SortFunc(work, func(a, b candidate) int {
		switch {
		case a.logit > b.logit:
			return -1
		case a.logit < b.logit:
			return 1
		}
		return int(a.t) - int(b.t)
	})
	out := engine.Sampled{Token: work[0].t}
	if s.s.Temperature > 0 {
		out.Token = s.draw(work, chain)
	}
	s.Accept(out.Token)
	out.Logprob = -20
	for _, x := range raw {
		if x.t == out.Token {
			out.Logprob = float32(x.logit)
		}
	}
	for i := 0; i < logprobs-1 && i < len(raw); i++ {
		out.Top = append(out.Top, engine.TokenLogprob{Token: raw[i].t, Logprob: float32(raw[i].logit)})
	}
	return out
}

// adjust applies penalties and bias to one logit.
func (s *sampler) adjust(x candidate) float64 {
	n := s.seen[x.t]
	if r := float64(s.s.RepetitionPenalty); n > 0 && r > 0 && r != 1 {
		x.logit *= r // logits here are negative: larger is less likely
	}
	if n > 0 {
		x.logit -= float64(s.s.FrequencyPenalty)*float64(n) + float64(s.s.PresencePenalty)
	}
	return x.logit + float64(s.s.LogitBias[x.t])
}

// draw filters the sorted list and picks by a number made of seed, count and KV.
func (s *sampler) draw(work []candidate, chain uint64) engine.Token {
	keep := len(work)
	if s.s.TopK > 0 {
		keep = min(keep, s.s.TopK)
	}
	p, sum := make([]float64, keep), 0.0
	for i := range p {
		p[i] = math.Exp((work[i].logit - work[0].logit) / float64(s.s.Temperature))
		sum += p[i]
	}
	top, acc := p[0], 0.0
	for i := range p {
		topP, minP := float64(s.s.TopP), float64(s.s.MinP)
		if i > 0 && ((topP > 0 && topP < 1 && acc >= topP*sum) || p[i] < minP*top) {
			p = p[:i]
			break
		}
		acc += p[i]
	}
	u := float64(mix(chain^mix(uint64(s.s.Seed)<<32^s.draws))>>11) / (1 << 53) * acc
	for i := range p {
		if u -= p[i]; u < 0 {
			return work[i].t
		}
	}
	return work[len(p)-1].t
}

// Expected is the right answer to prompt, computed without an engine: at most n
// tokens, ending with EOS if the model ends. One optional Sampling; without it greedy.
// It is what an engine with this configuration gives when every KV byte is right.
func Expected(cfg Config, prompt []engine.Token, n int, sampling ...engine.Sampling) []engine.Token {
	cfg = cfg.WithDefaults()
	smp := newSampler(engine.Sampling{})
	if len(sampling) > 0 {
		smp = newSampler(sampling[0])
	}
	cell := make([]byte, cfg.cellBytes())
	chain, pos := chainStart(cfg.Seed), -1
	add := func(t engine.Token) {
		fillCell(&cfg, chain, t, cell)
		chain = foldCell(chain, cell)
		pos++
	}
	for _, t := range prompt {
		add(t)
	}
	var out []engine.Token
	for len(out) < n {
		t := smp.sample(&cfg, chain, pos, 0).Token
		out = append(out, t)
		if isEOG(t) {
			break
		}
		add(t)
	}
	return out
}
