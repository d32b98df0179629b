package sched

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// PrefillConfig is what a prefill scheduler needs. Engine and Senders are required and
// stay the caller's; they must outlive the scheduler.
type PrefillConfig struct {
	Engine  engine.Compute
	Senders transfer.Senders
	// MaxQueue bounds the requests that have no engine yet (no grant, or waiting for
	// cells). Default 256.
	MaxQueue int
	// MaxActive bounds the prompts that hold cells of the engine while their chunks are
	// computed. Default: the lesser of 8 and the engine's sequences.
	MaxActive int
	// StallAfter: an engine call that runs longer makes Healthy an error. Default 60 s.
	StallAfter time.Duration
	// Account, if set, adds to each Snapshot what the hub knows (rooms, pages).
	Account    func(*Snapshot)
	Log        *slog.Logger          // default: discarded
	Registerer prometheus.Registerer // default: metrics are kept but not exposed
}

// Prefill computes prompts and hands their KV to rooms. Each request has a driver
// goroutine that waits for the room (grant, staging memory, end); the loop
// goroutine computes one chunk of one prompt at a time, shortest prompt first.
type Prefill struct {
	core
	senders   transfer.Senders
	maxActive int
	layers    engine.LayerCompute // the engine, if chunks can leave layer by layer; otherwise nil

	// Owned by the loop goroutine.
	waiting line[*prefillJob]
	active  []*prefillJob // oldest first
	turns   uint          // chunks picked so far
}

// prefillJob is one prompt. The driver owns sending; the loop everything below the
// line, and reads the staging parts that the driver posted to it.
type prefillJob struct {
	*life
	sending transfer.Sending
	bounds  []int // chunk i is tokens [bounds[i], bounds[i+1])
	// want tells the driver for which chunk staging is needed next. Capacity:
	// one entry a chunk, so the loop never blocks.
	want chan int
	// claim decides once whether the engine ever works for the request: unclaimed, then
	// claimEngine by the loop when it gives it cells, or claimGone by the driver when
	// the request ends first.
	claim atomic.Int32

	resident bool // holds seq and cells
	seq      engine.Seq
	computed int        // chunks whose KV is in seq
	exported int        // chunks handed to the room; exported <= computed
	staged   [][][]byte // staging of chunks exported, exported+1, ...
	// forwarded is when the last chunk was computed. The driver reads it when the room has succeeded, which
	// comes after the loop has handed that chunk over.
	forwarded time.Time
}

// Values of prefillJob.claim.
const (
	unclaimed   int32 = 0
	claimEngine int32 = 1
	claimGone   int32 = 2
)

func (j *prefillJob) chunks() int { return len(j.bounds) - 1 }

// cells is what the prompt needs of the engine.
func (j *prefillJob) cells() int { return len(j.req.Prompt) - 1 }

var _ Scheduler = (*Prefill)(nil)

// NewPrefill starts a prefill scheduler. From now until Close returns only it may call the
// engine. It panics if Engine or Senders is missing.
func NewPrefill(c PrefillConfig) *Prefill {
	if c.Engine == nil || c.Senders == nil {
		panic("sched: NewPrefill needs an engine and senders")
	}
	p := &Prefill{senders: c.Senders, maxActive: c.MaxActive}
	p.init(room.SideSender, c.Engine, c.MaxQueue, c.StallAfter, c.Log, c.Registerer)
	if l, ok := c.Engine.(engine.LayerCompute); ok && l.LayerGroups() > 1 {
		p.layers = l
	}
	p.queued = []phase{phaseBootstrap, phaseWaiting}
	p.account = c.Account
	if p.maxActive <= 0 {
		p.maxActive = 8
	}
	p.maxActive = min(p.maxActive, p.info.MaxSeqs)
	p.start(p.turn)
	return p
}

