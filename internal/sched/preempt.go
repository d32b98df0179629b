package sched

import "slices"

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

// grow reserves more cells for r. It takes them from the youngest resident choices;
// false: that was r itself. Rows before r are older and keep theirs.
func (d *Decode) grow(r *row) bool {
	for d.budget.free == 0 {
		victim := d.resident[len(d.resident)-1]
		d.preempt(victim)
		if victim == r {
			return false
		}
	}
	n := min(d.growStep, r.j.limit-r.out.count, d.budget.free)
	d.budget.take(n)
	r.cap += n
	return true
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

// resume swaps choices in again, oldest first, as far as they fit.
func (d *Decode) resume() bool {
	worked := false
	for len(d.swapped) > 0 {
		r := d.swapped[0]
		if r.j.dead() {
			d.swapped = d.swapped[1:] // its driver releases it
			continue
		}
		left := r.j.limit - r.out.count
		need := min(r.pos+min(left, d.growReserve), d.info.KVCells)
		if !d.budget.fits(need, 1) {
			break
		}
		worked = true
		d.swapped = d.swapped[1:]
		d.budget.take(need)
		r.seq, r.held, r.own, r.cap = d.budget.takeSeq(), true, r.pos, need
		if err := d.eng.SwapIn(r.seq, r.saved); err != nil {
			r.j.fail(engineCause("swap in", err))
			continue
		}
		r.saved = nil
		d.resident = insertByAge(d.resident, r)
		d.settlePhase(r.j)
	}
	return worked
}

// settlePhase says whether any unfinished choice of j is resident.
func (d *Decode) settlePhase(j *decodeJob) {
	if slices.ContainsFunc(j.rows, func(r *row) bool { return !r.done && r.held }) {
		j.enter(phaseDecoding)
	} else {
		j.enter(phasePreempted)
	}
}
