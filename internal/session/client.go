package session

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/baton-pd/baton/internal/room"
)

// peerMemory is how long an address without a session is remembered.
const peerMemory = time.Minute

// Client is the decode side: it keeps one session to each prefill worker it was
// asked for. Safe for concurrent use.
type Client struct {
	cfg ClientConfig
	t   Tuning
	m   *metrics
	log *slog.Logger

	closing chan struct{}  // closed by Close
	wg      sync.WaitGroup // attempts and sessions

	mu     sync.Mutex // guards what follows, and every peer; never held across I/O
	closed bool
	peers  map[string]*peer
}

// peer is one address. At most one of live and attempt is set. Blame is of the past and
// expires: whatever happened, a Get after BackoffMin tries again.
type peer struct {
	live    *ClientSession
	attempt *attempt

	failures int           // attempts failed in a row
	last     *room.Cause   // of the latest failure
	failed   time.Time     // when that was
	retry    time.Time     // when a Get that has seen it tries again; > failed
	started  chan struct{} // closed and replaced when an attempt starts: wakes those who wait for retry
	waiting  int           // Gets inside
	touched  time.Time     // last change; for forgetting
}

// attempt is one dial, shared by all Gets of its time.
type attempt struct {
	cancel context.CancelCauseFunc
	done   chan struct{}  // closed once the rest is set
	sess   *ClientSession // or
	cause  *room.Cause
}

// NewClient makes a client without sessions. c must have Identity, Offer and Handler.
func NewClient(c ClientConfig) *Client {
	log := c.Log
	if log == nil {
		log = slog.Default()
	}
	return &Client{
		cfg: c, t: c.Tuning.withDefaults(), m: newMetrics(c.Registerer), log: log,
		closing: make(chan struct{}), peers: make(map[string]*peer),
	}
}

// Get returns the live session to the prefill worker at addr (host:port), and makes one
// if there is none. Concurrent calls share one attempt. A peer that cannot be reached, or
// that refuses for a passing reason, is tried again with growing pauses until ctx ends or
// DialTimeout has passed; other refusals (CodeMismatch) are returned at once. The first
// attempt is never put off by more than BackoffMin, whatever happened before.
//
// The error is a *room.Cause: CodeMismatch with the field and both values,
// CodeUnavailable if no session came up, CodePeerLost if it broke while coming up,
// CodeShutdown after Close, CodeInvalid for an addr that is none, or the peer's own.
func (c *Client) Get(ctx context.Context, addr string) (*ClientSession, error) {
	if addr == "" || len(addr) > maxID || !utf8.ValidString(addr) || strings.ContainsFunc(addr, func(r rune) bool { return !unicode.IsPrint(r) || r == ' ' }) {
		return nil, c.cause(room.CodeInvalid, "", fmt.Sprintf("%q is not the address of a prefill worker (host:port)", clip(addr, maxID)))
	}
	p := c.enter(addr)
	defer c.leave(p)
	giveUp := time.Now().Add(c.t.DialTimeout)
	var seen *room.Cause // nil until an attempt failed under our eyes
	for {
		sess, a, wait, started, err := c.step(p, addr, seen != nil, giveUp)
		switch {
		case err != nil:
			return nil, err
		case sess != nil:
			return sess, nil
		case a != nil:
			select {
			case <-a.done:
			case <-ctx.Done():
				return nil, c.gaveUp(ctx, p, addr)
			}
			if a.sess != nil {
				return a.sess, nil
			}
			if seen = a.cause; !passing(seen) {
				return nil, seen
			}
		default:
			timer := time.NewTimer(wait)
			select {
			case <-timer.C:
			case <-started:
			case <-c.closing:
			case <-ctx.Done():
				timer.Stop()
				return nil, c.gaveUp(ctx, p, addr)
			}
			timer.Stop()
		}
	}
}

// passing reports whether the same peer may accept a moment later.
func passing(c *room.Cause) bool {
	switch c.Code {
	case room.CodeUnavailable, room.CodePeerLost, room.CodeShutdown, room.CodeCapacity, room.CodeTransferFailed:
		return c.Retryable
	default:
		return false
	}
}

// enter finds or makes the peer and keeps it from being forgotten until leave.
func (c *Client) enter(addr string) *peer {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.peers[addr]
	if p == nil {
		c.forget(now)
		p = &peer{started: make(chan struct{}), touched: now}
		c.peers[addr] = p
	}
	p.waiting++
	return p
}

func (c *Client) leave(p *peer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.waiting--
}

