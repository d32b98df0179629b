package chaos

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Kind is what a fault does.
type Kind string

// The kinds, by what they happen to. The duration is how long the state lasts.
const (
	// Processes.
	Kill     Kind = "kill"      // kill -9; down for the duration, then started again
	Stop     Kind = "stop"      // SIGSTOP, after the duration SIGCONT
	StopKill Kind = "stop-kill" // SIGSTOP, after the duration kill -9, started again
	Restart  Kind = "restart"   // SIGTERM, started again when it has ended
	// Links, both directions unless said otherwise.
	Partition Kind = "partition" // nothing passes
	HalfOpen  Kind = "half-open" // nothing passes from the first to the second
	Drop      Kind = "drop"      // packets are lost with chance p
	Delay     Kind = "delay"     // by delay, and up to as much more
	Reorder   Kind = "reorder"   // packets are overtaken with chance p
	Duplicate Kind = "duplicate" // packets come twice with chance p
	Reset     Kind = "reset"     // every connection on which something is sent is reset
	Corrupt   Kind = "corrupt"   // payload bytes are changed with chance p, on port=data or port=session
	// Transfers of a prefill worker: it is restarted with a rule of package fault, and without it at the end.
	Transfer Kind = "transfer"
	// Clients and their load.
	Fill    Kind = "fill"    // n requests at once that want most of the pages, or more than there are
	Skew    Kind = "skew"    // requests get short deadlines
	Cut     Kind = "cut"     // all clients break their connections
	Abort   Kind = "abort"   // all live requests are ended by /abort_request
	Garbage Kind = "garbage" // random bytes on every port of a process
)

// place is what a kind happens to.
type place uint8

const (
	onProcess place = iota + 1
	onLink
	onPrefill
	onClients
)

// kinds says where each kind happens and which parameters it has.
var kinds = map[Kind]struct {
	where place
	needs []string
}{
	Kill: {onProcess, nil}, Stop: {onProcess, nil}, StopKill: {onProcess, nil}, Restart: {onProcess, nil}, Garbage: {onProcess, nil},
	Partition: {onLink, nil}, HalfOpen: {onLink, nil}, Reset: {onLink, nil}, Delay: {onLink, []string{"delay"}},
	Drop: {onLink, []string{"p"}}, Reorder: {onLink, []string{"p"}}, Duplicate: {onLink, []string{"p"}}, Corrupt: {onLink, []string{"p", "port"}},
	Transfer: {onPrefill, []string{"rule"}},
	Fill:     {onClients, []string{"n"}}, Skew: {onClients, nil}, Cut: {onClients, nil}, Abort: {onClients, nil},
}

