// Package sessiontest helps to test what stands on sessions: handlers that record, a
// data peer that carries nothing, and a [Pair] of a server and a client joined
// inside the process.
package sessiontest

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/transfer"
)

// Event is one call of a handler. Fields the call does not have are zero.
type Event struct {
	Kind    string // "grant", "abort", "failed", "abort_ack", "down"
	Session transfer.SessionID
	Server  *session.ServerSession // calls of a ServerHandler only
	Key     room.Key
	Grant   session.Grant // "grant" only
	GrantID transfer.GrantID
	Addr    string // client's "down" only
	Cause   *room.Cause
}

// recorder is an unbounded queue, since handlers must not block.
type recorder struct {
	mu     sync.Mutex
	events []Event
	added  chan struct{} // closed and replaced by add
	react  func(Event)
}

func newRecorder() recorder { return recorder{added: make(chan struct{})} }

func (r *recorder) add(e Event) {
	r.mu.Lock()
	r.events = append(r.events, e)
	close(r.added)
	r.added = make(chan struct{})
	react := r.react
	r.mu.Unlock()
	if react != nil {
		react(e)
	}
}

// React makes f run inside each later call, after it is recorded. f may panic or block,
// as a bad handler would.
func (r *recorder) React(f func(Event)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.react = f
}

// Events is a copy of all calls so far.
func (r *recorder) Events() []Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]Event(nil), r.events...)
}

// Count is the number of calls of this kind so far.
func (r *recorder) Count(kind string) int {
	n := 0
	for _, e := range r.Events() {
		if e.Kind == kind {
			n++
		}
	}
	return n
}

// Wait waits for the n-th call (from 1) of this kind and returns it.
func (r *recorder) Wait(ctx context.Context, tb testing.TB, kind string, n int) Event {
	tb.Helper()
	for {
		r.mu.Lock()
		seen := 0
		for _, e := range r.events {
			if e.Kind == kind {
				if seen++; seen == n {
					r.mu.Unlock()
					return e
				}
			}
		}
		added := r.added
		r.mu.Unlock()
		select {
		case <-added:
		case <-ctx.Done():
			tb.Fatalf("call %d of %q did not come; calls so far: %+v", n, kind, r.Events())
		}
	}
}

// ClientHandler records.
type ClientHandler struct{ recorder }

// NewClientHandler makes an empty one.
func NewClientHandler() *ClientHandler { return &ClientHandler{newRecorder()} }

// Failed implements session.ClientHandler.
func (h *ClientHandler) Failed(s transfer.SessionID, key room.Key, g transfer.GrantID, c *room.Cause) {
	h.add(Event{Kind: "failed", Session: s, Key: key, GrantID: g, Cause: c})
}

// AbortAck implements session.ClientHandler.
func (h *ClientHandler) AbortAck(s transfer.SessionID, key room.Key, g transfer.GrantID) {
	h.add(Event{Kind: "abort_ack", Session: s, Key: key, GrantID: g})
}

// Down implements session.ClientHandler.
func (h *ClientHandler) Down(s transfer.SessionID, addr string, c *room.Cause) {
	h.add(Event{Kind: "down", Session: s, Addr: addr, Cause: c})
}

// ServerHandler records.
type ServerHandler struct{ recorder }

// NewServerHandler makes an empty one.
func NewServerHandler() *ServerHandler { return &ServerHandler{newRecorder()} }

// Grant implements session.ServerHandler.
func (h *ServerHandler) Grant(s *session.ServerSession, g session.Grant) {
	h.add(Event{Kind: "grant", Session: s.ID(), Server: s, Key: g.Key, Grant: g, GrantID: g.ID})
}

// Abort implements session.ServerHandler.
func (h *ServerHandler) Abort(s *session.ServerSession, key room.Key, g transfer.GrantID, c *room.Cause) {
	h.add(Event{Kind: "abort", Session: s.ID(), Server: s, Key: key, GrantID: g, Cause: c})
}

