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

	"github.com/baton-pd/baton/internal/router/ending"
)

const (
	// inlineBody is the largest body, in bytes, that is written before the answer is looked for: it fits a socket's
	// buffer, so that a server which answers without reading it cannot block the writer. Larger ones are written beside.
	inlineBody = 16 << 10
	// readBuffer is the size of a connection's buffer. Headers are small; large bodies are read past it.
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
	buf   []byte   // buf[r:w] has come and is not taken yet
	r, w  int
	err   error // of reading, once there was one
	life  int
	since time.Time // idle since
	used  bool      // has served a request

	rc    syscall.RawConn // nil: cannot be looked at
	peek  func(fd uintptr) bool
	alive bool // of the last peek
	start      // of an exchange; without TLS
}

func newConn(c *Client, nc, raw net.Conn, life int) *conn {
	p := &conn{c: c, nc: nc, raw: raw, life: life, buf: make([]byte, readBuffer)}
	if sc, ok := raw.(syscall.Conn); ok {
		if rc, err := sc.SyscallConn(); err == nil {
			p.rc = rc
			p.peek = func(fd uintptr) bool {
				p.alive = silent(int(fd))
				return true
			}
			if nc == raw {
				p.start.on = p.ready
			}
		}
	}
	return p
}

// sound reports that an idle connection is open and silent.
func (p *conn) sound() bool {
	if p.w > p.r || p.err != nil {
		return false
	}
	if p.rc == nil {
		return true // found out by writing
	}
	p.alive = false
	return p.rc.Read(p.peek) == nil && p.alive
}

// read takes bytes from the connection, past the buffer.
func (p *conn) read(b []byte) (n int, err error) {
	if p.err == nil {
		n, p.err = p.nc.Read(b)
	}
	return n, p.err
}

// fill waits for more in the buffer, which is not full. What has come with an error is there, and the error of the next fill.
func (p *conn) fill() error {
	if p.r == p.w {
		p.r, p.w = 0, 0
	} else if p.w == len(p.buf) {
		p.r, p.w = 0, copy(p.buf, p.buf[p.r:p.w])
	}
	n, err := p.read(p.buf[p.w:])
	p.w += n
	if n > 0 {
		return nil
	}
	return err
}

// heads are buffers of requests.
var heads = sync.Pool{New: func() any { b := make([]byte, 0, 2048); return &b }}

// exchange sends r and reads the header of its answer. On an error the connection is closed; again: nothing of the request was written,
// because the server had closed the connection while it was idle.
func (p *conn) exchange(ctx context.Context, r *Request) (resp *http.Response, again bool, err error) {
	a := &answer{p: p}
	a.watch(ctx)
	n, err := a.send(r)
	if err != nil {
		if n > 0 { // it may have said why
			_ = p.nc.SetReadDeadline(time.Now().Add(lastWords))
			if rerr := a.readHead(); rerr == nil {
				a.close = true
				return a.attach(), false, nil
			}
		}
		a.finish(false)
		return nil, n == 0 && p.used && (closedByPeer(err) || err == errStale), err
	}
	if err = a.readHead(); err != nil {
		a.finish(false)
		if a.writeErr != nil && !errors.Is(a.writeErr, net.ErrClosed) {
			err = errors.Join(err, a.writeErr)
		}
		return nil, false, err
	}
	return a.attach(), false, nil
}

// closedByPeer: the error of a write to a connection that the other side had closed.
func closedByPeer(err error) bool {
	return errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.ErrClosedPipe)
}

// readHead reads the head of the answer, past interim ones.
func (a *answer) readHead() error {
	p := a.p
	for {
		n, v := parseHead(p.buf[p.r:p.w], &a.resp, &a.frame)
		switch {
		case v == headWhole && n <= p.c.MaxHeader:
			p.r += n
			return nil
		case v != headMore, p.w-p.r == len(p.buf), p.fill() != nil: // and it will be told once more
			return a.readUncommon()
		}
	}
}

