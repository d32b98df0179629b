package shm

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
)

// Config of a [Transport]. Zero fields take the default.
type Config struct {
	// Dir holds the sockets. Default: baton-<uid> in the directory for temporary
	// files, mode 0700.
	Dir string
	// Handshake bounds a connection's time until it has said hello, and a Dial
	// whose context has no earlier end. Default 5 s.
	Handshake time.Duration
	// MaxHalfOpen is how many connections may be in the handshake. Default 64.
	MaxHalfOpen int
	// MaxConns is how many connections a session may have. Default 16.
	MaxConns int
	// Queue is how many writes a Peer takes before ErrBusy. Default 1024.
	Queue int
	// CloseGrace is how long Target.Close waits for the sources to unmap. Default 2 s.
	CloseGrace time.Duration
}

// withDefaults returns a filled copy, or says what is wrong.
func (c Config) withDefaults() (Config, error) {
	for _, d := range []struct {
		p *int
		v int
	}{{&c.MaxHalfOpen, 64}, {&c.MaxConns, 16}, {&c.Queue, 1024}} {
		if *d.p == 0 {
			*d.p = d.v
		}
		if *d.p < 0 {
			return c, errors.New("shm: config: limits must be positive")
		}
	}
	for _, d := range []struct {
		p *time.Duration
		v time.Duration
	}{{&c.Handshake, 5 * time.Second}, {&c.CloseGrace, 2 * time.Second}} {
		if *d.p == 0 {
			*d.p = d.v
		}
		if *d.p < 0 {
			return c, errors.New("shm: config: times must be positive")
		}
	}
	return c, nil
}

// Stats counts what a Transport's targets and peers refused since the start.
type Stats struct {
	// BadHandshakes: connections that sent garbage, the wrong version, or nothing in
	// time, or came from another user.
	BadHandshakes uint64
	// UnknownSessions: well-formed hellos for a session that is not open, or full.
	UnknownSessions uint64
	// HalfOpenRefused: connections closed because too many were in the handshake.
	HalfOpenRefused uint64
	// ProtocolErrors: connections ended because the peer broke the protocol.
	ProtocolErrors uint64
	// GrantRefused and BoundsRefused: writes ended with ErrGrant and ErrBounds; the
	// latter, and most of the former, are counted in the source's process.
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
	boot  string
	stats counters
}

var _ transfer.Transport = (*Transport)(nil)

// New makes a transport. A wrong configuration is reported by Listen and Dial.
func New(c Config) *Transport {
	t := &Transport{}
	if t.cfg, t.err = c.withDefaults(); t.err == nil {
		t.boot, t.err = bootID()
	}
	return t
}

// Kind is "shm".
func (t *Transport) Kind() string { return "shm" }

// Caps: a writer that is inside a grant must leave it before its pages are free.
func (t *Transport) Caps() transfer.Caps { return transfer.Caps{NeedsDrain: true} }

// Stats returns the counters.
func (t *Transport) Stats() Stats {
	c := &t.stats
	return Stats{
		BadHandshakes: c.badHandshakes.Load(), UnknownSessions: c.unknownSessions.Load(),
		HalfOpenRefused: c.halfOpenRefused.Load(), ProtocolErrors: c.protocolErrors.Load(),
		GrantRefused: c.grantRefused.Load(), BoundsRefused: c.boundsRefused.Load(),
	}
}

// metaSocket is the key of the socket's device and inode in a descriptor.
const metaSocket = "socket"

// Reachable: d is a shm descriptor of this machine, and its socket is at that path
// here too.
func (t *Transport) Reachable(d transfer.Descriptor) bool {
	if t.err != nil || d.Kind != t.Kind() || d.Host != t.boot || d.Size == 0 {
		return false
	}
	id, err := identify(d.Addr)
	return err == nil && id == d.Meta[metaSocket]
}

// Listen implements [transfer.Transport]. The memory must be the whole of a memfd, or its
// beginning.
func (t *Transport) Listen(mem transfer.Memory, sink transfer.Sink) (transfer.Target, error) {
	if t.err != nil {
		return nil, t.err
	}
	if mem.FD < 0 || len(mem.Bytes) == 0 {
		return nil, errors.New("shm: listen: memory has no descriptor that a peer could map; use a memfd pool")
	}
	var st unix.Stat_t
	if err := unix.Fstat(mem.FD, &st); err != nil || st.Size < int64(len(mem.Bytes)) {
		return nil, fmt.Errorf("shm: listen: descriptor %d does not hold the %d bytes of the memory (it has %d, %v)", mem.FD, len(mem.Bytes), st.Size, err)
	}
	path, err := t.socketPath()
	if err != nil {
		return nil, err
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("shm: listen on %s: %w", path, err)
	}
	tgt, err := newTarget(t, ln, path, mem, sink)
	if err != nil {
		_ = ln.Close()
		return nil, err
	}
	return tgt, nil
}

// socketPath prepares the directory and names a socket in it.
func (t *Transport) socketPath() (string, error) {
	dir, private := t.cfg.Dir, false
	if dir == "" {
		dir, private = defaultDir(), true
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("shm: directory %s: %w", t.cfg.Dir, err)
	}
	if err := openDir(dir, private); err != nil {
		return "", err
	}
	if err := cleanDir(dir); err != nil {
		return "", err
	}
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	path := filepath.Join(dir, socketName(os.Getpid(), binary.LittleEndian.Uint64(b[:])))
	if len(path) > maxPath {
		return "", fmt.Errorf("shm: socket path %s is longer than %d bytes; set a shorter directory", path, maxPath)
	}
	return path, nil
}

// Dial implements [transfer.Transport].
func (t *Transport) Dial(ctx context.Context, d transfer.Descriptor, s transfer.SessionID) (transfer.Peer, error) {
	switch {
	case t.err != nil:
		return nil, t.err
	case d.Kind != t.Kind():
		return nil, fmt.Errorf("shm: dial a descriptor of kind %q", d.Kind)
	case d.Host != t.boot:
		return nil, fmt.Errorf("shm: dial %s: it is on another machine", d.Addr)
	}
	ctx, cancel := context.WithTimeout(ctx, t.cfg.Handshake)
	defer cancel()
	var dialer net.Dialer
	nc, err := dialer.DialContext(ctx, "unix", d.Addr)
	if err != nil {
		return nil, fmt.Errorf("shm: dial %s: %w", d.Addr, err)
	}
	conn := nc.(*net.UnixConn)
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	maps, err := greet(conn, s, d.Size)
	if !stop() {
		err = context.Cause(ctx) // the deadline is, or is about to be, set
	}
	if err != nil {
		maps.unmap() // before the socket closes, see the package comment
		_ = conn.Close()
		return nil, fmt.Errorf("shm: handshake with %s: %w", d.Addr, err)
	}
	return newPeer(t, conn, maps), nil
}
