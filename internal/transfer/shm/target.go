package shm

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/door"
	"github.com/baton-pd/baton/internal/transfer/grants"
)

// slotsOf says in which slot of a connection's table a grant lies; under the book's lock. Of a revoked grant it is
// right where a writer is inside.
type slotsOf map[*conn]int

type (
	book    = grants.Book[*conn, slotsOf]
	session = grants.Session[*conn, slotsOf]
	grant   = grants.Grant[*conn, slotsOf]
)

// target is one socket and the registered memory. The book's lock guards the tables of connections too.
type target struct {
	*book
	tr   *Transport
	door *door.Door[*net.UnixConn]
	path string
	id   string // device and inode of the socket
	size uint64
	fd   int // own duplicate of the memory's descriptor
	sink transfer.Sink
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
	t := &target{tr: tr, path: path, id: id, size: uint64(len(mem.Bytes)), fd: fd, sink: sink}
	t.book = grants.New(grants.Config{Kind: tr.Kind(), Size: t.size, Conns: tr.cfg.MaxConns, Sink: sink}, grants.Hooks[*conn, slotsOf]{
		Allow: publish, Join: publishAll, Seal: seal, Part: func(c *conn, g *grant) { delete(g.Own, c) },
		Dismiss: (*conn).dismiss, Break: func(c *conn) { _ = c.uc.Close() },
	})
	t.door = door.New(door.Config[*net.UnixConn]{
		Listener: ln, Accept: ln.AcceptUnix, Limit: tr.cfg.MaxHalfOpen, Refused: &tr.stats.halfOpenRefused,
		Refuse: func(uc *net.UnixConn) { _ = uc.Close() }, Serve: t.serve, Go: t.Go,
	})
	t.Go(t.door.Run)
	return t, nil
}

// Descriptor implements [transfer.Target].
func (t *target) Descriptor() transfer.Descriptor {
	return transfer.Descriptor{
		Kind: t.tr.Kind(), Addr: t.path, Host: t.tr.boot, Size: t.size,
		Meta: map[string]string{metaSocket: t.id},
	}
}

// Close implements [transfer.Target]. It waits up to CloseGrace for the writers; see
// [transfer.UnfencedError]. The listener removes its file.
func (t *target) Close() error {
	return t.book.Close(t.tr.cfg.CloseGrace, t.door.Close, func() error { return unix.Close(t.fd) })
}

// publish puts g into the tables of conns. A full table is ErrBusy: try again when another grant has ended.
func publish(g *grant, conns map[*conn]struct{}) error {
	if len(g.Spans) > spans {
		return fmt.Errorf("%d spans, at most %d: %w", len(g.Spans), spans, transfer.ErrTooLarge)
	}
	g.Own = make(slotsOf)
	for c := range conns {
		slot, ok := c.table.put(g.ID, g.Key, g.Spans)
		if !ok {
			seal(g) // nobody knows of it, so nobody is inside
			return fmt.Errorf("grant table is full: %w", transfer.ErrBusy)
		}
		g.Own[c] = slot
	}
	return nil
}

// publishAll puts the live grants of s into c's table. False: it is full, and nobody will look into it.
func publishAll(c *conn, s *session) bool {
	placed := make(map[*grant]int)
	for g := range s.Grants() {
		slot, ok := c.table.put(g.ID, g.Key, g.Spans)
		if !ok {
			return false
		}
		placed[g] = slot
	}
	for g, slot := range placed {
		g.Own[c] = slot
	}
	return true
}

// seal revokes g in all tables and returns the connections with a writer inside.
func seal(g *grant) (inside []*conn) {
	for c, slot := range g.Own {
		if !c.table.revoke(slot) {
			inside = append(inside, c)
		}
	}
	return inside
}

// left handles a writer's message that it has left a revoked grant.
func (t *target) left(c *conn, id transfer.GrantID) error {
	if !t.ExitRevoked(c, id, func(g *grant) bool { return c.table.quiet(g.Own[c]) }) {
		return errOrder
	}
	return nil
}

// join makes c, whose end is nobody else's from here on since the source may map the memory, a connection of session id.
func (t *target) join(c *conn, id transfer.SessionID) status {
	t.door.Pass(c.uc)
	var err error
	switch c.sess, err = t.Join(c, id); {
	case errors.Is(err, transfer.ErrBusy):
		return statusBusy
	case err != nil:
		return statusSession
	}
	return statusOK
}
