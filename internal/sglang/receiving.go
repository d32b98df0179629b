package sglang

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
)

// Receiving is one room of a [Decode]. Its owner must call Release.
type Receiving struct {
	d    *Decode
	open OpenReceive
	room *room.Room // set before bootstrap starts

	mu       sync.Mutex
	link     *link     // set by bootstrap, once
	pages    *kv.Lease // set by bootstrap, once, with row
	row      *kv.Lease
	granted  bool // metadata may have left
	gen      uint64
	aborted  time.Time // of the abort that waits for its ack
	released bool      // the request has let go
	gated    bool      // success was told, the aux record is awaited

	forgotten bool // under Decode.mu: no link may take the room again
}

// bootstrap gets the link to the prefill rank and pages, and sends the metadata. It ends with that or with the room.
func (rec *Receiving) bootstrap() {
	d := rec.d
	ctx, stop := context.WithDeadline(d.ctx, early(rec.open.Deadline))
	defer stop()
	// The link is awaited even if the room ends meanwhile: the prefill rank must hear of the abort, or its
	// sender would wait for pages until its own bound.
	l, err := d.attach(ctx, rec)
	if err != nil {
		rec.fail(err)
		return
	}
	if rec.room.State().Terminal() {
		_ = l.push.Send((&Abort{Room: rec.open.Room, Endpoint: d.Endpoint()}).Encode())
		return
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	d.wg.Go(func() { // the room's end ends the waiting
		select {
		case <-rec.room.Done():
			cancel(errRoomEnded)
		case <-ctx.Done():
		}
	})
	pages, err := alloc(ctx, d.mem.slots, rec.open.Pages, rec.open.Deadline)
	if err == nil {
		var row *kv.Lease
		if row, err = alloc(ctx, d.mem.rows, 1, rec.open.Deadline); err == nil {
			rec.adopt(pages, row)
		} else {
			pages.ReleaseRequest()
		}
	}
	if err != nil {
		rec.fail(err)
		return
	}
	if fx := rec.room.Apply(room.Event{Kind: room.EvGranted}); fx.Has(room.FxSkip) {
		rec.letRequestGo()
	}
	l.wake()
}

// early is a moment before a deadline: who waits until then can still say what for.
func early(deadline time.Time) time.Time {
	return deadline.Add(-min(max(time.Until(deadline)/10, 0), 200*time.Millisecond))
}

var errRoomEnded = errors.New("the room has ended")

// fail ends the room because of err, unless it has ended already.
func (rec *Receiving) fail(err error) {
	if errors.Is(err, errRoomEnded) {
		return
	}
	c := &room.Cause{Code: room.CodeDeadline, Detail: "the request's deadline passed while the transfer was being prepared"}
	var own *room.Cause
	switch {
	case errors.As(err, &own):
		cc := *own
		c = &cc
	case !errors.Is(err, context.DeadlineExceeded):
		c = &room.Cause{Code: room.CodeTransferFailed, Detail: err.Error(), Retryable: true}
	}
	c.Side, c.Key, c.Peer = room.SideReceiver, rec.room.Key(), rec.open.Addr
	rec.room.Apply(room.Event{Kind: room.EvCancel, Cause: c})
}

// alloc waits for slots of a pool. It is not fair: whoever fits goes first.
func alloc(ctx context.Context, p *kv.Pool, n int, deadline time.Time) (*kv.Lease, error) {
	for {
		freed := p.Freed()
		l, err := p.Alloc(n, "sglang room", deadline)
		if err == nil || !errors.Is(err, kv.ErrExhausted) {
			return l, err
		}
		select {
		case <-freed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// adopt takes the leases; the request may have let go already.
func (rec *Receiving) adopt(pages, row *kv.Lease) {
	if m := rec.d.mem; m.RoomBuffer >= 0 {
		m.setRoom(int(row.Pages()[0]), 0)
	}
	rec.mu.Lock()
	rec.pages, rec.row = pages, row
	released := rec.released
	rec.mu.Unlock()
	if released {
		pages.ReleaseRequest()
		row.ReleaseRequest()
	}
}

// sendMetadata is the grant of this wire. Under the room's lock.
func (rec *Receiving) sendMetadata() *room.Cause {
	rec.mu.Lock()
	l := rec.link
	rec.granted = true
	rec.mu.Unlock()
	if !rec.pages.Grant() || !rec.row.Grant() {
		return &room.Cause{Code: room.CodeInternal, Side: room.SideReceiver, Detail: "pages were let go before their grant"}
	}
	m := Metadata{Room: rec.open.Room, Endpoint: rec.d.Endpoint(), Agent: l.agent.Name(), Aux: int(rec.row.Pages()[0]), Required: 1, Prefix: rec.open.Prefix}
	for _, p := range rec.pages.Pages() {
		m.Pages = append(m.Pages, int32(p))
	}
	if err := l.push.Send(m.Encode()); err != nil {
		return lost(rec.open.Addr, fmt.Errorf("the metadata could not be sent: %w", err))
	}
	return nil
}

// sendAbort runs under the room's lock. Only a room whose metadata may have left waits for an ack.
func (rec *Receiving) sendAbort() {
	rec.mu.Lock()
	l := rec.link
	a := Abort{Room: rec.open.Room, Endpoint: rec.d.Endpoint()}
	if rec.granted {
		rec.gen = rec.d.gens.Add(1)
		rec.aborted = time.Now()
		a.Gen, a.HasGen = rec.gen, true
	}
	rec.mu.Unlock()
	if l == nil {
		return // no prefill rank has heard of the room from here
	}
	_ = l.push.Send(a.Encode()) // a link that is down fences
}

// acked takes an ack; false if it is of another life or not waited for.
func (rec *Receiving) acked(a *AbortAck) bool {
	rec.mu.Lock()
	ok := rec.gen != 0 && a.Gen == rec.gen && a.Rank == 0
	rec.mu.Unlock()
	if ok && !rec.d.cfg.DistrustAcks {
		rec.room.Apply(room.Event{Kind: room.EvAck})
	}
	return ok
}

// overdue reports an abort that was not acked in time.
func (rec *Receiving) overdue(now time.Time, limit time.Duration) bool {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	return !rec.aborted.IsZero() && rec.room.Drain().Pending() && now.Sub(rec.aborted) >= limit
}

// succeeded: the prefill rank says that every byte is here. The aux record proves that it means this room.
func (rec *Receiving) succeeded() {
	rec.mu.Lock()
	row := rec.row
	l := rec.link
	rec.mu.Unlock()
	m := rec.d.mem
	if row != nil && m.RoomBuffer >= 0 && !rec.room.State().Terminal() {
		switch got := m.roomOf(int(row.Pages()[0])); got {
		case rec.open.Room:
		case 0: // the store is not visible yet; the link looks again
			rec.mu.Lock()
			rec.gated = true
			rec.mu.Unlock()
			l.wake()
			return
		default:
			rec.room.Apply(room.Event{Kind: room.EvCancel, Cause: &room.Cause{Code: room.CodeTransferFailed, Side: room.SideReceiver, Key: rec.room.Key(), Peer: rec.open.Addr,
				Detail: fmt.Sprintf("the aux record that landed is that of room %d: the prefill worker mixes up its rows", got)}})
			return
		}
	}
	rec.room.Apply(room.Event{Kind: room.EvLanded, Chunk: 0, Last: true})
}

// waitsForAux reports a room that succeeded but for its aux record.
func (rec *Receiving) waitsForAux() bool {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	return rec.gated && !rec.room.State().Terminal()
}

func (rec *Receiving) releaseTransfer(proof kv.Proof) {
	rec.mu.Lock()
	pages, row := rec.pages, rec.row
	rec.mu.Unlock()
	if pages != nil {
		pages.ReleaseTransfer(proof)
		row.ReleaseTransfer(proof)
	}
}

// letRequestGo ends the request's hold on the pages, once, now or when they come.
func (rec *Receiving) letRequestGo() {
	rec.mu.Lock()
	pages, row, again := rec.pages, rec.row, rec.released
	rec.released = true
	rec.mu.Unlock()
	if pages != nil && !again {
		pages.ReleaseRequest()
		row.ReleaseRequest()
	}
}

func (rec *Receiving) pokeLink() {
	rec.mu.Lock()
	l := rec.link
	rec.mu.Unlock()
	if l != nil {
		l.wake()
	}
}

// forget takes the room out of its link; on the actions goroutine.
func (rec *Receiving) forget() {
	rec.mu.Lock()
	l := rec.link
	rec.mu.Unlock()
	rec.d.mu.Lock()
	rec.forgotten = true
	if l != nil {
		delete(l.rooms, rec)
	}
	rec.d.mu.Unlock()
	if l != nil {
		l.wake()
	}
}

// Granted is closed when the metadata were sent, or the room has ended.
func (rec *Receiving) Granted() <-chan struct{} { return rec.room.Granted() }

// Done is closed when the room has ended.
func (rec *Receiving) Done() <-chan struct{} { return rec.room.Done() }

// State of the room; Receiver rooms of this wire are never Transferring.
func (rec *Receiving) State() room.State { return rec.room.State() }

// Drained reports that no prefill rank can write to the room's pages any more.
func (rec *Receiving) Drained() bool {
	return rec.room.State().Terminal() && !rec.room.Drain().Pending()
}

// Err is the cause of a room that failed, else nil.
func (rec *Receiving) Err() error {
	if c := rec.room.Cause(); c != nil {
		return c
	}
	return nil
}

// Pages are the page slots in the order of the request; nil before there are any.
func (rec *Receiving) Pages() []int {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if rec.pages == nil {
		return nil
	}
	out := make([]int, len(rec.pages.Pages()))
	for i, p := range rec.pages.Pages() {
		out[i] = int(p)
	}
	return out
}

// Row is the aux row; -1 before there is one.
func (rec *Receiving) Row() int {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if rec.row == nil {
		return -1
	}
	return int(rec.row.Pages()[0])
}

// Cancel ends the room from this side.
func (rec *Receiving) Cancel(c *room.Cause) {
	rec.room.Apply(room.Event{Kind: room.EvCancel, Cause: c})
}

// Release lets go of the room and its pages: the last call. Pages that a prefill rank may still write to
// stay in quarantine.
func (rec *Receiving) Release() {
	rec.room.Apply(room.Event{Kind: room.EvRelease})
	rec.letRequestGo()
}

// lost is the cause of rooms whose prefill rank is gone.
func lost(addr string, err error) *room.Cause {
	return &room.Cause{Code: room.CodePeerLost, Peer: addr, Retryable: true, Detail: err.Error()}
}
