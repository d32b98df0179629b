package hub

import (
	"bytes"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// FuzzNote: a notification is refused, or names a chunk of a room or a part of one and encodes to the same bytes.
func FuzzNote(f *testing.F) {
	f.Add(chunkNote{Key: room.Key{Room: 1, Gen: 2}, Index: 3, Count: 4, Bytes: 5, CRC: 6, Parts: 7}.encode())
	f.Add(chunkNote{Key: room.Key{Room: math.MaxUint64, Gen: math.MaxUint32}, Index: math.MaxUint32 - 1, Count: math.MaxUint32, Bytes: math.MaxUint32}.encode())
	f.Add(chunkNote{Count: 1}.encode()[:noteSize-1])
	f.Add(chunkNote{Index: 1, Count: 1}.encode())
	f.Add(chunkNote{Count: 1, Parts: maxParts + 1}.encode())
	f.Add(partNote{Key: room.Key{Room: 1, Gen: 2}, Index: 3, Part: 4}.encode())
	f.Add(partNote{Part: maxParts, Runs: []run{{Len: 1, Count: 1}}}.encode())
	f.Add(partNote{Runs: slices.Repeat([]run{{Off: 1, Len: 2, Stride: 3, Count: 4}}, maxRuns)}.encode())
	f.Add(partNote{Runs: []run{{Off: 1, Len: 2, Stride: 1, Count: 4}}}.encode())
	f.Add(partNote{Runs: []run{{math.MaxUint32, math.MaxUint32, math.MaxUint32, math.MaxUint32}}}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		n, part, err := decodeNote(b)
		switch {
		case err != nil:
			if n != (chunkNote{}) || part != nil {
				t.Fatalf("%+v, %+v beside an error", n, part)
			}
		case part == nil:
			if n.Index >= n.Count || n.Parts > maxParts || !bytes.Equal(n.encode(), b) {
				t.Fatalf("%x decodes to %+v, which encodes as %x", b, n, n.encode())
			}
		case n != (chunkNote{}) || part.Part >= maxParts || !bytes.Equal(part.encode(), b):
			t.Fatalf("%x decodes to %+v and %+v, which encodes as %x", b, n, *part, part.encode())
		default:
			for _, r := range part.Runs {
				end := r.end()
				if end < uint64(r.Off)+uint64(r.Len) {
					t.Fatalf("the end of %v is %d", r, end)
				}
				first := true
				r.pieces(func(p kv.Range) bool { // never more than asked for
					if !first || p != (kv.Range{Off: uint64(r.Off), Len: uint64(r.Len)}) {
						t.Fatalf("%v begins with %v", r, p)
					}
					first = false
					return false
				})
			}
		}
	})
}

// TestNotesFit: the longest notification is one that every transport takes.
func TestNotesFit(t *testing.T) {
	if n := len(partNote{Runs: make([]run, maxRuns)}.encode()); n > transfer.MaxNotify || n+runSize <= transfer.MaxNotify || noteSize > transfer.MaxNotify {
		t.Errorf("%d and %d bytes, of %d", n, noteSize, transfer.MaxNotify)
	}
}

// TestRunsAreThePieces: runs list the pieces they were made of, in order, all of them if they fit; pages of the same size are one run.
func TestRunsAreThePieces(t *testing.T) {
	unfold := func(runs []run) (out []kv.Range) {
		for _, r := range runs {
			r.pieces(func(p kv.Range) bool { out = append(out, p); return true })
		}
		return out
	}
	var strips []kv.Range
	for k := range uint64(200) {
		strips = append(strips, kv.Range{Off: 64 + 1000*k, Len: 100})
	}
	if runs := runsOf(strips); len(runs) != 1 || !slices.Equal(unfold(runs), strips) {
		t.Errorf("%v", runs)
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var pieces []kv.Range
		at := uint64(0)
		for range rnd.IntN(40) {
			at += uint64(rnd.IntN(3)) + 1
			n := uint64(rnd.IntN(3)) + 1
			pieces = append(pieces, kv.Range{Off: at, Len: n})
			at += n
		}
		runs := runsOf(pieces)
		got := unfold(runs)
		if len(runs) > maxRuns || len(got) > len(pieces) || !slices.Equal(got, pieces[:len(got)]) || len(runs) < maxRuns && len(got) < len(pieces) {
			t.Fatalf("%v of %v", runs, pieces)
		}
		n := partNote{Runs: runs}
		if _, back, err := decodeNote(n.encode()); err != nil || !slices.Equal(back.Runs, runs) {
			t.Fatalf("%v comes back as %v, %v", runs, back, err)
		}
	}
}
