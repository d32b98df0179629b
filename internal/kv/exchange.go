package kv

import (
	"fmt"
	"slices"
)

// Exchange plans chunks from all ranks of one worker to all ranks of another, each worker's
// pages being of one pool. Immutable, safe for concurrent use.
type Exchange struct {
	src, dst Shards
	srcs     []Layout
	dsts     []Layout
	pairs    [][2]int // ranks that talk: source, destination
}

// NewExchange says what keeps the two from exchanging KV, a *LayoutError, or prepares to plan. The pools
// have that many pages of at least PageBytes of their side.
func NewExchange(src, dst Shards, srcPages, dstPages int) (*Exchange, error) {
	for _, s := range []Shards{src, dst} {
		if err := s.Validate(); err != nil {
			return nil, err
		}
	}
	if err := Compatible(src, dst); err != nil {
		return nil, err
	}
	x := &Exchange{src: src, dst: dst, srcs: src.layouts(srcPages), dsts: dst.layouts(dstPages)}
	srcs := make([]*Layout, len(x.srcs))
	for i := range x.srcs {
		srcs[i] = &x.srcs[i]
	}
	for _, list := range [][]Layout{x.srcs, x.dsts} {
		for i := range list {
			if list[i].TPRank > 0 {
				continue // laid out as rank 0
			}
			if err := list[i].Validate(); err != nil { // pages of such a size and number can not be named
				return nil, err
			}
		}
	}
	for d := range x.dsts {
		peers, err := Peers(srcs, &x.dsts[d])
		if err != nil {
			return nil, err
		}
		for _, s := range peers {
			x.pairs = append(x.pairs, [2]int{s, d})
		}
	}
	return x, nil
}

func (s Shards) layouts(pages int) []Layout {
	out := make([]Layout, s.Ranks())
	for r := range out {
		out[r] = s.Layout(r, pages)
	}
	return out
}

// Piece is a run of tokens in a pool: its pages in the order of ChunkBytes, and the
// position of the first token of each rank's first page.
type Piece struct {
	Pages []PageID
	First int
}

// rank cuts rank r's part out of the pages.
func (s Shards) rank(p Piece, l *Layout, r int) Side {
	per := len(p.Pages) / s.Ranks()
	return Side{Layout: l, Pages: p.Pages[r*per : (r+1)*per], First: p.First}
}

func (s Shards) fits(p Piece) error {
	if len(p.Pages)%s.Ranks() != 0 {
		return fmt.Errorf("%w: %d pages do not divide among %d ranks", ErrLayout, len(p.Pages), s.Ranks())
	}
	return nil
}

// Copies brings tokens [from, to) from src to dst: the plans of all pairs of ranks as one list in ascending
// order of DstOff, as short as can be. Offsets are of the two pools.
func (x *Exchange) Copies(src, dst Piece, from, to int) ([]Copy, error) {
	if err := x.src.fits(src); err != nil {
		return nil, err
	}
	if err := x.dst.fits(dst); err != nil {
		return nil, err
	}
	var out []Copy
	for _, p := range x.pairs {
		list, err := Plan(x.src.rank(src, &x.srcs[p[0]], p[0]), x.dst.rank(dst, &x.dsts[p[1]], p[1]), from, to)
		if err != nil {
			return nil, err
		}
		out = append(out, list...)
	}
	// Each rank's pages are checked by its plan, and no two ranks may share one either.
	if id, twice := repeated(dst.Pages); twice {
		return nil, fmt.Errorf("%w: page %d is twice in the destination's list", ErrLayout, id)
	}
	return tidy(out), nil
}

func repeated(pages []PageID) (PageID, bool) {
	sorted := slices.Clone(pages)
	slices.Sort(sorted)
	for i := 1; i < len(sorted); i++ {
		if sorted[i] == sorted[i-1] {
			return sorted[i], true
		}
	}
	return 0, false
}

// Payload lists the bytes that tokens [from, to) of all ranks take in p's pages, in ascending order and
// joined: what Copies to the same piece write, no matter from what source. pages is the pool's size.
func (s Shards) Payload(p Piece, pages, from, to int) ([]Range, error) {
	if err := s.fits(p); err != nil {
		return nil, err
	}
	var list []Copy
	for r := range s.Ranks() {
		l := s.Layout(r, pages)
		own, err := Plan(s.rank(p, &l, r), s.rank(p, &l, r), from, to)
		if err != nil {
			return nil, err
		}
		list = append(list, own...)
	}
	list = tidy(list)
	out := make([]Range, len(list))
	for i, c := range list {
		out[i] = Range{Off: c.DstOff, Len: c.N}
	}
	return out, nil
}
