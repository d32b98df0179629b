package sglang

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sglang/zmtp"
	"github.com/baton-pd/baton/internal/transfer/nixl"
)

// DecodeConfig of a [Decode]. Zero times take the default.
type DecodeConfig struct {
	Memory *Memory // for incoming KV; the caller owns it
	NIXL   nixl.Config
	IP     string // own address, bound and told to prefill ranks. Default 127.0.0.1
	// BootstrapTimeout bounds discovery, registration and the wait for pages, WaitingTimeout the wait for the
	// end of a transfer; both besides the request's own deadline. 0: no further bound.
	BootstrapTimeout, WaitingTimeout time.Duration
	// Heartbeat is how often a prefill server is asked for its health, Misses how many answers in a row may be
	// missing before its rooms fail. Defaults 5 s and 2.
	Heartbeat time.Duration
	Misses    int
	// AckTimeout is how long the ack of an abort is waited for before the link is retired: no new rooms, and as
	// soon as its live ones have ended, its fence. Default 30 s.
	AckTimeout time.Duration
	// DistrustAcks takes no ack for a proof: pages of an aborted room return only by a fence. For peers that
	// may have the fault of writing after their ack.
	DistrustAcks bool
	TombstoneTTL time.Duration // how long an ended room refuses its number; default 60 s
	Observe      room.Observer
	Log          *slog.Logger
}

// Stats counts what came in and was not part of a live room.
type Stats struct {
	Foreign, Malformed, Ignored uint64 // messages
	Stray                       uint64 // statuses and acks of no room here, or of another life
	LinksStarted, LinksEnded    uint64
	Retired                     uint64 // links given up because an abort was not acked
	Wire                        zmtp.Stats
}

type counters struct {
	foreign, malformed, ignored, stray, started, ended, retired atomic.Uint64
}

func (c *counters) stats(p *zmtp.Pull) Stats {
	return Stats{Foreign: c.foreign.Load(), Malformed: c.malformed.Load(), Ignored: c.ignored.Load(), Stray: c.stray.Load(),
		LinksStarted: c.started.Load(), LinksEnded: c.ended.Load(), Retired: c.retired.Load(), Wire: p.Stats()}
}

// refused counts a message that Decode did not take. They end nothing.
func (c *counters) refused(log *slog.Logger, from net.Addr, err error) {
	switch {
	case errors.Is(err, ErrIgnored):
		c.ignored.Add(1)
		return
	case errors.Is(err, ErrForeign):
		c.foreign.Add(1)
	default:
		c.malformed.Add(1)
	}
	log.Warn("a control message was refused", "wire", "sglang", "from", from.String(), "err", err)
}

// Decode is the decode manager: it offers pages to prefill ranks and hears when they are filled. Safe for
// concurrent use.
type Decode struct {
	cfg    DecodeConfig
	mem    *Memory
	reg    *room.Registry
	pull   *zmtp.Pull
	boot   *bootClient
	acts   *actions
	port   int
	gens   atomic.Uint64 // last generation of an abort
	counts counters

	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	mu     sync.Mutex
	closed bool
	links  map[linkKey]*link
	fleets map[string]*Topology // by bootstrap server; forgotten with the end of any link there
}

// linkKey names a prefill rank as requests do.
type linkKey struct {
	addr string // bootstrap server
	dp   int
}

// NewDecode binds the control socket. Close ends it.
func NewDecode(c DecodeConfig) (*Decode, error) {
	if c.IP == "" {
		c.IP = "127.0.0.1"
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.Heartbeat <= 0 {
		c.Heartbeat = 5 * time.Second
	}
	if c.Misses <= 0 {
		c.Misses = 2
	}
	if c.AckTimeout <= 0 {
		c.AckTimeout = 30 * time.Second
	}
	switch fences, err := nixl.AgentFences(c.NIXL); {
	case err != nil:
		return nil, fmt.Errorf("sglang: decode manager: %w", err)
	case !fences:
		return nil, errors.New("sglang: decode manager: with these UCX transports the end of the own process does not stop a prefill worker's writes, so pages of aborted rooms could never return; leave UCX_TLS at " + nixl.DefaultTLS)
	}
	d := &Decode{cfg: c, mem: c.Memory, boot: newBootClient(), acts: newActions(), links: make(map[linkKey]*link), fleets: make(map[string]*Topology)}
	d.ctx, d.cancel = context.WithCancelCause(context.Background())
	d.reg = room.NewRegistry(room.Config{
		Side: room.SideReceiver, Execute: d.execute,
		Peer:         func(r *room.Room) string { return r.Value().(*Receiving).open.Addr },
		Bounds:       map[room.State]time.Duration{room.StateBootstrapping: c.BootstrapTimeout, room.StateWaitingForInput: c.WaitingTimeout},
		TombstoneTTL: c.TombstoneTTL, Observe: c.Observe, Log: c.Log,
	})
	var err error
	if d.pull, err = zmtp.Listen(net.JoinHostPort(c.IP, "0"), zmtp.Limits{}, d.message); err != nil {
		d.reg.Close()
		d.acts.close()
		return nil, fmt.Errorf("sglang: decode manager: %w", err)
	}
	d.port = d.pull.Addr().Port
	return d, nil
}

// Registry is for accounting.
func (d *Decode) Registry() *room.Registry { return d.reg }

// Stats is a snapshot.
func (d *Decode) Stats() Stats { return d.counts.stats(d.pull) }

// Endpoint is where prefill ranks send statuses.
func (d *Decode) Endpoint() Endpoint { return Endpoint{IP: d.cfg.IP, Port: d.port} }

// OpenReceive is one request.
type OpenReceive struct {
	Room     uint64 // bootstrap_room, 0 < Room < 2^63
	Addr     string // bootstrap_host:bootstrap_port
	Pages    int    // to receive, those of a prefix that is here already not counted
	Prefix   int    // tokens that are here already
	DPRank   int    // disagg_prefill_dp_rank of the request; -1: not given
	Deadline time.Time
}

// Open makes the room and starts it. Errors are *room.Cause.
func (d *Decode) Open(o OpenReceive) (*Receiving, error) {
	key := room.Key{Room: o.Room}
	refuse := func(code room.Code, detail string) (*Receiving, error) {
		return nil, &room.Cause{Code: code, Side: room.SideReceiver, Phase: "opening", Key: key, Peer: o.Addr, Detail: detail}
	}
	switch {
	case o.Room == 0 || o.Room > 1<<63-1:
		return refuse(room.CodeInvalid, fmt.Sprintf("bootstrap_room %d: it must be between 1 and 2^63-1 (0 marks an aux record that has not landed)", o.Room))
	case o.Pages < 0 || o.Prefix < 0:
		return refuse(room.CodeInternal, fmt.Sprintf("%d pages after a prefix of %d tokens", o.Pages, o.Prefix))
	case o.Pages > d.mem.Slots:
		return refuse(room.CodeCapacity, fmt.Sprintf("the prompt needs %d pages, the pool has %d", o.Pages, d.mem.Slots))
	}
	rec := &Receiving{d: d, open: o}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return refuse(room.CodeShutdown, "the worker is ending")
	}
	r, err := d.reg.Open(key, o.Deadline, 1, rec)
	if err != nil {
		return nil, err
	}
	rec.room = r
	d.wg.Go(rec.bootstrap)
	return rec, nil
}

