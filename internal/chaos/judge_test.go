package chaos

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

const sec = time.Second

// one is an honest run of one request: asked at 10 s with a deadline of 5 s, answered a second later by
// prefill-0 and decode-0.
func one() *History {
	r := &Request{ID: 1, RID: "r1", Ask: Ask{Name: "a prompt", Want: "right"}, Stream: true, Deadline: 5 * sec, Manner: Patient}
	e := &End{Sent: 10 * sec, Over: 11 * sec, Ended: true, Status: 200, Text: "right", Finished: 1, Done: 1}
	return &History{
		Requests: []*Request{r}, Ends: map[int]*End{1: e},
		Lines: []Line{{Life: 1, RID: "r1", Outcome: "ok", Cause: "none", Prefill: "prefill-0", Decode: "decode-0", Attempts: 1}},
		Lives: []Life{{Process: "router", Life: 1, Final: true, Requests: map[string]int{"ok/none": 1}}, {Process: "decode-0", Life: 1, Final: true}},
	}
}

// failing is the same request with an error instead, which the router logged truthfully.
func failing(code room.Code, faults ...Done) *History {
	h := one()
	*h.Ends[1] = End{Sent: 10 * sec, Over: 11 * sec, Ended: true, Status: 502, Failed: 1, Cause: &room.Cause{Code: code, Detail: "words"}}
	h.Lines[0].Outcome, h.Lines[0].Cause = "error", string(code)
	h.Lives[0].Requests = map[string]int{"error/" + string(code): 1}
	h.Faults = faults
	return h
}

func done(from, to time.Duration, line string) Done {
	f, err := ParseFault(line)
	if err != nil {
		panic(err)
	}
	return Done{f, Span{from, to}}
}

