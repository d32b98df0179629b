// Package sched runs requests on an engine: [Prefill] on a prefill worker
// (bootstrap -> waiting -> chunked forward -> inflight) and [Decode] on a decode
// worker (prealloc -> transfer -> running, continuous batching). One goroutine
// owns the engine context; requests are driven by their own goroutines and by
// notifications; nothing polls.
package sched

import (
	"context"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/room"
)

// Request is one prompt to answer. It is immutable after Submit.
type Request struct {
	ID     string // rid; unique among live requests, made by the edge
	Prompt []engine.Token
	// Emitted: the last so many tokens of Prompt are the beginning of the answer, which another worker made and its
	// client has. The answer goes on after them as if it had been made here. N is 1 then.
	Emitted int
	// N choices share the prompt's KV. N >= 1.
	N        int
	Sampling engine.Sampling // choice i uses Seed+i
	// MaxTokens a choice; 0: until the context is full.
	MaxTokens int
	Stop      []string // never part of the text; may span tokens
	IgnoreEOS bool
	Logprobs  int // as engine.Row.Logprobs
	// WholeTokens: an event's text is that of its tokens, no more and no less, so that the answer can go on after any
	// event. Only the last may have less.
	WholeTokens bool
	// Bootstrap: where the prompt's KV comes from (decode) or goes to (prefill).
	// nil on a decode worker: it computes the prompt itself (monolithic).
	Bootstrap *Bootstrap
	// Deadline is absolute and always set.
	Deadline time.Time
}

// Bootstrap is the request's room.
type Bootstrap struct {
	Key  room.Key
	Host string // of the prefill worker's bootstrap port; unused on the prefill side
	Port int
}

// FinishReason of a choice.
type FinishReason string

const (
	FinishStop   FinishReason = "stop"   // end-of-generation token or stop string
	FinishLength FinishReason = "length" // MaxTokens or the context's end
)

// Event is a piece of one choice's answer.
type Event struct {
	Choice int
	Text   string // valid UTF-8, perhaps empty
	Tokens []TokenEvent
	// Finish is set on the choice's last event, and only there.
	Finish      FinishReason
	MatchedStop string // the stop string, if one matched
}

// TokenEvent is one generated token; its text may be part of a character.
type TokenEvent struct {
	ID      engine.Token
	Bytes   []byte
	Logprob float32
	Top     []engine.TokenLogprob
}

// Phases are the times of a request's way, for usage, logs, metrics and traces. Zero: it has not come so far.
type Phases struct {
	Submitted, Granted, Transferred, FirstToken, Ended time.Time
	// Reserved is when it got cells of the engine: the decode side before it asks for the grant, the prefill side after.
	Reserved time.Time
	// Sent is when the first bytes of KV were handed over, Computed when the last chunk was computed (prefill side).
	Sent, Computed time.Time
	// Landed is when the last chunk had landed (decode side).
	Landed time.Time
	// Chunks are the prompt's, in order; the last of maxChunkTimes covers all that follow.
	Chunks []ChunkTime
}

// ChunkTime is when a chunk was computed, from and to, or on a decode worker with a room when it had landed, twice the same.
type ChunkTime struct{ From, To time.Time }

// maxChunkTimes bounds what is kept of a long prompt.
const maxChunkTimes = 64

// Stream is the answer. One consumer. Events are buffered without bound by the
// consumer's pace (bounded by MaxTokens), so a slow client never stalls the batch.
type Stream interface {
	// Next waits for the next event. io.EOF after every choice has finished; a
	// *room.Cause if the request failed. ctx only bounds the wait.
	Next(ctx context.Context) (Event, error)
	// Cancel ends the request with this cause if it has not ended. Idempotent.
	Cancel(c *room.Cause)
	// Close cancels what still runs (client_gone) and waits until the request holds
	// nothing any more except quarantined pages. Idempotent.
	Close()
	Phases() Phases
}

// Scheduler is what the HTTP edge sees of either worker.
type Scheduler interface {
	// Submit never blocks. Errors are *room.Cause: CodeCapacity+Retryable when the queue is
	// full (503, Retry-After), CodeInvalid when the request can never fit,
	// CodeDuplicate, CodeShutdown. ctx ending cancels the request.
	Submit(ctx context.Context, r *Request) (Stream, error)
	// Abort cancels a live request by id; "" aborts all. Returns how many it hit.
	Abort(id string, c *room.Cause) int
	// Healthy is nil while the loop lives and makes progress.
	Healthy() error
	// Idle reports whether nothing is live: rooms, requests, pages outside quarantine.
	Snapshot() Snapshot
}

// Snapshot is the accounting shown by /server_info and compared with the idle baseline.
type Snapshot struct {
	Role                                   string
	Bootstrap, Waiting, Inflight           int // prefill queues
	Prealloc, Transfer, Running, Preempted int // decode queues
	Rooms, Tombstones                      int
	PagesTotal, PagesFree, PagesQuarantine int
	CellsUsed, CellsTotal, SeqsUsed        int
}
