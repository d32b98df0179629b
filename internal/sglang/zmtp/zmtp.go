// Package zmtp is the part of ZeroMQ that SGLang's control channel needs: PUSH and PULL
// sockets over tcp with the NULL mechanism (ZMTP 3.0 and 3.1, RFCs 23 and 37).
//
// # Differences from a ZeroMQ socket, on purpose
//
// A [Push] is one connection and never reconnects: a message of a lost connection may be lost
// with it, so the loss is told ([Push.Down]) instead of hidden. Send never blocks; a queue that
// is full is an error. A [Pull] bounds everything that a stranger could make large (frames, messages,
// half-open connections, time) and ends only the connection that breaks the rules.
// docs/decisions/0016 says why no library is used.
package zmtp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"
)

// Message is one multipart message.
type Message [][]byte

// Limits of what a Pull takes. Zero fields take the default.
type Limits struct {
	// Frame and Message are sizes in bytes, Frames a number. Defaults 8 MiB, 16 MiB, 64.
	Frame, Message, Frames int
	// Handshake bounds greeting and READY; MaxHalfOpen the connections in them, MaxConns all.
	// Defaults 5 s, 64 and 4096.
	Handshake             time.Duration
	MaxHalfOpen, MaxConns int
}

func (l Limits) withDefaults() Limits {
	for _, d := range []struct {
		p *int
		v int
	}{{&l.Frame, 8 << 20}, {&l.Message, 16 << 20}, {&l.Frames, 64}, {&l.MaxHalfOpen, 64}, {&l.MaxConns, 4096}} {
		if *d.p <= 0 {
			*d.p = d.v
		}
	}
	if l.Handshake <= 0 {
		l.Handshake = 5 * time.Second
	}
	return l
}

var (
	// ErrProtocol: the other end does not speak this protocol, or breaks it.
	ErrProtocol = errors.New("zmtp: protocol error")
	// ErrTooLarge: a message is beyond the limits.
	ErrTooLarge = errors.New("zmtp: message too large")
	// ErrFull: the send queue is full; the other end does not read.
	ErrFull = errors.New("zmtp: send queue full")
	// ErrClosed: closed on this side.
	ErrClosed = errors.New("zmtp: closed")
)

// Bits of a frame's first byte.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

const greetingLen = 64

// greeting is ours: signature, version 3.1, mechanism NULL, no server.
func greeting() []byte {
	g := make([]byte, greetingLen)
	g[0], g[8], g[9] = 0xff, 1, 0x7f
	g[10], g[11] = 3, 1
	copy(g[12:32], "NULL")
	return g
}

// checkGreeting: ZMTP 3.x with the NULL mechanism.
func checkGreeting(g []byte) error {
	switch {
	case g[0] != 0xff || g[9] != 0x7f:
		return fmt.Errorf("%w: not a ZMTP greeting", ErrProtocol)
	case g[10] < 3:
		return fmt.Errorf("%w: ZMTP version %d, need 3", ErrProtocol, g[10])
	case string(g[12:17]) != "NULL\x00":
		return fmt.Errorf("%w: mechanism %q, need NULL", ErrProtocol, g[12:32])
	}
	return nil
}

// ready is the READY command of a socket of this type.
func ready(socketType string) []byte {
	body := append([]byte{5}, "READY"...)
	for _, kv := range [][2]string{{"Socket-Type", socketType}, {"Identity", ""}} {
		body = append(append(body, byte(len(kv[0]))), kv[0]...)
		body = append(binary.BigEndian.AppendUint32(body, uint32(len(kv[1]))), kv[1]...)
	}
	return appendFrame(nil, flagCommand, body)
}

