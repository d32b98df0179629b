// Package explore searches the whole state space of a transition system, breadth
// first, and finds what must never happen: a state or step that breaks an invariant,
// a state from which the system cannot finish any more, and a fair run that never does.
//
// # Use
//
// A [System] gives the initial states, the steps enabled in a state and what must hold
// in it. [Run] visits every reachable state once. States are told apart by their key
// alone, so a Key that sorts interchangeable parts is a symmetry reduction.
//
// # What is checked
//
//   - Safety: [System.Check] in each state, [Step.Err] on each step.
//   - Reachability: from every state some path leads to a state that is Done.
//   - Liveness: no run that is weakly fair stays out of Done for ever. A step of fairness
//     class 0 belongs to the environment and may never happen. For every other class: if
//     some step of it is enabled from some moment on, one is taken again and again.
//
// Under weak fairness it is enough to look at maximal strongly connected components: if each class
// is disabled somewhere in a component or taken within it, the run that visits all of the component
// for ever is fair; if some class is enabled everywhere in it and taken nowhere, no fair run
// stays in it or in any part of it. A state without an enabled fair step is a component of its own:
// the run that stays there is fair.
//
// # What is not promised
//
// States are remembered by a 128-bit hash of their key. With n states two of them are taken for one
// with probability below n²/2^129, which is 10^-24 for 10^7 states. A symmetry reduction keeps the
// verdict on liveness only if it does not exchange steps of different fairness classes.
package explore

import (
	"context"
	"encoding/binary"
	"fmt"
	"runtime"
	"strings"
	"time"
)

// System is a transition system over states S. A state is a value: no method changes
// the one it is given.
type System[S any] interface {
	// Init is where runs begin; at least one state.
	Init() []S
	// Next appends every step enabled in s to out, always in the same order.
	Next(s S, out []Step[S]) []Step[S]
	// Key appends what tells s from other states.
	Key(s S, out []byte) []byte
	// Check is nil, or which invariant s breaks and how.
	Check(s S) error
	// Done: everything that must happen has happened, and s may stay as it is.
	Done(s S) bool
	// Describe puts one step into words, for people who read a trace.
	Describe(from S, st Step[S]) string
	// Show puts a state into words, on one line.
	Show(s S) string
}

// Step is one enabled step.
type Step[S any] struct {
	To S
	// Act is the System's own name of the step, for Describe.
	Act uint32
	// Fair is 0 for what the environment may do or leave, else the fairness class, below 64.
	Fair uint8
	// Err: taking this step breaks an invariant.
	Err error
}

// Limits bounds a search. 0 means no limit.
type Limits struct {
	States int
	Depth  int
}

// Kind says what a Violation breaks.
type Kind string

const (
	KindSafety      Kind = "safety"      // an invariant of a state or a step
	KindUnreachable Kind = "unreachable" // from here nothing leads to Done any more
	KindStuck       Kind = "stuck"       // nothing that must happen is enabled, and it is not Done
	KindLivelock    Kind = "livelock"    // a fair run goes round here for ever
)

// Line is one step of a counterexample.
type Line struct {
	// Index of the step in Next, which replays it.
	Index int
	Step  string
	State string
}

// Violation is a counterexample. For a safety violation it is a shortest one; for the
// others the path to the first such state that was found is a shortest path to it.
type Violation struct {
	Kind Kind
	Err  error
	// Init is the index of the initial state, Start its words.
	Init  int
	Start string
	Lines []Line
	// Cycle (KindLivelock): steps that lead from the last line's state back to it.
	Cycle []Line
}

// String is the whole counterexample, a step a line.
func (v *Violation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %v\n     %s\n", v.Kind, v.Err, v.Start)
	for i, l := range v.Lines {
		fmt.Fprintf(&b, "%3d  %s\n     %s\n", i+1, l.Step, l.State)
	}
	if len(v.Cycle) > 0 {
		b.WriteString("then for ever:\n")
		for _, l := range v.Cycle {
			fmt.Fprintf(&b, "  *  %s\n     %s\n", l.Step, l.State)
		}
	}
	return b.String()
}

// Result of a search.
type Result struct {
	States, Transitions, Depth int
	// Done is the number of states that are.
	Done int
	// Complete: no limit was met and no context ended, so that every reachable state was visited.
	Complete bool
	Took     time.Duration
	// HeapBytes is the heap in use at the end of the search.
	HeapBytes uint64
	// Violation is the first one found; nil if there is none.
	Violation *Violation
}

// String is one line for people.
func (r *Result) String() string {
	s := fmt.Sprintf("%d states, %d transitions, depth %d, %.1f s, %d MiB", r.States, r.Transitions, r.Depth, r.Took.Seconds(), r.HeapBytes>>20)
	if !r.Complete {
		s += ", not complete"
	}
	return s
}

// origin says how a state was first reached.
type origin struct {
	parent int32 // -1: initial state number step
	step   int32
}

// edge is what liveness needs of a transition.
type edge struct {
	to   int32
	fair uint8
}

type search[S any] struct {
	sys    System[S]
	ids    map[[16]byte]int32
	from   []origin
	done   []bool
	first  []int64 // edges[first[i]:first[i+1]] leave state i
	edges  []edge
	result Result
}

