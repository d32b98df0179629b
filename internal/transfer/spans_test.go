package transfer

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestWithinAgainstBitmap checks spans against one byte a byte.
func TestWithinAgainstBitmap(t *testing.T) {
	const size = 64
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		var spans []Span
		for at := rnd.Uint64N(6); at < size; {
			n := min(rnd.Uint64N(9), size-at)
			spans = append(spans, Span{Off: at, Len: n})
			at += n + rnd.Uint64N(6)
		}
		rnd.Shuffle(len(spans), func(i, j int) { spans[i], spans[j] = spans[j], spans[i] })
		owner := make([]int, size) // which span owns a byte, 0 none
		for k, s := range spans {
			for i := range s.Len {
				owner[s.Off+i] = k + 1
			}
		}
		sorted, ok := SortSpans(spans, size)
		if !ok {
			t.Fatalf("disjoint spans refused: %v", spans)
		}
		for off := uint64(0); off < size; off++ {
			for n := uint64(1); off+n <= size; n++ {
				want := owner[off] != 0
				for i := range n {
					want = want && owner[off+i] == owner[off]
				}
				if got := Within(sorted, Span{Off: off, Len: n}); got != want {
					t.Fatalf("Within(%v, %d+%d) = %v", sorted, off, n, got)
				}
			}
		}
	}
	one := []Span{{Off: 8, Len: 8}}
	for s, want := range map[Span]bool{
		{Off: 8}: true, {Off: 16}: true, {Off: 17}: false, {Off: 7}: false,
		{Off: 9, Len: math.MaxUint64}: false, {Off: math.MaxUint64, Len: 2}: false,
	} {
		if Within(one, s) != want {
			t.Errorf("Within 8+8, %v: want %v", s, want)
		}
	}
}

func TestSortSpans(t *testing.T) {
	got, ok := SortSpans([]Span{{Off: 9, Len: 3}, {Off: 20, Len: 0}, {Off: 1, Len: 8}}, 20)
	if !ok || !slices.Equal(got, []Span{{Off: 1, Len: 8}, {Off: 9, Len: 3}}) {
		t.Fatalf("sorted: %v, %v", got, ok)
	}
	for _, bad := range [][]Span{
		{{Off: 0, Len: 65}}, {{Off: 65, Len: 0}}, {{Off: 1, Len: math.MaxUint64}},
		{{Off: 0, Len: 8}, {Off: 7, Len: 8}}, {{Off: 8, Len: 8}, {Off: 8, Len: 8}}, {{Off: 0, Len: 64}, {Off: 5, Len: 1}},
	} {
		if got, ok := SortSpans(bad, 64); ok {
			t.Errorf("%v accepted as %v", bad, got)
		}
	}
}
