package mem

import (
	"errors"
	"fmt"
	"sync"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/grants"
)

// guard is what mem keeps with a grant. Writers hold mu for reading while they copy a slice; revoke holds it for
// writing.
type guard struct {
	mu      sync.RWMutex
	revoked bool
}

// revoke waits for the slices under way, never for a peer.
func (g *guard) revoke() {
	g.mu.Lock()
	g.revoked = true
	g.mu.Unlock()
}

type (
	book    = grants.Book[*conn, guard]
	session = grants.Session[*conn, guard]
	grant   = grants.Grant[*conn, guard]
)

type target struct {
	*book
	reg  *Registry
	addr string
	mem  []byte
	sink transfer.Sink
}

func newTarget(r *Registry, mem []byte, sink transfer.Sink) *target {
	t := &target{reg: r, mem: mem, sink: sink}
	t.book = grants.New(grants.Config{Kind: Kind, Size: uint64(len(mem)), Sink: sink}, grants.Hooks[*conn, guard]{
		Join: func(c *conn, s *session) bool {
			c.target, c.session = t, s
			t.Go(c.serve)
			return true
		},
		Fence: func(g *grant) { g.Own.revoke() },
		Dismiss: func(c *conn) {
			c.fail(fmt.Errorf("session %d closed: %w", c.session.ID, transfer.ErrPeerLost))
		},
	})
	return t
}

// Descriptor names the target on its network.
func (t *target) Descriptor() transfer.Descriptor {
	return transfer.Descriptor{Kind: Kind, Addr: t.addr, Size: uint64(len(t.mem))}
}

// Close ends all sessions, tells the Sink, and waits for the goroutines of the target.
func (t *target) Close() error {
	t.reg.remove(t.addr)
	return t.book.Close(0, nil, nil)
}

// connect attaches a new connection to session s.
func (t *target) connect(c *conn, s transfer.SessionID) error {
	_, err := t.Join(c, s)
	if errors.Is(err, transfer.ErrClosed) {
		return transfer.ErrPeerLost // ErrClosed is of this end
	}
	return err
}

// lookup finds the grant a write names, if it may be used on session s and all segments
// lie inside it.
func (t *target) lookup(w *transfer.Write, s *session) (*grant, error) {
	g := t.Live(s, w.Grant)
	if g == nil || g.Key != w.Key {
		return nil, fmt.Errorf("write to grant %d, room %s: %w", w.Grant, w.Key, transfer.ErrGrant)
	}
	for _, seg := range w.Segments {
		if !transfer.Within(g.Spans, transfer.Span{Off: seg.Off, Len: uint64(len(seg.Src))}) {
			return nil, fmt.Errorf("write of %d bytes at %d, grant %d: %w", len(seg.Src), seg.Off, w.Grant, transfer.ErrBounds)
		}
	}
	return g, nil
}

// store copies src to off under g, slice by slice, and stops when the grant is revoked
// or stop says why.
func (t *target) store(g *grant, off uint64, src []byte, stop func() error) error {
	own := &g.Own
	for {
		if err := stop(); err != nil {
			return err
		}
		n := min(len(src), sliceBytes)
		own.mu.RLock()
		if own.revoked {
			own.mu.RUnlock()
			return errRevoked
		}
		copy(t.mem[off:], src[:n])
		own.mu.RUnlock()
		off, src = off+uint64(n), src[n:]
		if len(src) == 0 {
			return nil
		}
	}
}

var errRevoked = errors.Join(transfer.ErrGrant, errors.New("revoked while writing"))
