package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
)

// Config of a [Transport]. Zero fields take the default.
type Config struct {
	// Listen is host:port to listen on; port 0 takes a free one. Default "127.0.0.1:0".
	Listen string
	// Advertise is what peers dial: host, or host:port. Default: the listener's
	// address; if that is unspecified (0.0.0.0), the first address of an interface
	// that is up, loopback last.
	Advertise string
	// Handshake bounds a connection's time until it has said hello, and a Dial
	// whose context has no earlier end. Default 5 s.
	Handshake time.Duration
	// UserTimeout is how long sent bytes may stay unacknowledged by the peer's host,
	// or pending because the peer does not read, before the connection is given up.
	// Default 30 s.
	UserTimeout time.Duration
	// MaxHalfOpen is how many connections may be in the handshake. Default 64.
	MaxHalfOpen int
	// MaxConns is how many connections a session may have; a Peer has two. Default 16.
	MaxConns int
	// Queue is how many writes each of a Peer's connections takes before ErrBusy. Default 1024.
	Queue int
	// FrameBytes is how much payload a write sends before it is the next room's
	// turn, 4 KiB to 16 MiB. Default 1 MiB. Within one machine it is up to four times that while nobody waits.
	FrameBytes int
	// ReceiveBuffer is how many bytes the target's kernel may hold of a connection, at least 64 KiB. It
	// bounds the rate, to ReceiveBuffer a round trip, and what a write longer than 256 KiB finds before it. The
	// kernel's rmem_max caps it. Default 0: the kernel finds it, up to 3 MiB from a source on the same machine.
	ReceiveBuffer int
}

// withDefaults returns a filled copy, or says what is wrong.
func (c Config) withDefaults() (Config, error) {
	setString := func(p *string, v string) {
		if *p == "" {
			*p = v
		}
	}
	setInt := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	setString(&c.Listen, "127.0.0.1:0")
	setInt(&c.MaxHalfOpen, 64)
	setInt(&c.MaxConns, 16)
	setInt(&c.Queue, 1024)
	setInt(&c.FrameBytes, 1<<20)
	if c.Handshake == 0 {
		c.Handshake = 5 * time.Second
	}
	if c.UserTimeout == 0 {
		c.UserTimeout = 30 * time.Second
	}
	switch {
	case c.Handshake < 0, c.UserTimeout < time.Millisecond:
		return c, errors.New("tcp: config: timeouts must be positive")
	case c.MaxHalfOpen < 1, c.MaxConns < 1, c.Queue < 1:
		return c, errors.New("tcp: config: limits must be positive")
	case c.FrameBytes < 4096, c.FrameBytes > maxFrame:
		return c, fmt.Errorf("tcp: config: FrameBytes %d is not between 4096 and %d", c.FrameBytes, maxFrame)
	case c.ReceiveBuffer != 0 && c.ReceiveBuffer < 64<<10:
		return c, fmt.Errorf("tcp: config: ReceiveBuffer %d is less than 65536", c.ReceiveBuffer)
	}
	return c, nil
}

// Stats counts what a Transport's targets and peers refused since the start.
type Stats struct {
	// BadHandshakes: connections that sent garbage, the wrong version, or nothing in time.
	BadHandshakes uint64
	// UnknownSessions: well-formed hellos for a session that is not open, or full.
	UnknownSessions uint64
	// HalfOpenRefused: connections closed because too many were in the handshake.
	HalfOpenRefused uint64
	// ProtocolErrors: established connections closed because the peer broke the protocol.
	ProtocolErrors uint64
	// GrantRefused and BoundsRefused: writes answered with ErrGrant and ErrBounds.
	GrantRefused, BoundsRefused uint64
}

// counters behind Stats; written by any goroutine of the transport.
type counters struct {
	badHandshakes, unknownSessions, halfOpenRefused, protocolErrors, grantRefused, boundsRefused atomic.Uint64
}

// Transport implements [transfer.Transport]. Make it with [New].
type Transport struct {
	cfg   Config
	err   error // of the configuration; returned by Listen and Dial
	stats counters

	lines   budget // of targets
	writers budget // of peers
}

var _ transfer.Transport = (*Transport)(nil)

// New makes a transport. A wrong configuration is reported by Listen and Dial.
func New(c Config) *Transport {
	t := &Transport{}
	t.cfg, t.err = c.withDefaults()
	return t
}

// Kind is "tcp".
func (t *Transport) Kind() string { return "tcp" }

// Caps: Revoke is a fence.
func (t *Transport) Caps() transfer.Caps { return transfer.Caps{Fences: true} }

