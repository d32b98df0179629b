package llamacpp

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/hybridgroup/yzma/pkg/llama"
)

// ErrUsage: a call with a sequence, position, token or size that cannot be. Nothing
// was changed. It is a mistake of the caller.
var ErrUsage = errors.New("llamacpp: wrong use")

func usage(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUsage, fmt.Sprintf(format, args...))
}

// BadLogitsError: the model's output for one sequence is not a number, because its
// KV is damaged or the model is. The step changed nothing; without that sequence it
// can be tried again.
type BadLogitsError struct{ Seq engine.Seq }

// Error names the sequence.
func (e *BadLogitsError) Error() string {
	return fmt.Sprintf("llamacpp: the model's output for sequence %d is not a number: its KV or the model is damaged", e.Seq)
}

func (e *Engine) checkSeq(s engine.Seq) error {
	if e.closed {
		return ErrClosed
	}
	if e.broken != nil {
		return e.broken
	}
	if s < 0 || int(s) >= e.cfg.MaxSeqs {
		return usage("sequence %d of %d", s, e.cfg.MaxSeqs)
	}
	return nil
}

// checkNext tells whether n tokens at pos continue seq within the context.
func (e *Engine) checkNext(s engine.Seq, pos, n int) error {
	if err := e.checkSeq(s); err != nil {
		return err
	}
	if have := e.place.length(int(s)); pos != have {
		return usage("sequence %d holds %d positions, next cannot be %d", s, have, pos)
	}
	if pos+n > e.cfg.ContextLen {
		return usage("positions %d to %d of sequence %d exceed the context of %d", pos, pos+n-1, s, e.cfg.ContextLen)
	}
	return nil
}

func (e *Engine) checkToken(t engine.Token) error {
	if t < 0 || int(t) >= e.info.VocabSize {
		return usage("token %d of a vocabulary of %d", t, e.info.VocabSize)
	}
	return nil
}

// put writes row i of the batch.
func (e *Engine) put(i int, t engine.Token, pos int, s llama.SeqId, output bool) {
	e.cells.token[i] = llama.Token(t)
	e.cells.pos[i] = llama.Pos(pos)
	e.cells.seqs[i] = 1
	*e.cells.seq[i] = s
	e.cells.logits[i] = 0
	if output {
		e.cells.logits[i] = 1
	}
}

// drop removes the positions from p0 on of a library sequence.
func (e *Engine) drop(s llama.SeqId, p0 int) {
	// Fails only without a memory, or for partial removal from recurrent state; Open excludes both.
	_, _ = llama.MemorySeqRm(e.mem, s, llama.Pos(p0), -1)
}

// decode computes the first n rows of the batch. After an error some of their cells
// may exist; the caller drops them.
func (e *Engine) decode(ctx context.Context, n int) error {
	if ctx.Err() != nil {
		return interrupted(ctx)
	}
	if ctx.Done() != nil {
		stop := e.intr.arm(ctx)
		defer e.intr.disarm(stop)
	}
	e.batch.NTokens = int32(n)
	rc, err := llama.Decode(e.ctx, e.batch)
	if err != nil {
		return fmt.Errorf("llamacpp: decode: %w", err)
	}
	switch rc {
	case 0:
		return llama.Synchronize(e.ctx)
	case 1:
		return fmt.Errorf("%w: the library found no place for %d tokens", engine.ErrNoCells, n)
	case 2:
		return interrupted(ctx)
	default:
		return fmt.Errorf("llamacpp: decode of %d tokens failed with code %d", n, rc)
	}
}

// Prefill implements [engine.Compute]. pos must be the length of seq.
func (e *Engine) Prefill(ctx context.Context, seq engine.Seq, tokens []engine.Token, pos int) error {
	n := len(tokens)
	if n == 0 || n > e.cfg.ChunkTokens {
		return usage("prefill of %d tokens, not 1 to %d", n, e.cfg.ChunkTokens)
	}
	if err := e.checkNext(seq, pos, n); err != nil {
		return err
	}
	for i, t := range tokens {
		if err := e.checkToken(t); err != nil {
			return err
		}
		e.put(i, t, pos+i, libSeq(seq), false)
	}
	g, err := e.reserve(n, seq)
	if err != nil {
		return err
	}
	if err := e.decode(ctx, n); err != nil {
		e.drop(libSeq(seq), pos)
		return fmt.Errorf("prefill sequence %d positions %d to %d: %w", seq, pos, pos+n-1, e.giveUp(g, err))
	}
	return e.take(g)
}