// property finds a property in the body of a READY command; names do not depend on case.
func property(body []byte, name string) (string, error) {
	if len(body) < 6 || string(body[:6]) != "\x05READY" {
		return "", fmt.Errorf("%w: no READY command", ErrProtocol)
	}
	for b := body[6:]; len(b) > 0; {
		n := int(b[0])
		if len(b) < 1+n+4 {
			return "", fmt.Errorf("%w: READY command is cut", ErrProtocol)
		}
		key := string(b[1 : 1+n])
		size := binary.BigEndian.Uint32(b[1+n:])
		b = b[1+n+4:]
		if uint64(size) > uint64(len(b)) {
			return "", fmt.Errorf("%w: READY command is cut", ErrProtocol)
		}
		if equalFold(key, name) {
			return string(b[:size]), nil
		}
		b = b[size:]
	}
	return "", fmt.Errorf("%w: READY command without %s", ErrProtocol, name)
}

func equalFold(a, b string) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range len(a) {
		if a[i]|0x20 != b[i]|0x20 {
			return false
		}
	}
	return true
}

// appendFrame appends one frame; flags without the long bit.
func appendFrame(b []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		b = append(b, flags|flagLong)
		b = binary.BigEndian.AppendUint64(b, uint64(len(body)))
	} else {
		b = append(b, flags, byte(len(body)))
	}
	return append(b, body...)
}

// appendMessage appends a whole message.
func appendMessage(b []byte, m Message) []byte {
	for i, f := range m {
		flags := byte(flagMore)
		if i == len(m)-1 {
			flags = 0
		}
		b = appendFrame(b, flags, f)
	}
	return b
}

// reader reads frames within limits. One goroutine.
type reader struct {
	r *bufio.Reader
	l Limits
}

// frame reads one frame of at most limit bytes. Memory grows with what has come, not with
// what was announced.
func (r *reader) frame(limit int) (flags byte, body []byte, err error) {
	if flags, err = r.r.ReadByte(); err != nil {
		return 0, nil, err
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 || flags&(flagMore|flagCommand) == flagMore|flagCommand {
		return 0, nil, fmt.Errorf("%w: frame flags %#x", ErrProtocol, flags)
	}
	var head [8]byte
	var n uint64
	if flags&flagLong == 0 {
		b, err := r.r.ReadByte()
		if err != nil {
			return 0, nil, unexpected(err)
		}
		n = uint64(b)
	} else {
		if _, err := io.ReadFull(r.r, head[:]); err != nil {
			return 0, nil, unexpected(err)
		}
		n = binary.BigEndian.Uint64(head[:])
	}
	if n > uint64(limit) {
		return 0, nil, fmt.Errorf("%w: frame of %d bytes, limit %d", ErrTooLarge, n, limit)
	}
	for rest := int(n); rest > 0; {
		part := make([]byte, min(rest, 1<<20))
		if _, err := io.ReadFull(r.r, part); err != nil {
			return 0, nil, unexpected(err)
		}
		if rest -= len(part); body == nil && rest == 0 {
			body = part
		} else {
			body = append(body, part...)
		}
	}
	return flags, body, nil
}

// next reads the next message; commands between messages go to command.
func (r *reader) next(command func(body []byte) error) (Message, error) {
	var m Message
	size := 0
	for {
		flags, body, err := r.frame(min(r.l.Frame, r.l.Message-size))
		switch {
		case err != nil && len(m) > 0:
			return nil, unexpected(err)
		case err != nil:
			return nil, err
		case flags&flagCommand != 0 && len(m) > 0:
			return nil, fmt.Errorf("%w: command inside a message", ErrProtocol)
		case flags&flagCommand != 0:
			if err := command(body); err != nil {
				return nil, err
			}
			continue
		case len(m) == r.l.Frames:
			return nil, fmt.Errorf("%w: more than %d frames", ErrTooLarge, r.l.Frames)
		}
		m = append(m, body)
		size += len(body)
		if flags&flagMore == 0 {
			return m, nil
		}
	}
}

// unexpected: a stream that ends inside something.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// pong answers a PING command: its body is 2 bytes of time to live and a context.
func pong(ping []byte) ([]byte, bool) {
	const head = "\x04PING"
	if len(ping) < len(head)+2 || string(ping[:len(head)]) != head {
		return nil, false
	}
	return appendFrame(nil, flagCommand, append([]byte("\x04PONG"), ping[len(head)+2:]...)), true
}
