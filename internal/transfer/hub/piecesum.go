package hub

import (
	"hash/crc32"
	"sort"

	"github.com/baton-pd/baton/internal/kv"
)

// maxPieces bounds what a pieceSum remembers: a peer chooses how many pieces there are.
const maxPieces = 4096

// pieceSum works out the CRC-32C of total bytes from disjoint pieces of them in any order, so that bytes can be
// summed as they come. Pure; the zero value with a total is the sum of nothing.
type pieceSum struct {
	total uint64
	have  []kv.Range // summed already: ascending, disjoint, not adjacent; at most maxPieces
	sum   uint32     // their share of the whole: each piece's CRC, moved to its place
}

// add takes the piece, of which crc is the CRC-32C. False, and nothing has changed: it is empty, lies outside or
// overlaps what there is.
func (p *pieceSum) add(piece kv.Range, crc uint32) bool {
	at, ok := p.fits(piece)
	if ok {
		p.insert(at, piece, crc)
	}
	return ok
}

// insert takes a piece that fits, at its index.
func (p *pieceSum) insert(at int, piece kv.Range, crc uint32) {
	p.sum ^= crcShift(crc, p.total-piece.Off-piece.Len)
	end := piece.Off + piece.Len
	before := at > 0 && p.have[at-1].Off+p.have[at-1].Len == piece.Off
	behind := at < len(p.have) && p.have[at].Off == end
	switch {
	case before && behind:
		p.have[at-1].Len += piece.Len + p.have[at].Len
		p.have = append(p.have[:at], p.have[at+1:]...)
	case before:
		p.have[at-1].Len += piece.Len
	case behind:
		p.have[at] = kv.Range{Off: piece.Off, Len: piece.Len + p.have[at].Len}
	default:
		p.have = append(p.have, kv.Range{})
		copy(p.have[at+1:], p.have[at:])
		p.have[at] = piece
	}
}

// fits reports whether add would take the piece, and where insert puts it in have.
func (p *pieceSum) fits(piece kv.Range) (at int, ok bool) {
	if piece.Len == 0 || piece.Off > p.total || piece.Len > p.total-piece.Off {
		return 0, false
	}
	at = sort.Search(len(p.have), func(k int) bool { return p.have[k].Off >= piece.Off })
	if at > 0 && p.have[at-1].Off+p.have[at-1].Len > piece.Off {
		return 0, false
	}
	return at, at == len(p.have) || p.have[at].Off >= piece.Off+piece.Len
}

// full reports that no further piece need be remembered.
func (p *pieceSum) full() bool { return len(p.have) >= maxPieces }

// missing lists what has not been summed, ascending.
func (p *pieceSum) missing() []kv.Range {
	var out []kv.Range
	at := uint64(0)
	for _, h := range append(p.have[:len(p.have):len(p.have)], kv.Range{Off: p.total}) {
		if h.Off > at {
			out = append(out, kv.Range{Off: at, Len: h.Off - at})
		}
		at = h.Off + h.Len
	}
	return out
}

// A CRC is the remainder of a polynomial over GF(2), in which appending n bytes to a text is a multiplication by
// x^(8n); so that of a text is the exclusive or of its pieces', each multiplied for the bytes behind it.
// The words hold the coefficient of x^0 in the highest bit, as the checksum itself does.

// powers[k] is x^(2^k) modulo the polynomial.
var powers = func() (p [67]uint32) {
	p[0] = 1 << 30
	for k := 1; k < len(p); k++ {
		p[k] = crcMul(p[k-1], p[k-1])
	}
	return p
}()

// crcMul multiplies modulo the polynomial of CRC-32C.
func crcMul(a, b uint32) (product uint32) {
	for bit := uint32(1) << 31; bit != 0; bit >>= 1 {
		if a&bit != 0 {
			product ^= b
		}
		if b&1 != 0 {
			b = b>>1 ^ crc32.Castagnoli
		} else {
			b >>= 1
		}
	}
	return product
}

// crcShift is crc's share of the checksum of a text in which n bytes follow.
func crcShift(crc uint32, n uint64) uint32 {
	for k := 3; n > 0; k, n = k+1, n>>1 { // 2^3 bits a byte
		if n&1 != 0 {
			crc = crcMul(powers[k], crc)
		}
	}
	return crc
}
