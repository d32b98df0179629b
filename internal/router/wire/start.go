package wire

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
)

// start is the beginning of an exchange over plain TCP: look whether the connection is sound, write the request, wait, read what comes first. All of it
// happens inside one [syscall.RawConn] Read. That tells the runtime first to forget what it has seen of the socket, and whatever arrives after that wakes it: so
// after writing one can wait at once, where a Read of net would first ask the socket for what cannot be there yet. A server may talk on a new connection
// before it is asked, so there the socket is asked once.
type start struct {
	on   func(fd uintptr) bool // conn.ready; nil: not for this connection
	step startStep
	head *[]byte // of the request, perhaps with its body; of heads
	n    int     // written of it
	err  error   // of looking or writing
}

type startStep uint8

const (
	startLook startStep = 0
	startWait startStep = 1
)

// errStale: a connection was closed by its server, or talked to, while it was idle.
var errStale = errors.New("wire: the connection is not sound any more")

// send writes the request, but for a large body, which a goroutine writes beside until it is done or the connection closed. n is how much
// was written. It may have read the first of the answer, or the error in its place.
func (a *answer) send(r *Request) (n int, err error) {
	buf := heads.Get().(*[]byte)
	b, err := appendHead((*buf)[:0], a.p.c.Host, r)
	if err != nil {
		heads.Put(buf)
		return 0, err
	}
	beside := len(r.Body[0])+len(r.Body[1]) > inlineBody
	if !beside {
		b = append(append(b, r.Body[0]...), r.Body[1]...)
	}
	*buf = b
	p := a.p
	if p.start.on != nil && !beside {
		return p.begin(buf)
	}
	if p.start.on == nil || !p.used || p.sound() {
		n, err = p.nc.Write(b)
	} else {
		err = errStale
	}
	heads.Put(buf)
	if err != nil || !beside {
		return n, err
	}
	a.writing = make(chan error, 1)
	go func() {
		parts := net.Buffers{r.Body[0], r.Body[1]}
		_, err := parts.WriteTo(a.p.nc)
		a.writing <- err
	}()
	return n, nil
}

// begin writes head and waits for the first of the answer.
func (p *conn) begin(head *[]byte) (n int, err error) {
	s := &p.start
	s.step, s.head, s.n, s.err = startLook, head, 0, nil
	err = p.rc.Read(s.on)
	s.giveHead()
	switch {
	case s.err != nil:
		return s.n, s.err
	case s.step == startLook: // closed before anything was done
		return 0, err
	case err != nil:
		p.err = err // of waiting; reading will tell
	}
	return s.n, nil
}

// ready is called when the exchange begins, and then whenever something has come, until it returns true.
func (p *conn) ready(fd uintptr) bool {
	s := &p.start
	if s.step == startLook {
		if p.used && (p.w > p.r || !silent(int(fd))) {
			s.err = errStale
			return true
		}
		s.step = startWait
		s.n, s.err = p.nc.Write(*s.head)
		s.giveHead()
		if s.err != nil || p.used {
			return s.err != nil
		}
		// Nobody has looked at a new connection: what came on it before the runtime was told to forget wakes nobody. So ask once.
	}
	p.r, p.w = 0, 0
	n, err := recv(int(fd), p.buf)
	switch {
	case err == syscall.EAGAIN:
		return false
	case err != nil:
		p.err = &net.OpError{Op: "read", Net: "tcp", Addr: p.nc.RemoteAddr(), Err: os.NewSyscallError("read", err)}
	case n == 0:
		p.err = io.EOF
	default:
		p.w = n
	}
	return true
}

// giveHead gives it back: waiting may take long.
func (s *start) giveHead() {
	if s.head != nil {
		heads.Put(s.head)
		s.head = nil
	}
}

// recv reads from a socket.
func recv(fd int, b []byte) (int, error) {
	for {
		if n, err := syscall.Read(fd, b); err != syscall.EINTR {
			return max(n, 0), err
		}
	}
}

// silent: the socket is open and nothing has come.
func silent(fd int) bool {
	var b [1]byte
	_, _, err := syscall.Recvfrom(fd, b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	return errors.Is(err, syscall.EAGAIN)
}
