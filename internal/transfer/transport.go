// Package transfer is how KV gets from a prefill worker's memory into a decode
// worker's pool: the [Transport] interface (one package below this one for each
// implementation), and the ports that schedulers see, [Senders] and [Receivers], whose
// shells are in package hub.
//
// A transport is one-sided: the prefill side stores bytes into memory the decode
// side has registered, only inside pages named by a live [Grant], and only on a
// connection of the session the grant was made for. Complete means applied at
// the destination.
package transfer

import (
	"context"
	"errors"
	"fmt"

	"github.com/baton-pd/baton/internal/room"
)

// SessionID names one generation of the session between a decode and a prefill
// worker. Made at random by the decode side, never 0, never reused.
type SessionID uint64

// GrantID names one permission to write; unique in the decode process's life
// (starts at a random number, counts up), never 0, never reused.
type GrantID uint64

// Span is a range of bytes of the registered memory.
type Span struct{ Off, Len uint64 }

// Grant allows one session to write these spans for one room.
type Grant struct {
	ID      GrantID
	Key     room.Key
	Session SessionID
	Spans   []Span // disjoint; every write must lie wholly inside one of them
}

// Segment is one block of a write: Src goes to Off in the registered memory.
type Segment struct {
	Off uint64
	Src []byte
}

// MaxNotify is the largest notification in bytes.
const MaxNotify = 256

// Write is one posted write. Segments may be empty (notification only).
type Write struct {
	Grant    GrantID
	Key      room.Key
	Segments []Segment
	// Notify is handed to the destination's Sink once, after all segments are
	// applied; nil: no notification.
	Notify []byte
	// Done is called exactly once, from any goroutine, never while Post holds
	// a lock the caller could want, perhaps before Post returns. After it the
	// transport does not touch the segments any more. nil error: every byte is
	// applied at the destination and Landed has returned there.
	Done func(error)
}

// Caps says what a transport can promise.
type Caps struct {
	// Fences: Target.Revoke alone proves that no late write can land.
	Fences bool
	// NeedsDrain: after Revoke a connected writer may still store bytes until it
	// has drained or is gone.
	NeedsDrain bool
}

// Descriptor tells a peer how to reach a Target. It crosses the wire.
type Descriptor struct {
	Kind string            // "mem", "tcp", "shm", "nixl"
	Addr string            // host:port, or a socket path
	Host string            // boot id of the machine, for transports that cannot leave it
	Size uint64            // bytes registered
	Meta map[string]string // kind's own
}

// Transport opens both ends. Safe for concurrent use.
type Transport interface {
	Kind() string
	Caps() Caps
	// Listen registers mem (decode side). mem stays the caller's and must outlive the Target.
	Listen(mem Memory, sink Sink) (Target, error)
	// Reachable reports cheaply whether Dial could work from this process.
	Reachable(d Descriptor) bool
	// Dial connects to a Target as session s (prefill side). ctx bounds only the dialling.
	Dial(ctx context.Context, d Descriptor, s SessionID) (Peer, error)
}

// Memory is a mapping that can be offered to peers.
type Memory struct {
	Bytes []byte
	FD    int // memfd behind Bytes, -1 if none; owned by whoever made the Memory
}

// Sink hears what arrives. Its methods are called from transport goroutines,
// must not block, and must not call back into the Target while they run.
type Sink interface {
	// Landed: all segments of a write under grant g are applied. notify is valid
	// only during the call.
	Landed(g GrantID, notify []byte)
	// Fenced: from now on no byte of session s can be stored. Called exactly once
	// for a session that was opened: after CloseSession, or when its writer is
	// gone for good (for shm: its process is dead or has unmapped).
	Fenced(s SessionID)
}

// RevokeSink is a Sink that also hears the end of a writer that was inside a grant
// when it was revoked. Transports that are not fencing look for it on the Sink.
type RevokeSink interface {
	Sink
	// Revoked: no byte will be stored under g any more. Called exactly once for a
	// grant whose Revoke returned false, unless Fenced of its session comes
	// instead; perhaps before that Revoke has returned to its caller. Rules of Sink.
	Revoked(g GrantID)
}

// Target is the decode side's registration.
type Target interface {
	Descriptor() Descriptor
	// OpenSession lets connections of s in. A second one for a live s is ErrSession.
	OpenSession(s SessionID) error
	// CloseSession refuses all further writes of s and revokes its grants.
	// Sink.Fenced(s) follows as soon as it is true: at once on a fencing transport;
	// otherwise when the writer has unmapped or died, however long that takes.
	CloseSession(s SessionID)
	// Allow makes g live. Its session must be open.
	Allow(g Grant) error
	// Revoke ends g at once for writes not yet begun, and reports whether it is fenced:
	// true: no byte will be stored under g any more. false: wait for the writer's
	// drain ack or for Fenced. Never blocks on a peer. Unknown id: true.
	Revoke(id GrantID) (fenced bool)
	// Close closes all sessions, waits for the transport's goroutines.
	Close() error
}

// Peer is the prefill side's connection to one Target.
type Peer interface {
	// Post hands w over and never blocks on the peer. nil: w is the transport's until
	// Done; an error: w is still the caller's and Done is never called. A full send
	// queue is ErrBusy: try again after the Done of any write of this Peer. Writes of one grant are
	// applied, and land, in the order in which they were posted; of different grants nothing is promised.
	Post(w Write) error
	// Kind as of the Transport.
	Kind() string
	// Down is closed when the connection can no longer carry writes; Err says why.
	Down() <-chan struct{}
	Err() error
	// Close abandons queued writes (Done with ErrClosed), waits until no segment is
	// touched any more, and returns. Bounded: it breaks a stalled connection.
	Close() error
}

var (
	// ErrClosed: this end was closed by its owner.
	ErrClosed = errors.New("transfer: closed")
	// ErrBusy: the send queue is full; the write is still the caller's.
	ErrBusy = errors.New("transfer: send queue full")
	// ErrSession: the session is not open at the target, or is already.
	ErrSession = errors.New("transfer: session unknown or already open")
	// ErrGrant: no byte of the write was, or no further byte will be, stored.
	ErrGrant = errors.New("transfer: grant unknown, revoked or of another session")
	// ErrBounds: nothing was stored; the whole write is checked first.
	ErrBounds = errors.New("transfer: write outside its grant")
	// ErrTooLarge: the transport cannot carry such a write at all.
	ErrTooLarge = errors.New("transfer: too many segments or notification too large")
	// ErrPeerLost: the connection ended before the write was answered; it may be applied.
	ErrPeerLost = errors.New("transfer: connection to peer lost")
)

// UnfencedError is what Target.Close returns when writers of these sessions, which only their own end or
// their word fences, were still alive, stopped for instance, when its patience ended. Their Fenced never
// comes: the memory must not be unmapped or used for anything else while they live.
type UnfencedError struct {
	Kind     string // of the transport
	Sessions []SessionID
}

// Error names the sessions.
func (e *UnfencedError) Error() string {
	return fmt.Sprintf("%s: close: writers of %d sessions may still store into the memory: %d", e.Kind, len(e.Sessions), e.Sessions)
}
