package tcp

import (
	"errors"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/door"
	"github.com/baton-pd/baton/internal/transfer/grants"
)

type (
	book    = grants.Book[*conn, guard]
	session = grants.Session[*conn, guard]
	grant   = grants.Grant[*conn, guard]
)

// target is one listener and the registered memory.
type target struct {
	*book
	tr   *Transport
	door *door.Door[*net.TCPConn]
	addr string
	mem  []byte
	sink transfer.Sink

	// awake counts the connections that do not sleep until bytes come.
	awake atomic.Int32
	// shorts counts the frames of connections without a line.
	shorts atomic.Uint64
}

func newTarget(tr *Transport, ln *net.TCPListener, addr string, mem transfer.Memory, sink transfer.Sink) *target {
	t := &target{tr: tr, addr: addr, mem: mem.Bytes, sink: sink}
	t.book = grants.New(grants.Config{Kind: tr.Kind(), Size: uint64(len(t.mem)), Conns: tr.cfg.MaxConns, Sink: sink}, grants.Hooks[*conn, guard]{
		// One system call of at most maxStore bytes is waited for.
		Fence:   func(g *grant) { g.Own.revoke() },
		Dismiss: (*conn).abort,
	})
	t.door = door.New(door.Config[*net.TCPConn]{
		Listener: ln, Accept: ln.AcceptTCP, Limit: tr.cfg.MaxHalfOpen, Refused: &tr.stats.halfOpenRefused,
		Refuse: abort, Serve: t.serve, Go: t.Go,
	})
	t.Go(t.door.Run)
	return t
}

// Descriptor implements [transfer.Target].
func (t *target) Descriptor() transfer.Descriptor {
	return transfer.Descriptor{Kind: t.tr.Kind(), Addr: t.addr, Size: uint64(len(t.mem))}
}

// Close implements [transfer.Target].
func (t *target) Close() error { return t.book.Close(0, t.door.Close, nil) }

// lookup finds the grant that a write names; nil if it is not this session's.
func (t *target) lookup(s *session, h *header) *grant {
	if g := t.Live(s, h.grant); g != nil && g.Key == h.key {
		return g
	}
	return nil
}

// serve greets c and, if its session lets it in, receives until its end.
func (t *target) serve(tcp *net.TCPConn) {
	c := t.welcome(tcp)
	if c == nil {
		return
	}
	t.awake.Add(1)
	c.run()
	t.awake.Add(-1)
	c.close()
	t.Leave(c, c.sess, true)
}

// welcome does the target's half of the handshake. nil: refused, and closed.
func (t *target) welcome(tcp *net.TCPConn) *conn {
	st := statusOK
	_ = tcp.SetDeadline(time.Now().Add(t.tr.cfg.Handshake))
	var in [helloLen]byte
	err := readFull(tcp, in[:])
	var h hello
	if err == nil {
		h, err = decodeHello(&in)
	}
	if errors.Is(err, errVersion) {
		st = statusVersion
	}
	open := t.door.Pass(tcp)
	var c *conn
	if err == nil {
		c, st, err = t.join(tcp, h.session)
	}
	if err != nil && st == statusOK {
		if open {
			t.tr.stats.badHandshakes.Add(1)
		}
		abort(tcp)
		return nil
	}
	switch st {
	case statusOK:
	case statusVersion:
		t.tr.stats.badHandshakes.Add(1)
	default:
		t.tr.stats.unknownSessions.Add(1)
	}
	var out [welcomeLen]byte
	st.encode(&out)
	_, werr := tcp.Write(out[:])
	if st != statusOK {
		_ = tcp.Close() // not abort: the answer must arrive
		return nil
	}
	if werr == nil {
		werr = tcp.SetDeadline(time.Time{})
	}
	if werr != nil {
		abort(tcp)
		t.Leave(c, c.sess, true)
		return nil
	}
	return c
}

// join makes tcp a connection of session id.
func (t *target) join(tcp *net.TCPConn, id transfer.SessionID) (*conn, status, error) {
	c, err := newConn(t, tcp)
	if err != nil {
		return nil, statusOK, err
	}
	switch c.sess, err = t.Join(c, id); {
	case errors.Is(err, transfer.ErrBusy):
		return nil, statusBusy, nil
	case err != nil:
		return nil, statusSession, nil
	}
	return c, statusOK, nil
}

// readFull reads exactly len(b) bytes.
func readFull(r io.Reader, b []byte) error {
	_, err := io.ReadFull(r, b)
	return err
}
