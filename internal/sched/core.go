package sched

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/room"
)

// core is what both schedulers share: the live requests, the engine loop, the
// accounting, and the way to an end.
//
// Locks, in order: core.mu, loop.mu, life.mu. None is held across an engine call, a
// hub call or a wait.
type core struct {
	side   room.Side
	eng    engine.Compute // loop goroutine only, but for Info, Tokenizer and ChunkBytes
	info   engine.Info
	log    *slog.Logger
	loop   *loop
	census census
	met    *metrics

	maxQueue   int
	stallAfter time.Duration
	queued     []phase // the phases that maxQueue bounds
	account    func(*Snapshot)

	budget              budget       // loop goroutine only
	cellsUsed, seqsUsed atomic.Int64 // published by the loop

	mu      sync.Mutex
	live    map[string]*life // by request id; guarded by mu
	closed  bool             // guarded by mu
	ended   ways
	drivers sync.WaitGroup // one for each live request; Add under mu while !closed
}

const (
	defaultMaxQueue   = 256
	defaultStallAfter = 60 * time.Second
)

func (c *core) init(side room.Side, eng engine.Compute, maxQueue int, stall time.Duration, log *slog.Logger, reg prometheus.Registerer) {
	c.side, c.eng, c.info, c.log = side, eng, eng.Info(), log
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	c.maxQueue = maxQueue
	if maxQueue <= 0 {
		c.maxQueue = defaultMaxQueue
	}
	c.stallAfter = stall
	if stall <= 0 {
		c.stallAfter = defaultStallAfter
	}
	c.loop, c.live = newLoop(), map[string]*life{}
	c.budget = newBudget(c.info.KVCells, c.info.MaxSeqs)
	c.met = newMetrics(reg, side, &c.census)
}

// start runs the loop's goroutine; Close waits for it.
func (c *core) start(turn func() bool) {
	go c.loop.run(turn, c.publish, c.died)
}

// publish shows the engine's occupancy to Snapshot, after every turn; loop goroutine only.
func (c *core) publish() {
	c.cellsUsed.Store(int64(c.eng.UsedCells()))
	c.seqsUsed.Store(int64(c.budget.seqsUsed()))
}

// died fails every live request after a panic of the loop. The engine is not touched
// any more: nobody knows what state it is in.
func (c *core) died(cause *room.Cause, stack []byte) {
	c.log.Error("engine loop died", "role", c.side.String(), "cause", cause.Detail, "stack", string(stack))
	c.failAll(cause)
}

func (c *core) failAll(cause *room.Cause) int {
	c.mu.Lock()
	all := make([]*life, 0, len(c.live))
	for _, l := range c.live {
		all = append(all, l)
	}
	c.mu.Unlock()
	for _, l := range all {
		l.fail(cause)
	}
	return len(all)
}

// validate rejects what can never be served by any worker of this kind.
func (c *core) validate(r *Request) *room.Cause {
	invalid := func(format string, a ...any) *room.Cause {
		return &room.Cause{Code: room.CodeInvalid, Side: c.side, Phase: "submit", Detail: fmt.Sprintf(format, a...)}
	}
	switch {
	case r.ID == "":
		return invalid("the request has no id")
	case len(r.Prompt) == 0:
		return invalid("the prompt is empty")
	case r.N < 1:
		return invalid("n is %d, want at least 1", r.N)
	case r.Emitted < 0 || r.Emitted >= len(r.Prompt) || r.Emitted > 0 && r.N != 1:
		return invalid("%d tokens of an answer after a prompt of %d, n %d", r.Emitted, len(r.Prompt)-r.Emitted, r.N)
	case r.MaxTokens < 0:
		return invalid("max_tokens is %d, want at least 1", r.MaxTokens)
	case r.Deadline.IsZero():
		return invalid("the request has no deadline")
	case len(r.Prompt)+1 > c.info.ContextLen:
		return invalid("the prompt has %d tokens, the model's context is %d tokens with room for at least one of the answer", len(r.Prompt), c.info.ContextLen)
	}
	for _, t := range r.Prompt {
		if t < 0 || int(t) >= c.info.VocabSize {
			return invalid("token %d is not in the vocabulary of %d", t, c.info.VocabSize)
		}
	}
	return nil
}

