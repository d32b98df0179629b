package hub

import (
	"context"
	"errors"
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
	bufs     []*kv.Lease // staging of chunk i while the scheduler may store there; nil before and after
	begun    []*outgoing // in order: chunks that have not been settled
	last     *outgoing   // that was begun last; the owner's goroutine only
	ended    time.Time   // when the room did: nothing is handed over any more; zero before
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

// expectAck notes who wants the ack of grant g (0: none was sent); false if the room has another grant, so
// that the abort is about another life of it.
func (s *sending) expectAck(sess *session.ServerSession, g transfer.GrantID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sess != nil && (s.sess != sess || s.grant != g) {
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

func (s *sending) Ended() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
}

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
			return nil, s.endErr()
		}
		lease, err := pool.Alloc(n, "room "+s.open.Key.String(), s.open.Deadline)
		if err == nil {
			if !s.keepBuffer(i, lease) {
				lease.ReleaseRequest()
				return nil, s.endErr()
			}
			return parts(pool, lease.Pages(), size), nil
		}
		if !errors.Is(err, kv.ErrExhausted) {
			return nil, &room.Cause{Code: room.CodeCapacity, Side: room.SideSender, Key: s.open.Key, Detail: "staging memory for a chunk: " + err.Error()}
		}
		select {
		case <-freed:
		case <-s.Done():
			return nil, s.endErr()
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (s *sending) endErr() error {
	if err := s.Err(); err != nil {
		return err
	}
	return &room.Cause{Code: room.CodeInternal, Side: room.SideSender, Key: s.open.Key, Detail: "the room has already succeeded"}
}

// Send implements transfer.Sending.
func (s *sending) Send(i int) {
	if c := s.begin(i); c != nil {
		s.hand(c, c.rest, true)
	} else {
		s.dropBuffer(i)
	}
}

// SendPart implements transfer.Sending.
func (s *sending) SendPart(i int, bytes []transfer.Span, last bool) {
	if c := s.begin(i); c != nil {
		s.hand(c, s.part(c, bytes, last), last)
	} else if last {
		s.dropBuffer(i)
	}
}

// settle ends chunk c: its buffer returns, the room hears of it.
func (s *sending) settle(c *outgoing, err error) {
	s.letGo(c)
	if err == nil {
		s.hub.m.chunk(time.Since(c.began))
	}
	s.room.Load().Apply(s.settled(c, err))
}

// letGo ends the transfer's hold on c's staging. The request's ends with it once c is whole; before, the engine
// may be storing there, and the owner lets go in Release.
func (s *sending) letGo(c *outgoing) {
	s.mu.Lock()
	whole := c.whole
	s.mu.Unlock()
	c.lease.ReleaseTransfer(kv.ProofDrained)
	if whole {
		c.lease.ReleaseRequest()
	}
}

// settled is the event of a chunk that has no write outstanding any more.
func (s *sending) settled(c *outgoing, err error) room.Event {
	ev := room.Event{Kind: room.EvSettle, Chunk: c.chunk}
	if err == nil {
		return ev
	}
	ev.Kind = room.EvSettleError
	ev.Cause = &room.Cause{Code: room.CodeTransferFailed, Side: room.SideSender, Key: s.open.Key, Peer: s.peer(),
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
	return ev
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
