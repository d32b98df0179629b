package legacy

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/model/explore"
)

// left is what each policy leaves open in each variant, as the exploration says it: P pinned, A written
// after ack, W wrong success, L lost cause. First with update_status locked, then unlocked.
const left = `
                   legacy       fix-a        fix-b        fix-ab       mooncake     baton
late-abort         PAWL PAWL    -A-L PAWL    -AWL -AWL    -A-L -AWL    -AWL -AWL    ---- ----
three-chunks       PAWL PAWL    -A-L PAWL    -AWL -AWL    -A-L -AWL    -AWL -AWL    ---- ----
late-success       -AWL -AWL    -A-L -AWL    -AWL -AWL    -A-L -AWL    -AWL -AWL    ---- ----
abort-before-init  PAWL PAWL    -A-L PAWL    PAWL PAWL    -A-L PAWL    -AWL -AWL    ---- ----
abort-unknown      P--- P---    P--- P---    P--- P---    P--- P---    ---L ---L    ---- ----
drop-abort         PAWL PAWL    -A-L PAWL    -AWL -AWL    -A-L -AWL    -AWL -AWL    ---- ----
drop-done          --W- --W-    --W- --W-    --W- --W-    --W- --W-    --W- --W-    ---- ----
drop-clear         --W- --W-    --W- --W-    --W- --W-    --W- --W-    --W- --W-    ---- ----
drop-failure       P-WL P-WL    P-WL P-WL    P-WL P-WL    --WL P-WL    P-W- P-W-    ---- ----
room-reuse         PAWL PAWL    PAWL PAWL    PAWL PAWL    -AWL PAWL    PAWL PAWL    ---- ----
mass-abort         P--- P---    P--- P---    P--- P---    P--- P---    -AWL -AWL    ---- ----
`

// reports are explorations that several tests read; the tests of this package run one after another.
var reports = map[string]*Report{}

func explored(t *testing.T, p Policy, v Variant, unlocked bool) *Report {
	t.Helper()
	key := fmt.Sprint(p.Name, v.Name, unlocked)
	if reports[key] == nil {
		r, err := Explore(t.Context(), p, v, unlocked)
		if err != nil {
			t.Fatal(err)
		}
		reports[key] = r
	}
	return reports[key]
}

// letters is what a report leaves open, in the words of left.
func letters(r *Report) string {
	out := []byte("----")
	for i, l := range []byte("PAWL") {
		if !r.With[i].Zero() {
			out[i] = l
		}
	}
	return string(out)
}

func TestWhatEachPolicyLeavesOpen(t *testing.T) {
	lines := strings.Split(strings.TrimSpace(left), "\n")
	policies := strings.Fields(lines[0])
	if len(policies) != len(Policies()) || len(lines)-1 != len(Variants()) {
		t.Fatalf("the table has %d policies and %d variants, there are %d and %d", len(policies), len(lines)-1, len(Policies()), len(Variants()))
	}
	for _, line := range lines[1:] {
		cells := strings.Fields(line)
		v, err := VariantNamed(cells[0])
		if err != nil {
			t.Fatal(err)
		}
		for i, name := range policies {
			p, err := PolicyNamed(name)
			if err != nil {
				t.Fatal(err)
			}
			for k, unlocked := range []bool{false, true} {
				r := explored(t, p, v, unlocked)
				if got, want := letters(r), cells[1+2*i+k]; got != want {
					t.Errorf("%s, %s, unlocked %v: leaves %s, want %s", v.Name, name, unlocked, got, want)
				}
				if r.Executions.Zero() || len(r.Examples) != strings.Count(letters(r), "P")+strings.Count(letters(r), "A")+strings.Count(letters(r), "W")+strings.Count(letters(r), "L") {
					t.Errorf("%s, %s: %v executions, %d examples", v.Name, name, r.Executions, len(r.Examples))
				}
			}
		}
	}
}

// TestBatonAnswersEveryAbort: with the production machine every execution of every variant ends every
// request, acks every ABORT, forgets every room and leaves nothing parked.
func TestBatonAnswersEveryAbort(t *testing.T) {
	p, _ := PolicyNamed("baton")
	for _, v := range Variants() {
		m := &machine{p: p, v: v}
		ends := 0
		walk(m, func(s *State, steps []step) {
			if len(steps) > 0 {
				return
			}
			ends++
			for i := range v.requests {
				if l := &s.lives[i]; l.ended == absent || l.open || !l.gone || l.parked || l.phase != over {
					t.Errorf("%s: request %d at the end: %s", v.Name, i, m.show(s))
				}
			}
			for _, conn := range v.conns {
				for _, f := range conn {
					if f.abort && !s.lives[f.req].acked {
						t.Errorf("%s: the ABORT of request %d was never acked: %s", v.Name, f.req, m.show(s))
					}
				}
			}
		})
		if ends == 0 {
			t.Errorf("%s: no execution ends", v.Name)
		}
	}
}

// walk visits every reachable state once, by its whole value and not by its key.
func walk(m *machine, f func(*State, []step)) {
	seen := map[State]bool{}
	todo := []State{m.start()}
	for len(todo) > 0 {
		s := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if seen[s] {
			continue
		}
		seen[s] = true
		steps := m.next(&s, nil)
		f(&s, steps)
		for _, st := range steps {
			todo = append(todo, st.to)
		}
	}
}

