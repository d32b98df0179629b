// Package admission is the bounded, fair queue before the router's workers.
//
// A request that can not be sent at once waits, until there is a place for it, its context ends, or the queue has no room
// for it. Between keys (of clients) the queue is fair in proportion to cost; within a key who has the higher
// priority goes first, and grows older like the others (fair.go). Requests of one class can use the same
// workers; a class whose workers are busy does not block another. When the queue is full, the key with the most waiters
// loses its last one, which may be another's than the newcomer's.
//
// The queue knows no workers: each request brings a function that tries to take what it needs. The queue
// calls it when it comes, and again after each [Queue.Kick] and [Queue.Release], in fair order, under its lock.
//
// There is no goroutine: whoever frees a place looks for the next one to take it.
package admission

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Ticket is what a request is to the queue.
type Ticket struct {
	Key      string  // of the client; "" is one key like the others
	Weight   float64 // of the key: twice as much gets twice the share [1]
	Cost     float64 // about how much work the request is, at least 1 [1]
	Priority int     // higher goes first
	Class    string  // requests of one class find a place, or none, together
	// Again is for a request that holds a place already and wants another worker: it goes before the others,
	// takes no place of the limit, and is never turned away.
	Again bool
}

// FullError is why a request got no place in the queue.
type FullError struct {
	Waiting  int // in the queue
	Max      int
	Inflight int
	// RetryAfter is when there should be room, by the rate at which requests end. At least a second.
	RetryAfter time.Duration
}

// Error tells how full the queue is.
func (e *FullError) Error() string {
	if e.Max == 0 {
		return fmt.Sprintf("%d requests are in flight, and none may wait", e.Inflight)
	}
	return fmt.Sprintf("the queue is full: %d requests wait (at most %d), %d are in flight", e.Waiting, e.Max, e.Inflight)
}

// Config of a [Queue].
type Config struct {
	MaxInflight int           // places; at least 1
	MaxWaiting  int           // 0: nobody waits
	Aging       time.Duration // a step of priority is worth this much waiting
	Now         func() time.Time
}

// Queue hands out places. Its methods are safe for concurrent use.
type Queue struct {
	c     Config
	start time.Time
	// hopeful counts requests that wait or are about to. It is raised before the first try, so that either
	// the try sees what was freed, or who freed it sees the request.
	hopeful atomic.Int64

	mu       sync.Mutex
	fair     fair
	again    []*waiter // in order of arrival
	inflight int       // places taken; never above MaxInflight
	rate     rate
	blocked  map[string]bool // reused
}

// New makes an empty queue.
func New(c Config) *Queue {
	if c.Now == nil {
		c.Now = time.Now
	}
	return &Queue{c: c, start: c.Now(), fair: fair{aging: c.Aging, keys: map[string]*flow{}}, blocked: map[string]bool{}}
}

func (q *Queue) now() time.Duration { return q.c.Now().Sub(q.start) }

// Acquire waits until try returns true. try takes what the request needs or finds that it will never get it; it says true
// in both cases and tells the caller by itself which. It must not block or call the queue; it is not called
// any more when Acquire has returned.
//
// nil: try has said true, and the request has a place, to be given back by [Queue.Release] (with Again it has none of its
// own). Otherwise the error is a *[FullError], or the cause of ctx.
func (q *Queue) Acquire(ctx context.Context, t Ticket, try func() bool) error {
	q.hopeful.Add(1)
	defer q.hopeful.Add(-1)
	w := &waiter{Ticket: t, try: try}
	if now, err := q.enter(w); now || err != nil {
		return err
	}
	select {
	case <-w.done:
	case <-ctx.Done():
		q.mu.Lock()
		defer q.mu.Unlock()
		if !w.over {
			q.drop(w)
			return context.Cause(ctx)
		}
	}
	if w.shed != nil {
		return w.shed
	}
	return nil
}

// enter tries at once, or puts w in line.
func (q *Queue) enter(w *waiter) (now bool, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if w.Again || q.fair.waiting == 0 && q.inflight < q.c.MaxInflight {
		if w.try() {
			if !w.Again {
				q.inflight++
			}
			return true, nil
		}
	}
	w.done = make(chan struct{})
	if w.Again {
		q.again = append(q.again, w)
		return false, nil
	}
	q.fair.push(w, q.now())
	// It may be of a class that is free while others wait.
	q.pass()
	if !w.over && q.fair.waiting > q.c.MaxWaiting {
		v := q.fair.victim()
		v.shed = q.full(v)
		q.fair.remove(v)
		if v == w {
			return false, v.shed
		}
		q.end(v)
	}
	return w.over, nil
}

