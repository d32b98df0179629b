package room

import (
	"fmt"
	"strings"
)

// EventKind names what happened to a room. The zero kind is no event.
type EventKind uint8

// Events of the sender, of the receiver, and of both. Every machine has an entry
// for every kind; one that belongs to the other side is counted as stale.
const (
	// EvGrant (sender): the decode side's grant arrived.
	EvGrant EventKind = iota + 1
	// EvBegin (sender): a worker asks whether it may write Chunk. The answer is
	// FxWrite or FxSkip; after FxWrite exactly one EvSettle or EvSettleError must
	// follow, whatever happens to the room meanwhile. Chunks begin in order.
	EvBegin
	// EvSettle (sender): the write of Chunk is applied at the destination.
	EvSettle
	// EvSettleError (sender): the write of Chunk is over and was not applied, or
	// not wholly. Nothing of it is in flight any more.
	EvSettleError
	// EvDrop (sender): Chunk will never be sent. It was not begun, so no settle follows.
	EvDrop
	// EvAbort (sender): the decode side ended the room and wants to know when it is drained.
	EvAbort
	// EvGranted (receiver): pages are held and the grant is about to be sent. The
	// answer is FxSendGrant or FxSkip; with FxSkip the pages go back, never granted.
	EvGranted
	// EvLanded (receiver): the bytes of Chunk are applied and its checksum is right.
	// Last says that the sender called it the last one.
	EvLanded
	// EvRemoteFailed (receiver): the sender said that its side of the room failed.
	EvRemoteFailed
	// EvFenced (receiver): from now on no byte can be stored under the room's grant.
	EvFenced
	// EvAck (receiver): the sender answered the abort: nothing is or will be
	// outstanding under the grant.
	EvAck
	// EvCancel (both): somebody on this side ended the room (client gone, engine
	// failed, mismatch, shutdown, ...).
	EvCancel
	// EvDeadline (both): the room's deadline or the bound of its state passed.
	EvDeadline
	// EvPeerLost (both): the session to the other worker ended. It is no fence.
	EvPeerLost
	// EvRelease (both): the owner is finished with the room. Ends a live room.
	EvRelease

	numEvents
)

// Events lists every kind, in order.
func Events() []EventKind {
	all := make([]EventKind, 0, numEvents-1)
	for k := EvGrant; k < numEvents; k++ {
		all = append(all, k)
	}
	return all
}

var eventNames = [numEvents]string{
	EvGrant: "grant", EvBegin: "begin", EvSettle: "settle", EvSettleError: "settle_error",
	EvDrop: "drop", EvAbort: "abort", EvGranted: "granted", EvLanded: "landed",
	EvRemoteFailed: "remote_failed", EvFenced: "fenced", EvAck: "ack", EvCancel: "cancel",
	EvDeadline: "deadline", EvPeerLost: "peer_lost", EvRelease: "release",
}

// String survives unknown values.
func (k EventKind) String() string {
	if k > 0 && k < numEvents {
		return eventNames[k]
	}
	return fmt.Sprintf("event(%d)", uint8(k))
}

// Event is the input of a machine. It is a plain value.
type Event struct {
	Kind EventKind
	// Chunk is meant by EvBegin, EvSettle, EvSettleError, EvDrop and EvLanded;
	// 0 <= Chunk < chunks of the room.
	Chunk int
	// Last is meant by EvLanded.
	Last bool
	// Cause names the failure this event stands for. nil: the table's own. It is
	// shared, never written to.
	Cause *Cause
}

// Effects is what must be done because of one event: a set, executed by the shell
// in whatever order its own locking needs, before the next event of the same room.
type Effects uint32

const (
	// FxGranted (sender): chunks may be sent from now on.
	FxGranted Effects = 1 << iota
	// FxWrite (sender): post the write of the chunk.
	FxWrite
	// FxSkip: do not do what was asked for. Sender: do not write the chunk.
	// Receiver: take the pages back, they were never granted.
	FxSkip
	// FxSendFailed (sender): tell the decode side, if its session is known.
	FxSendFailed
	// FxSendAck (sender): answer the abort. Only ever without outstanding writes.
	FxSendAck
	// FxSendGrant (receiver): send the grant.
	FxSendGrant
	// FxSendAbort (receiver): tell the sender side to stop and to ack once drained.
	FxSendAbort
	// FxRevoke (receiver): revoke the grant at the target.
	FxRevoke
	// FxFreeTransfer (receiver): the transfer lets go of the pages. At most once,
	// only after success, ack or fence.
	FxFreeTransfer
	// FxLanded (receiver): deliver the chunk to the owner.
	FxLanded
	// FxTerminal: the room has just become terminal. Exactly once.
	FxTerminal
	// FxForget: terminal, drained, released, no ack owed. At most once; the registry
	// drops the room and keeps an ended tombstone.
	FxForget
	// FxStale: the event came too late or matches nothing; only counted.
	FxStale
	// FxDuplicate: the event repeats an earlier one; only counted.
	FxDuplicate
	// FxLateCause: the room had failed already; its first cause stays; counted.
	FxLateCause

	numEffects = iota
)

var effectNames = [numEffects]string{
	"granted", "write", "skip", "send_failed", "send_ack", "send_grant", "send_abort",
	"revoke", "free_transfer", "landed", "terminal", "forget", "stale", "duplicate", "late_cause",
}

// Has reports whether every effect of want is in fx.
func (fx Effects) Has(want Effects) bool { return fx&want == want }

// String joins the names with "|"; "none" for the empty set.
func (fx Effects) String() string {
	if fx == 0 {
		return "none"
	}
	var parts []string
	for i, name := range effectNames {
		if fx&(1<<i) != 0 {
			parts = append(parts, name)
		}
	}
	if rest := fx >> numEffects; rest != 0 {
		parts = append(parts, fmt.Sprintf("effects(%#x)", uint32(rest<<numEffects)))
	}
	return strings.Join(parts, "|")
}

// Drain is what a terminal room still waits for before it can be forgotten.
type Drain uint8

const (
	// DrainLive: the room is not terminal.
	DrainLive Drain = iota
	// DrainPending: bytes may still be stored, and the owner holds the room.
	// Sender: writes are outstanding. Receiver: the grant was out, neither ack nor fence came.
	DrainPending
	// DrainOwing (sender): as Pending, and the decode side waits for an ack.
	DrainOwing
	// DrainDone: nothing can be stored any more; the owner holds the room.
	DrainDone
	// DrainOrphan: as Pending, and the owner has released the room.
	DrainOrphan
	// DrainOrphanOwing (sender): as Owing, and the owner has released the room.
	DrainOrphanOwing
	// DrainGone: nothing is left; the room was forgotten.
	DrainGone

	numDrains
)

// String survives unknown values.
func (d Drain) String() string {
	switch d {
	case DrainLive:
		return "live"
	case DrainPending:
		return "pending"
	case DrainOwing:
		return "owing"
	case DrainDone:
		return "done"
	case DrainOrphan:
		return "orphan"
	case DrainOrphanOwing:
		return "orphan_owing"
	case DrainGone:
		return "gone"
	default:
		return fmt.Sprintf("drain(%d)", uint8(d))
	}
}

// Pending reports whether bytes may still be stored for a terminal room.
func (d Drain) Pending() bool {
	return d == DrainPending || d == DrainOwing || d == DrainOrphan || d == DrainOrphanOwing
}
