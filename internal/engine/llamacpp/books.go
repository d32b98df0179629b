package llamacpp

// segment is a run of cells that a set of sequences share. Cells of one segment were
// appended while exactly one sequence owned it.
type segment struct {
	cells int // >= 1
	refs  int // sequences that hold it, >= 1
}

// books count the KV cells. A sequence is a list of segments that covers positions
// 0..length-1; sharing a sequence shares its segments. Invariant: used is the sum of
// cells over the distinct segments, and used <= the context's cells.
type books struct {
	seqs []account
	used int
}

type account struct {
	segs   []*segment
	length int // positions held, the sum over segs
}

func newBooks(seqs int) *books { return &books{seqs: make([]account, seqs)} }

func (b *books) length(seq int) int { return b.seqs[seq].length }

// grow appends n cells to a sequence.
func (b *books) grow(seq, n int) {
	a := &b.seqs[seq]
	if last := len(a.segs) - 1; last >= 0 && a.segs[last].refs == 1 {
		a.segs[last].cells += n
	} else {
		a.segs = append(a.segs, &segment{cells: n, refs: 1})
	}
	a.length += n
	b.used += n
}

// share makes the empty sequence dst hold all cells of src.
func (b *books) share(src, dst int) {
	from := &b.seqs[src]
	for _, s := range from.segs {
		s.refs++
	}
	b.seqs[dst] = account{segs: append(b.seqs[dst].segs[:0], from.segs...), length: from.length}
}

// free empties a sequence; cells that no other sequence holds are given back.
func (b *books) free(seq int) {
	a := &b.seqs[seq]
	for i, s := range a.segs {
		if s.refs--; s.refs == 0 {
			b.used -= s.cells
		}
		a.segs[i] = nil
	}
	a.segs, a.length = a.segs[:0], 0
}
