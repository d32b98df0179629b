package hub

import (
	"bytes"
	"math"
	"testing"

	"github.com/baton-pd/baton/internal/room"
)

// FuzzNote: a notification is refused, or names a chunk of a room and encodes to the same bytes.
func FuzzNote(f *testing.F) {
	f.Add(chunkNote{Key: room.Key{Room: 1, Gen: 2}, Index: 3, Count: 4, Bytes: 5, CRC: 6}.encode())
	f.Add(chunkNote{Key: room.Key{Room: math.MaxUint64, Gen: math.MaxUint32}, Index: math.MaxUint32 - 1, Count: math.MaxUint32, Bytes: math.MaxUint32}.encode())
	f.Add(chunkNote{Count: 1}.encode()[:noteSize-1])
	f.Add(chunkNote{Index: 1, Count: 1}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := decodeNote(b)
		if err != nil {
			if n != (chunkNote{}) {
				t.Fatalf("%+v beside an error", n)
			}
			return
		}
		if n.Index >= n.Count || !bytes.Equal(n.encode(), b) {
			t.Fatalf("%x decodes to %+v, which encodes as %x", b, n, n.encode())
		}
	})
}
