package kv

import (
	"fmt"
	"math"
)

// Range is a range of bytes of a pool's mapping.
type Range struct{ Off, Len uint64 }

// PagesFor says how many pages each chunk takes and all of them together. Chunk i
// of chunks[i] bytes takes ceil(chunks[i]/pageBytes) pages of its own, so a chunk
// never shares a page and one of 0 bytes takes none. Both sides of a hand-over
// compute the same. pageBytes < 1, a negative size or an overflow gives total -1.
func PagesFor(pageBytes int, chunks []int) (perChunk []int, total int) {
	perChunk = make([]int, len(chunks))
	for i, c := range chunks {
		if pageBytes < 1 || c < 0 {
			return nil, -1
		}
		perChunk[i] = c / pageBytes
		if c%pageBytes != 0 {
			perChunk[i]++
		}
		if perChunk[i] > math.MaxInt-total {
			return nil, -1
		}
		total += perChunk[i]
	}
	return perChunk, total
}

// Spans maps each chunk onto the mapping: the ranges of chunk i, in order, add up to
// chunks[i] bytes. Chunks take the pages in order as PagesFor counts them; ranges
// that touch are joined, but never across chunks. The input may come from a peer:
// whatever does not fit together is ErrLayout.
func Spans(pageBytes int, chunks []int, pages []PageID) ([][]Range, error) {
	perChunk, total := PagesFor(pageBytes, chunks)
	if total < 0 {
		return nil, fmt.Errorf("%w: page of %d bytes, chunks %v", ErrLayout, pageBytes, chunks)
	}
	if total != len(pages) {
		return nil, fmt.Errorf("%w: %d chunks need %d pages of %d bytes, got %d", ErrLayout, len(chunks), total, pageBytes, len(pages))
	}
	if uint64(pageBytes) > math.MaxUint64>>32 {
		return nil, fmt.Errorf("%w: page of %d bytes", ErrLayout, pageBytes) // PageID*pageBytes could overflow
	}
	out := make([][]Range, len(chunks))
	for i, n := range perChunk {
		out[i] = chunkSpans(uint64(pageBytes), uint64(chunks[i]), pages[:n])
		pages = pages[n:]
	}
	return out, nil
}

// chunkSpans lays left bytes onto the pages, which are just as many as they need.
func chunkSpans(pageBytes, left uint64, pages []PageID) []Range {
	var rs []Range
	for _, p := range pages {
		r := Range{Off: uint64(p) * pageBytes, Len: min(left, pageBytes)}
		left -= r.Len
		if k := len(rs) - 1; k >= 0 && rs[k].Off+rs[k].Len == r.Off {
			rs[k].Len += r.Len
		} else {
			rs = append(rs, r)
		}
	}
	return rs
}
