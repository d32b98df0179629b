package model

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/baton-pd/baton/internal/model/explore"
)

// Trace is a counterexample that can be taken again: the indices of its steps.
type Trace struct {
	Scenario string
	Fault    Fault
	Init     int
	Steps    []int
	Words    []string // of each step, as far as they were written down
}

// WriteTrace prints a counterexample for people, in the form that ParseTrace reads.
func WriteTrace(out io.Writer, sc *Scenario, f Fault, v *explore.Violation) {
	fmt.Fprintf(out, "scenario: %s\n", sc.Name)
	if f != FaultNone {
		fmt.Fprintf(out, "fault: %s\n", f)
	}
	fmt.Fprintf(out, "%s: %v\n  start %d\n        %s\n", v.Kind, v.Err, v.Init, v.Start)
	for i, l := range v.Lines {
		fmt.Fprintf(out, "%3d [%d] %s\n        %s\n", i+1, l.Index, l.Step, l.State)
	}
	if len(v.Cycle) > 0 {
		fmt.Fprintln(out, "then for ever:")
		for _, l := range v.Cycle {
			fmt.Fprintf(out, "  * %s\n        %s\n", l.Step, l.State)
		}
	}
}

// ParseTrace finds the trace in what WriteTrace printed, whatever stands around it.
func ParseTrace(text string) (*Trace, error) {
	t := &Trace{}
	lines := bufio.NewScanner(strings.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		f := strings.Fields(lines.Text())
		var err error
		switch {
		case len(f) == 2 && f[0] == "scenario:":
			*t = Trace{Scenario: f[1]}
		case len(f) == 2 && f[0] == "fault:":
			t.Fault, err = ParseFault(f[1])
		case len(f) == 2 && f[0] == "start":
			t.Init, err = strconv.Atoi(f[1])
		case len(f) >= 2 && f[0] == strconv.Itoa(len(t.Steps)+1) && strings.HasPrefix(f[1], "["):
			var k int
			k, err = strconv.Atoi(strings.Trim(f[1], "[]"))
			t.Steps = append(t.Steps, k)
			t.Words = append(t.Words, strings.Join(f[2:], " "))
		}
		if err != nil {
			return nil, fmt.Errorf("trace, line %d: %w", n, err)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	if t.Scenario == "" || len(t.Steps) == 0 {
		return nil, fmt.Errorf("trace: no line \"scenario: NAME\", or no step \"1 [index] words\"; give what the command printed")
	}
	return t, nil
}

// Replay takes the steps of t in the world of sc and prints each. The error that is a
// [BrokenError] is the invariant that the last step or state breaks; nil: none. Any other error: the trace
// does not fit this world.
func Replay(out io.Writer, sc *Scenario, t *Trace) error {
	w := NewWorld(sc)
	w.SetFault(t.Fault)
	starts := w.Init()
	if t.Init < 0 || t.Init >= len(starts) {
		return fmt.Errorf("trace: scenario %s has no start %d", sc.Name, t.Init)
	}
	s := starts[t.Init]
	fmt.Fprintf(out, "        %s\n", w.Show(s))
	for i, k := range t.Steps {
		steps := w.Next(s, nil)
		if k < 0 || k >= len(steps) {
			return fmt.Errorf("trace, step %d: scenario %s has no step %d here, only %d are enabled", i+1, sc.Name, k, len(steps))
		}
		st := steps[k]
		words := w.Describe(s, st)
		if i < len(t.Words) && t.Words[i] != "" && t.Words[i] != strings.Join(strings.Fields(words), " ") {
			return fmt.Errorf("trace, step %d: step %d of scenario %s is %q by now, not %q: the trace is of another version", i+1, k, sc.Name, words, t.Words[i])
		}
		fmt.Fprintf(out, "%3d [%d] %s\n        %s\n", i+1, k, words, w.Show(st.To))
		if st.Err != nil {
			return st.Err
		}
		s = st.To
		if err := w.Check(s); err != nil {
			return err
		}
	}
	return nil
}
