package model

import (
	"fmt"

	"github.com/baton-pd/baton/internal/room"
)

// Invariant is one of the nine of the design. The liveness half of Ends and Progress is the
// explorer's: no state that is stuck, from which the end is out of reach, or fairly circled.
type Invariant string

const (
	Ends     Invariant = "1 ends"     // every room reaches a terminal state
	Sticks   Invariant = "2 sticks"   // a terminal state and its first cause never change
	Tells    Invariant = "3 tells"    // an end is told, once, with its cause
	Memory   Invariant = "4 memory"   // no store outside a live grant, no reuse before drained or fenced
	Returns  Invariant = "5 returns"  // in the end everything is as in the beginning
	Identity Invariant = "6 identity" // what is of another life changes nothing and is counted
	Truth    Invariant = "7 truth"    // delivered and complete mean the right bytes
	Progress Invariant = "8 progress" // nothing waits in a circle, every question is answered
	Robust   Invariant = "9 robust"   // every event is expected in every state
)

// Invariants are all of them, in order.
var Invariants = []Invariant{Ends, Sticks, Tells, Memory, Returns, Identity, Truth, Progress, Robust}

// BrokenError says which invariant was broken, and how.
type BrokenError struct {
	Invariant Invariant
	What      string
}

// Error names the invariant and how it was broken.
func (e *BrokenError) Error() string { return fmt.Sprintf("invariant %s: %s", e.Invariant, e.What) }

func broke(inv Invariant, format string, args ...any) error {
	return &BrokenError{inv, fmt.Sprintf(format, args...)}
}

// breaks keeps the first broken invariant of a step.
func (r *run) breaks(inv Invariant, format string, args ...any) {
	if r.err == nil {
		r.err = broke(inv, format, args...)
	}
}

// judge keeps the first broken invariant of a step.
func (r *run) judge(i uint8, side string, err error) {
	if b, ok := err.(*BrokenError); ok && r.err == nil {
		r.err = &BrokenError{b.Invariant, r.w.name(i) + ", " + side + ": " + b.What}
	}
}

// checkSender judges one step of a sender by what the world knows and the machine may not.
func (r *run) checkSender(i uint8, e room.Event, was, now room.Sender, fx room.Effects) {
	s := &r.send[i]
	r.judge(i, "prefill", senderStep(was, now, e, fx))
	unsettled := 0
	for _, p := range s.w {
		if p.unsettled() {
			unsettled++
		}
	}
	ended := !was.State().Terminal() && now.State() == room.StateFailed
	switch {
	case fx.Has(room.FxSendAck) && unsettled > 0:
		r.breaks(Memory, "%s: acked while %d writes are outstanding", r.w.name(i), unsettled)
	case fx.Has(room.FxForget) && unsettled > 0:
		r.breaks(Returns, "%s: forgotten at prefill while %d writes are outstanding", r.w.name(i), unsettled)
	case fx.Has(room.FxForget) && !s.released:
		r.breaks(Returns, "%s: forgotten at prefill while its owner holds it", r.w.name(i))
	case now.State() == room.StateSuccess && !r.allApplied(i):
		r.breaks(Truth, "%s: success at prefill, but not every chunk is applied", r.w.name(i))
	case ended && s.sess != 0 && e.Kind != room.EvAbort && e.Kind != room.EvPeerLost && !fx.Has(room.FxSendFailed):
		r.breaks(Tells, "%s: failed at prefill by %v and decode is not told", r.w.name(i), e.Kind)
	case e.Kind == room.EvAbort && unsettled == 0 && !fx.Has(room.FxSendAck):
		r.breaks(Tells, "%s: nothing is outstanding, and the abort is not acked", r.w.name(i))
	case s.ackSess != 0 && unsettled == 0 && (e.Kind == room.EvSettle || e.Kind == room.EvSettleError) && r.owed(i) && !fx.Has(room.FxSendAck):
		r.breaks(Tells, "%s: the last write is over, and the abort is not acked", r.w.name(i))
	}
}

// owed: an abort still waits for its ack, and somebody is left to be sent it.
func (r *run) owed(i uint8) bool {
	s := &r.send[i]
	return s.ackSess != 0 && r.acked>>s.ackGrant&1 == 0 && !r.sess[s.ackSess-1].downS
}