// Submit implements [Scheduler]. The room is opened before it returns.
func (p *Prefill) Submit(ctx context.Context, r *Request) (Stream, error) {
	if c := p.validate(r); c != nil {
		return nil, c
	}
	if r.Bootstrap == nil {
		return nil, &room.Cause{Code: room.CodeInvalid, Side: p.side, Phase: "submit", Detail: "a prefill worker needs the bootstrap fields: it serves one half of a request"}
	}
	if len(r.Prompt)-1 > p.info.KVCells {
		return nil, &room.Cause{Code: room.CodeCapacity, Side: p.side, Phase: "submit", Key: r.Bootstrap.Key,
			Detail: "the prompt is longer than the engine's KV memory"}
	}
	l, c := p.admit(ctx, r, phaseBootstrap)
	if c != nil {
		return nil, c
	}
	j := &prefillJob{life: l, bounds: p.bounds(r)}
	j.want = make(chan int, len(j.bounds))
	s, err := p.senders.Open(transfer.OpenSender{
		Key: r.Bootstrap.Key, Deadline: r.Deadline, Chunks: chunkSizes(j.bounds, p.eng.ChunkBytes), Bounds: j.bounds, Digest: transfer.Digest(r.Prompt),
	})
	if err != nil {
		l.fail(room.CauseOf(err))
		p.end(l)
		return nil, l.failure()
	}
	j.sending = s
	l.mu.Lock()
	l.roomed = true
	l.mu.Unlock()
	go p.drive(j)
	return l, nil
}

// Snapshot implements [Scheduler].
func (p *Prefill) Snapshot() Snapshot {
	s := p.snapshot("prefill")
	s.Bootstrap, s.Waiting = p.census.sum(phaseBootstrap), p.census.sum(phaseWaiting)
	s.Running, s.Inflight = p.census.sum(phaseForward), p.census.sum(phaseInflight)
	return s
}

// drive leads one request from its room's birth to its end.
func (p *Prefill) drive(j *prefillJob) {
	defer p.end(j.life)
	p.lead(j)
	p.loop.kick()
	if c := j.failure(); c != nil {
		j.sending.Cancel(c) // first: the peer hears of it while the engine is still being stopped
	}
	if j.claim.CompareAndSwap(unclaimed, claimGone) {
		// The engine never held anything of it. It only stands in a line, and need not wait until the
		// chunk of another is computed.
		p.loop.post(func() { p.release(j) })
	} else {
		// The loop may be writing into staging memory: Release only after it has let go.
		p.awaitOver(j.life, func() { p.release(j) })
	}
	j.sending.Release()
	if j.failure() == nil {
		for i := range j.req.N {
			j.push(Event{Choice: i, Finish: FinishLength})
		}
	}
}

// lead returns when the room has succeeded, or with the request failed.
func (p *Prefill) lead(j *prefillJob) {
	select {
	case <-j.sending.Granted():
	case <-j.sending.Done():
	case <-j.ctx.Done():
	}
	if p.ended(j) {
		return
	}
	j.mark(func(t *Phases) *time.Time { return &t.Granted })
	if j.chunks() == 0 { // a prompt of one token: nothing to compute
		if _, err := j.sending.Buffer(j.ctx, 0); err != nil {
			p.bufferFailed(j, err)
			return
		}
		j.mark(func(t *Phases) *time.Time { return &t.Sent })
		j.enter(phaseInflight)
		j.sending.Send(0)
	} else {
		j.enter(phaseWaiting)
		p.loop.post(func() { p.enqueue(j) })
	}
	for {
		select {
		case i := <-j.want:
			buf, err := j.sending.Buffer(j.ctx, i)
			if err != nil {
				p.bufferFailed(j, err)
				return
			}
			p.loop.post(func() { j.staged = append(j.staged, buf) })
		case <-j.sending.Done():
			p.ended(j)
			return
		case <-j.ctx.Done():
			j.failCtx()
			return
		}
	}
}