// forget drops the peers nobody has wanted for a while: addresses come from requests.
func (c *Client) forget(now time.Time) {
	for addr, p := range c.peers {
		if p.live == nil && p.attempt == nil && p.waiting == 0 && now.Sub(p.touched) > max(peerMemory, c.t.BackoffMax) {
			delete(c.peers, addr)
			c.m.forget(addr)
		}
	}
}

// step decides what a Get does next: exactly one of a session, an attempt to wait for, a
// pause (ended early by started), or an error. again: it has seen an attempt fail.
func (c *Client) step(p *peer, addr string, again bool, giveUp time.Time) (*ClientSession, *attempt, time.Duration, <-chan struct{}, error) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return nil, nil, 0, nil, c.cause(room.CodeShutdown, addr, "the decode worker is shutting down")
	case p.live != nil && p.live.link.Cause() == nil:
		return p.live, nil, 0, nil, nil
	case p.attempt != nil:
		return nil, p.attempt, 0, nil, nil
	case p.failures > 0:
		next := p.failed.Add(c.t.BackoffMin) // a fresh Get does not inherit the whole pause
		if again {
			next = p.retry
			if next.After(giveUp) {
				return nil, nil, 0, nil, p.last
			}
		}
		if now.Before(next) {
			return nil, nil, next.Sub(now), p.started, nil
		}
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	a := &attempt{cancel: cancel, done: make(chan struct{})}
	p.attempt, p.live, p.touched = a, nil, now
	close(p.started)
	p.started = make(chan struct{})
	c.wg.Go(func() { c.try(ctx, p, addr, a) })
	return nil, a, 0, nil, nil
}

// try makes one attempt and, if it succeeds, is the goroutine of the session.
func (c *Client) try(ctx context.Context, p *peer, addr string, a *attempt) {
	defer a.cancel(nil)
	sess, cause := c.connect(ctx, a.cancel, addr)
	now, level := time.Now(), slog.LevelWarn
	c.mu.Lock()
	p.attempt, p.touched = nil, now
	if sess != nil {
		p.live, p.failures, p.last = sess, 0, nil
		if c.closed {
			sess.link.fail(c.shutdown(addr), false)
		}
	} else {
		if p.last != nil && p.last.Code == cause.Code && now.Sub(p.failed) < peerMemory {
			level = slog.LevelDebug // said before
		}
		p.failures++
		p.last, p.failed = cause, now
		p.retry = now.Add(backoff(c.t, p.failures))
	}
	c.mu.Unlock()
	a.sess, a.cause = sess, cause
	close(a.done)
	if sess == nil {
		c.log.Log(ctx, level, "session attempt failed", "worker", c.cfg.Identity.WorkerID, "addr", addr, "code", cause.Code, "cause", cause.Detail)
		return
	}
	sess.run()
	c.mu.Lock()
	if p.live == sess {
		p.live = nil
	}
	p.touched = time.Now()
	c.mu.Unlock()
}

// backoff is the pause after n failures in a row: doubled each time, within bounds, with
// up to half of it taken off at random so that workers do not come back in step.
func backoff(t Tuning, n int) time.Duration {
	d := t.BackoffMax
	if n < 32 {
		d = min(d, t.BackoffMin<<(n-1))
	}
	if d <= 0 { // shifted out
		d = t.BackoffMax
	}
	return d - rand.N(d/2+1)
}

// gaveUp is the error of a Get whose ctx ended.
func (c *Client) gaveUp(ctx context.Context, p *peer, addr string) *room.Cause {
	c.mu.Lock()
	last := p.last
	c.mu.Unlock()
	detail := fmt.Sprintf("no session to the prefill worker at %s: the wait for it ended: %v", addr, context.Cause(ctx))
	if last != nil {
		detail += "; last failure: " + last.Detail
	}
	return c.cause(room.CodeUnavailable, addr, detail)
}

// cause is a failure found here.
func (c *Client) cause(code room.Code, addr, detail string) *room.Cause {
	return &room.Cause{Code: code, Side: room.SideReceiver, Phase: phaseSession, Peer: addr, Detail: detail, Retryable: code != room.CodeInvalid}
}

func (c *Client) shutdown(addr string) *room.Cause {
	return c.cause(room.CodeShutdown, addr, "the decode worker is shutting down")
}

// Close ends all sessions with CodeShutdown and waits until every handler has
// returned. Idempotent.
func (c *Client) Close() error {
	c.mu.Lock()
	if !c.closed {
		c.closed = true
		close(c.closing)
		for addr, p := range c.peers {
			if p.attempt != nil {
				p.attempt.cancel(c.shutdown(addr))
			}
			if p.live != nil {
				p.live.link.fail(c.shutdown(addr), false)
			}
		}
	}
	c.mu.Unlock()
	c.wg.Wait()
	return nil
}
