package sched

import (
	"cmp"
	"errors"
	"slices"

	"github.com/baton-pd/baton/internal/engine"
)

// All of this file runs on the loop goroutine.

// batch is the rows of the next step: the oldest resident ones, each with a cell for its
// token. It swaps out the youngest where cells run out.
func (d *Decode) batch() []*row {
	var out []*row
	for i := 0; i < len(d.resident) && len(out) < d.maxRunning; {
		r := d.resident[i]
		if r.j.dead() {
			i++ // released at the next turn
			continue
		}
		if r.own == r.cap && !d.grow(r) {
			continue // r was swapped out: resident[i] is another one now
		}
		out = append(out, r)
		i++
	}
	return out
}

// grow reserves more cells for r. Where none is free, a request whose KV is still on
// its way gives up its own; if there is none, the youngest of the resident choices and
// the prompts computed here. False: that was r itself. Rows before r are older
// and keep theirs.
func (d *Decode) grow(r *row) bool {
	for d.budget.free == 0 {
		victim := d.resident[len(d.resident)-1]
		if j := youngest(d.loading); j != nil {
			d.evict(j)
		} else if j := youngest(d.local); j != nil && j.order > victim.j.order {
			d.evict(j)
		} else if d.preempt(victim); victim == r {
			return false
		}
	}
	n := min(d.growStep, r.j.limit-r.out.count, d.budget.free)
	d.budget.take(n)
	r.cap += n
	return true
}

func youngest(js []*decodeJob) *decodeJob {
	if len(js) == 0 {
		return nil
	}
	return slices.MaxFunc(js, func(a, b *decodeJob) int { return cmp.Compare(a.order, b.order) })
}

// evict takes cells and sequences back from a request whose KV is not complete. What
// has landed stays in the room's pages; what was computed is computed again.
func (d *Decode) evict(j *decodeJob) {
	d.loading, d.local = without(d.loading, j), without(d.local, j)
	for _, r := range j.rows {
		d.vacate(r)
	}
	j.rows, j.imported = nil, 0
	i, _ := slices.BinarySearchFunc(d.evicted, j, func(a, b *decodeJob) int { return cmp.Compare(a.order, b.order) })
	d.evicted = slices.Insert(d.evicted, i, j)
	d.met.preempted.Inc()
}

// preempt swaps a resident row out. If the engine cannot, its request fails; the
// cells are free in any case.
func (d *Decode) preempt(r *row) {
	d.resident = without(d.resident, r)
	saved, err := d.eng.SwapOut(r.seq)
	d.vacate(r)
	if err != nil {
		r.j.fail(engineCause("swap out", err))
		return
	}
	r.saved = saved
	d.swapped = insertByAge(d.swapped, r)
	d.met.preempted.Inc()
	d.settlePhase(r.j)
}

// resume brings back swapped choices and evicted requests, oldest first, as far as
// they fit.
func (d *Decode) resume() bool {
	dead := func(r *row) bool { return r.j.dead() } // their drivers release them
	d.swapped = slices.DeleteFunc(d.swapped, dead)
	d.evicted = slices.DeleteFunc(d.evicted, func(j *decodeJob) bool { return j.dead() })
	worked := false
	for len(d.swapped)+len(d.evicted) > 0 {
		if len(d.swapped) == 0 || len(d.evicted) > 0 && d.evicted[0].order < d.swapped[0].j.order {
			j := d.evicted[0]
			if !d.fits(j) {
				break
			}
			d.evicted = slices.Delete(d.evicted, 0, 1)
			d.reserve(j)
		} else if !d.swapIn(d.swapped[0]) {
			break
		}
		worked = true
	}
	return worked
}

// swapIn makes the first swapped choice resident; false: it does not fit now.
func (d *Decode) swapIn(r *row) bool {
	left := r.j.limit - r.out.count
	need := min(r.pos+min(left, d.growReserve), d.info.KVCells)
	if !d.budget.fits(need, 1) {
		return false
	}
	d.budget.take(need)
	r.seq, r.held, r.own, r.cap = d.budget.takeSeq(), true, r.pos, need
	err := d.eng.SwapIn(r.seq, r.saved)
	if errors.Is(err, engine.ErrNoCells) && len(d.resident) > 0 {
		d.vacate(r) // our account says otherwise: later
		return false
	}
	d.swapped = slices.Delete(d.swapped, 0, 1)
	if err != nil {
		r.j.fail(engineCause("swap in", err))
		return true
	}
	r.saved = nil
	d.resident = insertByAge(d.resident, r)
	d.settlePhase(r.j)
	return true
}

// settlePhase says whether any unfinished choice of j is resident.
func (d *Decode) settlePhase(j *decodeJob) {
	if slices.ContainsFunc(j.rows, func(r *row) bool { return !r.done && r.held }) {
		j.enter(phaseDecoding)
	} else {
		j.enter(phasePreempted)
	}
}
