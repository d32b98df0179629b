package explore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// graph is a system given edge by edge: states are numbers, 0 is the start.
type graph struct {
	edges map[int][]gedge
	done  map[int]bool
	bad   map[int]bool
	key   func(int) int // nil: the state itself
	inits []int         // nil: 0
}

type gedge struct {
	to   int
	fair uint8
	err  error
}

func (g *graph) Init() []int {
	if g.inits != nil {
		return g.inits
	}
	return []int{0}
}

func (g *graph) Next(s int, out []Step[int]) []Step[int] {
	for i, e := range g.edges[s] {
		out = append(out, Step[int]{To: e.to, Act: uint32(i), Fair: e.fair, Err: e.err})
	}
	return out
}

func (g *graph) Key(s int, out []byte) []byte {
	if g.key != nil {
		s = g.key(s)
	}
	return fmt.Append(out, s)
}

func (g *graph) Check(s int) error {
	if g.bad[s] {
		return errors.New("bad state")
	}
	return nil
}

func (g *graph) Done(s int) bool { return g.done[s] }

func (g *graph) Describe(from int, st Step[int]) string { return fmt.Sprintf("%d to %d", from, st.To) }

func (g *graph) Show(s int) string { return fmt.Sprint("state ", s) }

func env(to int) gedge           { return gedge{to: to} }
func fair(to int, c uint8) gedge { return gedge{to: to, fair: c} }
func set(states ...int) map[int]bool {
	m := make(map[int]bool)
	for _, s := range states {
		m[s] = true
	}
	return m
}

// TestVerdicts: small graphs whose verdict is plain to see.
func TestVerdicts(t *testing.T) {
	for _, c := range []struct {
		name string
		g    graph
		kind Kind  // "": nothing is wrong
		path []int // states after the start
	}{
		{name: "ends", g: graph{edges: map[int][]gedge{0: {fair(1, 1)}, 1: {fair(2, 1)}}, done: set(2)}},
		{name: "done at once", g: graph{done: set(0)}},
		{name: "deadlock", g: graph{edges: map[int][]gedge{0: {fair(1, 1), fair(2, 1)}}, done: set(2)}, kind: KindStuck, path: []int{1}},
		{name: "only the environment could go on", g: graph{edges: map[int][]gedge{0: {fair(1, 1)}, 1: {env(2)}}, done: set(2)}, kind: KindStuck, path: []int{1}},
		{name: "end out of reach", g: graph{edges: map[int][]gedge{0: {fair(1, 1), fair(3, 1)}, 1: {fair(2, 1)}, 2: {fair(1, 1)}}, done: set(3)}, kind: KindUnreachable, path: []int{1}},
		{name: "fair cycle", g: graph{edges: map[int][]gedge{0: {fair(1, 1)}, 1: {fair(0, 1), fair(2, 1)}}, done: set(2)}, kind: KindLivelock},
		// The run 0 1 0 1 ... is not fair to class 2, which is enabled all the time and never taken.
		{name: "cycle that fairness leaves", g: graph{edges: map[int][]gedge{0: {fair(1, 1), fair(2, 2)}, 1: {fair(0, 1), fair(2, 2)}}, done: set(2)}},
		// Here class 2 is disabled in 1, so weak fairness owes it nothing.
		{name: "cycle that disables the way out", g: graph{edges: map[int][]gedge{0: {fair(1, 1), fair(2, 2)}, 1: {fair(0, 1)}}, done: set(2)}, kind: KindLivelock},
		{name: "environment alone goes round, fairness leaves", g: graph{edges: map[int][]gedge{0: {env(1), fair(2, 1)}, 1: {env(0), fair(2, 1)}}, done: set(2)}},
		{name: "step to itself, fairness leaves", g: graph{edges: map[int][]gedge{0: {env(0), fair(1, 1)}}, done: set(1)}},
		{name: "fair step to itself", g: graph{edges: map[int][]gedge{0: {fair(0, 1), env(1)}}, done: set(1)}, kind: KindLivelock},
		{name: "cycle behind the end is allowed", g: graph{edges: map[int][]gedge{0: {fair(1, 1)}, 1: {fair(1, 1)}}, done: set(1)}},
		// Two components; the first is left by fairness, the second not.
		{name: "second component", g: graph{edges: map[int][]gedge{0: {env(1), fair(2, 3)}, 1: {env(0), fair(2, 3)}, 2: {fair(3, 1)}, 3: {fair(2, 1), fair(4, 1)}}, done: set(4)}, kind: KindLivelock, path: []int{2}},
		{name: "bad state, shortest way", g: graph{edges: map[int][]gedge{0: {fair(1, 1), fair(3, 1)}, 1: {fair(2, 1)}, 2: {fair(4, 1)}, 3: {env(4)}}, bad: set(4)}, kind: KindSafety, path: []int{3, 4}},
		{name: "bad start", g: graph{bad: set(0)}, kind: KindSafety},
		{name: "bad step", g: graph{edges: map[int][]gedge{0: {fair(1, 1)}, 1: {{to: 0, err: errors.New("bad step")}}}}, kind: KindSafety, path: []int{1, 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := Run[int](context.Background(), &c.g, Limits{})
			if c.kind == "" {
				if r.Violation != nil || !r.Complete {
					t.Fatalf("%v\n%v", r, r.Violation)
				}
				return
			}
			if r.Violation == nil || r.Violation.Kind != c.kind {
				t.Fatalf("want %s: %v\n%v", c.kind, r, r.Violation)
			}
			var path []int
			at := 0
			for _, l := range r.Violation.Lines {
				at = c.g.edges[at][l.Index].to
				path = append(path, at)
			}
			if !slices.Equal(path, c.path) {
				t.Errorf("path %v, want %v", path, c.path)
			}
			if (c.kind == KindLivelock) != (len(r.Violation.Cycle) > 0) {
				t.Errorf("cycle %v", r.Violation.Cycle)
			}
			for _, l := range r.Violation.Cycle {
				at = c.g.edges[at][l.Index].to
			}
			if len(path) > 0 && c.kind == KindLivelock && at != path[len(path)-1] {
				t.Errorf("the cycle ends in %d", at)
			}
		})
	}
}

