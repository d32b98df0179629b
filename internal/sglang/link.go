package sglang

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sglang/zmtp"
	"github.com/baton-pd/baton/internal/transfer/nixl"
)

// link is one generation of the way to a prefill rank: a NIXL agent of its own over the whole memory, registered
// there under a fresh name, and the connection for what is said to the rank. A rank can write as long as the
// link's helper process lives, and not a byte afterwards: its end is the fence of all its rooms.
//
// One goroutine, run, owns it from start to fence.
type link struct {
	d    *Decode
	key  linkKey
	poke chan struct{} // capacity 1

	ready chan struct{} // closed when started, or not: err
	err   error
	agent *nixl.Agent // set before ready, as push
	push  *zmtp.Push
	down  chan error // capacity 4: the first reason of the end

	// Under Decode.mu.
	rooms   map[*Receiving]struct{} // attached and not forgotten
	retired bool                    // takes no new rooms
}

func (l *link) wake() {
	select {
	case l.poke <- struct{}{}:
	default:
	}
}

func (l *link) fail(err error) {
	select {
	case l.down <- err:
	default:
	}
}

// attach gets the link of rec's prefill rank, starting it if there is none, and puts rec under it.
func (d *Decode) attach(ctx context.Context, rec *Receiving) (*link, error) {
	if b := d.cfg.BootstrapTimeout; b > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, b)
		defer stop()
	}
	dp := rec.open.DPRank
	if dp < 0 {
		t, err := d.discover(ctx, rec.open.Addr)
		if err == nil {
			dp, err = d.chooseRank(ctx, t, rec.open.Addr, rec.open.Room)
		}
		if err != nil {
			return nil, err
		}
	}
	for {
		l, err := d.link(linkKey{rec.open.Addr, dp})
		if err != nil {
			return nil, err
		}
		select {
		case <-l.ready:
		case <-ctx.Done():
			return nil, &room.Cause{Code: room.CodeUnavailable, Retryable: true, Detail: "the link to the prefill rank was not there in time: discovery and registration take part of a second on an idle machine"}
		}
		if l.err != nil {
			return nil, l.err
		}
		d.mu.Lock()
		ok := !l.retired
		if ok {
			rec.mu.Lock()
			rec.link = l
			rec.mu.Unlock()
			if !rec.forgotten {
				l.rooms[rec] = struct{}{}
			}
		}
		d.mu.Unlock()
		if ok {
			l.wake()
			return l, nil
		}
	}
}

// chooseRank is the release's rule.
func (d *Decode) chooseRank(ctx context.Context, t *Topology, addr string, id uint64) (int, error) {
	switch {
	case t.DPSize == 1:
		return 0, nil
	case t.FollowRoom:
		return int(id % uint64(t.DPSize)), nil
	default:
		return d.boot.dpRank(ctx, addr, id)
	}
}

// link is the live link of key, or a new one that has begun to start.
func (d *Decode) link(key linkKey) (*link, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, &room.Cause{Code: room.CodeShutdown, Detail: "the worker is ending"}
	}
	if l := d.links[key]; l != nil && !l.retired {
		return l, nil
	}
	l := &link{d: d, key: key, poke: make(chan struct{}, 1), ready: make(chan struct{}), down: make(chan error, 4), rooms: make(map[*Receiving]struct{})}
	d.links[key] = l
	d.wg.Go(l.run)
	return l, nil
}

// maxFleets bounds what is remembered of bootstrap servers.
const maxFleets = 4096

// discover is the fleet at addr, remembered or asked for, if it fits.
func (d *Decode) discover(ctx context.Context, addr string) (*Topology, error) {
	d.mu.Lock()
	t := d.fleets[addr]
	d.mu.Unlock()
	if t != nil {
		return t, nil
	}
	t, err := d.askFleet(ctx, addr)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	if len(d.fleets) >= maxFleets {
		clear(d.fleets)
	}
	d.fleets[addr] = t
	d.mu.Unlock()
	return t, nil
}

