package kv

import (
	"cmp"
	"fmt"
	"iter"
	"slices"
)

// Side is a rank's layout with the pages of one sequence, or of a piece of it.
type Side struct {
	*Layout          // has passed Validate
	Pages   []PageID // hides Layout.Pages
	First   int      // position of the first token of Pages[0]
}

// Copy is N bytes from SrcOff of the source rank's region Src to DstOff of the destination's
// region Dst.
type Copy struct {
	Src, Dst       int
	SrcOff, DstOff uint64
	N              uint64
}

// writes gives the heads that src has to write to dst: those that both hold, and where several
// source ranks hold the same ones, only one of these, by the destination's rank, so that the load is shared.
func writes(src, dst *Layout) (from, to int) {
	a, b := src.Heads()
	c, d := dst.Heads()
	from, to = max(a, c), min(b, d)
	if k := src.TP / src.KVHeads; k > 1 && src.TPRank%k != dst.TPRank%k {
		return from, from
	}
	return from, max(from, to)
}

// Peers are the ranks among srcs that write to dst, by index. The error says what of dst would
// not be written, or be written twice.
func Peers(srcs []*Layout, dst *Layout) ([]int, error) {
	var out []int
	from, to := dst.Heads()
	here, got := make([]bool, dst.Layers*parts), make([]int, dst.Layers*parts) // got: heads written
	for _, b := range dst.Buffers {
		here[b.row()] = true
	}
	for i, s := range srcs {
		if err := Compatible(Shards{s.Model, s.Split}, Shards{dst.Model, dst.Split}); err != nil {
			return nil, err
		}
		a, b := writes(s, dst)
		used := false
		for _, sb := range s.Buffers {
			if a < b && here[sb.row()] {
				got[sb.row()] += b - a
				used = true
			}
		}
		if used {
			out = append(out, i)
		}
	}
	for _, b := range dst.Buffers {
		if n := got[b.row()]; n != to-from {
			return nil, wrong("buffer layer", b.Layer, "the source ranks write %d of the %d heads of its %v rows to rank tp %d, pp %d", n, to-from, b.Part, dst.TPRank, dst.PPRank)
		}
	}
	return out, nil
}

// Plan lists the copies that bring tokens [from, to) from one source rank to one destination rank:
// the heads and layers that both have and that this source rank is the writer of. Pure. The list is
// in ascending order of (Dst, DstOff), no two copies touch the same destination byte, and it is the
// shortest: no two could be one. Empty if the two have nothing to exchange. Both Models must be equal.
func Plan(src, dst Side, from, to int) ([]Copy, error) {
	if err := Compatible(Shards{src.Model, src.Split}, Shards{dst.Model, dst.Split}); err != nil {
		return nil, err
	}
	h0, h1 := writes(src.Layout, dst.Layout)
	if h0 == h1 || from == to {
		return nil, nil
	}
	blocks, err := cut(src, dst, from, to)
	if err != nil {
		return nil, err
	}
	p := newPlanner(src.Layout, dst.Layout, h0, h1)
	pairs := p.pairs()
	_, outer, inner := p.shape(uint64(blocks[0].n), p.heads.n)
	p.out = make([]Copy, 0, uint64(len(blocks)*len(pairs))*outer.n*inner.n) // usually enough
	if alternate(dst.Buffers) {                                             // whichever order gives ascending offsets
		for page := range pagewise(blocks) {
			for _, bp := range pairs {
				p.page(bp, page)
			}
		}
	} else {
		for _, bp := range pairs {
			for page := range pagewise(blocks) {
				p.page(bp, page)
			}
		}
	}
	return p.finish(), nil
}

// pagewise yields the blocks of one destination page at a time.
func pagewise(blocks []block) iter.Seq[[]block] {
	return func(yield func([]block) bool) {
		for len(blocks) > 0 {
			n := 1
			for n < len(blocks) && blocks[n].dst == blocks[0].dst {
				n++
			}
			if !yield(blocks[:n]) {
				return
			}
			blocks = blocks[n:]
		}
	}
}

