package kv

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// elem names one byte of KV: which token, layer, part, head and byte of the head's row. 0: none.
type elem uint64

func nameOf(m Model, token, layer int, part Part, head, b int) elem {
	id := uint64(token)
	id = id*uint64(m.Layers) + uint64(layer)
	id = id*parts + uint64(part)
	id = id*uint64(m.KVHeads) + uint64(head)
	return elem(id*uint64(m.HeadBytes())+uint64(b)) + 1
}

// memories are a rank's regions, an elem for each byte.
type memories map[int][]elem

// eachByte calls f with the place of every byte that tokens [from, to) have at a rank, found one by
// one and without any of the planner's arithmetic.
func eachByte(s Side, from, to int, f func(region int, off uint64, e elem)) {
	h0, h1 := s.Heads()
	row := s.HeadDim * s.ElemBytes
	for _, buf := range s.Buffers {
		for t := from; t < to; t++ {
			page, slot := s.Pages[(t-s.First)/s.PageTokens], (t-s.First)%s.PageTokens
			for h := h0; h < h1; h++ {
				for b := range row {
					in := (slot*(h1-h0)+(h-h0))*row + b
					if s.HeadsFirst {
						in = ((h-h0)*s.PageTokens+slot)*row + b
					}
					f(buf.Region, buf.Base+uint64(page)*buf.ItemBytes+uint64(in), nameOf(s.Model, t, buf.Layer, buf.Part, h, b))
				}
			}
		}
	}
}

// blank makes a rank's memory.
func blank(l *Layout) memories {
	m := memories{}
	for _, b := range l.Buffers {
		end := b.Base + b.ItemBytes*uint64(l.Pages)
		if int(end) > len(m[b.Region]) {
			m[b.Region] = make([]elem, end)
		}
	}
	return m
}

// world is what a random case has.
type world struct {
	src, dst []Side
	from, to int
}

func pick(r *rand.Rand, xs ...int) int { return xs[r.IntN(len(xs))] }

// randomWorld draws two workers that fit together, or perhaps not (2 to 3).
func randomWorld(r *rand.Rand) world {
	m := Model{Layers: 1 + r.IntN(5), KVHeads: pick(r, 1, 2, 3, 4, 6, 8), HeadDim: 1 + r.IntN(3), ElemBytes: pick(r, 1, 2)}
	if m.Latent = r.IntN(4) == 0; m.Latent {
		m.KVHeads, m.HeadDim = 1, 1+r.IntN(9)
	}
	split := func() Split {
		for {
			s := Split{TP: pick(r, 1, 2, 3, 4, 6, 8), PP: 1 + r.IntN(m.Layers), PageTokens: 1 + r.IntN(6), HeadsFirst: r.IntN(2) == 0}
			if (Shards{m, s}).Validate() == nil {
				return s
			}
		}
	}
	from := r.IntN(10)
	w := world{from: from, to: from + r.IntN(20)}
	make := func() (out []Side) {
		sh := Shards{m, split()}
		first := r.IntN(from + 1)
		need := sh.RankPages(w.to - first)
		pages := need + 1 + r.IntN(5)
		for i := range sh.Ranks() {
			l := randomLayout(r, sh, i, pages)
			s := Side{Layout: &l, First: first}
			for _, p := range r.Perm(pages)[:need] {
				s.Pages = append(s.Pages, PageID(p))
			}
			if r.IntN(3) == 0 { // runs are where joining shows
				slices.Sort(s.Pages)
			}
			out = append(out, s)
		}
		return out
	}
	w.src, w.dst = make(), make()
	return w
}

// randomLayout is of pages in one pool, or of a region for each buffer, or of buffers one after the
// other, with and without room between items, in any order.
func randomLayout(r *rand.Rand, sh Shards, rank, pages int) Layout {
	l := sh.Layout(rank, pages)
	kind, pad := r.IntN(3), uint64(r.IntN(3)*r.IntN(5))
	base := uint64(r.IntN(7))
	for i := range l.Buffers {
		b := &l.Buffers[i]
		switch kind {
		case 0:
			b.Base += base
		case 1:
			b.Region, b.Base, b.ItemBytes = 7*i, uint64(r.IntN(9)), uint64(l.PagePartBytes())+pad
		case 2:
			b.Base, b.ItemBytes = base, uint64(l.PagePartBytes())+pad
			base += b.ItemBytes * uint64(pages)
		}
	}
	if r.IntN(2) == 0 {
		r.Shuffle(len(l.Buffers), func(i, j int) { l.Buffers[i], l.Buffers[j] = l.Buffers[j], l.Buffers[i] })
	}
	return l
}

