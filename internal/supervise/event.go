package supervise

import (
	"fmt"
	"strings"
	"time"
)

// Kind of an [Event].
type Kind uint8

const (
	EventStarted    Kind = 1 // the process runs; PID is set
	EventReady      Kind = 2 // it serves; Ready is what it reported, if it reports
	EventStuck      Kind = 3 // it is silent for too long and is being killed; Reason says what was asked
	EventExited     Kind = 4 // the process is gone; Reason, Tail, Expected
	EventRestarting Kind = 5 // it will be started again after Backoff
)

// String survives unknown values.
func (k Kind) String() string {
	switch k {
	case EventStarted:
		return "started"
	case EventReady:
		return "ready"
	case EventStuck:
		return "stuck"
	case EventExited:
		return "exited"
	case EventRestarting:
		return "restarting"
	default:
		return fmt.Sprintf("event(%d)", uint8(k))
	}
}

// Event is something that happened to a child.
type Event struct {
	Time time.Time
	Name string
	Kind Kind
	// PID of the life meant; 0 if it never started.
	PID int
	// Life counts the starts of this child from 1.
	Life  int
	Ready ReadyInfo
	// Reason is for people.
	Reason string
	// Expected: the supervisor is ending and asked for it.
	Expected bool
	// Tail is the last lines of the child's standard error, oldest first.
	Tail    []string
	Backoff time.Duration
}

// String is one line for people.
func (e Event) String() string {
	s := fmt.Sprintf("%s %s", e.Name, e.Kind)
	if e.PID != 0 {
		s += fmt.Sprintf(" (pid %d)", e.PID)
	}
	if e.Reason != "" {
		s += ": " + e.Reason
	}
	if e.Kind == EventRestarting {
		s += " in " + e.Backoff.String()
	}
	return s
}

// ExitError: a child ended again and again before it was ready.
type ExitError struct {
	Name   string
	Tries  int
	Reason string   // of the last end
	Tail   []string // its last lines of standard error
}

// Error names the child, why it ended, and what it said last.
func (e *ExitError) Error() string {
	s := fmt.Sprintf("%s ended %d times before it was ready: %s", e.Name, e.Tries, e.Reason)
	if len(e.Tail) > 0 {
		s += "; it said: " + strings.Join(e.Tail, " | ")
	}
	return s
}
