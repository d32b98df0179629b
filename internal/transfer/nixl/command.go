package nixl

import (
	"encoding/binary"
)

// startJob is the first command to a helper. Its memory regions come as descriptors from
// number firstRegionFD on, in this order.
type startJob struct {
	Library string // absolute path
	Name    string // of the agent
	Backend string
	Params  []param
	Kind    string // of memory, a key of memoryKinds
	Device  uint64
	Regions []uint64 // bytes
	// Block is the size of prepared blocks of the first region; 0: none.
	Block uint64
}

// readyInfo answers it.
type readyInfo struct {
	Metadata []byte
	Base     uint64 // address of the first region in the helper
}

// connectJob makes a helper ready to write to another's first region.
type connectJob struct {
	Metadata   []byte
	Base, Size uint64
	Block      uint64 // of the other's prepared blocks; 0: none
}

// Descriptors of a helper process, besides the standard ones.
const (
	helperFD      = 3 // socket to the worker
	firstRegionFD = 4
)

// block is one block of a write: offsets in a local region and in the other side's memory.
type block struct{ From, To, Len uint64 }

// job is one write for a helper. With no blocks it is only its note.
type job struct {
	ID     uint64
	Region uint32
	// Index: every block is a prepared one, on both sides.
	Index  bool
	Note   []byte // nil: none
	Blocks []block
}

const (
	jobHead   = 24
	flagIndex = 1
	flagNote  = 2
	blockLen  = 24
	maxNote   = 64
)

// appendWrite encodes a job as a frame:
//
//	0 id u64   8 region u32   12 flags u32   16 note length u32   20 number of blocks u32
//	then the note, then blocks of 24 bytes.
func appendWrite(b []byte, j *job) []byte {
	var flags uint32
	if j.Index {
		flags |= flagIndex
	}
	if j.Note != nil {
		flags |= flagNote
	}
	b = appendFrame(b, cmdWrite, jobHead+len(j.Note)+blockLen*len(j.Blocks))
	b = binary.LittleEndian.AppendUint64(b, j.ID)
	b = binary.LittleEndian.AppendUint32(b, j.Region)
	b = binary.LittleEndian.AppendUint32(b, flags)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(j.Note)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(j.Blocks)))
	b = append(b, j.Note...)
	for _, x := range j.Blocks {
		b = binary.LittleEndian.AppendUint64(b, x.From)
		b = binary.LittleEndian.AppendUint64(b, x.To)
		b = binary.LittleEndian.AppendUint64(b, x.Len)
	}
	return b
}

// parse fills j from a body; it reuses j's blocks and keeps no part of body but the note,
// which is valid as long as body.
func (j *job) parse(body []byte) error {
	if len(body) < jobHead {
		return errFrame
	}
	flags := binary.LittleEndian.Uint32(body[12:])
	note, count := binary.LittleEndian.Uint32(body[16:]), binary.LittleEndian.Uint32(body[20:])
	if note > maxNote || count > maxBody/blockLen || len(body) != jobHead+int(note)+blockLen*int(count) || flags&^uint32(flagIndex|flagNote) != 0 {
		return errFrame
	}
	*j = job{ID: binary.LittleEndian.Uint64(body), Region: binary.LittleEndian.Uint32(body[8:]), Index: flags&flagIndex != 0, Blocks: j.Blocks[:0]}
	if flags&flagNote != 0 {
		j.Note = body[jobHead : jobHead+note]
	} else if note != 0 {
		return errFrame
	}
	for at := jobHead + int(note); at < len(body); at += blockLen {
		j.Blocks = append(j.Blocks, block{
			From: binary.LittleEndian.Uint64(body[at:]), To: binary.LittleEndian.Uint64(body[at+8:]), Len: binary.LittleEndian.Uint64(body[at+16:]),
		})
	}
	return nil
}
