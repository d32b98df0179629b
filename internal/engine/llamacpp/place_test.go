package llamacpp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/llamacpp/gguftest"
	"github.com/hybridgroup/yzma/pkg/llama"
)

// checkPlacer compares the placer's counts with a count from scratch.
func checkPlacer(t *testing.T, p *placer) {
	t.Helper()
	owner := map[int32]*segment{}
	holds := make([]int, len(p.holds))
	used := 0
	for i := range p.seqs {
		a := &p.seqs[i]
		length := 0
		for _, s := range a.segs {
			length += len(s.cells)
			for _, c := range s.cells {
				if o := owner[c]; o != nil && o != s {
					t.Fatalf("cell %d is held by two segments", c)
				} else if o == nil {
					owner[c] = s
					used++
					holds[int(c)/blockCells]++
				}
			}
		}
		if length != a.length {
			t.Fatalf("sequence %d: length %d, segments hold %d", i, a.length, length)
		}
		if a.block >= 0 {
			holds[a.block]++
		}
	}
	if used != p.used || !slices.Equal(holds, p.holds) {
		t.Fatalf("used %d, counted %d; holds %v, counted %v", p.used, used, p.holds, holds)
	}
	for c, s := range p.state {
		switch {
		case (s == cellUsed) != (owner[int32(c)] != nil):
			t.Fatalf("cell %d: state %d, owner %v", c, s, owner[int32(c)])
		case c >= p.top*blockCells && s != cellEmpty:
			t.Fatalf("cell %d above the top has state %d", c, s)
		case c < p.top*blockCells && s == cellEmpty:
			t.Fatalf("cell %d below the top is empty", c)
		}
	}
}

// settled does to the states what the engine does with the library.
func settled(p *placer) {
	p.lower()
	for _, c := range p.empties(nil) {
		p.state[c] = cellFiller
	}
}

func TestPlacerRandomly(t *testing.T) {
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		p := newPlacer(5, 10*blockCells)
		for range 120 {
			a, b := rnd.IntN(5), rnd.IntN(5)
			switch rnd.IntN(6) {
			case 0, 1, 2:
				var g grant
				ok := p.plan(&g, a, 1+rnd.IntN(150))
				if ok && a != b {
					ok = p.plan(&g, b, 1)
				}
				if !ok || rnd.IntN(4) == 0 {
					p.revoke(&g)
				} else {
					p.commit(&g)
				}
			case 3, 4:
				p.free(a)
			case 5:
				if a != b && p.length(a) > 0 {
					p.free(b)
					p.share(a, b)
				}
			}
			settled(p)
			checkPlacer(t, p)
		}
		for i := range p.seqs {
			p.free(i)
		}
		settled(p)
		if p.used != 0 || p.top != 0 {
			t.Fatalf("seed %d: %d cells used and top %d when nothing is left", seed, p.used, p.top)
		}
	}
}

// history is what was done to a sequence: replayed alone it must give the same bytes.
type history struct {
	ops [][]engine.Token // a prefill's tokens, or a step's token and -1
	// loose: a long prefill went on from a shared sequence that ended within a tile, so
	// its attention was summed in other pieces; equal bits are not promised.
	loose bool
}

// world runs random operations on one engine.
type world struct {
	t        *testing.T
	e, alone *Engine
	rnd      *rand.Rand
	hist     []history
	equal    int // comparisons of all bytes
	refused  int // operations without cells
}

func (w *world) tokens(n int) []engine.Token {
	out := make([]engine.Token, n)
	for i := range out {
		out[i] = engine.Token(4 + w.rnd.IntN(gguftest.VocabSize-4))
	}
	return out
}

// tolerate counts refusals for lack of cells and fails on all other errors.
func (w *world) tolerate(err error, what string) bool {
	if errors.Is(err, engine.ErrNoCells) {
		w.refused++
		return false
	}
	if err != nil {
		w.t.Fatalf("%s: %v", what, err)
	}
	return true
}

func (w *world) prefill(s engine.Seq) {
	n := 1 + w.rnd.IntN(w.e.info.ChunkTokens)
	n = min(n, w.e.info.ContextLen-w.e.place.length(int(s)))
	if n == 0 {
		return
	}
	tok := w.tokens(n)
	ctx, cancel := context.WithCancel(w.t.Context())
	defer cancel()
	if w.rnd.IntN(5) == 0 {
		cancel()
	}
	err := w.e.Prefill(ctx, s, tok, w.e.place.length(int(s)))
	if ctx.Err() != nil {
		if !errors.Is(err, engine.ErrInterrupted) && !errors.Is(err, engine.ErrNoCells) {
			w.t.Fatalf("cancelled prefill: %v", err)
		}
	} else if w.tolerate(err, "prefill") {
		h := &w.hist[s]
		h.ops = append(h.ops, tok)
		h.loose = h.loose || n >= blockCells && !w.aligned(s)
	}
}

func (w *world) step() {
	var rows []engine.Row
	for s := range w.hist {
		if n := w.e.place.length(s); n > 0 && n < w.e.info.ContextLen && w.rnd.IntN(3) > 0 {
			rows = append(rows, engine.Row{Seq: engine.Seq(s), Token: w.tokens(1)[0], Pos: n, Sampler: &sampler{}})
		}
	}
	w.rnd.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
	if len(rows) == 0 {
		return
	}
	if _, err := w.e.Step(w.t.Context(), rows); w.tolerate(err, "step") {
		for _, r := range rows {
			w.hist[r.Seq].ops = append(w.hist[r.Seq].ops, []engine.Token{r.Token, -1})
		}
	}
}

