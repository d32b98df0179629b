package mem

import (
	"sync"

	"github.com/baton-pd/baton/internal/transfer"
)

// landing is a notification on its way to the Sink.
type landing struct {
	grant  transfer.GrantID
	notify []byte        // a copy: the writer may have given up on it
	done   chan struct{} // closed when Landed has returned
}

// conn is what the two ends of a connection share.
type conn struct {
	target  *target // set when it joins, before either goroutine runs
	session *session
	land    chan landing // unbuffered, from the peer's goroutine to the target's

	down chan struct{} // closed by the first fail
	once sync.Once
	err  error         // why; read after down
	gone chan struct{} // closed when the peer's goroutine touches memory no more
}

func newConn() *conn {
	return &conn{land: make(chan landing), down: make(chan struct{}), gone: make(chan struct{})}
}

// fail ends the connection; the first reason stays.
func (c *conn) fail(err error) {
	c.once.Do(func() {
		c.err = err
		close(c.down)
	})
}

// failed is nil while the connection lives.
func (c *conn) failed() error {
	select {
	case <-c.down:
		return c.err
	default:
		return nil
	}
}

// serve is the target's goroutine: it calls Landed until the connection has ended, tells the target, and
// waits until the peer has let go of the memory.
func (c *conn) serve() {
	for {
		select {
		case l := <-c.land:
			c.target.sink.Landed(l.grant, l.notify)
			close(l.done)
		case <-c.down:
			c.target.Leave(c, c.session, true) // what it may still store has its grants' leave
			<-c.gone
			return
		}
	}
}

// notify hands a notification to the Sink and waits until it has it.
func (c *conn) notify(g transfer.GrantID, b []byte) error {
	l := landing{g, append([]byte{}, b...), make(chan struct{})}
	select {
	case c.land <- l:
	case <-c.down:
		return c.err
	}
	select {
	case <-l.done:
		return nil
	case <-c.down:
		return c.err
	}
}
