package shm

import (
	"errors"
	"fmt"
	"io"
	"net"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
)

// mappings of the source: the target's memory and the connection's control area.
type mappings struct {
	mem []byte
	ctl control
}

func (m mappings) unmap() {
	for _, b := range [][]byte{m.mem, m.ctl.b} {
		if b != nil {
			_ = unix.Munmap(b[:cap(b)]) // fails only for what is no mapping
		}
	}
}

// greet is the source's half of the handshake. What it returns is to be unmapped, with an
// error too.
func greet(conn *net.UnixConn, s transfer.SessionID, size uint64) (mappings, error) {
	hello := message{kind: kindHello, value: uint64(s), code: version}
	if _, err := conn.Write(hello.append(nil)); err != nil {
		return mappings{}, fmt.Errorf("send hello: %w", err)
	}
	m, fds, err := receiveWelcome(conn)
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd) // a mapping keeps its file
		}
	}()
	if err != nil {
		return mappings{}, fmt.Errorf("read answer to hello: %w", err)
	}
	if err := m.refusal(); err != nil {
		return mappings{}, err
	}
	if len(fds) != 2 || m.value != size || size > 1<<62 {
		return mappings{}, fmt.Errorf("%w: %d descriptors and %d bytes, want 2 and %d", errMessage, len(fds), m.value, size)
	}
	var maps mappings
	if maps.mem, err = mapShared(fds[0], int(size)); err != nil {
		return maps, err
	}
	if maps.ctl.b, err = mapShared(fds[1], controlSize); err != nil {
		return maps, err
	}
	return maps, maps.ctl.check()
}

// receiveWelcome reads the target's answer and the descriptors that come with it.
func receiveWelcome(conn *net.UnixConn) (message, []int, error) {
	var b [messageLen]byte
	oob := make([]byte, unix.CmsgSpace(8*4))
	n, oobn, flags, _, err := conn.ReadMsgUnix(b[:], oob) // sets close-on-exec on descriptors
	fds, rerr := rights(oob[:oobn])
	switch {
	case err != nil:
		return message{}, fds, err
	case n == 0:
		return message{}, fds, io.EOF
	case rerr != nil:
		return message{}, fds, rerr
	case flags&unix.MSG_CTRUNC != 0:
		return message{}, fds, errors.New("descriptors did not fit (too many open files?)")
	}
	if _, err := io.ReadFull(conn, b[n:]); err != nil {
		return message{}, fds, err
	}
	var m message
	if err := m.decode(b[:]); err != nil {
		return message{}, fds, err
	}
	if m.kind != kindWelcome {
		return message{}, fds, errOrder
	}
	return m, fds, nil
}

// rights takes the descriptors from control messages.
func rights(oob []byte) ([]int, error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("parse control message: %w", err)
	}
	var fds []int
	for i := range msgs {
		if got, err := unix.ParseUnixRights(&msgs[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	return fds, nil
}

// sameUser reports whether the process at the other end runs as this user, or as root.
func sameUser(conn *net.UnixConn) (bool, error) {
	rc, err := conn.SyscallConn()
	if err != nil {
		return false, err
	}
	var cred *unix.Ucred
	var cerr error
	if err := rc.Control(func(fd uintptr) {
		cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return false, err
	}
	if cerr != nil {
		return false, cerr
	}
	return int(cred.Uid) == unix.Getuid() || cred.Uid == 0, nil
}
