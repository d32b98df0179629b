package sched

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/room"
)

// All of this file runs on the loop goroutine.

// row is one choice. While it holds a sequence, it has cap cells reserved for itself
// and own of them in use (0 <= own <= cap), and counts in its job's sharers as long
// as it uses the prompt's cells together with the other choices.
type row struct {
	j      *decodeJob
	choice int

	held     bool // has a sequence and cells
	shares   bool
	seq      engine.Seq
	own, cap int

	sampler engine.Sampler
	out     *output
	last    engine.Token // computed by the next step
	pos     int          // at this position; as many positions are in the KV
	saved   []byte       // the KV while swapped out
	done    bool         // Finish was pushed
	lastAt  time.Time    // of the last token
}

// byAge orders rows: older requests first, then choices.
func byAge(a, b *row) int {
	switch {
	case a.j.order < b.j.order:
		return -1
	case a.j.order > b.j.order:
		return 1
	}
	return a.choice - b.choice
}

func insertByAge(list []*row, r *row) []*row {
	i, _ := slices.BinarySearchFunc(list, r, byAge)
	return slices.Insert(list, i, r)
}

func without[T comparable](list []T, x T) []T {
	if i := slices.Index(list, x); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}

func (d *Decode) enqueue(j *decodeJob) {
	if !j.released {
		d.prealloc.push(j)
	}
}

// turn does one bounded piece of work: resumptions, admissions, a few imports, one
// chunk of a local prompt, one step of the batch.
func (d *Decode) turn() bool {
	for _, r := range slices.Clone(d.resident) {
		if r.j.dead() {
			d.release(r.j)
		}
	}
	worked := d.resume()
	worked = d.admitWaiting() || worked
	worked = d.importSome() || worked
	worked = d.computeLocal() || worked
	return d.step() || worked
}

// admitWaiting reserves cells and sequences for those that fit. While anybody is
// swapped out nobody new comes in.
func (d *Decode) admitWaiting() bool {
	worked := false
	for len(d.swapped) == 0 {
		j, ok := d.prealloc.next(func(j *decodeJob) bool {
			return !j.dead() && d.budget.fits(j.promptCells()+j.req.N*d.firstCap(j), j.req.N)
		})
		if !ok {
			return worked
		}
		worked = true
		d.reserve(j)
		if j.req.Bootstrap == nil {
			j.enter(phaseLocal)
			d.local = append(d.local, j)
			if j.chunks() == 0 {
				d.load(j)
			}
		}
	}
	return worked
}

// firstCap is what each choice gets to grow in; at least 1, as fit has checked.
func (d *Decode) firstCap(j *decodeJob) int {
	return min(j.limit, d.growReserve, (d.info.KVCells-j.promptCells())/j.req.N)
}

func (d *Decode) reserve(j *decodeJob) {
	growth := d.firstCap(j)
	d.budget.take(j.promptCells() + j.req.N*growth)
	j.sharers = j.req.N
	for i := range j.req.N {
		j.rows = append(j.rows, &row{
			j: j, choice: i, held: true, shares: true, seq: d.budget.takeSeq(), cap: growth,
			last: j.req.Prompt[len(j.req.Prompt)-1], pos: j.promptCells(), out: newOutput(j.req.Stop, j.limit),
		})
	}
	close(j.reserved)
}

// vacate drops a row's KV and reservation.
func (d *Decode) vacate(r *row) {
	if !r.held {
		return
	}
	d.eng.FreeSeq(r.seq)
	d.budget.freeSeq(r.seq)
	d.budget.give(r.cap)
	r.held, r.own, r.cap = false, 0, 0
	if r.shares {
		r.shares = false
		if r.j.sharers--; r.j.sharers == 0 {
			d.budget.give(r.j.promptCells())
		}
	}
}

// release drops everything the loop and the engine hold of j.
func (d *Decode) release(j *decodeJob) {
	if j.released {
		return
	}
	j.released = true
	d.prealloc.remove(j)
	d.local = without(d.local, j)
	d.imports = slices.DeleteFunc(d.imports, func(l landing) bool { return l.j == j })
	ofJ := func(r *row) bool { return r.j == j }
	d.resident = slices.DeleteFunc(d.resident, ofJ)
	d.swapped = slices.DeleteFunc(d.swapped, ofJ)
	for _, r := range j.rows {
		d.vacate(r)
		r.saved = nil
		if r.sampler != nil {
			r.sampler.Close()
			r.sampler = nil
		}
	}
	d.publish()
	close(j.over)
}

// importSome brings a few landed chunks into the engine, so that the running
// streams keep their pace.
func (d *Decode) importSome() bool {
	n := 0
	for ; n < d.importsPerStep && len(d.imports) > 0; n++ {
		l := d.imports[0]
		d.imports = d.imports[1:]
		if l.j.dead() {
			continue
		}
		began := time.Now()
		err := d.eng.Import(l.j.rows[0].seq, l.j.bounds[l.chunk], l.j.bounds[l.chunk+1], l.parts)
		if err != nil {
			c := engineCause("import of a chunk", err)
			if errors.Is(err, engine.ErrBadChunk) {
				c.Code = room.CodeTransferFailed
			}
			l.j.fail(c)
			continue
		}
		since(d.met.importTime, began)
		l.j.imported++
		d.loadIfComplete(l.j)
	}
	return n > 0
}

