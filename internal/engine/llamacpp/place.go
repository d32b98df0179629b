package llamacpp

import "slices"

// Where tokens lie in the cache decides their bits: the attention kernels walk the
// cells in order, in tiles of 64, so the same prompt gives slightly different K and V
// at another alignment, and a different token where two are nearly equal. The library
// places tokens in the first empty cells it finds. The placer makes that choice its own:
//
//   - Sequences get whole blocks of 64 cells, in rising order as long as there are
//     higher free ones. A tile never holds two sequences, and what other requests do
//     changes nothing in it.
//   - Every cell below the highest block in use is either used or holds a filler token of
//     a sequence nobody reads. Before a batch, exactly the cells it shall get are emptied.
//
// The placer is only bookkeeping; the caller tells the library (cells.go). If the two ever
// disagreed, tokens would lie elsewhere, never on top of each other: the library still
// chooses among cells that are empty.

// blockCells is the tile of the attention kernels.
const blockCells = 64

// stepTokens: the kernels take batches of fewer than 64 rows row by row, as in a step, and larger ones in tiles.
const stepTokens = 32

type cellState uint8

const (
	cellEmpty  cellState = iota // holds nothing
	cellFiller                  // holds a filler token
	cellUsed                    // holds a token of a sequence
)

// segment is a run of tokens that a set of sequences share, with the cells they lie in.
// Its tokens were appended while exactly one sequence owned it.
type segment struct {
	cells []int32
	refs  int // sequences that hold it, >= 1
}

// account is one sequence: its segments cover positions 0..length-1.
type account struct {
	segs   []*segment
	length int
	block  int // where the next token goes; -1: a new block
	fill   int // cells of block that were given out, < blockCells
	last   int // highest block it has, -1 if none
}

// placer counts and places cells. Invariants: used is the sum over distinct segments;
// holds[b] counts the used cells of block b plus the accounts whose block it is; cells at
// or above top*blockCells are empty; between operations no cell below it is.
type placer struct {
	seqs  []account
	used  int
	state []cellState
	holds []int
	top   int // blocks
}

// grant is the cells chosen for a batch, to be committed or revoked.
type grant struct {
	parts []grantPart
	cells []int32 // all of them, rising
	undo  []account
}

type grantPart struct {
	seq   int
	cells []int32 // rising; the part's tokens in order
}

func newPlacer(seqs, cells int) *placer {
	p := &placer{seqs: make([]account, seqs), state: make([]cellState, cells), holds: make([]int, cells/blockCells)}
	for i := range p.seqs {
		p.seqs[i] = account{block: -1, last: -1}
	}
	return p
}

func (p *placer) length(seq int) int { return p.seqs[seq].length }

// plan chooses cells for n more tokens of a sequence and adds them to g. False: there
// are none; g must then be revoked.
func (p *placer) plan(g *grant, seq, n int) bool {
	a := &p.seqs[seq]
	g.undo = append(g.undo, *a)
	part := grantPart{seq: seq, cells: make([]int32, 0, n)}
	for range n {
		if a.block < 0 {
			b, ok := p.freeBlock(a.last)
			if !ok {
				p.keep(g, part)
				return false
			}
			a.block, a.fill, a.last = b, 0, max(a.last, b)
			p.holds[b]++
			p.top = max(p.top, b+1)
		}
		c := a.block*blockCells + a.fill
		part.cells = append(part.cells, int32(c))
		p.holds[a.block]++
		if a.fill++; a.fill == blockCells {
			p.holds[a.block]--
			a.block = -1
		}
	}
	p.keep(g, part)
	return true
}

func (p *placer) keep(g *grant, part grantPart) {
	// Tokens of one batch get rising cells whatever the order of their blocks is.
	slices.Sort(part.cells)
	g.parts = append(g.parts, part)
	g.cells = append(g.cells, part.cells...)
}

// freeBlock is the lowest free block above last, or else the lowest.
func (p *placer) freeBlock(last int) (int, bool) {
	for _, from := range []int{last + 1, 0} {
		for b := from; b < len(p.holds); b++ {
			if p.holds[b] == 0 {
				return b, true
			}
		}
	}
	return 0, false
}

// commit makes the planned cells part of their sequences.
func (p *placer) commit(g *grant) {
	for _, part := range g.parts {
		a := &p.seqs[part.seq]
		n := len(part.cells)
		if last := len(a.segs) - 1; last >= 0 && a.segs[last].refs == 1 {
			a.segs[last].cells = append(a.segs[last].cells, part.cells...)
		} else {
			a.segs = append(a.segs, &segment{cells: part.cells, refs: 1})
		}
		a.length += n
		p.used += n
		for _, c := range part.cells {
			p.state[c] = cellUsed
		}
	}
}

// revoke undoes a plan. The cells that were emptied for it stay empty.
func (p *placer) revoke(g *grant) {
	for i := len(g.parts) - 1; i >= 0; i-- {
		part, was := g.parts[i], g.undo[i]
		a := &p.seqs[part.seq]
		for _, c := range part.cells {
			p.holds[int(c)/blockCells]--
		}
		if a.block >= 0 {
			p.holds[a.block]--
		}
		if was.block >= 0 {
			p.holds[was.block]++
		}
		*a = was
	}
}

// share makes the empty sequence dst hold all tokens of src. Its own next tokens
// go to a block of its own.
func (p *placer) share(src, dst int) {
	from := &p.seqs[src]
	for _, s := range from.segs {
		s.refs++
	}
	p.seqs[dst] = account{segs: slices.Clone(from.segs), length: from.length, block: -1, last: from.last}
}

// free empties a sequence. Cells that no other sequence holds become empty.
func (p *placer) free(seq int) {
	a := &p.seqs[seq]
	for _, s := range a.segs {
		if s.refs--; s.refs > 0 {
			continue
		}
		p.used -= len(s.cells)
		for _, c := range s.cells {
			p.state[c] = cellEmpty
			p.holds[int(c)/blockCells]--
		}
	}
	if a.block >= 0 {
		p.holds[a.block]--
	}
	*a = account{block: -1, last: -1}
}

// lower drops free blocks at the top. The fillers in them must then be removed; from
// is the first such cell.
func (p *placer) lower() (from int, changed bool) {
	was := p.top
	for p.top > 0 && p.holds[p.top-1] == 0 {
		p.top--
	}
	from = p.top * blockCells
	for c := from; c < was*blockCells; c++ {
		p.state[c] = cellEmpty
	}
	return from, p.top != was
}

// empties lists the empty cells below top, rising, appended to buf.
func (p *placer) empties(buf []int32) []int32 {
	for c := range p.top * blockCells {
		if p.state[c] == cellEmpty {
			buf = append(buf, int32(c))
		}
	}
	return buf
}
