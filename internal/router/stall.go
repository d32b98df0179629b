package router

import (
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// stall ends an attempt whose stream has begun and then carries no event for too long. Comments do not
// count: a worker that is stuck may well go on pinging. Only time spent waiting for the worker counts, not what a
// slow client takes. Only the goroutine that reads the stream uses it; the timer's function is the exception.
type stall struct {
	limit time.Duration // 0: none
	timer *time.Timer
	quiet time.Duration // waited since the last event, in reads that are over
	since time.Time     // of the read under way
	// events that the stream had when the last read was over.
	events int
}

// newStall makes a watch that calls late once. Stop must be called.
func newStall(limit time.Duration, late func()) *stall {
	s := &stall{limit: limit}
	if limit > 0 {
		s.timer = time.AfterFunc(limit, late)
		s.timer.Stop()
	}
	return s
}

// before a read of a stream that has begun.
func (s *stall) before(begun bool) {
	if s.timer == nil || !begun {
		return
	}
	s.since = time.Now()
	s.timer.Reset(max(s.limit-s.quiet, 0))
}

// after a read; events is how many the stream has had.
func (s *stall) after(events int) {
	if s.timer == nil {
		return
	}
	s.timer.Stop()
	switch {
	case events != s.events:
		s.events, s.quiet = events, 0
	case !s.since.IsZero():
		s.quiet += time.Since(s.since)
	}
}

func (s *stall) stop() {
	if s.timer != nil {
		s.timer.Stop()
	}
}

// stalled ends an attempt whose stream has fallen silent.
func (a *attempt) stalled() {
	l := &a.decode
	f := l.failed(room.CodeDeadline, true, "sent nothing of the answer for %v in mid-stream (--inter-token-timeout); prefill worker %s: %s",
		a.r.cfg.InterTokenTimeout, a.prefill.w.name, a.prefill.phase())
	l.w.probeNow()
	a.cancel(f)
}
