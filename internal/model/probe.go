package model

import (
	"math/bits"

	"github.com/baton-pd/baton/internal/room"
)

// This file judges single steps of the machines by what must hold of every step, wherever it
// comes from: checks.go asks it about the steps that happen, and probe about those that
// could, in every machine state that is reached.

// ending are the events that end a live room, on either side.
func ending(k room.EventKind) bool {
	switch k {
	case room.EvCancel, room.EvDeadline, room.EvPeerLost, room.EvRelease, room.EvAbort, room.EvDrop, room.EvRemoteFailed, room.EvSettleError:
		return true
	default:
		return false
	}
}

// wantCode is the truthful code of a room that ends by k without a cause of the event's own; "" for
// those that the machine itself must find.
func wantCode(k room.EventKind) room.Code {
	switch k {
	case room.EvDeadline:
		return room.CodeDeadline
	case room.EvPeerLost, room.EvFenced:
		return room.CodePeerLost
	case room.EvDrop:
		return room.CodeChunkDropped
	case room.EvSettleError:
		return room.CodeTransferFailed
	case room.EvBegin:
		return room.CodeInternal
	case room.EvLanded, room.EvAck:
		return room.CodeProtocol
	default:
		return room.CodeAborted
	}
}

// view is what both machines show.
type view struct {
	node  room.Node
	cause *room.Cause
}

// anyStep is what holds of a step of either machine. changed: the machine is not what it was.
func anyStep(was, now view, changed bool, e room.Event, fx room.Effects) error {
	before, after := was.node.State, now.node.State
	ends := !before.Terminal() && after.Terminal()
	switch {
	case before.Terminal() && (after != before || now.cause != was.cause):
		return broke(Sticks, "%v changes a terminal room from %v to %v, or its cause", e.Kind, was.node, now.node)
	case after.Terminal() == (now.node.Drain == room.DrainLive):
		return broke(Sticks, "%v leads to %v, which no room can be", e.Kind, now.node)
	case before.Terminal() && drained(was.node.Drain) && !drained(now.node.Drain):
		return broke(Memory, "%v makes a drained room wait again: %v to %v", e.Kind, was.node, now.node)
	case fx.Has(room.FxTerminal) != ends:
		return broke(Tells, "%v from %v to %v has effects %v: the end is told once, when it comes", e.Kind, was.node, now.node, fx)
	case ends && after == room.StateFailed && (now.cause == nil || now.cause.Code == ""):
		return broke(Tells, "%v fails the room without a cause", e.Kind)
	case ends && after == room.StateFailed && e.Cause == nil && now.cause.Code != wantCode(e.Kind):
		return broke(Tells, "%v fails the room with the cause %s; the truth is %s", e.Kind, now.cause.Code, wantCode(e.Kind))
	case after != room.StateFailed && now.cause != nil:
		return broke(Tells, "%v gives a cause to a room that is %v", e.Kind, now.node)
	case (now.node.Drain == room.DrainGone && was.node.Drain != room.DrainGone) != fx.Has(room.FxForget):
		return broke(Returns, "%v from %v to %v has effects %v: a room is forgotten once, when nothing is left", e.Kind, was.node, now.node, fx)
	case goesOn(was.node.Drain) && !goesOn(now.node.Drain), was.node.Drain == room.DrainGone && now.node.Drain != room.DrainGone:
		return broke(Returns, "%v leads from %v back to %v", e.Kind, was.node, now.node)
	case e.Kind != room.EvRelease && goesOn(now.node.Drain) && !goesOn(was.node.Drain):
		return broke(Returns, "%v leads from %v to %v, as if the owner had let go", e.Kind, was.node, now.node)
	case e.Kind == room.EvRelease && !goesOn(now.node.Drain):
		return broke(Returns, "the owner let go in %v, and the room still waits for it in %v", was.node, now.node)
	}
	return counted(was, changed, e, fx)
}

