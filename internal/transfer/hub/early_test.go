package hub_test

import (
	"testing"

	"github.com/baton-pd/baton/internal/room"
)

// A request that ends before there is a session: the prefill side hears of it once there is one,
// and the session, which may live for months, does not keep the room.
func TestRequestEndsBeforeItsSession(t *testing.T) {
	w := newWorld(t, options{rules: "dial nth=1 stall until=go"})
	r := w.receive(1, 1)
	await(t, "dial", w.rules.Waiting("go"))
	r.Cancel(&room.Cause{Code: room.CodeClientGone, Detail: "test"})
	r.Release()
	s := w.send(1, 1)
	w.rules.Release("go")
	await(t, "abort at the sender", s.Done())
	failed(t, "sender", s.State(), s.Err(), room.CodeAborted)
	s.Release()
	w.drained()
	if rooms, grants := w.receivers.Indexed(); rooms+grants != 0 {
		t.Errorf("the hub still knows %d rooms and %d grants", rooms, grants)
	}
}

// TestSendBeforeItsGrant: a chunk that is sent while the grant is on its way ends the room with a
// cause, or is written if the grant was there; it never meets half a grant.
func TestSendBeforeItsGrant(t *testing.T) {
	w := newWorld(t, options{pages: 256})
	for id := uint64(1); id <= 200; id++ {
		r, s := w.receive(id, 1), w.send(id, 1)
		w.chunk(s, id, 0)
		await(t, "end of the sender", s.Done())
		await(t, "end of the receiver", r.Done())
		if (s.Err() == nil) != (r.Err() == nil) {
			t.Errorf("room %d: sender %v, receiver %v", id, s.Err(), r.Err())
		}
		r.Release()
		s.Release()
	}
}
