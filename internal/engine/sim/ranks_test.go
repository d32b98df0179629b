package sim

import (
	"errors"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/kv"
)

// moved is a prompt's KV on its way: chunks as the prefill worker exported them, laid anew into the decode
// worker's pages.
type moved struct {
	from, to int
	pages    [][]byte   // of the decode worker
	memory   []byte     // behind them
	payload  []kv.Range // where KV lies in it
}

// move exports p's chunks from a and lays them out for b, the first have tokens left out, in pages at random places.
func move(t *testing.T, a, b *Engine, n, have int) (out []moved) {
	t.Helper()
	src, dst := a.info.Shards, b.info.Shards
	const spare = 3
	piece := func(s kv.Shards, tokens, first int) (kv.Piece, int) {
		need := s.ChunkBytes(tokens) / s.PageBytes()
		p := kv.Piece{First: first}
		for _, id := range rand.Perm(need + spare)[:need] {
			p.Pages = append(p.Pages, kv.PageID(id))
		}
		return p, need + spare
	}
	for p0 := 0; p0 < n; p0 += a.cfg.ChunkTokens {
		p1 := min(p0+a.cfg.ChunkTokens, n)
		first := min(max(p0, have), p1)
		from, fromPool := piece(src, p1-p0, p0)
		to, toPool := piece(dst, p1-first, first)
		x, err := kv.NewExchange(src, dst, fromPool, toPool)
		must(t, err)
		staging := make([]byte, fromPool*src.PageBytes())
		must(t, a.Export(0, p0, p1, pagesOf(src, staging, from.Pages)))
		m := moved{from: first, to: p1, memory: make([]byte, toPool*dst.PageBytes())}
		for i := range m.memory {
			m.memory[i] = 0xa5
		}
		copies, err := x.Copies(from, to, first, p1)
		must(t, err)
		for _, c := range copies {
			copy(m.memory[c.DstOff:c.DstOff+c.N], staging[c.SrcOff:c.SrcOff+c.N])
		}
		m.pages = pagesOf(dst, m.memory, to.Pages)
		m.payload, err = dst.Payload(to, toPool, first, p1)
		must(t, err)
		if first < p1 {
			out = append(out, m)
		}
	}
	return out
}

func pagesOf(s kv.Shards, memory []byte, ids []kv.PageID) (out [][]byte) {
	for _, id := range ids {
		out = append(out, memory[int(id)*s.PageBytes():(int(id)+1)*s.PageBytes()])
	}
	return out
}

// take imports what has moved and goes on with the answer.
func take(t *testing.T, b *Engine, list []moved, p []engine.Token) []engine.Token {
	t.Helper()
	for _, m := range list {
		must(t, b.Import(0, m.from, m.to, m.pages))
	}
	return generate(t, b, 0, p, 16, engine.Sampling{})
}

var rankCases = map[string][2]Config{
	"tp 1 to 4":     {{TP: 1}, {TP: 4}},
	"tp 4 to 1":     {{TP: 4, PageTokens: 5}, {TP: 1, HeadsFirst: true}},
	"pp 2 to 1":     {{PP: 2}, {PP: 1, PageTokens: 3}},
	"replicas":      {{KVHeads: 2, TP: 8}, {KVHeads: 2, TP: 4, PP: 3}},
	"latent":        {{Latent: true, KVHeads: 1, TP: 2}, {Latent: true, KVHeads: 1, TP: 4, PP: 2, PageTokens: 7}},
	"one to itself": {{PageTokens: 4}, {PageTokens: 4}},
}