// askFleet reads the topology and refuses what does not fit, before any room is offered.
func (d *Decode) askFleet(ctx context.Context, addr string) (*Topology, error) {
	t, err := d.boot.topology(ctx, addr)
	if err != nil {
		return nil, err
	}
	if t.PrefillHTTP != nil {
		if c := d.boot.d.checkVersion(d.boot.serverInfo(ctx, addr, *t.PrefillHTTP)); c != nil {
			return nil, c
		}
	}
	mismatch := func(format string, a ...any) (*Topology, error) {
		return nil, &room.Cause{Code: room.CodeMismatch, Detail: "the prefill fleet does not fit this decode worker: " + fmt.Sprintf(format, a...)}
	}
	switch m := d.mem; {
	case t.AttnTPSize != 1 || t.AttnCPSize != 1 || t.PPSize != 1 || t.DPSize < 1:
		return mismatch("tensor, context and pipeline sizes are %d, %d, %d; this dialect serves 1, 1, 1", t.AttnTPSize, t.AttnCPSize, t.PPSize)
	case t.PageSize != nil && *t.PageSize != m.PageSize:
		return mismatch("its pages have %d tokens, here %d", *t.PageSize, m.PageSize)
	case t.DType != nil && m.DType != "" && *t.DType != m.DType:
		return mismatch("its KV is %q, here %q", *t.DType, m.DType)
	case t.KVLayout != nil:
		return mismatch("its KV layout is %q, here the plain one", *t.KVLayout)
	case t.Policy != policyEarly && t.Policy != "":
		return mismatch("its decode_allocation_policy is %q, here %q", t.Policy, policyEarly)
	case t.LayerSplit || t.Sharding:
		return mismatch("it splits or shards its KV cache")
	}
	return t, nil
}

// run starts the link, watches it and ends it.
func (l *link) run() {
	d := l.d
	d.counts.started.Add(1)
	if l.err = l.start(); l.err != nil {
		l.end(l.err)
		close(l.ready)
		return
	}
	close(l.ready)
	ctx, stop := context.WithCancel(d.ctx)
	d.wg.Go(func() { l.heartbeat(ctx) })
	err := l.watch()
	stop()
	l.end(err)
}

// start is bounded by its parts: each request, the helper's start, the topology's wait.
func (l *link) start() error {
	d := l.d
	limit := d.cfg.BootstrapTimeout
	if limit <= 0 {
		limit = 30 * time.Second
	}
	ctx, stop := context.WithTimeout(d.ctx, limit)
	defer stop()
	t, err := d.discover(ctx, l.key.addr)
	if err != nil {
		return err
	}
	if l.key.dp >= t.DPSize {
		return &room.Cause{Code: room.CodeMismatch, Detail: fmt.Sprintf("the request names prefill rank %d of %d", l.key.dp, t.DPSize)}
	}
	at, err := d.boot.rank(ctx, l.key.addr, l.key.dp)
	if err != nil {
		return err
	}
	if l.agent, err = nixl.StartAgent(ctx, d.cfg.NIXL, d.mem.shared(), nixl.AgentEvents{End: func(err error) {
		l.fail(fmt.Errorf("the link's NIXL process has ended: %w", err))
	}}); err != nil {
		return err
	}
	l.push = zmtp.Dial(Endpoint(at).Addr(), zmtp.PushConfig{Down: func(err error) {
		l.fail(fmt.Errorf("the control connection to the prefill rank was lost: %w", err))
	}})
	return l.push.Send(l.registration().Encode())
}

func (l *link) registration() *Registration {
	m, base := l.d.mem, l.agent.Base()
	r := &Registration{Endpoint: l.d.Endpoint(), Agent: l.agent.Name(), Metadata: l.agent.Metadata(), KV: addresses(base, m.kvOff), Aux: addresses(base, m.auxOff),
		TPSize: 1, ItemLen: uint64(m.ItemLen), Slots: m.Slots, DCPSize: 1}
	for range m.Buffers {
		r.Kinds, r.ItemLens = append(r.Kinds, DRAM), append(r.ItemLens, uint64(m.ItemLen))
	}
	return r
}

// errRetired ends a link whose last live room has ended.
var errRetired = errors.New("an aborted room was not acked by the prefill rank, so its link was given up to fence it")