func (r *run) allApplied(i uint8) bool {
	for _, p := range r.send[i].w[:r.w.sc.Chunks] {
		if p != applied {
			return false
		}
	}
	return true
}

// checkReceiver is checkSender for a receiver.
func (r *run) checkReceiver(i uint8, e room.Event, was, now room.Receiver, fx room.Effects) {
	y := &r.recv[i]
	r.judge(i, "decode", receiverStep(was, now, e, fx))

	ended := !was.State().Terminal() && now.State() == room.StateFailed
	switch {
	case fx.Has(room.FxLanded) && !r.w.right(&r.State, i, e.Chunk):
		r.breaks(Truth, "%s: chunk %d is delivered, but its page holds other bytes", r.w.name(i), e.Chunk)
	case fx.Has(room.FxSendGrant) && (!y.request || y.granted):
		r.breaks(Memory, "%s: a grant without pages, or a second one", r.w.name(i))
	case fx.Has(room.FxFreeTransfer) && !y.transfer:
		r.breaks(Memory, "%s: the transfer lets go of pages that it does not hold", r.w.name(i))
	case fx.Has(room.FxForget) && y.transfer && !fx.Has(room.FxFreeTransfer) && !r.freeing(i):
		r.breaks(Returns, "%s: forgotten at decode while the transfer holds pages", r.w.name(i))
	case fx.Has(room.FxForget) && !y.released:
		r.breaks(Returns, "%s: forgotten at decode while its owner holds it", r.w.name(i))
	case ended && y.sess != 0 && e.Kind != room.EvPeerLost && e.Kind != room.EvFenced && !fx.Has(room.FxSendAbort):
		r.breaks(Tells, "%s: failed at decode by %v and prefill is not told", r.w.name(i), e.Kind)
	case now.State().Terminal() && !was.State().Terminal() && y.granted && !fx.Has(room.FxRevoke):
		r.breaks(Memory, "%s: the grant outlives its room", r.w.name(i))
	}
}

// freeing: the actions goroutine has the release still to do.
func (r *run) freeing(i uint8) bool {
	y := &r.recv[i]
	for _, a := range y.acts[:y.nacts] {
		if a&actFree != 0 {
			return true
		}
	}
	return false
}

// right: chunk c's page holds exactly the bytes of this request's chunk.
func (w *World) right(s *State, i uint8, c int) bool {
	if c < 0 || c >= w.sc.Chunks {
		return false
	}
	y := &s.recv[i]
	pg := s.page[y.pages[c]]
	return y.request && pg.owner == i+1 && pg.content == contentOf(w.prompt(i), uint8(c), true)
}

// checkStore: a byte is about to be stored for chunk c of sender i.
func (r *run) checkStore(i, c uint8) {
	s := &r.send[i]
	y := &r.recv[s.grant-1]
	pg := r.page[y.pages[c]]
	switch {
	case pg.owner == 0:
		r.breaks(Memory, "%s: a store into a free page", r.w.name(i))
	case pg.owner != s.grant:
		r.breaks(Memory, "%s: a store into a page that belongs to %s by now", r.w.name(i), r.w.name(pg.owner-1))
	case !y.transfer:
		r.breaks(Memory, "%s: a store into a page that the transfer has let go of", r.w.name(i))
	case y.m.State() == room.StateSuccess:
		r.breaks(Memory, "%s: a store into the pages of a room that is complete", r.w.name(i))
	}
}

// checkFree: the transfer is about to let go of the pages of life i.
func (r *run) checkFree(i uint8) {
	if r.recv[i].live {
		r.breaks(Memory, "%s: pages are let go of while their grant is live", r.w.name(i))
	}
	if r.w.sc.Transport == TransportFence {
		return // no store is possible now
	}
	for k := range r.w.lives {
		s := &r.send[k]
		if s.grant != i+1 || r.sess[s.sess-1].deadR {
			continue
		}
		for c, p := range s.w {
			if p == inside1 || p == inside2 || r.w.sc.Transport == TransportWild && p.storing() && p != stored {
				r.breaks(Memory, "%s: pages are let go of, neither drained nor fenced: the write of chunk %d is under way", r.w.name(i), c)
			}
		}
	}
}

