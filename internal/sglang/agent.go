package sglang

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sglang/zmtp"
	"github.com/baton-pd/baton/internal/transfer/nixl"
)

// decodeAgent is a decode manager as a prefill rank knows it: its registration for good, and a life (way) while it
// is in use: a connection for statuses and a NIXL agent of its own for the writes.
type decodeAgent struct {
	p   *Prefill
	at  Endpoint
	reg *Registration
	bad *room.Cause // why its rooms are refused; nil: they are served

	used atomic.Int64 // unix ns

	mu    sync.Mutex
	way   *way                  // nil: none is alive
	rooms map[*Sending]struct{} // bound and not forgotten
}

// way is one life of the connection to a decode manager. One goroutine, run, owns it.
type way struct {
	a    *decodeAgent
	push *zmtp.Push
	work chan struct{} // capacity 1
	down chan error    // capacity 4: the first reason of the end

	mu      sync.Mutex
	agent   *nixl.Agent // nil until connected
	queue   []*write
	flying  map[uint64]*write
	last    uint64
	stopped bool
}

// write is one chunk on its way.
type write struct {
	s      *Sending
	chunk  int
	blocks []nixl.Block
	parts  int // posted and not done, plus one until all are posted
}

// register takes a decode manager. One that is known keeps its first registration, as with the real peer, unless it was refused.
func (p *Prefill) register(from net.Addr, r *Registration) {
	bad := Supported.checkRegistration(r)
	if bad == nil {
		bad = p.fits(r)
	}
	if bad != nil {
		p.cfg.Log.Warn("a decode worker's registration does not fit; its rooms will be refused", "wire", "sglang", "from", from.String(), "cause", bad.Detail)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if old := p.agents[r.Agent]; p.closed || old != nil && old.bad == nil {
		return
	}
	if len(p.agents) >= maxAgents && !p.dropIdle() {
		p.cfg.Log.Error("too many decode workers; a registration was dropped", "wire", "sglang", "from", from.String(), "limit", maxAgents)
		return
	}
	p.take(r, bad).start()
}

// take makes the record of a decode manager. Under mu.
func (p *Prefill) take(r *Registration, bad *room.Cause) *decodeAgent {
	a := &decodeAgent{p: p, at: r.Endpoint, reg: r, bad: bad, rooms: make(map[*Sending]struct{})}
	a.used.Store(time.Now().UnixNano())
	p.agents[r.Agent] = a
	return a
}

// agentOf is the decode manager that metadata come from. One that has not registered, or whose registration could not
// be read, is taken as one whose rooms are refused, so that it is told.
func (p *Prefill) agentOf(m *Metadata) *decodeAgent {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.agents[m.Agent]
	switch {
	case a != nil && a.at == m.Endpoint:
		return a
	case a != nil || p.closed || len(p.agents) >= maxAgents && !p.dropIdle():
		return nil
	}
	return p.take(&Registration{Endpoint: m.Endpoint, Agent: m.Agent}, &room.Cause{Code: room.CodeMismatch,
		Detail: "the decode worker has not registered with this prefill worker, or its registration could not be read; SGLang " + Supported.Release + " is supported"})
}

// dropIdle forgets the decode manager without a life that was longest unused. Under mu.
func (p *Prefill) dropIdle() bool {
	var oldest *decodeAgent
	for _, a := range p.agents {
		if a.idle() && (oldest == nil || a.used.Load() < oldest.used.Load()) {
			oldest = a
		}
	}
	if oldest != nil {
		delete(p.agents, oldest.reg.Agent)
	}
	return oldest != nil
}

func (a *decodeAgent) idle() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.way == nil && len(a.rooms) == 0
}

// agentAt is the decode manager that listens at e.
func (p *Prefill) agentAt(e Endpoint) *decodeAgent {
	p.mu.Lock()
	defer p.mu.Unlock()
	var found *decodeAgent
	for _, a := range p.agents {
		if a.at == e && (found == nil || a.used.Load() > found.used.Load()) {
			found = a
		}
	}
	return found
}

