// Package record keeps what happened to requests: their way through queue, attempts and legs, with its times and its end.
//
// A [Journal] holds the requests in flight and the latest that have ended, those that failed apart so that a busy router's
// successes do not push them out. An [Entry] is one request as it goes; its owner writes it, anybody may take a copy. There is
// no clock, no I/O and nothing of prompts or answers here: times come in, and [Timeline] turns a record and what the workers
// told of its rooms into bars to draw.
package record

import (
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Never is a moment that has not come (yet). Moments are counted from the request's arrival.
const Never = time.Duration(-1)

// Outcomes of requests; "" is one that runs.
const (
	OK          = "ok"
	Refused     = "refused"      // the client's fault: 4xx
	Aborted     = "aborted"      // by /abort_request
	Failed      = "error"        // before the first byte
	StreamError = "stream_error" // after it
	ClientGone  = "client_gone"
)

// Cause is why a request or an attempt ended without an answer.
type Cause struct {
	Code   string `json:"code"`
	Side   string `json:"side,omitempty"`
	Phase  string `json:"phase,omitempty"`
	Worker string `json:"worker,omitempty"`
	Detail string `json:"detail,omitempty"`
}

// Attempt is one try on one pair of workers.
type Attempt struct {
	Room            uint64 // the first of Rooms
	Rooms           int
	Kind            string // of the decode worker's server, "" if not known
	Prefill, Decode string // workers; "" for a leg that is not there
	// Start is when it was sent, PrefillEnd when the prefill leg had done its part, FirstToken when the decode leg's stream
	// brought the first of the answer, End when the attempt was over.
	Start, PrefillEnd, FirstToken, End time.Duration
	Cause                              *Cause // of its end; nil: it runs, or is the one that was answered
}

// Record is what is known of one request. Copies are independent but for Attempts, which readers must not change.
type Record struct {
	ID      uint64 // number in this router's life, from 1
	Version uint64 // grows with every change
	// RequestID is the answer's X-Request-Id, RID the body's id (the first, if the client gave several), or a made one.
	RequestID, RID string
	Key            string // name of the API key, "" without
	Client         string // host of the client's address
	Path           string
	Model          string
	Stream         bool
	Prompts        int
	Choices        int
	Start          time.Time

	Waiting  bool          // in the queue now
	Queue    time.Duration // waited there, all attempts together
	Attempts []Attempt
	// FirstByte is when the answer began, End when the request was over.
	FirstByte, End time.Duration
	Status         int // of HTTP; 0: nothing was sent

	Events       int // data events of the stream
	PromptTokens int // by the answer's usage; 0: it told none
	Tokens       int // of the answer, by its usage; 0: it told none

	Outcome string
	Cause   *Cause
}

// Last is the latest attempt, nil before the first.
func (r *Record) Last() *Attempt {
	if len(r.Attempts) == 0 {
		return nil
	}
	return &r.Attempts[len(r.Attempts)-1]
}

// FirstToken is when the answer's first token came, Never if it did not or was not seen.
func (r *Record) FirstToken() time.Duration {
	if a := r.Last(); a != nil {
		return a.FirstToken
	}
	return Never
}

// Phase is where the request is: queued, routing, waiting (for the first of its answer), streaming, or ended.
func (r *Record) Phase() string {
	a := r.Last()
	switch {
	case r.Outcome != "":
		return "ended"
	case r.Waiting:
		return "queued"
	case a == nil || a.End != Never:
		return "routing"
	case a.FirstToken != Never:
		return "streaming"
	default:
		return "waiting"
	}
}

// Entry is a request as it goes. All methods are safe for concurrent use, and do nothing on nil, which is a request that is not
// recorded.
type Entry struct {
	// events is written for every read of a stream.
	events atomic.Int64

	mu   sync.Mutex
	rec  Record
	room [1]Attempt // backs the first attempt

	j          *Journal
	prev, next *Entry // in the journal's list of live ones, under its lock
}

// Snapshot is a copy of the record now.
func (e *Entry) Snapshot() Record {
	if e == nil {
		return Record{}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	r := e.rec
	r.Events = int(e.events.Load())
	r.Attempts = append([]Attempt(nil), r.Attempts...)
	return r
}

// ID is the request's number; 0 on nil.
func (e *Entry) ID() uint64 {
	if e == nil {
		return 0
	}
	return e.rec.ID // fixed
}

// change applies f under the lock. f must not keep the record.
func (e *Entry) change(f func(r *Record)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.rec.Version++
	f(&e.rec)
}

// Parsed tells what the request is, once its body has been read.
func (e *Entry) Parsed(rid, model string, stream bool, prompts, choices int) {
	if e == nil {
		return
	}
	rid, model = short(rid), short(model)
	e.change(func(r *Record) { r.RID, r.Model, r.Stream, r.Prompts, r.Choices = rid, model, stream, prompts, choices })
}

// maxName is how much of a client's name for something is kept, in bytes.
const maxName = 256

// short cuts a client's name, and lets go of the body that it was a part of.
func short(s string) string {
	if len(s) <= maxName {
		return s
	}
	return strings.ToValidUTF8(strings.Clone(s[:maxName]), "") + "..."
}

// Named tells the answer's X-Request-Id.
func (e *Entry) Named(id string) {
	if e == nil {
		return
	}
	e.change(func(r *Record) { r.RequestID = id })
}

// SetKey names the API key.
func (e *Entry) SetKey(name string) {
	if e == nil {
		return
	}
	e.change(func(r *Record) { r.Key = name })
}

// Wait tells that the request is in the queue, Waited that it has left it after d.
func (e *Entry) Wait() {
	if e == nil {
		return
	}
	e.change(func(r *Record) { r.Waiting = true })
}

// Waited ends Wait.
func (e *Entry) Waited(d time.Duration) {
	if e == nil {
		return
	}
	e.change(func(r *Record) { r.Waiting, r.Queue = false, r.Queue+d })
}

// Try begins an attempt at now. Its moments are set here.
func (e *Entry) Try(now time.Time, a Attempt) {
	if e == nil {
		return
	}
	a.Start, a.PrefillEnd, a.FirstToken, a.End, a.Cause = now.Sub(e.rec.Start), Never, Never, Never, nil
	e.change(func(r *Record) { r.Attempts = append(r.Attempts, a) })
}

// PrefillDone tells that the prefill leg of the attempt with this first room has done its part; it may come after the end.
func (e *Entry) PrefillDone(now time.Time, room uint64) {
	if e == nil {
		return
	}
	e.change(func(r *Record) {
		for i := range r.Attempts {
			if r.Attempts[i].Room == room {
				r.Attempts[i].PrefillEnd = now.Sub(r.Start)
			}
		}
	})
}

// Token tells of the first token of the latest attempt.
func (e *Entry) Token(now time.Time) {
	if e == nil {
		return
	}
	e.change(func(r *Record) {
		if a := r.Last(); a != nil && a.FirstToken == Never {
			a.FirstToken = now.Sub(r.Start)
		}
	})
}

// Count sets the number of data events that the stream has brought.
func (e *Entry) Count(events int) {
	if e != nil {
		e.events.Store(int64(events))
	}
}

// Usage tells the tokens that the answer says it has.
func (e *Entry) Usage(prompt, completion int) {
	if e == nil || prompt == 0 && completion == 0 {
		return
	}
	e.change(func(r *Record) { r.PromptTokens, r.Tokens = prompt, completion })
}

// Tried ends the latest attempt; nil: it was answered.
func (e *Entry) Tried(now time.Time, c *Cause) {
	if e == nil {
		return
	}
	e.change(func(r *Record) {
		if a := r.Last(); a != nil && a.End == Never {
			a.End, a.Cause = now.Sub(r.Start), c
		}
	})
}

// End is the last of a request: it was answered with status (0: nothing was sent), whose first byte went at firstByte (zero: none did), or failed for c.
// The entry goes from the live ones to the latest. Only the first call counts.
func (e *Entry) End(now, firstByte time.Time, status int, outcome string, c *Cause) {
	if e == nil {
		return
	}
	e.mu.Lock()
	r := &e.rec
	if r.Outcome != "" {
		e.mu.Unlock()
		return
	}
	r.Version++
	r.Waiting, r.Status, r.Outcome, r.Cause, r.End = false, status, outcome, c, now.Sub(r.Start)
	if !firstByte.IsZero() {
		r.FirstByte = firstByte.Sub(r.Start)
	}
	e.mu.Unlock()
	if e.j != nil {
		e.j.ended(e, outcome)
	}
}
