package hub

import (
	"fmt"

	"github.com/baton-pd/baton/internal/transfer"
)

// pagesOf is how many pages a chunk of n bytes takes.
func pagesOf(n, pageBytes int) int { return (n + pageBytes - 1) / pageBytes }

// place maps each chunk onto its pages: chunk i takes the next
// ceil(chunks[i]/pageBytes) entries of pages. The spans of a chunk add up to
// its exact size; neighbouring pages are joined.
func place(pages []uint32, pageBytes int, chunks []int) ([][]transfer.Span, error) {
	if pageBytes <= 0 {
		return nil, fmt.Errorf("page size %d is not positive", pageBytes)
	}
	out := make([][]transfer.Span, len(chunks))
	next := 0
	for i, size := range chunks {
		n := pagesOf(size, pageBytes)
		if next+n > len(pages) {
			return nil, fmt.Errorf("grant has %d pages, chunk %d of %d needs %d more than that", len(pages), i, len(chunks), next+n-len(pages))
		}
		for _, p := range pages[next : next+n] {
			take := min(size, pageBytes)
			off := uint64(p) * uint64(pageBytes)
			if k := len(out[i]); k > 0 && out[i][k-1].Off+out[i][k-1].Len == off {
				out[i][k-1].Len += uint64(take)
			} else {
				out[i] = append(out[i], transfer.Span{Off: off, Len: uint64(take)})
			}
			size -= take
		}
		next += n
	}
	if next != len(pages) {
		return nil, fmt.Errorf("grant has %d pages, its chunks take %d", len(pages), next)
	}
	return out, nil
}

// segments cuts src (parts of a chunk) along dst (its spans); both must add up
// to the same size, which the caller has checked.
func segments(src [][]byte, dst []transfer.Span) []transfer.Segment {
	out := make([]transfer.Segment, 0, len(src)+len(dst))
	part, at := 0, 0
	for _, d := range dst {
		for d.Len > 0 {
			if at == len(src[part]) {
				part, at = part+1, 0
				continue
			}
			n := int(min(uint64(len(src[part])-at), d.Len))
			out = append(out, transfer.Segment{Off: d.Off, Src: src[part][at : at+n : at+n]})
			at += n
			d.Off += uint64(n)
			d.Len -= uint64(n)
		}
	}
	return out
}

// parts are the pages' memory of one chunk of size bytes, the last one cut to fit.
func parts(page func(i int) []byte, n, size, pageBytes int) [][]byte {
	out := make([][]byte, 0, n)
	for i := range n {
		take := min(size, pageBytes)
		out = append(out, page(i)[:take:take])
		size -= take
	}
	return out
}
