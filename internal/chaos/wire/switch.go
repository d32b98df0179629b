package wire

import (
	"container/heap"
	"math/rand/v2"
	"sync"
	"time"
)

// way is a direction of a link: from host, to host.
type way struct{ from, to string }

// fate is what becomes of one packet: when its copies go on, how it is damaged.
type fate struct {
	drop, reset, corrupt bool
	at, mask             int             // of the damage
	delays               []time.Duration // one a copy
	reordered            bool
}

// decide draws a packet's fate. due is when the packet before it on this way goes on, and is moved.
// Pure but for rng and due.
func decide(w *Weather, p *packet, rng *rand.Rand, now time.Time, due *time.Time) (f fate) {
	if src, dst := p.ports(); !w.hits(src, dst) {
		return fate{delays: []time.Duration{max(due.Sub(now), 0)}}
	}
	hit := func(chance float64) bool { return chance > 0 && rng.Float64() < chance }
	switch {
	case hit(w.Drop):
		f.drop = true
		return f
	case p.tcp != nil && hit(w.Reset):
		f.reset = true
		return f
	case len(p.payload) > 0 && hit(w.Corrupt):
		f.corrupt, f.at, f.mask = true, rng.IntN(len(p.payload)), 1<<rng.IntN(8)
	}
	wait := w.Delay
	if w.Jitter > 0 {
		wait += time.Duration(rng.Int64N(int64(w.Jitter)))
	}
	if at := now.Add(wait); at.After(*due) {
		*due = at
	}
	wait = max(due.Sub(now), 0)
	if hit(w.Reorder) { // due stays: what follows overtakes it
		f.reordered = true
		wait += 5*time.Millisecond + time.Duration(rng.Int64N(int64(25*time.Millisecond)))
	}
	f.delays = append(f.delays, wait)
	if hit(w.Duplicate) {
		f.delays = append(f.delays, wait+time.Duration(rng.Int64N(int64(2*time.Millisecond))))
	}
	return f
}

// held is a frame that goes on later.
type held struct {
	at    time.Time
	n     uint64 // keeps the order of equals
	frame []byte
	out   func([]byte)
}

type heldQueue []held

func (q heldQueue) Len() int { return len(q) }
func (q heldQueue) Less(i, k int) bool {
	if q[i].at.Equal(q[k].at) {
		return q[i].n < q[k].n
	}
	return q[i].at.Before(q[k].at)
}
func (q heldQueue) Swap(i, k int) { q[i], q[k] = q[k], q[i] }
func (q *heldQueue) Push(x any)   { *q = append(*q, x.(held)) }
func (q *heldQueue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

// fabric forwards frames between the hosts of a [Switch] as the weather says. It knows no namespace and no
// socket. Safe for concurrent use.
type fabric struct {
	mu      sync.Mutex
	rng     *rand.Rand
	weather map[way]Weather
	due     map[way]time.Time
	hosts   map[[4]byte]outlet
	counts  Counts
	queue   heldQueue
	n       uint64
	closed  bool

	wake chan struct{} // cap 1: the queue's head may have changed
	stop chan struct{}
}

// outlet is where a host's frames go out.
type outlet struct {
	name string
	mac  [6]byte
	out  func(frame []byte)
}

func newFabric(seed uint64) *fabric {
	return &fabric{rng: rand.New(rand.NewPCG(seed, 0x77697265)), weather: map[way]Weather{}, due: map[way]time.Time{},
		hosts: map[[4]byte]outlet{}, wake: make(chan struct{}, 1), stop: make(chan struct{})}
}

// Set gives one direction of a link its weather.
func (f *fabric) set(from, to string, w Weather) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.weather[way{from, to}] = w
}

// take forwards one frame that host from has sent. The frame is the caller's again afterwards.
func (f *fabric) take(from outlet, frame []byte) {
	p, ok := parsePacket(frame)
	if !ok {
		return
	}
	f.mu.Lock()
	to, known := f.hosts[p.destination()]
	if !known || f.closed {
		f.mu.Unlock()
		return
	}
	w := way{from.name, to.name}
	now, due, weather := time.Now(), f.due[w], f.weather[w]
	verdict := decide(&weather, &p, f.rng, now, &due)
	f.due[w] = due
	f.count(&verdict)
	copy(p.frame[:6], to.mac[:])
	switch {
	case verdict.drop:
		f.mu.Unlock()
		return
	case verdict.reset:
		f.mu.Unlock()
		onward, back := p.resets()
		if onward == nil {
			return
		}
		copy(back[:6], from.mac[:])
		to.out(onward)
		from.out(back)
		return
	case verdict.corrupt:
		p.corrupt(verdict.at, byte(verdict.mask))
	}
	direct := false
	for _, d := range verdict.delays {
		if d == 0 {
			direct = true
			continue
		}
		f.n++
		heap.Push(&f.queue, held{at: now.Add(d), n: f.n, frame: append([]byte(nil), p.frame...), out: to.out})
	}
	f.mu.Unlock()
	if direct {
		to.out(p.frame)
	}
	if len(verdict.delays) > 1 || !direct {
		select {
		case f.wake <- struct{}{}:
		default:
		}
	}
}

// count books a fate. Under mu.
func (f *fabric) count(v *fate) {
	add := func(n *uint64, is bool) {
		if is {
			*n++
		}
	}
	c := &f.counts
	add(&c.Dropped, v.drop)
	add(&c.Reset, v.reset)
	add(&c.Corrupted, v.corrupt)
	add(&c.Passed, !v.drop && !v.reset)
	add(&c.Reordered, v.reordered)
	add(&c.Duplicated, len(v.delays) > 1)
	add(&c.Delayed, len(v.delays) > 0 && v.delays[0] > 0)
}

func (f *fabric) overflowed() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts.Overflowed++
}

// deliver sends held frames when they are due, until stop is closed.
func (f *fabric) deliver() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		f.mu.Lock()
		var ready []held
		now := time.Now()
		for len(f.queue) > 0 && !f.queue[0].at.After(now) {
			ready = append(ready, heap.Pop(&f.queue).(held))
		}
		next := time.Hour
		if len(f.queue) > 0 {
			next = f.queue[0].at.Sub(now)
		}
		f.mu.Unlock()
		for _, h := range ready {
			h.out(h.frame)
		}
		if len(ready) > 0 {
			continue
		}
		timer.Reset(next)
		select {
		case <-timer.C:
		case <-f.wake:
		case <-f.stop:
			return
		}
	}
}

// close lets nothing through any more and ends deliver.
func (f *fabric) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed {
		f.closed = true
		close(f.stop)
	}
}
