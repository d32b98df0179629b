package wire

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// inlineBody is the largest body, in bytes, that is written before the answer is looked for: it fits a socket's
	// buffer, so that a server which answers without reading it cannot block the writer. Larger ones are written beside.
	inlineBody = 16 << 10
	// readBuffer is the size of a connection's buffer. Headers are small; bodies are read past it.
	readBuffer = 4 << 10
	// maxInterim is how many answers of status 1xx may precede the answer.
	maxInterim = 5
	// lastWords is how long an answer is waited for after the server has refused the request's bytes, and the request's last
	// bytes after the answer.
	lastWords = 50 * time.Millisecond
)

// conn is one connection. The goroutine of the request that uses it owns it; while it is idle the client does.
type conn struct {
	c     *Client
	nc    net.Conn
	raw   net.Conn // below TLS; nc itself without
	br    *bufio.Reader
	life  int
	since time.Time // idle since
	used  bool      // has served a request
	// room is how many bytes of a header may still come; negative: no limit. The owner's.
	room int

	rc    syscall.RawConn // nil: cannot be looked at
	peek  func(fd uintptr) bool
	alive bool // of the last peek
}

func newConn(c *Client, nc, raw net.Conn, life int) *conn {
	p := &conn{c: c, nc: nc, raw: raw, life: life, room: -1}
	p.br = bufio.NewReaderSize(limited{p}, readBuffer)
	if sc, ok := raw.(syscall.Conn); ok {
		if rc, err := sc.SyscallConn(); err == nil {
			p.rc = rc
			p.peek = func(fd uintptr) bool {
				var b [1]byte
				_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
				p.alive = errors.Is(err, syscall.EAGAIN)
				return true
			}
		}
	}
	return p
}

// sound reports that an idle connection is open and silent.
func (p *conn) sound() bool {
	if p.br.Buffered() > 0 {
		return false
	}
	if p.rc == nil {
		return true // found out by writing
	}
	p.alive = false
	return p.rc.Read(p.peek) == nil && p.alive
}

// limited is the connection as its buffer reads it.
type limited struct{ p *conn }

// Read bounds what comes while a header is read.
func (l limited) Read(b []byte) (int, error) {
	p := l.p
	if p.room < 0 {
		return p.nc.Read(b)
	}
	if p.room == 0 {
		return 0, errHeaderTooLarge
	}
	n, err := p.nc.Read(b[:min(len(b), p.room)])
	p.room -= n
	return n, err
}

// heads are buffers of requests.
var heads = sync.Pool{New: func() any { b := make([]byte, 0, 2048); return &b }}

// exchange sends r and reads the header of its answer. On an error the connection is closed; again: nothing of the request was written,
// because the server had closed the connection while it was idle.
func (p *conn) exchange(ctx context.Context, r *Request) (resp *http.Response, again bool, err error) {
	a := &answer{p: p}
	a.stop = context.AfterFunc(ctx, a.abort)
	n, err := a.write(r)
	if err != nil {
		if n > 0 { // it may have said why
			_ = p.nc.SetReadDeadline(time.Now().Add(lastWords))
			if resp, rerr := p.readHead(); rerr == nil {
				return a.attach(resp, true), false, nil
			}
		}
		a.finish(false)
		return nil, n == 0 && p.used && closedByPeer(err), err
	}
	resp, err = p.readHead()
	if err != nil {
		a.finish(false)
		if a.writeErr != nil && !errors.Is(a.writeErr, net.ErrClosed) {
			err = errors.Join(err, a.writeErr)
		}
		return nil, false, err
	}
	return a.attach(resp, resp.Close), false, nil
}

// closedByPeer: the error of a write to a connection that the other side had closed.
func closedByPeer(err error) bool {
	return errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.ErrClosedPipe)
}

// readHead reads the header of the answer, past interim ones.
func (p *conn) readHead() (*http.Response, error) {
	p.room = p.c.MaxHeader
	defer func() { p.room = -1 }()
	for range maxInterim + 1 {
		resp, err := http.ReadResponse(p.br, nil)
		switch {
		case err != nil:
			return nil, err
		case resp.StatusCode == http.StatusSwitchingProtocols:
			return nil, errSwitch
		case resp.StatusCode/100 != 1:
			return resp, nil
		}
	}
	return nil, errInterim
}

