package tcp

import (
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxLines bounds the threads that a Transport's connections may have for themselves at targets, and as many at
// sources. Connections beyond wait in Go's poller.
const maxLines = 128

// budget counts what is in use of maxLines.
type budget struct{ used atomic.Int32 }

// take reports whether one more may have a thread, and counts it. What was taken is given back.
func (b *budget) take() bool {
	if b.used.Add(1) <= maxLines {
		return true
	}
	b.used.Add(-1)
	return false
}

func (b *budget) give() { b.used.Add(-1) }

// line is a target's connection outside Go's poller: its owner waits for the socket in poll(2). In the poller each
// packet of a busy connection wakes the thread that waits there for all others, though nobody waits for this one. That takes
// cores from the copying, and the kernel lets a thread that was just running wait for its next turn, up to a
// tick of 4 ms, when a short write of another connection comes. The owner is the one goroutine that reads, writes and
// closes; abort may come from any. It implements [syscall.RawConn].
type line struct {
	fd   int
	down atomic.Bool // abort was called

	mu     sync.Mutex // guards closed, and fd against being closed during abort
	closed bool
}

var _ syscall.RawConn = (*line)(nil)

// newLine takes c's socket over and closes c, which does not end the connection.
func newLine(c *net.TCPConn) (*line, error) {
	rc, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	l := &line{}
	var dup error
	if err := rc.Control(func(fd uintptr) { l.fd, dup = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return nil, err
	}
	if dup != nil {
		return nil, os.NewSyscallError("fcntl", dup)
	}
	_ = c.Close() // takes the socket out of the poller; it stays open
	return l, nil
}

// Control implements [syscall.RawConn].
func (l *line) Control(f func(fd uintptr)) error {
	f(uintptr(l.fd))
	return nil
}

// Read implements [syscall.RawConn].
func (l *line) Read(f func(fd uintptr) bool) error { return l.until(f, unix.POLLIN) }

// Write implements [syscall.RawConn].
func (l *line) Write(f func(fd uintptr) bool) error { return l.until(f, unix.POLLOUT) }

// until calls f until it says true, and waits for events before each further call.
func (l *line) until(f func(fd uintptr) bool, events int16) error {
	for !l.down.Load() {
		if f(uintptr(l.fd)) {
			return nil
		}
		if err := waitFor(l.fd, events, -1); err != 0 {
			return os.NewSyscallError("poll", err)
		}
	}
	return net.ErrClosed
}

// send writes all of b within timeout.
func (l *line) send(b []byte, timeout time.Duration) error {
	var end time.Time // set when it must wait
	for len(b) > 0 {
		n, err := syscall.Write(l.fd, b) // orders for the race detector what net.Conn reads
		switch err {
		case nil:
			b = b[n:]
		case unix.EINTR:
		case unix.EAGAIN:
			now := time.Now()
			if end.IsZero() {
				end = now.Add(timeout)
			}
			if l.down.Load() {
				return net.ErrClosed
			}
			if !now.Before(end) {
				return os.ErrDeadlineExceeded
			}
			if err := waitFor(l.fd, unix.POLLOUT, end.Sub(now)); err != 0 {
				return os.NewSyscallError("poll", err)
			}
		default:
			return os.NewSyscallError("write", err)
		}
	}
	return nil
}

// abort ends the connection, also a wait of the owner, who then closes.
func (l *line) abort() {
	l.down.Store(true)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		_ = unix.Shutdown(l.fd, unix.SHUT_RDWR)
	}
}

// close is the owner's last call. Bytes not yet sent are thrown away.
func (l *line) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	_ = unix.SetsockoptLinger(l.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	_ = unix.Close(l.fd)
}

// waitFor waits on this thread for events of fd or its end; no longer than timeout, if that is not negative.
func waitFor(fd int, events int16, timeout time.Duration) syscall.Errno {
	p := [1]unix.PollFd{{Fd: int32(fd), Events: events}}
	ms := -1
	if timeout >= 0 {
		ms = int(timeout/time.Millisecond) + 1
	}
	_, err := unix.Poll(p[:], ms)
	if e, _ := err.(syscall.Errno); e != syscall.EINTR {
		return e
	}
	return 0
}

// serves notes a write of total bytes on c. With the first long one c gets a line, if there is one left.
func (c *conn) serves(total uint64) {
	switch {
	case c.line != nil:
		return
	case total <= quickBytes:
		c.t.shorts.Add(1)
		return
	case !c.t.tr.lines.take():
		return
	}
	c.looked = func() { c.looking.Store(false) }
	c.mu.Lock()
	if !c.cut { // else c ends soon
		if l, err := newLine(c.tcp); err == nil {
			c.line, c.raw, c.look.raw = l, l, l
		}
	}
	c.mu.Unlock()
	if c.line == nil {
		c.t.tr.lines.give()
		return
	}
	// This goroutine may not block again for long. What else it was woken with goes first, and another thread is
	// made to wait in the poller: the one that did so has become this goroutine's.
	c.t.Go(c.looked)
	runtime.Gosched()
}

// giveWay lets the kernel run another thread for a while after a short write, and now and then has a thread look
// into the poller, where none may be: a thread that waited there leaves with the goroutine it has woken, and Go's monitor
// looks itself only after 10 ms.
func (c *conn) giveWay() {
	c.courtesy.See(c.t.shorts.Load(), politeStores)
	if left := c.courtesy.Left; left > 0 && left%pollEvery == 0 && c.looking.CompareAndSwap(false, true) {
		c.t.Go(c.looked)
	}
	c.courtesy.Give()
}

// abort ends the connection at once. Any goroutine.
func (c *conn) abort() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = true
	if c.line != nil {
		c.line.abort()
		return
	}
	abort(c.tcp)
}

// close frees what the connection has; the owner's last call.
func (c *conn) close() {
	c.abort()
	if c.line != nil {
		c.line.close()
		c.t.tr.lines.give()
	}
}
