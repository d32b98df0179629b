package hub

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/transfer"
)

// receiving is one room's shell on the decode side.
type receiving struct {
	hub    *Receivers
	open   transfer.OpenReceiver
	pages  int        // of the whole prompt, also those that are cached
	room   *room.Room // set before bootstrap starts
	landed chan int

	landing  sync.Mutex // held while a notification is handled; before the room's lock
	arrivals []arrival  // of each chunk, under landing; nil until the first notification

	mu       sync.Mutex
	sess     *session.ClientSession // set by bootstrap, once
	lease    *kv.Lease              // set by bootstrap, once; nil before and if the room ended first
	chunks   [][][]byte             // memory of each whole chunk, with lease
	have     int                    // tokens that were cached and do not come, with lease
	sizes    []int                  // bytes that come of each chunk, with lease
	perChunk [][]kv.PageID          // pages for them, with lease
	grant    transfer.GrantID       // 0: no grant was made
	granted  time.Time
	released bool // the request has let go; without a lease then, adopt does it

	forgotten bool // guarded by hub.mu: forget has run, no index may name the room again
}

// bootstrap gets the session and the pages and sends the grant. It ends when that
// is done or the room has ended; waiting is bounded by the room's deadline.
func (rec *receiving) bootstrap() {
	h := rec.hub
	// The session is awaited even if the room ends meanwhile: the sender must hear
	// of the abort, or it would wait for a grant until its own bound.
	ctx, stop := context.WithDeadline(h.ctx, early(rec.open.Deadline))
	defer stop()
	sess, err := h.dialer.Get(ctx, rec.open.Addr)
	if err != nil {
		cc := *room.CauseOf(err)
		if ctx.Err() != nil && h.ctx.Err() == nil {
			cc = room.Cause{Code: room.CodeDeadline, Detail: "the request's deadline: " + cc.Detail}
		}
		cc.Side, cc.Phase, cc.Key, cc.Peer = room.SideReceiver, room.StateBootstrapping.String(), rec.open.Key, rec.open.Addr
		rec.room.Apply(room.Event{Kind: room.EvCancel, Cause: &cc})
		return
	}
	if !rec.attach(sess) {
		rec.room.Apply(room.Event{Kind: room.EvPeerLost, Cause: lost(nil, room.SideReceiver, rec.open.Key, rec.open.Addr)})
		return
	}
	if rec.room.State().Terminal() {
		_ = sess.SendAbort(rec.open.Key, 0, rec.room.Cause())
		return
	}
	lease, err := h.alloc.wait(ctx, rec.room.Done(), rec.open.Prefixes, rec.pages, "room "+rec.open.Key.String(), rec.open.Deadline)
	if err != nil {
		c := &room.Cause{Code: room.CodeCapacity, Side: room.SideReceiver, Phase: "prealloc", Key: rec.open.Key, Peer: rec.open.Addr,
			Detail: "pages for the prompt's KV: " + err.Error()}
		if errors.Is(err, context.DeadlineExceeded) {
			c.Code = room.CodeDeadline
		}
		rec.room.Apply(room.Event{Kind: room.EvCancel, Cause: c})
		return
	}
	if lease == nil {
		return // the room ended first
	}
	rec.adopt(lease)
	if fx := rec.room.Apply(room.Event{Kind: room.EvGranted}); fx.Has(room.FxSkip) {
		rec.letRequestGo()
	}
}

// early is a moment before a deadline: who waits until then can still say what for, before the
// deadline itself ends the room.
func early(deadline time.Time) time.Time {
	return deadline.Add(-min(max(time.Until(deadline)/10, 0), 200*time.Millisecond))
}

