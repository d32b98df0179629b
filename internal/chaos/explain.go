package chaos

import (
	"fmt"
	"slices"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// effect says which causes a kind of fault may have, and for how long after it was undone: sessions
// that it broke are noticed by pings, connections wait for retransmissions, workers come back with a probe.
type effect struct {
	codes []room.Code
	after time.Duration
	// grows: the after-effect is as long as the fault was, if that is longer. So TCP's retransmissions are.
	grows bool
}

var (
	// lost is what the end of a process or of a connection looks like, from its peers and behind them.
	// aborted is the echo that the other side gives when its own report does not arrive.
	lost = []room.Code{room.CodePeerLost, room.CodeUnavailable, room.CodeTransferFailed, room.CodeAborted}
	// damaged bytes can break any rule of a protocol.
	damaged = append(slices.Clone(lost), room.CodeProtocol, room.CodeMismatch)
)

// effects is the table of truth: which causes each kind may explain. deadline is not in it: it is true
// when the deadline has passed, whatever the reason (see explain). A code that no row has
// (engine_failed, internal, duplicate_room) is never true here: no fault of a schedule is an excuse for it.
var effects = map[Kind]effect{
	Kill:      {codes: lost, after: 4 * time.Second},
	Stop:      {codes: lost, after: 4 * time.Second},
	StopKill:  {codes: lost, after: 4 * time.Second},
	Restart:   {codes: append(slices.Clone(lost), room.CodeShutdown), after: 4 * time.Second},
	Partition: {codes: lost, after: 4 * time.Second, grows: true},
	HalfOpen:  {codes: lost, after: 4 * time.Second, grows: true},
	Drop:      {codes: lost, after: 4 * time.Second, grows: true},
	Delay:     {codes: lost, after: 4 * time.Second, grows: true},
	Reorder:   {codes: lost, after: 2 * time.Second},
	Duplicate: {codes: lost, after: 2 * time.Second},
	Reset:     {codes: lost, after: 4 * time.Second},
	Corrupt:   {codes: damaged, after: 6 * time.Second},
	Transfer:  {codes: append(slices.Clone(damaged), room.CodeShutdown, room.CodeChunkDropped), after: 4 * time.Second},
	Fill:      {codes: []room.Code{room.CodeCapacity}, after: 4 * time.Second},
	Abort:     {codes: []room.Code{room.CodeAborted}},
	Skew:      {}, // the deadline that passes is the request's own
	Cut:       {}, // clients that are cut see nothing
	Garbage:   {}, // nobody may notice
}

// deadlineEarly is how much before the deadline the cause deadline may be told: a worker's scheduler ends a
// request a twentieth of the time left before its edge does, and a wait for session or pages a tenth before
// that, each 200 ms at most; so the error that knows most arrives first.
func deadlineEarly(d time.Duration) time.Duration {
	return min(d/20, 200*time.Millisecond) + min(d/10, 200*time.Millisecond) + 10*time.Millisecond
}

// explain says why a request's cause is not true; "" if it is.
func (j *judge) explain(r *Request, e *End) string {
	code := e.Cause.Code
	switch {
	case r.Deadline <= 0:
		if code == room.CodeInvalid && e.Status == 400 {
			return ""
		}
		return "a deadline that has passed already is invalid_request"
	case code == room.CodeDeadline:
		if early := r.Deadline - deadlineEarly(r.Deadline); e.Over-e.Sent < early {
			return fmt.Sprintf("its deadline had not passed, not even %v", early)
		}
		return ""
	case code == room.CodeCapacity && r.Ask.TooLarge:
		return ""
	case code == room.CodeAborted && e.Aborted:
		return ""
	}
	used := j.used(r)
	for _, f := range j.Faults {
		x := effects[f.Kind]
		after := x.after
		if x.grows {
			after = max(after, f.To-f.From)
		}
		if slices.Contains(x.codes, code) && j.reaches(f.Fault, used) && (Span{f.From, f.To + after}).overlaps(Span{e.Sent, e.Over}) {
			return ""
		}
	}
	return fmt.Sprintf("nothing that happened to %v explains cause %s", usedNames(used), code)
}

// used are the processes that a request could have used: the pair that the router names, if there was one
// attempt; otherwise all (nil).
func (j *judge) used(r *Request) map[string]bool {
	lines := j.lines[r.RID]
	if len(lines) != 1 || lines[0].Attempts != 1 || lines[0].Prefill == "" || lines[0].Decode == "" {
		return nil
	}
	return map[string]bool{router: true, lines[0].Prefill: true, lines[0].Decode: true}
}

func usedNames(used map[string]bool) any {
	if used == nil {
		return "any process"
	}
	var out []string
	for name := range used {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// reaches reports whether a fault can have touched a request that used these processes.
func (j *judge) reaches(f Fault, used map[string]bool) bool {
	if used == nil || f.Target == Clients {
		return true
	}
	a, b, link := f.Ends()
	switch {
	case !link:
		return used[f.Target]
	case j.Wide:
		return a != router && used[a] || b != router && used[b]
	default:
		return used[a] && used[b]
	}
}
