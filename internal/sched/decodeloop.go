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

// admitWaiting reserves cells and sequences for those that fit. While anybody waits to
// come back nobody new comes in.
func (d *Decode) admitWaiting() bool {
	worked := false
	for len(d.swapped) == 0 && len(d.evicted) == 0 {
		j, ok := d.prealloc.next(func(j *decodeJob) bool { return !j.dead() && d.fits(j) })
		if !ok {
			return worked
		}
		worked = true
		if j.req.Bootstrap == nil {
			j.enter(phaseLocal)
		}
		d.reserve(j)
		close(j.reserved)
	}
	return worked
}

func (d *Decode) fits(j *decodeJob) bool {
	return d.budget.fits(j.promptCells()+j.req.N*d.firstCap(j), j.req.N)
}

// firstCap is what each choice gets to grow in; at least 1, as fit has checked.
func (d *Decode) firstCap(j *decodeJob) int {
	return min(j.limit, d.growReserve, (d.info.KVCells-j.promptCells())/j.req.N)
}

// reserve gives j cells and sequences; it fits. From now on its KV comes in.
func (d *Decode) reserve(j *decodeJob) {
	j.mark(func(t *Phases) *time.Time { return &t.Reserved })
	growth := d.firstCap(j)
	d.budget.take(j.promptCells() + j.req.N*growth)
	j.sharers = j.req.N
	for i := range j.req.N {
		j.rows = append(j.rows, &row{
			j: j, choice: i, held: true, shares: true, seq: d.budget.takeSeq(), cap: growth,
			last: j.req.Prompt[len(j.req.Prompt)-1], pos: j.promptCells(), out: newOutput(j.req.Stop, j.limit, j.req.WholeTokens),
		})
	}
	if j.req.Bootstrap == nil {
		d.local = append(d.local, j)
		j.arrived = true
	} else {
		d.loading = append(d.loading, j)
	}
	d.loadIfComplete(j)
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
	d.loading, d.local, d.evicted = without(d.loading, j), without(d.local, j), without(d.evicted, j)
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
	j.landed = nil
	d.publish()
	close(j.over)
}

// importSome brings a few landed chunks into the engine, in turn over the requests,
// so that the running streams keep their pace.
func (d *Decode) importSome() bool {
	n := 0
	for ; n < d.importsPerStep; n++ {
		i := slices.IndexFunc(d.loading, func(j *decodeJob) bool { return !j.dead() && j.imported < len(j.landed) })
		if i < 0 {
			break
		}
		j := d.loading[i]
		d.loading = append(slices.Delete(d.loading, i, i+1), j)
		began := time.Now()
		err := d.eng.Import(j.rows[0].seq, j.bounds[j.imported], j.bounds[j.imported+1], j.landed[j.imported])
		if err != nil {
			d.loadFailed(j, "import of a chunk", err)
			continue
		}
		since(d.met.importTime, began)
		j.imported++
		d.loadIfComplete(j)
	}
	return n > 0
}

// maxDenied is how often an engine may refuse a chunk for want of cells while nobody runs.
const maxDenied = 64

// loadFailed deals with an engine that did not take a chunk. For want of cells (our
// account says otherwise) it is tried again at the next turn: those who run will free
// some. If nobody runs, a few tries must do.
func (d *Decode) loadFailed(j *decodeJob, act string, err error) {
	if len(d.resident) == 0 {
		j.denied++
	}
	if errors.Is(err, engine.ErrNoCells) && j.denied <= maxDenied {
		return
	}
	c := engineCause(act, err)
	if errors.Is(err, engine.ErrBadChunk) {
		c.Code = room.CodeTransferFailed
	}
	j.fail(c)
}

// arrive notes that the room has succeeded.
func (d *Decode) arrive(j *decodeJob) {
	j.arrived = true
	d.loadIfComplete(j)
}

func (d *Decode) loadIfComplete(j *decodeJob) {
	if !j.released && !j.dead() && len(j.rows) > 0 && j.arrived && j.imported == j.chunks() {
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
			d.loadFailed(j, "prefill of a chunk", err)
		}
		return true
	}
	now := time.Now()
	d.met.chunk.Observe(now.Sub(began).Seconds())
	j.chunkTime(began, now)
	d.local = append(d.local[1:], j)
	j.imported++
	d.loadIfComplete(j)
	return true
}

// load makes the choices of a job whose prompt is in the engine resident.
func (d *Decode) load(j *decodeJob) {
	if !j.landedAt.IsZero() {
		since(d.met.exposed, j.landedAt)
	}
	d.loading, d.local = without(d.loading, j), without(d.local, j)
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
		for _, t := range j.req.Prompt[len(j.req.Prompt)-j.req.Emitted:] {
			smp.Accept(t)
		}
	}
	j.landed = nil
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
