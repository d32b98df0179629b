package legacy

import (
	"context"
	"math/big"
	"math/bits"

	"github.com/baton-pd/baton/internal/model/explore"
)

// Count is a number of executions, exactly.
type Count struct{ hi, lo uint64 }

// plus is the sum; it panics past 2^128, which no variant comes near.
func (c Count) plus(d Count) Count {
	lo, carry := bits.Add64(c.lo, d.lo, 0)
	hi, over := bits.Add64(c.hi, d.hi, carry)
	if over != 0 {
		panic("legacy: more than 2^128 executions")
	}
	return Count{hi, lo}
}

// Zero reports whether c is 0.
func (c Count) Zero() bool { return c == Count{} }

// Big is c as a big number.
func (c Count) Big() *big.Int {
	b := new(big.Int).SetUint64(c.hi)
	return b.Lsh(b, 64).Add(b, new(big.Int).SetUint64(c.lo))
}

// String is c in digits.
func (c Count) String() string { return c.Big().String() }

// MarshalJSON writes c as a JSON number, however large.
func (c Count) MarshalJSON() ([]byte, error) { return []byte(c.String()), nil }

// Line is one step of a counterexample or a timeline.
type Line struct {
	// Thread is who takes the step: worker, bootstrap, scheduler or time.
	Thread string
	// Step is what it does, Room what the shared memory holds after it, Client what
	// the clients know and how many requests the scheduler's gauge counts.
	Step, Room, Client string
}

// Example is a shortest execution, or the beginning of one, that shows a fault.
type Example struct {
	Fault Fault
	Lines []Line
}

// Report is what the exploration of one policy in one variant found.
type Report struct {
	Policy, Variant string
	Unlocked        bool
	// States and Transitions of the whole graph.
	States, Transitions int
	Executions          Count
	// With has the number of executions for each of Faults, in that order.
	With [4]Count
	// Examples has one for each fault that occurs.
	Examples []Example
}

// Count is the number of executions with fault f.
func (r *Report) Count(f Fault) Count {
	for i, g := range Faults() {
		if f == g {
			return r.With[i]
		}
	}
	return Count{}
}

// Explore walks every interleaving. With unlocked, update_status is a read and a write with room
// between them; package room has no such form, so it changes nothing for it.
func Explore(ctx context.Context, p Policy, v Variant, unlocked bool) (*Report, error) {
	m := &machine{p: p, v: v, unlocked: unlocked}
	s := m.start()
	c := &counter{ctx: ctx, m: m, seen: make(map[string]counts)}
	n := c.of(&s)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	r := &Report{Policy: p.Name, Variant: v.Name, Unlocked: unlocked, States: len(c.seen), Transitions: c.transitions, Executions: n.all, With: n.with}
	for i, f := range Faults() {
		if r.With[i].Zero() {
			continue
		}
		r.Examples = append(r.Examples, m.example(ctx, f))
	}
	return r, ctx.Err()
}

// path is a shortest way to fault f as indices of steps, nil if there is none.
func (m *machine) path(ctx context.Context, f Fault) []int {
	hunt := *m
	hunt.wanted = f
	found := explore.Run(ctx, &hunt, explore.Limits{}).Violation
	if found == nil {
		return nil
	}
	var path []int
	for _, l := range found.Lines {
		path = append(path, l.Index)
	}
	return path
}

// example is a shortest counterexample for a fault that occurs.
func (m *machine) example(ctx context.Context, f Fault) Example {
	e := Example{Fault: f}
	s := m.start()
	for _, k := range m.path(ctx, f) {
		st := m.next(&s, nil)[k]
		e.Lines = append(e.Lines, m.line(st))
		s = st.to
	}
	return e
}

func (m *machine) line(st step) Line {
	return Line{Thread: st.act.thread.String(), Step: m.words(st.act), Room: m.showRooms(&st.to), Client: m.showClients(&st.to)}
}

// counts are numbers of executions from one state on.
type counts struct {
	all  Count
	with [4]Count
}

// counter counts complete paths by dynamic programming. The graph has no cycle: every step
// moves a thread on, takes a chunk or a frame, or ends something, and nothing is put back more than once.
type counter struct {
	ctx         context.Context // when it ends, the counts are worth nothing
	m           *machine
	seen        map[string]counts
	transitions int
}

func (c *counter) of(s *State) counts {
	key := string(s.key(nil))
	if n, ok := c.seen[key]; ok {
		return n
	}
	var n counts
	if c.ctx.Err() != nil {
		return n
	}
	steps := c.m.next(s, nil)
	c.transitions += len(steps)
	if len(steps) == 0 {
		n.all = Count{lo: 1}
		has := s.faults
		if c.m.pinned(s) {
			has |= Pinned
		}
		for i, f := range Faults() {
			if has&f != 0 {
				n.with[i] = Count{lo: 1}
			}
		}
	}
	for i := range steps {
		d := c.of(&steps[i].to)
		n.all = n.all.plus(d.all)
		for k := range n.with {
			n.with[k] = n.with[k].plus(d.with[k])
		}
	}
	c.seen[key] = n
	return n
}
