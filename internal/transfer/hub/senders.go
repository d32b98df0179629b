package hub

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/transfer"
)

// SendersConfig configures the prefill side.
type SendersConfig struct {
	// Staging holds exported chunks until their writes have settled. The hub uses
	// it, the caller owns it.
	Staging *kv.Pool
	// Shards is how the engine cuts up its KV; a page of Staging is then one of its pages, and chunks
	// are laid anew for decode workers that cut theirs otherwise. Zero: chunks are opaque blocks.
	Shards kv.Shards
	// BootstrapTimeout bounds the wait for a grant, WaitingTimeout the wait from the grant
	// to the first chunk, TransferTimeout the rest; all besides the request's deadline.
	BootstrapTimeout, WaitingTimeout, TransferTimeout time.Duration
	// ParkTimeout bounds how long a grant waits for its request.
	ParkTimeout time.Duration
	// TombstoneTTL is how long an ended or aborted room is remembered.
	TombstoneTTL time.Duration
	Observe      room.Observer // of every room; nil: none
	Log          *slog.Logger
	Registerer   prometheus.Registerer // nil: no metrics
}

// maxParked bounds grants without a request; one more is refused.
const maxParked = 4096

// Senders is the prefill worker's shell: transfer.Senders for the scheduler,
// session.ServerHandler for the session. Safe for concurrent use.
type Senders struct {
	cfg SendersConfig
	reg *room.Registry
	m   *metrics

	mu       sync.Mutex
	closed   bool
	parked   map[room.Key]*parkedGrant
	sessions map[*session.ServerSession]*senderSession
}

// parkedGrant is a grant that arrived before its request.
type parkedGrant struct {
	sess  *session.ServerSession
	grant session.Grant
	wait  time.Duration
	timer *time.Timer // expires it after wait; stopped when taken
}

// senderSession is what the hub knows of one session.
type senderSession struct {
	rooms map[room.Key]*sending // guarded by Senders.mu
	out   *outQueue
	plans plans
}

// NewSenders starts the registry. Close ends it.
func NewSenders(c SendersConfig) *Senders {
	h := &Senders{
		cfg:      c,
		parked:   make(map[room.Key]*parkedGrant),
		sessions: make(map[*session.ServerSession]*senderSession),
	}
	h.reg = room.NewRegistry(room.Config{
		Side:         room.SideSender,
		Execute:      h.execute,
		Peer:         func(r *room.Room) string { return r.Value().(*sending).peer() },
		TombstoneTTL: c.TombstoneTTL,
		Bounds: map[room.State]time.Duration{
			room.StateBootstrapping:   c.BootstrapTimeout,
			room.StateWaitingForInput: c.WaitingTimeout,
			room.StateTransferring:    c.TransferTimeout,
		},
		Observe: c.Observe,
		Log:     c.Log,
	})
	h.m = newMetrics(room.SideSender, h.reg, c.Registerer)
	return h
}

// Registry is for accounting.
func (h *Senders) Registry() *room.Registry { return h.reg }

// Close cancels every room, forgets parked grants and stops the registry. Sessions must be
// closed first, so that no write is outstanding any more.
func (h *Senders) Close() {
	h.mu.Lock()
	h.closed = true
	for k, p := range h.parked {
		p.timer.Stop()
		delete(h.parked, k)
	}
	h.mu.Unlock()
	cancelAll(h.reg, shuttingDown(room.SideSender, room.Key{}))
	h.reg.Close()
}

// Open implements transfer.Senders.
func (h *Senders) Open(o transfer.OpenSender) (transfer.Sending, error) {
	if len(o.Chunks) == 0 {
		return nil, &room.Cause{Code: room.CodeInternal, Side: room.SideSender, Key: o.Key, Detail: "a room needs at least one chunk"}
	}
	if err := badChunks(h.cfg.Shards, h.cfg.Staging, o.Bounds, o.Chunks); err != nil {
		return nil, &room.Cause{Code: room.CodeInternal, Side: room.SideSender, Key: o.Key, Detail: err.Error()}
	}
	s := &sending{hub: h, open: o, bufs: make([]*kv.Lease, len(o.Chunks))}
	h.mu.Lock()
	closed := h.closed
	h.mu.Unlock()
	if closed {
		return nil, shuttingDown(room.SideSender, o.Key)
	}
	r, err := h.reg.Open(o.Key, o.Deadline, len(o.Chunks), s)
	if err != nil {
		return nil, err
	}
	s.room.Store(r)
	h.deliverParked(r)
	return s, nil
}

// takeParked takes the grant parked for key, if it is of sess or sess is nil.
func (h *Senders) takeParked(key room.Key, sess *session.ServerSession) *parkedGrant {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.parked[key]
	if p == nil || sess != nil && p.sess != sess {
		return nil
	}
	p.timer.Stop()
	delete(h.parked, key)
	return p
}