// Step implements [engine.Compute]. A row whose output is not a number fails the
// step with a [*BadLogitsError] before any sampler has advanced.
func (e *Engine) Step(ctx context.Context, rows []engine.Row) ([]engine.Sampled, error) {
	if err := e.checkRows(rows); err != nil {
		return nil, err
	}
	e.rowSeqs = e.rowSeqs[:0]
	for _, r := range rows {
		e.rowSeqs = append(e.rowSeqs, r.Seq)
	}
	g, err := e.reserve(1, e.rowSeqs...)
	if err != nil {
		return nil, err
	}
	e.putRows(rows, g)
	out := make([]engine.Sampled, len(rows))
	if err := e.computeRows(ctx, rows, out); err != nil {
		for _, r := range rows {
			e.drop(libSeq(r.Seq), r.Pos)
		}
		return nil, fmt.Errorf("step of %d rows: %w", len(rows), e.giveUp(g, err))
	}
	e.place.commit(g)
	for i, r := range rows {
		if s := r.Sampler.(*sampler); s.chain != 0 {
			out[i].Token = s.sample(e.ctx, e.rowAt[i])
		}
		if r.Logprobs > 0 {
			logits, err := e.logits(e.rowAt[i])
			if err != nil {
				return nil, err
			}
			out[i].Logprob, out[i].Top = logprobs(logits, out[i].Token, r.Logprobs)
		}
	}
	e.broken = e.settle()
	return out, nil
}

// putRows writes the rows into the batch in the order of their cells, which is the
// order in which the library gives cells to a batch. rowAt[i] is the place of rows[i].
func (e *Engine) putRows(rows []engine.Row, g *grant) {
	e.rowAt = e.rowAt[:0]
	for i, r := range rows {
		at, _ := slices.BinarySearch(g.cells, g.parts[i].cells[0])
		e.rowAt = append(e.rowAt, int32(at))
		e.put(at, r.Token, r.Pos, libSeq(r.Seq), true)
	}
}

// computeRows decodes and puts each row's most likely token into out.
func (e *Engine) computeRows(ctx context.Context, rows []engine.Row, out []engine.Sampled) error {
	if err := e.decode(ctx, len(rows)); err != nil {
		return err
	}
	for i, r := range rows {
		logits, err := e.logits(e.rowAt[i])
		if err != nil {
			return err
		}
		best, ok := argmax(logits)
		if !ok {
			return &BadLogitsError{Seq: r.Seq}
		}
		out[i].Token = engine.Token(best)
	}
	return nil
}

// logits is the library's row i, valid until the next decode.
func (e *Engine) logits(i int32) ([]float32, error) {
	logits, err := llama.GetLogitsIth(e.ctx, i, e.info.VocabSize)
	if err == nil && logits == nil {
		err = errors.New("none computed")
	}
	if err != nil {
		return nil, fmt.Errorf("llamacpp: logits of row %d: %w", i, err)
	}
	return logits, nil
}

func (e *Engine) checkRows(rows []engine.Row) error {
	if len(rows) == 0 || len(rows) > e.cfg.BatchRows {
		return usage("step of %d rows, not 1 to %d", len(rows), e.cfg.BatchRows)
	}
	e.step++
	for _, r := range rows {
		if err := e.checkNext(r.Seq, r.Pos, 1); err != nil {
			return err
		}
		if e.seen[r.Seq] == e.step {
			return usage("sequence %d twice in one step", r.Seq)
		}
		e.seen[r.Seq] = e.step
		if err := e.checkToken(r.Token); err != nil {
			return err
		}
		if s, ok := r.Sampler.(*sampler); !ok || s == nil || s.closed {
			return usage("sequence %d has no open sampler of this engine", r.Seq)
		}
		if r.Logprobs < 0 {
			return usage("%d logprobs", r.Logprobs)
		}
	}
	return nil
}
