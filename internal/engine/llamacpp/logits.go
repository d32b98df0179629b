package llamacpp

import (
	"math"
	"slices"

	"github.com/baton-pd/baton/internal/engine"
)

// argmax is the first index of the largest logit. ok is false if a logit is NaN or
// the largest is infinite: KV that came over a wire was damaged, or the model is.
func argmax(logits []float32) (best int, ok bool) {
	var sum float32 // NaN if any logit is; ±Inf stays harmless below
	top := float32(math.Inf(-1))
	for i, v := range logits {
		sum += v * 0 // NaN for NaN and for infinities
		if v > top {
			top, best = v, i
		}
	}
	if sum == sum {
		return best, true
	}
	// Rare: minus infinity is a legal logit (masked token), the others are not.
	for _, v := range logits {
		if v != v {
			return 0, false
		}
	}
	return best, !math.IsInf(float64(top), 0)
}

// logprobs answers what a row asked for: the chosen token's logprob and the n-1 most
// likely. Sums are in float64.
func logprobs(logits []float32, chosen engine.Token, n int) (float32, []engine.TokenLogprob) {
	best, _ := argmax(logits)
	top := float64(logits[best])
	var sum float64
	for _, v := range logits {
		sum += math.Exp(float64(v) - top)
	}
	norm := top + math.Log(sum)
	var likely []engine.TokenLogprob
	for _, t := range largest(logits, n-1) {
		likely = append(likely, engine.TokenLogprob{Token: t, Logprob: float32(float64(logits[t]) - norm)})
	}
	return float32(float64(logits[chosen]) - norm), likely
}

// largest gives the k largest logits' indices, largest first; equal ones by index.
func largest(logits []float32, k int) []engine.Token {
	k = min(k, len(logits))
	if k <= 0 {
		return nil
	}
	better := func(a, b engine.Token) bool {
		return logits[a] > logits[b] || logits[a] == logits[b] && a < b
	}
	// A heap with the worst of the best k on top.
	heap := make([]engine.Token, 0, k)
	down := func(i int) {
		for {
			c := 2*i + 1
			if c >= len(heap) {
				return
			}
			if c+1 < len(heap) && better(heap[c], heap[c+1]) {
				c++
			}
			if !better(heap[i], heap[c]) {
				return
			}
			heap[i], heap[c] = heap[c], heap[i]
			i = c
		}
	}
	for i := range logits {
		t := engine.Token(i)
		switch {
		case len(heap) < k:
			heap = append(heap, t)
			if len(heap) == k {
				for j := k/2 - 1; j >= 0; j-- {
					down(j)
				}
			}
		case better(t, heap[0]):
			heap[0] = t
			down(0)
		}
	}
	slices.SortFunc(heap, func(a, b engine.Token) int {
		if better(a, b) {
			return -1
		}
		return 1
	})
	return heap
}
