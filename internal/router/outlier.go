package router

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// What a failure weighs, and how ejections grow.
const (
	// soleWeight is a failure that only this worker can be the reason of; sharedWeight one of either leg.
	soleWeight, sharedWeight = 2, 1
	// maxEjections bounds the growth: at most 2^(maxEjections-1) times the first length.
	maxEjections = 5
	// longWait without a byte makes a request's own deadline a reason to doubt its workers; a client may ask for less than
	// any worker can do.
	longWait = 10 * time.Second
)

// outlier judges a worker by the requests it failed, which its health probes may know nothing of. Failures in a row eject it
// for a time that doubles with each ejection; then it is on probation: one failure ejects it again, one success
// clears it. It says nothing about use: an ejected worker is still better than none. Safe for concurrent use.
type outlier struct {
	mu     sync.Mutex
	points int       // of failures since the last success
	good   time.Time // the last success
	until  time.Time // ejected before it
	times  int       // ejections since the last success, at most maxEjections
	// ever ejected since the last success: written under mu, read without it by each choice
	ever atomic.Bool
}

// failed counts a failure of an attempt that began at start. after is how many failures of its own in a row eject. It returns how long
// the worker is ejected for if this was one too many, otherwise 0.
func (o *outlier) failed(now, start time.Time, weight, after int, base time.Duration) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case after <= 0, now.Before(o.until): // what still ran when it was ejected tells nothing new
		return 0
	case weight < soleWeight && o.good.After(start): // it has done its part since: rather the other's doing
		return 0
	}
	if o.points += weight; o.points < soleWeight*after && o.times == 0 {
		return 0
	}
	o.times = min(o.times+1, maxEjections)
	o.points = 0
	d := base << (o.times - 1)
	o.until = now.Add(d)
	o.ever.Store(true)
	return d
}

// succeeded clears the worker.
func (o *outlier) succeeded(now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.good, o.points = now, 0
	if !now.Before(o.until) {
		o.times = 0
		o.ever.Store(false)
	}
}