// alternate: the pages of several buffers lie among each other in one region.
func alternate(bs []Buffer) bool {
	return len(bs) > 1 && bs[0].Region == bs[1].Region && max(bs[0].Base, bs[1].Base)-min(bs[0].Base, bs[1].Base) < bs[0].ItemBytes
}

// block is a run of tokens that lies in one page on each side.
type block struct {
	src, dst         PageID
	srcSlot, dstSlot int // first token in its page
	n                int
	at               int // index of dst in its list
}

// cut divides [from, to) into blocks in ascending order of destination pages.
func cut(src, dst Side, from, to int) ([]block, error) {
	for _, s := range []struct {
		name string
		Side
	}{{"source", src}, {"destination", dst}} {
		if from < s.First || from > to || to-s.First > len(s.Side.Pages)*s.PageTokens {
			return nil, fmt.Errorf("%w: tokens [%d,%d) are not in the %d pages of %d tokens from %d on at the %s",
				ErrLayout, from, to, len(s.Side.Pages), s.PageTokens, s.First, s.name)
		}
	}
	out := make([]block, 0, (to-from)/min(src.PageTokens, dst.PageTokens)+2)
	sorted := true
	for t := from; t < to; {
		s, d := t-src.First, t-dst.First
		b := block{srcSlot: s % src.PageTokens, dstSlot: d % dst.PageTokens, at: d / dst.PageTokens}
		b.src, b.dst = src.Pages[s/src.PageTokens], dst.Pages[b.at]
		b.n = min(src.PageTokens-b.srcSlot, dst.PageTokens-b.dstSlot, to-t)
		if int(b.src) >= src.Layout.Pages || int(b.dst) >= dst.Layout.Pages {
			return nil, fmt.Errorf("%w: page %d of %d at the source or %d of %d at the destination does not exist",
				ErrLayout, b.src, src.Layout.Pages, b.dst, dst.Layout.Pages)
		}
		sorted = sorted && (len(out) == 0 || out[len(out)-1].dst <= b.dst)
		out = append(out, b)
		t += b.n
	}
	if !sorted {
		slices.SortStableFunc(out, func(a, b block) int { return cmp.Compare(a.dst, b.dst) })
	}
	for i := 1; i < len(out); i++ {
		if out[i].dst == out[i-1].dst && out[i].at != out[i-1].at {
			return nil, fmt.Errorf("%w: page %d is twice in the destination's list", ErrLayout, out[i].dst)
		}
	}
	return out, nil
}

// strided is one dimension of a block: n pieces at a distance on each side.
type strided struct{ n, src, dst uint64 }

// planner writes the copies of one pair of ranks.
type planner struct {
	src, dst         *Layout
	row              uint64 // bytes of one head at one token
	srcHead, dstHead uint64 // offset of the first head in a page's token 0
	heads            strided
	srcTok, dstTok   uint64 // token strides
	out              []Copy
	unsorted         bool
}

func newPlanner(src, dst *Layout, h0, h1 int) *planner {
	p := &planner{src: src, dst: dst, row: uint64(src.HeadBytes())}
	a, _ := src.Heads()
	c, _ := dst.Heads()
	p.heads.n = uint64(h1 - h0)
	p.srcTok, p.heads.src = src.strides()
	p.dstTok, p.heads.dst = dst.strides()
	p.srcHead, p.dstHead = uint64(h0-a)*p.heads.src, uint64(h0-c)*p.heads.dst
	return p
}

// pairs are the buffers of the same rows on both sides, in the destination's order.
func (p *planner) pairs() [][2]Buffer {
	at := make([]int32, p.src.Layers*parts)
	for i, b := range p.src.Buffers {
		at[b.row()] = int32(i + 1)
	}
	out := make([][2]Buffer, 0, len(p.dst.Buffers))
	for _, d := range p.dst.Buffers {
		if i := at[d.row()]; i > 0 {
			out = append(out, [2]Buffer{p.src.Buffers[i-1], d})
		}
	}
	return out
}

// page adds the copies into one page of one pair of buffers, in ascending order.
func (p *planner) page(bp [2]Buffer, blocks []block) {
	if len(blocks) == 1 || !p.dst.HeadsFirst {
		for _, b := range blocks {
			p.block(bp, b, 0, p.heads.n)
		}
		return
	}
	for h := range p.heads.n {
		for _, b := range blocks {
			p.block(bp, b, h, 1)
		}
	}
}

