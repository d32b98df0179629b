package doctor

import (
	"fmt"
	"time"
)

// Config of a diagnosis.
type Config struct {
	// StuckAfter is how long a queue may hold something while nothing leaves it; > 0. At least 60 s
	// for SGLang, whose idle scheduler shows its gauges every 30 s.
	StuckAfter time.Duration
	// MaxRoomAge is the oldest that one of Baton's rooms may become: its --max-request-timeout and a
	// margin; > 0.
	MaxRoomAge time.Duration
}

// Defaults for operators.
const (
	DefaultStuckAfter = time.Minute
	DefaultMaxRoomAge = 3660 * time.Second
)

// Validate names the first field that is wrong.
func (c Config) Validate() error {
	switch {
	case c.StuckAfter <= 0:
		return fmt.Errorf("the time after which a queue is stuck is %s; it must be above 0", c.StuckAfter)
	case c.MaxRoomAge <= 0:
		return fmt.Errorf("the largest age of a room is %s; it must be above 0", c.MaxRoomAge)
	}
	return nil
}

// Diagnose applies every rule to a fleet. It is a function of its arguments: the same scrapes give
// the same report.
func Diagnose(fleet []*Target, probes []ProbeResult, c Config) *Report {
	d := &diagnosis{cfg: c, fleet: fleet, stuck: map[*Target][]stretch{}}
	for _, t := range fleet {
		d.look(t)
	}
	d.disagreement()
	d.versions()
	d.out.Probes = probes
	for _, p := range probes {
		d.out.Findings = append(d.out.Findings, p.Findings...)
		d.out.Doubts = append(d.out.Doubts, p.Doubts...)
	}
	d.out.finish()
	return &d.out
}

// diagnosis is one run of the rules.
type diagnosis struct {
	cfg   Config
	fleet []*Target
	stuck map[*Target][]stretch // of queues that a hand-over needs both sides for
	out   Report
}

func (d *diagnosis) find(t *Target, f Finding) {
	f.Target = t.Name
	d.out.Findings = append(d.out.Findings, f)
}

func (d *diagnosis) doubt(t *Target, format string, args ...any) {
	d.out.Doubts = append(d.out.Doubts, Remark{t.Name, fmt.Sprintf(format, args...)})
}

func (d *diagnosis) note(t *Target, format string, args ...any) {
	d.out.Notes = append(d.out.Notes, Remark{t.Name, fmt.Sprintf(format, args...)})
}

// look applies the rules of one target.
func (d *diagnosis) look(t *Target) {
	s := TargetSummary{Name: t.Name, Engine: t.Engine, Role: t.Role, Version: t.Version, Backend: t.Backend, Scrapes: len(t.Times), Missed: len(t.Missed)}
	if n := len(t.Times); n > 0 {
		s.From, s.To = t.Times[0], t.Times[n-1]
	}
	d.out.Targets = append(d.out.Targets, s)
	switch {
	case len(t.Times) == 0 && len(t.Missed) > 0:
		d.doubt(t, "no scrape was answered: %s", t.Missed[len(t.Missed)-1].Why)
		return
	case t.Engine == EngineNone:
		d.doubt(t, "no metric of Baton, SGLang or vLLM is in its scrapes; SGLang shows them with --enable-metrics")
		return
	case len(t.Times) < 2:
		d.doubt(t, "one scrape only; movement takes two")
	}
	d.restarts(t)
	d.broken(t)
	d.forced(t)
	d.ages(t)
	if t.Role == RoleRouter || len(t.Times) < 2 {
		return
	}
	di := t.dialect()
	if span := s.To.Sub(s.From); span < d.cfg.StuckAfter {
		d.doubt(t, "the scrapes span %s, less than the %s after which a queue counts as stuck; take a longer window", round(span), round(d.cfg.StuckAfter))
	}
	known := false
	for _, q := range di.queues {
		if gauge := t.sum(q.gauge); gauge.known() {
			known = true
			d.queue(t, di, q, gauge)
		}
	}
	if !known {
		d.doubt(t, "none of %s's queue gauges is in its scrapes: is it a worker with prefill and decode apart?", t.Engine)
	}
	d.hidden(t, di)
	d.leak(t, di)
}

// stretch is a run of scrapes, both ends included.
type stretch struct {
	queue    queue
	from, to int
}

func (s stretch) span(t *Target) time.Duration { return t.Times[s.to].Sub(t.Times[s.from]) }

// longest finds the longest run of scrapes between which still holds; ok(i) is asked of each scrape,
// still(i) of each step from i-1 to i. Among equals the last one wins.
func (t *Target) longest(ok func(i int) bool, still func(i int) bool) (best stretch, any bool) {
	from := -1
	for i := range t.Times {
		switch {
		case !ok(i):
			from = -1
			continue
		case from < 0 || !still(i):
			from = i
		}
		if s := (stretch{from: from, to: i}); !any || s.span(t) >= best.span(t) {
			best, any = s, true
		}
	}
	return best, any
}

