package router

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/router/policy"
)

// fleet is the workers of one leg, and who chooses among them.
type fleet struct {
	// set is the present workers, read as a whole and never changed in place: whoever adds or removes one
	// swaps in another slice. A worker that is no longer there may still have attempts.
	set atomic.Pointer[[]*worker]
	// leaving are the workers that finish what they have, for the words of errors.
	leaving atomic.Pointer[[]*worker]
	turn    atomic.Uint32 // of pick
	most    int64         // legs a worker at a time; 0: no limit

	// mu makes the choice of a worker and its count one step, so that requests that come together
	// do not all see the same worker idle. Taken under the queue's lock, never the other way round.
	mu     sync.Mutex
	policy policy.Policy
	cands  []policy.Candidate // reused, with the worker of each
	from   []*worker
}

// workers is a snapshot; read only.
func (f *fleet) workers() []*worker {
	if s := f.set.Load(); s != nil {
		return *s
	}
	return nil
}

// replace makes ws, which the caller does not change any more, the workers of the leg. Who has gone is
// forgotten by the policy.
func (r *Router) replace(f *fleet, ws []*worker) {
	old := f.workers()
	f.mu.Lock()
	f.set.Store(&ws)
	for _, w := range old {
		if !slices.ContainsFunc(ws, func(n *worker) bool { return n.name == w.name }) {
			f.policy.Forget(w.name)
		}
	}
	f.mu.Unlock()
	r.queue.Kick()
}

// pick returns the next usable worker that avoid does not hold, for questions that any can answer; nil if there is none.
func (f *fleet) pick(avoid map[*worker]bool) *worker {
	workers := f.workers()
	n := len(workers)
	if n == 0 {
		return nil
	}
	first := int(f.turn.Add(1)-1) % n
	for i := range n {
		if w := workers[(first+i)%n]; w.usable() && !avoid[w] {
			return w
		}
	}
	return nil
}

// choice is what a leg has for a request.
type choice struct {
	w *worker // taken; nil if there is none, or busy
	// fresh: it is, or with busy will be, none of those to avoid.
	fresh bool
	busy  bool // usable workers are there, and all have as many legs as they may
}

// none: waiting would not help.
func (c choice) none() bool { return c.w == nil && !c.busy }

// take chooses a usable worker for c by the policy and counts a leg there, which the taker owns. One that avoid
// holds is taken only where no other is usable.
func (f *fleet) take(c *call, avoid map[*worker]bool, peer *worker) choice {
	f.mu.Lock()
	defer f.mu.Unlock()
	workers := f.workers()
	// A model that no worker is said to have is left to a worker to refuse.
	listed := slices.ContainsFunc(workers, func(w *worker) bool { return w.serves(c.model) })
	usable := func(w *worker) bool {
		return w.usable() && w.goesOn(c) && (!listed || w.serves(c.model)) && (peer == nil || pairs(peer, w))
	}
	for _, fresh := range []bool{true, false} {
		f.cands, f.from = f.cands[:0], f.from[:0]
		busy := false
		for i, w := range workers {
			if avoid[w] == fresh || !usable(w) {
				continue
			}
			if f.most > 0 && w.inflight.Load() >= f.most {
				busy = true
				continue
			}
			f.cands, f.from = append(f.cands, w.candidate(i)), append(f.from, w)
		}
		switch {
		case len(f.cands) > 0:
			w := f.from[f.choose(c, peer)]
			w.inflight.Add(1)
			return choice{w: w, fresh: fresh}
		case busy:
			return choice{fresh: fresh, busy: true}
		}
	}
	return choice{}
}

// choose asks the policy about f.cands, which are some. Under mu.
func (f *fleet) choose(c *call, peer *worker) int {
	req := policy.Request{Prefix: c.prefix, Session: c.session}
	if peer != nil {
		p := peer.candidate(0)
		req.Peer = &p
	}
	return max(f.policy.Choose(&req, f.cands), 0)
}

// sent tells the policy where c goes.
func (f *fleet) sent(c *call, w *worker) {
	if len(c.prefix) == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if slices.Contains(f.workers(), w) { // or its name would stay for ever
		f.policy.Sent(&policy.Request{Prefix: c.prefix}, w.name)
	}
}

// treeStats of the leg's policy.
func (f *fleet) treeStats() policy.Stats {
	f.mu.Lock()
	defer f.mu.Unlock()
	return policy.TreeStats(f.policy)
}

// why tells the state of every worker, for the error when none is usable.
func (f *fleet) why() string {
	workers := f.workers()
	all := make([]string, 0, len(workers))
	for _, w := range workers {
		all = append(all, w.name+" ("+w.why()+")")
	}
	if gone := f.leaving.Load(); gone != nil {
		for _, w := range *gone {
			all = append(all, w.name+" (draining)")
		}
	}
	if len(all) == 0 {
		return "there is none"
	}
	return strings.Join(all, "; ")
}

// candidate is the worker as policies see it, at place i of its fleet.
func (w *worker) candidate(i int) policy.Candidate {
	return policy.Candidate{
		ID: w.name, Order: i, Inflight: int(w.inflight.Load()), Host: w.base.Hostname(), Zone: w.zone, Load: w.reportedLoad(),
	}
}

// serves: the worker is not said to have other models only.
func (w *worker) serves(model string) bool {
	return model == "" || len(w.models) == 0 || slices.Contains(w.models, model)
}

// put ends a leg's count and lets who waits have its place.
func (w *worker) put() {
	if w.inflight.Add(-1) < 0 {
		panic("router: negative number of legs at a worker")
	}
	w.freed()
}

// blame is which legs' workers a retry had better avoid.
type blame uint8

const (
	blamePrefill blame = 1
	blameDecode  blame = 2
	blameBoth    blame = 3
)

func blameOf(side room.Side) blame {
	if side == room.SideSender {
		return blamePrefill
	}
	return blameDecode
}

// choose takes a pair for the next attempt. avoid holds the workers that attempts
// have failed on; after a failure, last says on which leg: the new pair must differ
// there. With last 0 (the first attempt) any pair is good. missing tells why there is none; without it and a pair, both
// legs have usable workers and have to be waited for.
func (r *Router) choose(c *call, avoid map[*worker]bool, last blame) (p, d *worker, missing string) {
	pc := r.prefills.take(c, avoid, nil)
	dc := r.decodes.take(c, avoid, pc.w)
	switch {
	case pc.none() && dc.none():
		missing = "no usable prefill worker: " + r.prefills.why() + "; no usable decode worker: " + r.decodes.why()
	case pc.none():
		missing = "no usable prefill worker: " + r.prefills.why()
	case dc.none():
		missing = "no usable decode worker: " + r.decodes.why()
	case last == blamePrefill && !pc.fresh, last == blameDecode && !dc.fresh, last == blameBoth && !pc.fresh && !dc.fresh:
		missing = "no other pair of workers"
	case !pc.busy && !dc.busy:
		r.prefills.sent(c, pc.w)
		r.decodes.sent(c, dc.w)
		return pc.w, dc.w, ""
	}
	for _, w := range []*worker{pc.w, dc.w} {
		if w != nil {
			w.inflight.Add(-1) // nobody else could have been let in meanwhile: see acquire
			r.rested(w)
		}
	}
	return nil, nil, missing
}
