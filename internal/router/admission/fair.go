package admission

import (
	"container/heap"
	"slices"
	"time"
)

// fair is who goes first: start-time fair queueing over keys, and within a key the order of arrival corrected by
// priority. No lock, no clock.
//
// Each key with waiters has a start tag, in units of cost: max(virtual time at its coming, its last finish tag). The key
// of the least tag goes next; its finish tag is its start tag plus cost/weight, and the virtual time is the start tag of who went
// last. So over any time in which two keys both wait, they get costs in proportion to their weights, but for one
// request each. A priority lowers the tag of its key for the comparison alone: it moves a key ahead by
// boost units a step, once, and is paid back by the finish tag.
type fair struct {
	aging   time.Duration
	virtual float64
	// keys holds the keys that have waiters, and those without whose tag is still ahead of the virtual time: who has just
	// got much cannot get rid of the bill by waiting with one request at a time. At most maxIdle of them;
	// none when nobody waits, for then nobody was kept waiting.
	keys    map[string]*flow
	active  []*flow // those with waiters; any order
	waiting int
	seq     uint64
}

// maxIdle bounds the keys without waiters that are remembered.
const maxIdle = 4096

// boost is how many units of cost a step of priority may move a key ahead of its fair share.
const boost = 1.0

// flow is the waiters of one key.
type flow struct {
	key     string
	at      int // in fair.active
	start   float64
	lines   []*line // one for each class that waits; few, so a slice is quicker than a map
	waiting int
}

// line is the waiters of one key and class, a heap: the first at [0].
type line struct {
	class string
	all   []*waiter
}

// Len is for container/heap, like the rest.
func (l *line) Len() int { return len(l.all) }

// Less orders by arrival; a step of priority counts as if the request had come aging earlier. The order of
// two requests never changes, and who came aging × (difference) later never passes, so none starves.
func (l *line) Less(i, j int) bool { return l.all[i].before(l.all[j]) }

// Swap keeps each waiter's place.
func (l *line) Swap(i, j int) {
	l.all[i], l.all[j] = l.all[j], l.all[i]
	l.all[i].at, l.all[j].at = i, j
}

// Push adds at the end.
func (l *line) Push(x any) {
	w := x.(*waiter)
	w.at = len(l.all)
	l.all = append(l.all, w)
}

// Pop takes the last.
func (l *line) Pop() any {
	n := len(l.all) - 1
	w := l.all[n]
	l.all[n], l.all = nil, l.all[:n]
	return w
}

// line of a class; nil if nobody of it waits.
func (fl *flow) line(class string) *line {
	for _, l := range fl.lines {
		if l.class == class {
			return l
		}
	}
	return nil
}

// waiter is one request that waits.
type waiter struct {
	Ticket
	try  func() bool
	rank time.Duration // of arrival, less aging × priority
	seq  uint64
	at   int // in its line
	flow *flow
	done chan struct{} // closed when it has been granted or shed
	shed *FullError    // written before done is closed
	over bool          // granted or shed; under the queue's lock
}

func (w *waiter) before(o *waiter) bool {
	if w.rank != o.rank {
		return w.rank < o.rank
	}
	return w.seq < o.seq
}

// push adds a waiter that arrives at now (since any fixed time).
func (f *fair) push(w *waiter, now time.Duration) {
	fl := f.keys[w.Key]
	if fl == nil {
		fl = &flow{key: w.Key}
		f.keys[w.Key] = fl
	}
	if fl.waiting == 0 {
		fl.start = max(fl.start, f.virtual)
		fl.at = len(f.active)
		f.active = append(f.active, fl)
	}
	f.seq++
	w.flow, w.seq, w.rank = fl, f.seq, now-time.Duration(w.Priority)*f.aging
	l := fl.line(w.Class)
	if l == nil {
		l = &line{class: w.Class}
		fl.lines = append(fl.lines, l)
	}
	heap.Push(l, w)
	fl.waiting++
	f.waiting++
}

// remove takes a waiter out.
func (f *fair) remove(w *waiter) {
	fl := w.flow
	l := fl.line(w.Class)
	heap.Remove(l, w.at)
	if len(l.all) == 0 {
		fl.lines = slices.DeleteFunc(fl.lines, func(o *line) bool { return o == l })
	}
	fl.waiting--
	f.waiting--
	if fl.waiting > 0 {
		return
	}
	last := f.active[len(f.active)-1]
	f.active[fl.at], last.at = last, fl.at
	f.active[len(f.active)-1] = nil
	f.active = f.active[:len(f.active)-1]
	f.forget()
}

// forget drops keys without waiters that need not, or can not, be remembered.
func (f *fair) forget() {
	if f.waiting == 0 {
		clear(f.keys)
		f.virtual = 0
		return
	}
	if len(f.keys)-len(f.active) <= maxIdle {
		return
	}
	for k, fl := range f.keys {
		if fl.waiting == 0 && (fl.start <= f.virtual || len(f.keys)-len(f.active) > maxIdle/2) {
			delete(f.keys, k)
		}
	}
}

// next is the waiter to go first among those whose class is not blocked; nil if there is none.
func (f *fair) next(blocked map[string]bool) *waiter {
	var best *waiter
	var tag float64
	for _, fl := range f.active {
		head := fl.head(blocked)
		if head == nil {
			continue
		}
		t := fl.start - boost*float64(head.Priority)
		if best == nil || t < tag || t == tag && head.before(best) {
			best, tag = head, t
		}
	}
	return best
}

// head is the first waiter of a key whose class is not blocked.
func (fl *flow) head(blocked map[string]bool) (best *waiter) {
	for _, l := range fl.lines {
		if (best == nil || l.all[0].before(best)) && !blocked[l.class] {
			best = l.all[0]
		}
	}
	return best
}

// served takes w out and charges its key.
func (f *fair) served(w *waiter) {
	fl := w.flow
	f.virtual = max(f.virtual, fl.start)
	weight := w.Weight
	if weight <= 0 {
		weight = 1
	}
	fl.start += max(w.Cost, 1) / weight
	f.remove(w)
}

// victim is the waiter to give up when there is one too many: the last one of the key that has most waiters.
func (f *fair) victim() *waiter {
	var most *flow
	for _, fl := range f.active {
		if most == nil || fl.waiting > most.waiting || fl.waiting == most.waiting && fl.start > most.start {
			most = fl
		}
	}
	if most == nil {
		return nil
	}
	var last *waiter
	for _, l := range most.lines {
		for _, w := range l.all {
			if last == nil || last.before(w) {
				last = w
			}
		}
	}
	return last
}