// TestKeyTellsStatesApart: two different states never have the same key.
func TestKeyTellsStatesApart(t *testing.T) {
	for _, v := range Variants() {
		for _, p := range Policies() {
			if p.mooncake && len(v.requests) == maxRequests {
				continue // fifty thousand states, and every field of them occurs elsewhere
			}
			m := &machine{p: p, v: v, unlocked: true}
			keys := map[string]bool{}
			n := 0
			walk(m, func(s *State, _ []step) {
				keys[string(s.key(nil))] = true
				n++
			})
			if len(keys) != n {
				t.Errorf("%s, %s: %d states, %d keys", v.Name, p.Name, n, len(keys))
			}
		}
	}
}

// TestCountIsTheNumberOfPaths: dynamic programming agrees with walking each path on its own.
func TestCountIsTheNumberOfPaths(t *testing.T) {
	for _, c := range []struct{ variant, policy string }{
		{"late-success", "legacy"}, {"late-success", "fix-ab"}, {"late-abort", "mooncake"}, {"late-abort", "baton"},
		{"abort-unknown", "fix-b"}, {"drop-done", "fix-b"}, {"drop-clear", "legacy"},
	} {
		p, _ := PolicyNamed(c.policy)
		v, _ := VariantNamed(c.variant)
		m := &machine{p: p, v: v}
		var all uint64
		var with [4]uint64
		var down func(s *State)
		down = func(s *State) {
			steps := m.next(s, nil)
			for i := range steps {
				down(&steps[i].to)
			}
			if len(steps) > 0 {
				return
			}
			all++
			for i, f := range Faults() {
				if s.faults&f != 0 || f == Pinned && m.pinned(s) {
					with[i]++
				}
			}
		}
		s := m.start()
		down(&s)
		r := explored(t, p, v, false)
		got := fmt.Sprint(r.Executions, r.With)
		if want := fmt.Sprint(Count{lo: all}, [4]Count{{lo: with[0]}, {lo: with[1]}, {lo: with[2]}, {lo: with[3]}}); got != want {
			t.Errorf("%s, %s: counted %s, walked %s", c.variant, c.policy, got, want)
		}
	}
}

// TestExamplesShowTheirFault: a counterexample is a way that the machine can go, and no shorter one exists.
func TestExamplesShowTheirFault(t *testing.T) {
	for _, name := range []string{"late-abort", "abort-before-init", "drop-failure"} {
		v, _ := VariantNamed(name)
		for _, p := range Policies() {
			m := &machine{p: p, v: v}
			for _, f := range Faults() {
				path := m.path(t.Context(), f)
				if path == nil {
					continue
				}
				s, err := explore.Replay(m, 0, path)
				if err != nil {
					t.Fatal(err)
				}
				if !m.shows(&s, f) {
					t.Errorf("%s, %s: the example of %v ends in %s", name, p.Name, f, m.show(&s))
				}
				if n := m.nearest(f); n != len(path) {
					t.Errorf("%s, %s: the example of %v has %d steps, %d are enough", name, p.Name, f, len(path), n)
				}
			}
		}
	}
}

func (m *machine) shows(s *State, f Fault) bool {
	return s.faults&f != 0 || f == Pinned && m.Done(*s) && m.pinned(s)
}

// nearest is the number of steps to the nearest state that shows f, level by level over whole states.
func (m *machine) nearest(f Fault) int {
	seen := map[State]bool{}
	level := []State{m.start()}
	for n := 0; len(level) > 0; n++ {
		var next []State
		for _, s := range level {
			if m.shows(&s, f) {
				return n
			}
			for _, st := range m.next(&s, nil) {
				if !seen[st.to] {
					seen[st.to] = true
					next = append(next, st.to)
				}
			}
		}
		level = next
	}
	return -1
}

// TestTheExplorerSeesTheSameGraph: the counter and package explore walk the same states and steps, and every
// state that is not the end of an execution leads to one.
func TestTheExplorerSeesTheSameGraph(t *testing.T) {
	for _, v := range Variants() {
		for _, p := range Policies() {
			if len(v.requests) == maxRequests && p.mooncake {
				continue // many states, no other steps
			}
			r := explored(t, p, v, false)
			w := explore.Run(t.Context(), &machine{p: p, v: v}, explore.Limits{})
			if w.States != r.States || w.Transitions != r.Transitions || w.Violation != nil || !w.Complete {
				t.Errorf("%s, %s: %d states and %d steps, the explorer says %v, %v", v.Name, p.Name, r.States, r.Transitions, w, w.Violation)
			}
		}
	}
}

func TestExploreEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Explore(ctx, Policies()[0], Variants()[0], false); err == nil {
		t.Error("an exploration without time has a result")
	}
}

func TestCountIsExactPast64Bits(t *testing.T) {
	c := Count{lo: 1}
	for range 100 {
		c = c.plus(c)
	}
	b, err := c.MarshalJSON()
	if err != nil || string(b) != "1267650600228229401496703205376" {
		t.Errorf("2^100 is %s (%v)", b, err)
	}
}

func TestNamesThatAreNotThere(t *testing.T) {
	if _, err := PolicyNamed("fix-c"); err == nil || !strings.Contains(err.Error(), "fix-ab") {
		t.Errorf("policy fix-c: %v", err)
	}
	if _, err := VariantNamed("x"); err == nil || !strings.Contains(err.Error(), "late-abort") {
		t.Errorf("variant x: %v", err)
	}
}