// appendHead writes the request's first line and header.
func appendHead(b []byte, host string, r *Request) ([]byte, error) {
	b = append(append(append(b, "POST "...), r.Path...), " HTTP/1.1\r\nHost: "...)
	b = append(append(b, host...), "\r\n"...)
	for k, vs := range r.Header {
		for _, v := range vs {
			if strings.ContainsAny(v, "\r\n\x00") {
				return b, fmt.Errorf("header %s has a line break in its value", k)
			}
			b = append(append(append(append(b, k...), ": "...), v...), "\r\n"...)
		}
	}
	b = append(b, "Content-Length: "...)
	return append(strconv.AppendInt(b, int64(len(r.Body[0])+len(r.Body[1])), 10), "\r\n\r\n"...), nil
}

// answer is the body of an answer, and the exchange that it ends.
type answer struct {
	p    *conn
	body io.Reader
	stop func() bool // of watching the context
	// state is answerLive until the exchange is aborted or ends, whichever is first: an aborted connection is closed, and never
	// after it has been given back.
	state atomic.Int32
	// close: the connection cannot be used again. over: the exchange has ended. Both the reader's.
	close, over bool
	err         error // of the reading, when over

	writing  chan error // of a body that is written beside; nil: nobody writes
	writeErr error      // of the writer, after awaitWriter
}

const (
	answerLive    = 0
	answerAborted = 1 // by the context or Abort
	answerOver    = 2
)

// abort ends the exchange from outside; a Read under way fails. TLS would say goodbye first, and wait 5 s for a peer that does not read.
func (a *answer) abort() {
	if a.state.CompareAndSwap(answerLive, answerAborted) {
		_ = a.p.raw.Close()
	}
}

// Abort ends the exchange of an answer that [Client.Post] has returned, as its context's end would, from any goroutine. It does nothing once the body was read to its
// end or closed.
func Abort(resp *http.Response) {
	if a, ok := resp.Body.(*answer); ok {
		a.abort()
	}
}

// write sends the request, but for a large body, which a goroutine writes beside until it is done or the connection closed. n is how much
// was written.
func (a *answer) write(r *Request) (n int, err error) {
	buf := heads.Get().(*[]byte)
	defer heads.Put(buf)
	b, err := appendHead((*buf)[:0], a.p.c.Host, r)
	if err != nil {
		return 0, err
	}
	beside := len(r.Body[0])+len(r.Body[1]) > inlineBody
	if !beside {
		b = append(append(b, r.Body[0]...), r.Body[1]...)
	}
	*buf = b
	if n, err = a.p.nc.Write(b); err != nil || !beside {
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

// awaitWriter waits for the writer, which is done or whose connection has been closed.
func (a *answer) awaitWriter() {
	if a.writing != nil {
		a.writeErr = <-a.writing
		a.writing = nil
	}
}

// sent says whether the request was written whole, once its answer has been read: the writer has a moment to find that it is done.
func (a *answer) sent() bool {
	if a.writing == nil {
		return true
	}
	_ = a.p.nc.SetWriteDeadline(time.Now().Add(lastWords))
	a.awaitWriter()
	_ = a.p.nc.SetWriteDeadline(time.Time{})
	return a.writeErr == nil
}

// attach makes a the body of resp.
func (a *answer) attach(resp *http.Response, close bool) *http.Response {
	a.body, a.close = resp.Body, close
	if resp.Body == http.NoBody {
		a.end(io.EOF)
	}
	resp.Body = a
	return resp
}

// Read implements [io.Reader].
func (a *answer) Read(b []byte) (int, error) {
	if a.over {
		return 0, a.err
	}
	n, err := a.body.Read(b)
	if err != nil {
		a.end(err)
	}
	return n, err
}

// end ends the exchange after a Read's error.
func (a *answer) end(err error) {
	a.err = err
	a.finish(err == io.EOF)
}

// errClosed is what a Read says after Close.
var errClosed = errors.New("wire: the body is closed")

// Close ends the exchange: a body that was not read to its end costs the connection.
func (a *answer) Close() error {
	if !a.over {
		a.err = errClosed
		a.finish(false)
	}
	return nil
}

// finish gives the connection back, if everything was sent and read (whole), or closes it, and waits for the writer.
func (a *answer) finish(whole bool) {
	a.over = true
	a.stop()
	if whole && !a.close && a.sent() && a.state.CompareAndSwap(answerLive, answerOver) {
		a.p.used = true
		a.p.c.put(a.p)
		return
	}
	_ = a.p.raw.Close()
	a.awaitWriter()
}
