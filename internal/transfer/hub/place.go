package hub

import (
	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/transfer"
)

// place maps each chunk onto its pages, see kv.Spans.
func place(pages []uint32, pageBytes int, chunks []int) ([][]transfer.Span, error) {
	ids := make([]kv.PageID, len(pages))
	for i, p := range pages {
		ids[i] = kv.PageID(p)
	}
	ranges, err := kv.Spans(pageBytes, chunks, ids)
	if err != nil {
		return nil, err
	}
	out := make([][]transfer.Span, len(ranges))
	for i, rs := range ranges {
		for _, r := range rs {
			out[i] = append(out[i], transfer.Span(r))
		}
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

// parts are the bytes of one chunk in its pages, the last one cut to fit.
func parts(pool *kv.Pool, pages []kv.PageID, size int) [][]byte {
	out := make([][]byte, len(pages))
	for i, id := range pages {
		take := min(size, pool.PageBytes())
		out[i] = pool.Page(id)[:take:take]
		size -= take
	}
	return out
}
