package sched

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"net"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// DecodeConfig is what a decode scheduler needs. Engine is required; both stay the
// caller's and must outlive the scheduler.
type DecodeConfig struct {
	Engine engine.Compute
	// Receivers: nil serves only requests without Bootstrap (monolithic).
	Receivers transfer.Receivers
	// KeepPrefixes: the receivers' pool keeps prompts for others that begin alike, so it is told their prefixes.
	// Only for an engine with Info.Shards.
	KeepPrefixes bool
	// MaxQueue bounds the requests that wait for cells. Default 256.
	MaxQueue int
	// MaxRunning bounds the rows of one step. Default: the engine's sequences.
	MaxRunning int
	// GrowReserve is how many cells a choice gets beyond the prompt before it starts,
	// if it may need as many. Default 256.
	GrowReserve int
	// ImportsPerStep bounds the chunks imported between two steps. Default 2.
	ImportsPerStep int
	// StallAfter: an engine call that runs longer makes Healthy an error. Default 60 s.
	StallAfter time.Duration
	// Account, if set, adds to each Snapshot what the hub knows (rooms, pages).
	Account    func(*Snapshot)
	Log        *slog.Logger          // default: discarded
	Registerer prometheus.Registerer // default: metrics are kept but not exposed
}

// Decode runs requests to their end: prealloc (cells and sequences are reserved), then the
// prompt's KV arrives by a room or is computed here, then continuous batching.
//
// # Why it cannot lock up
//
// A request gets the cells of its prompt and some to grow in before its room is
// opened. A choice that needs more while none is free takes them from a request whose
// KV has not all arrived (its chunks stay in the room's pages and are imported again
// later: a silent peer never stops a running stream), or else from the youngest
// resident choice, perhaps itself, which is swapped out to host memory. Both return oldest
// first and before any new request. So the oldest choice always gets its cells,
// every choice fits alone (checked at Submit), and whoever is resident steps until its end.
type Decode struct {
	core
	receivers                                         transfer.Receivers
	keepPrefixes                                      bool
	maxRunning, growReserve, growStep, importsPerStep int
	orders                                            atomic.Uint64
	giveWay                                           func() // the function of this name, or a test's

	// Owned by the loop goroutine.
	prealloc line[*decodeJob]
	loading  []*decodeJob // hold cells, their KV is arriving, in turn: the head is next
	local    []*decodeJob // hold cells, their KV is computed here, in turn
	evicted  []*decodeJob // were in loading or local and gave their cells back, oldest first
	resident []*row       // complete KV in the engine, oldest first
	swapped  []*row       // in host memory, oldest first
}

// decodeJob is one request. The driver owns the room; the loop everything below the line.
type decodeJob struct {
	*life
	bounds []int  // chunk i is tokens [bounds[i], bounds[i+1])
	order  uint64 // age: smaller is older
	limit  int    // tokens of each choice, >= 1

	reserved chan struct{} // closed by the loop: cells and sequences are held
	loaded   chan struct{} // closed by the loop: the KV is complete, the room's memory is not needed

	rows    []*row
	sharers int // resident rows that share the prompt's cells, which are held while > 0
	// landed is the memory of the chunks that have landed, in order. Valid until the
	// driver releases the room, which is after over or loaded.
	landed   [][][]byte
	landedAt time.Time // of the last chunk, with landed
	imported int       // chunks in rows[0].seq, by import or computed here
	arrived  bool      // the room has succeeded
	denied   int       // how often the engine refused a chunk for want of cells while nobody ran
	open     int       // rows without Finish
}

func (j *decodeJob) chunks() int { return len(j.bounds) - 1 }

// promptCells are the cells that all choices share.
func (j *decodeJob) promptCells() int { return len(j.req.Prompt) - 1 }

var _ Scheduler = (*Decode)(nil)

