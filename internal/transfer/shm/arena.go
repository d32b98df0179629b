package shm

import (
	"slices"
	"sort"
)

// hole is a free range of an arena.
type hole struct{ at, n uint32 }

// arena hands out ranges of numbers, first fit.
type arena struct{ holes []hole } // sorted, not empty, not touching

func newArena(n uint32) arena { return arena{holes: []hole{{0, n}}} }

// take hands out n numbers in a row; none for n = 0.
func (a *arena) take(n uint32) (uint32, bool) {
	if n == 0 {
		return 0, true
	}
	for i := range a.holes {
		h := &a.holes[i]
		if h.n < n {
			continue
		}
		at := h.at
		h.at, h.n = h.at+n, h.n-n
		if h.n == 0 {
			a.holes = slices.Delete(a.holes, i, i+1)
		}
		return at, true
	}
	return 0, false
}

// give takes a range back.
func (a *arena) give(at, n uint32) {
	if n == 0 {
		return
	}
	i := sort.Search(len(a.holes), func(i int) bool { return a.holes[i].at > at })
	left := i > 0 && a.holes[i-1].at+a.holes[i-1].n == at
	right := i < len(a.holes) && at+n == a.holes[i].at
	switch {
	case left && right:
		a.holes[i-1].n += n + a.holes[i].n
		a.holes = slices.Delete(a.holes, i, i+1)
	case left:
		a.holes[i-1].n += n
	case right:
		a.holes[i].at, a.holes[i].n = at, a.holes[i].n+n
	default:
		a.holes = slices.Insert(a.holes, i, hole{at, n})
	}
}
