package nixl

import (
	"net"
	"sync"
	"time"
)

// answerTimeout bounds the sending of control frames to somebody who does not read them, byeTimeout
// that of the last ones.
const (
	answerTimeout = 30 * time.Second
	byeTimeout    = time.Second
)

// outbox sends control frames from whoever has one, without making them wait. Frames that
// come while others are being sent leave together.
type outbox struct {
	mu     sync.Mutex
	more   sync.Cond
	buf    []byte
	spare  []byte
	closed bool
}

func newOutbox() *outbox {
	o := &outbox{}
	o.more.L = &o.mu
	return o
}

// add queues a whole frame.
func (o *outbox) add(frame []byte) {
	o.mu.Lock()
	if !o.closed {
		o.buf = append(o.buf, frame...)
	}
	o.mu.Unlock()
	o.more.Signal()
}

// with queues what f appends.
func (o *outbox) with(f func([]byte) []byte) {
	o.mu.Lock()
	if !o.closed {
		o.buf = f(o.buf)
	}
	o.mu.Unlock()
	o.more.Signal()
}

// run sends to c until close or an error.
func (o *outbox) run(c net.Conn) error {
	for {
		o.mu.Lock()
		for len(o.buf) == 0 && !o.closed {
			o.more.Wait()
		}
		if len(o.buf) == 0 {
			o.mu.Unlock()
			return nil
		}
		b, limit := o.buf, answerTimeout
		if o.closed {
			limit = byeTimeout
		}
		o.buf, o.spare = o.spare[:0], nil
		_ = c.SetWriteDeadline(time.Now().Add(limit)) // under mu: it must not undo that of last
		o.mu.Unlock()
		if _, err := c.Write(b); err != nil {
			return err
		}
		if cap(b) <= 1<<20 { // a rare flood is not kept
			o.mu.Lock()
			o.spare = b[:0]
			o.mu.Unlock()
		}
	}
}

// last queues a frame after which nothing more is taken; run sends what is there and ends, soon.
func (o *outbox) last(c net.Conn, frame []byte) {
	o.mu.Lock()
	if !o.closed {
		o.closed, o.buf = true, append(o.buf, frame...)
	}
	_ = c.SetWriteDeadline(time.Now().Add(byeTimeout))
	o.mu.Unlock()
	o.more.Broadcast()
}

// close ends run; what is not sent yet is dropped.
func (o *outbox) close() {
	o.mu.Lock()
	o.closed, o.buf = true, nil
	o.mu.Unlock()
	o.more.Broadcast()
}
