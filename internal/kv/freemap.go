package kv

import (
	"cmp"
	"math/bits"
	"slices"
)

// freeMap is the set of free pages, one bit each. Not safe for concurrent use.
//
// A bitmap and a scan lost nothing against lists of runs in our sizes (a million
// pages are 16,384 words, scanned in about 10 µs), and it cannot disagree with itself.
type freeMap struct {
	words []uint64
	pages int
	free  int // 0 <= free <= pages, the number of set bits
}

// run is pages [at, at+n).
type run struct{ at, n int }

func newFreeMap(pages int) *freeMap {
	f := &freeMap{words: make([]uint64, (pages+63)/64), pages: pages}
	for i := range pages {
		f.put(PageID(i))
	}
	return f
}

func (f *freeMap) has(p PageID) bool { return f.words[p/64]&(1<<(p%64)) != 0 }

// put returns p; false if it is free already or no page of the pool.
func (f *freeMap) put(p PageID) bool {
	if int(p) >= f.pages || f.has(p) {
		return false
	}
	f.words[p/64] |= 1 << (p % 64)
	f.free++
	return true
}

// next is the first free page at or after i, pages if none.
func (f *freeMap) next(i int, set bool) int {
	for i < f.pages {
		w := f.words[i/64]
		if !set {
			w = ^w
		}
		w >>= i % 64
		if w != 0 {
			return min(i+bits.TrailingZeros64(w), f.pages)
		}
		i += 64 - i%64
	}
	return f.pages
}

// runs lists the maximal runs of free pages in order.
func (f *freeMap) runs() []run {
	var rs []run
	for i := f.next(0, true); i < f.pages; {
		end := f.next(i, false)
		rs = append(rs, run{i, end - i})
		i = f.next(end, true)
	}
	return rs
}

// take removes n pages, or none and says false. They come from the tightest single run that
// holds them all; if there is none, from the longest runs, so that the pieces are
// few. The result is in ascending order, so that neighbours can be written as one block.
func (f *freeMap) take(n int) ([]PageID, bool) {
	if n > f.free {
		return nil, false
	}
	rs := f.runs()
	best := -1
	for i, r := range rs {
		if r.n >= n && (best < 0 || r.n < rs[best].n) {
			best = i
		}
	}
	if best >= 0 {
		rs = []run{rs[best]}
	} else {
		slices.SortStableFunc(rs, func(a, b run) int { return cmp.Compare(b.n, a.n) })
	}
	ids := make([]PageID, 0, n)
	for _, r := range rs {
		for p := r.at; p < r.at+r.n && len(ids) < n; p++ {
			f.words[p/64] &^= 1 << (p % 64)
			ids = append(ids, PageID(p))
		}
	}
	f.free -= n
	slices.Sort(ids)
	return ids, true
}