// TestRanksHandOver: between any two workers that fit together the answer is the one of a worker without ranks,
// also when the decode worker has the beginning of the prompt already.
func TestRanksHandOver(t *testing.T) {
	for name, c := range rankCases {
		t.Run(name, func(t *testing.T) {
			for i := range c {
				c[i].Layers, c[i].HeadDim, c[i].ChunkTokens, c[i].Recheck = 3, 5, 11, true
				if c[i].KVHeads == 0 {
					c[i].KVHeads = 4
				}
			}
			a, b := open(t, c[0]), open(t, c[1])
			p := prompt(t, "a prompt that fills several chunks and pages")
			n := len(p) - 1
			prefill(t, a, 0, p)
			want := Expected(c[0], p, 16)
			if plain := (Config{Layers: 3, HeadDim: 5, KVHeads: c[0].KVHeads, ChunkTokens: 11}); !c[0].Latent && !reflect.DeepEqual(want, Expected(plain, p, 16)) {
				t.Fatal("ranks change the right answer")
			}
			for _, have := range []int{0, 1, 11, 13, 22, n - 1, n} {
				for pos := 0; pos < have; pos += 11 {
					must(t, b.Prefill(t.Context(), 0, p[pos:min(pos+11, have)], pos))
				}
				if got := take(t, b, move(t, a, b, n, have), p); !reflect.DeepEqual(got, want) {
					t.Errorf("with %d tokens there already: got %v want %v", have, got, want)
				}
				b.FreeSeq(0)
				if b.UsedCells() != 0 {
					t.Fatalf("%d cells are still used", b.UsedCells())
				}
			}
		})
	}
}

// TestOneWrongByteOfAnyRankChangesTheAnswer: flip each byte that has come, in turn, those of ranks that hold the same
// heads as another too.
func TestOneWrongByteOfAnyRankChangesTheAnswer(t *testing.T) {
	for name, c := range rankCases {
		t.Run(name, func(t *testing.T) {
			for i := range c {
				c[i].HeadDim, c[i].ChunkTokens, c[i].Layers = 3, 4, 3
				if c[i].KVHeads == 0 {
					c[i].KVHeads = 4
				}
			}
			a, b := open(t, c[0]), open(t, c[1])
			p := prompt(t, "12345")
			prefill(t, a, 0, p)
			want, flips := Expected(c[0], p, 16), 0
			list := move(t, a, b, len(p)-1, 0)
			for _, m := range list {
				for _, r := range m.payload {
					for off := r.Off; off < r.Off+r.Len; off++ {
						m.memory[off] ^= 0x10
						if got := take(t, b, list, p); reflect.DeepEqual(got, want) {
							t.Fatalf("byte %d is wrong and the answer is the same", off)
						}
						b.FreeSeq(0)
						m.memory[off] ^= 0x10
						flips++
					}
				}
			}
			if bytes := (len(p) - 1) * b.cfg.cellBytes() * b.info.Shards.Replicas(); flips != bytes {
				t.Errorf("%d bytes tried, the ranks hold %d", flips, bytes)
			}
			if got := take(t, b, list, p); !reflect.DeepEqual(got, want) {
				t.Errorf("unharmed: got %v want %v", got, want)
			}
		})
	}
}

func TestPagesThatAreNoneAreRefused(t *testing.T) {
	cfg := Config{TP: 2, PageTokens: 4, ChunkTokens: 8}
	a, b := open(t, cfg), open(t, cfg)
	p := prompt(t, "0123456789")
	prefill(t, a, 0, p)
	good := move(t, a, b, 8, 0)[0].pages
	short := append([][]byte{good[0][:10]}, good[1:]...)
	for name, pages := range map[string][][]byte{"none": nil, "too few": good[:3], "too many": append(good[:4:4], good[0]), "a short one": short} {
		if err := b.Import(0, 0, 8, pages); !errors.Is(err, engine.ErrBadChunk) {
			t.Errorf("%s: %v", name, err)
		}
		if b.UsedCells() != 0 {
			t.Fatalf("%s: %d cells used after a refusal", name, b.UsedCells())
		}
	}
	must(t, b.Import(0, 0, 8, good))
}

func TestParseRanks(t *testing.T) {
	c, err := ParseConfig("tp=4,pp=2,page=8,hnd=true,heads=2,layers=4")
	if err != nil || c.TP != 4 || c.PP != 2 || c.PageTokens != 8 || !c.HeadsFirst {
		t.Errorf("%+v, %v", c, err)
	}
	for _, bad := range []string{"tp=3,heads=4", "pp=9,layers=4", "tp=-1", "page=-2", "mla=true,heads=4"} {
		if _, err := ParseConfig(bad); !errors.Is(err, kv.ErrLayout) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
