package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/stack"
)

// generated is an answer of /generate: tokens, and the logprob of each.
type generated struct {
	IDs      []engine.Token
	Logprobs []float64 // exact: a float32 survives JSON
}

// generate asks for max greedy tokens, of which none ends the answer.
func generate(ctx context.Context, url string, prompt []engine.Token, max int) (g generated, err error) {
	body := map[string]any{"input_ids": prompt, "return_logprob": true,
		"sampling_params": map[string]any{"max_new_tokens": max, "temperature": 0, "ignore_eos": true}}
	res, err := post(ctx, url+"/generate", body)
	if err != nil {
		return g, err
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		return g, fmt.Errorf("read answer: %w", err)
	}
	if res.StatusCode != http.StatusOK {
		return g, fmt.Errorf("%s: %s", res.Status, raw)
	}
	var a struct {
		IDs  []engine.Token `json:"output_ids"`
		Meta struct {
			PromptTokens int                  `json:"prompt_tokens"`
			Logprobs     [][3]json.RawMessage `json:"output_token_logprobs"`
		} `json:"meta_info"`
	}
	if err := json.Unmarshal(raw, &a); err != nil {
		return g, fmt.Errorf("answer %.200s: %w", raw, err)
	}
	g.IDs = a.IDs
	for _, l := range a.Meta.Logprobs {
		v, err := strconv.ParseFloat(string(l[0]), 64)
		if err != nil {
			return g, fmt.Errorf("logprob %s: %w", l[0], err)
		}
		g.Logprobs = append(g.Logprobs, v)
	}
	if len(g.IDs) != max || len(g.Logprobs) != max || a.Meta.PromptTokens != len(prompt) {
		return g, fmt.Errorf("%d tokens and %d logprobs for a prompt of %d tokens; want %d for %d", len(g.IDs), len(g.Logprobs), a.Meta.PromptTokens, max, len(prompt))
	}
	return g, nil
}

// differs says where an answer leaves the reference; "" if it does not, in any bit.
func (g generated) differs(ref generated) string {
	for i := range ref.IDs {
		if g.IDs[i] != ref.IDs[i] {
			return fmt.Sprintf("token %d is %d, in one process %d (logprobs %v and %v)", i, g.IDs[i], ref.IDs[i], g.Logprobs[i], ref.Logprobs[i])
		}
	}
	for i := range ref.Logprobs {
		if g.Logprobs[i] != ref.Logprobs[i] {
			return fmt.Sprintf("tokens are equal, but the logprob of token %d is %v, in one process %v", i, g.Logprobs[i], ref.Logprobs[i])
		}
	}
	return ""
}

// chunkEdges are the lengths around the default chunk of 128 tokens, the shortest, and the longest.
var chunkEdges = []int{1, 2, 127, 128, 129, 255, 256, 257, 1800}

// equalityPrompts are 100 prompts of 1 to 1,800 tokens, shortest first: the edges, and
// lengths in even steps of their logarithm up to 650.
func equalityPrompts() [][]engine.Token {
	lengths := slices.Clone(chunkEdges)
	for n := 100 - len(lengths); len(lengths) < 100; {
		i := 100 - len(lengths)
		lengths = append(lengths, int(math.Round(math.Pow(650, float64(i)/float64(n)))))
	}
	slices.Sort(lengths)
	out := make([][]engine.Token, len(lengths))
	r := rand.New(rand.NewPCG(2026, 3))
	for i, n := range lengths {
		out[i] = make([]engine.Token, n)
		for j := range out[i] {
			// Ordinary tokens of the default model; the low ones are the frequent words.
			out[i][j] = engine.Token(20 + int(19000*math.Pow(r.Float64(), 2)))
		}
	}
	return out
}

// reference computes every prompt in one process, beside the tests that need it.
type reference struct {
	answers []generated
	ready   []chan struct{} // closed when answers[i] is there
	err     atomic.Pointer[error]
}

