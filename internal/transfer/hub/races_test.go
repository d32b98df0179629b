package hub_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/hub"
)

// eventually polls until ok.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick, limit := time.NewTicker(time.Millisecond), time.After(patience)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// tap hears the grants of a prefill side before its hub does.
type tap struct {
	*hub.Senders
	grants chan tapped
}

type tapped struct {
	sess  *session.ServerSession
	grant session.Grant
}

func (p tap) Grant(s *session.ServerSession, g session.Grant) {
	p.Senders.Grant(s, g)
	p.grants <- tapped{s, g}
}

// tapped makes a world whose first hand-over is through, and gives the grant it had.
func newTapped(t *testing.T, o options) (*world, tapped) {
	grants := make(chan tapped, 8)
	o.handler = func(h *hub.Senders) session.ServerHandler { return tap{h, grants} }
	w := newWorld(t, o)
	s, r := w.send(1, 1), w.receive(1, 1)
	g := await(t, "grant", grants)
	w.chunk(s, 1, 0)
	await(t, "success", r.Done())
	await(t, "success", s.Done())
	s.Release()
	r.Release()
	return w, g
}

// A grant that finds a room which is gone a moment later must not keep it in the session's index.
func TestGrantForForgottenRoom(t *testing.T) {
	w, g := newTapped(t, options{})
	s := w.send(2, 1)
	s.Cancel(&room.Cause{Code: room.CodeClientGone, Detail: "gone"})
	s.Release()
	g.grant.Key, g.grant.ID, g.grant.Digest = room.Key{Room: 2}, g.grant.ID+1, 2
	w.senders.Deliver(s, g.sess, g.grant)
	if rooms, parked := w.senders.Indexed(); rooms+parked != 0 {
		t.Fatalf("the index holds %d rooms and %d parked grants of rooms that are gone", rooms, parked)
	}
}

// A second grant for a room that has one is refused; the room and its owner are not hurt.
func TestForeignGrantDoesNotHurtTheRoom(t *testing.T) {
	grants := make(chan tapped, 8)
	w := newWorld(t, options{handler: func(h *hub.Senders) session.ServerHandler { return tap{h, grants} }})
	s, r := w.send(3, 2), w.receive(3, 2)
	await(t, "grant", s.Granted())
	g := await(t, "grant", grants)
	other, _ := w.stranger() // to the room's own worker the refusals would be the end of it
	if err := other.SendGrant(session.Grant{Key: room.Key{Room: 4}, ID: 1, Pages: []uint32{0}, PageBytes: pageBytes, Chunks: []int{1}}); err != nil {
		t.Fatal(err)
	}
	g.sess = await(t, "the other's grant", grants).sess
	for i, mangle := range []func(*session.Grant){
		func(g *session.Grant) { g.Digest = 99 },    // another prompt
		func(g *session.Grant) { g.Pages = nil },    // not even well-formed
		func(*session.Grant) {},                     // the same prompt
		func(g *session.Grant) { g.Chunks = nil },   // another chunk size
		func(g *session.Grant) { g.PageBytes = 17 }, // other pages
	} {
		f := g.grant
		f.Key, f.ID = room.Key{Room: 3}, transfer.GrantID(1000+i)
		mangle(&f)
		w.senders.Deliver(s, g.sess, f)
		if st := s.State(); st.Terminal() {
			t.Fatalf("grant %d ended the room of another: %v", i, s.Err())
		}
	}
	s.Release()
	await(t, "end", r.Done())
	r.Release()
}

// A parked grant that comes again while the park is full still expires.
func TestFullParkForgetsNoTimer(t *testing.T) {
	t.Parallel()
	w, g := newTapped(t, options{bounds: 2 * time.Second})
	park := func(id uint64) {
		f := g.grant
		f.Key = room.Key{Room: 1000 + id}
		w.senders.Grant(g.sess, f)
	}
	for i := range hub.MaxParked {
		park(uint64(i))
	}
	if _, parked := w.senders.Indexed(); parked != hub.MaxParked {
		t.Fatalf("%d grants are parked", parked)
	}
	park(0)                  // again
	park(hub.MaxParked)      // one too many: refused
	park(hub.MaxParked + 10) // and another
	eventually(t, "an empty park", func() bool { _, parked := w.senders.Indexed(); return parked == 0 })
}

// What kept a session from coming up is in the error, also when the deadline is first.
func TestDeadlineNamesWhyThereIsNoSession(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	r, err := w.receivers.Open(transfer.OpenReceiver{Key: room.Key{Room: 5}, Addr: "127.0.0.1:1",
		Deadline: time.Now().Add(2 * time.Second), Chunks: chunks(1)})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	await(t, "end", r.Done())
	var c *room.Cause
	if !errors.As(r.Err(), &c) || c.Code != room.CodeDeadline || !strings.Contains(c.Detail, "refused") {
		t.Fatalf("got %v; want a deadline that says that the connection was refused", r.Err())
	}
}

