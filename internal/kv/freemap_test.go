package kv

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// naiveRuns finds runs of true by looking at each.
func naiveRuns(free []bool) (rs []run) {
	for i, f := range free {
		switch {
		case !f:
		case len(rs) > 0 && rs[len(rs)-1].at+rs[len(rs)-1].n == i:
			rs[len(rs)-1].n++
		default:
			rs = append(rs, run{i, 1})
		}
	}
	return rs
}

// TestFreeMapAgainstBools runs random takes and puts beside a slice of bools.
func TestFreeMapAgainstBools(t *testing.T) {
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, pages := range []int{1, 2, 63, 64, 65, 128, 200} {
		f, free := newFreeMap(pages), make([]bool, pages)
		for i := range free {
			free[i] = true
		}
		var held []PageID
		for range 600 {
			if rng.IntN(2) == 0 && len(held) > 0 {
				i := rng.IntN(len(held))
				p := held[i]
				held = slices.Delete(held, i, i+1)
				if !f.put(p) || f.put(p) {
					t.Fatalf("seed %d: page %d must return once", seed, p)
				}
				free[p] = true
			} else {
				held = append(held, takeAndCheck(t, seed, f, free, rng.IntN(pages/2+2))...)
			}
			if !slices.Equal(slices.Collect(f.runs), naiveRuns(free)) || f.free != pages-len(held) {
				t.Fatalf("seed %d: runs %v, want %v; %d free, %d held", seed, slices.Collect(f.runs), naiveRuns(free), f.free, len(held))
			}
		}
		if f.put(PageID(pages)) {
			t.Errorf("a page behind the last of %d was taken back", pages)
		}
	}
}

// takeAndCheck takes n pages and checks what is promised about them.
func takeAndCheck(t *testing.T, seed uint64, f *freeMap, free []bool, n int) []PageID {
	t.Helper()
	rs := naiveRuns(free)
	total, tightest := 0, 0
	for _, r := range rs {
		total += r.n
		if r.n >= n && (tightest == 0 || r.n < tightest) {
			tightest = r.n
		}
	}
	ids, ok := f.take(n)
	if ok != (n <= total) || ok && len(ids) != n {
		t.Fatalf("seed %d: take(%d) of %d free: %v, %d pages", seed, n, total, ok, len(ids))
	}
	if !slices.IsSorted(ids) {
		t.Fatalf("seed %d: %v is not ascending", seed, ids)
	}
	if ok && n > 0 && tightest == 0 {
		fewestPieces(t, seed, rs, ids)
	}
	if ok && n > 0 && tightest > 0 {
		in := slices.IndexFunc(rs, func(r run) bool { return r.at <= int(ids[0]) && int(ids[0]) < r.at+r.n })
		if int(ids[n-1]-ids[0]) != n-1 || rs[in].n != tightest {
			t.Fatalf("seed %d: take(%d) = %v of %v, want one run out of the tightest", seed, n, ids, rs)
		}
	}
	for _, p := range ids {
		if !free[p] {
			t.Fatalf("seed %d: page %d is held twice", seed, p)
		}
		free[p] = false
	}
	return ids
}

// fewestPieces: no choice of runs holds as many pages as ids in fewer pieces.
func fewestPieces(t *testing.T, seed uint64, rs []run, ids []PageID) {
	t.Helper()
	slices.SortFunc(rs, func(a, b run) int { return b.n - a.n })
	want, sum := 0, 0
	for sum < len(ids) {
		sum += rs[want].n
		want++
	}
	got := 0
	for i, id := range ids {
		if i == 0 || id != ids[i-1]+1 {
			got++
		}
	}
	if got != want {
		t.Fatalf("seed %d: %v is in %d pieces, %d would do", seed, ids, got, want)
	}
}

func TestFewestPieces(t *testing.T) {
	f := newFreeMap(20)
	f.take(20)
	for _, p := range []PageID{0, 2, 3, 4, 6, 7, 9, 11, 12, 13, 14} {
		f.put(p)
	}
	ids, ok := f.take(6) // no run of 6: four and two of three
	if want := []PageID{2, 3, 11, 12, 13, 14}; !ok || !slices.Equal(ids, want) {
		t.Errorf("%v, want %v", ids, want)
	}
}