// startReference takes the prompts in the given order, one at a time.
func startReference(t *testing.T, url string, prompts [][]engine.Token, order []int, max int) *reference {
	r := &reference{answers: make([]generated, len(prompts)), ready: make([]chan struct{}, len(prompts))}
	for i := range r.ready {
		r.ready[i] = make(chan struct{})
	}
	var owner sync.WaitGroup
	ctx, stop := context.WithCancel(t.Context())
	owner.Go(func() {
		for _, i := range order {
			g, err := generate(ctx, url, prompts[i], max)
			if err != nil {
				err = fmt.Errorf("reference of prompt %d (%d tokens): %w", i, len(prompts[i]), err)
				r.err.CompareAndSwap(nil, &err)
			}
			r.answers[i] = g
			close(r.ready[i])
		}
	})
	t.Cleanup(func() { stop(); owner.Wait() })
	return r
}

func (r *reference) of(ctx context.Context, i int) (generated, error) {
	select {
	case <-r.ready[i]:
	case <-ctx.Done():
		return generated{}, ctx.Err()
	}
	if err := r.err.Load(); err != nil {
		return generated{}, *err
	}
	return r.answers[i], nil
}

// each runs work for every item, at most n at a time, and returns all errors.
func each(n int, items []int, work func(i int) error) error {
	slots := make(chan struct{}, n)
	errs := make([]error, len(items))
	var group sync.WaitGroup
	for k, i := range items {
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			errs[k] = work(i)
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// round is one pass of prompts through a stack.
type round struct {
	transport   string
	concurrency int
	prompts     []int
}

var equalityPart = flag.String("equality-part", "0/1", "K/N: the long form of TestEquality takes only each Nth prompt, from the Kth")

// part reads a flag K/N.
func part(t *testing.T, s string) (k, n int) {
	t.Helper()
	if _, err := fmt.Sscanf(s, "%d/%d", &k, &n); err != nil || k < 0 || k >= n {
		t.Fatalf("%q is not K/N with 0 <= K < N", s)
	}
	return k, n
}

// equalityRounds: in the short form every prompt goes through once, dealt out over
// transports and concurrency, and the short chunk edges through both transports. In
// the long form every nth prompt from the kth goes through every round.
func equalityRounds(prompts [][]engine.Token, k, n int) []round {
	var rounds []round
	for _, transport := range []string{"shm", "tcp"} {
		for _, n := range []int{1, 4, 8} {
			rounds = append(rounds, round{transport: transport, concurrency: n})
		}
	}
	edges := 0
	for i := range prompts {
		if prove {
			for r := range rounds {
				if i%n == k {
					rounds[r].prompts = append(rounds[r].prompts, i)
				}
			}
			continue
		}
		k := i % len(rounds)
		rounds[k].prompts = append(rounds[k].prompts, i)
		if n := len(prompts[i]); n < 300 && slices.Contains(chunkEdges, n) {
			other := &rounds[(k+len(rounds)/2)%len(rounds)]
			other.prompts = append(other.prompts, i)
			edges++
		}
	}
	for k := range rounds { // long and short prompts mixed, the same at every run
		r := rand.New(rand.NewPCG(uint64(k), 1))
		r.Shuffle(len(rounds[k].prompts), func(i, j int) {
			p := rounds[k].prompts
			p[i], p[j] = p[j], p[i]
		})
	}
	return rounds
}

// TestEquality: on the real model, greedy answers through router, prefill and decode
// processes are those of the same binary in one process, in every token and every bit
// of its logprob, whatever else runs at the same time. What this holds for, and
// what not, is in docs/architecture.md, "Equality".
//
// The short form sends each of 100 prompts through once, over both transports with 1, 4 and
// 8 requests at a time. BATON_PROVE=1 sends all of them through each of these six, with
// longer answers.
func TestEquality(t *testing.T) {
	needModel(t)
	prompts := equalityPrompts()
	k, n := part(t, *equalityPart)
	rounds := equalityRounds(prompts, k, n)
	max := 8
	if prove {
		max = 32
	}
	var order []int
	for _, r := range rounds {
		for _, i := range r.prompts {
			if !slices.Contains(order, i) {
				order = append(order, i)
			}
		}
	}
	if len(order) < 100/n {
		t.Fatalf("only %d prompts", len(order))
	}
	// One thread each, so prefill and reference share the two cores that a small machine has.
	args := []string{"--threads", "1"}
	alone := start(t, stack.Config{Monolithic: true, Decode: 1, Args: args})
	ref := startReference(t, alone.URL(), prompts, order, max)
	for _, transport := range []string{"shm", "tcp"} {
		t.Run(transport, func(t *testing.T) {
			s := start(t, stack.Config{Prefill: 1, Decode: 1, Args: append(args, "--transport", transport)})
			sent := 0.0 // KV bytes that must have been sent
			for _, r := range rounds {
				if r.transport != transport {
					continue
				}
				for _, i := range r.prompts {
					sent += float64(len(prompts[i])-1) * kvBytesPerToken
				}
				t.Run(fmt.Sprint(r.concurrency), func(t *testing.T) { r.run(t, s.URL(), prompts, ref, max) })
			}
			waitIdle(t, s, settleTime)
			if got, err := metric(t.Context(), s.Prefills[0], "baton_kv_transfer_bytes_total"); err != nil || got < sent {
				t.Errorf("%v bytes were sent by %s (%v), want at least %v: answers did not come from handed-over KV", got, transport, err, sent)
			}
		})
	}
}

// kvBytesPerToken of the default model: 30 layers, K and V, 192 values of 2 bytes.
const kvBytesPerToken = 30 * 2 * 192 * 2

func (r round) run(t *testing.T, url string, prompts [][]engine.Token, ref *reference, max int) {
	began, tokens := time.Now(), 0
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Minute) // an idle machine needs 20 s, in the long form 2 min
	defer stop()
	err := each(r.concurrency, r.prompts, func(i int) error {
		got, err := generate(ctx, url, prompts[i], max)
		if err != nil {
			return fmt.Errorf("prompt %d (%d tokens): %w", i, len(prompts[i]), err)
		}
		want, err := ref.of(ctx, i)
		if err != nil {
			return err
		}
		if d := got.differs(want); d != "" {
			return fmt.Errorf("prompt %d (%d tokens): %s", i, len(prompts[i]), d)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	for _, i := range r.prompts {
		tokens += len(prompts[i])
	}
	t.Logf("%d prompts of %d tokens in all, %d at a time: %v", len(r.prompts), tokens, r.concurrency, time.Since(began).Round(time.Millisecond))
}

// TestEqualitySim: 200 prompts, 32 at a time, over both transports: the sim's answer is wrong
// if one byte of KV is, and its right answer is known without an engine.
func TestEqualitySim(t *testing.T) {
	for _, transport := range []string{"shm", "tcp"} {
		t.Run(transport, func(t *testing.T) {
			s, m := startSim(t, simSetup{transport: transport, model: "seed=11", args: []string{"--max-running", "32", "--pool-mib", "1"}})
			items := make([]int, 200)
			for i := range items {
				items[i] = i
			}
			ctx, stop := context.WithTimeout(t.Context(), 2*time.Minute)
			defer stop()
			if err := each(32, items, func(i int) error {
				p := prompt(i, 1+(i*i*7)%900)
				const max = 20
				g, err := generate(ctx, s.URL(), p, max)
				if err != nil {
					return fmt.Errorf("prompt %d (%d tokens): %w", i, len(p), err)
				}
				if want := sim.Expected(sim.Config(m), p, max, engine.Sampling{IgnoreEOS: true}); !slices.Equal(g.IDs, want) {
					return fmt.Errorf("prompt %d (%d tokens): %v, want %v", i, len(p), g.IDs, want)
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
			waitIdle(t, s, settleTime)
			for _, p := range workers(s) {
				if w, err := inspect(t.Context(), p); err != nil || w.Faults() != "" {
					t.Errorf("%s: %v %s", p.Name, err, w.Faults())
				}
			}
		})
	}
}
