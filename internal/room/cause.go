package room

import (
	"errors"
	"fmt"
)

// Code is the kind of a failure. It is stable: clients, metrics and tests match it.
type Code string

const (
	CodeAborted        Code = "aborted"         // the peer or the client's cancellation ended the room
	CodeClientGone     Code = "client_gone"     // the client closed its connection
	CodeDeadline       Code = "deadline"        // the request's deadline or the bound of a state passed
	CodePeerLost       Code = "peer_lost"       // the session to the other worker ended
	CodeTransferFailed Code = "transfer_failed" // a write was rejected, broken, or its bytes were wrong
	CodeChunkDropped   Code = "chunk_dropped"   // a chunk could not be sent; the room cannot complete
	CodeMismatch       Code = "mismatch"        // the two sides disagree: fingerprint, prompt, layout
	CodeCapacity       Code = "capacity"        // the request can never fit, or a queue is full
	CodeEngine         Code = "engine_failed"   // the engine refused or failed
	CodeShutdown       Code = "shutdown"        // the worker is ending
	CodeDuplicate      Code = "duplicate_room"  // the room id is, or was a moment ago, in use
	CodeProtocol       Code = "protocol"        // a peer broke the protocol
	CodeInvalid        Code = "invalid_request" // the client's fault
	CodeUnavailable    Code = "unavailable"     // no worker to serve the request
	CodeInternal       Code = "internal"        // a broken invariant of ours
)

// Cause is the first reason a room (or a request before it had a room) failed.
// It is an error, it crosses wires field by field, and it never changes once set.
type Cause struct {
	Code Code
	// Side that found the failure, and Phase in which it was then ("bootstrapping",
	// "transferring", "decoding", "router", ...; free text, stable per place).
	Side  Side
	Phase string
	// Key of the room; zero Room when the request had none.
	Key Key
	// Peer is the worker on the other side as host:port, where known.
	Peer string
	// Detail is for people: what happened, where, what to do.
	Detail string
	// Retryable: the same request may succeed on another pair, and the client
	// has seen nothing of this attempt's answer.
	Retryable bool
}

// Error tells code, place and detail in one line.
func (c *Cause) Error() string {
	s := fmt.Sprintf("%s: %s", c.Code, c.Detail)
	if c.Phase != "" {
		s += fmt.Sprintf(" (%s, phase %s", c.Side, c.Phase)
		if c.Key.Room != 0 {
			s += ", room " + c.Key.String()
		}
		if c.Peer != "" {
			s += ", peer " + c.Peer
		}
		s += ")"
	}
	return s
}

// Is matches another *Cause by code alone, so errors.Is(err, &Cause{Code: CodeDeadline}) works.
func (c *Cause) Is(target error) bool {
	var t *Cause
	return errors.As(target, &t) && t.Code == c.Code
}

// CauseOf finds the Cause in err's chain, or wraps err as CodeInternal. nil gives nil.
func CauseOf(err error) *Cause {
	if err == nil {
		return nil
	}
	var c *Cause
	if errors.As(err, &c) {
		return c
	}
	return &Cause{Code: CodeInternal, Detail: err.Error()}
}
