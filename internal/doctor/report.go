package doctor

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// Severity of a finding.
type Severity string

const (
	// Critical: a request or memory is lost, or may be damaged.
	Critical Severity = "critical"
	// Warning: it was so for a while, or could come.
	Warning Severity = "warning"
)

// Finding is one fault.
type Finding struct {
	Rule     string   `json:"rule"` // stable name; docs/doctor.md has a row for each
	Severity Severity `json:"severity"`
	Target   string   `json:"target"` // worker, or several separated by commas
	Title    string   `json:"title"`
	Evidence []string `json:"evidence"` // what was seen, with numbers and times
	Cause    string   `json:"cause"`    // the likely one
	Action   string   `json:"action"`   // what to do
}

// Remark is a doubt or a note about a target ("" for the whole fleet).
type Remark struct {
	Target string `json:"target"`
	Text   string `json:"text"`
}

// Verdict is the report in a word.
type Verdict string

// The verdicts, by exit status 0, 1, 2. Findings win over doubts.
const (
	Healthy  Verdict = "healthy"
	Findings Verdict = "findings"
	Unknown  Verdict = "unknown"
)

// ExitStatus of the command.
func (v Verdict) ExitStatus() int {
	switch v {
	case Healthy:
		return 0
	case Findings:
		return 1
	default:
		return 2
	}
}

// TargetSummary is what was looked at.
type TargetSummary struct {
	Name    string    `json:"name"`
	Engine  Engine    `json:"engine"`
	Role    Role      `json:"role"`
	Version string    `json:"version"`
	Backend string    `json:"backend"`
	Scrapes int       `json:"scrapes"`
	Missed  int       `json:"missed"`
	From    time.Time `json:"from"`
	To      time.Time `json:"to"`
}

// Report is all that the doctor has to say. Schema is raised when a field changes its meaning.
type Report struct {
	Schema   int             `json:"schema"`
	Verdict  Verdict         `json:"verdict"`
	Targets  []TargetSummary `json:"targets"`
	Probes   []ProbeResult   `json:"probes"`
	Findings []Finding       `json:"findings"`
	Doubts   []Remark        `json:"doubts"` // why it could not tell
	Notes    []Remark        `json:"notes"`  // worth knowing; they change nothing
}

const schema = 1

// finish sorts and gives the verdict.
func (r *Report) finish() {
	r.Schema = schema
	slices.SortStableFunc(r.Findings, func(a, b Finding) int {
		return strings.Compare(string(a.Severity)+a.Target, string(b.Severity)+b.Target)
	})
	switch {
	case len(r.Findings) > 0:
		r.Verdict = Findings
	case len(r.Doubts) > 0 || len(r.Targets)+len(r.Probes) == 0:
		r.Verdict = Unknown
	default:
		r.Verdict = Healthy
	}
	for _, p := range []*[]Remark{&r.Doubts, &r.Notes} {
		if *p == nil {
			*p = []Remark{}
		}
	}
	if r.Findings == nil {
		r.Findings = []Finding{}
	}
	if r.Probes == nil {
		r.Probes = []ProbeResult{}
	}
	if r.Targets == nil {
		r.Targets = []TargetSummary{}
	}
}

// WriteText is for people.
func (r *Report) WriteText(w io.Writer) {
	for _, t := range r.Targets {
		fmt.Fprintf(w, "%-20s %s, %d scrapes over %s", t.Name, t.who(), t.Scrapes, round(t.To.Sub(t.From)))
		if t.Missed > 0 {
			fmt.Fprintf(w, ", %d without an answer", t.Missed)
		}
		fmt.Fprintln(w)
	}
	for _, p := range r.Probes {
		fmt.Fprintf(w, "%-20s probe, %s protocol\n", p.Addr, p.Wire)
		for _, s := range p.Steps {
			mark := "ok  "
			if !s.OK {
				mark = "FAIL"
			}
			fmt.Fprintf(w, "  %s %-34s %8s  %s\n", mark, s.Name, round(s.Took), s.Detail)
		}
	}
	for _, f := range r.Findings {
		fmt.Fprintf(w, "\n%s  %s  [%s]\n  %s\n", strings.ToUpper(string(f.Severity)), f.Target, f.Rule, f.Title)
		for _, e := range f.Evidence {
			fmt.Fprintf(w, "  evidence  %s\n", e)
		}
		fmt.Fprintf(w, "  likely    %s\n  do        %s\n", f.Cause, f.Action)
	}
	remarks := func(head string, list []Remark) {
		if len(list) > 0 {
			fmt.Fprintf(w, "\n%s\n", head)
		}
		for _, n := range list {
			fmt.Fprintf(w, "  %s\n", strings.TrimPrefix(n.Target+": "+n.Text, ": "))
		}
	}
	remarks("Could not tell:", r.Doubts)
	remarks("Notes:", r.Notes)
	fmt.Fprintf(w, "\n%s\n", r.summary())
}

func (r *Report) summary() string {
	switch r.Verdict {
	case Healthy:
		return "healthy: no room that does not end, no memory that does not return"
	case Findings:
		return fmt.Sprintf("%d findings", len(r.Findings))
	default:
		return "could not tell"
	}
}

func (t *TargetSummary) who() string {
	parts := []string{string(t.Engine), t.Version, string(t.Role)}
	if t.Engine == EngineNone {
		parts[0] = "unknown engine"
	}
	return strings.Join(strings.Fields(strings.Join(parts, " ")), " ")
}

// round is a duration for people.
func round(d time.Duration) string {
	switch {
	case d >= 10*time.Second:
		return d.Round(time.Second).String()
	case d >= time.Second:
		return d.Round(100 * time.Millisecond).String()
	default:
		return d.Round(100 * time.Microsecond).String()
	}
}

// clock is a moment for people.
func clock(t time.Time) string { return t.UTC().Format("15:04:05Z") }
