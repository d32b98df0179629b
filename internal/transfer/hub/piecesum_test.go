package hub

import (
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/baton-pd/baton/internal/kv"
)

// TestPieceSum: whatever pieces in whatever order, the sum is that of the whole; what overlaps, lies outside or is empty
// is refused and changes nothing. Checked against crc32.Checksum and a bit for each byte.
func TestPieceSum(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	for range 500 {
		text := make([]byte, rnd.IntN(3000))
		for i := range text {
			text[i] = byte(rnd.Uint32())
		}
		p, had := pieceSum{total: uint64(len(text))}, make([]bool, len(text))
		for range rnd.IntN(60) {
			piece := kv.Range{Off: uint64(rnd.IntN(len(text) + 2)), Len: uint64(rnd.IntN(1 + len(text)/4))}
			want := piece.Len > 0 && piece.Off+piece.Len <= p.total && !slices.Contains(had[piece.Off:piece.Off+piece.Len], true)
			crc := uint32(0)
			if want {
				crc = crcAdd(0, text[piece.Off:piece.Off+piece.Len])
				for k := range piece.Len {
					had[piece.Off+k] = true
				}
			}
			if got := p.add(piece, crc); got != want {
				t.Fatalf("%v of %d with %v: %v", piece, p.total, p.have, got)
			}
		}
		checkHave(t, &p, had)
		for _, m := range p.missing() {
			if !p.add(m, crcAdd(0, text[m.Off:m.Off+m.Len])) {
				t.Fatalf("%v is missing, but is not taken beside %v", m, p.have)
			}
		}
		if want := crc32.Checksum(text, castagnoli); p.sum != want || len(p.missing()) > 0 {
			t.Fatalf("%x of %d bytes, want %x; %v is missing", p.sum, len(text), want, p.missing())
		}
	}
}

// checkHave compares p's pieces with the bytes that it has, and missing with the others.
func checkHave(t *testing.T, p *pieceSum, had []bool) {
	t.Helper()
	got := make([]bool, len(had))
	for k, h := range p.have {
		if k > 0 && p.have[k-1].Off+p.have[k-1].Len >= h.Off {
			t.Fatalf("%v are not apart", p.have)
		}
		for n := range h.Len {
			got[h.Off+n] = true
		}
	}
	if !slices.Equal(got, had) {
		t.Fatalf("%v is not what was added", p.have)
	}
	for _, m := range p.missing() {
		for n := range m.Len {
			if got[m.Off+n] {
				t.Fatalf("%v is missing beside %v", m, p.have)
			}
			got[m.Off+n] = true
		}
	}
	if slices.Contains(got, false) {
		t.Fatalf("neither had nor missing: %v, %v", p.have, p.missing())
	}
}

// TestPieceSumOverflow: ranges near the end of the numbers are not taken for others.
func TestPieceSumOverflow(t *testing.T) {
	p := pieceSum{total: 100}
	for _, bad := range []kv.Range{{Off: 1, Len: 1<<64 - 1}, {Off: 1<<64 - 1, Len: 2}, {Off: 101, Len: 1}, {Off: 100, Len: 1}, {}} {
		if p.add(bad, 1) {
			t.Errorf("%v was taken", bad)
		}
	}
	if p.sum != 0 || p.have != nil {
		t.Errorf("%+v", p)
	}
}

// TestCRCShift against zeros that are really appended: crc(a, 0...0) = shift(crc(a)) + crc(0...0).
func TestCRCShift(t *testing.T) {
	for _, n := range []int{0, 1, 2, 3, 255, 256, 4097, 1 << 20} {
		a, zeros := []byte("some text"), make([]byte, n)
		if got, want := crcShift(crcAdd(0, a), uint64(n))^crcAdd(0, zeros), crcAdd(crcAdd(0, a), zeros); got != want {
			t.Errorf("%d bytes: %x, want %x", n, got, want)
		}
	}
	crcShift(1, 1<<64-1) // no power is missing
}

func BenchmarkCRCShift(b *testing.B) {
	for range b.N {
		crcShift(1, 2<<20-5)
	}
}
