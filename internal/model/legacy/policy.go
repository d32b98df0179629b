package legacy

import (
	"fmt"
	"strings"
)

// Policy is a set of rules for the three threads.
type Policy struct {
	Name string
	// Does is the policy in one line, for people.
	Does string
	// production: package room decides, and nothing of the rest is meant.
	production bool
	// sticky (repair A): a terminal status is never replaced.
	sticky bool
	// dropFails (repair B): a chunk skipped for want of transfer information forces Failed
	// and records a failure, unless the status is Success.
	dropFails bool
	// mooncake: ABORT keeps the transfer information and records no reason; a chunk
	// of a cleared room is skipped; workers write no status but the last one; Bootstrapping has a timeout.
	mooncake bool
}

var policies = []Policy{
	{Name: "legacy", Does: "status merged with max(), ABORT drops the transfer information, a chunk without it is skipped"},
	{Name: "fix-a", sticky: true, Does: "legacy, but a terminal status sticks"},
	{Name: "fix-b", dropFails: true, Does: "legacy, but a skipped chunk forces Failed and records a failure"},
	{Name: "fix-ab", sticky: true, dropFails: true, Does: "both repairs"},
	{Name: "mooncake", mooncake: true, Does: "ABORT drops nothing, chunks are guarded by status, workers never write Transferring"},
	{Name: "baton", production: true, Does: "the production machine: room.Sender"},
}

// Policies are all of them, in the order of the story.
func Policies() []Policy { return append([]Policy(nil), policies...) }

// PolicyNamed finds a policy; the error lists what there is.
func PolicyNamed(name string) (Policy, error) {
	var names []string
	for _, p := range policies {
		if p.Name == name {
			return p, nil
		}
		names = append(names, p.Name)
	}
	return Policy{}, fmt.Errorf("no policy %q; there are %s", name, strings.Join(names, ", "))
}

// status is what the shared map holds for a room: absent, or SGLang's KVPoll plus one.
type status uint8

const (
	absent status = iota
	failed
	bootstrapping
	waiting
	transferring
	success
)

func (s status) terminal() bool { return s == failed || s == success }

var statusNames = [...]string{"-", "Failed", "Bootstrapping", "WaitingForInput", "Transferring", "Success"}

// String survives unknown values.
func (s status) String() string {
	if int(s) < len(statusNames) {
		return statusNames[s]
	}
	return fmt.Sprintf("status(%d)", uint8(s))
}

// poll is the number that SGLang gives the status.
func (s status) poll() int { return int(s) - 1 }

// merge is update_status: what is written when want is asked for and cur was read, and
// whether anything is. Failed is the lowest number, so max() of a failed room and anything
// else forgets the failure.
func (p *Policy) merge(cur, want status) (status, bool) {
	switch {
	case cur == absent:
		return want, want != failed // a room that was cleared is not created again as failed
	case p.sticky && cur.terminal():
		return cur, false
	case want == failed:
		return failed, true
	default:
		return max(cur, want), true
	}
}

// guard reports whether a chunk of a room with this status is not looked at any further.
func (p *Policy) guard(cur status) bool {
	return cur == failed || p.mooncake && cur == absent
}

// reason is why a request failed, or was said to have.
type reason uint8

const (
	noReason reason = iota
	aborted
	cancelled
	dropped
	broken
	timedOut
	outOfOrder
)

var reasonNames = [...]string{"no cause", "aborted by the decode side", "cancelled", "chunk dropped", "transfer information gone", "bootstrap timeout", "chunks out of order"}

// String survives unknown values.
func (r reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}