// Run searches sys. It stops at the first safety violation; reachability and liveness
// are judged at the end of a complete search.
func Run[S any](ctx context.Context, sys System[S], lim Limits) *Result {
	began := time.Now()
	x := &search[S]{sys: sys, ids: make(map[[16]byte]int32)}
	x.breadth(ctx, lim)
	if x.result.Violation == nil && x.result.Complete {
		x.live()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	x.result.HeapBytes = m.HeapAlloc
	x.result.Took = time.Since(began)
	return &x.result
}

// hash is two independent 64-bit multiply-mix hashes of b.
func hash(b []byte) (h [16]byte) {
	const m1, m2 = 0x9e3779b97f4a7c15, 0xd6e8feb86659fd93
	x, y := uint64(len(b))*m1+1, uint64(len(b))*m2+2
	for len(b) >= 8 {
		v := binary.LittleEndian.Uint64(b)
		x, y = mix(x^v, m1), mix(y+v, m2)
		b = b[8:]
	}
	var tail [8]byte
	copy(tail[:], b)
	v := binary.LittleEndian.Uint64(tail[:])
	x, y = mix(x^v, m1), mix(y+v, m2)
	binary.LittleEndian.PutUint64(h[:8], mix(x, m2))
	binary.LittleEndian.PutUint64(h[8:], mix(y, m1))
	return h
}

// mix is a bijection of x for an odd m.
func mix(x, m uint64) uint64 {
	x ^= x >> 32
	x *= m
	x ^= x >> 29
	x *= m
	x ^= x >> 32
	return x
}

// breadth visits every state, level by level.
func (x *search[S]) breadth(ctx context.Context, lim Limits) {
	var buf []byte
	visit := func(s S, o origin) (int32, bool) {
		buf = x.sys.Key(s, buf[:0])
		h := hash(buf)
		if id, ok := x.ids[h]; ok {
			return id, false
		}
		id := int32(len(x.from))
		x.ids[h] = id
		x.from = append(x.from, o)
		done := x.sys.Done(s)
		x.done = append(x.done, done)
		if done {
			x.result.Done++
		}
		if err := x.sys.Check(s); err != nil && x.result.Violation == nil {
			x.result.Violation = x.trace(id, KindSafety, err)
		}
		return id, true
	}
	type item struct {
		id int32
		s  S
	}
	var level, next []item
	for i, s := range x.sys.Init() {
		if id, fresh := visit(s, origin{-1, int32(i)}); fresh {
			level = append(level, item{id, s})
		}
	}
	var steps []Step[S]
	for len(level) > 0 && x.result.Violation == nil {
		for _, it := range level {
			x.first = append(x.first, int64(len(x.edges)))
			steps = x.sys.Next(it.s, steps[:0])
			for k, st := range steps {
				if st.Err != nil && x.result.Violation == nil {
					v := x.trace(it.id, KindSafety, st.Err)
					v.Lines = append(v.Lines, Line{k, x.sys.Describe(it.s, st), x.sys.Show(st.To)})
					x.result.Violation = v
				}
				id, fresh := visit(st.To, origin{it.id, int32(k)})
				x.edges = append(x.edges, edge{id, st.Fair})
				if fresh {
					next = append(next, item{id, st.To})
				}
			}
			if x.result.Violation != nil {
				break
			}
			if lim.States > 0 && len(x.from) > lim.States || ctx.Err() != nil {
				x.result.States, x.result.Transitions = len(x.from), len(x.edges)
				return
			}
		}
		if len(next) > 0 {
			x.result.Depth++
		}
		if lim.Depth > 0 && x.result.Depth > lim.Depth {
			x.result.States, x.result.Transitions = len(x.from), len(x.edges)
			return
		}
		clear(level)
		level, next = next, level[:0]
	}
	x.first = append(x.first, int64(len(x.edges)))
	x.result.States, x.result.Transitions = len(x.from), len(x.edges)
	x.result.Complete = x.result.Violation == nil
}

// trace is the path to state id.
func (x *search[S]) trace(id int32, kind Kind, err error) *Violation {
	var path []int32 // step indices, last first
	at := x.from[id]
	for at.parent >= 0 {
		path = append(path, at.step)
		at = x.from[at.parent]
	}
	v := &Violation{Kind: kind, Err: err, Init: int(at.step)}
	s := x.sys.Init()[at.step]
	v.Start = x.sys.Show(s)
	for i := len(path) - 1; i >= 0; i-- {
		st := x.sys.Next(s, nil)[path[i]]
		v.Lines = append(v.Lines, Line{int(path[i]), x.sys.Describe(s, st), x.sys.Show(st.To)})
		s = st.To
	}
	return v
}

// Replay takes the steps with these indices from initial state init and returns the last
// state. An error names the first index that is not enabled.
func Replay[S any](sys System[S], init int, indices []int) (S, error) {
	starts := sys.Init()
	if init < 0 || init >= len(starts) {
		var none S
		return none, fmt.Errorf("there is no initial state %d, only %d", init, len(starts))
	}
	s := starts[init]
	for i, k := range indices {
		steps := sys.Next(s, nil)
		if k < 0 || k >= len(steps) {
			return s, fmt.Errorf("step %d of the trace: there is no step %d, only %d are enabled", i+1, k, len(steps))
		}
		s = steps[k].To
	}
	return s, nil
}
