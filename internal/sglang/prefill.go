package sglang

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sglang/zmtp"
	"github.com/baton-pd/baton/internal/transfer/nixl"
)

// PrefillConfig of a [Prefill]. Zero times take the default.
type PrefillConfig struct {
	Memory *Memory // where chunks are sent from; the caller owns it
	NIXL   nixl.Config
	IP     string // own address, bound and told to decode managers. Default 127.0.0.1
	// DPSize and DPRank place this rank in a data-parallel fleet that follows room numbers. Default 1 and 0.
	DPSize, DPRank int
	// BootstrapTimeout bounds the wait for a decode worker's metadata, WaitingTimeout the wait for the first
	// chunk, TransferTimeout the rest; all besides the request's own deadline. 0: no further bound.
	BootstrapTimeout, WaitingTimeout, TransferTimeout time.Duration
	// ParkTimeout is how long metadata wait for their request. Default 30 s.
	ParkTimeout time.Duration
	// Stall is how long a write of a room that has failed may go on before the decode manager's link is
	// ended. Default 30 s.
	Stall        time.Duration
	TombstoneTTL time.Duration // how long an ended room refuses its number; default 60 s
	Observe      room.Observer
	Log          *slog.Logger
}

// Bounds of what decode managers can make this side remember.
const (
	maxParked   = 4096
	maxAgents   = 1024
	maxPoisoned = 1 << 16
	poisonTTL   = 10 * time.Minute
)

// Prefill is the prefill manager of one rank: it hears which pages a decode manager offers, and writes them. Safe for
// concurrent use.
type Prefill struct {
	cfg    PrefillConfig
	mem    *Memory
	reg    *room.Registry
	pull   *zmtp.Pull
	boot   *bootClient
	counts counters

	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	agents   map[string]*decodeAgent // by NIXL agent name
	parked   map[uint64]*parked      // metadata before their request
	poisoned map[uint64]time.Time    // rooms whose writes nobody could prove over: no ack, until then
}

// parked are metadata that came before their request.
type parked struct {
	a     *decodeAgent
	m     *Metadata
	timer *time.Timer
}