// Kinds lists all kinds in alphabetical order.
func Kinds() []Kind {
	out := make([]Kind, 0, len(kinds))
	for k := range kinds {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

// Clients is the target of faults that happen to the load.
const Clients = "clients"

// Fault is one line of a schedule.
type Fault struct {
	At     time.Duration // from the start of the load
	Kind   Kind
	Target string        // a process, a link "a~b", or Clients
	For    time.Duration // how long it lasts; 0 is a moment

	P     float64       // chance of a packet
	Delay time.Duration // of a packet
	Port  string        // "data" or "session"
	N     int           // requests
	Rule  string        // of package fault
}

// String is the fault as a line of a schedule; ParseFault reads it back.
func (f Fault) String() string {
	s := fmt.Sprintf("%v %s %s", f.At, f.Kind, f.Target)
	add := func(is bool, format string, v any) {
		if is {
			s += fmt.Sprintf(format, v)
		}
	}
	add(f.For != 0, " for=%v", f.For)
	add(f.P != 0, " p=%v", f.P)
	add(f.Delay != 0, " delay=%v", f.Delay)
	add(f.Port != "", " port=%s", f.Port)
	add(f.N != 0, " n=%d", f.N)
	add(f.Rule != "", " rule=%q", f.Rule)
	return s
}

// Ends of a link; ok is false if the target is none.
func (f Fault) Ends() (a, b string, ok bool) { return strings.Cut(f.Target, "~") }

// FormatSchedule prints faults, one a line.
func FormatSchedule(faults []Fault) string {
	var b strings.Builder
	for _, f := range faults {
		fmt.Fprintln(&b, f)
	}
	return b.String()
}

// ParseSchedule reads one fault a line; "#" starts a comment. The error names every bad line.
func ParseSchedule(text string) ([]Fault, error) {
	var out []Fault
	var errs []error
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		f, err := ParseFault(line)
		if err != nil {
			errs = append(errs, fmt.Errorf("chaos: line %d: %w", i+1, err))
			continue
		}
		out = append(out, f)
	}
	slices.SortStableFunc(out, func(a, b Fault) int { return int(a.At - b.At) })
	return out, errors.Join(errs...)
}

// ParseFault reads "TIME KIND TARGET key=value ...".
func ParseFault(line string) (f Fault, err error) {
	words := strings.Fields(line)
	if len(words) < 3 {
		return f, fmt.Errorf("%q: want TIME KIND TARGET, for example: 1.5s kill prefill-0 for=200ms", line)
	}
	if f.At, err = time.ParseDuration(words[0]); err != nil || f.At < 0 {
		return f, fmt.Errorf("%q: not a time such as 1.5s", words[0])
	}
	f.Kind, f.Target = Kind(words[1]), words[2]
	rest := strings.TrimSpace(line)
	for _, w := range words[:3] {
		rest = strings.TrimSpace(strings.TrimPrefix(rest, w))
	}
	for rest != "" {
		key, value, ok := strings.Cut(rest, "=")
		if !ok {
			return f, fmt.Errorf("%q: want key=value", rest)
		}
		if strings.HasPrefix(value, `"`) {
			quoted, err := strconv.QuotedPrefix(value)
			if err != nil {
				return f, fmt.Errorf("%s=%s: quotes do not end", key, value)
			}
			rest = strings.TrimSpace(value[len(quoted):])
			value, _ = strconv.Unquote(quoted) // QuotedPrefix has checked it
		} else {
			value, rest, _ = strings.Cut(value, " ")
			rest = strings.TrimSpace(rest)
		}
		if err := f.set(key, value); err != nil {
			return f, fmt.Errorf("%s=%s: %w", key, value, err)
		}
	}
	return f, f.check()
}

func (f *Fault) set(key, value string) (err error) {
	switch key {
	case "for":
		f.For, err = time.ParseDuration(value)
	case "delay":
		f.Delay, err = time.ParseDuration(value)
	case "p":
		f.P, err = strconv.ParseFloat(value, 64)
	case "n":
		f.N, err = strconv.Atoi(value)
	case "port":
		f.Port = value
	case "rule":
		f.Rule = value
	default:
		err = errors.New("unknown; want for, p, delay, port, n or rule")
	}
	return err
}

// check looks at the fault as a whole.
func (f *Fault) check() error {
	k, known := kinds[f.Kind]
	if !known {
		return fmt.Errorf("unknown kind %q, want one of %v", f.Kind, Kinds())
	}
	_, b, isLink := f.Ends()
	switch {
	case k.where == onLink && (!isLink || b == ""):
		return fmt.Errorf("%s happens to a link such as router~decode-0, not to %s", f.Kind, f.Target)
	case k.where != onLink && isLink:
		return fmt.Errorf("%s does not happen to a link", f.Kind)
	case k.where == onClients != (f.Target == Clients):
		return fmt.Errorf("%s happens to %s", f.Kind, map[bool]string{true: Clients, false: "processes"}[k.where == onClients])
	case k.where == onPrefill && !strings.HasPrefix(f.Target, "prefill-"):
		return fmt.Errorf("%s happens to prefill workers", f.Kind)
	case f.For < 0 || f.Delay < 0 || f.N < 0 || !(f.P >= 0 && f.P <= 1):
		return errors.New("a value is out of range")
	case f.Port != "" && f.Port != "data" && f.Port != "session":
		return fmt.Errorf("port=%s: want data or session", f.Port)
	}
	for _, p := range []struct {
		name string
		is   bool
	}{{"p", f.P != 0}, {"delay", f.Delay != 0}, {"port", f.Port != ""}, {"n", f.N != 0}, {"rule", f.Rule != ""}} {
		if want := slices.Contains(k.needs, p.name); want != p.is {
			return fmt.Errorf("%s: parameter %s: given %v, wanted %v", f.Kind, p.name, p.is, want)
		}
	}
	return nil
}