// counted: what changes nothing and does nothing says so, what says so changes nothing, and
// nothing is counted as two things. A failure of a room that has failed is a late cause.
func counted(was view, changed bool, e room.Event, fx room.Effects) error {
	expected := (e.Kind == room.EvFenced || e.Kind == room.EvAck || e.Kind == room.EvAbort) && was.node.State.Terminal()
	names := bits.OnesCount32(uint32(fx & (room.FxStale | room.FxDuplicate | room.FxLateCause)))
	failed := was.node.State == room.StateFailed
	late := failed && was.node.Drain != room.DrainGone && ending(e.Kind)
	answer := e.Kind == room.EvBegin || e.Kind == room.EvGranted
	switch {
	case changed && fx&(room.FxStale|room.FxDuplicate) != 0:
		return broke(Identity, "%v in %v changes the room and is called %v", e.Kind, was.node, fx)
	case fx.Has(room.FxLateCause) && !late:
		return broke(Identity, "%v in %v is called a late cause", e.Kind, was.node)
	case names > 1:
		return broke(Tells, "%v in %v is counted as %v: once is enough", e.Kind, was.node, fx)
	case fx.Has(room.FxSkip) && !answer:
		return broke(Progress, "%v in %v is answered with skip, and asked nothing", e.Kind, was.node)
	case !changed && fx == 0 && !expected:
		return broke(Identity, "%v in %v changes nothing and is not counted", e.Kind, was.node)
	case e.Kind == room.EvRelease && goesOn(was.node.Drain) && !fx.Has(room.FxDuplicate):
		return broke(Identity, "a second release in %v is not called one", was.node)
	}
	return nil
}

// drained: nothing can be stored any more.
func drained(d room.Drain) bool { return d == room.DrainDone || d == room.DrainGone }

// goesOn: the room does not wait for its owner.
func goesOn(d room.Drain) bool {
	return d == room.DrainGone || d == room.DrainOrphan || d == room.DrainOrphanOwing
}

// senderStep is what holds of every step of a sender.
func senderStep(was, now room.Sender, e room.Event, fx room.Effects) error {
	if err := anyStep(view{was.Node(), was.Cause()}, view{now.Node(), now.Cause()}, was != now, e, fx); err != nil {
		return err
	}
	begun, out := now.Begun()-was.Begun(), now.Outstanding()-was.Outstanding()
	n := now.Node()
	write := e.Kind == room.EvBegin && fx.Has(room.FxWrite)
	switch {
	case fx&(room.FxSendGrant|room.FxSendAbort|room.FxRevoke|room.FxFreeTransfer|room.FxLanded) != 0:
		return broke(Robust, "%v at prefill has effects of the decode side: %v", e.Kind, fx)
	case foreignTo(room.SideSender, e.Kind) && (was != now || fx != room.FxStale):
		return broke(Robust, "%v, which is not an event of this side, changes %v or has effects %v", e.Kind, was.Node(), fx)
	case ending(e.Kind) && e.Kind != room.EvSettleError && !foreignTo(room.SideSender, e.Kind) && !n.State.Terminal():
		return broke(Ends, "%v leaves the room %v", e.Kind, n)
	case e.Kind == room.EvBegin && fx.Has(room.FxWrite) == fx.Has(room.FxSkip):
		return broke(Progress, "begin in %v is answered by %v: write or skip", was.Node(), fx)
	case fx.Has(room.FxWrite) && (was.State().Terminal() || was.State() == room.StateBootstrapping || e.Chunk != was.Begun() || e.Chunk >= was.Chunks()):
		return broke(Memory, "chunk %d may be written in %v after %d others of %d", e.Chunk, was.Node(), was.Begun(), was.Chunks())
	case write != (begun == 1) || begun != 0 && begun != 1:
		return broke(Memory, "%v with effects %v counts %d writes as begun", e.Kind, fx, begun)
	case fx.Has(room.FxWrite) && !write:
		return broke(Memory, "%v allows a write", e.Kind)
	case now.Outstanding() < 0 || now.Begun() > now.Chunks():
		return broke(Memory, "%v: %d of %d writes begun, %d outstanding", e.Kind, now.Begun(), now.Chunks(), now.Outstanding())
	case out < 0 && e.Kind != room.EvSettle && e.Kind != room.EvSettleError || out < -1:
		return broke(Memory, "%v settles %d writes", e.Kind, -out)
	}
	if err := senderDrain(was, now, e, fx); err != nil {
		return err
	}
	return senderTold(was, now, e, fx)
}

