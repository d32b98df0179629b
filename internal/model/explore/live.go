package explore

import "errors"

var (
	errUnreachable = errors.New("from this state nothing that may happen leads to the end any more")
	errStuck       = errors.New("nothing that must happen is left to do, and the end is not reached")
	errLivelock    = errors.New("a fair run goes round here for ever and never ends")
)

// live judges reachability of Done and fair runs on the complete graph.
func (x *search[S]) live() {
	if id := x.stuck(); id >= 0 {
		x.result.Violation = x.trace(id, KindStuck, errStuck)
		return
	}
	if id := x.unreachable(); id >= 0 {
		x.result.Violation = x.trace(id, KindUnreachable, errUnreachable)
		return
	}
	x.components(func(c []int32) bool {
		if !x.fairCycle(c) {
			return true
		}
		first := c[0]
		for _, s := range c {
			first = min(first, s) // the nearest to the start: ids are given breadth first
		}
		v := x.trace(first, KindLivelock, errLivelock)
		v.Cycle = x.cycle(first, c)
		x.result.Violation = v
		return false
	})
}

func (x *search[S]) out(s int32) []edge { return x.edges[x.first[s]:x.first[s+1]] }

// stuck is the first state that is not Done and has no enabled fair step; -1 if there is none.
func (x *search[S]) stuck() int32 {
	for s := range int32(len(x.from)) {
		fair := false
		for _, e := range x.out(s) {
			fair = fair || e.fair != 0
		}
		if !x.done[s] && !fair {
			return s
		}
	}
	return -1
}

// unreachable is the first state from which no path leads to Done; -1 if there is none.
func (x *search[S]) unreachable() int32 {
	n := len(x.from)
	start := make([]int64, n+1) // edges backward, by counting sort
	for _, e := range x.edges {
		start[e.to+1]++
	}
	for i := range n {
		start[i+1] += start[i]
	}
	back := make([]int32, len(x.edges))
	fill := append([]int64(nil), start[:n]...)
	for s := range int32(n) {
		for _, e := range x.out(s) {
			back[fill[e.to]] = s
			fill[e.to]++
		}
	}
	can := make([]bool, n)
	var todo []int32
	for s := range int32(n) {
		if x.done[s] {
			can[s] = true
			todo = append(todo, s)
		}
	}
	for len(todo) > 0 {
		s := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, p := range back[start[s]:start[s+1]] {
			if !can[p] {
				can[p] = true
				todo = append(todo, p)
			}
		}
	}
	for s := range int32(n) {
		if !can[s] {
			return s
		}
	}
	return -1
}

// components gives every strongly connected component of the states that are not Done
// to f, until it returns false. Tarjan's algorithm, without recursion.
func (x *search[S]) components(f func([]int32) bool) {
	n := len(x.from)
	num, low := make([]int32, n), make([]int32, n) // 0: not seen
	on := make([]bool, n)
	var stack []int32
	type frame struct {
		s    int32
		next int
	}
	var call []frame
	count := int32(0)
	for root := range int32(n) {
		if x.done[root] || num[root] != 0 {
			continue
		}
		call = append(call[:0], frame{root, 0})
		for len(call) > 0 {
			fr := &call[len(call)-1]
			s := fr.s
			if fr.next == 0 {
				count++
				num[s], low[s] = count, count
				stack = append(stack, s)
				on[s] = true
			}
			out, down := x.out(s), false
			for fr.next < len(out) {
				t := out[fr.next].to
				fr.next++
				if x.done[t] {
					continue
				}
				if num[t] == 0 {
					call = append(call, frame{t, 0})
					down = true
					break
				}
				if on[t] {
					low[s] = min(low[s], num[t])
				}
			}
			if down {
				continue
			}
			call = call[:len(call)-1]
			if len(call) > 0 {
				p := call[len(call)-1].s
				low[p] = min(low[p], low[s])
			}
			if low[s] != num[s] {
				continue
			}
			at := len(stack) - 1
			for stack[at] != s {
				at--
			}
			c := stack[at:]
			for _, t := range c {
				on[t] = false
			}
			ok := f(c)
			stack = stack[:at]
			if !ok {
				return
			}
		}
	}
}

// fairCycle reports whether a fair run can stay in component c for ever.
func (x *search[S]) fairCycle(c []int32) bool {
	in := make(map[int32]bool, len(c))
	for _, s := range c {
		in[s] = true
	}
	inner := false
	everywhere, taken := ^uint64(0), uint64(0)
	for _, s := range c {
		enabled := uint64(0)
		for _, e := range x.out(s) {
			enabled |= 1 << e.fair
			if in[e.to] {
				inner = true
				taken |= 1 << e.fair
			}
		}
		everywhere &= enabled
	}
	const env = 1 // class 0 owes nothing
	return inner && everywhere&^taken&^env == 0
}

// cycle is a shortest way from s back to s inside component c.
func (x *search[S]) cycle(s int32, c []int32) []Line {
	in := make(map[int32]bool, len(c))
	for _, t := range c {
		in[t] = true
	}
	type reached struct {
		from int32
		step int
	}
	came := map[int32]reached{}
	todo := []int32{s}
	for len(todo) > 0 {
		t := todo[0]
		todo = todo[1:]
		for k, e := range x.out(t) {
			if _, ok := came[e.to]; ok || !in[e.to] {
				continue
			}
			came[e.to] = reached{t, k}
			todo = append(todo, e.to)
		}
		if _, ok := came[s]; ok {
			break
		}
	}
	var steps []int
	for at, first := s, true; first || at != s; first = false {
		r := came[at]
		steps = append(steps, r.step)
		at = r.from
	}
	// The canonical state of s may be reached in another guise than the trace's, so
	// the words come from replaying the path to s first.
	path := x.trace(s, KindLivelock, errLivelock)
	indices := make([]int, len(path.Lines))
	for i, l := range path.Lines {
		indices[i] = l.Index
	}
	state, _ := Replay(x.sys, path.Init, indices) // the path was just made from the same steps
	var lines []Line
	for i := len(steps) - 1; i >= 0; i-- {
		next := x.sys.Next(state, nil)
		if steps[i] >= len(next) {
			break // another guise of a state has its steps in another order
		}
		st := next[steps[i]]
		lines = append(lines, Line{steps[i], x.sys.Describe(state, st), x.sys.Show(st.To)})
		state = st.To
	}
	return lines
}