// end wakes a waiter that is in no line any more.
func (q *Queue) end(w *waiter) {
	w.over = true
	close(w.done)
}

// drop takes a waiter whose client has left out of its line.
func (q *Queue) drop(w *waiter) {
	if !w.Again {
		q.fair.remove(w)
		return
	}
	for i, o := range q.again {
		if o == w {
			q.again = append(q.again[:i], q.again[i+1:]...)
			return
		}
	}
}

// pass gives places to all that can have one now.
func (q *Queue) pass() {
	left := q.again[:0]
	for _, w := range q.again {
		if w.try() {
			q.end(w)
		} else {
			left = append(left, w)
		}
	}
	clear(q.again[len(left):])
	q.again = left
	clear(q.blocked)
	for q.inflight < q.c.MaxInflight {
		w := q.fair.next(q.blocked)
		if w == nil {
			return
		}
		if !w.try() {
			q.blocked[w.Class] = true
			continue
		}
		q.inflight++
		q.fair.served(w)
		q.end(w)
	}
}

// Kick says that something may be free that was not: a worker has come up or has less to do. It costs next to nothing
// when nobody waits. Not to be called from a try.
func (q *Queue) Kick() {
	if q.hopeful.Load() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.pass()
}

// Release gives a place back.
func (q *Queue) Release() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.inflight == 0 {
		panic("admission: more places given back than taken")
	}
	q.inflight--
	q.rate.add(q.now())
	q.pass()
}

// full is the error for a waiter that is turned away.
func (q *Queue) full(w *waiter) *FullError {
	return &FullError{Waiting: q.fair.waiting - 1, Max: q.c.MaxWaiting, Inflight: q.inflight, RetryAfter: q.retryAfter(w)}
}

// retryAfter is when w's key should have worked off what waits of it: with k keys waiting it gets a k-th of the
// rate, and all are done when the whole queue is.
func (q *Queue) retryAfter(w *waiter) time.Duration {
	before := min(w.flow.waiting*len(q.fair.active), q.fair.waiting)
	perSecond := q.rate.perSecond(q.now())
	if perSecond <= 0 {
		return minRetry
	}
	d := time.Duration(math.Min(float64(before)/perSecond, maxRetry.Seconds()) * float64(time.Second))
	return max(d, minRetry)
}

// Bounds of what a client is told to wait.
const (
	minRetry = time.Second
	maxRetry = time.Minute
)

// Stats are for metrics.
type Stats struct {
	Waiting  int `json:"waiting"` // in line, with those that want another worker
	Inflight int `json:"inflight"`
	Keys     int `json:"keys"` // with waiters
}

// Stats counts.
func (q *Queue) Stats() Stats {
	q.mu.Lock()
	defer q.mu.Unlock()
	return Stats{Waiting: q.fair.waiting + len(q.again), Inflight: q.inflight, Keys: len(q.fair.active)}
}

// Busy is the error for a request that is not even read, because so many are that it could only be turned away.
func (q *Queue) Busy() *FullError {
	q.mu.Lock()
	defer q.mu.Unlock()
	w := &waiter{flow: &flow{waiting: q.fair.waiting}}
	return &FullError{Waiting: q.fair.waiting, Max: q.c.MaxWaiting, Inflight: q.inflight, RetryAfter: q.retryAfter(w)}
}

// rate is how often something happens lately: each event counts with a weight that falls to 1/e in rateTime.
type rate struct {
	weight float64
	last   time.Duration // of the latest event
	first  time.Duration
	any    bool
}

const rateTime = 10 * time.Second

func (r *rate) add(now time.Duration) {
	if !r.any {
		r.any, r.first, r.last = true, now, now
		return // it opens the interval that the next ones are counted in
	}
	r.weight = r.weight*math.Exp(-(now-r.last).Seconds()/rateTime.Seconds()) + 1
	r.last = now
}

// perSecond is 0 if nothing is known.
func (r *rate) perSecond(now time.Duration) float64 {
	age := (now - r.first).Seconds()
	if !r.any || age <= 0 {
		return 0
	}
	t := rateTime.Seconds()
	w := r.weight * math.Exp(-(now-r.last).Seconds()/t)
	return w / (t * (1 - math.Exp(-age/t)))
}