func layoutsOf(sides []Side) (out []*Layout) {
	for _, s := range sides {
		out = append(out, s.Layout)
	}
	return out
}

// checkWorld runs all plans of a world on memories of elems and compares with what each byte must be.
func checkWorld(t *testing.T, w world) (copies int) {
	t.Helper()
	mems := make([]memories, len(w.src))
	for i, s := range w.src {
		if err := s.Layout.Validate(); err != nil {
			t.Fatalf("source rank %d: %v", i, err)
		}
		mems[i] = blank(s.Layout)
		eachByte(s, s.First, s.First+len(s.Pages)*s.PageTokens, func(reg int, off uint64, e elem) { mems[i][reg][off] = e })
	}
	for d, dst := range w.dst {
		if err := dst.Layout.Validate(); err != nil {
			t.Fatalf("destination rank %d: %v", d, err)
		}
		peers, err := Peers(layoutsOf(w.src), dst.Layout)
		if err != nil {
			t.Fatal(err)
		}
		got := blank(dst.Layout)
		for s, src := range w.src {
			plan, err := Plan(src, dst, w.from, w.to)
			if err != nil {
				t.Fatalf("rank %d to %d: %v", s, d, err)
			}
			if slices.Contains(peers, s) != (len(plan) > 0) && w.from < w.to {
				t.Errorf("rank %d to %d: peers %v and %d copies", s, d, peers, len(plan))
			}
			checkMinimal(t, plan)
			copies += len(plan)
			for _, c := range plan {
				for i := range c.N {
					if at := &got[c.Dst][c.DstOff+i]; *at != 0 {
						t.Fatalf("rank %d to %d: byte %d of region %d is written twice", s, d, c.DstOff+i, c.Dst)
					} else if *at = mems[s][c.Src][c.SrcOff+i]; *at == 0 {
						t.Fatalf("rank %d to %d: byte %d of region %d is no KV", s, d, c.SrcOff+i, c.Src)
					}
				}
			}
		}
		want := blank(dst.Layout)
		eachByte(dst, w.from, w.to, func(reg int, off uint64, e elem) { want[reg][off] = e })
		for reg := range want {
			if i := slices.Index(want[reg], 0); !slices.Equal(got[reg], want[reg]) {
				t.Fatalf("destination rank %d, region %d (first gap %d):\n got %v\nwant %v", d, reg, i, got[reg], want[reg])
			}
		}
	}
	return copies
}

// checkMinimal: as many copies as there are bytes whose neighbour before is not copied from their source's
// neighbour before; no list can be shorter. And in order.
func checkMinimal(t *testing.T, plan []Copy) {
	t.Helper()
	type place struct {
		region int
		off    uint64
	}
	from := map[place]place{}
	for i, c := range plan {
		if c.N == 0 || i > 0 && plan[i-1].compare(c) >= 0 {
			t.Fatalf("copy %d is empty or out of order: %+v", i, plan)
		}
		for k := range c.N {
			from[place{c.Dst, c.DstOff + k}] = place{c.Src, c.SrcOff + k}
		}
	}
	starts := 0
	for d, s := range from {
		d.off--
		s.off--
		if before, ok := from[d]; !ok || before != s {
			starts++
		}
	}
	if starts != len(plan) {
		t.Fatalf("%d copies, %d would do: %+v", len(plan), starts, plan)
	}
}

// TestPlanAgainstBytes: for random pairs of workers every destination byte is written exactly once, by exactly one
// rank, with the byte of the same token, layer, part and head, nothing else is written, and no list is longer than it must be.
func TestPlanAgainstBytes(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	n, refused, copies := 600, 0, 0
	if testing.Short() {
		n = 150
	}
	seen := map[string]bool{}
	for i := range n {
		w := randomWorld(r)
		a, b := Shards{w.src[0].Model, w.src[0].Split}, Shards{w.dst[0].Model, w.dst[0].Split}
		if a.TP%b.TP != 0 && b.TP%a.TP != 0 {
			refused++
			if _, err := Plan(w.src[0], w.dst[0], w.from, w.to); !errors.Is(err, ErrLayout) {
				t.Fatalf("tp %d to %d: %v", a.TP, b.TP, err)
			}
			continue
		}
		if t.Run(fmt.Sprint(i), func(t *testing.T) { copies += checkWorld(t, w) }); t.Failed() {
			t.Fatalf("seed %d, case %d: %v to %v, tokens [%d,%d)", seed, i, a, b, w.from, w.to)
		}
		seen[fmt.Sprintf("tp %d", cmpInt(a.TP, b.TP))] = true
		seen[fmt.Sprintf("pp %d", cmpInt(a.PP, b.PP))] = true
		seen[fmt.Sprintf("page %d", cmpInt(a.PageTokens, b.PageTokens))] = true
		seen[fmt.Sprintf("replicas %v %v", a.Replicas() > 1, b.Replicas() > 1)] = true
		seen[fmt.Sprintf("order %v %v", a.HeadsFirst, b.HeadsFirst)] = true
		seen[fmt.Sprintf("latent %v", a.Latent)] = true
	}
	if len(seen) != 3+3+3+4+4+2 || refused == 0 || copies < 10*n {
		t.Errorf("seed %d: the cases are too poor: %d refused, %d copies, kinds %v", seed, refused, copies, seen)
	}
}

