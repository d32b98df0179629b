package chaos

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Slack is how late after its deadline a request may end.
const Slack = time.Second

// Span is a stretch of the run.
type Span struct{ From, To time.Duration }

// overlaps reports whether s and o have a moment in common.
func (s Span) overlaps(o Span) bool { return s.From <= o.To && o.From <= s.To }

// Done is a fault as it was done.
type Done struct {
	Fault
	Span // from its first act until everything was undone and the process was ready again
}

// Line is the one line that a router writes at a request's end.
type Line struct {
	Life           int // of the router: 1, 2, ... counts its starts
	RID            string
	Outcome, Cause string
	Prefill        string // process names, of the last attempt; "" if there was none
	Decode         string
	Attempts       int
}

// Failure is one log line of a failed room.
type Failure struct {
	Process string
	Life    int
	Room    string // id#generation
}

// Life is what one run of a process counted until it was last looked at.
type Life struct {
	Process string
	Life    int
	// Final: looked at when nothing ran any more, and before the process was ended. Otherwise its
	// last counts are not known and nothing is concluded from them.
	Final bool
	// Ends of requests at the router, by "outcome/cause".
	Requests map[string]int
	// FailedRooms that a worker counted.
	FailedRooms int
}

// History is all that was asked, done and seen. Times are since the start of the load, on the
// clock of the clients.
type History struct {
	Requests []*Request
	Ends     map[int]*End // by Request.ID
	Faults   []Done
	// Starved are times in which the router, or this process, wanted to run and got no core, so that being
	// late proves nothing but that others had them.
	Starved  []Span
	Lines    []Line
	Failures []Failure
	Lives    []Life
	// Odd are log lines that no fault explains: level ERROR, panics, reports of the race detector.
	Odd []string
	// Idle are differences from the idle baseline after the end.
	Idle []string
	// Trace are findings of the check of the recorded room events.
	Trace []string
	// Wide: faults of a link hit everybody who uses the port (proxies do not know who dials).
	Wide bool
}

// Rule is what a violation breaks.
type Rule string

// The rules of the judge.
const (
	OneEnd   Rule = "one end"   // every request ends, once
	InTime   Rule = "in time"   // before its deadline plus Slack
	Tokens   Rule = "tokens"    // every success is right, and every failure's text a beginning of it
	HasCause Rule = "cause"     // every failure tells one
	Truth    Rule = "truth"     // which something that happened explains
	Agree    Rule = "agreement" // the router's log says what its client saw
	Counted  Rule = "counters"  // what is counted is what was logged
	Once     Rule = "once"      // a failed room is logged once on each side
	Odd      Rule = "log"       // nothing says ERROR, panics or races
	Baseline Rule = "baseline"  // afterwards nothing is held
	Traced   Rule = "trace"     // the recorded room events follow the table
)

// Violation is a broken promise.
type Violation struct {
	Rule Rule
	What string
}

// String is for people.
func (v Violation) String() string { return string(v.Rule) + ": " + v.What }

// judge holds the history and what was found.
type judge struct {
	*History
	lines map[string][]Line // by rid
	found []Violation
}

// Judge says what is wrong with a run.
func Judge(h *History) []Violation {
	j := &judge{History: h, lines: map[string][]Line{}}
	for _, l := range h.Lines {
		if l.RID != "" {
			j.lines[l.RID] = append(j.lines[l.RID], l)
		}
	}
	for _, r := range h.Requests {
		e := h.Ends[r.ID]
		if e == nil || !e.Ended {
			j.blame(OneEnd, "%v never ended", r)
			continue
		}
		j.shape(r, e)
		j.time(r, e)
		j.text(r, e)
		j.cause(r, e)
		j.line(r, e)
	}
	j.accounts()
	j.rooms()
	for rule, list := range map[Rule][]string{Odd: h.Odd, Baseline: h.Idle, Traced: h.Trace} {
		for _, what := range list {
			j.blame(rule, "%s", what)
		}
	}
	slices.SortStableFunc(j.found, func(a, b Violation) int { return strings.Compare(string(a.Rule), string(b.Rule)) })
	return j.found
}

func (j *judge) blame(r Rule, format string, args ...any) {
	j.found = append(j.found, Violation{r, fmt.Sprintf(format, args...)})
}

// shape: exactly one end, and a failure must not look like a success.
func (j *judge) shape(r *Request, e *End) {
	switch {
	case e.Finished > 1 || e.Done > 1 || e.Failed > 1:
		j.blame(OneEnd, "%v ended more than once: %v", r, e)
	case e.Failed > 0 && e.Done > 0:
		j.blame(OneEnd, "%v failed and was done: %v", r, e)
	case e.Trailing > 0:
		j.blame(OneEnd, "%v went on after its end: %v", r, e)
	case r.Stream && e.OK() && e.Done != 1:
		j.blame(OneEnd, "%v was answered without [DONE]: %v", r, e)
	case e.Status == 200 && !e.Left && e.Broken == "" && e.Finished+e.Failed == 0:
		j.blame(OneEnd, "%v looks whole without an end: %v", r, e)
	}
}

// disturbed returns the last moment at which the router was hit within a request's life; ok is false
// if it was not.
func (j *judge) disturbed(s Span) (until time.Duration, ok bool) {
	for _, f := range j.Faults {
		if f.Target == router && f.Kind != Garbage && f.overlaps(s) {
			until, ok = max(until, f.To), true
		}
	}
	return until, ok
}

