package nixl

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/door"
)

// target is one control port and the memory.
type target struct {
	tr      *Transport
	ln      *net.TCPListener
	addr    string
	size    uint64
	memory  *os.File // own duplicate of the memory's descriptor
	sink    transfer.Sink
	fences  bool          // ending a session's helper fences it
	done    chan struct{} // closed by Close; wakes the accept loop out of a pause
	workers sync.WaitGroup

	// mu guards what follows and all sessions, grants and entries. Held for moments,
	// never across I/O or a callback.
	mu       sync.Mutex
	closed   bool
	sessions map[transfer.SessionID]*session
	grants   map[transfer.GrantID]*grant // live
	draining map[transfer.GrantID]*grant // revoked, with a writer inside
	live     map[*session]struct{}       // not yet fenced, closed ones too
	greeting map[*net.TCPConn]struct{}   // before their hello; at most MaxHalfOpen
}

// session is one SessionID; all fields under target.mu.
type session struct {
	id     transfer.SessionID
	conn   *conn // nil: none yet
	had    bool  // it has had its one connection
	grants map[*grant]struct{}
	// refs counts the connection's goroutine and a CloseSession under way. Fenced follows
	// when ended and refs is 0.
	refs   int
	ended  bool // no connection and no grant gets in any more
	fenced bool // Fenced was, or is about to be, called
	lost   bool // the connection was given up although its writer may live: never fenced
}

// grant is one permission; all fields under target.mu.
type grant struct {
	transfer.Grant // Spans sorted
	sess           *session
	writes         []*entry // that have entered and not left, in order
	inside         int      // of these, those that may still store
	live           bool
	asked          bool // Revoke has returned false: Revoked is due
	age            int  // watch intervals since it was revoked with a writer inside
}

func newTarget(tr *Transport, ln *net.TCPListener, mem transfer.Memory, sink transfer.Sink) (*target, error) {
	fd, err := unix.FcntlInt(uintptr(mem.FD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("nixl: duplicate memory descriptor: %w", err)
	}
	t := &target{
		tr: tr, ln: ln, size: uint64(len(mem.Bytes)), memory: os.NewFile(uintptr(fd), "memory"), sink: sink, fences: tr.cfg.targetFences(),
		addr:     advertised(tr.cfg.Advertise, ln.Addr().(*net.TCPAddr)),
		done:     make(chan struct{}),
		sessions: make(map[transfer.SessionID]*session),
		grants:   make(map[transfer.GrantID]*grant),
		draining: make(map[transfer.GrantID]*grant),
		live:     make(map[*session]struct{}),
		greeting: make(map[*net.TCPConn]struct{}),
	}
	t.workers.Go(func() { door.Accept(t.ln.AcceptTCP, t.done, t.admit) })
	return t, nil
}

// advertised is host:port for sources: a configured host keeps the listener's port.
func advertised(configured string, a *net.TCPAddr) string {
	port := fmt.Sprint(a.Port)
	switch {
	case configured == "":
		return a.String()
	case strings.Contains(configured, ":") && !strings.HasSuffix(configured, "]"):
		if host, p, err := net.SplitHostPort(configured); err == nil {
			return net.JoinHostPort(host, p)
		}
	}
	return net.JoinHostPort(strings.Trim(configured, "[]"), port)
}

// Descriptor implements [transfer.Target].
func (t *target) Descriptor() transfer.Descriptor {
	return transfer.Descriptor{
		Kind: t.tr.Kind(), Addr: t.addr, Size: t.size,
		Meta: map[string]string{metaBackend: t.tr.cfg.Backend, metaMemory: t.tr.cfg.Memory},
	}
}

// OpenSession implements [transfer.Target].
func (t *target) OpenSession(id transfer.SessionID) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return transfer.ErrClosed
	case id == 0, t.sessions[id] != nil:
		return transfer.ErrSession
	}
	s := &session{id: id, grants: make(map[*grant]struct{})}
	t.sessions[id] = s
	t.live[s] = struct{}{}
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
		return // its connection's goroutine does the rest
	}
	s.refs++
	t.end(s)
	c := s.conn
	// Not on the caller's goroutine: the caller may hold a lock that Fenced wants too.
	t.workers.Go(func() {
		if c != nil {
			c.stop(errSessionClosed)
		}
		t.release(s)
	})
}

var errSessionClosed = errors.New("nixl: the session was closed")

// end refuses new connections and grants of s and revokes its grants. Under mu.
func (t *target) end(s *session) {
	s.ended = true
	for g := range s.grants {
		t.revoke(g)
	}
}

