package mem

import (
	"errors"
	"fmt"
	"sync"

	"github.com/baton-pd/baton/internal/transfer"
)

// grant is a live permission. Writers hold mu for reading while they copy a slice;
// Revoke holds it for writing.
type grant struct {
	transfer.Grant
	mu      sync.RWMutex
	revoked bool
}

// session is one generation of a writer, from OpenSession until Fenced is due.
type session struct {
	conns  map[*conn]struct{}
	grants map[transfer.GrantID]struct{}
}

type target struct {
	reg  *Registry
	addr string
	mem  []byte
	sink transfer.Sink

	wg sync.WaitGroup // conn.serve and fencer

	mu       sync.Mutex
	sessions map[transfer.SessionID]*session
	grants   map[transfer.GrantID]*grant
	fenced   []transfer.SessionID // to be told to the Sink, in order
	closed   bool
	wake     sync.Cond // fenced or closed changed
}

func newTarget(r *Registry, mem []byte, sink transfer.Sink) *target {
	t := &target{
		reg: r, mem: mem, sink: sink,
		sessions: make(map[transfer.SessionID]*session),
		grants:   make(map[transfer.GrantID]*grant),
	}
	t.wake.L = &t.mu
	t.wg.Go(t.tellFenced)
	return t
}

// tellFenced calls Sink.Fenced outside the lock until the target is closed and all
// are told.
func (t *target) tellFenced() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for {
		for len(t.fenced) == 0 {
			if t.closed {
				return
			}
			t.wake.Wait()
		}
		s := t.fenced[0]
		t.fenced = t.fenced[1:]
		t.mu.Unlock()
		t.sink.Fenced(s)
		t.mu.Lock()
	}
}

// Descriptor names the target on its network.
func (t *target) Descriptor() transfer.Descriptor {
	return transfer.Descriptor{Kind: Kind, Addr: t.addr, Size: uint64(len(t.mem))}
}

// OpenSession lets connections of s in.
func (t *target) OpenSession(s transfer.SessionID) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return transfer.ErrClosed
	}
	if s == 0 || t.sessions[s] != nil {
		return fmt.Errorf("open session %d: %w", s, transfer.ErrSession)
	}
	t.sessions[s] = &session{conns: make(map[*conn]struct{}), grants: make(map[transfer.GrantID]struct{})}
	return nil
}

// CloseSession ends s.
func (t *target) CloseSession(s transfer.SessionID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.endSession(s)
}

// endSession revokes the session's grants, which fences it, and breaks its connections.
// Under mu.
func (t *target) endSession(s transfer.SessionID) {
	ses := t.sessions[s]
	if ses == nil {
		return
	}
	delete(t.sessions, s)
	for id := range ses.grants {
		t.revoke(id)
	}
	for c := range ses.conns {
		c.fail(fmt.Errorf("session %d closed: %w", s, transfer.ErrPeerLost))
	}
	t.fenced = append(t.fenced, s)
	t.wake.Signal()
}

// Allow makes g live.
func (t *target) Allow(g transfer.Grant) error {
	for _, s := range g.Spans {
		if s.Off > uint64(len(t.mem)) || s.Len > uint64(len(t.mem))-s.Off {
			return fmt.Errorf("allow grant %d, span %d+%d: %w", g.ID, s.Off, s.Len, transfer.ErrBounds)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	ses := t.sessions[g.Session]
	switch {
	case t.closed:
		return transfer.ErrClosed
	case ses == nil:
		return fmt.Errorf("allow grant %d: session %d: %w", g.ID, g.Session, transfer.ErrSession)
	case g.ID == 0 || t.grants[g.ID] != nil:
		return fmt.Errorf("allow grant %d: %w", g.ID, transfer.ErrGrant)
	}
	g.Spans = append([]transfer.Span(nil), g.Spans...)
	t.grants[g.ID] = &grant{Grant: g}
	ses.grants[g.ID] = struct{}{}
	return nil
}

// Revoke ends a grant. It waits for the slice under way, never for a peer.
func (t *target) Revoke(id transfer.GrantID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.revoke(id)
	return true
}

// revoke is Revoke under mu.
func (t *target) revoke(id transfer.GrantID) {
	g := t.grants[id]
	if g == nil {
		return
	}
	delete(t.grants, id)
	if ses := t.sessions[g.Session]; ses != nil {
		delete(ses.grants, id)
	}
	g.mu.Lock()
	g.revoked = true
	g.mu.Unlock()
}

// Close ends all sessions, tells the Sink, and waits for the goroutines of the target.
func (t *target) Close() error {
	t.reg.remove(t.addr)
	t.mu.Lock()
	t.closed = true
	for s := range t.sessions {
		t.endSession(s)
	}
	t.wake.Signal()
	t.mu.Unlock()
	t.wg.Wait()
	return nil
}

// connect attaches a new connection to session s.
func (t *target) connect(c *conn, s transfer.SessionID) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	ses := t.sessions[s]
	switch {
	case t.closed:
		return transfer.ErrPeerLost
	case ses == nil:
		return transfer.ErrSession
	}
	c.target, c.session = t, s
	ses.conns[c] = struct{}{}
	t.wg.Go(c.serve)
	return nil
}

// disconnected: c touches memory no more. A session whose last connection is gone has
// lost its writer for good and ends.
func (t *target) disconnected(c *conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ses := t.sessions[c.session]
	if ses == nil {
		return
	}
	delete(ses.conns, c)
	if len(ses.conns) == 0 {
		t.endSession(c.session)
	}
}

// lookup finds the grant a write names, if it may be used on session s and all segments
// lie inside it.
func (t *target) lookup(w *transfer.Write, s transfer.SessionID) (*grant, error) {
	t.mu.Lock()
	g := t.grants[w.Grant]
	t.mu.Unlock()
	if g == nil || g.Session != s || g.Key != w.Key {
		return nil, fmt.Errorf("write to grant %d, room %s: %w", w.Grant, w.Key, transfer.ErrGrant)
	}
	for _, seg := range w.Segments {
		if !inside(g.Spans, seg.Off, uint64(len(seg.Src))) {
			return nil, fmt.Errorf("write of %d bytes at %d, grant %d: %w", len(seg.Src), seg.Off, w.Grant, transfer.ErrBounds)
		}
	}
	return g, nil
}

// inside reports whether [off, off+n) lies wholly in one span. Written without
// off+n, which could overflow.
func inside(spans []transfer.Span, off, n uint64) bool {
	for _, s := range spans {
		if off >= s.Off && off-s.Off <= s.Len && n <= s.Len-(off-s.Off) {
			return true
		}
	}
	return false
}

// store copies src to off under g, slice by slice, and stops when the grant is revoked
// or stop says why.
func (t *target) store(g *grant, off uint64, src []byte, stop func() error) error {
	for {
		if err := stop(); err != nil {
			return err
		}
		n := min(len(src), sliceBytes)
		g.mu.RLock()
		if g.revoked {
			g.mu.RUnlock()
			return errRevoked
		}
		copy(t.mem[off:], src[:n])
		g.mu.RUnlock()
		off, src = off+uint64(n), src[n:]
		if len(src) == 0 {
			return nil
		}
	}
}

var errRevoked = errors.Join(transfer.ErrGrant, errors.New("revoked while writing"))