// restarts: a new process, or one that did not answer for a while.
func (d *diagnosis) restarts(t *Target) {
	di := t.dialect()
	start := t.sum(di.start)
	for i := 1; i < len(t.Times); i++ {
		var seen string
		// A second's slack: the client computes it from the kernel's ticks.
		if a, b := start[i-1], start[i]; b-a > 1 {
			seen = fmt.Sprintf("%s went from %.0f to %.0f", di.start.name, a, b)
		}
		for _, c := range di.resets {
			if l := t.sum(c); seen == "" && l[i] < l[i-1] {
				seen = fmt.Sprintf("the counter %s fell from %g to %g", c.name, l[i-1], l[i])
			}
		}
		if seen == "" {
			continue
		}
		f := Finding{Rule: "restart", Severity: Warning, Title: "the process was started again within the window",
			Evidence: []string{fmt.Sprintf("%s between %s and %s", seen, clock(t.Times[i-1]), clock(t.Times[i]))},
			Cause:    "it was killed, crashed or was deployed anew. Rooms of its peers at that moment lost their other half: without a deadline they wait for ever",
			Action:   "read its last log lines and its exit status; look for rooms of that moment at its peers; restart peers that show a stuck queue"}
		d.find(t, f)
	}
	if len(t.Times) > 0 && len(t.Missed) > 0 {
		first, last := t.Missed[0], t.Missed[len(t.Missed)-1]
		d.find(t, Finding{Rule: "outage", Severity: Warning, Title: "it did not answer some of the scrapes",
			Evidence: []string{fmt.Sprintf("%d of %d scrapes, from %s to %s: %s", len(t.Missed), len(t.Missed)+len(t.Times), clock(first.Time), clock(last.Time), last.Why)},
			Cause:    "the process was down, stopped, or too busy to answer",
			Action:   "compare with its restarts and its log; a stopped process (SIGSTOP, a frozen container) holds its peers' memory"})
	}
}

// broken: counters that must be 0.
func (d *diagnosis) broken(t *Target) {
	for _, c := range t.dialect().broken {
		if l := t.sum(c); len(l) > 0 && l[len(l)-1] > 0 {
			d.find(t, Finding{Rule: "invariant", Severity: Critical, Title: "an invariant of its memory is broken",
				Evidence: []string{fmt.Sprintf("%s is %g", c.name, l[len(l)-1])},
				Cause:    "a bug: a page was stored into while it was free, or a release was refused",
				Action:   "keep its log and its room trace, restart it, report it"})
		}
	}
}

// forced: waits for memory that only time has ended, within the window.
func (d *diagnosis) forced(t *Target) {
	for _, f := range t.dialect().forced {
		l := t.counters([]sel{f.of})
		n := len(l)
		if n < 2 {
			continue
		}
		grown := 0.0
		for i := 1; i < n; i++ {
			if l[i] > l[i-1] {
				grown += l[i] - l[i-1]
			}
		}
		switch {
		case grown > 0:
			d.find(t, Finding{Rule: "forced-release", Severity: Critical, Title: fmt.Sprintf("%g %s", grown, f.what),
				Evidence: []string{fmt.Sprintf("%s grew by %g from %s to %s, to %g", f.of.name, grown, clock(t.Times[0]), clock(t.Times[n-1]), l[n-1])},
				Cause:    f.cause, Action: f.todo})
		case l[n-1] > 0:
			d.note(t, "before the window there were %g %s", l[n-1], f.what)
		}
	}
}

// ages: what Baton says itself of its oldest rooms and of pages that wait for a proof.
func (d *diagnosis) ages(t *Target) {
	if t.Engine != EngineBaton || len(t.Times) == 0 {
		return
	}
	last := len(t.Times) - 1
	for _, se := range t.series[batonOldest] {
		v, state := se.value(last), se.labels["state"]
		if live := state == "bootstrapping" || state == "waiting" || state == "transferring"; live && v > d.cfg.MaxRoomAge.Seconds() {
			d.find(t, Finding{Rule: "room-age", Severity: Critical, Title: "a room is older than any request may become",
				Evidence: []string{fmt.Sprintf("%s{side=%q,state=%q} is %.0f s, above %.0f s", batonOldest, se.labels["side"], state, v, d.cfg.MaxRoomAge.Seconds())},
				Cause:    "its deadline did not end it. This is the fault that Baton exists to exclude: a bug, or a larger --max-request-timeout than this limit",
				Action:   "keep its log and its room trace and report it; restart the worker to free what the room holds"})
		}
	}
	for _, se := range t.series[batonQuarantine] {
		if v := se.value(last); v > max(d.cfg.StuckAfter, time.Second).Seconds() {
			d.find(t, Finding{Rule: "quarantine", Severity: Critical, Title: "pages of a failed room can not return",
				Evidence: []string{fmt.Sprintf("%s{pool=%q} is %.0f s", batonQuarantine, se.labels["pool"], v)},
				Cause:    "a prefill worker was stopped or wedged in the middle of a write, so nothing proves that no late write will land",
				Action:   "let that process go on, or kill it; `baton up` does so after --stuck-after"})
		}
	}
}
