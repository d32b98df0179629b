package kv

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// naiveByte places byte k of chunk i by counting pages one by one.
func naiveByte(pageBytes int, chunks []int, pages []PageID, i, k int) uint64 {
	page := 0
	for _, c := range chunks[:i] {
		for c > 0 {
			page++
			c -= pageBytes
		}
	}
	for k >= pageBytes {
		page++
		k -= pageBytes
	}
	return uint64(pages[page])*uint64(pageBytes) + uint64(k)
}

// TestSpansAgainstBytes compares spans with the place of every single byte.
func TestSpansAgainstBytes(t *testing.T) {
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 400 {
		pageBytes := 1 + rng.IntN(9)
		chunks := make([]int, rng.IntN(6))
		for i := range chunks {
			chunks[i] = rng.IntN(40) * rng.IntN(2)
		}
		perChunk, total := PagesFor(pageBytes, chunks)
		pages := make([]PageID, total)
		for i, p := range rng.Perm(total + 10)[:total] {
			pages[i] = PageID(p)
		}
		if rng.IntN(2) == 0 {
			slices.Sort(pages) // as Alloc gives them
		}
		spans, err := Spans(pageBytes, chunks, pages)
		if err != nil || len(spans) != len(chunks) {
			t.Fatalf("seed %d: %v, %d spans of %d chunks", seed, err, len(spans), len(chunks))
		}
		for i, rs := range spans {
			if want := (chunks[i] + pageBytes - 1) / pageBytes; perChunk[i] != want {
				t.Fatalf("seed %d: chunk of %d takes %d pages of %d", seed, chunks[i], perChunk[i], pageBytes)
			}
			k := 0
			for n, r := range rs {
				if r.Len == 0 || n > 0 && rs[n-1].Off+rs[n-1].Len == r.Off {
					t.Fatalf("seed %d: chunk %d: ranges %v could be fewer", seed, i, rs)
				}
				for b := range r.Len {
					if want := naiveByte(pageBytes, chunks, pages, i, k); r.Off+b != want {
						t.Fatalf("seed %d: byte %d of chunk %d is at %d, want %d", seed, k, i, r.Off+b, want)
					}
					k++
				}
			}
			if k != chunks[i] {
				t.Fatalf("seed %d: ranges of chunk %d hold %d of %d bytes", seed, i, k, chunks[i])
			}
		}
	}
}

func TestLayoutRefuses(t *testing.T) {
	for _, c := range []struct {
		name      string
		pageBytes int
		chunks    []int
		pages     []PageID
	}{
		{"no page size", 0, []int{1}, []PageID{0}},
		{"negative page size", -4, []int{1}, []PageID{0}},
		{"negative chunk", 4, []int{8, -1}, []PageID{0, 1}},
		{"too few pages", 4, []int{9}, []PageID{0, 1}},
		{"too many pages", 4, []int{8}, []PageID{0, 1, 2}},
		{"pages of nothing", 4, nil, []PageID{0}},
		{"sum overflows", 1, []int{math.MaxInt, 1}, nil},
		{"offset overflows", math.MaxInt, []int{1}, []PageID{math.MaxUint32}},
	} {
		if _, err := Spans(c.pageBytes, c.chunks, c.pages); !errors.Is(err, ErrLayout) {
			t.Errorf("%s: %v, want %v", c.name, err, ErrLayout)
		}
	}
	if spans, err := Spans(4, []int{0, 0}, nil); err != nil || len(spans) != 2 || len(spans[0]) != 0 {
		t.Errorf("chunks of 0 bytes: %v, %v", spans, err)
	}
}

// FuzzSpans: whatever a peer sends, the ranges add up and stay inside the pages named.
func FuzzSpans(f *testing.F) {
	f.Add(4096, 10000, 0, 3, uint32(5), uint32(6))
	f.Add(1, 1, 1, 1, uint32(math.MaxUint32), uint32(0))
	f.Add(math.MaxInt, math.MaxInt, 1, -1, uint32(1), uint32(1))
	f.Fuzz(func(t *testing.T, pageBytes, a, b, c int, p, q uint32) {
		chunks, pages := []int{a, b, c}, []PageID{PageID(p), PageID(q)}
		spans, err := Spans(pageBytes, chunks, pages)
		if err != nil {
			return
		}
		for i, rs := range spans {
			var sum uint64
			for _, r := range rs {
				sum += r.Len
				first, last := r.Off/uint64(pageBytes), (r.Off+r.Len-1)/uint64(pageBytes)
				for k := first; k <= last; k++ {
					if !slices.Contains(pages, PageID(k)) {
						t.Fatalf("range %v is on page %d, not one of %v", r, k, pages)
					}
				}
			}
			if sum != uint64(chunks[i]) {
				t.Fatalf("chunk of %d bytes got %d", chunks[i], sum)
			}
		}
	})
}
