package room

import (
	"math"
	"time"
)

// dueHeap orders the non-terminal rooms of a shard by when EvDeadline comes. An entry
// may be earlier than its room's due, never later: the loop re-arms it then.
type dueHeap []dueEntry

type dueEntry struct {
	at int64
	r  *Room
}

func (h *dueHeap) push(r *Room) {
	*h = append(*h, dueEntry{r.due, r})
	r.heapAt = int32(len(*h) - 1)
	h.up(len(*h) - 1)
}

// remove takes r out if it is in.
func (h *dueHeap) remove(r *Room) {
	i := int(r.heapAt)
	if i < 0 {
		return
	}
	r.heapAt = -1
	last := len(*h) - 1
	moved := (*h)[last]
	(*h)[last] = dueEntry{}
	*h = (*h)[:last]
	if i < last {
		(*h)[i] = moved
		moved.r.heapAt = int32(i)
		h.down(i)
		h.up(int(moved.r.heapAt))
	}
	if last == 0 {
		*h = nil // give a burst's memory back
	}
}

// earlier moves r to at, if that is earlier than where it stands.
func (h *dueHeap) earlier(r *Room, at int64) {
	if i := int(r.heapAt); i >= 0 && at < (*h)[i].at {
		(*h)[i].at = at
		h.up(i)
	}
}

func (h dueHeap) up(i int) {
	for i > 0 {
		p := (i - 1) / 2
		if h[p].at <= h[i].at {
			return
		}
		h.swap(i, p)
		i = p
	}
}

func (h dueHeap) down(i int) {
	for {
		c := 2*i + 1
		if c >= len(h) {
			return
		}
		if c+1 < len(h) && h[c+1].at < h[c].at {
			c++
		}
		if h[i].at <= h[c].at {
			return
		}
		h.swap(i, c)
		i = c
	}
}

func (h dueHeap) swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].r.heapAt, h[j].r.heapAt = int32(i), int32(j)
}

// dueIn is when the deadline event comes to r if it enters s now.
func (g *Registry) dueIn(r *Room, s State, now int64) int64 {
	if b := g.bounds[s]; b > 0 && now+int64(b) < r.deadline {
		return now + int64(b)
	}
	return r.deadline
}

// moved re-arms r after a change of state, or disarms it. Runs under the room's lock.
func (g *Registry) moved(r *Room, s State) {
	if s.Terminal() {
		sh := g.shard(r.key)
		sh.mu.Lock()
		sh.due.remove(r)
		sh.mu.Unlock()
		g.counted.ended(s, r.Cause())
		return
	}
	due := r.deadline
	if g.bounds[s] > 0 {
		due = g.dueIn(r, s, int64(g.now()))
	}
	was := r.due
	r.due = due
	if due >= was { // the entry stays where it is until it comes up
		return
	}
	sh := g.shard(r.key)
	sh.mu.Lock()
	sh.due.earlier(r, due)
	sh.mu.Unlock()
	g.wakeFor(due)
}

// wakeFor makes the loop look again if it sleeps past at.
func (g *Registry) wakeFor(at int64) {
	if at < g.armed.Load() {
		select {
		case g.poke <- struct{}{}:
		default:
		}
	}
}

// run is the one deadline goroutine. While it looks, armed is "never", so that whatever
// is added meanwhile pokes it.
func (g *Registry) run() {
	defer close(g.ended)
	timer := time.NewTimer(math.MaxInt64)
	defer timer.Stop()
	for {
		g.armed.Store(math.MaxInt64)
		next := g.sweep()
		g.armed.Store(next)
		if next == math.MaxInt64 {
			timer.Stop()
		} else {
			timer.Reset(time.Duration(next) - g.now())
		}
		select {
		case <-g.stop:
			return
		case <-g.poke:
		case <-timer.C:
		}
	}
}

// sweep fires what is due, buries old tombstones, and returns when to look again.
func (g *Registry) sweep() (next int64) {
	next = math.MaxInt64
	var late []*Room
	for i := range g.shards {
		sh := &g.shards[i]
		now := int64(g.now())
		late = late[:0]
		sh.mu.Lock()
		for len(sh.due) > 0 && sh.due[0].at <= now {
			r := sh.due[0].r
			sh.due.remove(r)
			late = append(late, r)
		}
		for _, y := range []*graveyard{&sh.endedAt, &sh.aborted} {
			if at := y.expire(now); at != math.MaxInt64 {
				next = min(next, at+int64(g.tombSlack()))
			}
		}
		sh.mu.Unlock()
		for _, r := range late {
			g.expire(r, now)
		}
		sh.mu.Lock()
		if len(sh.due) > 0 {
			next = min(next, sh.due[0].at)
		}
		sh.mu.Unlock()
	}
	return next
}