// deliverParked gives r the grant that came before it, if there is one.
func (h *Senders) deliverParked(r *room.Room) {
	if p := h.takeParked(r.Key(), nil); p != nil {
		h.deliver(r, p.sess, p.grant)
	}
}

// Grant implements session.ServerHandler.
func (h *Senders) Grant(sess *session.ServerSession, g session.Grant) {
	h.mu.Lock()
	if h.sessions[sess] == nil {
		h.sessions[sess] = &senderSession{rooms: make(map[room.Key]*sending), out: newOutQueue(sess.Data())}
	}
	h.mu.Unlock()
	if r := h.reg.Get(g.Key); r != nil {
		h.deliver(r, sess, g)
		return
	}
	if c, ended := h.reg.Ended(g.Key); ended {
		if c == nil {
			c = &room.Cause{Code: room.CodeDuplicate, Detail: "the room ended a moment ago at the prefill worker; use a fresh bootstrap_room"}
		}
		h.refuse(sess, g.Key, g.ID, c)
		return
	}
	h.park(sess, g)
}

// park keeps a grant until its request arrives, for ParkTimeout at most.
func (h *Senders) park(sess *session.ServerSession, g session.Grant) {
	h.mu.Lock()
	old := h.parked[g.Key]
	full := h.closed || old == nil && len(h.parked) >= maxParked
	if !full {
		p := &parkedGrant{sess: sess, grant: g, wait: h.cfg.ParkTimeout}
		if g.Timeout > 0 {
			p.wait = min(p.wait, g.Timeout)
		}
		p.timer = time.AfterFunc(p.wait, func() { h.unpark(p) })
		h.parked[g.Key] = p
	}
	h.mu.Unlock()
	if old != nil {
		old.timer.Stop()
		if old.sess != sess || old.grant.ID != g.ID {
			h.refuse(old.sess, g.Key, old.grant.ID, &room.Cause{Code: room.CodeDuplicate, Detail: "another grant took this room"})
		}
	}
	if full {
		h.refuse(sess, g.Key, g.ID, &room.Cause{Code: room.CodeCapacity, Retryable: true, Detail: "too many grants wait for their requests"})
		return
	}
	// The request may have come between Get and here.
	if r := h.reg.Get(g.Key); r != nil {
		h.deliverParked(r)
	}
}

// unpark expires p if it is still parked.
func (h *Senders) unpark(p *parkedGrant) {
	h.mu.Lock()
	live := h.parked[p.grant.Key] == p
	if live {
		delete(h.parked, p.grant.Key)
	}
	h.mu.Unlock()
	if live {
		h.refuse(p.sess, p.grant.Key, p.grant.ID, &room.Cause{Code: room.CodeDeadline, Phase: "parked", Retryable: true,
			Detail: fmt.Sprintf("the prefill worker got a grant but no request for this room within %v; check that the router sends each request to both workers", p.wait)})
	}
}

// refuse tells the decode side that its room cannot be served.
func (h *Senders) refuse(sess *session.ServerSession, key room.Key, g transfer.GrantID, c *room.Cause) {
	cc := *c
	cc.Key, cc.Side = key, room.SideSender
	if cc.Phase == "" {
		cc.Phase = room.StateBootstrapping.String()
	}
	_ = sess.SendFailed(key, g, &cc) // ErrDown: the session's end tells it
}

// deliver gives a grant to its sender, or refuses it. The first grant that comes must
// be right, or the room fails; later ones change nothing.
func (h *Senders) deliver(r *room.Room, sess *session.ServerSession, g session.Grant) {
	s := r.Value().(*sending)
	if s.bound() {
		h.duplicate(s, sess, g)
		return
	}
	h.mu.Lock()
	ss := h.sessions[sess]
	h.mu.Unlock()
	var way *route
	if ss != nil {
		var bad *room.Cause
		if way, bad = h.routeOf(sess, &ss.plans, g, s.open); bad != nil {
			h.refuseRoom(r, sess, g.ID, bad)
			return
		}
	}
	h.mu.Lock()
	if ss == nil || h.sessions[sess] != ss { // Down has come meanwhile
		h.mu.Unlock()
		r.Apply(room.Event{Kind: room.EvPeerLost, Cause: lost(nil, room.SideSender, g.Key, sess.Client().WorkerID)})
		return
	}
	if !s.bind(r, sess, ss, g, way) {
		h.mu.Unlock()
		h.duplicate(s, sess, g)
		return
	}
	ss.rooms[g.Key] = s
	h.mu.Unlock()
	r.Apply(room.Event{Kind: room.EvGrant})
	if r.State() == room.StateFailed { // ended before: tell why
		h.refuse(sess, g.Key, g.ID, r.Cause())
	}
	if r.Drain() == room.DrainGone { // perhaps before it was in the index
		s.forget()
	}
}

