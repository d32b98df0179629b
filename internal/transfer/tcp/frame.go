package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

const (
	// version of the wire format; both sides must have the same.
	version = 1

	helloMagic  = 0x5043544e4f544142 // "BATONTCP"
	frameMagic  = 0x464e5442         // "BTNF"
	answerMagic = 0x414e5442         // "BTNA"

	helloLen   = 32
	welcomeLen = 16
	headerLen  = 64
	entryLen   = 16
	answerLen  = 16

	// maxSegments is the largest segment table: 16,384 blocks, 256 KiB of table.
	maxSegments = 16384
	// inlineBytes is the longest write that Post sends itself, if the socket takes it at once.
	inlineBytes = 64 << 10
	// quickBytes is the longest write of the quick connection.
	quickBytes = 256 << 10
	// maxFrame bounds the payload of one frame in bytes.
	maxFrame = 16 << 20
	// maxOpen is how many writes of one connection may be under way at once. It
	// bounds the target's memory for tables: maxOpen*maxSegments*entryLen = 16 MiB.
	maxOpen = 64
)

var (
	errMagic    = errors.New("tcp: wrong magic number")
	errVersion  = errors.New("tcp: peer speaks another version")
	errHeader   = errors.New("tcp: malformed frame header")
	errTable    = errors.New("tcp: segment table does not add up to the payload")
	errSequence = errors.New("tcp: frame out of sequence")
	errAnswer   = errors.New("tcp: answer to no outstanding write")
)

// hello is the first thing a source sends.
//
//	0 magic u64   8 version u32   12 zero u32   16 session u64   24 zero u64
type hello struct{ session transfer.SessionID }

func (h hello) encode(b *[helloLen]byte) {
	*b = [helloLen]byte{}
	binary.LittleEndian.PutUint64(b[0:], helloMagic)
	binary.LittleEndian.PutUint32(b[8:], version)
	binary.LittleEndian.PutUint64(b[16:], uint64(h.session))
}

func decodeHello(b *[helloLen]byte) (hello, error) {
	switch {
	case binary.LittleEndian.Uint64(b[0:]) != helloMagic:
		return hello{}, errMagic
	case binary.LittleEndian.Uint32(b[8:]) != version:
		return hello{}, errVersion
	case binary.LittleEndian.Uint32(b[12:]) != 0, binary.LittleEndian.Uint64(b[24:]) != 0:
		return hello{}, errHeader
	}
	return hello{session: transfer.SessionID(binary.LittleEndian.Uint64(b[16:]))}, nil
}

// status answers a hello.
type status uint32

const (
	statusOK      status = 0
	statusVersion status = 1 // the target speaks another version
	statusSession status = 2 // no such session
	statusBusy    status = 3 // too many connections of this session
)

// err is what Dial returns for s.
func (s status) err() error {
	switch s {
	case statusOK:
		return nil
	case statusVersion:
		return errVersion
	case statusSession:
		return transfer.ErrSession
	case statusBusy:
		return fmt.Errorf("tcp: too many connections of one session: %w", transfer.ErrSession)
	default:
		return fmt.Errorf("tcp: unknown handshake status %d", uint32(s))
	}
}

// welcome is the target's answer.
//
//	0 magic u64   8 version u32   12 status u32
func (s status) encode(b *[welcomeLen]byte) {
	binary.LittleEndian.PutUint64(b[0:], helloMagic)
	binary.LittleEndian.PutUint32(b[8:], version)
	binary.LittleEndian.PutUint32(b[12:], uint32(s))
}

func decodeWelcome(b *[welcomeLen]byte) (status, error) {
	if binary.LittleEndian.Uint64(b[0:]) != helloMagic {
		return 0, errMagic
	}
	s := status(binary.LittleEndian.Uint32(b[12:]))
	if s == statusOK && binary.LittleEndian.Uint32(b[8:]) != version {
		return 0, errVersion
	}
	return s, nil
}

// kind of a frame.
type kind uint8

const (
	kindOpen    kind = 1
	kindData    kind = 2
	kindAbandon kind = 3
)

// flagNotify: the write has a notification, perhaps of no bytes.
const flagNotify = 1

// header starts each frame. Fields that a kind does not use are zero on the wire.
//
//	0 magic u32   4 kind u8   5 flags u8   6 notify length u16
//	8 write number u64   16 payload bytes of this frame u64
//	24 grant u64   32 room u64   40 generation u32   44 segments u32
//	48 payload bytes of the write u64   56 zero u64
type header struct {
	kind     kind
	notify   bool
	notifyN  int    // <= transfer.MaxNotify
	seq      uint64 // from 1, counting open frames of the connection
	payload  uint64 // <= maxFrame, <= total
	grant    transfer.GrantID
	key      room.Key
	segments int // <= maxSegments
	total    uint64
}

