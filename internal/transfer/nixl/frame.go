package nixl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Two conversations use the same frames: a worker with its helper, over a socket pair,
// and a source with a target, over tcp. Little-endian, 12 bytes of header:
//
//	0 magic u32   4 version u8   5 kind u8   6 zero u16   8 length of the body u32
const (
	frameMagic = 0x4c58494e // "NIXL"
	version    = 1
	headerLen  = 12
	// maxBody holds a write of maxSegments with its notification.
	maxBody = 1 << 20
)

// kind of a frame. The two conversations share no kinds, so a frame on the wrong
// socket is an error.
type kind uint8

const (
	// Worker to helper.
	cmdStart   kind = 1 // startJob
	cmdConnect kind = 2 // connectJob
	cmdWrite   kind = 3 // see appendWrite
	cmdActive  kind = 4 // u64: 1 poll for what others write, 0 need not
	cmdPing    kind = 5 // u64

	// Helper to worker.
	evReady     kind = 16 // readyInfo
	evConnected kind = 17
	evDone      kind = 18 // u64 id: every byte of that write is at the destination
	evNote      kind = 19 // the notification of another agent
	evPong      kind = 20 // the ping's u64
	evFailed    kind = 21 // text; the helper ends

	// Source to target.
	ctlHello kind = 32 // u64 session
	ctlEnter kind = 33 // see appendEnter
	ctlLeft  kind = 34 // u64 seq: that write will store nothing more, and was not finished

	// Target to source.
	ctlWelcome kind = 48 // welcome
	ctlAnswer  kind = 49 // u64 seq, u64 verdict
	ctlRevoke  kind = 50 // u64 grant: leave it
	ctlBye     kind = 51 // text: why the target ends the connection; the last frame
)

var (
	errFrame   = errors.New("nixl: malformed frame")
	errVersion = errors.New("nixl: the other side speaks another version")
	errOrder   = errors.New("nixl: frame out of place")
)

// appendFrame appends a header; its body, n bytes, follows.
func appendFrame(b []byte, k kind, n int) []byte {
	b = binary.LittleEndian.AppendUint32(b, frameMagic)
	b = append(b, version, byte(k), 0, 0)
	return binary.LittleEndian.AppendUint32(b, uint32(n))
}

// appendWords appends a frame whose body is these numbers.
func appendWords(b []byte, k kind, words ...uint64) []byte {
	b = appendFrame(b, k, 8*len(words))
	for _, w := range words {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	return b
}

// words reads a body of exactly len(out) numbers.
func words(body []byte, out ...*uint64) error {
	if len(body) != 8*len(out) {
		return errFrame
	}
	for i, p := range out {
		*p = binary.LittleEndian.Uint64(body[8*i:])
	}
	return nil
}

// parseHeader takes kind and body length out of a header; limit bounds the length.
func parseHeader(h []byte, limit int) (kind, int, error) {
	_ = h[headerLen-1]
	n := binary.LittleEndian.Uint32(h[8:])
	switch {
	case binary.LittleEndian.Uint32(h) != frameMagic || h[6] != 0 || h[7] != 0:
		return 0, 0, errFrame
	case h[4] != version:
		return 0, 0, fmt.Errorf("%w (%d, here %d)", errVersion, h[4], version)
	case n > uint32(limit):
		return 0, 0, fmt.Errorf("%w: %d bytes of body", errFrame, n)
	}
	return kind(h[5]), int(n), nil
}

// frames reads frames from a stream. One goroutine.
type frames struct {
	r    io.Reader
	head [headerLen]byte
	body []byte
}

// next returns the next frame; the body is valid until the call after.
func (f *frames) next(limit int) (kind, []byte, error) {
	if _, err := io.ReadFull(f.r, f.head[:]); err != nil {
		return 0, nil, err
	}
	k, n, err := parseHeader(f.head[:], limit)
	if err != nil {
		return 0, nil, err
	}
	if cap(f.body) < n {
		f.body = make([]byte, n)
	}
	f.body = f.body[:n]
	if _, err := io.ReadFull(f.r, f.body); err != nil {
		return 0, nil, err
	}
	return k, f.body, nil
}
