package kv

import "math/bits"

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

// runs yields the maximal runs of free pages in order. The caller may take pages of a
// run that it has been given.
func (f *freeMap) runs(yield func(run) bool) {
	for i := f.next(0, true); i < f.pages; {
		end := f.next(i, false)
		if !yield(run{i, end - i}) {
			return
		}
		i = f.next(end, true)
	}
}

// take removes n pages, or none and says false. They come from the tightest single run that
// holds them all; if there is none, from the longest runs, so that the pieces are
// few. The result is in ascending order, so that neighbours can be written as one block.
func (f *freeMap) take(n int) ([]PageID, bool) {
	if n > f.free {
		return nil, false
	}
	ids := make([]PageID, 0, n)
	if n == 0 {
		return ids, true
	}
	best := run{n: f.pages + 1}
	shorter := make([]int, n) // how many runs there are of each length below n
	for r := range f.runs {
		if r.n < n {
			shorter[r.n]++
		} else if r.n < best.n {
			best = r
		}
		if best.n == n {
			break
		}
	}
	if best.n <= f.pages {
		return f.takeRun(ids, best.at, n), true
	}
	// All runs longer than cut are taken whole, and left pages of those that are as long.
	cut, left := n-1, n
	for ; shorter[cut]*cut < left; cut-- {
		left -= shorter[cut] * cut
	}
	for r := range f.runs {
		switch {
		case r.n > cut:
			ids = f.takeRun(ids, r.at, r.n)
		case r.n == cut && left > 0:
			k := min(left, cut)
			ids = f.takeRun(ids, r.at, k)
			left -= k
		}
	}
	return ids, true
}

// takeRun marks pages [at, at+n) taken and appends them to ids.
func (f *freeMap) takeRun(ids []PageID, at, n int) []PageID {
	for p := at; p < at+n; p++ {
		f.words[p/64] &^= 1 << (p % 64)
		ids = append(ids, PageID(p))
	}
	f.free -= n
	return ids
}