// senderDrain is what holds of acks, settles and the drain of a sender.
func senderDrain(was, now room.Sender, e room.Event, fx room.Effects) error {
	n := now.Node()
	settles := e.Kind == room.EvSettle || e.Kind == room.EvSettleError
	unknown := settles && (e.Chunk < 0 || e.Chunk >= was.Begun() || was.Outstanding() == 0)
	switch {
	case unknown && (was != now || fx != room.FxStale):
		return broke(Identity, "%v of chunk %d, which is not outstanding, changes %v or has effects %v", e.Kind, e.Chunk, was.Node(), fx)
	case settles && !unknown && now.Outstanding() != was.Outstanding()-1:
		return broke(Memory, "%v of chunk %d: %d writes were outstanding, now %d", e.Kind, e.Chunk, was.Outstanding(), now.Outstanding())
	case settles && !unknown && e.Kind == room.EvSettleError && !n.State.Terminal():
		return broke(Ends, "a failed write leaves the room %v", n)
	case fx.Has(room.FxSendAck) && now.Outstanding() > 0:
		return broke(Memory, "%v acks while %d writes are outstanding", e.Kind, now.Outstanding())
	case n.State.Terminal() && drained(n.Drain) && now.Outstanding() > 0:
		return broke(Memory, "%v leads to %v with %d writes outstanding", e.Kind, n, now.Outstanding())
	case n.State == room.StateFailed && !drained(n.Drain) && now.Outstanding() == 0:
		return broke(Returns, "%v leads to %v, which waits for writes, with none outstanding", e.Kind, n)
	case n.State == room.StateSuccess && (now.Begun() != now.Chunks() || now.Outstanding() > 0):
		return broke(Truth, "%v: success with %d of %d chunks begun, %d outstanding", e.Kind, now.Begun(), now.Chunks(), now.Outstanding())
	case e.Kind == room.EvSettle && !was.State().Terminal() && now.Begun() == now.Chunks() && now.Outstanding() == 0 && n.State != room.StateSuccess:
		return broke(Ends, "every chunk is applied, and the room is %v", n)
	}
	return nil
}

// senderTold is what holds of what a sender says to the other side and to its owner.
func senderTold(was, now room.Sender, e room.Event, fx room.Effects) error {
	n := now.Node()
	ends := !was.State().Terminal() && n.State.Terminal()
	waits := owes(was.Node().Drain)
	abort := e.Kind == room.EvAbort
	known := e.Kind == room.EvDrop || e.Kind == room.EvCancel || e.Kind == room.EvDeadline || e.Kind == room.EvPeerLost
	switch {
	case fx.Has(room.FxGranted) != (was.State() == room.StateBootstrapping && n.State == room.StateWaitingForInput):
		return broke(Tells, "%v from %v to %v has effects %v: chunks may be sent from the grant on", e.Kind, was.Node(), n, fx)
	case ends && fx.Has(room.FxSendFailed) != (n.State == room.StateFailed && !abort && e.Kind != room.EvPeerLost):
		return broke(Tells, "%v ends the room in %v with effects %v: decode is told, unless it told us or is gone", e.Kind, n, fx)
	case fx.Has(room.FxSendFailed) && !ends && (e.Kind != room.EvGrant || !drained(n.Drain)):
		return broke(Tells, "%v in %v tells decode again of a failure", e.Kind, was.Node())
	case e.Kind == room.EvGrant && n.State == room.StateFailed && drained(n.Drain) && !fx.Has(room.FxSendFailed):
		return broke(Tells, "the grant in %v comes too late, and nobody says so", was.Node())
	case fx.Has(room.FxSendAck) && !abort && (!waits || !drained(n.Drain)), waits && drained(n.Drain) && !fx.Has(room.FxSendAck):
		return broke(Tells, "%v from %v to %v has effects %v: one ack answers the abort, when all is drained", e.Kind, was.Node(), n, fx)
	case abort && !fx.Has(room.FxSendAck) && !owes(n.Drain):
		return broke(Tells, "the abort in %v is neither acked nor owed an ack in %v", was.Node(), n)
	case !abort && !waits && owes(n.Drain), e.Kind == room.EvPeerLost && owes(n.Drain), waits && owes(n.Drain) != !drained(n.Drain) && e.Kind != room.EvPeerLost:
		return broke(Tells, "%v from %v to %v: an ack is owed from the abort on until all is drained, or nobody is left to hear it", e.Kind, was.Node(), n)
	case known && was.State() == room.StateFailed && !fx.Has(room.FxLateCause) && was.Node().Drain != room.DrainGone:
		return broke(Tells, "%v in %v is not counted as a late cause", e.Kind, was.Node())
	}
	return nil
}