// letRequestGo ends the request's hold on the pages, once, now or when they come. After success, when every byte has come and
// was verified, they go on to the pool's prefix cache.
func (rec *receiving) letRequestGo() {
	rec.mu.Lock()
	lease, have, per := rec.lease, rec.have, rec.perChunk
	if rec.released {
		lease = nil
	}
	rec.released = true
	rec.mu.Unlock()
	if lease == nil {
		return
	}
	if o := &rec.open; len(o.Prefixes) > 0 && rec.room.State() == room.StateSuccess {
		lease.Keep(fresh(rec.hub.cfg.Shards, o.Bounds, o.Prefixes, have, per))
	}
	lease.ReleaseRequest()
}

// attach puts the room under its session; false if the session is down already.
func (rec *receiving) attach(sess *session.ClientSession) bool {
	h := rec.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	rs := h.sessions[sess.ID()]
	if rs == nil || rs.down {
		return false
	}
	rec.mu.Lock()
	rec.sess = sess
	rec.mu.Unlock()
	if !rec.forgotten { // otherwise the request ended before there was a session
		rs.rooms[rec] = struct{}{}
	}
	return true
}

// adopt takes the lease and lays the chunks over its pages.
func (rec *receiving) adopt(lease *kv.Lease) {
	pool, s, o := rec.hub.cfg.Pool, rec.hub.cfg.Shards, &rec.open
	have, sizes := cachedTokens(o.Prefixes, len(lease.Shared())), o.Chunks
	if have > 0 {
		sizes = chunkSizes(s, o.Bounds, have)
	}
	per := perChunk(lease.Pages(), pool.PageBytes(), sizes)
	chunks := make([][][]byte, len(per))
	for i, pages := range per {
		from, to := tokensOf(o.Bounds, i)
		chunks[i] = parts(pool, wholeChunk(s, from, to, o.Prefixes, lease.Shared(), pages), o.Chunks[i])
	}
	rec.mu.Lock()
	rec.lease, rec.chunks, rec.have, rec.sizes, rec.perChunk = lease, chunks, have, sizes, per
	released := rec.released
	rec.mu.Unlock()
	if released {
		lease.ReleaseRequest()
	}
}

// sendGrant allows the grant at the targets and sends it. Runs under the room's
// lock. A cause means that the grant did not leave, or perhaps not whole; the room must fail.
func (rec *receiving) sendGrant() *room.Cause {
	h := rec.hub
	id := transfer.GrantID(h.grants.Add(1))
	ids := rec.lease.Pages()
	pages := make([]uint32, len(ids))
	for i, p := range ids {
		pages[i] = uint32(p)
	}
	have, sizes := rec.coming()
	spans, err := place(pages, h.cfg.Pool.PageBytes(), sizes)
	if err != nil {
		return &room.Cause{Code: room.CodeInternal, Side: room.SideReceiver, Key: rec.open.Key, Detail: err.Error()}
	}
	g := transfer.Grant{ID: id, Key: rec.open.Key, Session: rec.sess.ID()}
	for _, s := range spans {
		g.Spans = append(g.Spans, s...)
	}
	rec.mu.Lock()
	rec.grant, rec.granted = id, time.Now()
	rec.mu.Unlock()
	if !rec.lease.Grant() {
		return &room.Cause{Code: room.CodeInternal, Side: room.SideReceiver, Key: rec.open.Key, Detail: "pages were let go before their grant"}
	}
	h.mu.Lock()
	h.byGrant[id] = rec
	h.mu.Unlock()
	for _, t := range h.targets {
		if err := t.Allow(g); err != nil {
			return rec.notGranted(fmt.Sprintf("transport %s does not take the grant: %v", t.Descriptor().Kind, err), err)
		}
	}
	err = rec.sess.SendGrant(session.Grant{
		Key: rec.open.Key, ID: id, Pages: pages, PageBytes: h.cfg.Pool.PageBytes(), Chunks: sizes,
		Digest: rec.open.Digest, Timeout: time.Until(rec.open.Deadline), Have: have,
	})
	if err != nil {
		return rec.notGranted("the grant could not be sent: "+err.Error(), err)
	}
	return nil
}