// ended turns the end of the room or of ctx into the request's; false: it lives.
func (p *Prefill) ended(j *prefillJob) bool {
	select {
	case <-j.sending.Done():
		if err := j.sending.Err(); err != nil {
			j.fail(room.CauseOf(err))
		} else {
			j.mark(func(t *Phases) *time.Time { return &t.Transferred })
			if j.chunks() > 0 {
				p.met.exposed.Observe(j.sending.Ended().Sub(j.forwarded).Seconds())
			}
		}
		return true
	default:
	}
	if j.dead() {
		j.failCtx()
		return true
	}
	return false
}

// bufferFailed: no staging memory for a chunk, because the room or ctx ended, or for good.
func (p *Prefill) bufferFailed(j *prefillJob, err error) {
	if !p.ended(j) {
		j.fail(room.CauseOf(err))
	}
}

// The rest runs on the loop goroutine.

func (p *Prefill) enqueue(j *prefillJob) {
	if !j.released {
		p.waiting.push(j)
	}
}

// release drops everything the loop and the engine hold of j.
func (p *Prefill) release(j *prefillJob) {
	if j.released {
		return
	}
	j.released = true
	p.waiting.remove(j)
	for i, a := range p.active {
		if a == j {
			p.active = append(p.active[:i], p.active[i+1:]...)
			break
		}
	}
	if j.resident {
		p.eng.FreeSeq(j.seq)
		p.budget.freeSeq(j.seq)
		p.budget.give(j.cells())
		j.resident = false
		p.publish()
	}
	j.staged = nil
	close(j.over)
}

// turn does one bounded piece of work: admissions, exports, and at most one chunk.
func (p *Prefill) turn() bool {
	p.admitWaiting()
	worked := false
	for _, j := range append([]*prefillJob(nil), p.active...) {
		worked = p.export(j) || worked
	}
	if j := p.pick(); j != nil {
		p.compute(j)
		return true
	}
	return worked
}

// oldestEvery is how often the oldest prompt has its turn whatever its length.
const oldestEvery = 4

// pick is the prompt whose chunk is computed now: the one with the fewest chunks left, the oldest
// of several, which makes the mean time to the first token least. Every fourth chunk is the
// oldest prompt's, so that short ones that keep coming slow a long one, but cannot stop it.
func (p *Prefill) pick() *prefillJob {
	var best *prefillJob
	for _, j := range p.active {
		if j.computed == j.chunks() || j.dead() {
			continue
		}
		if p.turns%oldestEvery == oldestEvery-1 {
			best = j
			break
		}
		if best == nil || j.chunks()-j.computed < best.chunks()-best.computed {
			best = j
		}
	}
	if best != nil {
		p.turns++
	}
	return best
}

// admitWaiting gives cells and a sequence to those that fit, oldest first.
func (p *Prefill) admitWaiting() {
	for len(p.active) < p.maxActive {
		j, ok := p.waiting.next(func(j *prefillJob) bool { return !j.dead() && p.budget.fits(j.cells(), 1) })
		if !ok {
			return
		}
		if !j.claim.CompareAndSwap(unclaimed, claimEngine) {
			continue // it has ended and is out of the line now
		}
		p.budget.take(j.cells())
		j.seq, j.resident = p.budget.takeSeq(), true
		p.active = append(p.active, j)
		j.mark(func(t *Phases) *time.Time { return &t.Reserved })
		j.enter(phaseForward)
	}
}