// Stats returns the counters.
func (t *Transport) Stats() Stats {
	c := &t.stats
	return Stats{
		BadHandshakes: c.badHandshakes.Load(), UnknownSessions: c.unknownSessions.Load(),
		HalfOpenRefused: c.halfOpenRefused.Load(), ProtocolErrors: c.protocolErrors.Load(),
		GrantRefused: c.grantRefused.Load(), BoundsRefused: c.boundsRefused.Load(),
	}
}

// Reachable: d is a tcp descriptor with a usable address. The network is not asked.
func (t *Transport) Reachable(d transfer.Descriptor) bool {
	if d.Kind != t.Kind() {
		return false
	}
	host, port, err := net.SplitHostPort(d.Addr)
	return err == nil && host != "" && port != "" && port != "0"
}

// Listen implements [transfer.Transport].
func (t *Transport) Listen(mem transfer.Memory, sink transfer.Sink) (transfer.Target, error) {
	if t.err != nil {
		return nil, t.err
	}
	ln, err := net.Listen("tcp", t.cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("tcp: listen on %s: %w", t.cfg.Listen, err)
	}
	addr, err := advertised(t.cfg.Advertise, ln.Addr().(*net.TCPAddr))
	if err != nil {
		_ = ln.Close()
		return nil, err
	}
	return newTarget(t, ln.(*net.TCPListener), addr, mem, sink), nil
}

// Dial implements [transfer.Transport]. It makes two connections, one after the other.
func (t *Transport) Dial(ctx context.Context, d transfer.Descriptor, s transfer.SessionID) (transfer.Peer, error) {
	if t.err != nil {
		return nil, t.err
	}
	if d.Kind != t.Kind() {
		return nil, fmt.Errorf("tcp: dial a descriptor of kind %q", d.Kind)
	}
	ctx, cancel := context.WithTimeout(ctx, t.cfg.Handshake)
	defer cancel()
	bulk, err := connect(ctx, d.Addr, s)
	if err != nil {
		return nil, err
	}
	quick, err := connect(ctx, d.Addr, s)
	if err != nil {
		_ = bulk.Close()
		return nil, err
	}
	p, err := newPeer(t, bulk, quick)
	if err != nil {
		_ = bulk.Close()
		_ = quick.Close()
		return nil, fmt.Errorf("tcp: set up connections to %s: %w", d.Addr, err)
	}
	return p, nil
}

// connect makes one connection of session s.
func connect(ctx context.Context, addr string, s transfer.SessionID) (*net.TCPConn, error) {
	var dialer net.Dialer
	nc, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("tcp: dial %s: %w", addr, err)
	}
	conn := nc.(*net.TCPConn)
	if err := greet(ctx, conn, s); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("tcp: handshake with %s: %w", addr, err)
	}
	return conn, nil
}

// greet says hello and reads the answer; ctx ends it at any moment.
func greet(ctx context.Context, conn *net.TCPConn, s transfer.SessionID) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	st, err := exchange(conn, s)
	if !stop() {
		// The deadline is, or is about to be, set: this connection is spent.
		return context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	return st.err()
}

func exchange(conn *net.TCPConn, s transfer.SessionID) (status, error) {
	var out [helloLen]byte
	hello{session: s}.encode(&out)
	if _, err := conn.Write(out[:]); err != nil {
		return 0, fmt.Errorf("send hello: %w", err)
	}
	var in [welcomeLen]byte
	if err := readFull(conn, in[:]); err != nil {
		return 0, fmt.Errorf("read answer to hello: %w", err)
	}
	return decodeWelcome(&in)
}

// advertised makes the address for the descriptor.
func advertised(want string, ln *net.TCPAddr) (string, error) {
	port := fmt.Sprint(ln.Port)
	switch {
	case want == "" && !ln.IP.IsUnspecified():
		return ln.String(), nil
	case want == "":
		host, err := someAddress()
		return net.JoinHostPort(host, port), err
	}
	if host, p, err := net.SplitHostPort(want); err == nil && host != "" && p != "" {
		return want, nil
	}
	if ip := net.ParseIP(want); ip != nil || !strings.Contains(want, ":") {
		return net.JoinHostPort(want, port), nil
	}
	return "", fmt.Errorf("tcp: config: Advertise %q is neither host nor host:port", want)
}

// someAddress is a global unicast address of this machine, or the loopback address.
func someAddress() (string, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return "", fmt.Errorf("tcp: list interface addresses: %w", err)
	}
	best := "127.0.0.1"
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok || !n.IP.IsGlobalUnicast() {
			continue
		}
		if n.IP.To4() != nil {
			return n.IP.String(), nil
		}
		if best == "127.0.0.1" {
			best = n.IP.String()
		}
	}
	return best, nil
}