// time: by the deadline. A router that is stopped or gone can tell nobody anything: its clients hear of
// it as soon as it goes on, or at once if it dies; so the bound is then counted from there. Time in which the
// machine gave the router or this process no core is nobody's fault either; a router that hangs wants none.
func (j *judge) time(r *Request, e *End) {
	bound := e.Sent + max(r.Deadline, 0) + Slack + e.Paused
	life := Span{e.Sent, e.Over}
	if until, hit := j.disturbed(life); hit {
		bound = max(bound, until+Slack)
	}
	bound += j.starved(life)
	if e.Over > bound {
		j.blame(InTime, "%v ended %v after its bound: %v", r, (e.Over - bound).Round(time.Millisecond), e)
	}
}

// starved adds up the starvation within s. Starved is in order of time.
func (j *judge) starved(s Span) (sum time.Duration) {
	first, _ := slices.BinarySearchFunc(j.Starved, s.From, func(x Span, at time.Duration) int { return cmp.Compare(x.To, at) })
	for _, x := range j.Starved[first:] {
		if x.From > s.To {
			break
		}
		sum += x.To - x.From
	}
	return sum
}

func (j *judge) text(r *Request, e *End) {
	switch {
	case e.OK() && e.Text != r.Ask.Want:
		j.blame(Tokens, "%v was answered %q, right is %q", r, e.Text, r.Ask.Want)
	case e.OK() && r.Ask.TooLarge:
		j.blame(Tokens, "%v was answered although it is too large: %v", r, e)
	case !strings.HasPrefix(r.Ask.Want, e.Text):
		j.blame(Tokens, "%v began with %q, right is %q", r, e.Text, r.Ask.Want)
	}
}

// cause: a failure tells one, with words, and it is true.
func (j *judge) cause(r *Request, e *End) {
	if e.OK() || e.Left && e.Cause == nil {
		return
	}
	if e.Cause == nil {
		if _, hit := j.disturbed(Span{e.Sent, e.Over}); !hit {
			j.blame(HasCause, "%v ended without a word: %v %s", r, e, e.Raw)
		}
		return
	}
	if e.Cause.Detail == "" || e.Cause.Code == "" {
		j.blame(HasCause, "%v: the error does not say what happened: %s", r, e.Raw)
	}
	if why := j.explain(r, e); why != "" {
		j.blame(Truth, "%v: %s: %v", r, why, e)
	}
}

// line: the router wrote one line for the request, and it says what the client saw.
func (j *judge) line(r *Request, e *End) {
	lines := j.lines[r.RID]
	_, hit := j.disturbed(Span{e.Sent, e.Over})
	// Refused before it was looked at, or gone before it had arrived: such lines know no rid.
	unknown := r.Deadline <= 0 || e.Left
	switch {
	case len(lines) > 1:
		j.blame(Agree, "%v has %d lines in the router's log: %+v", r, len(lines), lines)
	case len(lines) == 0 && !hit && !unknown:
		j.blame(Agree, "%v has no line in the router's log: %v", r, e)
	case len(lines) == 0 || hit || e.Left: // what a client that left would have heard is open
	case e.OK() != (lines[0].Outcome == "ok"):
		j.blame(Agree, "%v: the router says %s/%s, its client: %v", r, lines[0].Outcome, lines[0].Cause, e)
	case e.Cause != nil && string(e.Cause.Code) != lines[0].Cause:
		j.blame(Agree, "%v: the router says cause %s, its client: %v", r, lines[0].Cause, e)
	}
}

// accounts: the router counted what it logged, and logged what was sent.
func (j *judge) accounts() {
	byLife := map[int]map[string]int{}
	for _, l := range j.Lines {
		if byLife[l.Life] == nil {
			byLife[l.Life] = map[string]int{}
		}
		byLife[l.Life][l.Outcome+"/"+l.Cause]++
	}
	for _, l := range j.Lives {
		if l.Process == router && l.Final && !maps.Equal(l.Requests, byLife[l.Life]) {
			j.blame(Counted, "router life %d counted %v and logged %v", l.Life, l.Requests, byLife[l.Life])
		}
	}
	routerHit := slices.ContainsFunc(j.Faults, func(f Done) bool { return f.Target == router && f.Kind != Garbage })
	strangers := 0 // one of the starts of garbage is a request's head, and what follows may be long enough for its body
	for _, f := range j.Faults {
		if f.Target == router && f.Kind == Garbage {
			strangers++
		}
	}
	left := 0 // a client that left may have done so before the router knew of it
	for _, e := range j.Ends {
		if e.Left {
			left++
		}
	}
	if n, sent := len(j.Lines), len(j.Requests); n > sent+strangers || !routerHit && n < sent-left {
		j.blame(Counted, "the router logged %d requests; %d were sent, of which %d clients left", n, sent, left)
	}
}

// rooms: each failed room has one line a process, and was counted.
func (j *judge) rooms() {
	type place struct {
		process string
		life    int
	}
	seen, count := map[Failure]int{}, map[place]int{}
	for _, f := range j.Failures {
		seen[f]++
		count[place{f.Process, f.Life}]++
		if seen[f] == 2 {
			j.blame(Once, "%s logged the failure of room %s more than once", f.Process, f.Room)
		}
	}
	for _, l := range j.Lives {
		if n := count[place{l.Process, l.Life}]; l.Process != router && l.Final && l.FailedRooms != n {
			j.blame(Counted, "%s life %d counted %d failed rooms and logged %d", l.Process, l.Life, l.FailedRooms, n)
		}
	}
}