// checkAck: the prefill side is about to say that nothing is outstanding under grant.
func (r *run) checkAck(grant uint8) {
	if grant == 0 {
		return
	}
	for k := range r.w.lives {
		for c, p := range r.send[k].w {
			if s := &r.send[k]; s.at == open && s.grant == grant && p.unsettled() {
				r.breaks(Memory, "ack of grant %d while the write of chunk %d is outstanding", grant, c)
			}
		}
	}
}

// checkBegin: the room allowed a write.
func (r *run) checkBegin(i, c uint8) {
	s := &r.send[i]
	if s.sess == 0 {
		r.breaks(Memory, "%s: chunk %d begins without a grant", r.w.name(i), c)
		s.sess, s.grant = 1, 1 // the search ends here
		return
	}
	if r.acked>>s.grant&1 != 0 {
		r.breaks(Memory, "%s: chunk %d begins after the ack of its grant", r.w.name(i), c)
	}
}

// checkMessage: a message changes only the room that it is about, and only in its session.
func (r *run) checkMessage(m message, before *machines) {
	for i := range r.w.lives {
		sess, grant := before.sess[i], before.grant[i]
		if r.send[i].m != before.send[i] && (sess != 0 && sess != m.sess || grant != 0 && m.about != 0 && grant != m.about || !r.w.hasKey(i, m.key)) {
			r.breaks(Identity, "%s of another life changes %s at prefill", r.w.showMessage(m), r.w.name(i))
		}
		if r.recv[i].m != before.recv[i] && (r.recv[i].sess != m.sess || m.about != 0 && m.about != i+1 || !r.w.hasKey(i, m.key)) {
			r.breaks(Identity, "%s of another life changes %s at decode", r.w.showMessage(m), r.w.name(i))
		}
	}
}

// Check implements [explore.System].
func (w *World) Check(s State) error {
	for i := range w.lives {
		x, y := &s.send[i], &s.recv[i]
		if err := w.probe(x.m, y.m); err != nil {
			return err
		}
		if err := w.checkLease(&s, i); err != nil {
			return err
		}
		if (x.at == forgotten) != (x.m.Node().Drain == room.DrainGone) && x.at != died {
			return broke(Returns, "%s: prefill's room is %v and its shell %s", w.name(i), x.m.Node(), showSide(x.at, x.m.Node(), nil))
		}
		if y.at == forgotten && y.m.Node().Drain != room.DrainGone {
			return broke(Returns, "%s: decode's room is %v and forgotten", w.name(i), y.m.Node())
		}
	}
	if !w.Done(s) {
		return nil
	}
	return w.checkBaseline(&s)
}

// checkLease: pages belong to whom they are leased, and a complete room's stay as they were.
func (w *World) checkLease(s *State, i uint8) error {
	y := &s.recv[i]
	for c, id := range y.pages[:w.sc.Chunks] {
		if (y.request || y.transfer) && s.page[id].owner != i+1 {
			return broke(Memory, "%s: page %d is held and belongs to somebody else", w.name(i), id)
		}
		if y.request && y.m.Landed() > c && y.m.State() != room.StateFailed && !w.right(s, i, c) {
			return broke(Truth, "%s: the bytes of chunk %d changed after they were delivered", w.name(i), c)
		}
	}
	return nil
}

// checkBaseline: everything has ended, so everything is as in the beginning.
func (w *World) checkBaseline(s *State) error {
	for id, p := range s.page[:w.sc.Pages] {
		if p.owner != 0 {
			return broke(Returns, "all rooms have ended, and page %d is still held by %s", id, w.name(p.owner-1))
		}
	}
	for i := range w.lives {
		x, y := &s.send[i], &s.recv[i]
		switch {
		case x.indexed:
			return broke(Returns, "%s is still in its session's index at prefill", w.name(i))
		case y.byGrant || y.bySess:
			return broke(Returns, "%s is still in an index at decode", w.name(i))
		case s.parked[i].grant != 0:
			return broke(Returns, "a grant of key %d is still parked", i)
		}
		for _, m := range []struct {
			at where
			n  room.Node
			c  *room.Cause
		}{{x.at, x.m.Node(), x.m.Cause()}, {y.at, y.m.Node(), y.m.Cause()}} {
			if m.at == forgotten && m.n.State == room.StateFailed && (m.c == nil || m.c.Code == "") {
				return broke(Sticks, "%s ended without success and without a cause of its own", w.name(i))
			}
		}
	}
	return nil
}