// NewPrefill binds the control socket. Close ends it.
func NewPrefill(c PrefillConfig) (*Prefill, error) {
	if c.IP == "" {
		c.IP = "127.0.0.1"
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.ParkTimeout <= 0 {
		c.ParkTimeout = 30 * time.Second
	}
	if c.DPSize == 0 {
		c.DPSize = 1
	}
	if c.Stall <= 0 {
		c.Stall = 30 * time.Second
	}
	if _, err := nixl.AgentFences(c.NIXL); err != nil {
		return nil, fmt.Errorf("sglang: prefill manager: %w", err)
	}
	p := &Prefill{cfg: c, mem: c.Memory, boot: newBootClient(), agents: make(map[string]*decodeAgent), parked: make(map[uint64]*parked), poisoned: make(map[uint64]time.Time)}
	p.ctx, p.cancel = context.WithCancelCause(context.Background())
	p.reg = room.NewRegistry(room.Config{
		Side: room.SideSender, Execute: p.execute,
		Peer: func(r *room.Room) string { return r.Value().(*Sending).peer() },
		Bounds: map[room.State]time.Duration{room.StateBootstrapping: c.BootstrapTimeout, room.StateWaitingForInput: c.WaitingTimeout,
			room.StateTransferring: c.TransferTimeout},
		TombstoneTTL: c.TombstoneTTL, Observe: c.Observe, Log: c.Log,
	})
	var err error
	if p.pull, err = zmtp.Listen(net.JoinHostPort(c.IP, "0"), zmtp.Limits{}, p.message); err != nil {
		p.reg.Close()
		return nil, fmt.Errorf("sglang: prefill manager: %w", err)
	}
	return p, nil
}

// Registry is for accounting.
func (p *Prefill) Registry() *room.Registry { return p.reg }

// Stats is a snapshot.
func (p *Prefill) Stats() Stats { return p.counts.stats(p.pull) }

// Route is the registration of this rank.
func (p *Prefill) Route() *Route {
	r := &Route{AttnTPSize: 1, AttnCPSize: 1, AttnDPSize: 1, PPSize: 1, SystemDPSize: p.cfg.DPSize, SystemDPRank: p.cfg.DPRank, RankIP: p.cfg.IP, RankPort: p.pull.Addr().Port,
		PageSize: p.mem.PageSize, Policy: policyEarly, LoadBalance: followRoom}
	if p.mem.DType != "" {
		r.KVCacheDType = &p.mem.DType
	}
	return r
}

// Register puts this rank at a bootstrap server elsewhere; a local one is told by Bootstrap.Register.
func (p *Prefill) Register(ctx context.Context, addr string) error {
	return p.boot.register(ctx, addr, p.Route())
}

// OpenSend is one request.
type OpenSend struct {
	Room   uint64
	Chunks []int // pages of each chunk, at least one; a chunk of 0 pages is allowed
	Row    int   // aux row, complete before the last chunk is sent
	// Deadline ends the room, whatever is outstanding.
	Deadline time.Time
}

// Open makes the room; metadata that came before are delivered. Errors are *room.Cause.
func (p *Prefill) Open(o OpenSend) (*Sending, error) {
	key := room.Key{Room: o.Room}
	refuse := func(code room.Code, detail string) (*Sending, error) {
		return nil, &room.Cause{Code: code, Side: room.SideSender, Phase: "opening", Key: key, Detail: detail}
	}
	s := &Sending{p: p, open: o}
	for _, n := range o.Chunks {
		if n < 0 || n > p.mem.Slots {
			return refuse(room.CodeInternal, fmt.Sprintf("a chunk of %d pages", n))
		}
		s.total += n
	}
	switch {
	case o.Room == 0 || o.Room > 1<<63-1:
		return refuse(room.CodeInvalid, fmt.Sprintf("bootstrap_room %d: it must be between 1 and 2^63-1", o.Room))
	case o.Row < 0 || o.Row >= p.mem.AuxSlots:
		return refuse(room.CodeInternal, fmt.Sprintf("aux row %d of %d", o.Row, p.mem.AuxSlots))
	}
	p.mu.Lock()
	closed := p.closed
	if !closed { // a second life of a number: what was not proven of the first is over with its tombstone
		delete(p.poisoned, o.Room)
	}
	p.mu.Unlock()
	if closed {
		return refuse(room.CodeShutdown, "the worker is ending")
	}
	r, err := p.reg.Open(key, o.Deadline, len(o.Chunks), s)
	if err != nil {
		return nil, err
	}
	s.room.Store(r)
	if k := p.takeParked(o.Room, nil); k != nil {
		p.deliver(r, k.a, k.m)
	}
	return s, nil
}

// message takes what decode managers say; on goroutines of the socket.
func (p *Prefill) message(from net.Addr, m zmtp.Message) {
	v, err := DecodeMessage(m)
	if err != nil {
		p.counts.refused(p.cfg.Log, from, err)
		return
	}
	switch v := v.(type) {
	case *Registration:
		p.register(from, v)
	case *Metadata:
		p.metadata(v)
	case *Abort:
		p.abort(v)
	default: // a decode's business
		p.counts.refused(p.cfg.Log, from, fmt.Errorf("%w: %T at a prefill worker", ErrForeign, v))
	}
}

// metadata is the grant of this wire.
func (p *Prefill) metadata(m *Metadata) {
	a := p.agentOf(m)
	if a == nil { // too many decode workers, or one that uses another's name
		p.counts.stray.Add(1)
		return
	}
	key := room.Key{Room: m.Room}
	if c := a.check(m); c != nil {
		p.refuse(a, m.Room, c)
		if r := p.reg.Get(key); r != nil && !r.Value().(*Sending).boundToOther(a) {
			cc := *c
			r.Apply(room.Event{Kind: room.EvCancel, Cause: &cc})
		}
		return
	}
	if r := p.reg.Get(key); r != nil {
		p.deliver(r, a, m)
		return
	}
	if c, ended := p.reg.Ended(key); ended {
		if c == nil {
			c = &room.Cause{Code: room.CodeDuplicate, Detail: "the room ended a moment ago at the prefill worker; use a fresh bootstrap_room"}
		}
		p.refuse(a, m.Room, c)
		return
	}
	p.park(a, m)
}

// refuse tells a decode manager that its room can not be served.
func (p *Prefill) refuse(a *decodeAgent, id uint64, c *room.Cause) {
	a.say((&Status{Room: id, Status: int(room.StateFailed), Reason: c.Error()}).Encode())
}

// park keeps metadata until their request comes, for ParkTimeout at most.
func (p *Prefill) park(a *decodeAgent, m *Metadata) {
	k := &parked{a: a, m: m}
	p.mu.Lock()
	old := p.parked[m.Room]
	full := p.closed || old == nil && len(p.parked) >= maxParked
	if !full {
		k.timer = time.AfterFunc(p.cfg.ParkTimeout, func() { p.unpark(k) })
		p.parked[m.Room] = k
	}
	p.mu.Unlock()
	if old != nil {
		old.timer.Stop()
		if !full && old.a != a {
			p.refuse(old.a, m.Room, &room.Cause{Code: room.CodeDuplicate, Detail: "another decode worker took this room"})
		}
	}
	if full {
		p.refuse(a, m.Room, &room.Cause{Code: room.CodeCapacity, Retryable: true, Detail: "too many rooms wait for their requests"})
		return
	}
	// The request may have come between Get and here.
	if r := p.reg.Get(room.Key{Room: m.Room}); r != nil {
		if k := p.takeParked(m.Room, nil); k != nil {
			p.deliver(r, k.a, k.m)
		}
	}
}

func (p *Prefill) unpark(k *parked) {
	p.mu.Lock()
	live := p.parked[k.m.Room] == k
	if live {
		delete(p.parked, k.m.Room)
	}
	p.mu.Unlock()
	if live {
		p.refuse(k.a, k.m.Room, &room.Cause{Code: room.CodeDeadline, Side: room.SideSender, Phase: "parked", Retryable: true,
			Detail: fmt.Sprintf("the prefill worker was offered pages but got no request for this room within %v; check that the router sends each request to both workers", p.cfg.ParkTimeout)})
	}
}

// takeParked takes the metadata parked for a room; a nil: of anybody.
func (p *Prefill) takeParked(id uint64, a *decodeAgent) *parked {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.parked[id]
	if k == nil || a != nil && k.a != a {
		return nil
	}
	k.timer.Stop()
	delete(p.parked, id)
	return k
}

// deliver gives metadata to their room, or refuses them. The first that come must be right; later ones change nothing.
func (p *Prefill) deliver(r *room.Room, a *decodeAgent, m *Metadata) {
	s := r.Value().(*Sending)
	s.room.Store(r) // Open may not have got there
	if c := s.mismatch(m); c != nil {
		p.refuse(a, m.Room, c)
		if !s.boundToOther(a) {
			r.Apply(room.Event{Kind: room.EvCancel, Cause: c})
		}
		return
	}
	if !s.bind(a, m) {
		if s.boundToOther(a) {
			p.refuse(a, m.Room, &room.Cause{Code: room.CodeDuplicate, Detail: "the room is offered pages by another decode worker"})
		}
		p.counts.stray.Add(1)
		return
	}
	if !a.add(s) {
		r.Apply(room.Event{Kind: room.EvPeerLost, Cause: lost(a.at.Addr(), errAgentEnded)})
		return
	}
	r.Apply(room.Event{Kind: room.EvGrant})
	if r.Drain() == room.DrainGone {
		a.remove(s)
	}
}

// abort ends a room for its decode manager, which learns when it is drained if it has asked for that.
func (p *Prefill) abort(v *Abort) {
	var a *decodeAgent
	if v.Port != 0 {
		a = p.agentAt(v.Endpoint)
	}
	if a != nil {
		p.takeParked(v.Room, a)
	}
	key := room.Key{Room: v.Room}
	r := p.reg.Get(key)
	if r != nil && v.Port != 0 && !r.Value().(*Sending).expectAck(v) {
		p.ack(v.Endpoint, v.Room, v.Gen, v.HasGen) // another decode worker's room: it has nothing outstanding here for this one
		p.counts.stray.Add(1)
		return
	}
	cause := &room.Cause{Code: room.CodeAborted, Side: room.SideReceiver, Key: key, Detail: "the decode worker ended the room"}
	if _, known := p.reg.Abort(key, cause); !known || r == nil {
		p.ack(v.Endpoint, v.Room, v.Gen, v.HasGen)
	}
}

// ack says that no write of a room is or will be outstanding, unless that was never proven.
func (p *Prefill) ack(to Endpoint, id, gen uint64, wanted bool) {
	if !wanted {
		return
	}
	p.mu.Lock()
	until, bad := p.poisoned[id]
	p.mu.Unlock()
	if bad && time.Now().Before(until) {
		p.cfg.Log.Warn("an abort is not acked: a write of the room could not be proven over", "wire", "sglang", "room", id)
		return
	}
	if a := p.agentAt(to); a != nil {
		a.say((&AbortAck{Room: id, Gen: gen}).Encode())
	}
}

// poison remembers that a write of the room may still land at the decode worker.
func (p *Prefill) poison(id uint64) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.poisoned) >= maxPoisoned {
		for k, until := range p.poisoned {
			if now.After(until) {
				delete(p.poisoned, k)
			}
		}
	}
	p.poisoned[id] = now.Add(poisonTTL)
}

