package sim

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/baton-pd/baton/internal/engine"
)

// Engine is a simulated context. It implements [engine.LayerCompute].
type Engine struct {
	cfg  Config
	info engine.Info
	mem  *memory
	seqs []sequence
	cell []byte      // scratch for one position
	busy atomic.Bool // a call is running: finds a second owner
	shut bool
	grow growing // the chunk of a running PrefillLayers
}

// sequence is one slot: the cells of positions 0..len-1 and the digest of their bytes.
type sequence struct {
	cells []int32
	chain uint64
}

var _ engine.LayerCompute = (*Engine)(nil)

// Open makes an engine with its own empty KV memory.
func Open(cfg Config) (*Engine, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	e := &Engine{cfg: cfg, mem: newMemory(&cfg), seqs: make([]sequence, cfg.MaxSeqs), cell: make([]byte, cfg.cellBytes())}
	for i := range e.seqs {
		e.seqs[i].chain = chainStart(cfg.Seed)
	}
	weights := sha256.Sum256(fmt.Appendf(nil, "sim seed=%d eos=%d,%d", cfg.Seed, cfg.EOSEvery, cfg.EOSAt))
	e.info = engine.Info{
		Engine:      "sim 1",
		ModelDigest: hex.EncodeToString(weights[:]),
		KVLayout:    cfg.layout(),
		Attention:   "hash",
		ChunkTokens: cfg.ChunkTokens,
		ModelName:   cfg.ModelName, ModelPath: "sim",
		VocabSize: vocabSize, ContextLen: cfg.ContextLen, KVCells: cfg.KVCells, MaxSeqs: cfg.MaxSeqs,
		Threads: 1, ChatTemplate: chatTemplate, BOS: tokBOS, EOS: tokEOS,
	}
	if cfg.paged() {
		e.info.Shards = cfg.shards()
	}
	return e, nil
}

// layout names what must be equal on both sides.
func (c *Config) layout() string {
	if c.paged() {
		return c.shards().Model.String()
	}
	return fmt.Sprintf("layers=%d k=u8x%d v=u8x%d heads=%d", c.Layers, c.rowBytes(), c.rowBytes(), c.KVHeads)
}

// Info is constant.
func (e *Engine) Info() engine.Info { return e.info }

// Tokenizer turns each byte into one token.
func (e *Engine) Tokenizer() engine.Tokenizer { return tokenizer{} }

// enter claims the engine for one call; leave gives it back.
func (e *Engine) enter() {
	if !e.busy.CompareAndSwap(false, true) {
		panic("sim: two engine calls at the same time: a context has one owner")
	}
	if e.shut {
		panic("sim: engine used after Close")
	}
}

func (e *Engine) leave() { e.busy.Store(false) }

func (e *Engine) hook(op Op, s engine.Seq, pos, rows int) error {
	if e.cfg.Hook == nil {
		return nil
	}
	if err := e.cfg.Hook(Call{Op: op, Seq: s, Pos: pos, Rows: rows}); err != nil {
		return fmt.Errorf("sim: %s: %w", op, err)
	}
	return nil
}

func (e *Engine) seq(s engine.Seq) (*sequence, error) {
	if s < 0 || int(s) >= len(e.seqs) {
		return nil, fmt.Errorf("sim: sequence %d does not exist (have %d)", s, len(e.seqs))
	}
	return &e.seqs[s], nil
}

// wait lets d pass, or ctx end. It is the only place where time passes.
func wait(ctx context.Context, d time.Duration) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", engine.ErrInterrupted, err)
	}
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", engine.ErrInterrupted, ctx.Err())
	}
}

// compute appends token t to q. The caller has checked that a cell is free.
func (e *Engine) compute(q *sequence, t engine.Token) {
	fillCell(&e.cfg, q.chain, t, e.cell)
	e.append(q, e.cell)
}

// append stores one position's bytes and folds in what the memory then holds.
func (e *Engine) append(q *sequence, cell []byte) {
	c := e.mem.take()
	e.mem.store(c, cell)
	q.cells = append(q.cells, c)
	e.fold(q, c)
}

// fold adds a cell's bytes to the digest of the positions before it. Ranks that should hold the same bytes
// and do not change it too.
func (e *Engine) fold(q *sequence, c int32) {
	same := e.mem.load(c, e.cell)
	q.chain = foldCell(q.chain, e.cell)
	if !same {
		q.chain = mix(^q.chain)
	}
}

// Prefill computes the KV of tokens, which must continue seq.
func (e *Engine) Prefill(ctx context.Context, s engine.Seq, tokens []engine.Token, pos int) error {
	e.enter()
	defer e.leave()
	if err := e.hook(OpPrefill, s, pos, len(tokens)); err != nil {
		return err
	}
	q, err := e.chunkOf(s, tokens, pos)
	if err != nil {
		return err
	}
	if err := wait(ctx, e.chunkTime(len(tokens))); err != nil {
		return err
	}
	for _, t := range tokens {
		e.compute(q, t)
	}
	return nil
}