// fits compares a decode manager's memory with the own.
func (p *Prefill) fits(r *Registration) *room.Cause {
	m := p.mem
	refuse := func(format string, args ...any) *room.Cause {
		return &room.Cause{Code: room.CodeMismatch, Detail: "the decode worker's memory does not fit: " + fmt.Sprintf(format, args...)}
	}
	switch {
	case r.TPSize != 1 || r.DCPSize != 1:
		return refuse("tensor size %d, context size %d; this dialect serves 1 and 1", r.TPSize, r.DCPSize)
	case len(r.KV) != m.Buffers:
		return refuse("%d KV buffers, here %d", len(r.KV), m.Buffers)
	case len(r.Aux) != len(m.AuxItemLens):
		return refuse("%d aux buffers, here %d", len(r.Aux), len(m.AuxItemLens))
	case r.Slots < 1:
		return refuse("it does not say how many pages it has")
	case len(r.State) > 0 || len(r.Layers) > 0:
		return refuse("it has state components or layer ids")
	case r.StagingBase != 0:
		return refuse("it wants staging")
	}
	for i, n := range r.ItemLens {
		if n != uint64(m.ItemLen) {
			return refuse("pages of %d bytes in KV buffer %d, here %d", n, i, m.ItemLen)
		}
		if r.Kinds[i] != DRAM {
			return refuse("KV buffer %d is %s, this worker writes to DRAM", i, r.Kinds[i])
		}
		if end := uint64(r.Slots) * n; r.KV[i] == 0 || r.KV[i] > math.MaxInt64-end {
			return refuse("KV buffer %d is at address %#x", i, r.KV[i])
		}
	}
	for i, at := range r.Aux {
		if at == 0 || at > math.MaxInt64/2 {
			return refuse("aux buffer %d is at address %#x", i, at)
		}
	}
	return nil
}

// maxAuxRow bounds a decode manager's aux row, whose buffer's length it does not tell.
const maxAuxRow = 1 << 20

// check refuses metadata that can not be served by this decode manager.
func (a *decodeAgent) check(m *Metadata) *room.Cause {
	switch {
	case a.bad != nil:
		return a.bad
	case m.Required != 1 || m.Dummy:
		return &room.Cause{Code: room.CodeMismatch, Detail: fmt.Sprintf("the room needs metadata of %d decode ranks (dummy: %v); this dialect serves one", m.Required, m.Dummy)}
	case len(m.State) > 0 && len(m.State[0]) > 0:
		return &room.Cause{Code: room.CodeMismatch, Detail: "the room has state components"}
	case m.Aux > maxAuxRow:
		return &room.Cause{Code: room.CodeProtocol, Detail: fmt.Sprintf("aux row %d", m.Aux)}
	}
	for _, page := range m.Pages {
		if int(page) >= a.reg.Slots {
			return &room.Cause{Code: room.CodeProtocol, Detail: fmt.Sprintf("page %d of %d", page, a.reg.Slots)}
		}
	}
	return nil
}

// revive returns a life that is not down, starting one if there is none; nil: the manager is ending.
func (a *decodeAgent) revive() *way {
	a.p.mu.Lock()
	defer a.p.mu.Unlock()
	return a.start()
}

// start is revive. Under Prefill.mu.
func (a *decodeAgent) start() *way {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.used.Store(time.Now().UnixNano())
	if a.way != nil || a.p.closed {
		return a.way
	}
	w := &way{a: a, work: make(chan struct{}, 1), down: make(chan error, 4), flying: make(map[uint64]*write)}
	w.push = zmtp.Dial(a.at.Addr(), zmtp.PushConfig{Down: func(err error) { w.fail(fmt.Errorf("the control connection to the decode worker was lost: %w", err)) }})
	a.way = w
	a.p.counts.started.Add(1)
	a.p.wg.Go(w.run)
	return w
}

// say sends a message, as far as anybody is there to hear it.
func (a *decodeAgent) say(m zmtp.Message) {
	if w := a.revive(); w != nil {
		_ = w.push.Send(m)
	}
}

// add puts a room under the agent's life; false if there is none.
func (a *decodeAgent) add(s *Sending) bool {
	w := a.revive()
	a.mu.Lock()
	defer a.mu.Unlock()
	if w == nil || a.way != w {
		return false
	}
	a.rooms[s] = struct{}{}
	return true
}

func (a *decodeAgent) remove(s *Sending) {
	a.mu.Lock()
	delete(a.rooms, s)
	a.mu.Unlock()
}

// fail ends the present life.
func (a *decodeAgent) fail(err error) {
	a.mu.Lock()
	w := a.way
	a.mu.Unlock()
	if w != nil {
		w.fail(err)
	}
}

// post hands a chunk to the present life; false if there is none, and nothing was begun.
func (a *decodeAgent) post(c *write) bool {
	a.mu.Lock()
	w := a.way
	a.mu.Unlock()
	return w != nil && w.post(c)
}

func (w *way) fail(err error) {
	select {
	case w.down <- err:
	default:
	}
}