// owes: an ack is owed.
func owes(d room.Drain) bool { return d == room.DrainOwing || d == room.DrainOrphanOwing }

// receiverStep is what holds of every step of a receiver.
func receiverStep(was, now room.Receiver, e room.Event, fx room.Effects) error {
	if err := anyStep(view{was.Node(), was.Cause()}, view{now.Node(), now.Cause()}, was != now, e, fx); err != nil {
		return err
	}
	n, more := now.Node(), now.Landed()-was.Landed()
	next := e.Chunk == was.Landed() && e.Last == (was.Landed()+1 == was.Chunks())
	success := n.State == room.StateSuccess
	ends := !was.State().Terminal() && n.State.Terminal()
	switch {
	case fx&(room.FxGranted|room.FxWrite|room.FxSendFailed|room.FxSendAck) != 0:
		return broke(Robust, "%v at decode has effects of the prefill side: %v", e.Kind, fx)
	case foreignTo(room.SideReceiver, e.Kind) && (was != now || fx != room.FxStale):
		return broke(Robust, "%v, which is not an event of this side, changes %v or has effects %v", e.Kind, was.Node(), fx)
	case ending(e.Kind) && !foreignTo(room.SideReceiver, e.Kind) && !n.State.Terminal():
		return broke(Ends, "%v leaves the room %v", e.Kind, n)
	case e.Kind == room.EvGranted && fx.Has(room.FxSendGrant) == fx.Has(room.FxSkip):
		return broke(Progress, "granted in %v is answered by %v: send or take the pages back", was.Node(), fx)
	case fx.Has(room.FxSendGrant) && (e.Kind != room.EvGranted || was.State() != room.StateBootstrapping):
		return broke(Memory, "%v in %v sends a grant", e.Kind, was.Node())
	case fx.Has(room.FxLanded) && (e.Kind != room.EvLanded || was.State().Terminal() || was.State() == room.StateBootstrapping || !next):
		return broke(Truth, "chunk %d (last %v) is delivered in %v after %d others of %d", e.Chunk, e.Last, was.Node(), was.Landed(), was.Chunks())
	case fx.Has(room.FxLanded) != (more == 1) || more != 0 && more != 1:
		return broke(Truth, "%v with effects %v counts %d chunks", e.Kind, fx, more)
	case !n.State.Terminal() && now.Landed() > 0 != (n.State == room.StateTransferring):
		return broke(Truth, "%v leads to %v after %d chunks", e.Kind, n, now.Landed())
	case success != (now.Landed() == now.Chunks()):
		return broke(Truth, "%v leads to %v with %d of %d chunks", e.Kind, n, now.Landed(), now.Chunks())
	case fx.Has(room.FxFreeTransfer) && e.Kind != room.EvAck && e.Kind != room.EvFenced && !success:
		return broke(Memory, "%v in %v frees pages: neither drained nor fenced", e.Kind, was.Node())
	case e.Kind == room.EvAck && fx.Has(room.FxFreeTransfer) && !was.State().Terminal():
		return broke(Memory, "an ack that nobody asked for frees pages in %v", was.Node())
	case e.Kind == room.EvFenced && holds(was) && !drained(n.Drain):
		return broke(Returns, "a fence in %v leads to %v: there is nothing left to wait for", was.Node(), n)
	case was.State() == room.StateBootstrapping && n.State == room.StateFailed && !drained(n.Drain):
		return broke(Returns, "%v leads to %v, which waits for a writer that never had a grant", e.Kind, n)
	case fx.Has(room.FxFreeTransfer) && (drained(was.Node().Drain) || was.State() == room.StateBootstrapping):
		return broke(Memory, "%v in %v frees pages that the transfer does not hold", e.Kind, was.Node())
	case fx.Has(room.FxFreeTransfer) && !was.State().Terminal() && !fx.Has(room.FxRevoke):
		return broke(Memory, "%v in %v frees pages of a live grant", e.Kind, was.Node())
	case fx&(room.FxSendAbort|room.FxRevoke) != 0 && (was.State().Terminal() || !n.State.Terminal()):
		return broke(Tells, "%v from %v to %v has effects %v: prefill is told of an end once, when it comes, and the grant revoked", e.Kind, was.Node(), n, fx)
	case ends && fx.Has(room.FxSendAbort) != (n.State == room.StateFailed && e.Kind != room.EvPeerLost && e.Kind != room.EvFenced):
		return broke(Tells, "%v ends the room in %v with effects %v: prefill is told, unless it is gone", e.Kind, n, fx)
	case ends && was.State() != room.StateBootstrapping && !fx.Has(room.FxRevoke):
		return broke(Memory, "%v ends the room in %v and leaves its grant live", e.Kind, n)
	case was.State() == room.StateBootstrapping && fx.Has(room.FxRevoke):
		return broke(Memory, "%v in %v revokes a grant that was never made", e.Kind, was.Node())
	case was.State() == room.StateFailed && was.Node().Drain != room.DrainGone && fx&(room.FxLateCause|room.FxDuplicate) == 0 && ending(e.Kind) && e.Kind != room.EvRelease && !foreignTo(room.SideReceiver, e.Kind):
		return broke(Tells, "%v in %v is not counted as a late cause", e.Kind, was.Node())
	case holds(was) && drained(n.Drain) && !fx.Has(room.FxFreeTransfer):
		return broke(Returns, "%v from %v to %v: the transfer never lets go of its pages", e.Kind, was.Node(), n)
	}
	return nil
}