// watch returns when the link must end.
func (l *link) watch() error {
	d := l.d
	active := false
	t := time.NewTicker(min(d.cfg.AckTimeout/4+time.Millisecond, 250*time.Millisecond))
	defer t.Stop()
	gate := time.NewTicker(5 * time.Millisecond)
	defer gate.Stop()
	gate.Stop()
	for {
		busy, live, gated := l.look()
		if busy != active {
			active = busy
			if err := l.agent.Active(active); err != nil {
				return fmt.Errorf("the link's NIXL process does not listen: %w", err)
			}
		}
		d.mu.Lock()
		over := l.retired && live == 0
		d.mu.Unlock()
		if over {
			return errRetired
		}
		for _, rec := range gated {
			rec.succeeded()
		}
		if len(gated) > 0 {
			gate.Reset(5 * time.Millisecond)
		} else {
			gate.Stop()
		}
		select {
		case err := <-l.down:
			return err
		case <-d.ctx.Done():
			return context.Cause(d.ctx)
		case <-l.poke:
		case <-gate.C:
		case <-t.C:
			l.retireOverdue(time.Now())
		}
	}
}

// look counts the rooms: busy if any may be written to, live those that have not ended.
func (l *link) look() (busy bool, live int, gated []*Receiving) {
	l.d.mu.Lock()
	defer l.d.mu.Unlock()
	for rec := range l.rooms {
		if !rec.room.State().Terminal() {
			live++
		}
		busy = busy || !rec.Drained()
		if rec.waitsForAux() {
			gated = append(gated, rec)
		}
	}
	return busy, live, gated
}

// retireOverdue gives the link up if an abort was not acked in time, or acks prove nothing.
func (l *link) retireOverdue(now time.Time) {
	d := l.d
	limit := d.cfg.AckTimeout
	if d.cfg.DistrustAcks {
		limit = 0
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if l.retired {
		return
	}
	for rec := range l.rooms {
		if rec.overdue(now, limit) {
			l.retired = true
			l.wake()
			d.counts.retired.Add(1)
			d.cfg.Log.Warn("an abort was not acked: the link to the prefill rank is given up when its other rooms have ended", "wire", "sglang",
				"prefill", l.key.addr, "room", rec.open.Room)
			return
		}
	}
}

// end fails the rooms of a link, kills its helper, and only then lets their pages go.
func (l *link) end(cause error) {
	d := l.d
	d.counts.ended.Add(1)
	d.mu.Lock()
	l.retired = true
	if d.links[l.key] == l {
		delete(d.links, l.key)
	}
	delete(d.fleets, l.key.addr) // it may come back as another
	var rooms []*Receiving
	for rec := range l.rooms {
		rooms = append(rooms, rec)
	}
	d.mu.Unlock()
	for _, rec := range rooms {
		rec.room.Apply(room.Event{Kind: room.EvPeerLost, Cause: lost(l.key.addr, cause)})
	}
	if l.push != nil {
		l.push.Close(min(time.Second, d.linger(cause)))
	}
	if l.agent != nil {
		l.agent.Kill(cause)
		l.agent.Wait()
	}
	for _, rec := range rooms {
		rec.room.Apply(room.Event{Kind: room.EvFenced})
	}
}

// linger lets the last aborts out where the other side is there to hear them.
func (d *Decode) linger(cause error) time.Duration {
	if d.ctx.Err() != nil || errors.Is(cause, errRetired) {
		return 200 * time.Millisecond
	}
	return 0
}

// heartbeat asks the prefill server for its health until ctx ends.
func (l *link) heartbeat(ctx context.Context) {
	d, missed := l.d, 0
	for wait(ctx, d.cfg.Heartbeat) == nil {
		err := d.boot.healthy(ctx, l.key.addr, min(3*time.Second, max(d.cfg.Heartbeat, 100*time.Millisecond)))
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			missed = 0
			continue
		}
		if missed++; missed >= d.cfg.Misses {
			l.fail(fmt.Errorf("the prefill server did not answer %d heartbeats: %w", missed, err))
			return
		}
	}
}
