package sim

import (
	"context"
	"fmt"

	"github.com/baton-pd/baton/internal/engine"
)

// SwapOut copies seq's KV to host memory; seq keeps it.
func (e *Engine) SwapOut(s engine.Seq) ([]byte, error) {
	e.enter()
	defer e.leave()
	if err := e.hook(OpSwapOut, s, 0, 0); err != nil {
		return nil, err
	}
	q, err := e.seq(s)
	if err != nil {
		return nil, err
	}
	_ = wait(context.Background(), e.cfg.SwapTime)
	cb := e.cfg.cellBytes()
	out := make([]byte, len(q.cells)*cb)
	for i, c := range q.cells {
		e.mem.load(c, out[i*cb:(i+1)*cb])
	}
	return out, nil
}

// SwapIn brings saved KV back to an empty seq.
func (e *Engine) SwapIn(s engine.Seq, saved []byte) error {
	e.enter()
	defer e.leave()
	cb := e.cfg.cellBytes()
	if err := e.hook(OpSwapIn, s, 0, len(saved)/cb); err != nil {
		return err
	}
	q, err := e.seq(s)
	if err != nil {
		return err
	}
	switch {
	case len(q.cells) > 0:
		return fmt.Errorf("sim: swap in to sequence %d, which holds %d positions", s, len(q.cells))
	case len(saved)%cb != 0:
		return fmt.Errorf("sim: swap in %d bytes, want a multiple of %d", len(saved), cb)
	case len(saved)/cb > e.mem.freeCells():
		return fmt.Errorf("sim: swap in %d positions with %d cells free: %w", len(saved)/cb, e.mem.freeCells(), engine.ErrNoCells)
	}
	_ = wait(context.Background(), e.cfg.SwapTime)
	for ; len(saved) > 0; saved = saved[cb:] {
		e.append(q, saved[:cb])
	}
	return nil
}
