package llamacpp

import (
	"fmt"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/hybridgroup/yzma/pkg/llama"
)

// ChunkBytes implements [engine.Compute].
func (e *Engine) ChunkBytes(n int) int { return e.layout.size(n) }

// Export implements [engine.Compute]. With a single part the library writes straight into it.
func (e *Engine) Export(seq engine.Seq, p0, p1 int, dst [][]byte) error {
	if err := e.checkSeq(seq); err != nil {
		return err
	}
	if have := e.place.length(int(seq)); p0 < 0 || p0 >= p1 || p1 > have {
		return usage("export of positions [%d,%d) of sequence %d, which holds %d", p0, p1, seq, have)
	}
	n := p1 - p0
	size := e.layout.size(n)
	if got := total(dst); got != size {
		return usage("%d bytes for a chunk of %d", got, size)
	}
	block := dst[0]
	if len(block) != size {
		block = e.buffer(size)
	}
	if err := llama.MemorySeqCp(e.mem, libSeq(seq), scratch, llama.Pos(p0), llama.Pos(p1)); err != nil {
		return fmt.Errorf("llamacpp: export: %w", err)
	}
	defer e.drop(scratch, 0)
	if err := e.getState(scratch, block); err != nil {
		return fmt.Errorf("llamacpp: export positions [%d,%d) of sequence %d: %w", p0, p1, seq, err)
	}
	e.spare = e.layout.sort(block, n, e.spare)
	if err := e.layout.verify(block, p0, n); err != nil {
		return fmt.Errorf("llamacpp: export positions [%d,%d) of sequence %d: the library wrote %w", p0, p1, seq, err)
	}
	if len(dst[0]) != size {
		for _, part := range dst {
			block = block[copy(part, block):]
		}
	}
	return nil
}

// Import implements [engine.Compute]. A single part is read in place: nobody may write to
// it meanwhile.
func (e *Engine) Import(seq engine.Seq, p0, p1 int, src [][]byte) error {
	n := p1 - p0
	if n <= 0 {
		return usage("import of positions [%d,%d)", p0, p1)
	}
	if err := e.checkNext(seq, p0, n); err != nil {
		return err
	}
	size := e.layout.size(n)
	if got := total(src); got != size {
		return fmt.Errorf("%w: %d bytes, not the %d of %d tokens", engine.ErrBadChunk, got, size, n)
	}
	block := src[0]
	if len(block) != size {
		block = e.buffer(size)[:0]
		for _, part := range src {
			block = append(block, part...)
		}
	}
	if err := e.layout.verify(block, p0, n); err != nil {
		return fmt.Errorf("%w: %w", engine.ErrBadChunk, err)
	}
	if err := e.layout.finite(block, n); err != nil {
		return fmt.Errorf("%w: %w", engine.ErrBadChunk, err)
	}
	g, err := e.reserve(n, seq)
	if err != nil {
		return err
	}
	if err := e.setState(scratch, block); err != nil {
		e.drop(scratch, 0)
		return fmt.Errorf("llamacpp: import positions [%d,%d) into sequence %d: %w", p0, p1, seq, e.giveUp(g, err))
	}
	err = llama.MemorySeqCp(e.mem, scratch, libSeq(seq), -1, -1)
	e.drop(scratch, 0)
	if err != nil {
		return fmt.Errorf("llamacpp: import: %w", e.giveUp(g, err))
	}
	return e.take(g)
}

// CopySeq implements [engine.Compute]: dst shares the cells of src.
func (e *Engine) CopySeq(src, dst engine.Seq) error {
	if err := e.checkSeq(src); err != nil {
		return err
	}
	if err := e.checkEmpty(dst); err != nil {
		return err
	}
	if src == dst {
		return usage("copy of sequence %d onto itself", src)
	}
	if err := llama.MemorySeqCp(e.mem, libSeq(src), libSeq(dst), -1, -1); err != nil {
		return fmt.Errorf("llamacpp: copy sequence %d to %d: %w", src, dst, err)
	}
	e.place.share(int(src), int(dst))
	return nil
}

func (e *Engine) checkEmpty(s engine.Seq) error {
	if err := e.checkSeq(s); err != nil {
		return err
	}
	if n := e.place.length(int(s)); n != 0 {
		return usage("sequence %d is not empty: it holds %d positions", s, n)
	}
	return nil
}

// FreeSeq implements [engine.Compute].
func (e *Engine) FreeSeq(seq engine.Seq) {
	if e.closed || seq < 0 || int(seq) >= e.cfg.MaxSeqs {
		return
	}
	if e.place.length(int(seq)) == 0 {
		return
	}
	e.drop(libSeq(seq), 0)
	e.place.free(int(seq))
	if err := e.settle(); err != nil && e.broken == nil {
		e.broken = err
	}
}

// SwapOut implements [engine.Compute]. The sequence stays; the bytes are the caller's.
func (e *Engine) SwapOut(seq engine.Seq) ([]byte, error) {
	if err := e.checkSeq(seq); err != nil {
		return nil, err
	}
	n := e.place.length(int(seq))
	if n == 0 {
		return nil, usage("swap out of empty sequence %d", seq)
	}
	saved := make([]byte, e.layout.size(n))
	if err := e.Export(seq, 0, n, [][]byte{saved}); err != nil {
		return nil, err
	}
	return saved, nil
}

// SwapIn implements [engine.Compute].
func (e *Engine) SwapIn(seq engine.Seq, saved []byte) error {
	if err := e.checkEmpty(seq); err != nil {
		return err
	}
	n := e.layout.tokens(len(saved))
	if n <= 0 {
		return fmt.Errorf("%w: %d bytes are no whole number of tokens", engine.ErrBadChunk, len(saved))
	}
	return e.Import(seq, 0, n, [][]byte{saved})
}

// getState copies a library sequence into exactly block.
func (e *Engine) getState(s llama.SeqId, block []byte) error {
	if want := llama.StateSeqGetSizeExt(e.ctx, s, 0); want != uint64(len(block)) {
		return fmt.Errorf("the library has %d bytes, not %d", want, len(block))
	}
	if n := llama.StateSeqGetDataExt(e.ctx, block, s, 0); n != uint64(len(block)) {
		return fmt.Errorf("the library wrote %d of %d bytes", n, len(block))
	}
	return nil
}

// setState replaces a library sequence by a verified block.
func (e *Engine) setState(s llama.SeqId, block []byte) error {
	switch n := llama.StateSeqSetDataExt(e.ctx, block, s, 0); n {
	case uint64(len(block)):
		return nil
	case 0:
		return fmt.Errorf("%w: the library found no place", engine.ErrNoCells)
	default:
		return fmt.Errorf("the library read %d of %d bytes", n, len(block))
	}
}

// buffer is the reused memory for a chunk in one piece.
func (e *Engine) buffer(size int) []byte {
	if cap(e.joint) < size {
		e.joint = make([]byte, size)
	}
	return e.joint[:size]
}

func total(parts [][]byte) int {
	n := 0
	for _, p := range parts {
		n += len(p)
	}
	return n
}
