package sim

import (
	"context"
	"fmt"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/kv"
)

// growing is a chunk whose layers are computed one after the other.
type growing struct {
	q      *sequence // nil: none
	cells  []int32
	layers int  // whose bytes are in the memory
	open   bool // computed runs: ExportLayers may be called
}

// LayerGroups says in how many parts a chunk comes.
func (e *Engine) LayerGroups() int {
	if e.cfg.LayerGroup == 0 {
		return 1
	}
	return (e.cfg.Layers + e.cfg.LayerGroup - 1) / e.cfg.LayerGroup
}

// group is the layers [from,to) of group g.
func (e *Engine) group(g int) (from, to int) {
	if e.cfg.LayerGroup == 0 {
		return 0, e.cfg.Layers
	}
	return g * e.cfg.LayerGroup, min((g+1)*e.cfg.LayerGroup, e.cfg.Layers)
}

// PrefillLayers is Prefill with a call after each group of layers. The bytes of a layer come to the memory when
// its time has passed and not before, so that what is exported too early is wrong.
func (e *Engine) PrefillLayers(ctx context.Context, s engine.Seq, tokens []engine.Token, pos int, computed func(g int) error) error {
	e.enter()
	defer e.leave()
	if err := e.hook(OpPrefill, s, pos, len(tokens)); err != nil {
		return err
	}
	q, err := e.chunkOf(s, tokens, pos)
	if err != nil {
		return err
	}
	e.grow = growing{q: q}
	done := false
	defer func() {
		if !done { // an error, or a panic of computed
			for _, c := range e.grow.cells {
				e.mem.drop(c)
			}
		}
		e.grow = growing{}
	}()
	bytes := e.foresee(q, tokens)
	for range tokens {
		e.grow.cells = append(e.grow.cells, e.mem.take())
	}
	for g := range e.LayerGroups() {
		if err := e.layers(ctx, g, bytes); err != nil {
			return err
		}
		e.grow.open = true
		err := computed(g)
		if e.grow.open = false; err != nil {
			return fmt.Errorf("sim: layers of a chunk: %w", err)
		}
	}
	done = true
	q.cells = append(q.cells, e.grow.cells...)
	for _, c := range e.grow.cells {
		e.fold(q, c)
	}
	return nil
}

// foresee is what the bytes of tokens will be, position after position: those of one follow from all layers of
// the one before.
func (e *Engine) foresee(q *sequence, tokens []engine.Token) []byte {
	size, chain := e.cfg.cellBytes(), q.chain
	bytes := make([]byte, len(tokens)*size)
	for i, t := range tokens {
		cell := bytes[i*size : (i+1)*size]
		fillCell(&e.cfg, chain, t, cell)
		chain = foldCell(chain, cell)
	}
	return bytes
}

// layers computes group g of the growing chunk.
func (e *Engine) layers(ctx context.Context, g int, bytes []byte) error {
	from, to := e.group(g)
	n, size := len(e.grow.cells), e.cfg.cellBytes()
	until := func(layer int) time.Duration {
		return e.chunkTime(n) * time.Duration(layer) / time.Duration(e.cfg.Layers)
	}
	if err := wait(ctx, until(to)-until(from)); err != nil {
		return err
	}
	for i, c := range e.grow.cells {
		e.mem.storeLayers(c, bytes[i*size:(i+1)*size], from, to)
	}
	e.grow.layers = to
	return nil
}

// ExportLayers copies group g of positions [p0,p1).
func (e *Engine) ExportLayers(s engine.Seq, p0, p1, g int, dst [][]byte) ([]kv.Range, error) {
	if !e.grow.open {
		e.enter()
		defer e.leave()
	}
	if g < 0 || g >= e.LayerGroups() {
		return nil, fmt.Errorf("sim: layer group %d does not exist (have %d)", g, e.LayerGroups())
	}
	from, to := e.group(g)
	return e.export(s, p0, p1, from, to, dst)
}
