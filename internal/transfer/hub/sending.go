package hub

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/transfer"
)

// sending is one room's shell on the prefill side.
type sending struct {
	hub  *Senders
	open transfer.OpenSender
	room atomic.Pointer[room.Room] // set by Open or bind, whichever is first; always the same

	mu       sync.Mutex
	sess     *session.ServerSession // set once, by the grant
	ss       *senderSession
	grant    transfer.GrantID
	way      *route // of the chunks, with sess
	ackSess  *session.ServerSession
	ackGrant transfer.GrantID
	bufs     []*kv.Lease // staging of chunk i while no write uses it; nil before and after
	released bool        // Release has run: a buffer that comes now goes back at once
}

// bind stores the grant and the session it came on; false if there is one already.
func (s *sending) bind(r *room.Room, sess *session.ServerSession, ss *senderSession, g session.Grant, way *route) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sess != nil {
		return false
	}
	s.room.Store(r) // Open may not have come so far
	s.sess, s.ss, s.grant, s.way = sess, ss, g.ID, way
	return true
}

// bound reports whether a grant has come.
func (s *sending) bound() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sess != nil
}

func (s *sending) sameGrant(sess *session.ServerSession, id transfer.GrantID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sess == sess && s.grant == id
}

// expectAck notes who wants the ack; false if the room belongs to another session.
func (s *sending) expectAck(sess *session.ServerSession, g transfer.GrantID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sess != nil && s.sess != sess {
		return false
	}
	s.ackSess, s.ackGrant = sess, g
	return true
}

// peer names the decode worker, "" before the grant.
func (s *sending) peer() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sess == nil {
		return ""
	}
	return s.sess.Client().WorkerID
}

func (s *sending) peers() (sess *session.ServerSession, g transfer.GrantID, ackSess *session.ServerSession, ackGrant transfer.GrantID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sess, s.grant, s.ackSess, s.ackGrant
}

func (s *sending) Granted() <-chan struct{} { return s.room.Load().Granted() }
func (s *sending) Done() <-chan struct{}    { return s.room.Load().Done() }
func (s *sending) State() room.State        { return s.room.Load().State() }

func (s *sending) Err() error {
	if c := s.room.Load().Cause(); c != nil {
		return c
	}
	return nil
}