// duplicate refuses a grant for a room that has one, unless it is that one again.
func (h *Senders) duplicate(s *sending, sess *session.ServerSession, g session.Grant) {
	h.m.duplicateGrants.Inc()
	if !s.sameGrant(sess, g.ID) {
		h.refuse(sess, g.Key, g.ID, &room.Cause{Code: room.CodeDuplicate, Detail: "the room has another grant"})
	}
}

// refuseRoom fails a room because of its grant and tells the grant's session.
func (h *Senders) refuseRoom(r *room.Room, sess *session.ServerSession, g transfer.GrantID, c *room.Cause) {
	c.Peer = sess.Client().WorkerID
	h.refuse(sess, r.Key(), g, c)
	r.Apply(room.Event{Kind: room.EvCancel, Cause: c})
}

// Abort implements session.ServerHandler.
func (h *Senders) Abort(sess *session.ServerSession, key room.Key, g transfer.GrantID, c *room.Cause) {
	h.takeParked(key, sess)
	if c == nil {
		c = &room.Cause{}
	}
	cause := &room.Cause{Code: room.CodeAborted, Side: room.SideReceiver, Phase: c.Phase, Key: key, Peer: sess.Client().WorkerID,
		Detail: "the decode worker ended the room: " + c.Error()}
	r := h.reg.Get(key)
	if r != nil {
		if s := r.Value().(*sending); !s.expectAck(sess, g) {
			// A room under the same key that serves another grant, of another session or another
			// life: this abort is not about it, and its own grant can have no write outstanding.
			h.m.staleAborts.Inc()
			_ = sess.SendAck(key, g)
			return
		}
	}
	if _, known := h.reg.Abort(key, cause); !known || r == nil {
		// Nothing was ever written for it, and the tombstone keeps it so. That also goes for a
		// room that was opened this very moment: its grant is not parked any more.
		_ = sess.SendAck(key, g)
	}
}

// Down implements session.ServerHandler. The server closes the data peer after it, which
// settles every outstanding write.
func (h *Senders) Down(sess *session.ServerSession, c *room.Cause) {
	h.mu.Lock()
	ss := h.sessions[sess]
	delete(h.sessions, sess)
	var rooms []*sending
	if ss != nil {
		for _, s := range ss.rooms {
			rooms = append(rooms, s)
		}
	}
	for k, p := range h.parked {
		if p.sess == sess {
			p.timer.Stop()
			delete(h.parked, k)
		}
	}
	h.mu.Unlock()
	for _, s := range rooms {
		s.room.Load().Apply(room.Event{Kind: room.EvPeerLost, Cause: lost(c, room.SideSender, s.open.Key, sess.Client().WorkerID)})
	}
	if ss != nil {
		ss.out.close()
	}
}

// cancelAll ends every live room of a registry with c.
func cancelAll(reg *room.Registry, c *room.Cause) {
	reg.Range(func(r *room.Room) bool {
		r.Apply(room.Event{Kind: room.EvCancel, Cause: c})
		return true
	})
}

// shuttingDown is the cause of what a closing worker ends or refuses.
func shuttingDown(side room.Side, key room.Key) *room.Cause {
	return &room.Cause{Code: room.CodeShutdown, Side: side, Key: key, Detail: side.String() + " worker is shutting down", Retryable: true}
}

// lost is the cause of a room whose session ended.
func lost(c *room.Cause, side room.Side, key room.Key, peer string) *room.Cause {
	l := &room.Cause{Code: room.CodePeerLost, Side: side, Key: key, Peer: peer, Retryable: true}
	if c != nil {
		l.Detail = "session to the other worker ended: " + c.Detail
	} else {
		l.Detail = "session to the other worker ended"
	}
	return l
}

// execute is the registry's effect executor; it runs under the room's lock.
func (h *Senders) execute(r *room.Room, e room.Event, fx room.Effects) (follow []room.Event) {
	s := r.Value().(*sending)
	sess, grant, ackSess, ackGrant := s.peers()
	if fx.Has(room.FxSendFailed) && sess != nil {
		if err := sess.SendFailed(r.Key(), grant, r.Cause()); err != nil && !errors.Is(err, session.ErrDown) {
			h.cfg.Log.Warn("failure could not be sent", "room", r.Key().String(), "err", err)
		}
	}
	if fx.Has(room.FxSendAck) {
		if ackSess == nil {
			ackSess, ackGrant = sess, grant
		}
		if ackSess != nil {
			_ = ackSess.SendAck(r.Key(), ackGrant)
		}
	}
	if fx.Has(room.FxTerminal) {
		h.m.ended(r)
		follow = s.end()
	}
	if fx.Has(room.FxForget) {
		s.forget()
	}
	return follow
}

// Drain waits until no room is live.
func (h *Senders) Drain(ctx context.Context) error { return h.reg.Drain(ctx) }
