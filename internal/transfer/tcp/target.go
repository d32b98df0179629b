package tcp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/door"
)

// target is one listener and the registered memory.
type target struct {
	tr   *Transport
	ln   *net.TCPListener
	addr string
	mem  []byte
	sink transfer.Sink
	// done is closed by Close; wakes the accept loop out of a pause.
	done chan struct{}
	// wg counts the accept loop, the connections and the calls of Fenced. Add only
	// under mu and while !closed, or from a goroutine that is counted.
	wg sync.WaitGroup

	// awake counts the connections that do not sleep until bytes come.
	awake atomic.Int32

	// mu guards what follows. Held for moments, never across I/O or a callback.
	// Order: mu before grant.mu; grant.mu is not taken under mu here.
	mu       sync.Mutex
	closed   bool
	sessions map[transfer.SessionID]*session
	grants   map[transfer.GrantID]*grant
	greeting map[*net.TCPConn]struct{} // in the handshake; at most MaxHalfOpen
}

// session is one SessionID; all fields under target.mu.
type session struct {
	id     transfer.SessionID
	conns  map[*conn]struct{}
	grants map[*grant]struct{}
	// refs counts the connections whose goroutine runs, and the CloseSession that has
	// not yet revoked everything. Fenced follows when ended and refs is 0.
	refs   int
	ended  bool // no connection and no grant gets in any more
	fenced bool // Fenced was, or is about to be, called
}

func newTarget(tr *Transport, ln *net.TCPListener, addr string, mem transfer.Memory, sink transfer.Sink) *target {
	t := &target{
		tr: tr, ln: ln, addr: addr, mem: mem.Bytes, sink: sink,
		done:     make(chan struct{}),
		sessions: make(map[transfer.SessionID]*session),
		grants:   make(map[transfer.GrantID]*grant),
		greeting: make(map[*net.TCPConn]struct{}),
	}
	t.wg.Go(func() { door.Accept(t.ln.AcceptTCP, t.done, t.admit) })
	return t
}

// Descriptor implements [transfer.Target].
func (t *target) Descriptor() transfer.Descriptor {
	return transfer.Descriptor{Kind: t.tr.Kind(), Addr: t.addr, Size: uint64(len(t.mem))}
}

// OpenSession implements [transfer.Target].
func (t *target) OpenSession(s transfer.SessionID) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return transfer.ErrClosed
	case s == 0, t.sessions[s] != nil:
		return transfer.ErrSession
	}
	t.sessions[s] = &session{id: s, conns: make(map[*conn]struct{}), grants: make(map[*grant]struct{})}
	return nil
}

// CloseSession implements [transfer.Target].
func (t *target) CloseSession(id transfer.SessionID) {
	t.mu.Lock()
	t.closeSession(id)
	t.mu.Unlock()
}

// closeSession starts the end of session id. Under mu.
func (t *target) closeSession(id transfer.SessionID) {
	s := t.sessions[id]
	if s == nil {
		return
	}
	delete(t.sessions, id)
	if s.ended {
		return // its last connection's goroutine does the rest
	}
	s.refs++
	grants := t.end(s)
	conns := make([]*conn, 0, len(s.conns))
	for c := range s.conns {
		conns = append(conns, c)
	}
	// Not on the caller's goroutine: the caller may hold a lock that a Sink call,
	// which revoking does not wait for but Fenced is, wants too.
	t.wg.Go(func() {
		revokeAll(grants)
		for _, c := range conns {
			abort(c.tcp)
		}
		t.release(s)
	})
}

// end refuses new connections and grants of s and takes its grants out. Under mu.
func (t *target) end(s *session) []*grant {
	s.ended = true
	grants := make([]*grant, 0, len(s.grants))
	for g := range s.grants {
		grants = append(grants, g)
		delete(t.grants, g.id)
	}
	clear(s.grants)
	return grants
}

func revokeAll(grants []*grant) {
	for _, g := range grants {
		g.revoke()
	}
}