// expire ends a room whose heap entry came up, or puts it back if its due has moved on.
func (g *Registry) expire(r *Room, now int64) {
	r.mu.Lock()
	s := r.State()
	if s.Terminal() {
		r.mu.Unlock()
		return
	}
	if r.due > now {
		sh := g.shard(r.key)
		sh.mu.Lock()
		sh.due.push(r)
		sh.mu.Unlock()
		r.mu.Unlock()
		return
	}
	_, failed := r.apply(Event{Kind: EvDeadline, Cause: g.overdue(r, s)}, ^Effects(0))
	r.mu.Unlock()
	if failed {
		g.logFailed(r)
	}
}

// overdue says which of the two limits passed.
func (g *Registry) overdue(r *Room, s State) *Cause {
	c := &Cause{Code: CodeDeadline, Side: g.side, Phase: s.String(), Key: r.key}
	switch after := time.Duration(r.deadline - r.opened).Round(time.Millisecond); {
	case r.due < r.deadline:
		c.Detail = "the room did not leave this state within " + g.bounds[s].String() + "; it waited for " + awaited(g.side, s)
	case after <= 0:
		c.Detail = "the request's deadline had passed before the room was opened"
	default:
		c.Detail = "the request's deadline passed, " + after.String() + " after the room was opened; it waited for " + awaited(g.side, s)
	}
	return c
}

// awaited says for people what ends the stay in a state.
func awaited(side Side, s State) string {
	switch {
	case side == SideSender && s == StateBootstrapping:
		return "the decode worker's grant"
	case side == SideSender && s == StateWaitingForInput:
		return "its first chunk to be computed"
	case side == SideSender:
		return "the rest of its chunks to be computed and applied at the decode worker"
	case s == StateBootstrapping:
		return "a session to the prefill worker and landing pages"
	case s == StateWaitingForInput:
		return "the first chunk from the prefill worker"
	default:
		return "the next chunk from the prefill worker"
	}
}

// tombSlack lets tombstones that expire about the same time go in one sweep.
func (g *Registry) tombSlack() time.Duration { return min(g.ttl/16, time.Second) }

// graveyard remembers keys for a while: a map for the question, a queue in order of
// expiry for the burial. The queue may hold keys that were taken; they count against
// its bound until they expire.
type graveyard struct {
	m    map[Key]grave
	q    []burial
	head int // q[:head] is dead
}

type grave struct {
	cause *Cause
	until int64
}

type burial struct {
	key   Key
	until int64
}

// put remembers key until then and returns how many older ones had to go.
func (y *graveyard) put(key Key, c *Cause, until int64, limit int) (evicted int) {
	if y.m == nil {
		y.m = make(map[Key]grave)
	}
	for len(y.q)-y.head >= limit {
		if y.pop() {
			evicted++
		}
	}
	if y.head > 32 && y.head*2 > len(y.q) {
		y.q = y.q[:copy(y.q, y.q[y.head:])]
		y.head = 0
	}
	y.m[key] = grave{c, until}
	y.q = append(y.q, burial{key, until})
	return evicted
}

// pop buries the oldest; false if it was taken or replaced before.
func (y *graveyard) pop() bool {
	b := y.q[y.head]
	y.head++
	v, ok := y.m[b.key]
	if !ok || v.until != b.until {
		return false
	}
	delete(y.m, b.key)
	return true
}

func (y *graveyard) get(key Key, now int64) (*Cause, bool) {
	v, ok := y.m[key]
	return v.cause, ok && now < v.until
}

func (y *graveyard) take(key Key, now int64) (*Cause, bool) {
	c, ok := y.get(key, now)
	delete(y.m, key)
	return c, ok
}

// expire buries what is over and returns when the next one is, MaxInt64 for never.
func (y *graveyard) expire(now int64) int64 {
	for y.head < len(y.q) && y.q[y.head].until <= now {
		y.pop()
	}
	if y.head == len(y.q) {
		*y = graveyard{} // a map never shrinks by itself
		return math.MaxInt64
	}
	return y.q[y.head].until
}