func (h *header) encode(b []byte) {
	_ = b[headerLen-1]
	clear(b[:headerLen])
	binary.LittleEndian.PutUint32(b[0:], frameMagic)
	b[4] = byte(h.kind)
	if h.notify {
		b[5] = flagNotify
	}
	binary.LittleEndian.PutUint16(b[6:], uint16(h.notifyN))
	binary.LittleEndian.PutUint64(b[8:], h.seq)
	binary.LittleEndian.PutUint64(b[16:], h.payload)
	binary.LittleEndian.PutUint64(b[24:], uint64(h.grant))
	binary.LittleEndian.PutUint64(b[32:], h.key.Room)
	binary.LittleEndian.PutUint32(b[40:], h.key.Gen)
	binary.LittleEndian.PutUint32(b[44:], uint32(h.segments))
	binary.LittleEndian.PutUint64(b[48:], h.total)
}

// decode fills h from the first headerLen bytes of b and checks everything that can
// be checked without the connection's state.
func (h *header) decode(b []byte) error {
	_ = b[headerLen-1]
	if binary.LittleEndian.Uint32(b[0:]) != frameMagic {
		return errMagic
	}
	*h = header{
		kind:    kind(b[4]),
		notify:  b[5]&flagNotify != 0,
		notifyN: int(binary.LittleEndian.Uint16(b[6:])),
		seq:     binary.LittleEndian.Uint64(b[8:]),
		payload: binary.LittleEndian.Uint64(b[16:]),
		grant:   transfer.GrantID(binary.LittleEndian.Uint64(b[24:])),
		key:     room.Key{Room: binary.LittleEndian.Uint64(b[32:]), Gen: binary.LittleEndian.Uint32(b[40:])},
		total:   binary.LittleEndian.Uint64(b[48:]),
	}
	segments := binary.LittleEndian.Uint32(b[44:])
	if b[5]&^flagNotify != 0 || binary.LittleEndian.Uint64(b[56:]) != 0 || h.payload > maxFrame || segments > maxSegments {
		return errHeader
	}
	h.segments = int(segments)
	switch h.kind {
	case kindOpen:
		// Progress: a frame of no payload is only right for a write of none.
		if h.notifyN > transfer.MaxNotify || !h.notify && h.notifyN != 0 || h.payload > h.total || h.payload == 0 && h.total != 0 {
			return errHeader
		}
		return nil
	case kindData, kindAbandon:
		want := header{kind: h.kind, seq: h.seq, payload: h.payload}
		if *h != want || (h.kind == kindData) != (h.payload > 0) {
			return errHeader
		}
		return nil
	default:
		return errHeader
	}
}

// entry of the segment table: offset u64, length u64.
func putEntry(b []byte, off, n uint64) {
	binary.LittleEndian.PutUint64(b[0:], off)
	binary.LittleEndian.PutUint64(b[8:], n)
}

// decodeEntries appends the entries in b (a multiple of entryLen) to table and
// returns the new sum of lengths; false if it overflows.
func decodeEntries(table []transfer.Span, sum uint64, b []byte) ([]transfer.Span, uint64, bool) {
	for ; len(b) >= entryLen; b = b[entryLen:] {
		s := transfer.Span{Off: binary.LittleEndian.Uint64(b[0:]), Len: binary.LittleEndian.Uint64(b[8:])}
		var carry uint64
		if sum, carry = bits.Add64(sum, s.Len, 0); carry != 0 {
			return table, sum, false
		}
		table = append(table, s)
	}
	return table, sum, true
}

// code says how a write ended, on the wire.
type code uint32

const (
	codeOK     code = 0
	codeGrant  code = 1
	codeBounds code = 2
)

// err is what the write's Done gets; false for an unknown code.
func (c code) err() (error, bool) {
	switch c {
	case codeOK:
		return nil, true
	case codeGrant:
		return transfer.ErrGrant, true
	case codeBounds:
		return transfer.ErrBounds, true
	default:
		return nil, false
	}
}

// answer ends one write.
//
//	0 magic u32   4 code u32   8 write number u64
type answer struct {
	seq  uint64
	code code
}

func appendAnswer(b []byte, a answer) []byte {
	b = binary.LittleEndian.AppendUint32(b, answerMagic)
	b = binary.LittleEndian.AppendUint32(b, uint32(a.code))
	return binary.LittleEndian.AppendUint64(b, a.seq)
}

func decodeAnswer(b []byte) (answer, error) {
	_ = b[answerLen-1]
	if binary.LittleEndian.Uint32(b[0:]) != answerMagic {
		return answer{}, errMagic
	}
	return answer{seq: binary.LittleEndian.Uint64(b[8:]), code: code(binary.LittleEndian.Uint32(b[4:]))}, nil
}
