package policy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// fleetOf makes n idle candidates.
func fleetOf(n int) []Candidate {
	cands := make([]Candidate, n)
	for i := range cands {
		cands[i] = Candidate{ID: fmt.Sprintf("10.0.0.%d:8000", i), Order: i, Host: fmt.Sprintf("10.0.0.%d", i)}
	}
	return cands
}

func newPolicy(t testing.TB, name string, o Options) Policy {
	t.Helper()
	p, err := New(name, o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestNew(t *testing.T) {
	for _, name := range Names() {
		p := newPolicy(t, name, Options{})
		if i := p.Choose(&Request{Session: "s", Prefix: []uint64{1}}, nil); i != -1 {
			t.Errorf("%s chose %d of none", name, i)
		}
		if i := p.Choose(&Request{Session: "s", Prefix: []uint64{1}}, fleetOf(1)); i != 0 {
			t.Errorf("%s chose %d of one", name, i)
		}
		if !Known(name) {
			t.Errorf("%s is not known", name)
		}
	}
	for _, c := range []struct {
		name string
		o    Options
	}{
		{"best", Options{}}, {PrefixCache, Options{BalanceAbs: -1}}, {PrefixCache, Options{BalanceRel: 0.5}}, {PrefixCache, Options{MinMatch: 2}},
		{PrefixCache, Options{MaxBytes: 100}}, {SessionHash, Options{BoundedLoad: 0.9}}, {SessionHash, Options{MinLoad: -1}},
	} {
		if _, err := New(c.name, c.o); err == nil {
			t.Errorf("%s %+v was accepted", c.name, c.o)
		}
	}
}

// run has n requests chosen among cands, each of which stays in flight, and returns the counts. A nil step leaves the
// candidates as they are.
func run(t *testing.T, p Policy, cands []Candidate, n int, step func(i, chosen int)) []int {
	t.Helper()
	counts := make([]int, len(cands))
	for i := range n {
		r := Request{Session: fmt.Sprint("session ", i), Prefix: []uint64{uint64(i) + 1}}
		c := p.Choose(&r, cands)
		if c < 0 || c >= len(cands) {
			t.Fatalf("chose %d of %d", c, len(cands))
		}
		p.Sent(&r, cands[c].ID)
		counts[c]++
		if step != nil {
			step(i, c)
		}
	}
	return counts
}

// Requests of their own are spread evenly by every policy: within four standard deviations of a random choice.
func TestDistribution(t *testing.T) {
	for _, name := range Names() {
		for _, n := range []int{2, 7, 16} {
			const requests = 8000
			cands := fleetOf(n)
			running := []int{} // the 2n oldest end first
			counts := run(t, newPolicy(t, name, Options{Seed: 7}), cands, requests, func(_, c int) {
				cands[c].Inflight++
				if running = append(running, c); len(running) > 2*n {
					cands[running[0]].Inflight--
					running = running[1:]
				}
			})
			mean := float64(requests) / float64(n)
			for i, got := range counts {
				if math.Abs(float64(got)-mean) > 4*math.Sqrt(mean) {
					t.Errorf("%s: worker %d of %d got %d; the mean is %.0f: %v", name, i, n, got, mean, counts)
				}
			}
		}
	}
}

// Equal seeds choose alike; for random ones another seed chooses differently.
func TestDeterministic(t *testing.T) {
	for _, name := range Names() {
		choices := func(seed uint64) (out []int) {
			cands := fleetOf(5)
			run(t, newPolicy(t, name, Options{Seed: seed}), cands, 200, func(i, c int) {
				out = append(out, c)
				cands[c].Inflight++
				cands[i%5].Inflight /= 2
			})
			return out
		}
		if !slices.Equal(choices(1), choices(1)) {
			t.Errorf("%s: the same seed chose differently", name)
		}
		if differs := !slices.Equal(choices(1), choices(2)); differs != (name == Random || name == PowerOfTwo) {
			t.Errorf("%s: another seed chose differently: %v", name, differs)
		}
	}
}

// Whoever is in the set in turn with others is chosen in turn, however the set changes.
func TestRoundRobinStarvesNobody(t *testing.T) {
	all := fleetOf(5)
	p := newPolicy(t, RoundRobin, Options{})
	rng := rand.New(rand.NewPCG(1, 2))
	since := make([]int, 5) // choices that passed a worker by although it was there
	for range 5000 {
		cands := slices.DeleteFunc(slices.Clone(all), func(Candidate) bool { return rng.IntN(3) == 0 })
		c := p.Choose(&Request{}, cands)
		for i := range cands {
			since[cands[i].Order]++
		}
		if c >= 0 {
			since[cands[c].Order] = 0
		}
		for i, n := range since {
			if n >= len(all) {
				t.Fatalf("worker %d was passed by %d times", i, n)
			}
		}
	}
}

func TestLeastAndPowerOfTwoFollowLoad(t *testing.T) {
	cands := fleetOf(4)
	for i := range cands {
		cands[i].Inflight = 10
	}
	cands[2].Inflight = 3
	if counts := run(t, newPolicy(t, LeastInflight, Options{}), cands, 100, nil); counts[2] != 100 {
		t.Errorf("least in flight: %v", counts)
	}
	// The least loaded one is among the two with chance 1/2, and then wins.
	if counts := run(t, newPolicy(t, PowerOfTwo, Options{Seed: 3}), cands, 4000, nil); counts[2] < 1850 || counts[2] > 2150 {
		t.Errorf("power of two: %v", counts)
	}
}

// A worker that joins takes over its share of sessions and no other session moves; one that
// leaves gives up its own, to all the others.
func TestSessionHashMovesOnlyShares(t *testing.T) {
	const sessions, n = 20000, 10
	p := newPolicy(t, SessionHash, Options{})
	where := func(cands []Candidate) []string {
		out := make([]string, sessions)
		for i := range out {
			out[i] = cands[p.Choose(&Request{Session: fmt.Sprint(i)}, cands)].ID
		}
		return out
	}
	few, many := fleetOf(n), fleetOf(n+1)
	before, after := where(few), where(many)
	joined, moved := many[n].ID, 0
	from := map[string]int{}
	for i := range before {
		if before[i] == after[i] {
			continue
		}
		if after[i] != joined {
			t.Fatalf("session %d moved from %s to %s when %s joined", i, before[i], after[i], joined)
		}
		moved++
		from[before[i]]++
	}
	if want := float64(sessions) / (n + 1); math.Abs(float64(moved)-want) > 5*math.Sqrt(want) {
		t.Errorf("%d sessions moved, want about %.0f", moved, want)
	}
	if len(from) != n {
		t.Errorf("sessions came from %d of %d workers", len(from), n)
	}
}

// A session's worker may have some more than the mean, not all of it; when its load has gone the session returns.
func TestSessionHashBoundsLoad(t *testing.T) {
	cands := fleetOf(8)
	p := newPolicy(t, SessionHash, Options{})
	r := Request{Session: "hot"}
	home := p.Choose(&r, cands)
	for range 800 {
		cands[p.Choose(&r, cands)].Inflight++
	}
	for i := range cands {
		if got := cands[i].Inflight; got > 126 { // 1.25 times the mean of 100, rounded up
			t.Errorf("worker %d has %d of 800", i, got)
		}
		cands[i].Inflight = 0
	}
	if again := p.Choose(&r, cands); again != home {
		t.Errorf("the session went from %d to %d", home, again)
	}
	cands[home].Inflight = 3 // no load to speak of
	if again := p.Choose(&r, cands); again != home {
		t.Errorf("the session left a worker with 3 legs")
	}
}

func TestPairCost(t *testing.T) {
	peer := Candidate{Host: "a", Zone: "z1"}
	free := Load{Known: true, Free: 0.9}
	for _, c := range []struct {
		name string
		a, b Candidate // a must be chosen
	}{
		{"same host", Candidate{Host: "a", Zone: "z1"}, Candidate{Host: "b", Zone: "z1"}},
		{"same zone", Candidate{Host: "b", Zone: "z1"}, Candidate{Host: "c", Zone: "z2"}},
		{"known to unknown", Candidate{Host: "b", Zone: "z1"}, Candidate{Host: "c"}},
		{"unknown to far", Candidate{Host: "b"}, Candidate{Host: "c", Zone: "z2"}},
		{"load before distance", Candidate{Host: "c", Zone: "z2"}, Candidate{Host: "a", Zone: "z1", Inflight: 3}},
		{"somebody else's load", Candidate{Host: "b", Load: free}, Candidate{Host: "b", Load: Load{Known: true, Free: 0.9, Queue: 2}}},
		{"age of the queue", Candidate{Host: "b", Load: free, Inflight: 1}, Candidate{Host: "b", Load: Load{Known: true, Free: 0.9, Oldest: time.Second}}},
		{"free memory", Candidate{Host: "b", Load: free, Inflight: 3}, Candidate{Host: "b", Load: Load{Known: true, Free: 0.05}}},
		{"enough memory", Candidate{Host: "b", Load: Load{Known: true, Free: 0.3}}, Candidate{Host: "b", Load: free, Inflight: 1}},
	} {
		p := newPolicy(t, PairCost, Options{})
		c.b.Order = 1
		for range 3 {
			if i := p.Choose(&Request{Peer: &peer}, []Candidate{c.a, c.b}); i != 0 {
				t.Errorf("%s: costs %g and %g, chose the second", c.name, Cost(&Request{Peer: &peer}, &c.a), Cost(&Request{Peer: &peer}, &c.b))
			}
		}
	}
}

func BenchmarkChoose(b *testing.B) {
	for _, name := range Names() {
		for _, n := range []int{2, 16, 256} {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				p, cands := newPolicy(b, name, Options{}), fleetOf(n)
				prompt := Blocks(nil, make([]byte, 32<<10)) // 8k tokens of 4 bytes
				r := Request{Session: "session", Prefix: prompt, Peer: &cands[0]}
				for i := range n / 2 {
					p.Sent(&r, cands[i].ID)
				}
				for i := 0; b.Loop(); i++ {
					c := p.Choose(&r, cands)
					cands[c].Inflight = i % 5
				}
			})
		}
	}
}