// TestJudge: fabricated histories, honest and not. Each dishonest one breaks exactly the rule it is to break.
func TestJudge(t *testing.T) {
	killed := done(9*sec, 10500*time.Millisecond, "9s kill prefill-0 for=1s")
	routerKilled := done(9*sec, 12*sec, "9s kill router for=1s")
	with := func(h *History, change func(*History, *End)) *History {
		change(h, h.Ends[1])
		return h
	}
	for name, c := range map[string]struct {
		h    *History
		want []Rule
	}{
		"honest":                 {one(), nil},
		"never ended":            {with(one(), func(h *History, e *End) { e.Ended = false }), []Rule{OneEnd}},
		"no end recorded":        {with(one(), func(h *History, e *End) { delete(h.Ends, 1) }), []Rule{OneEnd}},
		"ended twice":            {with(one(), func(h *History, e *End) { e.Finished = 2 }), []Rule{HasCause, OneEnd, Agree}},
		"went on":                {with(one(), func(h *History, e *End) { e.Trailing = 1 }), []Rule{OneEnd}},
		"no [DONE]":              {with(one(), func(h *History, e *End) { e.Done = 0 }), []Rule{OneEnd}},
		"error and [DONE]":       {with(failing(room.CodePeerLost, killed), func(h *History, e *End) { e.Done = 1 }), []Rule{OneEnd}},
		"wrong token":            {with(one(), func(h *History, e *End) { e.Text = "wrong" }), []Rule{Tokens}},
		"short answer":           {with(one(), func(h *History, e *End) { e.Text = "righ" }), []Rule{Tokens}},
		"wrong before a failure": {with(failing(room.CodePeerLost, killed), func(h *History, e *End) { e.Text = "rx" }), []Rule{Tokens}},
		"too large and answered": {with(one(), func(h *History, e *End) { h.Requests[0].Ask.TooLarge = true }), []Rule{Tokens}},

		"in its last second": {with(one(), func(h *History, e *End) { e.Over = 16 * sec }), nil},
		"late":               {with(one(), func(h *History, e *End) { e.Over = 16*sec + time.Millisecond }), []Rule{InTime}},
		"late while the router was stopped": {with(one(), func(h *History, e *End) {
			e.Over = 20 * sec
			h.Faults = []Done{done(14*sec, 19500*time.Millisecond, "14s stop router for=5s")}
		}), nil},
		"later than that": {with(one(), func(h *History, e *End) {
			e.Over = 20 * sec
			h.Faults = []Done{done(14*sec, 18*sec, "14s stop router for=4s")}
		}), []Rule{InTime}},
		"late because there was no core": {with(one(), func(h *History, e *End) {
			e.Over, h.Starved = 17*sec, []Span{{2 * sec, 3 * sec}, {12 * sec, 12500 * time.Millisecond}, {13 * sec, 13500 * time.Millisecond}}
		}), nil},
		"late and there were cores at that time": {with(one(), func(h *History, e *End) {
			e.Over, h.Starved = 17*sec, []Span{{2 * sec, 9 * sec}, {12 * sec, 12900 * time.Millisecond}, {18 * sec, 20 * sec}}
		}), []Rule{InTime}},
		"late for a slow reader": {with(one(), func(h *History, e *End) { e.Over, e.Paused = 17*sec, sec }), nil},

		"no cause":                     {with(failing(room.CodePeerLost, killed), func(h *History, e *End) { e.Cause, e.Broken = nil, "connection reset" }), []Rule{HasCause}},
		"no words":                     {with(failing(room.CodePeerLost, killed), func(h *History, e *End) { e.Cause.Detail = "" }), []Rule{HasCause}},
		"broken by the router's death": {with(failing(room.CodePeerLost, routerKilled), func(h *History, e *End) { e.Cause, e.Broken = nil, "EOF" }), nil},

		"killed worker":                         {failing(room.CodePeerLost, killed), nil},
		"nothing happened":                      {failing(room.CodePeerLost), []Rule{Truth}},
		"killed worker of another pair":         {failing(room.CodePeerLost, done(9*sec, 10*sec, "9s kill prefill-1 for=1s")), []Rule{Truth}},
		"killed too long ago":                   {failing(room.CodePeerLost, done(2*sec, 3*sec, "2s kill prefill-0 for=1s")), []Rule{Truth}},
		"killed afterwards":                     {failing(room.CodePeerLost, done(12*sec, 13*sec, "12s kill prefill-0 for=1s")), []Rule{Truth}},
		"a kill is no mismatch":                 {failing(room.CodeMismatch, killed), []Rule{Truth}},
		"damaged bytes may be one":              {failing(room.CodeMismatch, done(9*sec, 10*sec, "9s corrupt decode-0~prefill-0 for=1s p=0.1 port=session")), nil},
		"damage on another link":                {failing(room.CodeMismatch, done(9*sec, 10*sec, "9s corrupt decode-1~prefill-0 for=1s p=0.1 port=session")), []Rule{Truth}},
		"long partition, long after":            {failing(room.CodePeerLost, done(0, 5*sec, "0s partition decode-0~prefill-0 for=5s")), nil},
		"engine failed":                         {failing(room.CodeEngine, killed), []Rule{Truth}},
		"internal":                              {failing(room.CodeInternal, killed), []Rule{Truth}},
		"garbage explains nothing":              {failing(room.CodePeerLost, done(9*sec, 10*sec, "9s garbage prefill-0")), []Rule{Truth}},
		"deadline too early":                    {failing(room.CodeDeadline, killed), []Rule{Truth}},
		"deadline":                              {with(failing(room.CodeDeadline), func(h *History, e *End) { e.Over = 14900 * time.Millisecond }), nil},
		"aborted by nobody":                     {failing(room.CodeAborted), []Rule{Truth}},
		"aborted":                               {with(failing(room.CodeAborted), func(h *History, e *End) { e.Aborted = true }), nil},
		"too large":                             {with(failing(room.CodeCapacity), func(h *History, e *End) { h.Requests[0].Ask.TooLarge = true }), nil},
		"full for no reason":                    {failing(room.CodeCapacity), []Rule{Truth}},
		"full":                                  {failing(room.CodeCapacity, done(9*sec, 10*sec, "9s fill clients n=3")), nil},
		"past deadline":                         {with(failing(room.CodeInvalid), func(h *History, e *End) { h.Requests[0].Deadline, e.Status, h.Lines[0].RID = 0, 400, "" }), nil},
		"past deadline taken for another cause": {with(failing(room.CodePeerLost, killed), func(h *History, e *End) { h.Requests[0].Deadline, h.Lines[0].RID = 0, "" }), []Rule{Truth}},

		"router logs nothing": {with(one(), func(h *History, e *End) { h.Lines, h.Lives[0].Requests = nil, map[string]int{} }), []Rule{Agree, Counted}},
		"router logs twice":   {with(one(), func(h *History, e *End) { h.Lines = append(h.Lines, h.Lines[0]) }), []Rule{Agree, Counted, Counted}},
		"router logs another cause": {with(failing(room.CodePeerLost, killed), func(h *History, e *End) {
			h.Lines[0].Cause, h.Lives[0].Requests = "unavailable", map[string]int{"error/unavailable": 1}
		}), []Rule{Agree}},
		"router logs an error of what was answered": {with(one(), func(h *History, e *End) {
			h.Lines[0].Outcome, h.Lives[0].Requests = "error", map[string]int{"error/none": 1}
		}), []Rule{Agree}},
		"router counts something else":                 {with(one(), func(h *History, e *End) { h.Lives[0].Requests["ok/none"] = 2 }), []Rule{Counted}},
		"last counts of a killed router are not known": {with(one(), func(h *History, e *End) { h.Lives[0].Final, h.Lives[0].Requests = false, nil }), nil},

		"room logged twice": {with(one(), func(h *History, e *End) {
			h.Failures = []Failure{{"decode-0", 1, "7#1"}, {"decode-0", 1, "7#1"}}
			h.Lives[1].FailedRooms = 2
		}), []Rule{Once}},
		"room logged by both sides": {with(one(), func(h *History, e *End) {
			h.Failures = []Failure{{"decode-0", 1, "7#1"}, {"prefill-0", 1, "7#1"}}
			h.Lives[1].FailedRooms = 1
		}), nil},
		"room counted and not logged": {with(one(), func(h *History, e *End) { h.Lives[1].FailedRooms = 1 }), []Rule{Counted}},
		"panic in the log":            {with(one(), func(h *History, e *End) { h.Odd = []string{"panic"} }), []Rule{Odd}},
		"page held":                   {with(one(), func(h *History, e *End) { h.Idle = []string{"1 page"} }), []Rule{Baseline}},
		"finding in the trace":        {with(one(), func(h *History, e *End) { h.Trace = []string{"room 7"} }), []Rule{Traced}},
		"client left": {with(one(), func(h *History, e *End) {
			*e = End{Sent: e.Sent, Over: e.Over, Ended: true, Left: true, Status: 200, Text: "ri"}
		}), nil},
	} {
		t.Run(name, func(t *testing.T) {
			var got []Rule
			found := Judge(c.h)
			for _, v := range found {
				got = append(got, v.Rule)
			}
			slices.Sort(got)
			slices.Sort(c.want)
			if !slices.Equal(got, c.want) {
				t.Errorf("rules %v, want %v: %v", got, c.want, found)
			}
		})
	}
}

