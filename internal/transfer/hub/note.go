package hub

import (
	"encoding/binary"
	"errors"
	"hash/crc32"

	"github.com/baton-pd/baton/internal/room"
)

// chunkNote is the notification that follows a chunk's bytes: it names the
// chunk completely, so that a late or misdirected write can not pass for another.
//
// Wire: magic u32, room u64, gen u32, index u32, count u32, bytes u32, crc32c u32; little-endian.
type chunkNote struct {
	Key   room.Key
	Index uint32 // 0 <= Index < Count
	Count uint32 // chunks of the room
	Bytes uint32 // exact exported size
	CRC   uint32 // CRC-32C of the bytes
}

const (
	noteMagic = 0x314b4e42 // "BNK1"
	noteSize  = 4 + 8 + 4 + 4*4
)

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	errNote    = errors.New("chunk notification is malformed")
)

func (n chunkNote) encode() []byte {
	b := make([]byte, 0, noteSize)
	b = binary.LittleEndian.AppendUint32(b, noteMagic)
	b = binary.LittleEndian.AppendUint64(b, n.Key.Room)
	b = binary.LittleEndian.AppendUint32(b, n.Key.Gen)
	b = binary.LittleEndian.AppendUint32(b, n.Index)
	b = binary.LittleEndian.AppendUint32(b, n.Count)
	b = binary.LittleEndian.AppendUint32(b, n.Bytes)
	return binary.LittleEndian.AppendUint32(b, n.CRC)
}

func decodeNote(b []byte) (chunkNote, error) {
	if len(b) != noteSize || binary.LittleEndian.Uint32(b) != noteMagic {
		return chunkNote{}, errNote
	}
	n := chunkNote{
		Key: room.Key{
			Room: binary.LittleEndian.Uint64(b[4:]),
			Gen:  binary.LittleEndian.Uint32(b[12:]),
		},
		Index: binary.LittleEndian.Uint32(b[16:]),
		Count: binary.LittleEndian.Uint32(b[20:]),
		Bytes: binary.LittleEndian.Uint32(b[24:]),
		CRC:   binary.LittleEndian.Uint32(b[28:]),
	}
	if n.Count == 0 || n.Index >= n.Count {
		return chunkNote{}, errNote
	}
	return n, nil
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
