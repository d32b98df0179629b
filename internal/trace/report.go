package trace

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Rules that a finding may break.
const (
	RuleFormat   = "format"   // a line is malformed
	RuleOrder    = "order"    // records are missing, doubled or out of order
	RuleReplay   = "replay"   // the machine does something else
	RuleSafety   = "safety"   // what must hold whatever the machine's table says
	RuleLife     = "life"     // opening, forgetting, reuse of keys
	RuleDeadline = "deadline" // a room outlived its deadline
	RuleEnd      = "end"      // something is live at the end of a closed trace
	RulePair     = "pair"     // the two sides contradict each other
)

// Finding is one thing that is wrong.
type Finding struct {
	File     string `json:"file"`
	Line     int    `json:"line"`
	Rule     string `json:"rule"`
	Room     string `json:"room,omitempty"`
	Instance uint64 `json:"instance,omitempty"`
	What     string `json:"what"`
	Expected string `json:"expected"`
	Got      string `json:"got"`
}

// String is one line, "file:line: rule: ...".
func (f Finding) String() string {
	room := ""
	if f.Room != "" {
		room = fmt.Sprintf("room %s (instance %d): ", f.Room, f.Instance)
	}
	return fmt.Sprintf("%s:%d: %s: %s%s: expected %s, got %s", f.File, f.Line, f.Rule, room, f.What, f.Expected, f.Got)
}

// maxFindings are kept; more are counted.
const maxFindings = 1000

// Verdicts of a report.
const (
	VerdictValid      = "valid"
	VerdictInvalid    = "invalid"    // there are findings
	VerdictIncomplete = "incomplete" // no findings, but records were dropped
	VerdictEmpty      = "empty"      // no trace in the files
)

// Report is what a check found.
type Report struct {
	Verdict      string `json:"verdict"`
	Files        int    `json:"files"`
	Incarnations int    `json:"incarnations"` // processes
	Cut          int    `json:"cut"`          // of them without an end: killed, or still running
	Records      int    `json:"records"`
	Torn         int    `json:"torn"`    // lines cut short where a process was killed
	Dropped      uint64 `json:"dropped"` // records that the writers dropped
	// Rooms by side, and their ends by side and "success" or "failed: cause"; "live" for
	// those without an end in a trace that was cut.
	Rooms map[string]int            `json:"rooms"`
	Ends  map[string]map[string]int `json:"ends"`
	// Pairs are rooms seen from both sides; Unpaired those of one side only; Ambiguous those
	// of a key with several rooms at once, which were not compared.
	Pairs     int `json:"pairs"`
	Unpaired  int `json:"unpaired"`
	Ambiguous int `json:"ambiguous"`
	// Unclocked are the pairs whose times could not be compared: other boots or systems.
	Unclocked int `json:"unclocked"`
	// Undrained are receivers that had failed and whose pages waited for a proof when
	// their worker ended.
	Undrained int `json:"undrained"`
	// Unverified are rooms of incomplete traces with events missing.
	Unverified int `json:"unverified"`
	// Stalls are the times when a process did not run, which a deadline is forgiven.
	Stalls int `json:"stalls"`

	Findings []Finding `json:"findings"`
	// More are findings beyond the first 1000.
	More int `json:"more_findings"`
}

// OK reports whether the traces are whole and nothing is wrong with them.
func (r *Report) OK() bool { return r.Verdict == VerdictValid }

func (r *Report) find(f Finding) {
	if len(r.Findings) >= maxFindings {
		r.More++
		return
	}
	r.Findings = append(r.Findings, f)
}

// judge sets the verdict.
func (r *Report) judge() {
	switch {
	case len(r.Findings) > 0:
		r.Verdict = VerdictInvalid
	case r.Incarnations == 0:
		r.Verdict = VerdictEmpty
	case r.Dropped > 0 || r.Unverified > 0:
		r.Verdict = VerdictIncomplete
	default:
		r.Verdict = VerdictValid
	}
}

// Print writes the report for people; at most limit findings, all if it is negative.
func (r *Report) Print(w io.Writer, limit int) error {
	var b strings.Builder
	row := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-11s %s\n", name, fmt.Sprintf(format, args...))
	}
	row("traces", "%d processes in %d files; %d of them cut (killed, or still running)", r.Incarnations, r.Files, r.Cut)
	row("records", "%d, %d torn, %d dropped", r.Records, r.Torn, r.Dropped)
	row("rooms", "prefill %d, decode %d; %d pairs compared, %d seen from one side only, %d ambiguous", r.Rooms["prefill"], r.Rooms["decode"], r.Pairs, r.Unpaired, r.Ambiguous)
	for _, note := range []struct {
		n    int
		text string
	}{
		{r.Unclocked, "%d pairs without a common clock: their times were not compared"},
		{r.Undrained, "%d decode rooms still waited for a proof when their worker ended"},
		{r.Unverified, "%d rooms with events missing were not checked"},
		{r.Stalls, "%d times a process did not run for a while; deadlines are forgiven that"},
	} {
		if note.n > 0 {
			row("", note.text, note.n)
		}
	}
	for _, side := range []string{"prefill", "decode"} {
		row(side, "%s", counts(r.Ends[side]))
	}
	row("findings", "%d", len(r.Findings)+r.More)
	for i, f := range r.Findings {
		if i == limit {
			fmt.Fprintf(&b, "  ... and %d more\n", len(r.Findings)-limit+r.More)
			break
		}
		fmt.Fprintf(&b, "  %s\n", f)
	}
	row("verdict", "%s", r.Verdict)
	_, err := io.WriteString(w, b.String())
	return err
}

// counts is "a 3, b 1", the most frequent first.
func counts(m map[string]int) string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b string) int { return cmp.Or(m[b]-m[a], strings.Compare(a, b)) })
	for i, k := range keys {
		keys[i] = fmt.Sprintf("%s %d", k, m[k])
	}
	if len(keys) == 0 {
		return "none"
	}
	return strings.Join(keys, ", ")
}
