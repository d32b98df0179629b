package zmtp

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Stats counts what a Pull has refused.
type Stats struct {
	// BadHandshakes: connections that did not say hello as they must, or in time.
	BadHandshakes uint64
	// Refused: connections closed at once because there were too many.
	Refused uint64
	// Broken: connections ended in the middle because they broke the rules.
	Broken uint64
}

// Pull is a bound PULL socket. Each connection has a goroutine; Close waits for all.
type Pull struct {
	ln     *net.TCPListener
	limits Limits
	handle func(from net.Addr, m Message)
	wg     sync.WaitGroup

	badHandshakes, refused, broken atomic.Uint64

	mu       sync.Mutex
	closed   bool
	conns    map[net.Conn]struct{}
	halfOpen int
	done     chan struct{}
}

// Listen binds addr (port 0: any). handle gets each message, those of one connection in order
// and one at a time, of different connections at once. The message is its own to keep.
func Listen(addr string, l Limits, handle func(from net.Addr, m Message)) (*Pull, error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("zmtp: bind PULL socket: %w", err)
	}
	p := &Pull{ln: ln.(*net.TCPListener), limits: l.withDefaults(), handle: handle, conns: make(map[net.Conn]struct{}), done: make(chan struct{})}
	p.wg.Go(p.accept)
	return p, nil
}

// Addr is where it listens.
func (p *Pull) Addr() *net.TCPAddr { return p.ln.Addr().(*net.TCPAddr) }

// Stats is a snapshot.
func (p *Pull) Stats() Stats {
	return Stats{BadHandshakes: p.badHandshakes.Load(), Refused: p.refused.Load(), Broken: p.broken.Load()}
}

// Close ends every connection and waits for their goroutines.
func (p *Pull) Close() error {
	p.mu.Lock()
	first := !p.closed
	p.closed = true
	if first {
		close(p.done)
		for c := range p.conns {
			_ = c.Close()
		}
	}
	p.mu.Unlock()
	var err error
	if first {
		err = p.ln.Close()
	}
	p.wg.Wait()
	return err
}

// accept takes connections until Close; trouble such as too many open files is waited out.
func (p *Pull) accept() {
	pause := 5 * time.Millisecond
	for {
		c, err := p.ln.AcceptTCP()
		switch {
		case err == nil:
			pause = 5 * time.Millisecond
			p.admit(c)
			continue
		case errors.Is(err, net.ErrClosed):
			return
		}
		select {
		case <-p.done:
			return
		case <-time.After(pause):
			pause = min(2*pause, time.Second)
		}
	}
}

func (p *Pull) admit(c *net.TCPConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.halfOpen >= p.limits.MaxHalfOpen || len(p.conns) >= p.limits.MaxConns {
		p.refused.Add(1)
		_ = c.Close()
		return
	}
	p.conns[c] = struct{}{}
	p.halfOpen++
	p.wg.Go(func() { p.serve(c) })
}

// serve reads one connection until it ends.
func (p *Pull) serve(c *net.TCPConn) {
	defer func() {
		_ = c.Close()
		p.mu.Lock()
		delete(p.conns, c)
		p.mu.Unlock()
	}()
	_ = c.SetKeepAliveConfig(keepAlive)
	_ = c.SetDeadline(time.Now().Add(p.limits.Handshake))
	r := &reader{r: bufio.NewReaderSize(c, 16<<10), l: p.limits}
	err := handshake(c, r, "PULL", "PUSH")
	p.mu.Lock()
	p.halfOpen--
	p.mu.Unlock()
	if err != nil {
		p.badHandshakes.Add(1)
		return
	}
	_ = c.SetDeadline(time.Time{})
	for {
		m, err := r.next(func(cmd []byte) error { return answer(c, cmd) })
		if err != nil {
			if errors.Is(err, ErrProtocol) || errors.Is(err, ErrTooLarge) || errors.Is(err, io.ErrUnexpectedEOF) {
				p.broken.Add(1)
			}
			return
		}
		p.handle(c.RemoteAddr(), m)
	}
}

var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 5 * time.Second, Count: 3}

// answer replies to a PING; other commands mean nothing here.
func answer(c net.Conn, cmd []byte) error {
	b, ok := pong(cmd)
	if !ok {
		return nil
	}
	_ = c.SetWriteDeadline(time.Now().Add(time.Second))
	_, err := c.Write(b)
	return err
}

// handshake greets and says READY as one type of socket to another.
func handshake(c io.Writer, r *reader, own, theirs string) error {
	if _, err := c.Write(greeting()); err != nil {
		return err
	}
	var g [greetingLen]byte
	if _, err := io.ReadFull(r.r, g[:]); err != nil {
		return unexpected(err)
	}
	if err := checkGreeting(g[:]); err != nil {
		return err
	}
	if _, err := c.Write(ready(own)); err != nil {
		return err
	}
	flags, body, err := r.frame(4 << 10)
	if err != nil {
		return unexpected(err)
	}
	if flags&flagCommand == 0 {
		return fmt.Errorf("%w: a message before READY", ErrProtocol)
	}
	t, err := property(body, "Socket-Type")
	if err == nil && t != theirs {
		err = fmt.Errorf("%w: a %q socket, need %s", ErrProtocol, t, theirs)
	}
	return err
}
