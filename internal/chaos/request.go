package chaos

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// Manner is what a client does besides waiting for its answer.
type Manner string

// The manners of clients.
const (
	Patient Manner = "patient"
	Leaves  Manner = "leaves" // closes its connection
	Breaks  Manner = "breaks" // resets its connection
	Aborts  Manner = "aborts" // asks for the end of its request by its id
	Slow    Manner = "slow"   // stops reading for a while
)

// Request is one request to the router, drawn from the seed and its number alone.
type Request struct {
	ID     int
	RID    string
	Ask    Ask
	Stream bool
	// Deadline is what the header says. Not above 0: it has passed already, which the router must refuse.
	Deadline time.Duration
	Manner   Manner
	After    time.Duration // when the client does what its manner says; Slow: also for how long
}

// String is for people.
func (r *Request) String() string {
	s := fmt.Sprintf("request %d (%s, deadline %v, %s", r.ID, r.Ask.Name, r.Deadline, r.Manner)
	if r.Manner != Patient {
		s += fmt.Sprintf(" after %v", r.After)
	}
	if !r.Stream {
		s += ", not streamed"
	}
	return s + ")"
}

// Pace is how patient clients are.
type Pace struct {
	Deadline time.Duration // of most requests
	Hurry    time.Duration // the longest deadline of a request in a hurry
}

// DrawRequest makes request id of a run. skewed: it is in a hurry, as all are for the time of a Skew; fill: it is one
// of those that fill the pools.
func DrawRequest(seed uint64, id int, w Work, p Pace, skewed, fill bool) *Request {
	rng := rand.New(rand.NewPCG(seed, uint64(id)))
	size := SizeAny
	if fill {
		size = SizeLarge
	}
	r := &Request{ID: id, RID: fmt.Sprintf("chaos-%d-%d", seed, id), Ask: w.Draw(rng, size), Stream: rng.IntN(4) > 0, Manner: Patient, Deadline: p.Deadline}
	switch n := rng.IntN(100); {
	case fill:
	case n < 2:
		r.Deadline = -time.Duration(rng.IntN(2)) * time.Second
	case n < 4:
		r.Deadline = time.Millisecond
	case n < 12 || skewed:
		r.Deadline = (20*time.Millisecond + time.Duration(rng.Int64N(int64(p.Hurry)))).Truncate(time.Millisecond)
	case n < 22:
		r.Deadline = 2 * p.Deadline
	}
	r.After = time.Duration(rng.Int64N(int64(p.Hurry))).Truncate(time.Millisecond)
	if rng.IntN(4) == 0 {
		r.After /= 50 // sometimes before anything has happened
	}
	switch n := rng.IntN(100); {
	case fill:
	case n < 7:
		r.Manner = Leaves
	case n < 12:
		r.Manner = Breaks
	case n < 19:
		r.Manner = Aborts
	case n < 23 && r.Stream:
		r.Manner = Slow
	}
	return r
}

// End is how a request ended, as its client saw it. Times are since the start of the run.
type End struct {
	Sent, Over time.Duration
	// Ended is false for a client that gave up on ever hearing anything.
	Ended  bool
	Status int // 0: no answer came
	Text   string
	// How often each way of ending was seen; one of them once is right.
	Finished, Done, Failed int
	// Trailing are events after the end.
	Trailing int
	Cause    *room.Cause // of the failure; nil if none was told
	Raw      string      // the error as it came
	// Broken is what became of the connection, if it did not end properly.
	Broken string
	// Left: the client went away by itself, or was cut, at Over.
	Left bool
	// Aborted: its abort, or an abort of all, was sent before Over.
	Aborted bool
	// Paused is how long the client did not read.
	Paused time.Duration
}

// OK reports a complete answer.
func (e *End) OK() bool {
	return e.Ended && e.Status == 200 && e.Finished == 1 && e.Failed == 0 && e.Cause == nil && e.Broken == "" && !e.Left
}

// Kind names the end for statistics.
func (e *End) Kind() string {
	switch {
	case !e.Ended:
		return "never"
	case e.OK():
		return "answered"
	case e.Cause != nil:
		return string(e.Cause.Code)
	case e.Left:
		return "left"
	default:
		return "connection broke"
	}
}

// String is for people.
func (e *End) String() string {
	s := fmt.Sprintf("%s at %v after %v: status %d, %d bytes of text, finished %d, done %d, failed %d", e.Kind(), e.Over.Round(time.Millisecond),
		(e.Over - e.Sent).Round(time.Millisecond), e.Status, len(e.Text), e.Finished, e.Done, e.Failed)
	if e.Trailing > 0 {
		s += fmt.Sprintf(", %d events after the end", e.Trailing)
	}
	if e.Cause != nil {
		s += ", cause " + e.Cause.Error()
	}
	if e.Broken != "" {
		s += ", connection: " + e.Broken
	}
	return s
}
