package mem

import (
	"fmt"
	"sync"

	"github.com/baton-pd/baton/internal/transfer"
)

type peer struct {
	conn *conn

	mu    sync.Mutex // queue, ended
	queue []transfer.Write
	busy  bool          // a write is taken from the queue and not done
	limit int           // len(queue) + busy <= limit
	ended bool          // nothing is queued any more
	wake  chan struct{} // 1 token: queue or ended changed
}

func newPeer(limit int) *peer {
	return &peer{conn: newConn(), limit: limit, wake: make(chan struct{}, 1)}
}

// Kind is "mem".
func (p *peer) Kind() string { return Kind }

// Post queues w.
func (p *peer) Post(w transfer.Write) error {
	if len(w.Segments) > maxSegments || len(w.Notify) > transfer.MaxNotify {
		return transfer.ErrTooLarge
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.conn.failed(); err != nil {
		return err
	}
	if p.ended {
		return transfer.ErrClosed
	}
	n := len(p.queue)
	if p.busy {
		n++
	}
	if n >= p.limit {
		return transfer.ErrBusy
	}
	p.queue = append(p.queue, w)
	p.signal()
	return nil
}

func (p *peer) signal() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Down is closed when the connection is no use any more.
func (p *peer) Down() <-chan struct{} { return p.conn.down }

// Err is nil before Down.
func (p *peer) Err() error { return p.conn.failed() }

// Close breaks the connection and waits for the peer's goroutine.
func (p *peer) Close() error {
	p.conn.fail(transfer.ErrClosed)
	<-p.conn.gone
	return nil
}

// run applies the queued writes in order; after the connection has ended it settles
// those that are left.
func (p *peer) run() {
	defer close(p.conn.gone)
	for {
		w, ok := p.next()
		if ok {
			err := p.apply(&w)
			p.mu.Lock()
			p.busy = false
			p.mu.Unlock()
			w.Done(err)
			continue
		}
		select {
		case <-p.wake:
		case <-p.conn.down:
			p.drain()
			return
		}
	}
}

// next takes the first queued write.
func (p *peer) next() (transfer.Write, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) == 0 {
		return transfer.Write{}, false
	}
	w := p.queue[0]
	p.queue[0] = transfer.Write{}
	p.queue = p.queue[1:]
	p.busy = true
	return w, true
}

// drain settles what is queued and lets nothing follow.
func (p *peer) drain() {
	p.mu.Lock()
	p.ended = true
	left := p.queue
	p.queue = nil
	p.mu.Unlock()
	for _, w := range left {
		w.Done(p.conn.failed())
	}
}

// apply stores the segments and hands over the notification.
func (p *peer) apply(w *transfer.Write) error {
	c := p.conn
	if err := c.failed(); err != nil {
		return err
	}
	g, err := c.target.lookup(w, c.session)
	if err != nil {
		return err
	}
	for _, seg := range w.Segments {
		if err := c.target.store(g, seg.Off, seg.Src, c.failed); err != nil {
			return fmt.Errorf("write to grant %d, room %s: %w", w.Grant, w.Key, err)
		}
	}
	if w.Notify == nil {
		return nil
	}
	if err := c.notify(w.Grant, w.Notify); err != nil {
		return fmt.Errorf("notify grant %d, room %s: %w", w.Grant, w.Key, err)
	}
	return nil
}
