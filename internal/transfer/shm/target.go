package shm

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/door"
)

// target is one socket and the registered memory.
type target struct {
	tr   *Transport
	ln   *net.UnixListener
	path string
	id   string // device and inode of the socket
	size uint64
	fd   int // own duplicate of the memory's descriptor
	sink transfer.Sink
	// done is closed by Close; wakes the accept loop out of a pause.
	done chan struct{}
	// wg counts the accept loop, the connections and the calls of Fenced. Add only
	// under mu and while !closed, or from a goroutine that is counted.
	wg sync.WaitGroup

	// mu guards what follows, all sessions and grants, and the tables of connections.
	// Held for moments, never across I/O or a callback.
	mu       sync.Mutex
	closed   bool
	sessions map[transfer.SessionID]*session
	grants   map[transfer.GrantID]*grant // live
	draining map[transfer.GrantID]*grant // revoked, with a writer inside
	live     map[*session]struct{}       // not yet fenced, closed ones too
	greeting map[*net.UnixConn]struct{}  // in the handshake; at most MaxHalfOpen
}

// session is one SessionID; all fields under target.mu.
type session struct {
	id     transfer.SessionID
	conns  map[*conn]struct{}
	grants map[*grant]struct{} // live ones
	// refs counts the connections whose goroutine runs, and a CloseSession under way.
	// Fenced follows when ended and refs is 0.
	refs   int
	ended  bool // no connection and no grant gets in any more
	fenced bool // Fenced was, or is about to be, called
	// lost: a connection was given up although its writer may still have the mapping; the
	// session can never be fenced.
	lost bool
}

// grant is one permission; all fields under target.mu.
type grant struct {
	transfer.Grant // Spans sorted
	sess           *session
	slots          map[*conn]int // where it is live, or its writer is still inside
	asked          bool          // Revoke has returned false: Revoked is due
}

func newTarget(tr *Transport, ln *net.UnixListener, path string, mem transfer.Memory, sink transfer.Sink) (*target, error) {
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, fmt.Errorf("shm: protect socket: %w", err)
	}
	id, err := identify(path)
	if err != nil {
		return nil, err
	}
	fd, err := unix.FcntlInt(uintptr(mem.FD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("shm: duplicate memory descriptor: %w", err)
	}
	t := &target{
		tr: tr, ln: ln, path: path, id: id, size: uint64(len(mem.Bytes)), fd: fd, sink: sink,
		done:     make(chan struct{}),
		sessions: make(map[transfer.SessionID]*session),
		grants:   make(map[transfer.GrantID]*grant),
		draining: make(map[transfer.GrantID]*grant),
		live:     make(map[*session]struct{}),
		greeting: make(map[*net.UnixConn]struct{}),
	}
	t.wg.Go(func() { door.Accept(t.ln.AcceptUnix, t.done, t.admit) })
	return t, nil
}

