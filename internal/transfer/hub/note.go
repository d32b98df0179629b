package hub

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// chunkNote is the notification that makes a chunk whole: it names the chunk completely, so that a late or
// misdirected write can not pass for another. It comes with the last bytes, or after them, or while they are still
// on their way: the chunk has landed when it and all partNotes that it counts are there.
//
// Wire: magic u32, room u64, gen u32, index u32, count u32, bytes u32, crc32c u32, parts u32; little-endian.
type chunkNote struct {
	Key   room.Key
	Index uint32 // 0 <= Index < Count
	Count uint32 // chunks of the room
	Bytes uint32 // exact exported size
	CRC   uint32 // CRC-32C of the bytes, as the prefill side has them at the chunk's end
	Parts uint32 // writes of the chunk that carry a partNote, <= maxParts
}

// partNote is the notification of one of several writes that bring a chunk: some bytes have been applied, and here is
// where they are, so that the decode side can sum them while others travel. It proves nothing by itself.
//
// Wire: magic u32, room u64, gen u32, index u32, part u32, and up to maxRuns of offset u32, length u32, stride u32, count u32.
type partNote struct {
	Key   room.Key
	Index uint32 // of the chunk
	Part  uint32 // 0 <= Part < maxParts; each of a chunk's is another one
	// Runs need not name every byte of the write. Offsets are of the chunk's bytes in the order of its checksum.
	Runs []run
}

// run is Count pieces of Len bytes, the first at Off, each Stride behind the one before.
type run struct {
	Off, Len, Stride, Count uint32 // Len, Count > 0; Stride >= Len, 0 with a Count of 1
}

const (
	noteMagic = 0x324b4e42 // "BNK2"
	noteSize  = 4 + 8 + 4 + 5*4
	partMagic = 0x31504e42 // "BNP1"
	partSize  = 4 + 8 + 4 + 2*4
	runSize   = 4 * 4
	maxRuns   = (transfer.MaxNotify - partSize) / runSize
	maxParts  = 1 << 12
)

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	errNote    = errors.New("chunk notification is malformed")
)

func (n chunkNote) encode() []byte {
	b := appendKey(make([]byte, 0, noteSize), noteMagic, n.Key)
	for _, v := range []uint32{n.Index, n.Count, n.Bytes, n.CRC, n.Parts} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	return b
}

func (n partNote) encode() []byte {
	b := appendKey(make([]byte, 0, partSize+len(n.Runs)*runSize), partMagic, n.Key)
	b = binary.LittleEndian.AppendUint32(b, n.Index)
	b = binary.LittleEndian.AppendUint32(b, n.Part)
	for _, r := range n.Runs {
		for _, v := range []uint32{r.Off, r.Len, r.Stride, r.Count} {
			b = binary.LittleEndian.AppendUint32(b, v)
		}
	}
	return b
}

func appendKey(b []byte, magic uint32, k room.Key) []byte {
	b = binary.LittleEndian.AppendUint32(b, magic)
	b = binary.LittleEndian.AppendUint64(b, k.Room)
	return binary.LittleEndian.AppendUint32(b, k.Gen)
}

// decodeNote reads either kind: with an error both are zero, otherwise part is nil for a chunkNote.
func decodeNote(b []byte) (chunk chunkNote, part *partNote, err error) {
	if len(b) < partSize {
		return chunkNote{}, nil, errNote
	}
	key := room.Key{Room: binary.LittleEndian.Uint64(b[4:]), Gen: binary.LittleEndian.Uint32(b[12:])}
	word := func(k int) uint32 { return binary.LittleEndian.Uint32(b[16+4*k:]) }
	switch magic := binary.LittleEndian.Uint32(b); {
	case magic == noteMagic && len(b) == noteSize:
		n := chunkNote{Key: key, Index: word(0), Count: word(1), Bytes: word(2), CRC: word(3), Parts: word(4)}
		if n.Count == 0 || n.Index >= n.Count || n.Parts > maxParts {
			return chunkNote{}, nil, errNote
		}
		return n, nil, nil
	case magic == partMagic && (len(b)-partSize)%runSize == 0 && (len(b)-partSize)/runSize <= maxRuns:
		n := &partNote{Key: key, Index: word(0), Part: word(1)}
		for k := 2; k < (len(b)-16)/4; k += 4 {
			r := run{word(k), word(k + 1), word(k + 2), word(k + 3)}
			if r.Len == 0 || r.Count == 0 || r.Count == 1 && r.Stride != 0 || r.Count > 1 && r.Stride < r.Len {
				return chunkNote{}, nil, errNote
			}
			n.Runs = append(n.Runs, r)
		}
		if n.Part >= maxParts {
			return chunkNote{}, nil, errNote
		}
		return chunkNote{}, n, nil
	}
	return chunkNote{}, nil, errNote
}

// end is where the run's last piece ends.
func (r run) end() uint64 { return uint64(r.Off) + uint64(r.Count-1)*uint64(r.Stride) + uint64(r.Len) }

// pieces calls do with each piece until it says false.
func (r run) pieces(do func(kv.Range) bool) {
	for k := range uint64(r.Count) {
		if !do(kv.Range{Off: uint64(r.Off) + k*uint64(r.Stride), Len: uint64(r.Len)}) {
			return
		}
	}
}

// String is for errors.
func (r run) String() string { return fmt.Sprintf("%d x [%d,+%d)/%d", r.Count, r.Off, r.Len, r.Stride) }

// runsOf writes pieces, ascending, as runs; what does not fit into maxRuns is left out.
func runsOf(pieces []kv.Range) (out []run) {
	for _, p := range pieces {
		off, n := uint32(p.Off), uint32(p.Len)
		if k := len(out) - 1; k >= 0 && out[k].Len == n {
			r := &out[k]
			switch step := off - r.Off - r.Stride*(r.Count-1); {
			case r.Count == 1:
				r.Stride, r.Count = step, 2
				continue
			case r.Stride == step:
				r.Count++
				continue
			}
		}
		if len(out) == maxRuns {
			return out
		}
		out = append(out, run{Off: off, Len: n, Count: 1})
	}
	return out
}

// crcOf is the CRC-32C over parts in order.
func crcOf(parts [][]byte) uint32 {
	var c uint32
	for _, p := range parts {
		c = crcAdd(c, p)
	}
	return c
}

// crcAdd continues a checksum.
func crcAdd(c uint32, b []byte) uint32 { return crc32.Update(c, castagnoli, b) }
