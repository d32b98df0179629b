package tcp

import (
	"cmp"
	"slices"
	"sort"
	"sync"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// grant is a live permission. spans, key and sess never change.
type grant struct {
	id    transfer.GrantID
	key   room.Key
	sess  *session
	spans []transfer.Span // sorted by offset, disjoint, inside the memory

	// mu is held during each store, so that revoke is a fence. Never held while
	// waiting for a socket. Innermost lock.
	mu      sync.Mutex
	revoked bool // under mu; never unset
}

// revoke returns when no store is under way and none can begin.
func (g *grant) revoke() {
	g.mu.Lock()
	g.revoked = true
	g.mu.Unlock()
}

// live reports whether g was not yet revoked at some moment of the call.
func (g *grant) live() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.revoked
}

// sortSpans returns a sorted copy of spans without empty ones; false if they overlap
// or leave a memory of size bytes.
func sortSpans(spans []transfer.Span, size uint64) ([]transfer.Span, bool) {
	out := make([]transfer.Span, 0, len(spans))
	for _, s := range spans {
		if s.Off > size || s.Len > size-s.Off {
			return nil, false
		}
		if s.Len > 0 {
			out = append(out, s)
		}
	}
	slices.SortFunc(out, func(a, b transfer.Span) int { return cmp.Compare(a.Off, b.Off) })
	for i := 1; i < len(out); i++ {
		if out[i].Off < out[i-1].Off+out[i-1].Len {
			return nil, false
		}
	}
	return out, true
}

// contains reports whether s lies wholly inside one of the sorted spans. An empty s may
// also stand at a span's end.
func contains(spans []transfer.Span, s transfer.Span) bool {
	i := sort.Search(len(spans), func(i int) bool { return spans[i].Off > s.Off }) - 1
	if i < 0 {
		return false
	}
	rel := s.Off - spans[i].Off
	return rel <= spans[i].Len && s.Len <= spans[i].Len-rel
}