// TestCounts: states, transitions, depth and ends of a system whose numbers are known: n
// tokens that each go through k places.
func TestCounts(t *testing.T) {
	for _, c := range []struct{ n, k, states, transitions, depth int }{
		{1, 4, 4, 3, 3}, {2, 3, 9, 12, 4}, {3, 3, 27, 54, 6},
	} {
		r := Run[string](context.Background(), tokens{n: c.n, k: c.k}, Limits{})
		if r.States != c.states || r.Transitions != c.transitions || r.Depth != c.depth || r.Done != 1 || !r.Complete || r.Violation != nil {
			t.Errorf("%d tokens, %d places: %v", c.n, c.k, r)
		}
	}
}

// TestSymmetry: twins that are told apart by nobody count once. n tokens in k places
// are multisets then: binomial(n+k-1, n).
func TestSymmetry(t *testing.T) {
	r := Run[string](context.Background(), tokens{n: 4, k: 3, twins: true}, Limits{})
	if r.States != 15 || r.Violation != nil {
		t.Errorf("%v, want 15 states", r)
	}
	if r := Run[string](context.Background(), tokens{n: 4, k: 3}, Limits{}); r.States != 81 {
		t.Errorf("%v, want 81 states", r)
	}
	// The trace of a violation found through the reduction can be walked step by step.
	sys := tokens{n: 3, k: 3, twins: true, bad: "122"}
	r = Run[string](context.Background(), sys, Limits{})
	if r.Violation == nil || len(r.Violation.Lines) != 5 {
		t.Fatalf("%v", r.Violation)
	}
	var indices []int
	for _, l := range r.Violation.Lines {
		indices = append(indices, l.Index)
	}
	last, err := Replay[string](sys, r.Violation.Init, indices)
	if err != nil || sys.Check(last) == nil {
		t.Errorf("replayed to %q, %v", last, err)
	}
}

// tokens is a word of n digits; each step raises one digit below k-1.
type tokens struct {
	n, k  int
	twins bool
	bad   string // sorted
}

func (s tokens) Init() []string { return []string{strings.Repeat("0", s.n)} }

func (s tokens) Next(at string, out []Step[string]) []Step[string] {
	for i := range at {
		if int(at[i]-'0') < s.k-1 {
			b := []byte(at)
			b[i]++
			out = append(out, Step[string]{To: string(b), Act: uint32(i), Fair: 1})
		}
	}
	return out
}