// admit makes r a live request, or says why not. The caller must start its driver
// with c.drive, or undo with c.end.
func (c *core) admit(ctx context.Context, r *Request, first phase) (*life, *room.Cause) {
	refuse := func(code room.Code, retry bool, detail string) *room.Cause {
		cause := &room.Cause{Code: code, Side: c.side, Phase: "submit", Detail: detail, Retryable: retry}
		if r.Bootstrap != nil {
			cause.Key = r.Bootstrap.Key
		}
		return cause
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	// Under mu: a loop that dies later finds the request in live.
	if err := c.loop.healthy(c.stallAfter); err != nil {
		return nil, refuse(room.CodeEngine, true, "the worker's engine does not work any more: "+room.CauseOf(err).Detail)
	}
	switch {
	case c.closed:
		return nil, refuse(room.CodeShutdown, true, "the worker is shutting down")
	case c.live[r.ID] != nil:
		return nil, refuse(room.CodeDuplicate, false, "request id "+r.ID+" is in use")
	case c.census.sum(c.queued...) >= c.maxQueue:
		return nil, refuse(room.CodeCapacity, true, fmt.Sprintf("the queue is full (%d requests wait)", c.maxQueue))
	}
	l := newLife(ctx, r, c.side, &c.census, first)
	c.live[r.ID] = l
	c.drivers.Add(1)
	return l, nil
}

// awaitOver waits until the engine holds nothing of l, which has ended. release runs on the loop goroutine; after the loop's death it does not.
func (c *core) awaitOver(l *life, release func()) {
	c.loop.post(release)
	select {
	case <-l.over:
	case <-c.loop.gone:
	}
}

// end is the last act of a driver: l is not live any more, is counted and logged once.
func (c *core) end(l *life) {
	l.mark(func(p *Phases) *time.Time { return &p.Ended })
	l.stop()
	l.mu.Lock()
	cause, roomed, times, tokens := l.cause, l.roomed, l.times, l.tokens
	l.mu.Unlock()
	c.met.ended(cause, times, len(l.req.Prompt), tokens)
	if cause != nil {
		// A room's failure is logged by the hub, with both peers; here only for tracing.
		level := slog.LevelInfo
		if roomed {
			level = slog.LevelDebug
		}
		c.log.Log(context.Background(), level, "request failed", "role", c.side.String(), "rid", l.req.ID, "room", cause.Key.String(),
			"code", string(cause.Code), "phase", cause.Phase, "detail", cause.Detail)
	}
	l.enter(phaseEnded)
	c.ended.add(l.way(c.info.ChunkTokens)) // before it is not live any more: somebody who looks finds it at least once
	c.mu.Lock()
	if c.live[l.req.ID] == l {
		delete(c.live, l.req.ID)
	}
	c.mu.Unlock()
	close(l.ended)
	c.drivers.Done()
}

// Abort implements [Scheduler].
func (c *core) Abort(id string, cause *room.Cause) int {
	if cause == nil {
		cause = &room.Cause{Code: room.CodeAborted, Detail: "aborted by request"}
	}
	if id == "" {
		return c.failAll(cause)
	}
	c.mu.Lock()
	l := c.live[id]
	c.mu.Unlock()
	if l == nil {
		return 0
	}
	l.fail(cause)
	return 1
}

// Healthy implements [Scheduler].
func (c *core) Healthy() error { return c.loop.healthy(c.stallAfter) }

// Close fails all live requests (CodeShutdown), waits until each holds nothing, and
// ends the loop. The engine stays open: it is the caller's. Idempotent.
func (c *core) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.failAll(&room.Cause{Code: room.CodeShutdown, Detail: "the worker is shutting down", Retryable: true})
	c.drivers.Wait()
	c.loop.stop()
	return nil
}

// snapshot fills what both roles have.
func (c *core) snapshot(role string) Snapshot {
	s := Snapshot{
		Role: role, CellsUsed: int(c.cellsUsed.Load()), CellsTotal: c.info.KVCells, SeqsUsed: int(c.seqsUsed.Load()),
	}
	if c.account != nil {
		c.account(&s)
	}
	return s
}

// engineCause is a failed engine call as a cause.
func engineCause(act string, err error) *room.Cause {
	return &room.Cause{Code: room.CodeEngine, Detail: act + ": " + err.Error(), Retryable: true}
}

// bounds are the token ranges [b[i], b[i+1]) of the chunks of a request's prompt;
// the last token is not in them. A prompt of one token has none. Tokens of an answer had been computed in steps, and
// the prompt before them in chunks of its own: their chunks give the same bits.
func (c *core) bounds(r *Request) []int {
	b := []int{0}
	to := func(end, chunk int) {
		for p := b[len(b)-1]; p < end; {
			p = min(p+chunk, end)
			b = append(b, p)
		}
	}
	n := len(r.Prompt) - 1
	if r.Emitted > 0 && c.info.StepTokens > 0 {
		to(n-r.Emitted, c.info.ChunkTokens)
		to(n, min(c.info.StepTokens, c.info.ChunkTokens))
	}
	to(n, c.info.ChunkTokens)
	return b
}

// chunkSizes are the exported sizes in bytes; at least one, perhaps of 0 bytes.
func chunkSizes(b []int, bytes func(int) int) []int {
	if len(b) == 1 {
		return []int{0}
	}
	out := make([]int, len(b)-1)
	for i := range out {
		out[i] = bytes(b[i+1] - b[i])
	}
	return out
}