// Descriptor implements [transfer.Target].
func (t *target) Descriptor() transfer.Descriptor {
	return transfer.Descriptor{
		Kind: t.tr.Kind(), Addr: t.path, Host: t.tr.boot, Size: t.size,
		Meta: map[string]string{metaSocket: t.id},
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
	s := &session{id: id, conns: make(map[*conn]struct{}), grants: make(map[*grant]struct{})}
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

// closeSession starts the end of session id: from here on a correct writer enters none of
// its grants. Under mu.
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
	t.end(s)
	conns := make([]*conn, 0, len(s.conns))
	for c := range s.conns {
		conns = append(conns, c)
	}
	// Not on the caller's goroutine: the caller may hold a lock that Fenced wants too.
	t.wg.Go(func() {
		for _, c := range conns {
			c.dismiss()
		}
		t.release(s)
	})
}

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
		for id, g := range t.draining { // those whose connection is gone
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

// Allow implements [transfer.Target]. A full grant table is ErrBusy: try again when
// another grant has ended.
func (t *target) Allow(g transfer.Grant) error {
	list, ok := transfer.SortSpans(g.Spans, t.size)
	if !ok {
		return fmt.Errorf("shm: allow grant %d: spans overlap or leave the memory: %w", g.ID, transfer.ErrBounds)
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
		return fmt.Errorf("shm: allow grant %d: id is 0 or in use: %w", g.ID, transfer.ErrGrant)
	case len(list) > spans:
		return fmt.Errorf("shm: allow grant %d: %d spans, at most %d: %w", g.ID, len(list), spans, transfer.ErrTooLarge)
	}
	live := &grant{Grant: g, sess: s, slots: make(map[*conn]int)}
	for c := range s.conns {
		slot, ok := c.table.put(g.ID, g.Key, list)
		if !ok {
			t.revoke(live) // nobody knows of it, so nobody is inside
			return fmt.Errorf("shm: allow grant %d: grant table is full: %w", g.ID, transfer.ErrBusy)
		}
		live.slots[c] = slot
	}
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

// revoke ends g; it is draining afterwards if a writer is inside. Under mu.
func (t *target) revoke(g *grant) {
	delete(t.grants, g.ID)
	delete(g.sess.grants, g)
	for c, slot := range g.slots {
		if c.table.revoke(slot) {
			delete(g.slots, c)
		}
	}
	if len(g.slots) > 0 {
		t.draining[g.ID] = g
	}
}

// left handles a writer's message that it has left a revoked grant.
func (t *target) left(c *conn, id transfer.GrantID) error {
	t.mu.Lock()
	g := t.draining[id]
	if g == nil {
		t.mu.Unlock()
		return errOrder
	}
	slot, inside := g.slots[c]
	if !inside || !c.table.quiet(slot) {
		t.mu.Unlock()
		return errOrder
	}
	delete(g.slots, c)
	quiet := len(g.slots) == 0
	if quiet {
		delete(t.draining, id)
	}
	due := quiet && g.asked
	t.mu.Unlock()
	if due {
		t.revoked(id)
	}
	return nil
}

// revoked tells the Sink, if it wants to know.
func (t *target) revoked(id transfer.GrantID) {
	if s, ok := t.sink.(transfer.RevokeSink); ok {
		s.Revoked(id)
	}
}

// lives reports whether c's session has the live grant id.
func (t *target) lives(c *conn, id transfer.GrantID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	g := t.grants[id]
	return g != nil && g.sess == c.sess
}

// join makes c a connection of session id and gives it the session's grants.
func (t *target) join(c *conn, id transfer.SessionID) status {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.sessions[id]
	switch {
	case s == nil || s.ended:
		return statusSession
	case len(s.conns) >= t.tr.cfg.MaxConns:
		return statusBusy
	}
	placed := make(map[*grant]int, len(s.grants))
	for g := range s.grants {
		slot, ok := c.table.put(g.ID, g.Key, g.Spans)
		if !ok {
			return statusBusy
		}
		placed[g] = slot
	}
	for g, slot := range placed {
		g.slots[c] = slot
	}
	c.sess = s
	s.conns[c] = struct{}{}
	s.refs++
	// From here on the source may map the memory: the session's end tells it to go, and
	// nobody may just close its socket.
	delete(t.greeting, c.uc)
	return statusOK
}

// leave takes c, whose socket has ended, out of its session, which ends with its last
// connection. gone: the writer cannot store any more.
func (t *target) leave(c *conn, gone bool) {
	s := c.sess
	var quiet []transfer.GrantID
	t.mu.Lock()
	delete(s.conns, c)
	if !gone {
		s.lost = true
		if !s.ended {
			t.end(s)
		}
	}
	for g := range s.grants {
		delete(g.slots, c)
	}
	for id, g := range t.draining {
		if _, inside := g.slots[c]; !inside || !gone {
			continue // of a writer that is not gone they stay draining for good
		}
		delete(g.slots, c)
		// With the session's last connection Fenced comes instead of Revoked; until
		// then the grant counts as draining.
		if len(g.slots) == 0 && len(s.conns) > 0 {
			delete(t.draining, id)
			if g.asked {
				quiet = append(quiet, id)
			}
		}
	}
	if len(s.conns) == 0 && !s.ended {
		t.end(s)
	}
	c.table = nil
	t.mu.Unlock()
	for _, id := range quiet {
		t.revoked(id)
	}
	t.release(s)
}

// Close implements [transfer.Target]. It waits up to CloseGrace for the writers; see
// [transfer.UnfencedError].
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
		t.wg.Wait()
		return nil
	}
	err := t.ln.Close() // removes the socket file
	if err != nil {
		err = fmt.Errorf("shm: close listener: %w", err)
	}
	finished := make(chan struct{})
	go func() { // ends with the connections, at the latest when they are abandoned
		t.wg.Wait()
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
	return errors.Join(err, t.unfenced(), unix.Close(t.fd))
}

// abandon breaks the connections of the writers that do not go.
func (t *target) abandon() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for s := range t.live {
		for c := range s.conns {
			_ = c.uc.Close()
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