func (w *world) move(a, b engine.Seq) {
	if a == b || len(w.hist[a].ops) == 0 {
		return
	}
	w.e.FreeSeq(b)
	w.hist[b] = history{}
	if w.rnd.IntN(2) == 0 {
		if err := w.e.CopySeq(a, b); err != nil {
			w.t.Fatal(err)
		}
		w.hist[b] = w.hist[a].clone()
		return
	}
	saved, err := w.e.SwapOut(a)
	if err != nil {
		w.t.Fatal(err)
	}
	if w.rnd.IntN(2) == 0 {
		w.e.FreeSeq(a)
		w.hist[a], w.hist[b] = history{}, w.hist[a]
	} else {
		w.hist[b] = w.hist[a].clone()
	}
	if !w.tolerate(w.e.SwapIn(b, saved), "swap in") {
		w.hist[b] = history{}
	}
}

// compare replays a sequence alone in a fresh context and compares all bytes.
func (w *world) compare(s engine.Seq) {
	if len(w.hist[s].ops) == 0 {
		return
	}
	got, err := w.e.SwapOut(s)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, h := range w.hist[s].ops {
		pos := w.alone.place.length(0)
		if len(h) == 2 && h[1] < 0 {
			_, err = w.alone.Step(w.t.Context(), []engine.Row{{Token: h[0], Pos: pos, Sampler: &sampler{}}})
		} else {
			err = w.alone.Prefill(w.t.Context(), 0, h, pos)
		}
		if err != nil {
			w.t.Fatal(err)
		}
	}
	want, err := w.alone.SwapOut(0)
	w.alone.FreeSeq(0)
	if err != nil {
		w.t.Fatal(err)
	}
	if len(got) != len(want) {
		w.t.Fatalf("sequence %d: %d bytes, alone %d", s, len(got), len(want))
	}
	if w.hist[s].loose || !w.rising(s) {
		return // bits are not promised
	}
	if !bytes.Equal(got, want) {
		w.t.Fatalf("sequence %d of %d operations has other bytes than alone", s, len(w.hist[s].ops))
	}
	w.equal++
}

func (h history) clone() history { return history{slices.Clone(h.ops), h.loose} }

// aligned tells whether the sequence's positions lie at the same places of their tiles
// as when it is alone.
func (w *world) aligned(s engine.Seq) bool {
	pos := 0
	for _, seg := range w.e.place.seqs[s].segs {
		for _, c := range seg.cells {
			if int(c)%blockCells != pos%blockCells {
				return false
			}
			pos++
		}
	}
	return true
}

// rising tells whether the sequence's cells rise, as equal bits need.
func (w *world) rising(s engine.Seq) bool {
	last := int32(-1)
	for _, seg := range w.e.place.seqs[s].segs {
		for _, c := range seg.cells {
			if c <= last {
				return false
			}
			last = c
		}
	}
	return true
}

// library checks what the library holds against the placer.
func (w *world) library() {
	w.t.Helper()
	checkPlacer(w.t, w.e.place)
	for s := range w.hist {
		if top, _ := llama.MemorySeqPosMax(w.e.mem, libSeq(engine.Seq(s))); int(top) != w.e.place.length(s)-1 {
			w.t.Fatalf("sequence %d: the library's last position is %d, length %d", s, top, w.e.place.length(s))
		}
	}
	if top, _ := llama.MemorySeqPosMax(w.e.mem, scratch); top != -1 {
		w.t.Fatalf("the scratch sequence holds positions up to %d", top)
	}
	var want []int32
	for c, s := range w.e.place.state {
		if s == cellFiller {
			want = append(want, int32(c))
		}
	}
	if got := w.fillerCells(); !slices.Equal(got, want) {
		w.t.Fatalf("the library's fillers are %v, not %v", got, want)
	}
}

func (w *world) fillerCells() []int32 {
	if top, _ := llama.MemorySeqPosMax(w.e.mem, fillers); top == -1 {
		return nil
	}
	block, err := w.e.stateOf(fillers)
	if err != nil {
		w.t.Fatal(err)
	}
	var cells []int32
	for i := range w.e.layout.tokens(len(block)) {
		cells = append(cells, int32(le.Uint32(block[blobHead+i*cellBytes:])))
	}
	return cells
}

// TestRandomOperations: whatever happens around it, a sequence's KV has the same bytes as
// when it is computed alone, and the library holds exactly what the placer says.
func TestRandomOperations(t *testing.T) {
	alone := openTiny(t, nil)
	for _, cells := range []int{256, 1024, 8192} {
		t.Run(fmt.Sprint(cells), func(t *testing.T) {
			e := openTiny(t, func(c *Config) {
				c.KVCells, c.MaxSeqs, c.ContextLen = cells, 6, min(cells, 1024)
			})
			w := &world{t: t, e: e, alone: alone, rnd: rand.New(rand.NewPCG(uint64(cells), 3)), hist: make([]history, 6)}
			for i := range 1200 {
				a, b := engine.Seq(w.rnd.IntN(6)), engine.Seq(w.rnd.IntN(6))
				switch k := w.rnd.IntN(20); {
				case k < 5:
					w.prefill(a)
				case k < 16:
					w.step()
				case k < 18:
					e.FreeSeq(a)
					w.hist[a] = history{}
				default:
					w.move(a, b)
				}
				w.library()
				if i%10 == 0 {
					w.compare(a)
				}
			}
			for s := range w.hist {
				e.FreeSeq(engine.Seq(s))
				w.hist[s] = history{}
			}
			w.library()
			if e.UsedCells() != 0 || e.place.top != 0 {
				t.Errorf("%d cells used, top %d when all is freed", e.UsedCells(), e.place.top)
			}
			t.Logf("%d sequences compared byte by byte, %d operations refused for lack of cells", w.equal, w.refused)
			if w.equal < 20 {
				t.Error("hardly anything was compared")
			}
		})
	}
}
