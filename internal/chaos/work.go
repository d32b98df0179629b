package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
)

// Size is how much of the pools a request is to want.
type Size uint8

// The sizes.
const (
	SizeAny   Size = iota
	SizeLarge      // most of a pool, or more than there is
)

// Ask is what a request wants, and what is right.
type Ask struct {
	Name   string // for people
	Prompt any    // text or tokens, as JSON takes them
	Max    int    // tokens of the answer
	Want   string // the right answer
	// TooLarge: it can never fit, and must be refused with cause capacity.
	TooLarge bool
}

// Work is a source of requests with known answers. Draw is pure but for what Learn has found out.
type Work interface {
	Draw(rng *rand.Rand, size Size) Ask
	// Learn asks for what has to be known beforehand, on a stack that nothing happens to.
	Learn(ctx context.Context, ask func(context.Context, Ask) (string, error)) error
}

// SimWork asks the sim engine. Every KV byte of the prompt decides about the answer, which is computed
// here without an engine.
type SimWork struct {
	Model sim.Config // ChunkTokens included
	// PoolTokens are the prompt tokens that the smaller of a pair's pools holds.
	PoolTokens int
}

// Learn has nothing to do.
func (w *SimWork) Learn(context.Context, func(context.Context, Ask) (string, error)) error {
	return nil
}

// Draw makes a prompt of up to ten chunks.
func (w *SimWork) Draw(rng *rand.Rand, size Size) Ask {
	n, max := 1+rng.IntN(10*w.Model.ChunkTokens), 1+rng.IntN(30)
	if size == SizeLarge {
		n, max = w.PoolTokens/2+rng.IntN(w.PoolTokens*2/5), 1+rng.IntN(3)
		if rng.IntN(5) == 0 {
			n = w.PoolTokens + w.PoolTokens/4
		}
	}
	tokens := make([]engine.Token, n)
	for i := range tokens {
		tokens[i] = engine.Token(3 + rng.IntN(256)) // any byte
	}
	a := Ask{Name: fmt.Sprintf("%d prompt tokens, %d to answer", n, max), Prompt: tokens, Max: max, TooLarge: n > w.PoolTokens}
	var b strings.Builder
	for _, t := range sim.Expected(w.Model, tokens, max) {
		b.WriteByte(byte(t - 3)) // the sim's tokens are bytes
	}
	a.Want = b.String()
	return a
}

// LearnedWork asks a real model. The right answers are those of the same stack before
// anything happened to it: greedy answers are equal to the last bit whatever else runs (docs/architecture.md).
type LearnedWork struct {
	Asks  []Ask // without Want
	Large []Ask
}

// TextWork has n prompts of words, of about from to tokens, with answers of up to most tokens.
func TextWork(seed uint64, n, tokens, most int) *LearnedWork {
	words := strings.Fields("the old river carries small boats past seven quiet towns where people sell bread and count stars every evening before rain")
	rng := rand.New(rand.NewPCG(seed, 1<<41))
	make1 := func(size, max int) Ask {
		text := make([]string, size)
		for i := range text {
			text[i] = words[rng.IntN(len(words))]
		}
		return Ask{Name: fmt.Sprintf("about %d prompt tokens, %d to answer", size, max), Prompt: strings.Join(text, " "), Max: max}
	}
	w := &LearnedWork{}
	for range n {
		w.Asks = append(w.Asks, make1(4+rng.IntN(tokens), 1+rng.IntN(most)))
	}
	w.Large = append(w.Large, make1(2*tokens, 2), make1(3*tokens, 2))
	return w
}

// Learn asks everything once.
func (w *LearnedWork) Learn(ctx context.Context, ask func(context.Context, Ask) (string, error)) error {
	for _, list := range [][]Ask{w.Asks, w.Large} {
		for i := range list {
			text, err := ask(ctx, list[i])
			if err != nil {
				return fmt.Errorf("learn the answer to %q: %w", list[i].Name, err)
			}
			list[i].Want = text
		}
	}
	return nil
}

// Draw picks one.
func (w *LearnedWork) Draw(rng *rand.Rand, size Size) Ask {
	if size == SizeLarge {
		return w.Large[rng.IntN(len(w.Large))]
	}
	return w.Asks[rng.IntN(len(w.Asks))]
}
