package kv

import (
	"fmt"
	"math/bits"
)

// Model is the KV of one token, whoever holds it. Two workers can exchange KV only if
// theirs are equal.
type Model struct {
	Layers    int
	KVHeads   int // K and V heads of a layer before any slicing; 1 if Latent
	HeadDim   int // elements of one head's K (or V) at one token; the whole latent vector if Latent
	ElemBytes int // bytes an element
	// Latent: one compressed vector a token and layer (MLA) in place of K and V. It cannot be
	// sliced, so every tensor-parallel rank holds all of it.
	Latent bool
}

// Split is how one worker cuts a Model up among its ranks and its pages.
type Split struct {
	TP         int  // ranks among which heads are divided
	PP         int  // ranks among which layers are divided
	PageTokens int  // tokens a page
	HeadsFirst bool // in a page [head][token][dim]; otherwise [token][head][dim]
}

// Limits of what a peer may describe; far above what exists.
const (
	maxLayers     = 4096
	maxTP         = 1024
	maxHeads      = 1 << 16
	maxDim        = 1 << 20
	maxElem       = 64
	maxPageTokens = 1 << 20
	maxPageBytes  = 1 << 40
)

// LayoutError says which property of a layout is wrong, or differs between the two sides.
type LayoutError struct {
	Field    string // "tp", "kv_heads", ...
	Src, Dst string // the values; Dst is "" if only one layout is concerned
	Why      string // for people
}

// Error names field, values and reason.
func (e *LayoutError) Error() string {
	if e.Dst == "" {
		return fmt.Sprintf("kv layout: %s is %s: %s", e.Field, e.Src, e.Why)
	}
	return fmt.Sprintf("kv layout: %s is %s at the source and %s at the destination: %s", e.Field, e.Src, e.Dst, e.Why)
}

// Is makes every LayoutError an ErrLayout.
func (e *LayoutError) Is(target error) bool { return target == ErrLayout }

func wrong(field string, v any, format string, a ...any) error {
	return &LayoutError{Field: field, Src: fmt.Sprint(v), Why: fmt.Sprintf(format, a...)}
}

// bounded is a field with its bounds, 1 to limit.
type bounded struct {
	name     string
	v, limit int
}

// inRange is an error for the first field out of its bounds.
func inRange(fs ...bounded) error {
	for _, f := range fs {
		if f.v < 1 || f.v > f.limit {
			return wrong(f.name, f.v, "want 1 to %d", f.limit)
		}
	}
	return nil
}

// Validate names the first field that cannot be.
func (m Model) Validate() error {
	if err := inRange(bounded{"layers", m.Layers, maxLayers}, bounded{"kv_heads", m.KVHeads, maxHeads},
		bounded{"head_dim", m.HeadDim, maxDim}, bounded{"elem_bytes", m.ElemBytes, maxElem}); err != nil {
		return err
	}
	if m.Latent && m.KVHeads != 1 {
		return wrong("kv_heads", m.KVHeads, "a latent (MLA) has no heads, want 1")
	}
	return nil
}

// HeadBytes is one head's K (or V, or the latent) at one token.
func (m Model) HeadBytes() int { return m.HeadDim * m.ElemBytes }

// Parts are the kinds of rows that each layer has.
func (m Model) Parts() []Part {
	if m.Latent {
		return []Part{PartLatent}
	}
	return []Part{PartK, PartV}
}

// String is equal for equal models; it is what a fingerprint carries.
func (m Model) String() string {
	kind := "kv"
	if m.Latent {
		kind = "latent"
	}
	return fmt.Sprintf("paged %s layers=%d heads=%d dim=%d elem=%d", kind, m.Layers, m.KVHeads, m.HeadDim, m.ElemBytes)
}

// Shards is a whole worker: the layouts of all its ranks in pages of one pool. A page
// belongs to one rank and holds PageTokens tokens of all layers and heads of that rank, layer
// after layer, K before V. Pure and comparable; both sides of a hand-over know both.
type Shards struct {
	Model
	Split
}

// Validate names the first field that cannot be.
func (s Shards) Validate() error {
	if err := s.Model.Validate(); err != nil {
		return err
	}
	if err := inRange(bounded{"tp", s.TP, maxTP}, bounded{"pp", s.PP, maxLayers}, bounded{"page_tokens", s.PageTokens, maxPageTokens}); err != nil {
		return err
	}
	if s.PP > s.Layers {
		return wrong("pp", s.PP, "more ranks than the %d layers", s.Layers)
	}
	if s.KVHeads%s.TP != 0 && s.TP%s.KVHeads != 0 {
		return wrong("tp", s.TP, "the %d KV heads neither divide among the ranks nor the ranks among the heads", s.KVHeads)
	}
	hi, row := bits.Mul64(uint64(s.PageTokens), uint64(s.Layers)*2)
	over, total := bits.Mul64(row, uint64(s.KVHeads)*uint64(s.HeadBytes()))
	if hi != 0 || over != 0 || total > maxPageBytes {
		return wrong("page_tokens", s.PageTokens, "a page of the model would be larger than 2^40 bytes")
	}
	return nil
}

