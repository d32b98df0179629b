// Package policy chooses one worker among several. A policy sees a snapshot of the candidates and what it needs to
// know of the request, and does no I/O: no clock, no lock, no logger. With the same seed and the same calls it
// chooses the same workers.
//
// The caller leaves out workers that cannot be used (out, full, of another model, failed on before), so a policy
// weighs only what is possible. A [Policy] is not safe for concurrent use: the router calls it under
// the lock of the leg that it belongs to, which also makes choice and count of a worker one step.
//
//   - round-robin, random: whatever the load.
//   - power-of-two: the less loaded of two random ones.
//   - least-inflight: fewest legs of this router, in turn among equals.
//   - prefix-cache: who was sent the longest beginning of this prompt ([Tree]), unless it has too much to do.
//   - session-hash: the same worker for the same session, within a bound of load (hash.go).
//   - pair-cost: least of load, memory shortage, queue age and distance to the other worker of the pair (cost.go).
package policy

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// Names of policies.
const (
	RoundRobin    = "round-robin"
	Random        = "random"
	PowerOfTwo    = "power-of-two"
	LeastInflight = "least-inflight"
	PrefixCache   = "prefix-cache"
	SessionHash   = "session-hash"
	PairCost      = "pair-cost"
)

// Names lists every policy, in the order of the documentation.
func Names() []string {
	return []string{LeastInflight, RoundRobin, Random, PowerOfTwo, PrefixCache, SessionHash, PairCost}
}

// Load is what a worker's own metrics say. The zero value says nothing.
type Load struct {
	Known bool
	Queue int // requests that wait there, whoever sent them
	// Free is the share of the worker's KV memory that is free, in [0, 1].
	Free float64
	// Oldest is how long the oldest request has been waiting; 0 if the worker does not tell.
	Oldest time.Duration
}

// Candidate is one worker that could be chosen.
type Candidate struct {
	ID string // stable for the life of the worker, and after its restart at the same address
	// Order is the worker's place in its fleet; candidates come in ascending order of it.
	Order    int
	Inflight int    // legs of this router that have not ended
	Host     string // two workers of one host are nearest
	Zone     string // "" if nobody said
	Load     Load
}

// Request is what policies know of a request.
type Request struct {
	// Prefix is the prompt as a chain of block hashes, see [Blocks]; empty for unknown.
	Prefix []uint64
	// Session names whom to send to the same worker; "" for nobody.
	Session string
	// Peer is the other worker of the pair if it has been chosen before this one.
	Peer *Candidate
}

// Policy chooses.
type Policy interface {
	// Choose returns the index of the best candidate, -1 if there is none.
	Choose(r *Request, cands []Candidate) int
	// Sent says that r goes to the worker of this name.
	Sent(r *Request, id string)
	// Forget says that a worker has gone for good.
	Forget(id string)
}

// Options of [New]. Zero values take the defaults in brackets.
type Options struct {
	Seed uint64
	// BalanceAbs and BalanceRel are when prefix-cache lets load win over a match: the worker of the match has at
	// least BalanceAbs [16] legs more than the least loaded one, and more than BalanceRel [1.5] times as many.
	BalanceAbs int
	BalanceRel float64
	// MinMatch is the least share of the prompt that must match [0.25].
	MinMatch float64
	// MaxBytes bounds the memory of the prefix tree [64 MiB].
	MaxBytes int
	// BoundedLoad is how many times the mean load a worker may have before session-hash takes
	// the session's next choice [1.25], and MinLoad what it may have in any case [4].
	BoundedLoad float64
	MinLoad     int
}

func (o Options) withDefaults() Options {
	if o.BalanceAbs == 0 {
		o.BalanceAbs = 16
	}
	if o.BalanceRel == 0 {
		o.BalanceRel = 1.5
	}
	if o.MinMatch == 0 {
		o.MinMatch = 0.25
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = 64 << 20
	}
	if o.BoundedLoad == 0 {
		o.BoundedLoad = 1.25
	}
	if o.MinLoad == 0 {
		o.MinLoad = 4
	}
	return o
}