// TestWideLinks: without namespaces a link's fault hits whoever uses the port.
func TestWideLinks(t *testing.T) {
	h := failing(room.CodePeerLost, done(9*sec, 10*sec, "9s partition decode-1~prefill-0 for=1s"))
	if v := Judge(h); len(v) != 1 || v[0].Rule != Truth {
		t.Errorf("another link explains it: %v", v)
	}
	h.Wide = true
	if v := Judge(h); len(v) != 0 {
		t.Errorf("wide: %v", v)
	}
}

// TestEffects: every kind has a row, and no row excuses what is never true.
func TestEffects(t *testing.T) {
	for _, k := range Kinds() {
		x, ok := effects[k]
		if !ok {
			t.Errorf("%s has no row", k)
		}
		for _, never := range []room.Code{room.CodeEngine, room.CodeInternal, room.CodeDuplicate, room.CodeInvalid, room.CodeClientGone, room.CodeDeadline} {
			if slices.Contains(x.codes, never) {
				t.Errorf("%s explains %s", k, never)
			}
		}
	}
	if len(effects) != len(kinds) {
		t.Errorf("%d rows for %d kinds", len(effects), len(kinds))
	}
}

func TestViolationsSayWhat(t *testing.T) {
	h := failing(room.CodePeerLost)
	v := Judge(h)
	if len(v) != 1 {
		t.Fatal(v)
	}
	for _, want := range []string{"truth", "request 1", "peer_lost", "decode-0", "words"} {
		if !strings.Contains(v[0].String(), want) {
			t.Errorf("%q does not say %q", v[0], want)
		}
	}
}