// Down implements session.ServerHandler.
func (h *ServerHandler) Down(s *session.ServerSession, c *room.Cause) {
	h.add(Event{Kind: "down", Session: s.ID(), Server: s, Cause: c})
}

// Peer is a transfer.Peer that completes every write at once without storing anything.
type Peer struct {
	once   sync.Once
	down   chan struct{}
	closed chan struct{}
	err    error // set before down is closed
}

// NewPeer makes a live one.
func NewPeer() *Peer { return &Peer{down: make(chan struct{}), closed: make(chan struct{})} }

// Post implements transfer.Peer.
func (p *Peer) Post(w transfer.Write) error {
	select {
	case <-p.down:
		return p.err
	default:
	}
	w.Done(nil)
	return nil
}

// Kind implements transfer.Peer.
func (p *Peer) Kind() string { return "null" }

// Down implements transfer.Peer.
func (p *Peer) Down() <-chan struct{} { return p.down }

// Err implements transfer.Peer.
func (p *Peer) Err() error {
	select {
	case <-p.down:
		return p.err
	default:
		return nil
	}
}

// Break is the loss of the connection.
func (p *Peer) Break(err error) {
	p.once.Do(func() {
		p.err = err
		close(p.down)
	})
}

// Close implements transfer.Peer; a second call is an error.
func (p *Peer) Close() error {
	p.Break(transfer.ErrClosed)
	select {
	case <-p.closed:
		return errors.New("sessiontest: peer closed twice")
	default:
		close(p.closed)
		return nil
	}
}

// Closed is closed by Close.
func (p *Peer) Closed() <-chan struct{} { return p.closed }

// Identity is a worker whose fingerprint fits every other made here.
func Identity(workerID string) session.Identity {
	return session.Identity{WorkerID: workerID, Epoch: session.NewEpoch(), Fingerprint: session.Fingerprint{
		Engine: "sim 1", ModelDigest: "d0", KVLayout: "layers=2", Attention: "flash=1", ChunkTokens: 16,
	}}
}

// Pair is a prefill worker's server and a decode worker's client in one process, joined by
// a pipe in memory.
type Pair struct {
	Server *session.Server
	Client *session.Client
	Addr   string // for Client.Get
}

// NewPair starts both and ends them, client first, when the test ends. Zero fields of the
// configurations are filled by [FillServer] and [FillClient].
func NewPair(tb testing.TB, sc session.ServerConfig, cc session.ClientConfig) *Pair {
	tb.Helper()
	FillServer(&sc)
	FillClient(&cc)
	l := bufconn.Listen(1 << 16)
	cc.DialOptions = append(cc.DialOptions, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		return l.DialContext(ctx)
	}))
	p := &Pair{Server: session.NewServer(sc), Client: session.NewClient(cc), Addr: "prefill:1"}
	served := make(chan error, 1)
	go func() { served <- p.Server.Serve(l) }()
	tb.Cleanup(func() {
		if err := errors.Join(p.Client.Close(), p.Server.Close(), <-served); err != nil {
			tb.Errorf("close the pair: %v", err)
		}
	})
	return p
}

// FillServer gives zero fields values that work: an identity that fits, a handler that
// records, a new [Peer] for each session, no log.
func FillServer(c *session.ServerConfig) {
	if c.Identity.WorkerID == "" {
		c.Identity = Identity("prefill:8000")
	}
	if c.Connect == nil {
		c.Connect = func(context.Context, transfer.SessionID, []transfer.Descriptor) (transfer.Peer, error) {
			return NewPeer(), nil
		}
	}
	if c.Handler == nil {
		c.Handler = NewServerHandler()
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
}

// FillClient gives zero fields values that work: an identity that fits, a handler that
// records, one offer, no log.
func FillClient(c *session.ClientConfig) {
	if c.Identity.WorkerID == "" {
		c.Identity = Identity("decode:8001")
	}
	if c.Offer == nil {
		c.Offer = func(transfer.SessionID) ([]transfer.Descriptor, error) {
			return []transfer.Descriptor{{Kind: "null"}}, nil
		}
	}
	if c.Handler == nil {
		c.Handler = NewClientHandler()
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
}
