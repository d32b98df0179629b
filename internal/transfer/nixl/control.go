package nixl

import (
	"encoding/binary"
	"fmt"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// welcome answers a hello, as JSON; where the helper could not be started, a bye does.
type welcome struct {
	Status status
	Nonce  uint64 // first word of every notification on this connection
	// How to reach the memory; see connectJob.
	Metadata []byte
	Base     uint64
	Size     uint64
	Block    uint64
}

// maxWelcome bounds the answer that a source reads before it trusts the target.
const maxWelcome = 64 << 10

// status answers a hello.
type status uint32

const (
	statusOK      status = 0
	statusSession status = 1 // no such session
	statusBusy    status = 2 // it has its connection already
)

// err is what Dial returns for w.
func (w *welcome) err() error {
	switch w.Status {
	case statusOK:
		return nil
	case statusSession:
		return transfer.ErrSession
	case statusBusy:
		return fmt.Errorf("nixl: the session has its connection already: %w", transfer.ErrSession)
	default:
		return fmt.Errorf("nixl: unknown handshake status %d", uint32(w.Status))
	}
}

// Verdicts in an answer: on an enter, and on a write that has landed.
const (
	verdictEnter  uint64 = 0 // begin to store
	verdictGrant  uint64 = 1 // no such grant, or it was revoked
	verdictBounds uint64 = 2
	verdictDone   uint64 = 3 // applied, and Landed has returned
)

// maxSegments of a write; bounds the frame that asks for it.
const maxSegments = 16384

// enter asks to store under a grant:
//
//	0 seq u64   8 grant u64   16 room u64   24 generation u32   28 flags u32 (1: notification)
//	32 notification length u32   36 number of segments u32
//	then the notification, then segments: offset u64, length u64
type enter struct {
	seq    uint64
	grant  transfer.GrantID
	key    room.Key
	notify []byte // nil: none; valid as long as the frame's body
	spans  []byte // segments as they came, 16 bytes each
}

const enterHead = 40

func appendEnter(b []byte, seq uint64, w *transfer.Write) []byte {
	b = appendFrame(b, ctlEnter, enterHead+len(w.Notify)+16*len(w.Segments))
	for _, v := range []uint64{seq, uint64(w.Grant), w.Key.Room} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	var flags uint32
	if w.Notify != nil {
		flags = 1
	}
	for _, v := range []uint32{w.Key.Gen, flags, uint32(len(w.Notify)), uint32(len(w.Segments))} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	b = append(b, w.Notify...)
	for i := range w.Segments {
		b = binary.LittleEndian.AppendUint64(b, w.Segments[i].Off)
		b = binary.LittleEndian.AppendUint64(b, uint64(len(w.Segments[i].Src)))
	}
	return b
}

func (e *enter) parse(b []byte) error {
	if len(b) < enterHead {
		return errFrame
	}
	flags, note, count := binary.LittleEndian.Uint32(b[28:]), binary.LittleEndian.Uint32(b[32:]), binary.LittleEndian.Uint32(b[36:])
	if flags > 1 || note > transfer.MaxNotify || note != 0 && flags == 0 || count > maxSegments || len(b) != enterHead+int(note)+16*int(count) {
		return errFrame
	}
	*e = enter{
		seq: binary.LittleEndian.Uint64(b), grant: transfer.GrantID(binary.LittleEndian.Uint64(b[8:])),
		key:   room.Key{Room: binary.LittleEndian.Uint64(b[16:]), Gen: binary.LittleEndian.Uint32(b[24:])},
		spans: b[enterHead+note:],
	}
	if flags == 1 {
		e.notify = b[enterHead : enterHead+note]
	}
	return nil
}

// inside reports whether every segment lies wholly in one of the grant's spans, which are
// sorted and disjoint. An empty segment may also stand at a span's end.
func (e *enter) inside(spans []transfer.Span) bool {
	for at := 0; at < len(e.spans); at += 16 {
		off, n := binary.LittleEndian.Uint64(e.spans[at:]), binary.LittleEndian.Uint64(e.spans[at+8:])
		lo, hi := 0, len(spans) // the first span that starts behind off
		for lo < hi {
			mid := int(uint(lo+hi) >> 1)
			if spans[mid].Off > off {
				hi = mid
			} else {
				lo = mid + 1
			}
		}
		if lo == 0 {
			return false
		}
		s := spans[lo-1]
		if rel := off - s.Off; rel > s.Len || n > s.Len-rel {
			return false
		}
	}
	return true
}
