package session

import (
	"net"
	"sync"
)

// connSet knows the open connections of a server: it bounds their number, and lets Close
// break those that gRPC itself cannot reach because they have not finished their preface.
type connSet struct {
	max int

	mu     sync.Mutex
	closed bool
	conns  map[*trackedConn]struct{} // len <= max
}

func newConnSet(limit int) *connSet {
	return &connSet{max: limit, conns: make(map[*trackedConn]struct{})}
}

// listener wraps l so that its connections are in the set until they are closed.
func (s *connSet) listener(l net.Listener) net.Listener { return trackedListener{l, s} }

type trackedListener struct {
	net.Listener
	set *connSet
}

// Accept closes connections above the limit at once and goes on.
func (l trackedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if t := l.set.add(c); t != nil {
			return t, nil
		}
		_ = c.Close()
	}
}

func (s *connSet) add(c net.Conn) *trackedConn {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.conns) >= s.max {
		return nil
	}
	t := &trackedConn{c, s}
	s.conns[t] = struct{}{}
	return t
}

// closeAll breaks every connection, and those to come.
func (s *connSet) closeAll() {
	s.mu.Lock()
	s.closed = true
	open := make([]net.Conn, 0, len(s.conns))
	for t := range s.conns {
		open = append(open, t.Conn)
	}
	s.mu.Unlock()
	for _, c := range open {
		_ = c.Close()
	}
}

type trackedConn struct {
	net.Conn
	set *connSet
}

// Close leaves the set.
func (c *trackedConn) Close() error {
	c.set.mu.Lock()
	delete(c.set.conns, c)
	c.set.mu.Unlock()
	return c.Conn.Close()
}
