package nixl

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/door"
	"github.com/baton-pd/baton/internal/transfer/grants"
)

// writes is what nixl keeps with a grant.
type writes struct {
	entered []*entry // and not left, in order; under conn.mu
	age     int      // watch intervals since it was revoked with a writer inside; the watchdog's
}

type (
	book    = grants.Book[*conn, writes]
	session = grants.Session[*conn, writes]
	grant   = grants.Grant[*conn, writes]
)

// target is one control port and the memory. A session has one connection in its life.
type target struct {
	*book
	tr     *Transport
	door   *door.Door[*net.TCPConn]
	addr   string
	size   uint64
	memory *os.File // own duplicate of the memory's descriptor
	sink   transfer.Sink
	fences bool // ending a session's helper fences it
}

func newTarget(tr *Transport, ln *net.TCPListener, mem transfer.Memory, sink transfer.Sink) (*target, error) {
	fd, err := unix.FcntlInt(uintptr(mem.FD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("nixl: duplicate memory descriptor: %w", err)
	}
	t := &target{
		tr: tr, size: uint64(len(mem.Bytes)), memory: os.NewFile(uintptr(fd), "memory"), sink: sink, fences: tr.cfg.targetFences(),
		addr: advertised(tr.cfg.Advertise, ln.Addr().(*net.TCPAddr)),
	}
	t.book = grants.New(grants.Config{Kind: tr.Kind(), Size: t.size, Conns: 1, Sink: sink}, grants.Hooks[*conn, writes]{
		Seal:    tellInside,
		Dismiss: func(c *conn) { c.stop(errSessionClosed) },
		Break:   func(c *conn) { _ = c.tc.Close() },
	})
	t.door = door.New(door.Config[*net.TCPConn]{
		Listener: ln, Accept: ln.AcceptTCP, Limit: tr.cfg.MaxHalfOpen, Refused: &tr.stats.halfOpenRefused,
		Refuse: func(tc *net.TCPConn) { _ = tc.Close() }, Serve: t.serve, Go: t.Go,
	})
	t.Go(t.door.Run)
	return t, nil
}

// tellInside tells the writer inside a revoked grant.
func tellInside(g *grant) []*conn {
	for c := range g.Inside() {
		c.say(appendWords(nil, ctlRevoke, uint64(g.ID)))
	}
	return nil
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

var errSessionClosed = errors.New("nixl: the session was closed")

// join makes c, whose end is nobody else's from here on, the connection of session id.
func (t *target) join(c *conn, id transfer.SessionID) status {
	t.door.Pass(c.tc)
	var err error
	switch c.sess, err = t.Join(c, id); {
	case errors.Is(err, transfer.ErrBusy):
		return statusBusy
	case err != nil:
		return statusSession
	}
	return statusOK
}

// Close implements [transfer.Target]. It waits up to CloseGrace for writers that only
// their own end fences; see [transfer.UnfencedError].
func (t *target) Close() error {
	return t.book.Close(t.tr.cfg.CloseGrace, t.door.Close, t.memory.Close)
}
