package transfer

import (
	"cmp"
	"slices"
	"sort"
)

// SortSpans returns a copy of list sorted by offset and without empty spans; false if spans overlap or
// leave a memory of size bytes.
func SortSpans(list []Span, size uint64) ([]Span, bool) {
	out := make([]Span, 0, len(list))
	for _, s := range list {
		if s.Off > size || s.Len > size-s.Off {
			return nil, false
		}
		if s.Len > 0 {
			out = append(out, s)
		}
	}
	slices.SortFunc(out, func(a, b Span) int { return cmp.Compare(a.Off, b.Off) })
	for i := 1; i < len(out); i++ {
		if out[i].Off < out[i-1].Off+out[i-1].Len {
			return nil, false
		}
	}
	return out, true
}

// Within reports whether s lies wholly inside one span of a sorted list. An empty s may also stand at a span's end.
func Within(sorted []Span, s Span) bool {
	i := sort.Search(len(sorted), func(i int) bool { return sorted[i].Off > s.Off }) - 1
	if i < 0 {
		return false
	}
	rel := s.Off - sorted[i].Off
	return rel <= sorted[i].Len && s.Len <= sorted[i].Len-rel
}

// Follows reports whether next begins where run ends, in the same array, so that both are one piece.
func Follows(run, next []byte) bool {
	return len(next) > 0 && cap(run)-len(run) >= len(next) && &run[:len(run)+1][len(run)] == &next[0]
}