// chunkOf is the sequence that tokens continue, if they may.
func (e *Engine) chunkOf(s engine.Seq, tokens []engine.Token, pos int) (*sequence, error) {
	q, err := e.seq(s)
	if err != nil {
		return nil, err
	}
	switch {
	case len(tokens) == 0 || len(tokens) > e.cfg.ChunkTokens:
		return nil, fmt.Errorf("sim: prefill %d tokens, want 1 to %d", len(tokens), e.cfg.ChunkTokens)
	case pos != len(q.cells):
		return nil, fmt.Errorf("sim: prefill at position %d of a sequence of %d", pos, len(q.cells))
	case pos+len(tokens) > e.cfg.ContextLen:
		return nil, fmt.Errorf("sim: prefill up to position %d, the context ends at %d", pos+len(tokens), e.cfg.ContextLen)
	case len(tokens) > e.mem.freeCells():
		return nil, fmt.Errorf("sim: prefill %d tokens with %d cells free: %w", len(tokens), e.mem.freeCells(), engine.ErrNoCells)
	}
	return q, nil
}

// chunkTime is what the prefill of n tokens costs.
func (e *Engine) chunkTime(n int) time.Duration {
	return e.cfg.PrefillChunkTime + time.Duration(n)*e.cfg.PrefillTokenTime
}

// Step computes one token of each row and samples the next.
func (e *Engine) Step(ctx context.Context, rows []engine.Row) ([]engine.Sampled, error) {
	e.enter()
	defer e.leave()
	if len(rows) == 0 {
		return nil, errors.New("sim: step without rows")
	}
	if err := e.hook(OpStep, rows[0].Seq, rows[0].Pos, len(rows)); err != nil {
		return nil, err
	}
	if err := e.checkRows(rows); err != nil {
		return nil, err
	}
	if err := wait(ctx, e.cfg.StepTime+time.Duration(len(rows))*e.cfg.StepRowTime); err != nil {
		return nil, err
	}
	out := make([]engine.Sampled, len(rows))
	for i, r := range rows {
		q := &e.seqs[r.Seq]
		e.compute(q, r.Token)
		if e.cfg.Recheck {
			e.digest(q)
		}
		out[i] = r.Sampler.(*sampler).sample(&e.cfg, q.chain, r.Pos, r.Logprobs)
	}
	return out, nil
}

func (e *Engine) checkRows(rows []engine.Row) error {
	seen := make(map[engine.Seq]bool, len(rows))
	for _, r := range rows {
		q, err := e.seq(r.Seq)
		if err != nil {
			return err
		}
		switch _, mine := r.Sampler.(*sampler); {
		case seen[r.Seq]:
			return fmt.Errorf("sim: step: sequence %d twice in a batch", r.Seq)
		case r.Pos != len(q.cells):
			return fmt.Errorf("sim: step at position %d of sequence %d, which holds %d", r.Pos, r.Seq, len(q.cells))
		case r.Pos >= e.cfg.ContextLen:
			return fmt.Errorf("sim: step at position %d, the context ends at %d", r.Pos, e.cfg.ContextLen)
		case !mine:
			return fmt.Errorf("sim: step: sampler of type %T is not of this engine", r.Sampler)
		}
		seen[r.Seq] = true
	}
	if len(rows) > e.mem.freeCells() {
		return fmt.Errorf("sim: step of %d rows with %d cells free: %w", len(rows), e.mem.freeCells(), engine.ErrNoCells)
	}
	return nil
}

// digest folds all bytes of q from the memory anew.
func (e *Engine) digest(q *sequence) {
	q.chain = chainStart(e.cfg.Seed)
	for _, c := range q.cells {
		e.fold(q, c)
	}
}

// NewSampler makes the state of one choice.
func (e *Engine) NewSampler(s engine.Sampling) (engine.Sampler, error) {
	e.enter()
	defer e.leave()
	if err := e.hook(OpNewSampler, 0, 0, 0); err != nil {
		return nil, err
	}
	return newSampler(s), nil
}

// CopySeq makes dst share src's cells.
func (e *Engine) CopySeq(src, dst engine.Seq) error {
	e.enter()
	defer e.leave()
	if err := e.hook(OpCopySeq, src, 0, 0); err != nil {
		return err
	}
	a, err := e.seq(src)
	if err != nil {
		return err
	}
	b, err := e.seq(dst)
	if err != nil {
		return err
	}
	if len(b.cells) > 0 {
		return fmt.Errorf("sim: copy to sequence %d, which holds %d positions", dst, len(b.cells))
	}
	for _, c := range a.cells {
		e.mem.refs[c]++
	}
	b.cells, b.chain = append([]int32(nil), a.cells...), a.chain
	return nil
}

// FreeSeq empties a slot.
func (e *Engine) FreeSeq(s engine.Seq) {
	e.enter()
	defer e.leave()
	_ = e.hook(OpFreeSeq, s, 0, 0)
	q, err := e.seq(s)
	if err != nil {
		return
	}
	for _, c := range q.cells {
		e.mem.drop(c)
	}
	*q = sequence{chain: chainStart(e.cfg.Seed)}
}

// UsedCells counts cells held by at least one sequence.
func (e *Engine) UsedCells() int {
	e.enter()
	defer e.leave()
	return e.cfg.KVCells - e.mem.freeCells()
}

// Close frees the memory. Any later call panics.
func (e *Engine) Close() error {
	e.enter()
	defer e.leave()
	e.shut, e.mem, e.seqs = true, nil, nil
	return nil
}
