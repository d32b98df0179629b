package hub

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/transfer"
)

// Dialer is what the hub needs of session.Client.
type Dialer interface {
	Get(ctx context.Context, addr string) (*session.ClientSession, error)
}

// ReceiversConfig configures the decode side.
type ReceiversConfig struct {
	Pool *kv.Pool // pages for incoming KV; the caller owns it
	// Shards is how the engine cuts up its KV; a page of Pool is then one of its pages. Zero: chunks are
	// opaque blocks.
	Shards kv.Shards
	// Transports are listened on; the prefill side chooses one of them.
	Transports []transfer.Transport
	// BootstrapTimeout bounds the wait for session and pages, WaitingTimeout the wait
	// for the first chunk, TransferTimeout the rest; all besides the request's deadline.
	BootstrapTimeout, WaitingTimeout, TransferTimeout time.Duration
	TombstoneTTL                                      time.Duration
	Observe                                           room.Observer // of every room; nil: none
	Log                                               *slog.Logger
	Registerer                                        prometheus.Registerer // nil: no metrics
}

// Receivers is the decode worker's shell: transfer.Receivers for the scheduler,
// session.ClientHandler for the session, transfer.Sink for the transports.
type Receivers struct {
	cfg     ReceiversConfig
	reg     *room.Registry
	m       *metrics
	targets []transfer.Target
	dialer  Dialer // set by Start
	alloc   *prealloc
	acts    *actions
	grants  atomic.Uint64 // last GrantID

	ctx    context.Context // ends with Close; owns the bootstrap goroutines
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	byGrant  map[transfer.GrantID]*receiving
	sessions map[transfer.SessionID]*receiverSession
}

// receiverSession lives from Offer until every target has fenced it.
type receiverSession struct {
	unfenced int // targets that have not fenced it yet
	down     bool
	rooms    map[*receiving]struct{}
}

// NewReceivers registers the pool with every transport. Start must follow.
func NewReceivers(c ReceiversConfig) (*Receivers, error) {
	h := &Receivers{
		cfg:      c,
		byGrant:  make(map[transfer.GrantID]*receiving),
		sessions: make(map[transfer.SessionID]*receiverSession),
	}
	h.grants.Store(rand.Uint64() >> 1)
	h.ctx, h.cancel = context.WithCancelCause(context.Background())
	mem, fd := c.Pool.Memory()
	for _, t := range c.Transports {
		target, err := t.Listen(transfer.Memory{Bytes: mem, FD: fd}, h)
		if err != nil {
			for _, open := range h.targets {
				_ = open.Close()
			}
			return nil, fmt.Errorf("listen on transport %s: %w", t.Kind(), err)
		}
		h.targets = append(h.targets, target)
	}
	h.acts = newActions()
	h.alloc = newPrealloc(c.Pool, c.Log)
	h.reg = room.NewRegistry(room.Config{
		Side:         room.SideReceiver,
		Execute:      h.execute,
		Peer:         func(r *room.Room) string { return r.Value().(*receiving).open.Addr },
		TombstoneTTL: c.TombstoneTTL,
		Bounds: map[room.State]time.Duration{
			room.StateBootstrapping:   c.BootstrapTimeout,
			room.StateWaitingForInput: c.WaitingTimeout,
			room.StateTransferring:    c.TransferTimeout,
		},
		Observe: c.Observe,
		Log:     c.Log,
	})
	h.m = newMetrics(room.SideReceiver, h.reg, c.Registerer)
	return h, nil
}

// Start gives the hub its sessions. They need the hub as their handler, hence two steps.
func (h *Receivers) Start(d Dialer) { h.dialer = d }

// Registry is for accounting.
func (h *Receivers) Registry() *room.Registry { return h.reg }

// Drain waits until no room is live.
func (h *Receivers) Drain(ctx context.Context) error { return h.reg.Drain(ctx) }