// release drops one reference of s and reports the fence with the last.
func (t *target) release(s *session) {
	t.mu.Lock()
	s.refs--
	fence := s.refs == 0 && s.ended && !s.fenced && !s.lost
	if fence {
		s.fenced = true
		delete(t.live, s)
		for id, g := range t.draining {
			if g.sess == s {
				delete(t.draining, id)
			}
		}
	}
	t.mu.Unlock()
	if fence {
		t.sink.Fenced(s.id)
	}
}

// Allow implements [transfer.Target].
func (t *target) Allow(g transfer.Grant) error {
	list, ok := transfer.SortSpans(g.Spans, t.size)
	if !ok {
		return fmt.Errorf("nixl: allow grant %d: spans overlap or leave the memory: %w", g.ID, transfer.ErrBounds)
	}
	g.Spans = list
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.sessions[g.Session]
	switch {
	case t.closed:
		return transfer.ErrClosed
	case s == nil || s.ended:
		return transfer.ErrSession
	case g.ID == 0 || t.grants[g.ID] != nil || t.draining[g.ID] != nil:
		return fmt.Errorf("nixl: allow grant %d: id is 0 or in use: %w", g.ID, transfer.ErrGrant)
	}
	live := &grant{Grant: g, sess: s, live: true}
	t.grants[g.ID] = live
	s.grants[live] = struct{}{}
	return nil
}

// Revoke implements [transfer.Target].
func (t *target) Revoke(id transfer.GrantID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if g := t.grants[id]; g != nil {
		t.revoke(g)
	}
	if g := t.draining[id]; g != nil {
		g.asked = true
		return false
	}
	return true
}

// revoke ends g; it is draining afterwards if a writer is inside, who is told. Under mu.
func (t *target) revoke(g *grant) {
	g.live = false
	delete(t.grants, g.ID)
	delete(g.sess.grants, g)
	if g.inside > 0 {
		t.draining[g.ID] = g
		if c := g.sess.conn; c != nil {
			c.say(appendWords(nil, ctlRevoke, uint64(g.ID)))
		}
	}
}

// out counts e, which will store nothing more, out of its grant; due: Revoked is to be
// called for the grant. Under mu.
func (t *target) out(e *entry) (due bool) {
	g := e.grant
	g.inside--
	if g.inside > 0 || t.draining[g.ID] != g {
		return false
	}
	delete(t.draining, g.ID)
	return g.asked
}

// revoked tells the Sink, if it wants to know.
func (t *target) revoked(id transfer.GrantID) {
	if s, ok := t.sink.(transfer.RevokeSink); ok {
		s.Revoked(id)
	}
}

// join makes c the connection of session id.
func (t *target) join(c *conn, id transfer.SessionID) status {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.greeting, c.tc)
	s := t.sessions[id]
	switch {
	case s == nil || s.ended:
		return statusSession
	case s.had:
		return statusBusy
	}
	s.conn, s.had = c, true
	s.refs++
	c.sess = s
	return statusOK
}

// leave takes c, which has ended, out of its session, which ends with it. gone: no byte of
// its writer can be stored any more.
func (t *target) leave(c *conn, gone bool) {
	t.mu.Lock()
	s := c.sess
	s.conn = nil
	s.lost = !gone
	if !s.ended {
		t.end(s)
	}
	t.mu.Unlock()
	t.release(s)
}

// Close implements [transfer.Target]. It waits up to CloseGrace for writers that only
// their own end fences; see [transfer.UnfencedError].
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
			_ = c.Close()
		}
	}
	t.mu.Unlock()
	if !first {
		t.workers.Wait()
		return nil
	}
	err := t.ln.Close()
	finished := make(chan struct{})
	go func() { // ends with the connections, at the latest when they are abandoned
		t.workers.Wait()
		close(finished)
	}()
	grace := time.NewTimer(t.tr.cfg.CloseGrace)
	defer grace.Stop()
	select {
	case <-finished:
	case <-grace.C:
		t.abandon()
		<-finished
	}
	return errors.Join(err, t.unfenced(), t.memory.Close())
}

// abandon breaks the connections of the writers that do not go.
func (t *target) abandon() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for s := range t.live {
		if s.conn != nil {
			_ = s.conn.tc.Close()
		}
	}
}

// unfenced is an UnfencedError if a session is left.
func (t *target) unfenced() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.live) == 0 {
		return nil
	}
	e := &transfer.UnfencedError{Kind: t.tr.Kind()}
	for s := range t.live {
		e.Sessions = append(e.Sessions, s.id)
	}
	slices.Sort(e.Sessions)
	return e
}