// Nor does one hide that it was pages that were waited for.
func TestDeadlineNamesThePages(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{pages: 8})
	first := w.receive(6, 2) // takes all of them
	await(t, "grant", first.Granted())
	r, err := w.receivers.Open(transfer.OpenReceiver{Key: room.Key{Room: 7}, Addr: w.addr,
		Deadline: time.Now().Add(2 * time.Second), Chunks: chunks(1)})
	if err != nil {
		t.Fatal(err)
	}
	await(t, "end", r.Done())
	var c *room.Cause
	if !errors.As(r.Err(), &c) || c.Code != room.CodeDeadline || !strings.Contains(c.Detail, "4 landing pages") || !strings.Contains(c.Detail, "0 of 8 are free") {
		t.Fatalf("got %v; want a deadline that says how many pages were waited for", r.Err())
	}
	r.Release()
	first.Release()
	w.drained()
}

// A grant that cannot be sent fails the room with that reason, not as a lost peer.
func TestGrantThatCannotBeSent(t *testing.T) {
	w := newWorld(t, options{})
	r, err := w.receivers.Open(transfer.OpenReceiver{Key: room.Key{Room: 1 << 63}, Addr: w.addr,
		Deadline: time.Now().Add(time.Minute), Chunks: chunks(1)})
	if err != nil {
		t.Fatal(err)
	}
	await(t, "end", r.Done())
	failed(t, "receiver", r.State(), r.Err(), room.CodeInvalid)
	r.Release()
	if err := w.receivers.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// held is a prefill side that is slow to hear of aborts.
type held struct {
	*hub.Senders
	release chan struct{}
}

func (h held) Abort(s *session.ServerSession, key room.Key, g transfer.GrantID, c *room.Cause) {
	<-h.release
	h.Senders.Abort(s, key, g, c)
}

// A write that finds its grant revoked has overtaken the abort: that is no failure of the transfer.
func TestRevokeOvertakesAbort(t *testing.T) {
	release := make(chan struct{})
	w := newWorld(t, options{handler: func(h *hub.Senders) session.ServerHandler { return held{h, release} }})
	s, r := w.send(1, 2), w.receive(1, 2)
	await(t, "grant", s.Granted())
	w.chunk(s, 1, 0)
	await(t, "chunk", r.Landed())
	r.Cancel(&room.Cause{Code: room.CodeClientGone, Detail: "gone"})
	w.receivers.Flush() // revoked
	w.chunk(s, 1, 1)
	await(t, "end", s.Done())
	failed(t, "sender", s.State(), s.Err(), room.CodeAborted)
	if !strings.Contains(s.Err().Error(), "revoked") {
		t.Errorf("the error does not say what happened: %v", s.Err())
	}
	close(release)
	s.Release()
	r.Release()
	w.drained()
}

// TestWordsOfAnotherLife: a failure and an abort mean one grant. When a room id comes again while the other side
// still holds its former life, the words about one life do not end the other. `baton explore` found it
// (world reuse_early).
func TestWordsOfAnotherLife(t *testing.T) {
	grants := make(chan tapped, 8)
	w := newWorld(t, options{handler: func(h *hub.Senders) session.ServerHandler { return tap{h, grants} }})
	s, r := w.send(5, 2), w.receive(5, 2)
	await(t, "grant", s.Granted())
	g := await(t, "grant", grants)
	key := g.grant.Key
	w.chunk(s, 5, 0)
	await(t, "first chunk", r.Landed())

	other := g.grant.ID + 1
	w.receivers.Failed(g.sess.ID(), key, other, &room.Cause{Code: room.CodeAborted})
	w.senders.Abort(g.sess, key, other, nil) // acked, and nobody waits for the ack
	w.senders.Abort(g.sess, key, 0, nil)     // of a life that never had a grant
	if s.State().Terminal() || r.State().Terminal() {
		t.Fatalf("words about another life ended the room: %v, %v", s.Err(), r.Err())
	}
	w.chunk(s, 5, 1)
	await(t, "end of the receiver", r.Done())
	await(t, "end of the sender", s.Done())
	if s.Err() != nil || r.Err() != nil {
		t.Errorf("sender %v, receiver %v", s.Err(), r.Err())
	}
	s.Release()
	r.Release()

	s, r = w.send(6, 1), w.receive(6, 1)
	await(t, "grant", s.Granted())
	g = await(t, "grant", grants)
	w.receivers.Failed(g.sess.ID(), g.grant.Key, g.grant.ID, &room.Cause{Code: room.CodeAborted})
	failed(t, "receiver", r.State(), r.Err(), room.CodeAborted)
	await(t, "abort at the sender", s.Done())
	failed(t, "sender", s.State(), s.Err(), room.CodeAborted)
	s.Release()
	r.Release()
	w.drained()
}