// execute is the registry's effect executor; under the room's lock.
func (p *Prefill) execute(r *room.Room, _ room.Event, fx room.Effects) []room.Event {
	s := r.Value().(*Sending)
	if fx.Has(room.FxTerminal) && r.State() == room.StateSuccess {
		s.tell(&Status{Room: r.Key().Room, Status: int(room.StateSuccess)})
	}
	if fx.Has(room.FxSendFailed) {
		s.oweFailed()
	}
	s.tellFailed(r)
	if fx.Has(room.FxSendAck) {
		s.sendAck(r)
	}
	if fx.Has(room.FxTerminal) {
		s.ended(r)
	}
	if fx.Has(room.FxForget) {
		s.forget()
	}
	return nil
}

// Close cancels every room, tells their decode workers, ends the agents and waits for all goroutines.
func (p *Prefill) Close() error {
	p.mu.Lock()
	p.closed = true
	for id, k := range p.parked {
		k.timer.Stop()
		delete(p.parked, id)
	}
	p.mu.Unlock()
	down := &room.Cause{Code: room.CodeShutdown, Side: room.SideSender, Detail: "the prefill worker is ending"}
	p.reg.Range(func(r *room.Room) bool {
		r.Apply(room.Event{Kind: room.EvCancel, Cause: down})
		return true
	})
	err := p.pull.Close()
	p.cancel(down)
	p.wg.Wait()
	p.reg.Close()
	p.boot.close()
	return err
}

var (
	errAgentEnded  = errors.New("the connection to the decode worker was lost")
	errAgentClosed = errors.New("the prefill worker is ending")
)
