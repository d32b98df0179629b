package routerbench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// conn is one connection of a loop. Its owner is the loop's goroutine.
type conn struct {
	fd   int
	in   []byte // received, not yet consumed
	out  []byte // what a full socket buffer did not take
	role any    // of the loop's user
}

// loop is an epoll set, served by one goroutine: no wake-ups between goroutines, and every syscall is
// one that moves bytes or waits for some.
type loop struct {
	ep    int
	conns map[int32]*conn
	// received is called when c.in has grown; closed when the peer has closed or the connection broke (err).
	// closed must not use c any more.
	received func(c *conn) error
	closed   func(c *conn, err error) error
	accept   map[int32]func(c *conn) // by listener
	events   []unix.EpollEvent
	ends     []int32 // what is watched for the end
	ended    bool
}

func newLoop() (*loop, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	return &loop{ep: ep, conns: map[int32]*conn{}, accept: map[int32]func(*conn){}, events: make([]unix.EpollEvent, 512)}, nil
}

// close closes every descriptor.
func (l *loop) close() {
	for fd := range l.conns {
		_ = unix.Close(int(fd))
	}
	for fd := range l.accept {
		_ = unix.Close(int(fd))
	}
	_ = unix.Close(l.ep)
}

func (l *loop) add(fd int, events uint32) error {
	return unix.EpollCtl(l.ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)})
}

// listen serves an address on the loopback with a port of the kernel's choice.
func (l *loop) listen(accepted func(c *conn)) (port int, err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	l.accept[int32(fd)] = accepted
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, err
	}
	if err := unix.Listen(fd, 4096); err != nil {
		return 0, err
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		return 0, err
	}
	return at.(*unix.SockaddrInet4).Port, l.add(fd, unix.EPOLLIN)
}

// dial connects to addr, blocking.
func (l *loop) dial(addr string) (*conn, error) {
	at, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()})
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	}
	if err == nil {
		err = l.add(fd, unix.EPOLLIN)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("connect to %s: %w", addr, err)
	}
	c := &conn{fd: fd}
	l.conns[int32(fd)] = c
	return c, nil
}

// wait serves what has happened, waiting for at most limit (negative: for ever).
func (l *loop) wait(limit time.Duration) error {
	n, err := l.poll(limit)
	if err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("epoll: %w", err)
	}
	for _, e := range l.events[:max(n, 0)] {
		if slices.Contains(l.ends, e.Fd) {
			l.ended = true
			continue
		}
		if accepted := l.accept[e.Fd]; accepted != nil {
			if err := l.acceptAll(int(e.Fd), accepted); err != nil {
				return err
			}
			continue
		}
		if c := l.conns[e.Fd]; c != nil {
			if err := l.serve(c, e.Events); err != nil {
				return err
			}
		}
	}
	return nil
}

// poll is epoll_wait to the nanosecond: a step of a clock must not be up to a millisecond late.
func (l *loop) poll(limit time.Duration) (n int, err error) {
	var at *unix.Timespec // nil: no limit
	if limit >= 0 {
		t := unix.NsecToTimespec(int64(limit))
		at = &t
	}
	r, _, errno := unix.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(l.ep), uintptr(unsafe.Pointer(&l.events[0])), uintptr(len(l.events)), uintptr(unsafe.Pointer(at)), 0, 0)
	switch errno {
	case 0:
		return int(r), nil
	case unix.ENOSYS: // Linux before 5.11
		ms := -1
		if limit >= 0 {
			ms = int((limit + time.Millisecond - 1) / time.Millisecond)
		}
		return unix.EpollWait(l.ep, l.events, ms)
	}
	return 0, errno
}

func (l *loop) acceptAll(listener int, accepted func(c *conn)) error {
	for {
		fd, _, err := unix.Accept4(listener, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("accept: %w", err)
		}
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
		c := &conn{fd: fd}
		l.conns[int32(fd)] = c
		accepted(c)
		if err := l.add(fd, unix.EPOLLIN); err != nil {
			return fmt.Errorf("accept: %w", err)
		}
	}
}

// endWith has l.ended set when ctx ends, or something happens to in (nil: nothing), of which only the end is expected. The caller calls stop
// after the last wait.
func (l *loop) endWith(ctx context.Context, in *os.File) (stop func(), err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, err
	}
	done := make(chan struct{})
	hang := context.AfterFunc(ctx, func() {
		_ = unix.Close(p[1])
		close(done)
	})
	stop = func() {
		if hang() {
			_ = unix.Close(p[1])
		} else {
			<-done
		}
		_ = unix.Close(p[0])
	}
	l.ends = []int32{int32(p[0])}
	if in != nil {
		l.ends = append(l.ends, int32(in.Fd()))
	}
	for _, fd := range l.ends {
		if err := l.add(int(fd), unix.EPOLLIN); err != nil {
			stop()
			return nil, fmt.Errorf("watch for the end: %w", err)
		}
	}
	return stop, nil
}

// serve moves bytes of one connection.
func (l *loop) serve(c *conn, events uint32) error {
	if events&unix.EPOLLOUT != 0 && len(c.out) > 0 {
		waiting := c.out
		c.out = nil
		if err := l.write(c, waiting); err != nil {
			return l.drop(c, err)
		}
		if len(c.out) == 0 {
			if err := unix.EpollCtl(l.ep, unix.EPOLL_CTL_MOD, c.fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(c.fd)}); err != nil {
				return err
			}
		}
	}
	if events&(unix.EPOLLIN|unix.EPOLLHUP|unix.EPOLLERR) == 0 {
		return nil
	}
	if cap(c.in)-len(c.in) < 4096 {
		c.in = append(make([]byte, 0, 2*cap(c.in)+8192), c.in...)
	}
	n, err := unix.Read(c.fd, c.in[len(c.in):cap(c.in)])
	switch {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
		return nil
	case err != nil:
		return l.drop(c, err)
	case n == 0:
		return l.drop(c, nil)
	}
	c.in = c.in[:len(c.in)+n]
	return l.received(c)
}

// write sends b, or keeps what does not fit until it does.
func (l *loop) write(c *conn, b []byte) error {
	if len(c.out) > 0 {
		c.out = append(c.out, b...)
		return nil
	}
	n, err := unix.Write(c.fd, b)
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		return err
	}
	if n = max(n, 0); n < len(b) {
		c.out = append([]byte(nil), b[n:]...)
		return unix.EpollCtl(l.ep, unix.EPOLL_CTL_MOD, c.fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLOUT, Fd: int32(c.fd)})
	}
	return nil
}

// drop forgets c and tells the user.
func (l *loop) drop(c *conn, err error) error {
	delete(l.conns, int32(c.fd))
	_ = unix.Close(c.fd)
	return l.closed(c, err)
}
