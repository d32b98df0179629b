package zmtp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// PushConfig of a [Push]. Zero fields take the default.
type PushConfig struct {
	// Connect bounds dialling and the handshake, Write how long the other end may take
	// nothing before the connection is given up. Defaults 5 s and 30 s.
	Connect, Write time.Duration
	// Queue is how many messages, and QueueBytes how many bytes, wait at most. Defaults 4096 and 64 MiB.
	Queue, QueueBytes int
	// Down is called once, when nothing can be sent any more, with the reason; by a goroutine
	// of the Push. May be nil.
	Down func(error)
}

func (c PushConfig) withDefaults() PushConfig {
	if c.Connect <= 0 {
		c.Connect = 5 * time.Second
	}
	if c.Write <= 0 {
		c.Write = 30 * time.Second
	}
	if c.Queue <= 0 {
		c.Queue = 4096
	}
	if c.QueueBytes <= 0 {
		c.QueueBytes = 64 << 20
	}
	return c
}

// Push is one connection of a PUSH socket. Messages leave in the order of Send. Safe for
// concurrent use.
type Push struct {
	addr string
	cfg  PushConfig
	wg   sync.WaitGroup
	stop context.CancelFunc
	down chan struct{}

	mu     sync.Mutex
	more   chan struct{} // capacity 1
	queue  []Message
	bytes  int
	err    error // set once; nothing is taken any more
	ending bool  // Close: send what is queued, then end
	conn   net.Conn
}

// Dial starts connecting to addr and returns at once; messages may be sent already.
func Dial(addr string, c PushConfig) *Push {
	ctx, stop := context.WithCancel(context.Background())
	p := &Push{addr: addr, cfg: c.withDefaults(), stop: stop, down: make(chan struct{}), more: make(chan struct{}, 1)}
	p.wg.Go(func() { p.run(ctx) })
	return p
}

// Addr is where it sends to.
func (p *Push) Addr() string { return p.addr }

// Down is closed when nothing can be sent any more; Err says why.
func (p *Push) Down() <-chan struct{} { return p.down }

// Err is the reason of Down, nil before.
func (p *Push) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// Send queues m, which is then the Push's. It never blocks. nil is no receipt: messages of a
// connection that is lost may be lost with it.
func (p *Push) Send(m Message) error {
	n := 0
	for _, f := range m {
		n += len(f)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.err != nil:
		return p.err
	case p.ending:
		return ErrClosed
	case len(p.queue) >= p.cfg.Queue || p.bytes+n > p.cfg.QueueBytes:
		return fmt.Errorf("%w: %d messages wait for %s", ErrFull, len(p.queue), p.addr)
	}
	p.queue = append(p.queue, m)
	p.bytes += n
	p.wake()
	return nil
}

func (p *Push) wake() {
	select {
	case p.more <- struct{}{}:
	default:
	}
}

// Close sends what is queued for up to linger, ends the connection and waits.
func (p *Push) Close(linger time.Duration) {
	p.mu.Lock()
	p.ending = true
	p.wake()
	if p.conn != nil {
		_ = p.conn.SetWriteDeadline(time.Now().Add(linger))
	}
	p.mu.Unlock()
	if linger > 0 {
		t := time.NewTimer(linger)
		defer t.Stop()
		select {
		case <-p.down:
		case <-t.C:
		}
	}
	p.fail(ErrClosed)
	p.wg.Wait()
}

// fail ends the Push with its first reason.
func (p *Push) fail(err error) {
	p.mu.Lock()
	first := p.err == nil
	if first {
		p.err = err
		p.queue, p.bytes = nil, 0
		if p.conn != nil {
			_ = p.conn.Close()
		}
		close(p.down)
	}
	p.mu.Unlock()
	p.stop()
}

// run connects, then sends until it fails.
func (p *Push) run(ctx context.Context) {
	err := p.serve(ctx)
	p.fail(err)
	if p.cfg.Down != nil {
		p.cfg.Down(p.Err())
	}
}

func (p *Push) serve(ctx context.Context) error {
	dialer := net.Dialer{Timeout: p.cfg.Connect, KeepAliveConfig: keepAlive}
	c, err := dialer.DialContext(ctx, "tcp", p.addr)
	if err != nil {
		return fmt.Errorf("zmtp: connect to %s: %w", p.addr, err)
	}
	defer c.Close()
	p.mu.Lock()
	p.conn = c
	closed := p.err
	p.mu.Unlock()
	if closed != nil {
		return closed
	}
	_ = c.SetDeadline(time.Now().Add(p.cfg.Connect))
	r := &reader{r: bufio.NewReaderSize(c, 512), l: Limits{Frame: 4 << 10, Message: 4 << 10, Frames: 1}}
	if err := handshake(c, r, "PUSH", "PULL"); err != nil {
		return fmt.Errorf("zmtp: handshake with %s: %w", p.addr, err)
	}
	_ = c.SetDeadline(time.Time{})
	pongs := make(chan []byte, 4)
	p.wg.Go(func() { p.listen(r, pongs) })
	err = p.send(c, pongs)
	p.fail(err) // before the connection ends, which listen would take for the reason
	return err
}

// listen answers pings, inside next, until the connection ends. A message is an error: PULL sockets send none.
func (p *Push) listen(r *reader, pongs chan<- []byte) {
	_, err := r.next(func(cmd []byte) error {
		if b, ok := pong(cmd); ok {
			select {
			case pongs <- b:
			default:
			}
		}
		return nil
	})
	switch {
	case err == nil:
		err = fmt.Errorf("%w: a PULL socket sent a message", ErrProtocol)
	case errors.Is(err, io.EOF):
		err = errors.New("closed by the other side")
	}
	p.fail(fmt.Errorf("zmtp: connection to %s: %w", p.addr, err))
}

func (p *Push) send(c net.Conn, pongs <-chan []byte) error {
	var buf []byte
	for {
		p.mu.Lock()
		batch, ending, err := p.queue, p.ending, p.err
		p.queue, p.bytes = nil, 0
		if !ending {
			_ = c.SetWriteDeadline(time.Now().Add(p.cfg.Write))
		}
		p.mu.Unlock()
		if err != nil {
			return err
		}
		buf = buf[:0]
		for _, m := range batch {
			buf = appendMessage(buf, m)
		}
		if _, err := c.Write(buf); err != nil {
			return fmt.Errorf("zmtp: send to %s: %w", p.addr, err)
		}
		if ending && len(batch) == 0 {
			return ErrClosed
		}
		if ending {
			continue
		}
		if cap(buf) > 1<<20 {
			buf = nil
		}
		select {
		case <-p.more:
		case b := <-pongs:
			if _, err := c.Write(b); err != nil {
				return fmt.Errorf("zmtp: send to %s: %w", p.addr, err)
			}
		case <-p.down:
			return p.Err()
		}
	}
}