// notGranted is the cause of a room whose grant did not leave: the session's end, or what
// was wrong with the grant itself.
func (rec *receiving) notGranted(detail string, err error) *room.Cause {
	c := &room.Cause{Code: room.CodeTransferFailed, Side: room.SideReceiver, Key: rec.open.Key, Peer: rec.open.Addr, Detail: detail, Retryable: true}
	var own *room.Cause
	switch {
	case errors.Is(err, session.ErrDown), errors.Is(err, transfer.ErrSession), errors.Is(err, transfer.ErrClosed):
		return lost(&room.Cause{Detail: detail}, room.SideReceiver, rec.open.Key, rec.open.Addr)
	case errors.As(err, &own):
		c.Code, c.Retryable = own.Code, own.Retryable
	}
	return c
}

// sendAbort runs under the room's lock.
func (rec *receiving) sendAbort(c *room.Cause) {
	rec.mu.Lock()
	sess, g := rec.sess, rec.grant
	rec.mu.Unlock()
	if sess != nil { // otherwise bootstrap sends it when there is a session
		_ = sess.SendAbort(rec.open.Key, g, c)
	}
}

// letGo revokes the grant and returns the transfer's hold where that is proven. Runs
// on the actions goroutine.
func (rec *receiving) letGo(revoke, free bool, proof kv.Proof) {
	rec.mu.Lock()
	lease, g := rec.lease, rec.grant
	rec.mu.Unlock()
	if g == 0 {
		return // nothing was granted
	}
	if revoke {
		fenced := true
		for _, t := range rec.hub.targets {
			fenced = t.Revoke(g) && fenced
		}
		if fenced && !free {
			rec.room.Apply(room.Event{Kind: room.EvFenced}) // comes back with free
		}
	}
	if free {
		lease.ReleaseTransfer(proof)
	}
}

// forget drops the room from the hub's indexes; on the actions goroutine, after letGo.
func (rec *receiving) forget() {
	h := rec.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	rec.mu.Lock()
	defer rec.mu.Unlock()
	rec.forgotten = true
	delete(h.byGrant, rec.grant)
	if rec.sess != nil {
		if rs := h.sessions[rec.sess.ID()]; rs != nil {
			delete(rs.rooms, rec)
		}
	}
}

func (rec *receiving) session() transfer.SessionID {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if rec.sess == nil {
		return 0
	}
	return rec.sess.ID()
}

func (rec *receiving) grantID() transfer.GrantID {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	return rec.grant
}

func (rec *receiving) grantedAt() time.Time {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	return rec.granted
}

// coming is how many tokens were cached, and the bytes that come of each chunk; nil before there are pages.
func (rec *receiving) coming() (have int, sizes []int) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	return rec.have, rec.sizes
}

func (rec *receiving) bytes() (n int) {
	_, sizes := rec.coming()
	for _, c := range sizes {
		n += c
	}
	return n
}

func (rec *receiving) Granted() <-chan struct{} { return rec.room.Granted() }
func (rec *receiving) Landed() <-chan int       { return rec.landed }
func (rec *receiving) Done() <-chan struct{}    { return rec.room.Done() }
func (rec *receiving) State() room.State        { return rec.room.State() }

// Chunk implements transfer.Receiving; nil before there are pages.
func (rec *receiving) Chunk(i int) [][]byte {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if rec.chunks == nil {
		return nil
	}
	return rec.chunks[i]
}

func (rec *receiving) Err() error {
	if c := rec.room.Cause(); c != nil {
		return c
	}
	return nil
}

// Cancel implements transfer.Receiving.
func (rec *receiving) Cancel(c *room.Cause) {
	rec.room.Apply(room.Event{Kind: room.EvCancel, Cause: c})
}

// Release implements transfer.Receiving.
func (rec *receiving) Release() {
	rec.room.Apply(room.Event{Kind: room.EvRelease})
	rec.letRequestGo()
}