// Buffer implements transfer.Sending.
func (s *sending) Buffer(ctx context.Context, i int) ([][]byte, error) {
	pool, size := s.hub.cfg.Staging, s.open.Chunks[i]
	_, n := kv.PagesFor(pool.PageBytes(), s.open.Chunks[i:i+1])
	for {
		freed := pool.Freed()
		if s.State().Terminal() {
			return nil, s.ended()
		}
		lease, err := pool.Alloc(n, "room "+s.open.Key.String(), s.open.Deadline)
		if err == nil {
			if !s.keepBuffer(i, lease) {
				lease.ReleaseRequest()
				return nil, s.ended()
			}
			return parts(pool, lease.Pages(), size), nil
		}
		if !errors.Is(err, kv.ErrExhausted) {
			return nil, &room.Cause{Code: room.CodeCapacity, Side: room.SideSender, Key: s.open.Key, Detail: "staging memory for a chunk: " + err.Error()}
		}
		select {
		case <-freed:
		case <-s.Done():
			return nil, s.ended()
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (s *sending) ended() error {
	if err := s.Err(); err != nil {
		return err
	}
	return &room.Cause{Code: room.CodeInternal, Side: room.SideSender, Key: s.open.Key, Detail: "the room has already succeeded"}
}

// Send implements transfer.Sending.
func (s *sending) Send(i int) {
	r := s.room.Load()
	lease := s.takeBuffer(i)
	if lease == nil {
		s.Drop(i, &room.Cause{Code: room.CodeInternal, Side: room.SideSender, Key: s.open.Key, Detail: "chunk was sent without a buffer, or twice"})
		return
	}
	if fx := r.Apply(room.Event{Kind: room.EvBegin, Chunk: i}); !fx.Has(room.FxWrite) {
		lease.ReleaseRequest()
		return
	}
	s.mu.Lock() // after EvBegin: the room allows a write only when the grant has been bound
	ss, way := s.ss, s.way
	s.mu.Unlock()
	lease.Grant() // the transfer is the second owner until the write settles
	began := time.Now()
	segs, crc, err := way.segments(s.hub.cfg.Staging, lease, i, s.open.Chunks[i])
	if err != nil { // pages that no plan can be made for: the decode side has named one twice
		s.settle(lease, i, began, err)
		return
	}
	note := chunkNote{Key: s.open.Key, Index: uint32(i), Count: uint32(len(s.open.Chunks)), Bytes: uint32(way.sizes[i]), CRC: crc}
	s.post(ss.out, segs, note.encode(), func(err error) { s.settle(lease, i, began, err) })
}

// maxSegments is how many stores one write gets; every transport can carry as many.
const maxSegments = 8192

// post hands the stores of a chunk over, as several writes if there are many. The last one carries the note and
// leaves when the others are applied, so that the order does not rest on the transport. done is called once,
// after all of them.
func (s *sending) post(out *outQueue, segs []transfer.Segment, note []byte, done func(error)) {
	write := func(segs []transfer.Segment, note []byte, done func(error)) {
		out.push(&queued{s: s, write: transfer.Write{Grant: s.grant, Key: s.open.Key, Segments: segs, Notify: note,
			Done: func(err error) {
				done(err)
				out.wake()
			},
		}})
	}
	var first []transfer.Segment
	n := (len(segs) - 1) / maxSegments * maxSegments
	if n <= 0 {
		write(segs, note, done)
		return
	}
	first, segs = segs[:n], segs[n:]
	all := &tally{left: n / maxSegments}
	for part := range slices.Chunk(first, maxSegments) {
		write(part, nil, func(err error) {
			switch err, last := all.add(err); {
			case !last:
			case err != nil:
				done(err)
			case s.State().Terminal(): // nobody wants it any more
				done(transfer.ErrClosed)
			default:
				write(segs, note, done)
			}
		})
	}
}

// tally waits for several writes.
type tally struct {
	mu   sync.Mutex
	left int
	err  error // the first
}

// add counts one write and tells whether it was the last, and the first error of all.
func (t *tally) add(err error) (first error, last bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.left--
	if t.err == nil {
		t.err = err
	}
	return t.err, t.left == 0
}

// settle ends the write of chunk i: its buffer returns, the room hears of it.
func (s *sending) settle(lease *kv.Lease, i int, began time.Time, err error) {
	lease.ReleaseTransfer(kv.ProofDrained)
	lease.ReleaseRequest()
	ev := room.Event{Kind: room.EvSettle, Chunk: i}
	if err != nil {
		ev.Kind = room.EvSettleError
		ev.Cause = &room.Cause{Code: room.CodeTransferFailed, Side: room.SideSender, Key: s.open.Key, Peer: s.sess.Client().WorkerID,
			Retryable: true, Detail: "chunk write: " + err.Error()}
		switch {
		case errors.Is(err, transfer.ErrPeerLost), errors.Is(err, transfer.ErrClosed):
			ev.Cause.Code = room.CodePeerLost
		case errors.Is(err, transfer.ErrGrant): // this refusal has overtaken the abort that is on its way
			ev.Cause.Code, ev.Cause.Side = room.CodeAborted, room.SideReceiver
			ev.Cause.Detail = "the decode worker ended the room: it has revoked the grant of a chunk's write"
		case errors.Is(err, kv.ErrLayout):
			ev.Cause.Code, ev.Cause.Retryable = room.CodeProtocol, false
		}
	} else {
		s.hub.m.chunk(time.Since(began))
	}
	s.room.Load().Apply(ev)
}

// keepBuffer holds chunk i's staging until Send, Drop or Release; false after Release, which would
// not come again to let go of it.
func (s *sending) keepBuffer(i int, lease *kv.Lease) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.released {
		s.bufs[i] = lease
	}
	return !s.released
}

// takeBuffer takes chunk i's staging out of the room's hands; nil if there is none.
func (s *sending) takeBuffer(i int) *kv.Lease {
	s.mu.Lock()
	defer s.mu.Unlock()
	lease := s.bufs[i]
	s.bufs[i] = nil
	return lease
}

// dropBuffer returns a buffer that no write uses.
func (s *sending) dropBuffer(i int) {
	if lease := s.takeBuffer(i); lease != nil {
		lease.ReleaseRequest()
	}
}

// Drop implements transfer.Sending.
func (s *sending) Drop(i int, c *room.Cause) {
	s.dropBuffer(i)
	s.room.Load().Apply(room.Event{Kind: room.EvDrop, Chunk: i, Cause: c})
}

// Cancel implements transfer.Sending.
func (s *sending) Cancel(c *room.Cause) {
	s.room.Load().Apply(room.Event{Kind: room.EvCancel, Cause: c})
}

// Release implements transfer.Sending.
func (s *sending) Release() {
	r := s.room.Load()
	r.Apply(room.Event{Kind: room.EvRelease})
	s.mu.Lock()
	ss := s.ss
	s.released = true
	s.mu.Unlock()
	if ss != nil {
		ss.out.purge(s)
	}
	// What is not in a write now never will be: the room is terminal.
	for i := range s.open.Chunks {
		s.dropBuffer(i)
	}
}

// forget removes the room from its session's index; perhaps under the room's lock, perhaps twice.
func (s *sending) forget() {
	h := s.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ss != nil && s.ss.rooms[s.open.Key] == s {
		delete(s.ss.rooms, s.open.Key)
	}
}
