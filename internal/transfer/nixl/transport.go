package nixl

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
)

// Stats counts what a Transport's targets and peers refused since the start.
type Stats struct {
	// BadHandshakes: connections that sent garbage, the wrong version, or nothing in time.
	BadHandshakes uint64
	// UnknownSessions: well-formed hellos for a session that is not open, or full.
	UnknownSessions uint64
	// HalfOpenRefused: connections closed because too many were in the handshake.
	HalfOpenRefused uint64
	// ProtocolErrors: connections ended because the other side broke the protocol.
	ProtocolErrors uint64
	// GrantRefused and BoundsRefused: writes refused with ErrGrant and ErrBounds, counted
	// in the target's process.
	GrantRefused, BoundsRefused uint64
	// HelpersStarted, and HelpersLost: those that ended without being asked to.
	HelpersStarted, HelpersLost uint64
	// Stalled: sessions ended because a write made no progress.
	Stalled uint64
}

// counters behind Stats; written by any goroutine of the transport.
type counters struct {
	badHandshakes, unknownSessions, halfOpenRefused, protocolErrors, grantRefused, boundsRefused, started, lost, stalled atomic.Uint64
}

// Transport implements [transfer.Transport]. Make it with [New].
type Transport struct {
	cfg   Config
	err   error // of the configuration; returned by Listen and Dial
	stats counters
	pool  atomic.Pointer[pool] // of UsePool
}

// pool is a process's KV memory.
type pool struct {
	transfer.Memory
	page int // bytes
}

var _ transfer.Transport = (*Transport)(nil)

// New makes a transport. A wrong configuration, or a library that is not there, is
// reported by Listen and Dial. No library is opened in this process.
func New(c Config) *Transport {
	t := &Transport{}
	t.cfg, t.err = c.withDefaults()
	return t
}

// UsePool makes mem, which must have a descriptor and pages of so many bytes, the memory that later
// Peers send from without copying; segments elsewhere are copied through a buffer. Where both sides
// have pages of the same size, transfers of whole pages name them by index. mem must outlive
// Peers and Targets.
func (t *Transport) UsePool(mem transfer.Memory, page int) { t.pool.Store(&pool{mem, page}) }

// block is the size of prepared blocks.
func (t *Transport) block() uint64 {
	if p := t.pool.Load(); p != nil {
		return uint64(p.page)
	}
	return uint64(t.cfg.Block)
}

// Err says why the transport can not work, or nil.
func (t *Transport) Err() error { return t.err }

// Kind is "nixl".
func (t *Transport) Kind() string { return "nixl" }

// Caps: a writer that has entered a grant must leave it, or its session must end, before
// its pages are free.
func (t *Transport) Caps() transfer.Caps { return transfer.Caps{NeedsDrain: true} }

// SessionFences reports whether the end of a session fences it at once, also from a
// writer that is stopped or cut off. If not, only the writer's own end does.
func (t *Transport) SessionFences() bool { return t.cfg.targetFences() }

// Stats returns the counters.
func (t *Transport) Stats() Stats {
	c := &t.stats
	return Stats{
		BadHandshakes: c.badHandshakes.Load(), UnknownSessions: c.unknownSessions.Load(), HalfOpenRefused: c.halfOpenRefused.Load(),
		ProtocolErrors: c.protocolErrors.Load(), GrantRefused: c.grantRefused.Load(), BoundsRefused: c.boundsRefused.Load(),
		HelpersStarted: c.started.Load(), HelpersLost: c.lost.Load(), Stalled: c.stalled.Load(),
	}
}

// lostHelper counts and logs the end of a helper that nobody wanted.
func (t *Transport) lostHelper(side string, s transfer.SessionID, err error) {
	t.stats.lost.Add(1)
	t.cfg.Log.Warn("a NIXL helper process was lost; its session ends", "transport", "nixl", "side", side, "session", uint64(s), "err", err)
}

// Keys of a descriptor's Meta.
const (
	metaBackend = "backend"
	metaMemory  = "memory"
)

// Reachable: d is a nixl descriptor for the same backend, and the library is here.
func (t *Transport) Reachable(d transfer.Descriptor) bool {
	return t.err == nil && d.Kind == t.Kind() && d.Addr != "" && d.Size > 0 && d.Meta[metaBackend] == t.cfg.Backend
}