// NewDecode starts a decode scheduler. From now until Close returns only it may call the
// engine. It panics if Engine is missing.
func NewDecode(c DecodeConfig) *Decode {
	if c.Engine == nil {
		panic("sched: NewDecode needs an engine")
	}
	d := &Decode{receivers: c.Receivers, keepPrefixes: c.KeepPrefixes, maxRunning: c.MaxRunning, growReserve: c.GrowReserve, importsPerStep: c.ImportsPerStep, giveWay: giveWay}
	d.init(room.SideReceiver, c.Engine, c.MaxQueue, c.StallAfter, c.Log, c.Registerer)
	d.queued = []phase{phasePrealloc}
	d.account = c.Account
	if d.maxRunning <= 0 {
		d.maxRunning = d.info.MaxSeqs
	}
	if d.growReserve <= 0 {
		d.growReserve = 256
	}
	if d.importsPerStep <= 0 {
		d.importsPerStep = 2
	}
	d.growStep = min(d.growReserve, 32)
	d.start(d.turn)
	return d
}

// Submit implements [Scheduler].
func (d *Decode) Submit(ctx context.Context, r *Request) (Stream, error) {
	limit, c := d.fit(r)
	if c != nil {
		return nil, c
	}
	l, c := d.admit(ctx, r, phasePrealloc)
	if c != nil {
		return nil, c
	}
	j := &decodeJob{
		life: l, bounds: d.bounds(r), order: d.orders.Add(1), limit: limit, open: r.N,
		reserved: make(chan struct{}), loaded: make(chan struct{}),
	}
	go d.drive(j)
	return l, nil
}

// fit refuses what this worker can never serve, and gives the tokens a choice may have.
func (d *Decode) fit(r *Request) (limit int, c *room.Cause) {
	if c := d.validate(r); c != nil {
		return 0, c
	}
	refuse := func(code room.Code, format string, a ...any) *room.Cause {
		c := &room.Cause{Code: code, Side: d.side, Phase: "submit", Detail: fmt.Sprintf(format, a...)}
		if r.Bootstrap != nil {
			c.Key = r.Bootstrap.Key
		}
		return c
	}
	n := len(r.Prompt)
	end := min(d.info.ContextLen, d.info.KVCells)
	switch {
	case r.Bootstrap != nil && d.receivers == nil:
		return 0, refuse(room.CodeInvalid, "this worker computes its prompts itself and takes no room")
	case r.N > d.info.MaxSeqs:
		return 0, refuse(room.CodeInvalid, "n is %d, this worker runs at most %d choices", r.N, d.info.MaxSeqs)
	case n+1 > end || n-1+r.N > d.info.KVCells:
		return 0, refuse(room.CodeCapacity, "a prompt of %d tokens with %d choices needs more than the worker's %d KV cells", n, r.N, d.info.KVCells)
	}
	limit = r.MaxTokens
	if limit == 0 {
		limit = math.MaxInt
	}
	return min(limit, end-n), nil
}

// Snapshot implements [Scheduler].
func (d *Decode) Snapshot() Snapshot {
	s := d.snapshot("decode")
	s.Prealloc = d.census.sum(phasePrealloc, phaseConnecting)
	s.Transfer = d.census.sum(phaseTransferring)
	s.Running = d.census.sum(phaseLocal, phaseDecoding)
	s.Preempted = d.census.sum(phasePreempted)
	return s
}

// drive leads one request to its end.
func (d *Decode) drive(j *decodeJob) {
	defer d.end(j.life)
	recv := d.lead(j)
	d.loop.kick()
	if c := j.failure(); c != nil && recv != nil {
		recv.Cancel(c) // first: the peer hears of it while the engine is still being stopped
	}
	// The loop may be reading the room's memory: Release only after it has let go.
	d.awaitOver(j.life, func() { d.release(j) })
	if recv != nil {
		recv.Release()
	}
}