// message takes what prefill ranks say; on goroutines of the socket.
func (d *Decode) message(from net.Addr, m zmtp.Message) {
	v, err := DecodeMessage(m)
	if err != nil {
		d.counts.refused(d.cfg.Log, from, err)
		return
	}
	switch v := v.(type) {
	case *Status:
		d.status(v)
	case *AbortAck:
		rec := d.find(v.Room)
		if rec == nil || !rec.acked(v) {
			d.counts.stray.Add(1)
		}
	default: // a prefill's business
		d.counts.refused(d.cfg.Log, from, fmt.Errorf("%w: %T at a decode worker", ErrForeign, v))
	}
}

func (d *Decode) find(id uint64) *Receiving {
	if r := d.reg.Get(room.Key{Room: id}); r != nil {
		return r.Value().(*Receiving)
	}
	return nil
}

func (d *Decode) status(s *Status) {
	rec := d.find(s.Room)
	if rec == nil || s.Rank != 0 || rec.room.State().Terminal() {
		d.counts.stray.Add(1)
		return
	}
	switch room.State(s.Status) {
	case room.StateSuccess:
		rec.succeeded()
	case room.StateFailed:
		reason := s.Reason
		if reason == "" {
			reason = "it gave no reason"
		}
		rec.room.Apply(room.Event{Kind: room.EvRemoteFailed, Cause: &room.Cause{Code: room.CodeAborted, Side: room.SideSender, Phase: "transferring",
			Key: rec.room.Key(), Peer: rec.open.Addr, Retryable: true, Detail: "the prefill worker failed the room: " + reason}})
	default:
		d.counts.ignored.Add(1)
	}
}

// execute is the registry's effect executor; under the room's lock.
func (d *Decode) execute(r *room.Room, e room.Event, fx room.Effects) (follow []room.Event) {
	rec := r.Value().(*Receiving)
	if fx.Has(room.FxSendGrant) {
		if c := rec.sendMetadata(); c != nil {
			follow = append(follow, room.Event{Kind: room.EvCancel, Cause: c})
		}
	}
	if fx.Has(room.FxSendAbort) {
		rec.sendAbort()
	}
	if fx.Has(room.FxFreeTransfer) {
		proof := kv.ProofDrained
		if e.Kind == room.EvFenced {
			proof = kv.ProofFenced
		}
		rec.releaseTransfer(proof)
	}
	if fx.Has(room.FxTerminal) {
		rec.pokeLink()
	}
	if fx.Has(room.FxForget) {
		d.acts.do(rec.forget)
	}
	return follow
}

// Close cancels every room, gives their acks a moment (grace), fences what is left and waits for all goroutines.
func (d *Decode) Close(grace time.Duration) error {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	down := &room.Cause{Code: room.CodeShutdown, Side: room.SideReceiver, Detail: "the decode worker is ending"}
	d.reg.Range(func(r *room.Room) bool {
		r.Apply(room.Event{Kind: room.EvCancel, Cause: down})
		return true
	})
	ctx, stop := context.WithTimeout(context.Background(), grace)
	_ = d.drained(ctx)
	stop()
	d.cancel(down)
	d.wg.Wait()
	err := d.pull.Close()
	d.acts.close()
	d.reg.Close()
	d.boot.close()
	return err
}

// drained waits until no page can be written to any more.
func (d *Decode) drained(ctx context.Context) error {
	t := time.NewTicker(5 * time.Millisecond)
	defer t.Stop()
	for {
		if d.reg.Stats().Undrained == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-t.C:
		}
	}
}
