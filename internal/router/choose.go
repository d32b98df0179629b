package router

import (
	"strings"
	"sync/atomic"

	"github.com/baton-pd/baton/internal/room"
)

// fleet is the workers of one leg.
type fleet struct {
	// set is the present workers, read as a whole and never changed in place: whoever adds or removes one
	// swaps in another slice. A worker that is no longer there may still have attempts.
	set    atomic.Pointer[[]*worker]
	policy string
	turn   atomic.Uint32
}

// workers is a snapshot; read only.
func (f *fleet) workers() []*worker {
	if s := f.set.Load(); s != nil {
		return *s
	}
	return nil
}

// replace makes ws, which the caller does not change any more, the workers of the leg.
func (f *fleet) replace(ws []*worker) { f.set.Store(&ws) }

// pick returns a usable worker that avoid does not hold; nil if there is none.
func (f *fleet) pick(avoid map[*worker]bool) *worker {
	workers := f.workers()
	n := len(workers)
	if n == 0 {
		return nil
	}
	first := int(f.turn.Add(1)-1) % n
	var best *worker
	for i := range n {
		w := workers[(first+i)%n]
		if !w.usable() || avoid[w] {
			continue
		}
		if f.policy == PolicyRoundRobin {
			return w
		}
		if best == nil || w.inflight.Load() < best.inflight.Load() {
			best = w
		}
	}
	return best
}

// ready counts workers that a probe has found up.
func (f *fleet) ready() int {
	n := 0
	for _, w := range f.workers() {
		if w.status() == statusUp {
			n++
		}
	}
	return n
}

// why tells the state of every worker, for the error when none is usable.
func (f *fleet) why() string {
	workers := f.workers()
	if len(workers) == 0 {
		return "there is none"
	}
	all := make([]string, 0, len(workers))
	for _, w := range workers {
		all = append(all, w.name+" ("+w.why()+")")
	}
	return strings.Join(all, "; ")
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

// choose picks a pair for the next attempt. avoid holds the workers that attempts
// have failed on; after a failure, last says on which leg: the new pair must differ
// there. With last 0 (the first attempt) any pair is good. missing tells why there is none.
func (r *Router) choose(avoid map[*worker]bool, last blame) (p, d *worker, missing string) {
	p, pNew := pickNew(&r.prefills, avoid)
	d, dNew := pickNew(&r.decodes, avoid)
	switch {
	case p == nil && d == nil:
		return nil, nil, "no usable prefill worker: " + r.prefills.why() + "; no usable decode worker: " + r.decodes.why()
	case p == nil:
		return nil, nil, "no usable prefill worker: " + r.prefills.why()
	case d == nil:
		return nil, nil, "no usable decode worker: " + r.decodes.why()
	case last == blamePrefill && !pNew, last == blameDecode && !dNew, last == blameBoth && !pNew && !dNew:
		return nil, nil, "no other pair of workers"
	}
	return p, d, ""
}

// pickNew prefers a worker that was not tried.
func pickNew(f *fleet, avoid map[*worker]bool) (w *worker, fresh bool) {
	if w = f.pick(avoid); w != nil {
		return w, true
	}
	return f.pick(nil), false
}