// Listen implements [transfer.Transport]. The memory must be the whole of a memfd, or its
// beginning.
func (t *Transport) Listen(mem transfer.Memory, sink transfer.Sink) (transfer.Target, error) {
	if t.err != nil {
		return nil, t.err
	}
	if err := checkMemory(mem); err != nil {
		return nil, fmt.Errorf("nixl: listen: %w", err)
	}
	ln, err := net.Listen("tcp", t.cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("nixl: listen on %s: %w", t.cfg.Listen, err)
	}
	tgt, err := newTarget(t, ln.(*net.TCPListener), mem, sink)
	if err != nil {
		_ = ln.Close()
		return nil, err
	}
	return tgt, nil
}

// checkMemory: helpers map the memory by its descriptor.
func checkMemory(mem transfer.Memory) error {
	if mem.FD < 0 || len(mem.Bytes) == 0 {
		return errors.New("memory has no descriptor that a helper process could map; use a memfd pool")
	}
	var st unix.Stat_t
	if err := unix.Fstat(mem.FD, &st); err != nil || st.Size < int64(len(mem.Bytes)) {
		return fmt.Errorf("descriptor %d does not hold the %d bytes of the memory (it has %d, %v)", mem.FD, len(mem.Bytes), st.Size, err)
	}
	return nil
}

// Dial implements [transfer.Transport].
func (t *Transport) Dial(ctx context.Context, d transfer.Descriptor, s transfer.SessionID) (transfer.Peer, error) {
	switch {
	case t.err != nil:
		return nil, t.err
	case d.Kind != t.Kind():
		return nil, fmt.Errorf("nixl: dial a descriptor of kind %q", d.Kind)
	case d.Meta[metaMemory] != t.cfg.Memory: // blocks of both sides go to the library as one kind
		return nil, fmt.Errorf("nixl: dial %s: its memory is %q and ours %q; give both workers the same --nixl-memory", d.Addr, d.Meta[metaMemory], t.cfg.Memory)
	}
	ctx, cancel := context.WithTimeout(ctx, t.cfg.Handshake)
	defer cancel()
	var dialer net.Dialer
	nc, err := dialer.DialContext(ctx, "tcp", d.Addr)
	if err != nil {
		return nil, fmt.Errorf("nixl: dial %s: %w", d.Addr, err)
	}
	p, err := newPeer(ctx, t, nc.(*net.TCPConn), d, s)
	if err != nil {
		return nil, fmt.Errorf("nixl: handshake with %s: %w", d.Addr, err)
	}
	return p, nil
}

// hello is the source's first frame.
func hello(s transfer.SessionID) []byte { return appendWords(nil, ctlHello, uint64(s)) }

// readWelcome reads the target's answer.
func readWelcome(f *frames) (*welcome, error) {
	k, body, err := f.next(maxWelcome)
	if err != nil {
		return nil, fmt.Errorf("read answer to hello: %w", err)
	}
	w := &welcome{}
	switch k {
	case ctlWelcome:
	case ctlBye:
		return nil, byeError(body)
	default:
		return nil, errOrder
	}
	if err := json.Unmarshal(body, w); err != nil {
		return nil, fmt.Errorf("read answer to hello: %w", err)
	}
	return w, w.err()
}

// byeError is what the target's last frame says.
func byeError(text []byte) error {
	return fmt.Errorf("nixl: the target has ended the session: %s", text)
}

// randomWord is not 0.
func randomWord() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.LittleEndian.Uint64(b[:]) | 1
}

// agentName is one no other agent has.
func agentName(role string) string {
	host, _ := os.Hostname()
	return fmt.Sprintf("baton-%s-%s-%d-%x", role, strings.ToLower(host), os.Getpid(), randomWord())
}

// tuneTimeout is how long sent control bytes may stay unacknowledged.
const tuneTimeout = 30 * time.Second

// tune lets both ends of a control connection notice a vanished host.
func tune(c *net.TCPConn) error {
	if err := c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 3}); err != nil {
		return err
	}
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var opt error
	if err := rc.Control(func(fd uintptr) {
		opt = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(tuneTimeout.Milliseconds()))
	}); err != nil {
		return err
	}
	return opt
}

// offsetIn reports where b lies in mem.
func offsetIn(mem []byte, b []byte) (uint64, bool) {
	if len(mem) == 0 || len(b) == 0 {
		return 0, false
	}
	base, at := uintptr(unsafe.Pointer(unsafe.SliceData(mem))), uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	if at < base || at-base > uintptr(len(mem)) || uintptr(len(b)) > uintptr(len(mem))-(at-base) {
		return 0, false
	}
	return uint64(at - base), true
}