// Offer opens session s at every target and describes them; for session.ClientConfig.
func (h *Receivers) Offer(s transfer.SessionID) ([]transfer.Descriptor, error) {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil, shuttingDown(room.SideReceiver, room.Key{})
	}
	h.sessions[s] = &receiverSession{unfenced: len(h.targets), rooms: make(map[*receiving]struct{})}
	h.mu.Unlock()
	var out []transfer.Descriptor
	for i, t := range h.targets {
		if err := t.OpenSession(s); err != nil {
			for range h.targets[i:] {
				h.Fenced(s)
			}
			for _, open := range h.targets[:i] {
				open.CloseSession(s)
			}
			return nil, fmt.Errorf("open session at transport %s: %w", t.Descriptor().Kind, err)
		}
		out = append(out, t.Descriptor())
	}
	return out, nil
}

// Open implements transfer.Receivers.
func (h *Receivers) Open(o transfer.OpenReceiver) (transfer.Receiving, error) {
	if err := errors.Join(badChunks(h.cfg.Shards, h.cfg.Pool, o.Bounds, o.Chunks), badPrefixes(h.cfg.Shards, o.Bounds, o.Prefixes)); err != nil {
		return nil, &room.Cause{Code: room.CodeInternal, Side: room.SideReceiver, Phase: "prealloc", Key: o.Key, Peer: o.Addr, Detail: err.Error()}
	}
	_, pages := kv.PagesFor(h.cfg.Pool.PageBytes(), o.Chunks)
	if total := h.cfg.Pool.Stats().Total; pages > total {
		return nil, &room.Cause{Code: room.CodeCapacity, Side: room.SideReceiver, Phase: "prealloc", Key: o.Key, Peer: o.Addr,
			Detail: fmt.Sprintf("the prompt's KV (%d tokens, %d pages) is larger than the decode worker's pool (%d pages); raise its page count", o.Tokens, pages, total)}
	}
	rec := &receiving{hub: h, open: o, pages: pages, landed: make(chan int, len(o.Chunks))}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, shuttingDown(room.SideReceiver, o.Key)
	}
	r, err := h.reg.Open(o.Key, o.Deadline, len(o.Chunks), rec)
	if err != nil {
		return nil, err
	}
	rec.room = r
	h.wg.Add(1)
	go func() {
		defer h.wg.Done()
		rec.bootstrap()
	}()
	return rec, nil
}

// Landed implements transfer.Sink.
func (h *Receivers) Landed(g transfer.GrantID, notify []byte) {
	h.mu.Lock()
	rec := h.byGrant[g]
	h.mu.Unlock()
	if rec == nil {
		h.m.stray.Inc()
		return
	}
	rec.land(notify)
}

// Fenced implements transfer.Sink.
func (h *Receivers) Fenced(s transfer.SessionID) {
	h.mu.Lock()
	rs := h.sessions[s]
	if rs == nil {
		h.mu.Unlock()
		return
	}
	rs.unfenced--
	var rooms []*receiving
	if rs.unfenced == 0 {
		delete(h.sessions, s)
		for rec := range rs.rooms {
			rooms = append(rooms, rec)
		}
	}
	h.mu.Unlock()
	for _, rec := range rooms {
		// A room whose session is down is failed already, or will be by Down, which
		// comes with the same loss; fencing it first would be out of order.
		// Where that is so, the data connection was what ended first.
		rec.room.Apply(room.Event{Kind: room.EvPeerLost, Cause: lost(&room.Cause{Detail: "the data connection from the prefill worker was lost"},
			room.SideReceiver, rec.open.Key, rec.open.Addr)})
		rec.room.Apply(room.Event{Kind: room.EvFenced})
	}
}

// Revoked implements transfer.RevokeSink: a writer that was inside a grant when it
// was revoked has left it.
func (h *Receivers) Revoked(g transfer.GrantID) {
	h.mu.Lock()
	rec := h.byGrant[g]
	h.mu.Unlock()
	if rec != nil {
		rec.room.Apply(room.Event{Kind: room.EvFenced})
	}
}