// lead returns when the loop has ended the request or the request has failed. A
// room that is returned is still to be released.
func (d *Decode) lead(j *decodeJob) transfer.Receiving {
	d.loop.post(func() { d.enqueue(j) })
	select {
	case <-j.reserved:
	case <-j.ctx.Done():
		j.failCtx()
		return nil
	}
	if b := j.req.Bootstrap; b != nil {
		j.enter(phaseConnecting)
		recv, err := d.receivers.Open(transfer.OpenReceiver{
			Key: b.Key, Addr: net.JoinHostPort(b.Host, strconv.Itoa(b.Port)), Deadline: j.req.Deadline,
			Chunks: chunkSizes(j.bounds, d.eng.ChunkBytes), Bounds: j.bounds, Prefixes: d.prefixes(j),
			Digest: transfer.Digest(j.req.Prompt), Tokens: len(j.req.Prompt),
		})
		if err != nil {
			j.fail(room.CauseOf(err))
			return nil
		}
		j.mu.Lock()
		j.roomed = true
		j.mu.Unlock()
		if !d.fetch(j, recv) {
			return recv
		}
		recv.Release()
	}
	select {
	case <-j.over:
	case <-j.ctx.Done():
		j.failCtx()
	}
	return nil
}

// prefixes names the beginnings of j's prompt that end with a page; nil if none are kept.
func (d *Decode) prefixes(j *decodeJob) []kv.Prefix {
	if !d.keepPrefixes {
		return nil
	}
	return kv.Prefixes(j.req.Prompt, d.info.Shards.PageEnds(j.bounds, d.info.ChunkTokens))
}

// fetch waits for the KV and hands its chunks to the loop until they are complete in the
// engine, or the request has failed (false). The chunks stay in their landing pages until the
// last one is there: in a unified cache every step of the running streams also walks over the
// cells of a prompt that is still arriving, which would slow them down for as long as it takes.
func (d *Decode) fetch(j *decodeJob, recv transfer.Receiving) bool {
	granted, landed, done := recv.Granted(), recv.Landed(), recv.Done()
	var chunks [][][]byte
	var last time.Time // when the last of them landed
	for {
		select {
		case <-granted:
			granted = nil
			d.granted(j, recv)
		case i, ok := <-landed:
			if granted != nil { // select is not fair: the phase moves before the first import
				granted = nil
				d.granted(j, recv)
			}
			switch {
			case !ok:
				landed = nil // done says the rest
				if len(chunks) == j.chunks() {
					d.loop.post(func() { j.landed, j.landedAt = append(j.landed, chunks...), last })
				}
			case i < j.chunks(): // in order; a prompt of one token has an empty chunk
				chunks, last = append(chunks, recv.Chunk(i)), time.Now()
				j.chunkTime(last, last)
				if len(chunks) == j.chunks() {
					j.mark(func(t *Phases) *time.Time { return &t.Landed })
					d.giveWay()
				}
			}
		case <-done:
			if err := recv.Err(); err != nil {
				j.fail(room.CauseOf(err))
				return false
			}
			done = nil
		case <-j.loaded:
			return true
		case <-j.ctx.Done():
			j.failCtx()
			return false
		}
		if landed == nil && done == nil && granted == nil {
			granted = make(chan struct{}) // never again: post once
			d.loop.post(func() { d.arrive(j) })
		}
	}
}

// giveWay lets threads that wait for this one's core go first. The thread that has answered the last chunk's landing runs
// this, and next the imports, some milliseconds. Where both workers share a machine, the kernel has put the prefill worker's
// thread that hears the answer behind it, expecting a thread that wakes another to sleep soon, and leaves it there
// though the other core be idle. It needs a tenth of a millisecond.
func giveWay() { _, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0) }

func (d *Decode) granted(j *decodeJob, recv transfer.Receiving) {
	if recv.State() == room.StateFailed {
		return
	}
	j.mark(func(t *Phases) *time.Time { return &t.Granted })
	j.enter(phaseTransferring)
}