// arrive notes that the room has succeeded.
func (d *Decode) arrive(j *decodeJob) {
	j.arrived = true
	d.loadIfComplete(j)
}

func (d *Decode) loadIfComplete(j *decodeJob) {
	if !j.released && !j.dead() && j.arrived && j.imported == j.chunks() {
		d.load(j)
	}
}

// computeLocal computes one chunk of one local prompt, with the chunk borders of a
// prefill worker, so that the KV is the same.
func (d *Decode) computeLocal() bool {
	d.local = slices.DeleteFunc(d.local, func(j *decodeJob) bool { return j.dead() }) // their drivers release them
	if len(d.local) == 0 {
		return false
	}
	j := d.local[0]
	a, b := j.bounds[j.imported], j.bounds[j.imported+1]
	began := time.Now()
	err := d.loop.call([]*life{j.life}, func(ctx context.Context) error {
		return d.eng.Prefill(ctx, j.rows[0].seq, j.req.Prompt[a:b], a)
	})
	if err != nil {
		if !errors.Is(err, engine.ErrInterrupted) || !j.dead() {
			j.fail(engineCause("prefill of a chunk", err))
		}
		return true
	}
	since(d.met.chunk, began)
	d.local = append(d.local[1:], j)
	if j.imported++; j.imported == j.chunks() {
		d.load(j)
	}
	return true
}

// load makes the choices of a job whose prompt is in the engine resident.
func (d *Decode) load(j *decodeJob) {
	d.local = without(d.local, j)
	for i, r := range j.rows {
		if i > 0 {
			if err := d.eng.CopySeq(j.rows[0].seq, r.seq); err != nil {
				j.fail(engineCause("copy of the prompt for another choice", err))
				return
			}
		}
		s := j.req.Sampling
		s.Seed += uint32(i)
		s.IgnoreEOS = s.IgnoreEOS || j.req.IgnoreEOS
		smp, err := d.eng.NewSampler(s)
		if err != nil {
			j.fail(engineCause("sampler", err))
			return
		}
		r.sampler = smp
	}
	for _, r := range j.rows {
		d.resident = insertByAge(d.resident, r)
	}
	j.mark(func(t *Phases) *time.Time { return &t.Transferred })
	j.enter(phaseDecoding)
	close(j.loaded)
}

// step computes one token of every row of the batch. If the engine has no cells
// although our account says so, the youngest choice is swapped out and the rest
// goes on.
func (d *Decode) step() bool {
	for {
		batch := d.batch()
		if len(batch) == 0 {
			return false
		}
		got, err := d.runBatch(batch)
		if errors.Is(err, engine.ErrNoCells) && len(d.resident) > 1 {
			d.preempt(d.resident[len(d.resident)-1])
			continue
		}
		now := time.Now()
		for i, r := range batch {
			if err != nil {
				r.j.fail(engineCause("decode step", err))
			} else if got != nil {
				d.accept(r, got[i], now)
			}
		}
		return true
	}
}

// runBatch is one engine call; nil, nil if it was interrupted because everybody in
// it has ended.
func (d *Decode) runBatch(batch []*row) (got []engine.Sampled, err error) {
	rows, who := make([]engine.Row, len(batch)), make([]*life, len(batch))
	for i, r := range batch {
		rows[i] = engine.Row{Seq: r.seq, Token: r.last, Pos: r.pos, Sampler: r.sampler, Logprobs: r.j.req.Logprobs}
		who[i] = r.j.life
	}
	began := time.Now()
	err = d.loop.call(who, func(ctx context.Context) (err error) {
		got, err = d.eng.Step(ctx, rows)
		return err
	})
	switch {
	case err == nil && len(got) != len(batch):
		return nil, errors.New("the engine gave too few tokens")
	case err == nil:
		since(d.met.step, began)
		d.met.batch.Observe(float64(len(batch)))
		return got, nil
	case errors.Is(err, engine.ErrInterrupted) && allDead(who):
		return nil, nil
	}
	return nil, err
}

// accept adds a token to a choice and ends the choice, and perhaps the request.
func (d *Decode) accept(r *row, s engine.Sampled, now time.Time) {
	j := r.j
	r.own++
	r.pos++
	r.last = s.Token
	if r.lastAt.IsZero() {
		j.firstToken(d.met, now)
	} else {
		d.met.itl.Observe(now.Sub(r.lastAt).Seconds())
	}
	r.lastAt = now
	tk := d.eng.Tokenizer()
	eog := !j.req.IgnoreEOS && tk.IsEOG(s.Token)
	ev, ok := r.out.push(TokenEvent{ID: s.Token, Bytes: tk.Piece(s.Token), Logprob: s.Logprob, Top: s.Top}, eog)
	j.countToken()
	if ok {
		ev.Choice = r.choice
		j.push(ev)
	}
	if ev.Finish == "" {
		return
	}
	r.done = true
	d.resident = without(d.resident, r)
	d.vacate(r)
	if j.open--; j.open == 0 {
		d.release(j)
		return
	}
	d.settlePhase(j)
}