// left is how long the worker still is ejected.
func (o *outlier) left(now time.Time) time.Duration {
	if !o.ever.Load() {
		return 0
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return max(o.until.Sub(now), 0)
}

// fault reports whether f is a worker's own doing, by its code. Refusals are the client's fault, backpressure is nobody's, and
// what could not be reached is out already.
func (f *failure) fault(a *attempt) bool {
	switch f.cause().Code {
	case room.CodeEngine, room.CodeProtocol, room.CodePeerLost, room.CodeTransferFailed, room.CodeChunkDropped, room.CodeInternal:
		return !f.gone && !f.derived
	case room.CodeDeadline:
		return f.cause().Retryable || !a.answering.Load() && time.Since(a.start) >= longWait
	case room.CodeAborted: // the worker gave up by itself; an abort that somebody asked this router for blames nobody
		return f.blame != 0
	default:
		return false
	}
}

// judge makes the workers of a failed attempt answer for it.
func (r *Router) judge(a *attempt, f *failure) {
	if f.blame == 0 || !f.fault(a) {
		return
	}
	weight := soleWeight
	if f.blame == blameBoth || f.cause().Code == room.CodeDeadline && !a.prefill.over.Load() {
		weight = sharedWeight
	}
	for _, l := range []*leg{&a.prefill, &a.decode} {
		if l.w != noWorker && (f.blame == blameBoth || f.blame == blameOf(l.w.side)) {
			r.strike(l.w, a.start, weight, f.err.Error())
		}
	}
}

// strike counts a failure of w.
func (r *Router) strike(w *worker, start time.Time, weight int, why string) {
	if d := w.outlier.failed(time.Now(), start, weight, r.cfg.EjectAfter, r.cfg.EjectTime); d > 0 {
		w.series.ejections.Inc()
		r.cfg.Log.Warn("worker is ejected: too many failures in a row", "leg", w.side.String(), "worker", w.name, "for", d, "last", why)
		r.kickAfter(d)
	}
}

// kickAfter lets who waits try again when an ejection of length d has ended: the others may be busy for long. Close ends the wait.
func (r *Router) kickAfter(d time.Duration) {
	if !r.group.enter() {
		return
	}
	defer r.group.leave()
	r.group.spawn(func() {
		if sleep(&r.base, d, nil) {
			r.queue.Kick()
		}
	})
}

// ejected adds to avoid the workers that are ejected now. The result is avoid itself if there is none.
func (r *Router) ejected(avoid map[*worker]bool) map[*worker]bool {
	all, own := avoid, false
	now := time.Now()
	for _, f := range []*fleet{&r.prefills, &r.decodes} {
		for _, w := range f.workers() {
			if avoid[w] || w.outlier.left(now) == 0 {
				continue
			}
			if !own {
				all, own = make(map[*worker]bool, len(avoid)+1), true
				for k, v := range avoid {
					all[k] = v
				}
			}
			all[w] = true
		}
	}
	return all
}

// find is choose that prefers workers which are not ejected, and falls back to the work of one leg alone.
func (r *Router) find(c *call, avoid map[*worker]bool, last blame) (p, d *worker, missing string) {
	p, d, missing = r.choose(c, r.ejected(avoid), last)
	if missing != "" { // an ejected worker is better than none; and the prefill worker may have had no partner of its kind
		p, d, missing = r.choose(c, r.unpaired(avoid), last)
	}
	if missing == "" {
		return p, d, missing
	}
	switch w, busy := r.solo(c, avoid); {
	case w != nil:
		return noWorker.taken(), w, ""
	case busy:
		return nil, nil, ""
	}
	return nil, nil, missing
}

// abandon ends the attempts that wait for w, which has not answered its probes, so that they are tried elsewhere.
// Those that have begun to answer go on: a late probe is no proof, unless a stream that can go on elsewhere has been silent for as long;
// and so do all where no other worker could take over.
func (r *Router) abandon(w *worker) {
	f, side := &r.decodes, blameDecode
	if w.side == room.SideSender {
		f, side = &r.prefills, blamePrefill
	}
	if f.pick(map[*worker]bool{w: true}) == nil {
		return
	}
	for _, c := range r.live.all() {
		a := c.current.Load()
		if a == nil || a.ctx.Err() != nil || a.answering.Load() && (side == blamePrefill || !a.stuck(silentProbes*r.cfg.HealthTimeout)) {
			continue
		}
		l := &a.decode
		if side == blamePrefill {
			l = &a.prefill
		}
		if l.w == w && !l.over.Load() {
			a.cancel(l.failed(room.CodePeerLost, true, "answers neither the request nor %s", fmt.Sprintf("%d health probes", silentProbes)))
		}
	}
}

// opinion is what becomes of a request that a worker called wrong. Another worker of that leg is asked before the client is told: if it
// agrees, in whatever words, the fault is the client's and nobody is blamed; if it answers, the first worker was wrong.
type opinion struct {
	f     *failure
	a     *attempt
	wrong *worker
}

// refusal: a worker says that the request itself is wrong.
func (f *failure) refusal() bool {
	return f.cause().Code == room.CodeInvalid && f.err.Status/100 == 4 && f.blame != 0
}

// wanted reports whether f is the first refusal, for which another opinion is to be asked, and notes it.
func (o *opinion) wanted(a *attempt, f *failure) bool {
	if o.f != nil || !f.refusal() || f.blame == blameBoth {
		return false
	}
	o.f, o.a, o.wrong = f, a, a.decode.w
	if f.blame == blamePrefill {
		o.wrong = a.prefill.w
	}
	return true
}

// or is the failure for the client: the refusal if there was one, for it says most, unless an answer had begun or somebody wanted the end.
func (o *opinion) or(f *failure, started bool) *failure {
	if o.f != nil && !started && !f.gone && f.blame != 0 {
		return o.f
	}
	return f
}

// disproved: the request was answered.
func (o *opinion) disproved(r *Router) {
	if o.f != nil {
		r.strike(o.wrong, o.a.start, soleWeight, "refused what another worker answered: "+o.f.err.Error())
	}
}