func cmpInt(a, b int) int { return min(1, max(-1, a-b)) }

// TestExchangeAgainstBytes: the same for whole workers with pages in one pool, and the payload is what is written.
func TestExchangeAgainstBytes(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for i := range 200 {
		w := randomWorld(r)
		a, b := Shards{w.src[0].Model, w.src[0].Split}, Shards{w.dst[0].Model, w.dst[0].Split}
		if Compatible(a, b) != nil {
			continue
		}
		x, src, dst, srcPool, dstPool := poolsOf(t, r, a, b, w)
		plan, err := x.Copies(src, dst, w.from, w.to)
		if err != nil {
			t.Fatal(err)
		}
		checkMinimal(t, plan)
		pay, err := b.Payload(dst, dstPool, w.from, w.to)
		if err != nil {
			t.Fatal(err)
		}
		memory := make([]elem, srcPool*a.PageBytes())
		for k := range x.srcs {
			eachByte(a.rank(src, &x.srcs[k], k), w.from, w.to, func(_ int, off uint64, e elem) { memory[off] = e })
		}
		got, want := make([]elem, dstPool*b.PageBytes()), make([]elem, dstPool*b.PageBytes())
		for _, c := range plan {
			copy(got[c.DstOff:c.DstOff+c.N], memory[c.SrcOff:c.SrcOff+c.N])
		}
		for k := range x.dsts {
			eachByte(b.rank(dst, &x.dsts[k], k), w.from, w.to, func(_ int, off uint64, e elem) { want[off] = e })
		}
		if !slices.Equal(got, want) {
			t.Fatalf("seed %d, case %d: %v to %v, tokens [%d,%d): wrong bytes", seed, i, a, b, w.from, w.to)
		}
		for _, p := range pay {
			for k := range p.Len {
				if want[p.Off+k] == 0 {
					t.Fatalf("seed %d, case %d: payload names byte %d, which holds nothing", seed, i, p.Off+k)
				}
				want[p.Off+k] = 0
			}
		}
		if k := slices.IndexFunc(want, func(e elem) bool { return e != 0 }); k >= 0 {
			t.Fatalf("seed %d, case %d: payload lacks byte %d", seed, i, k)
		}
	}
}

// poolsOf gives the two workers of w pages in pools of a little more than they need.
func poolsOf(t *testing.T, r *rand.Rand, a, b Shards, w world) (x *Exchange, src, dst Piece, srcPool, dstPool int) {
	t.Helper()
	piece := func(s Shards, first int) (p Piece, pool int) {
		need := s.Ranks() * s.RankPages(w.to-first)
		pool = need + 1 + r.IntN(9)
		p.First = first
		for _, id := range r.Perm(pool)[:need] {
			p.Pages = append(p.Pages, PageID(id))
		}
		return p, pool
	}
	src, srcPool = piece(a, w.src[0].First)
	dst, dstPool = piece(b, w.dst[0].First)
	x, err := NewExchange(a, b, srcPool, dstPool)
	if err != nil {
		t.Fatal(err)
	}
	return x, src, dst, srcPool, dstPool
}

// TestEqualWorkersCopyWholePages: no slicing, no splitting, a run of pages is one copy.
func TestEqualWorkersCopyWholePages(t *testing.T) {
	s := Shards{Model{Layers: 4, KVHeads: 8, HeadDim: 16, ElemBytes: 2}, Split{TP: 2, PP: 2, PageTokens: 16}}
	x, err := NewExchange(s, s, 100, 100)
	if err != nil {
		t.Fatal(err)
	}
	pages := func(from int) (p Piece) {
		for i := range s.Ranks() * s.RankPages(64) {
			p.Pages = append(p.Pages, PageID(from+i))
		}
		return p
	}
	got, err := x.Copies(pages(3), pages(50), 0, 64)
	page := uint64(s.PageBytes())
	if want := []Copy{{SrcOff: 3 * page, DstOff: 50 * page, N: 16 * page}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
}
