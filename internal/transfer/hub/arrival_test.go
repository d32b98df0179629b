package hub

import (
	"testing"

	"github.com/baton-pd/baton/internal/kv"
)

// FuzzArrival: whatever parts a peer names, what is accepted and what is left make the checksum of the bytes, none is summed twice, and
// nothing outside the chunk is read.
func FuzzArrival(f *testing.F) {
	f.Add(partNote{Runs: []run{{0, 10, 0, 1}, {20, 5, 10, 8}}}.encode(), partNote{Part: 1, Runs: []run{{10, 10, 0, 1}}}.encode())
	f.Add(partNote{Runs: []run{{0, 1, 2, 128}}}.encode(), partNote{Part: 3, Runs: []run{{1, 1, 2, 128}}}.encode())
	f.Add(partNote{Runs: []run{{250, 1, 1, 1 << 31}}}.encode(), partNote{Runs: []run{{1<<32 - 1, 1<<32 - 1, 1<<32 - 1, 1<<32 - 1}}}.encode())
	mem := make([]byte, 1000)
	for i := range mem {
		mem[i] = byte(i * i)
	}
	ranges := []kv.Range{{Off: 700, Len: 100}, {Off: 3, Len: 1}, {Off: 100, Len: 155}} // 256 bytes, not in order
	var whole uint32
	for _, r := range ranges {
		whole = crcAdd(whole, mem[r.Off:r.Off+r.Len])
	}
	f.Fuzz(func(t *testing.T, one, two []byte) {
		a := newArrival(ranges)
		for _, b := range [][]byte{one, two} {
			_, n, err := decodeNote(b)
			if err != nil || n == nil || !a.see(n.Part) {
				continue
			}
			for _, r := range n.Runs {
				a.budget = maxPieces
				before := a.summed()
				if ok := a.add(mem, r); ok && !a.sum.full() && a.summed() != before+uint64(r.Len)*uint64(r.Count) {
					t.Fatalf("%v adds %d bytes", r, a.summed()-before)
				}
			}
		}
		if got := a.rest(mem); got != whole || a.summed() != 256 {
			t.Fatalf("%x of %d bytes, want %x", got, a.summed(), whole)
		}
	})
}

// TestPiecesCost: however a peer cuts a chunk up, also so that there is little to remember, only so many pieces are summed one by one.
func TestPiecesCost(t *testing.T) {
	const size = 1 << 20
	mem := make([]byte, size)
	for i := range mem {
		mem[i] = byte(i >> 3)
	}
	for name, next := range map[string]func(k uint32) run{
		"side by side": func(k uint32) run { return run{k << 12, 1, 1, 1 << 12} },
		"gaps filled":  func(k uint32) run { return run{k>>1<<12 + k&1, 1, 2, 1 << 11} },
	} {
		a := newArrival([]kv.Range{{Len: size}})
		for k := range uint32(size >> 12) {
			if !a.add(mem, next(k)) {
				t.Fatalf("%s: %v is refused", name, next(k))
			}
		}
		if n := a.summed(); n > maxPieces+size/minPiece {
			t.Errorf("%s: %d pieces of a byte were summed", name, n)
		}
		if got := a.rest(mem); got != crcAdd(0, mem) || a.summed() != size {
			t.Errorf("%s: checksum %x of %d bytes", name, got, a.summed())
		}
	}
}

// summed is how many bytes have been.
func (a *arrival) summed() (n uint64) {
	for _, h := range a.sum.have {
		n += h.Len
	}
	return n
}