// String is short, for logs and errors; "none" for the zero value.
func (s Shards) String() string {
	if s == (Shards{}) {
		return "none"
	}
	order := "nhd"
	if s.HeadsFirst {
		order = "hnd"
	}
	return fmt.Sprintf("%v tp=%d pp=%d page=%d order=%s", s.Model, s.TP, s.PP, s.PageTokens, order)
}

// Ranks is how many there are.
func (s Shards) Ranks() int { return s.TP * s.PP }

// LayersOf gives the layers [from, to) of pipeline rank r: as even as can be.
func (s Shards) LayersOf(r int) (from, to int) { return r * s.Layers / s.PP, (r + 1) * s.Layers / s.PP }

// HeadsOf gives the KV heads [from, to) of tensor-parallel rank r. With more ranks than heads
// several ranks hold the same one.
func (s Shards) HeadsOf(r int) (from, to int) { return headsOf(s.KVHeads, s.TP, r) }

func headsOf(heads, tp, r int) (from, to int) {
	if tp > heads {
		h := r / (tp / heads)
		return h, h + 1
	}
	n := heads / tp
	return r * n, (r + 1) * n
}

// Replicas is how many ranks hold the same heads.
func (s Shards) Replicas() int { return max(1, s.TP/s.KVHeads) }

// PageBytes is the size of a page: what the rank with the most layers needs, rounded up to 64.
func (s Shards) PageBytes() int {
	layers := 0
	for r := range s.PP {
		a, b := s.LayersOf(r)
		layers = max(layers, b-a)
	}
	from, to := s.HeadsOf(0)
	n := layers * len(s.Parts()) * s.PageTokens * (to - from) * s.HeadBytes()
	return (n + 63) &^ 63
}

// RankPages is how many pages each rank needs for n tokens that begin a page.
func (s Shards) RankPages(n int) int { return (n + s.PageTokens - 1) / s.PageTokens }

// ChunkBytes is the size of all ranks' pages for n tokens; 0 for none. A chunk's pages are
// in order of ranks (see Layout), each rank's in order of tokens.
func (s Shards) ChunkBytes(n int) int {
	if n <= 0 {
		return 0
	}
	return s.Ranks() * s.RankPages(n) * s.PageBytes()
}

// Layout is rank r's in a pool of that many pages; 0 <= r < Ranks(), all tensor-parallel ranks
// of the first pipeline rank first.
func (s Shards) Layout(r, pages int) Layout {
	l := Layout{Model: s.Model, Split: s.Split, TPRank: r % s.TP, PPRank: r / s.TP, Pages: pages}
	a, b := s.LayersOf(l.PPRank)
	item, base := uint64(s.PageBytes()), uint64(0)
	for layer := a; layer < b; layer++ {
		for _, p := range s.Parts() {
			l.Buffers = append(l.Buffers, Buffer{Base: base, ItemBytes: item, Layer: layer, Part: p})
			base += uint64(l.PagePartBytes())
		}
	}
	return l
}

// Compatible tells whether KV can go from src to dst: the same model, and tensor-parallel
// sizes of which one is a multiple of the other, so that each rank has the same
// number of partners and all or an equal share of its heads goes to each. The error is a *LayoutError.
func Compatible(src, dst Shards) error {
	for _, f := range []struct {
		name     string
		src, dst int
	}{
		{"layers", src.Layers, dst.Layers}, {"kv_heads", src.KVHeads, dst.KVHeads},
		{"head_dim", src.HeadDim, dst.HeadDim}, {"elem_bytes", src.ElemBytes, dst.ElemBytes},
	} {
		if f.src != f.dst {
			return &LayoutError{Field: f.name, Src: fmt.Sprint(f.src), Dst: fmt.Sprint(f.dst), Why: "the two sides run different models"}
		}
	}
	if src.Latent != dst.Latent {
		return &LayoutError{Field: "latent", Src: fmt.Sprint(src.Latent), Dst: fmt.Sprint(dst.Latent), Why: "the two sides run different models"}
	}
	if src.TP%dst.TP != 0 && dst.TP%src.TP != 0 {
		return &LayoutError{Field: "tp", Src: fmt.Sprint(src.TP), Dst: fmt.Sprint(dst.TP),
			Why: "neither is a multiple of the other, so the heads of a rank do not divide among those of the other side"}
	}
	return nil
}
