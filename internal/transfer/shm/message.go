package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"github.com/baton-pd/baton/internal/transfer"
)

// version of messages and control area; both sides must have the same.
const version = 2

const (
	messageMagic = 0x4d485342 // "BSHM"
	messageLen   = 32
)

// kind of a message, on the socket unless it says otherwise.
type kind uint8

const (
	kindHello   kind = 1 // source: value is the session, code the version
	kindWelcome kind = 2 // target: code is a status, value the memory's bytes, or why it failed; carries two descriptors
	kindDone    kind = 3 // source, in the ring: write value under grant is applied; notification follows
	kindLeft    kind = 4 // source: it was inside the grant when it was revoked, and has left
	kindAnswer  kind = 5 // target: write value ended with a verdict in code
	kindWake    kind = 6 // source: there is something in the ring
)

// flagNotify: the write has a notification, perhaps of no bytes.
const flagNotify = 1

var (
	errMessage = errors.New("shm: malformed message")
	errVersion = errors.New("shm: peer speaks another version")
	errOrder   = errors.New("shm: message out of place")
)

// message is what both ends say to each other. Fields that a kind does not use are 0.
//
//	0 magic u32   4 kind u8   5 flags u8   6 notify length u16
//	8 value u64   16 grant u64   24 code u32   28 zero u32
type message struct {
	kind    kind
	notify  bool
	notifyN int // <= transfer.MaxNotify
	value   uint64
	grant   transfer.GrantID
	code    uint32
}

func (m *message) append(b []byte) []byte {
	var flags byte
	if m.notify {
		flags = flagNotify
	}
	b = binary.LittleEndian.AppendUint32(b, messageMagic)
	b = append(b, byte(m.kind), flags)
	b = binary.LittleEndian.AppendUint16(b, uint16(m.notifyN))
	b = binary.LittleEndian.AppendUint64(b, m.value)
	b = binary.LittleEndian.AppendUint64(b, uint64(m.grant))
	b = binary.LittleEndian.AppendUint32(b, m.code)
	return binary.LittleEndian.AppendUint32(b, 0)
}

// decode fills m from the first messageLen bytes of b.
func (m *message) decode(b []byte) error {
	_ = b[messageLen-1]
	*m = message{
		kind:    kind(b[4]),
		notify:  b[5]&flagNotify != 0,
		notifyN: int(binary.LittleEndian.Uint16(b[6:])),
		value:   binary.LittleEndian.Uint64(b[8:]),
		grant:   transfer.GrantID(binary.LittleEndian.Uint64(b[16:])),
		code:    binary.LittleEndian.Uint32(b[24:]),
	}
	if binary.LittleEndian.Uint32(b) != messageMagic || b[5]&^flagNotify != 0 || binary.LittleEndian.Uint32(b[28:]) != 0 {
		return errMessage
	}
	var want message // with the fields this kind may use
	switch m.kind {
	case kindHello, kindWelcome, kindAnswer:
		want = message{value: m.value, code: m.code}
	case kindDone:
		want = message{notify: m.notify, notifyN: m.notifyN, value: m.value, grant: m.grant}
		if m.notifyN > transfer.MaxNotify || !m.notify && m.notifyN != 0 {
			return errMessage
		}
	case kindLeft:
		want = message{grant: m.grant}
	case kindWake:
	default:
		return errMessage
	}
	if want.kind = m.kind; *m != want {
		return errMessage
	}
	return nil
}

// status answers a hello.
type status uint32

const (
	statusOK      status = 0
	statusVersion status = 1 // the target speaks another version
	statusSession status = 2 // no such session
	statusBusy    status = 3 // too many connections, or grants, of this session
	statusUser    status = 4 // the source runs as another user
	statusFailed  status = 5 // the target has no descriptor or memory for it; value is the errno
)

// refusal is what Dial returns for a welcome.
func (m *message) refusal() error {
	switch s := status(m.code); s {
	case statusOK:
		return nil
	case statusVersion:
		return errVersion
	case statusSession:
		return transfer.ErrSession
	case statusBusy:
		return fmt.Errorf("shm: too many connections of one session: %w", transfer.ErrSession)
	case statusUser:
		return errors.New("shm: target runs as another user")
	case statusFailed:
		return fmt.Errorf("shm: target could not set the connection up: %w", syscall.Errno(m.value))
	default:
		return fmt.Errorf("shm: unknown handshake status %d", uint32(s))
	}
}

// Verdicts in an answer.
const (
	verdictOK    = 0
	verdictGrant = 1
)