// block adds n heads of one block, in the destination's order.
func (p *planner) block(bp [2]Buffer, b block, head, n uint64) {
	s, d := &bp[0], &bp[1]
	size, outer, inner := p.shape(uint64(b.n), n)
	c := Copy{Src: s.Region, Dst: d.Region, N: size,
		SrcOff: s.Base + uint64(b.src)*s.ItemBytes + uint64(b.srcSlot)*p.srcTok + p.srcHead + head*p.heads.src,
		DstOff: d.Base + uint64(b.dst)*d.ItemBytes + uint64(b.dstSlot)*p.dstTok + p.dstHead + head*p.heads.dst}
	for range outer.n {
		e := c
		for range inner.n {
			p.add(e)
			e.SrcOff += inner.src
			e.DstOff += inner.dst
		}
		c.SrcOff += outer.src
		c.DstOff += outer.dst
	}
}

// shape turns some tokens and heads of a page into as few pieces as there are: their size, and the two dimensions
// in which they repeat.
func (p *planner) shape(tokens, heads uint64) (size uint64, outer, inner strided) {
	size = p.row
	outer, inner = strided{tokens, p.srcTok, p.dstTok}, strided{heads, p.heads.src, p.heads.dst}
	if p.dst.HeadsFirst {
		outer, inner = inner, outer
	}
	if inner.src == size && inner.dst == size {
		size, inner.n = size*inner.n, 1
	}
	if inner.n == 1 && outer.src == size && outer.dst == size {
		size, outer.n = size*outer.n, 1
	}
	return size, outer, inner
}

func (p *planner) add(c Copy) {
	if n := len(p.out); n > 0 {
		if p.out[n-1].join(c) {
			return
		}
		p.unsorted = p.unsorted || p.out[n-1].compare(c) > 0
	}
	p.out = append(p.out, c)
}

// finish brings the copies into ascending order and joins what is neighbours only then.
func (p *planner) finish() []Copy {
	if p.unsorted {
		p.out = tidy(p.out)
	}
	return p.out
}

// tidy sorts by destination and joins. Destinations are disjoint, so of all orders this one
// brings every two that can be joined side by side.
func tidy(list []Copy) []Copy {
	list = merged(list)
	out := list[:0]
	for _, c := range list {
		if n := len(out); n == 0 || !out[n-1].join(c) {
			out = append(out, c)
		}
	}
	return out
}

// merged sorts a list that consists of few ascending runs, by merging neighbours.
func merged(list []Copy) []Copy {
	ends := []int{}
	for i := 1; i < len(list); i++ {
		if list[i-1].compare(list[i]) > 0 {
			ends = append(ends, i)
		}
	}
	if len(ends) == 0 {
		return list
	}
	ends = append(ends, len(list))
	for other := make([]Copy, len(list)); len(ends) > 1; list, other = other, list {
		var next []int
		out, from := other[:0], 0
		for len(ends) > 1 {
			a, b := list[from:ends[0]], list[ends[0]:ends[1]]
			for len(a) > 0 && len(b) > 0 {
				if a[0].compare(b[0]) <= 0 {
					out, a = append(out, a[0]), a[1:]
				} else {
					out, b = append(out, b[0]), b[1:]
				}
			}
			out = append(append(out, a...), b...)
			from = ends[1]
			next, ends = append(next, from), ends[2:]
		}
		if len(ends) == 1 {
			copy(other[from:], list[from:]) // no neighbour left to merge with
			next = append(next, ends[0])
		}
		ends = next
	}
	return list
}

func (c *Copy) compare(d Copy) int {
	if c.Dst != d.Dst {
		return cmp.Compare(c.Dst, d.Dst)
	}
	return cmp.Compare(c.DstOff, d.DstOff)
}

// join makes c longer by d if d follows it on both sides.
func (c *Copy) join(d Copy) bool {
	if c.Src != d.Src || c.Dst != d.Dst || c.SrcOff+c.N != d.SrcOff || c.DstOff+c.N != d.DstOff {
		return false
	}
	c.N += d.N
	return true
}
