package hub

import (
	"sort"

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

// zip cuts src along dst; both must add up to the same size, which the caller has checked.
func zip(src []kv.Range, dst []transfer.Span) []kv.Copy {
	out := make([]kv.Copy, 0, len(src)+len(dst))
	for _, d := range dst {
		for d.Len > 0 {
			n := min(src[0].Len, d.Len)
			out = append(out, kv.Copy{SrcOff: src[0].Off, DstOff: d.Off, N: n})
			d.Off, d.Len = d.Off+n, d.Len-n
			if src[0].Off, src[0].Len = src[0].Off+n, src[0].Len-n; src[0].Len == 0 {
				src = src[1:]
			}
		}
	}
	return out
}

// piece is a store of some of a chunk's bytes.
type piece struct {
	kv.Copy
	at uint64 // where the bytes are in the order of the chunk's checksum
}

// inOrder numbers the bytes of copies.
func inOrder(copies []kv.Copy) []piece {
	out, at := make([]piece, len(copies)), uint64(0)
	for i, c := range copies {
		out[i] = piece{c, at}
		at += c.N
	}
	return out
}

// cut divides pieces into those whose source lies in ready, which is ascending, and the rest. The order stays.
func cut(pieces []piece, ready []kv.Range) (in, rest []piece) {
	for _, c := range pieces {
		for c.N > 0 {
			k := sort.Search(len(ready), func(k int) bool { return ready[k].Off+ready[k].Len > c.SrcOff })
			list, n := &rest, c.N
			switch {
			case k == len(ready):
			case ready[k].Off > c.SrcOff:
				n = min(n, ready[k].Off-c.SrcOff)
			default:
				list, n = &in, min(n, ready[k].Off+ready[k].Len-c.SrcOff)
			}
			*list = append(*list, piece{kv.Copy{SrcOff: c.SrcOff, DstOff: c.DstOff, N: n}, c.at})
			c.SrcOff, c.DstOff, c.N, c.at = c.SrcOff+n, c.DstOff+n, c.N-n, c.at+n
		}
	}
	return in, rest
}

// segments are the stores of pieces out of mem.
func segments(mem []byte, pieces []piece) []transfer.Segment {
	out := make([]transfer.Segment, len(pieces))
	for i, c := range pieces {
		out[i] = transfer.Segment{Off: c.DstOff, Src: mem[c.SrcOff : c.SrcOff+c.N : c.SrcOff+c.N]}
	}
	return out
}

// sum is the checksum that pieces out of mem have at their place.
func sum(mem []byte, pieces []piece) (crc uint32) {
	for _, c := range pieces {
		crc = crcAdd(crc, mem[c.SrcOff:c.SrcOff+c.N])
	}
	return crc
}

// joined is where pieces, in order, are in the order of the checksum.
func joined(pieces []piece) (out []kv.Range) {
	for _, c := range pieces {
		if k := len(out) - 1; k >= 0 && out[k].Off+out[k].Len == c.at {
			out[k].Len += c.N
		} else if c.N > 0 {
			out = append(out, kv.Range{Off: c.at, Len: c.N})
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