// release drops one reference of s and reports the fence with the last.
func (t *target) release(s *session) {
	t.mu.Lock()
	s.refs--
	fence := s.refs == 0 && s.ended && !s.fenced
	if fence {
		s.fenced = true
	}
	t.mu.Unlock()
	if fence {
		t.sink.Fenced(s.id)
	}
}

// Allow implements [transfer.Target].
func (t *target) Allow(g transfer.Grant) error {
	spans, ok := transfer.SortSpans(g.Spans, uint64(len(t.mem)))
	if !ok {
		return fmt.Errorf("tcp: allow grant %d: spans overlap or leave the memory: %w", g.ID, transfer.ErrBounds)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.sessions[g.Session]
	switch {
	case t.closed:
		return transfer.ErrClosed
	case s == nil || s.ended:
		return transfer.ErrSession
	case g.ID == 0 || t.grants[g.ID] != nil:
		return fmt.Errorf("tcp: allow grant %d: id is 0 or in use: %w", g.ID, transfer.ErrGrant)
	}
	live := &grant{id: g.ID, key: g.Key, sess: s, spans: spans}
	t.grants[g.ID] = live
	s.grants[live] = struct{}{}
	return nil
}

// Revoke implements [transfer.Target]. It waits for a store under way, which is one
// system call of at most maxStore bytes, and always fences.
func (t *target) Revoke(id transfer.GrantID) bool {
	t.mu.Lock()
	g := t.grants[id]
	if g != nil {
		delete(t.grants, id)
		delete(g.sess.grants, g)
	}
	t.mu.Unlock()
	if g != nil {
		g.revoke()
	}
	return true
}

// lookup finds the grant that a write names; nil if it is not this session's.
func (t *target) lookup(s *session, h *header) *grant {
	t.mu.Lock()
	defer t.mu.Unlock()
	g := t.grants[h.grant]
	if g == nil || g.sess != s || g.key != h.key {
		return nil
	}
	return g
}

// Close implements [transfer.Target].
func (t *target) Close() error {
	t.mu.Lock()
	first := !t.closed
	t.closed = true
	if first {
		close(t.done)
		for id := range t.sessions {
			t.closeSession(id)
		}
		for c := range t.greeting {
			abort(c)
		}
	}
	t.mu.Unlock()
	var err error
	if first {
		if err = t.ln.Close(); err != nil {
			err = fmt.Errorf("tcp: close listener: %w", err)
		}
	}
	t.wg.Wait()
	return err
}

// admit starts the handshake of c on its own goroutine, or refuses c.
func (t *target) admit(c *net.TCPConn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || len(t.greeting) >= t.tr.cfg.MaxHalfOpen {
		if !t.closed {
			t.tr.stats.halfOpenRefused.Add(1)
		}
		abort(c)
		return
	}
	t.greeting[c] = struct{}{}
	t.wg.Go(func() { t.serve(c) })
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
	abort(tcp)
	t.leave(c)
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
	var c *conn
	if err == nil {
		c, st, err = t.join(tcp, h.session)
	}
	t.mu.Lock()
	delete(t.greeting, tcp)
	closed := t.closed
	t.mu.Unlock()
	if err != nil && st == statusOK {
		if !closed {
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
		t.leave(c)
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
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.sessions[id]
	switch {
	case s == nil || s.ended:
		return nil, statusSession, nil
	case len(s.conns) >= t.tr.cfg.MaxConns:
		return nil, statusBusy, nil
	}
	c.sess = s
	s.conns[c] = struct{}{}
	s.refs++
	return c, statusOK, nil
}

// leave takes c out of its session, which ends with its last connection.
func (t *target) leave(c *conn) {
	s := c.sess
	var grants []*grant
	t.mu.Lock()
	delete(s.conns, c)
	if len(s.conns) == 0 && !s.ended {
		grants = t.end(s)
	}
	t.mu.Unlock()
	revokeAll(grants)
	t.release(s)
}

// readFull reads exactly len(b) bytes.
func readFull(r io.Reader, b []byte) error {
	_, err := io.ReadFull(r, b)
	return err
}
