package tcp

import (
	"errors"
	"net"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxIovecs is the kernel's limit (IOV_MAX) for one readv or writev.
const maxIovecs = 1024

// addVec appends b to iov; empty slices are left out. The entries hold real pointers,
// so the memory stays reachable while the vector is in use.
func addVec(iov []unix.Iovec, b []byte) []unix.Iovec {
	if len(b) == 0 {
		return iov
	}
	return append(iov, vec(b))
}

func vec(b []byte) unix.Iovec {
	v := unix.Iovec{Base: unsafe.SliceData(b)}
	v.SetLen(len(b))
	return v
}

// advance drops the first n bytes of iov.
func advance(iov []unix.Iovec, n int) []unix.Iovec {
	for n > 0 {
		l := int(iov[0].Len)
		if n < l {
			iov[0].Base = (*byte)(unsafe.Add(unsafe.Pointer(iov[0].Base), n))
			iov[0].SetLen(l - n)
			return iov
		}
		n -= l
		iov = iov[1:]
	}
	return iov
}

// readv reads from a non-blocking descriptor without allocation; unix.Readv builds a new
// vector at each call.
func readv(fd uintptr, iov []unix.Iovec) (int, syscall.Errno) {
	n, e := vecIO(unix.SYS_READV, fd, iov)
	if e == 0 {
		raceRead(iov, n)
	}
	return n, e
}

// writev writes to a non-blocking descriptor without allocation.
func writev(fd uintptr, iov []unix.Iovec) (int, syscall.Errno) {
	raceWrite(iov)
	return vecIO(unix.SYS_WRITEV, fd, iov)
}

func vecIO(trap, fd uintptr, iov []unix.Iovec) (int, syscall.Errno) {
	for {
		n, _, e := syscall.Syscall(trap, fd, uintptr(unsafe.Pointer(unsafe.SliceData(iov))), uintptr(len(iov)))
		if e != syscall.EINTR {
			return int(n), e
		}
	}
}

// unsentBytes is how much the source's kernel takes of what it cannot send yet on a quick connection. More
// would only wait there, in front of a short write of another room.
const unsentBytes = 128 << 10

// politeFrames of a long write at the source, politeStores at the target (some milliseconds) after the last short one leave the core
// to threads that wait for it, see [postq.Courtesy].
const politeFrames, politeStores = 16, 64

// pollEvery of politeStores a thread is made to look into Go's poller: about once a millisecond.
const pollEvery = 16

// lonelyTurns of FrameBytes at once are for a write within this machine that nobody waits behind.
const lonelyTurns = 4

// option is a socket option.
type option struct{ level, name, value int }

// tune sets what both ends of a connection need to notice a vanished host, and more.
func tune(c *net.TCPConn, userTimeout time.Duration, more ...option) error {
	if err := c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 3}); err != nil {
		return err
	}
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var opt error
	if err := rc.Control(func(fd uintptr) {
		opt = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
		for _, o := range more {
			opt = errors.Join(opt, unix.SetsockoptInt(int(fd), o.level, o.name, o.value))
		}
	}); err != nil {
		return err
	}
	return opt
}

// sameHost reports whether both ends of c are on this machine.
func sameHost(c *net.TCPConn) bool {
	here, ok1 := c.LocalAddr().(*net.TCPAddr)
	there, ok2 := c.RemoteAddr().(*net.TCPAddr)
	return ok1 && ok2 && (there.IP.IsLoopback() || here.IP.Equal(there.IP))
}

// abort closes c at once; bytes not yet sent are thrown away.
func abort(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}