func (w *way) post(c *write) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stopped {
		return false
	}
	w.queue = append(w.queue, c)
	select {
	case w.work <- struct{}{}:
	default:
	}
	return true
}

// run starts the agent, posts what comes and ends the life.
func (w *way) run() {
	err := w.serve()
	w.end(err)
}

func (w *way) serve() error {
	a := w.a
	if a.bad != nil { // only statuses go there
		return w.idle()
	}
	connected := make(chan struct{})
	ctx, stop := context.WithTimeout(a.p.ctx, 30*time.Second)
	defer stop()
	agent, err := nixl.StartAgent(ctx, a.p.cfg.NIXL, a.p.mem.shared(), nixl.AgentEvents{
		Connected: func() { close(connected) },
		Done:      w.done,
		End:       func(err error) { w.fail(fmt.Errorf("the NIXL process for the decode worker has ended: %w", err)) },
	})
	if err != nil {
		return err
	}
	w.mu.Lock()
	w.agent = agent
	w.mu.Unlock()
	if err := agent.Connect(a.reg.Metadata); err != nil {
		return err
	}
	select {
	case <-connected:
	case err := <-w.down:
		return err
	case <-ctx.Done():
		return fmt.Errorf("the NIXL connection to the decode worker was not there in time: %w", context.Cause(ctx))
	}
	for {
		if err := w.pump(); err != nil {
			return err
		}
		select {
		case <-w.work:
		case err := <-w.down:
			return err
		case <-a.p.ctx.Done():
			return errAgentClosed
		}
	}
}

func (w *way) idle() error {
	select {
	case err := <-w.down:
		return err
	case <-w.a.p.ctx.Done():
		return errAgentClosed
	}
}

// pump posts the queue.
func (w *way) pump() error {
	for {
		w.mu.Lock()
		if len(w.queue) == 0 {
			w.queue = nil
			w.mu.Unlock()
			return nil
		}
		c := w.queue[0]
		w.queue = w.queue[1:]
		c.parts = 1
		w.mu.Unlock()
		for rest := c.blocks; len(rest) > 0; {
			n := min(len(rest), pieceBlocks)
			w.mu.Lock()
			w.last++
			id := w.last
			c.parts++
			w.flying[id] = c
			w.mu.Unlock()
			if err := w.agent.Write(id, rest[:n]); err != nil {
				return fmt.Errorf("post a write: %w", err)
			}
			rest = rest[n:]
		}
		w.part(c)
	}
}

// pieceBlocks is how many blocks go into one request of the library.
const pieceBlocks = 4096

// done is called by the agent for each complete piece.
func (w *way) done(id uint64) {
	w.mu.Lock()
	c := w.flying[id]
	delete(w.flying, id)
	w.mu.Unlock()
	if c != nil {
		w.part(c)
	}
}

// part counts one piece, or the posting, over; with the last one the chunk has settled.
func (w *way) part(c *write) {
	w.mu.Lock()
	c.parts--
	over := c.parts == 0
	w.mu.Unlock()
	if over {
		c.s.settled(c.chunk)
	}
}

// end is the end of this life. Rooms with a write outstanding can not be proven drained: killing the own process
// does not call back what the kernel already carries to the other side. They owe no ack any more then.
func (w *way) end(cause error) {
	a := w.a
	w.mu.Lock()
	w.stopped = true
	agent := w.agent
	w.mu.Unlock()
	a.p.counts.ended.Add(1)
	linger := time.Duration(0)
	if errors.Is(cause, errAgentClosed) {
		linger = 500 * time.Millisecond
	}
	if agent != nil {
		agent.Kill(cause)
		agent.Wait() // no done comes any more
	}
	a.mu.Lock()
	a.way = nil
	var rooms []*Sending
	for s := range a.rooms {
		rooms = append(rooms, s)
	}
	a.mu.Unlock()
	w.mu.Lock()
	left := make(map[*write]bool)
	for _, c := range w.queue {
		left[c] = false
	}
	for _, c := range w.flying {
		left[c] = true
	}
	w.queue, w.flying = nil, nil
	w.mu.Unlock()
	c := lost(a.at.Addr(), cause)
	for _, s := range rooms {
		s.room.Load().Apply(room.Event{Kind: room.EvPeerLost, Cause: c})
	}
	for x, posted := range left {
		if posted {
			a.p.poison(x.s.open.Room)
		}
		x.s.over(room.Event{Kind: room.EvSettleError, Chunk: x.chunk, Cause: c})
	}
	w.push.Close(linger)
}
