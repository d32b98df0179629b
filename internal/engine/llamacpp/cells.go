package llamacpp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/hybridgroup/yzma/pkg/llama"
)

// reserve chooses cells for n more tokens of each of the sequences and makes them the
// first empty ones of the library. An error leaves everything as it was. After the batch,
// call take or giveUp.
func (e *Engine) reserve(n int, seqs ...engine.Seq) (*grant, error) {
	total := n * len(seqs)
	if free := e.cfg.KVCells - e.place.used; total > free {
		return nil, fmt.Errorf("%w: %d wanted, %d of %d free", engine.ErrNoCells, total, free, e.cfg.KVCells)
	}
	g := &e.grant
	*g = grant{cells: g.cells[:0], parts: g.parts[:0], undo: g.undo[:0]}
	for _, s := range seqs {
		if !e.place.plan(g, int(s), n) {
			return nil, e.giveUp(g, fmt.Errorf("%w: %d wanted, no free block", engine.ErrNoCells, total))
		}
	}
	slices.Sort(g.cells)
	if err := e.clearFor(g); err != nil {
		return nil, e.giveUp(g, err)
	}
	return g, nil
}

// clearFor makes the cells of g empty and leaves no lower cell empty.
func (e *Engine) clearFor(g *grant) error {
	e.holes = e.place.empties(e.holes[:0])
	last := g.cells[len(g.cells)-1]
	for _, c := range e.holes {
		if c > last {
			break
		}
		if _, mine := slices.BinarySearch(g.cells, c); !mine {
			// A new block that the batch does not fill from its start on.
			if err := e.fill(e.holes); err != nil {
				return err
			}
			break
		}
	}
	for i := 0; i < len(g.cells); {
		j := i + 1
		for j < len(g.cells) && g.cells[j] == g.cells[j-1]+1 {
			j++
		}
		e.unfill(g.cells[i], g.cells[j-1]+1)
		i = j
	}
	return nil
}

// unfill removes the fillers of cells [from, to); it does not matter if there are none.
func (e *Engine) unfill(from, to int32) {
	for c := from; c < to; c++ {
		if e.place.state[c] == cellFiller {
			_, _ = llama.MemorySeqRm(e.mem, fillers, llama.Pos(from), llama.Pos(to))
			break
		}
	}
	for c := from; c < to; c++ {
		if e.place.state[c] == cellFiller {
			e.place.state[c] = cellEmpty
		}
	}
}

// take ends a batch that succeeded.
func (e *Engine) take(g *grant) error {
	e.place.commit(g)
	return e.settle()
}

// giveUp ends a batch that failed with err, after the caller has dropped its positions.
func (e *Engine) giveUp(g *grant, err error) error {
	e.place.revoke(g)
	return errors.Join(err, e.settle())
}

// settle restores the rule that no cell below the top is empty.
func (e *Engine) settle() error {
	if from, changed := e.place.lower(); changed {
		_, _ = llama.MemorySeqRm(e.mem, fillers, llama.Pos(from), -1)
	}
	e.holes = e.place.empties(e.holes[:0])
	return e.fill(e.holes)
}

// maxFill bounds the memory of one filling.
const maxFill = 2 * blockCells

// fill puts a filler token into each of the cells, which are the library's lowest empty
// ones, rising. A filler's position is its cell's number, so that it can be removed alone.
func (e *Engine) fill(cells []int32) error {
	for len(cells) > 0 {
		n := min(len(cells), maxFill)
		size := e.layout.size(n)
		e.filling = slices.Grow(e.filling[:0], size)[:size]
		block := e.filling
		clear(block) // zeros: the kernels multiply what masked cells hold, which must be finite
		e.layout.writeHead(block, n)
		for i, c := range cells[:n] {
			binary.LittleEndian.PutUint32(block[blobHead+i*cellBytes:], uint32(c))
			e.place.state[c] = cellFiller
		}
		if err := e.setState(scratch, block); err != nil {
			return fmt.Errorf("llamacpp: fill %d cells: %w", n, err)
		}
		if err := llama.MemorySeqCp(e.mem, scratch, fillers, -1, -1); err != nil {
			return fmt.Errorf("llamacpp: fill %d cells: %w", n, err)
		}
		e.drop(scratch, 0)
		cells = cells[n:]
	}
	return nil
}