// Failed implements session.ClientHandler. The failure of another grant is that of an earlier life of
// the room, whose sender lived on.
func (h *Receivers) Failed(s transfer.SessionID, key room.Key, g transfer.GrantID, c *room.Cause) {
	rec := h.find(s, key)
	if rec != nil && g != 0 && g != rec.grantID() {
		h.m.stray.Inc()
		return
	}
	if rec != nil {
		cc := *c
		cc.Peer = rec.open.Addr
		rec.room.Apply(room.Event{Kind: room.EvRemoteFailed, Cause: &cc})
	}
}

// AbortAck implements session.ClientHandler.
func (h *Receivers) AbortAck(s transfer.SessionID, key room.Key, g transfer.GrantID) {
	if rec := h.find(s, key); rec != nil && rec.grantID() == g {
		rec.room.Apply(room.Event{Kind: room.EvAck})
	}
}

// find is the live room key of session s.
func (h *Receivers) find(s transfer.SessionID, key room.Key) *receiving {
	r := h.reg.Get(key)
	if r == nil {
		h.m.stray.Inc()
		return nil
	}
	rec := r.Value().(*receiving)
	if rec.session() != s {
		h.m.stray.Inc()
		return nil
	}
	return rec
}

// Down implements session.ClientHandler: every room of the session fails, and the
// session is closed at the transports, which fences it now or when its writer is gone.
func (h *Receivers) Down(s transfer.SessionID, addr string, c *room.Cause) {
	h.mu.Lock()
	rs := h.sessions[s]
	var rooms []*receiving
	if rs != nil {
		rs.down = true
		for rec := range rs.rooms {
			rooms = append(rooms, rec)
		}
	}
	h.mu.Unlock()
	for _, rec := range rooms {
		rec.room.Apply(room.Event{Kind: room.EvPeerLost, Cause: lost(c, room.SideReceiver, rec.open.Key, addr)})
	}
	h.acts.do(func() {
		for _, t := range h.targets {
			t.CloseSession(s)
		}
	})
}

// execute is the registry's effect executor; it runs under the room's lock.
func (h *Receivers) execute(r *room.Room, e room.Event, fx room.Effects) []room.Event {
	rec := r.Value().(*receiving)
	var follow []room.Event
	if fx.Has(room.FxSendGrant) {
		if c := rec.sendGrant(); c != nil {
			follow = append(follow, room.Event{Kind: room.EvCancel, Cause: c}) // the abort reaches a session that lives
		}
	}
	if fx.Has(room.FxLanded) {
		rec.landed <- e.Chunk // cap is the number of chunks, each lands once
	}
	if fx.Has(room.FxSendAbort) {
		rec.sendAbort(r.Cause())
	}
	if fx.Has(room.FxTerminal) {
		close(rec.landed)
		h.m.ended(r)
		if r.State() == room.StateSuccess {
			h.m.transferred(rec.bytes(), time.Since(rec.grantedAt()))
		}
	}
	if revoke, free := fx.Has(room.FxRevoke), fx.Has(room.FxFreeTransfer); revoke || free {
		proof := kv.ProofDrained
		if e.Kind == room.EvFenced {
			proof = kv.ProofFenced
		}
		h.acts.do(func() { rec.letGo(revoke, free, proof) })
	}
	if fx.Has(room.FxForget) {
		h.acts.do(rec.forget)
	}
	return follow
}

// Close cancels every room, waits for the hub's goroutines, closes the targets. The
// session client must be closed before, so that no new message comes.
func (h *Receivers) Close() error {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	down := shuttingDown(room.SideReceiver, room.Key{})
	h.cancel(down)
	cancelAll(h.reg, down)
	h.wg.Wait()
	h.alloc.close()
	h.acts.close()
	var first error
	for _, t := range h.targets {
		if err := t.Close(); err != nil && first == nil {
			first = err
		}
	}
	h.reg.Close()
	return first
}