// holds: the transfer holds the room's pages.
func holds(r room.Receiver) bool {
	n := r.Node()
	return n.State == room.StateWaitingForInput || n.State == room.StateTransferring || n.Drain.Pending()
}

// foreignTo: k is an event of the other side alone.
func foreignTo(side room.Side, k room.EventKind) bool {
	switch k {
	case room.EvGrant, room.EvBegin, room.EvSettle, room.EvSettleError, room.EvDrop, room.EvAbort:
		return side != room.SideSender
	case room.EvGranted, room.EvLanded, room.EvRemoteFailed, room.EvFenced, room.EvAck:
		return side != room.SideReceiver
	default:
		return false
	}
}

// probe gives both machines every event there is, of either side, with chunks in and out of
// range, and judges the steps. The machines that were probed are remembered.
func (w *World) probe(s room.Sender, y room.Receiver) error {
	err, seen := w.probedS[s]
	if !seen {
		err = each(s.Chunks(), func(e room.Event) error {
			now, fx := w.stepS(s, e)
			return senderStep(s, now, e, fx)
		})
		w.probedS[s] = err
	}
	if err != nil {
		return err
	}
	err, seen = w.probedR[y]
	if !seen {
		err = each(y.Chunks(), func(e room.Event) error {
			now, fx := w.stepR(y, e)
			return receiverStep(y, now, e, fx)
		})
		w.probedR[y] = err
	}
	return err
}

// each calls f for every kind of event and every chunk from -1 to chunks.
func each(chunks int, f func(room.Event) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = broke(Robust, "an event panics: %v", p)
		}
	}()
	for k := range room.EventKind(len(room.Events()) + 2) {
		for c := -1; c <= chunks; c++ {
			for _, last := range []bool{false, true} {
				if err := f(room.Event{Kind: k, Chunk: c, Last: last}); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