// compute runs the next chunk of j.
func (p *Prefill) compute(j *prefillJob) {
	i := j.computed
	a, b := j.bounds[i], j.bounds[i+1]
	early := p.early(j)
	if early == nil {
		j.want <- i // staging is waited for while the chunk is computed
	}
	began, exports := time.Now(), time.Duration(0)
	err := p.loop.call([]*life{j.life}, func(ctx context.Context) (err error) {
		if early != nil {
			exports, err = p.computeLayers(ctx, j, early)
			return err
		}
		return p.eng.Prefill(ctx, j.seq, j.req.Prompt[a:b], a)
	})
	switch {
	case err == nil:
		now := time.Now()
		p.met.chunk.Observe((now.Sub(began) - exports).Seconds())
		j.chunkTime(began, now)
		if j.computed++; j.computed == j.chunks() {
			j.mark(func(t *Phases) *time.Time { return &t.Computed })
		}
	case errors.Is(err, engine.ErrInterrupted) && j.dead():
		p.release(j)
		return
	default:
		p.failed(j, "prefill of a chunk", err)
		return
	}
	if early != nil {
		j.exported++
		p.met.exportTime.Observe(exports.Seconds())
	} else if j.computed == j.chunks() {
		j.forwarded = time.Now()
	}
	p.export(j)
}

// noWait asks for staging only if there is some.
var noWait = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// early is staging for j's next chunk if its layers may leave one by one: all chunks before it have left and
// there is staging at once. Otherwise nil: the chunk is computed first, so the engine never waits for staging.
func (p *Prefill) early(j *prefillJob) [][]byte {
	if p.layers == nil || j.exported < j.computed {
		return nil
	}
	buf, err := j.sending.Buffer(noWait, j.computed)
	if err != nil { // the driver asks again, and learns it if the room has ended
		return nil
	}
	return buf
}

// computeLayers runs the next chunk of j and hands over each group of layers when it is computed. It
// returns the time that exports took.
func (p *Prefill) computeLayers(ctx context.Context, j *prefillJob, buf [][]byte) (exports time.Duration, err error) {
	i, groups, next := j.computed, p.layers.LayerGroups(), 0
	a, b := j.bounds[i], j.bounds[i+1]
	err = p.layers.PrefillLayers(ctx, j.seq, j.req.Prompt[a:b], a, func(g int) error {
		if g != next || g >= groups {
			return fmt.Errorf("layer group %d of %d was computed when %d was next", g, groups, next)
		}
		next++
		began, last := time.Now(), next == groups
		if i == 0 && g == 0 {
			j.mark(func(t *Phases) *time.Time { return &t.Sent })
		}
		ranges, err := p.layers.ExportLayers(j.seq, a, b, g, buf)
		if err != nil {
			return err
		}
		exports += time.Since(began)
		spans := make([]transfer.Span, len(ranges))
		for k, r := range ranges {
			spans[k] = transfer.Span(r)
		}
		if last && i == j.chunks()-1 {
			j.forwarded = began
			j.mark(func(t *Phases) *time.Time { return &t.Computed })
			j.enter(phaseInflight) // before the last part: the room may succeed at once
		}
		j.sending.SendPart(i, spans, last)
		return nil
	})
	if err == nil && next < groups {
		err = fmt.Errorf("the engine computed %d of %d layer groups", next, groups)
	}
	return exports, err
}

// export hands over the computed chunks for which there is staging memory.
func (p *Prefill) export(j *prefillJob) bool {
	worked := false
	for j.exported < j.computed && len(j.staged) > 0 && !j.dead() {
		i, began := j.exported, time.Now()
		if err := p.eng.Export(j.seq, j.bounds[i], j.bounds[i+1], j.staged[0]); err != nil {
			p.failed(j, "export of a chunk", err)
			return true
		}
		since(p.met.exportTime, began)
		j.staged = j.staged[1:]
		j.exported++
		worked = true
		if j.exported == j.chunks() {
			j.enter(phaseInflight) // before Send: the room may succeed at once
		}
		if i == 0 {
			j.mark(func(t *Phases) *time.Time { return &t.Sent })
		}
		j.sending.Send(i)
	}
	if j.exported == j.chunks() {
		p.release(j)
	}
	return worked
}

func (p *Prefill) failed(j *prefillJob, act string, err error) {
	j.fail(engineCause(act, err))
	p.release(j)
}