// New makes the policy of this name. Errors name what is wrong with the name or an option.
func New(name string, o Options) (Policy, error) {
	o = o.withDefaults()
	switch {
	case o.BalanceAbs < 0 || o.BalanceRel < 1:
		return nil, fmt.Errorf("policy: balance thresholds %d and %g: the first must not be negative, the second not below 1", o.BalanceAbs, o.BalanceRel)
	case o.MinMatch < 0 || o.MinMatch > 1:
		return nil, fmt.Errorf("policy: least match %g: want a share in [0, 1]", o.MinMatch)
	case o.MaxBytes < minTreeBytes:
		return nil, fmt.Errorf("policy: prefix tree of %d bytes: at least %d are needed", o.MaxBytes, minTreeBytes)
	case o.BoundedLoad < 1 || o.MinLoad < 1:
		return nil, fmt.Errorf("policy: load bounds %g and %d: both must be at least 1", o.BoundedLoad, o.MinLoad)
	}
	rng := rand.New(rand.NewPCG(o.Seed, 0x6261746f6e)) // the second word only has to be fixed
	switch name {
	case RoundRobin:
		return &roundRobin{}, nil
	case Random:
		return &random{rng: rng}, nil
	case PowerOfTwo:
		return &powerOfTwo{rng: rng}, nil
	case LeastInflight:
		return &leastInflight{}, nil
	case PrefixCache:
		return &prefixCache{o: o, tree: NewTree(o.MaxBytes)}, nil
	case SessionHash:
		return &sessionHash{o: o}, nil
	case PairCost:
		return &pairCost{}, nil
	}
	return nil, fmt.Errorf("policy: %q is none: use %s", name, strings.Join(Names(), ", "))
}

// Known reports whether there is a policy of this name.
func Known(name string) bool { return slices.Contains(Names(), name) }

// unlearned is for policies that keep nothing of a request.
type unlearned struct{}

func (unlearned) Sent(*Request, string) {}
func (unlearned) Forget(string)         {}

// roundRobin takes the one that was not taken for longest. That, and no count modulo the candidates, is why none starves
// while the set changes from choice to choice: who is there is passed by once by each of the others at most.
type roundRobin struct {
	unlearned
	tick  uint64
	taken []uint64 // tick of the last choice, by Order; 0: never
}

func (p *roundRobin) Choose(_ *Request, cands []Candidate) int {
	return p.among(cands, func(int) bool { return true })
}

// among chooses the next one for which ok is true; -1 if there is none.
func (p *roundRobin) among(cands []Candidate, ok func(i int) bool) int {
	best, oldest := -1, uint64(0)
	for i := range cands {
		if !ok(i) {
			continue
		}
		for cands[i].Order >= len(p.taken) {
			p.taken = append(p.taken, 0)
		}
		if at := p.taken[cands[i].Order]; best < 0 || at < oldest {
			best, oldest = i, at
		}
	}
	if best >= 0 {
		p.tick++
		p.taken[cands[best].Order] = p.tick
	}
	return best
}

type random struct {
	unlearned
	rng *rand.Rand
}

func (p *random) Choose(_ *Request, cands []Candidate) int {
	if len(cands) == 0 {
		return -1
	}
	return p.rng.IntN(len(cands))
}

type powerOfTwo struct {
	unlearned
	rng *rand.Rand
}

func (p *powerOfTwo) Choose(_ *Request, cands []Candidate) int {
	if len(cands) < 2 {
		return len(cands) - 1
	}
	a, b := p.rng.IntN(len(cands)), p.rng.IntN(len(cands)-1)
	if b >= a {
		b++ // another one than a, each with the same chance
	}
	if cands[b].Inflight < cands[a].Inflight {
		return b
	}
	return a
}

type leastInflight struct {
	unlearned
	turn roundRobin
}

func (p *leastInflight) Choose(_ *Request, cands []Candidate) int {
	least := fewest(cands)
	return p.turn.among(cands, func(i int) bool { return cands[i].Inflight == least })
}

// fewest is the smallest number of legs among cands, 0 if there are none.
func fewest(cands []Candidate) int {
	least := 0
	for i := range cands {
		if i == 0 || cands[i].Inflight < least {
			least = cands[i].Inflight
		}
	}
	return least
}