// readUncommon has net/http read the head, and afterwards the body.
func (a *answer) readUncommon() error {
	a.br = bufio.NewReaderSize(source{a}, readBuffer)
	a.room = a.p.c.MaxHeader
	defer func() { a.room = -1 }()
	for range maxInterim + 1 {
		resp, err := http.ReadResponse(a.br, nil)
		switch {
		case err != nil:
			return err
		case resp.StatusCode == http.StatusSwitchingProtocols:
			return errSwitch
		case resp.StatusCode/100 != 1:
			a.resp, a.body = *resp, resp.Body
			return nil
		}
	}
	return errInterim
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
	if r.More[0] != "" {
		b = append(append(append(append(b, r.More[0]...), ": "...), r.More[1]...), "\r\n"...)
	}
	b = append(b, "Content-Length: "...)
	return append(strconv.AppendInt(b, int64(len(r.Body[0])+len(r.Body[1])), 10), "\r\n\r\n"...), nil
}

// answer is an answer whose head has been read, its body, and the exchange that this ends.
type answer struct {
	p     *conn
	resp  http.Response
	frame frame         // of the body, unless body is set
	body  io.Reader     // of net/http; nil: the head was of the common form
	br    *bufio.Reader // what body reads, from source
	room  int           // how many bytes source may still give; negative: no limit
	stop  func() bool   // of watching a context of another kind than end
	end   *ending.Context
	hook  ending.Hook // of end
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

// watch has the end of ctx abort the exchange.
func (a *answer) watch(ctx context.Context) {
	a.hook.Run = a.abort
	if e, ok := ctx.(*ending.Context); ok {
		a.end = e
		e.Watch(&a.hook)
		return
	}
	a.stop = context.AfterFunc(ctx, a.abort)
}

func (a *answer) unwatch() {
	if a.end != nil {
		a.end.Unwatch(&a.hook)
		return
	}
	a.stop()
}

// Abort ends the exchange of an answer that [Client.Post] has returned, as its context's end would, from any goroutine. It does nothing once the body was read to its
// end or closed.
func Abort(resp *http.Response) {
	if a, ok := resp.Body.(*answer); ok {
		a.abort()
	}
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

// attach makes a the body of its answer.
func (a *answer) attach() *http.Response {
	a.close = a.close || a.resp.Close
	a.resp.Body = a
	if a.body == http.NoBody || a.body == nil && a.frame.state == frameOver {
		a.endWith(io.EOF)
	}
	return &a.resp
}

// source is the connection as net/http reads it: what has come, and then what comes.
type source struct{ a *answer }

// Read bounds what comes while a header is read.
func (s source) Read(b []byte) (int, error) {
	a, p := s.a, s.a.p
	if a.room == 0 {
		return 0, errHeaderTooLarge
	}
	if a.room > 0 {
		b = b[:min(len(b), a.room)]
	}
	n := copy(b, p.buf[p.r:p.w])
	p.r += n
	var err error
	if n == 0 {
		n, err = p.read(b)
	}
	if a.room > 0 {
		a.room -= n
	}
	return n, err
}

// Read implements [io.Reader]. The last bytes come with io.EOF where that is known.
func (a *answer) Read(b []byte) (n int, err error) {
	if a.over {
		return 0, a.err
	}
	if a.body != nil {
		n, err = a.body.Read(b)
	} else {
		n, err = a.readFrame(b)
	}
	if err != nil {
		a.endWith(err)
	}
	return n, err
}

// readFrame reads content of the frame. What has come is handed out; it waits only where there is nothing.
func (a *answer) readFrame(b []byte) (int, error) {
	for p := a.p; ; {
		used, n, err := a.frame.take(p.buf[p.r:p.w], b)
		p.r += used
		switch {
		case err != nil:
			return n, err
		case a.frame.state == frameOver:
			return n, io.EOF
		case n > 0 || len(b) == 0:
			return n, nil
		}
		if k := min(int64(len(b)), a.frame.left); k >= readBuffer && p.r == p.w {
			n, err = p.read(b[:k])
			a.frame.took(n)
		} else {
			err = p.fill()
		}
		switch {
		case n > 0 && a.frame.state == frameOver:
			return n, io.EOF
		case n > 0:
			return n, nil
		case err == io.EOF:
			return 0, io.ErrUnexpectedEOF
		case err != nil:
			return 0, err
		}
	}
}

// endWith ends the exchange after a Read's error.
func (a *answer) endWith(err error) {
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
	a.unwatch()
	if whole && !a.close && a.p.w == a.p.r && (a.br == nil || a.br.Buffered() == 0) && a.sent() && a.state.CompareAndSwap(answerLive, answerOver) {
		a.p.used = true
		a.p.c.put(a.p)
		return
	}
	_ = a.p.raw.Close()
	a.awaitWriter()
}
