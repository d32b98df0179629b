// Package room is the life of one request's KV hand-over: two small total
// state machines, [Sender] (prefill side) and [Receiver] (decode side), the
// [Registry] that applies events to them under a room's lock, the deadlines of
// every waiting state, and the [Cause] that says why a room failed.
//
// # Words
//
// A room is one hand-over between one prefill and one decode worker. It is
// named by a [Key]: the 63-bit id made by the router and the generation (which
// life of that id is meant). Drained means that no write for the room is
// outstanding any more. A fence is an act after which no late write can land.
//
// # Purity
//
// Sender.Step and Receiver.Step are total functions (state, event) -> (state,
// effects): no I/O, no clock, no goroutine, no randomness, no logger. Time
// comes in as an event, everything that must happen goes out as [Effects]. The
// whole life of a room is the table in table.go, one row a case, each with its
// reason; [SenderTable] and [ReceiverTable] hand it out. The package imports
// nothing of Baton's.
//
// # Use
//
// A shell makes one [Registry] a side with an executor, opens a [Room] for
// each request, gives it events with [Room.Apply], and waits for [Room.Done].
// The executor sends, revokes and frees; it runs under the room's lock and
// must not block. Events are applied one at a time, so an order of events is
// all there is to an interleaving.
//
// # Who owns what
//
// The owner of a room is whoever opened it, and must end with [EvRelease]: a
// room stays in the registry until it is terminal, drained, and released. Every
// write that was allowed must settle, even in a room that has failed. Causes are
// shared and never written to.
//
// # What is not promised
//
// A deadline ends a room; it does not drain one. A receiver whose grant was out
// keeps its pages until the sender's ack or a fence, however long that takes.
// The registry trusts its shell in one thing: that each write settles once.
package room

import (
	"fmt"
	"strconv"
)

// Key names one life of one room. Both sides learn it from the request itself
// (bootstrap_room and bootstrap_generation), so it is known before any message
// between the workers and identifies the room on every wire.
type Key struct {
	// Room is the id made by the router, 0 <= Room < 2^63.
	Room uint64
	// Gen tells apart several lives of the same id. Baton's router counts it up
	// when it must reuse an id; routers that do not know it leave it 0.
	Gen uint32
}

// String is "room" or "room#gen", as written in logs and errors.
func (k Key) String() string {
	if k.Gen == 0 {
		return strconv.FormatUint(k.Room, 10)
	}
	return fmt.Sprintf("%d#%d", k.Room, k.Gen)
}

// State is what a room's owner polls. The numbers are SGLang's KVPoll.
type State uint32

const (
	// StateFailed is terminal. Entered from every other non-terminal state with
	// the first cause; never left.
	StateFailed State = 0
	// StateBootstrapping is the first state. Sender: no grant yet. Receiver: no
	// pages yet. Goes to WaitingForInput or Failed.
	StateBootstrapping State = 1
	// StateWaitingForInput: the grant is known on this side, no chunk has moved.
	// Goes to Transferring, Success or Failed.
	StateWaitingForInput State = 2
	// StateTransferring: at least one chunk was begun (sender) or landed
	// (receiver). Goes to Success or Failed.
	StateTransferring State = 3
	// StateSuccess is terminal: every chunk was applied at the destination.
	StateSuccess State = 4
)

// Terminal reports whether s has no way out.
func (s State) Terminal() bool { return s == StateFailed || s == StateSuccess }

// String survives unknown values.
func (s State) String() string {
	switch s {
	case StateFailed:
		return "failed"
	case StateBootstrapping:
		return "bootstrapping"
	case StateWaitingForInput:
		return "waiting"
	case StateTransferring:
		return "transferring"
	case StateSuccess:
		return "success"
	default:
		return fmt.Sprintf("state(%d)", uint32(s))
	}
}

// Side says which of the two machines is meant.
type Side uint8

const (
	SideSender   Side = 1 // the prefill worker
	SideReceiver Side = 2 // the decode worker
	SideRouter   Side = 3 // only in causes: the router ended the request
)

// String survives unknown values.
func (s Side) String() string {
	switch s {
	case SideSender:
		return "prefill"
	case SideReceiver:
		return "decode"
	case SideRouter:
		return "router"
	default:
		return fmt.Sprintf("side(%d)", uint8(s))
	}
}
