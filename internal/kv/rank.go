package kv

import (
	"math"
	"math/bits"
	"slices"
)

// Part is what a buffer holds of a layer.
type Part uint8

// The parts of a layer: K and V, or the latent alone.
const (
	PartK      Part = 0
	PartV      Part = 1
	PartLatent Part = 2 // MLA: the compressed vector that K and V are made from
)

// parts is how many kinds there are.
const parts = 3

// String survives unknown values.
func (p Part) String() string {
	switch p {
	case PartK:
		return "k"
	case PartV:
		return "v"
	case PartLatent:
		return "latent"
	default:
		return "unknown"
	}
}

// Buffer is one layer's K, V or latent rows in pages: page p begins at Base + p*ItemBytes
// of its region. Bytes of an item beyond the rows are never read or written.
type Buffer struct {
	Region    int    // registered memory; any number, equal for buffers in the same memory
	Base      uint64 // of page 0
	ItemBytes uint64 // from one page to the next, >= Layout.PagePartBytes
	Layer     int
	Part      Part
}

// row numbers layer and part: what is equal on both sides holds the same.
func (b Buffer) row() int { return b.Layer*parts + int(b.Part) }

// Layout is how one rank holds its share of the KV.
type Layout struct {
	Model
	Split
	TPRank, PPRank int // 0 <= TPRank < TP, 0 <= PPRank < PP
	Pages          int // page ids are below it in every buffer
	Buffers        []Buffer
}

// Heads are the KV heads [from, to) of this rank.
func (l *Layout) Heads() (from, to int) { return headsOf(l.KVHeads, l.TP, l.TPRank) }

// PagePartBytes is what one page of one buffer holds.
func (l *Layout) PagePartBytes() int {
	from, to := l.Heads()
	return l.PageTokens * (to - from) * l.HeadBytes()
}

// strides are the distances of two tokens and of two heads in a page, in bytes.
func (l *Layout) strides() (token, head uint64) {
	from, to := l.Heads()
	row := uint64(l.HeadBytes())
	if l.HeadsFirst {
		return row, row * uint64(l.PageTokens)
	}
	return row * uint64(to-from), row
}

// Validate checks a layout, also one that a peer describes. Its cost grows with the square of
// the buffers that share a region.
func (l *Layout) Validate() error {
	if err := (Shards{l.Model, l.Split}).Validate(); err != nil {
		return err
	}
	switch {
	case l.TPRank < 0 || l.TPRank >= l.TP:
		return wrong("tp_rank", l.TPRank, "want 0 to %d", l.TP-1)
	case l.PPRank < 0 || l.PPRank >= l.PP:
		return wrong("pp_rank", l.PPRank, "want 0 to %d", l.PP-1)
	case l.Pages < 1 || int64(l.Pages) > math.MaxUint32:
		return wrong("pages", l.Pages, "want 1 to %d", uint32(math.MaxUint32))
	}
	seen := make(map[[2]int]bool, len(l.Buffers))
	regions := map[int][]int{}
	for i, b := range l.Buffers {
		key := [2]int{b.Layer, int(b.Part)}
		hi, size := bits.Mul64(b.ItemBytes, uint64(l.Pages))
		switch {
		case b.Layer < 0 || b.Layer >= l.Layers:
			return wrong("buffer layer", b.Layer, "want 0 to %d (buffer %d)", l.Layers-1, i)
		case !slices.Contains(l.Parts(), b.Part):
			return wrong("buffer part", b.Part, "the model has %v (buffer %d)", l.Parts(), i)
		case seen[key]:
			return wrong("buffer layer", b.Layer, "its %v rows are in two buffers", b.Part)
		case b.ItemBytes < uint64(l.PagePartBytes()):
			return wrong("item_bytes", b.ItemBytes, "a page of buffer %d needs %d", i, l.PagePartBytes())
		case hi != 0 || size > math.MaxInt64 || b.Base > math.MaxInt64-size:
			return wrong("item_bytes", b.ItemBytes, "%d pages from %d on are more than an address can name (buffer %d)", l.Pages, b.Base, i)
		}
		for _, o := range regions[b.Region] {
			if l.overlap(l.Buffers[o], b) {
				return wrong("buffer base", b.Base, "buffers %d and %d overlap in region %d", o, i, b.Region)
			}
		}
		seen[key], regions[b.Region] = true, append(regions[b.Region], i)
	}
	return l.whole(seen)
}

// whole: a layer that is here is here with all its parts.
func (l *Layout) whole(seen map[[2]int]bool) error {
	for _, b := range l.Buffers {
		for _, p := range l.Parts() {
			if !seen[[2]int{b.Layer, int(p)}] {
				return wrong("buffer layer", b.Layer, "it has no buffer for its %v rows", p)
			}
		}
	}
	return nil
}

// overlap of two buffers of one region. With equal distances their pages may alternate;
// otherwise the buffers must lie one after the other.
func (l *Layout) overlap(a, b Buffer) bool {
	need, pages := uint64(l.PagePartBytes()), uint64(l.Pages)
	if a.Base > b.Base {
		a, b = b, a
	}
	gap := b.Base - a.Base
	if gap >= (pages-1)*a.ItemBytes+need {
		return false
	}
	if a.ItemBytes != b.ItemBytes {
		return true
	}
	return gap%a.ItemBytes < need || gap%a.ItemBytes > a.ItemBytes-need
}
