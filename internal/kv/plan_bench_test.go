package kv

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// BenchmarkPlan plans 1,000 source pages of 16 tokens of a model of 32 layers and 8 heads for one pair of ranks; a
// buffer a layer, pages at random.
func BenchmarkPlan(b *testing.B) {
	m := Model{Layers: 32, KVHeads: 8, HeadDim: 128, ElemBytes: 2}
	for _, c := range []struct {
		name     string
		src, dst Split
	}{
		{"equal", Split{TP: 1, PP: 1, PageTokens: 16}, Split{TP: 1, PP: 1, PageTokens: 16}},
		{"page 16 to 64", Split{TP: 1, PP: 1, PageTokens: 16}, Split{TP: 1, PP: 1, PageTokens: 64}},
		{"tp 1 to 4", Split{TP: 1, PP: 1, PageTokens: 16}, Split{TP: 4, PP: 1, PageTokens: 16}},
		{"tp 1 to 4 hnd", Split{TP: 1, PP: 1, PageTokens: 16, HeadsFirst: true}, Split{TP: 4, PP: 1, PageTokens: 16, HeadsFirst: true}},
		{"page 16 to 64 hnd", Split{TP: 1, PP: 1, PageTokens: 16, HeadsFirst: true}, Split{TP: 1, PP: 1, PageTokens: 64, HeadsFirst: true}},
	} {
		for _, apart := range []bool{true, false} {
			name := c.name + "/one pool"
			if apart {
				name = c.name + "/buffer a layer"
			}
			b.Run(name, func(b *testing.B) { benchPlan(b, m, c.src, c.dst, apart) })
		}
	}
}

func benchPlan(b *testing.B, m Model, src, dst Split, apart bool) {
	const tokens = 16000
	r := rand.New(rand.NewPCG(1, 2))
	side := func(s Split) Side {
		sh := Shards{m, s}
		n := sh.RankPages(tokens)
		l := sh.Layout(0, n)
		if apart {
			for i := range l.Buffers {
				l.Buffers[i].Region, l.Buffers[i].Base, l.Buffers[i].ItemBytes = i, 0, uint64(l.PagePartBytes())
			}
		}
		out := Side{Layout: &l}
		for _, p := range r.Perm(n) {
			out.Pages = append(out.Pages, PageID(p))
		}
		return out
	}
	from, to := side(src), side(dst)
	copies := 0
	for b.Loop() {
		list, err := Plan(from, to, 0, tokens)
		if err != nil {
			b.Fatal(err)
		}
		copies = len(list)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(copies), "ns/copy")
	b.ReportMetric(float64(copies), "copies")
}

// BenchmarkExchange plans one chunk of 128 tokens for all ranks.
func BenchmarkExchange(b *testing.B) {
	m := Model{Layers: 32, KVHeads: 8, HeadDim: 128, ElemBytes: 2}
	for _, tp := range [][2]int{{1, 1}, {1, 4}, {4, 1}, {8, 8}} {
		b.Run(fmt.Sprintf("tp %d to %d", tp[0], tp[1]), func(b *testing.B) {
			src, dst := Shards{m, Split{TP: tp[0], PP: 1, PageTokens: 16}}, Shards{m, Split{TP: tp[1], PP: 1, PageTokens: 16}}
			x, err := NewExchange(src, dst, 1000, 1000)
			if err != nil {
				b.Fatal(err)
			}
			var p, q Piece
			for i := range src.Ranks() * 8 {
				p.Pages = append(p.Pages, PageID(i*7%1000))
			}
			for i := range dst.Ranks() * 8 {
				q.Pages = append(q.Pages, PageID(i*11%1000))
			}
			copies := 0
			for b.Loop() {
				list, err := x.Copies(p, q, 0, 128)
				if err != nil {
					b.Fatal(err)
				}
				copies = len(list)
			}
			b.ReportMetric(float64(copies), "copies")
		})
	}
}
