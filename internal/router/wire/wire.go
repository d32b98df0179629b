// Package wire is an HTTP/1.1 client for one address that costs little: it posts bodies that are in memory, and no more.
//
// # Why not http.Transport
//
// http.Transport runs two goroutines for each connection and passes every request and answer between three of them. On a router's path, which does
// little else, that is most of the time (docs/performance.md, "The router"). Here the caller's goroutine writes the request and reads the answer itself, and waits for it
// without asking the socket first (start). Heads of the common form and their bodies, by length or in chunks, are read here (parseHead, frame), strictly; all others
// by net/http ([http.ReadResponse]). What has come of a body is handed out, also where the server hangs in the framing behind it.
//
// # Promises
//
// A request's context ends everything at once, by closing the connection: a dial, a write, the wait for a header, and a Read of the body under way. A connection is
// used again only when its request was written whole and its answer read to its end. Before that it is looked at: one that its server closed while it was idle,
// or on which bytes came that nobody asked for, is never used. A request is sent a second time only if nothing of it was written.
//
// # What it does not do
//
// HTTP/2, proxies, redirects, compression, Expect: 100-continue.
package wire

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"
)

// Client is a pool of connections to one address. Its methods are safe for concurrent use.
type Client struct {
	Addr string // host:port, to connect to
	Host string // for the Host header
	// Dial opens a connection; errors are passed on as they are.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// TLS, if not nil, is asked for before each handshake; nil from it means plain TCP. It must name the server.
	TLS func() *tls.Config
	// TLSTimeout bounds a handshake.
	TLSTimeout time.Duration
	// MaxIdle connections are kept, each for IdleTimeout at most.
	MaxIdle     int
	IdleTimeout time.Duration
	// MaxHeader is the largest header of an answer, in bytes.
	MaxHeader int

	mu     sync.Mutex
	idle   []*conn // by the time they became idle
	closed int     // how often idle connections have been closed: those in use then are not kept
}

// Errors of answers. All wrap what the connection said, if it said something.
var (
	errHeaderTooLarge = errors.New("the answer's header is too large")
	errInterim        = errors.New("too many interim answers")
	errSwitch         = errors.New("the answer switches protocols")
)

// Request is a POST. Nobody changes what it points to while it is under way.
type Request struct {
	Path   string // escaped, with its query
	Header http.Header
	More   [2]string // one more field, which is not in Header: name and value
	Body   [2][]byte // sent one after the other
}

// Post sends a request and reads the header of its answer, whose body the caller reads to its end or closes. Errors of dialling, writing and reading come as
// they are; if ctx has ended, its cause comes instead.
func (c *Client) Post(ctx context.Context, r *Request) (*http.Response, error) {
	for {
		p, err := c.get(ctx)
		if err != nil {
			return nil, err
		}
		resp, again, err := p.exchange(ctx, r)
		switch {
		case err == nil:
			return resp, nil
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case !again:
			return nil, err
		}
	}
}

// get takes an idle connection that is sound, the last used first, or opens one.
func (c *Client) get(ctx context.Context) (*conn, error) {
	for {
		c.mu.Lock()
		n := len(c.idle)
		if n == 0 {
			c.mu.Unlock()
			return c.open(ctx)
		}
		p := c.idle[n-1]
		c.idle[n-1], c.idle = nil, c.idle[:n-1]
		c.mu.Unlock()
		if p.start.on != nil || p.sound() { // with start it is looked at when it is used
			return p, nil
		}
		_ = p.nc.Close()
	}
}

// open makes a connection.
func (c *Client) open(ctx context.Context) (*conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	c.mu.Lock()
	life := c.closed
	c.mu.Unlock()
	nc, err := c.Dial(ctx, "tcp", c.Addr)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, err
	}
	raw := nc
	if c.TLS != nil {
		if cfg := c.TLS(); cfg != nil {
			if nc, err = Handshake(ctx, raw, cfg, c.TLSTimeout); err != nil {
				return nil, fmt.Errorf("tls handshake: %w", err)
			}
		}
	}
	return newConn(c, nc, raw, life), nil
}

// Handshake speaks TLS on raw, which it closes on an error.
func Handshake(ctx context.Context, raw net.Conn, cfg *tls.Config, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	c := tls.Client(raw, cfg)
	if err := c.HandshakeContext(ctx); err != nil {
		_ = raw.Close()
		return nil, err
	}
	return c, nil
}

// put keeps a connection whose answer was read to its end.
func (c *Client) put(p *conn) {
	p.since = time.Now()
	c.mu.Lock()
	if p.life == c.closed && len(c.idle) < c.MaxIdle {
		c.idle = append(c.idle, p)
		p = nil
	}
	c.mu.Unlock()
	if p != nil {
		_ = p.nc.Close()
	}
}

// CloseIdle closes what is idle; connections in use are closed after their answer.
func (c *Client) CloseIdle() {
	c.mu.Lock()
	all := c.idle
	c.idle = nil
	c.closed++
	c.mu.Unlock()
	for _, p := range all {
		_ = p.nc.Close()
	}
}

// Reap closes idle connections that are too old or that their server has closed. The owner calls it from time to time.
func (c *Client) Reap() {
	old := time.Now().Add(-c.IdleTimeout)
	c.mu.Lock()
	var gone []*conn
	keep := c.idle[:0]
	for _, p := range c.idle {
		if p.since.Before(old) || !p.sound() {
			gone = append(gone, p)
		} else {
			keep = append(keep, p)
		}
	}
	clear(c.idle[len(keep):])
	c.idle = keep
	c.mu.Unlock()
	for _, p := range gone {
		_ = p.nc.Close()
	}
}

// Idle is the number of idle connections.
func (c *Client) Idle() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.idle)
}