func (s tokens) Key(at string, out []byte) []byte {
	n := len(out)
	out = append(out, at...)
	if s.twins {
		slices.Sort(out[n:])
	}
	return out
}

func (s tokens) Check(at string) error {
	b := []byte(at)
	slices.Sort(b)
	if string(b) == s.bad {
		return fmt.Errorf("%s", at)
	}
	return nil
}

func (s tokens) Done(at string) bool { return at == strings.Repeat(string(rune('0'+s.k-1)), s.n) }

func (s tokens) Describe(_ string, st Step[string]) string { return fmt.Sprint("raise ", st.Act) }

func (s tokens) Show(at string) string { return at }

func TestLimits(t *testing.T) {
	sys := tokens{n: 4, k: 4}
	if r := Run[string](context.Background(), sys, Limits{States: 20}); r.Complete || r.States > 24 || r.Violation != nil {
		t.Errorf("states: %v", r)
	}
	if r := Run[string](context.Background(), sys, Limits{Depth: 3}); r.Complete || r.Depth > 4 || r.Violation != nil {
		t.Errorf("depth: %v", r)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if r := Run[string](ctx, sys, Limits{}); r.Complete || r.States > 5 {
		t.Errorf("ended context: %v", r)
	}
	// A violation within the limits is still found, and says so.
	sys.bad = "0011"
	if r := Run[string](context.Background(), sys, Limits{Depth: 2}); r.Violation == nil || r.Complete {
		t.Errorf("violation within the limit: %v", r)
	}
}

func TestReplay(t *testing.T) {
	sys := tokens{n: 2, k: 3}
	if last, err := Replay[string](sys, 0, []int{0, 1, 0, 0}); err != nil || last != "22" {
		t.Errorf("%q, %v", last, err) // at "21" only the second digit is left: step 0
	}
	for _, bad := range [][]int{{2}, {-1}, {0, 0, 5}} {
		if _, err := Replay[string](sys, 0, bad); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("step %d of the trace", len(bad))) {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if _, err := Replay[string](sys, 1, nil); err == nil {
		t.Error("an initial state that does not exist")
	}
}

func TestInits(t *testing.T) {
	g := &graph{inits: []int{5, 6, 5}, edges: map[int][]gedge{5: {fair(7, 1)}, 6: {fair(8, 1)}}, done: set(7), bad: set(8)}
	r := Run[int](context.Background(), g, Limits{})
	if r.States != 4 || r.Violation == nil || r.Violation.Init != 1 || r.Violation.Start != "state 6" || len(r.Violation.Lines) != 1 {
		t.Errorf("%v\n%v", r, r.Violation)
	}
}

// TestWords: a counterexample is readable.
func TestWords(t *testing.T) {
	g := &graph{edges: map[int][]gedge{0: {fair(1, 1)}, 1: {fair(2, 1)}, 2: {fair(1, 1), fair(3, 1)}}, done: set(3)}
	r := Run[int](context.Background(), g, Limits{})
	if r.Violation == nil {
		t.Fatal("no violation")
	}
	got := r.Violation.String()
	for _, want := range []string{"livelock: ", "state 0\n", "  1  0 to 1\n     state 1\n", "then for ever:\n  *  1 to 2\n     state 2\n  *  2 to 1\n     state 1\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if !strings.Contains(r.String(), "4 states, 4 transitions, depth 3") {
		t.Error(r)
	}
}

// TestHash: keys that differ in one bit, in length, or in order are told apart.
func TestHash(t *testing.T) {
	seen := make(map[[16]byte]string)
	add := func(b []byte) {
		h := hash(b)
		if old, ok := seen[h]; ok && old != string(b) {
			t.Errorf("%x and %x have one hash", old, b)
		}
		seen[h] = string(b)
	}
	for n := range 28 {
		base := make([]byte, n)
		add(base)
		for i := range n * 8 {
			b := slices.Clone(base)
			b[i/8] ^= 1 << (i % 8)
			add(b)
			for j := range i {
				c := slices.Clone(b)
				c[j/8] ^= 1 << (j % 8)
				add(c)
			}
		}
	}
	if len(seen) < 200_000 {
		t.Errorf("only %d keys were tried", len(seen))
	}
}
