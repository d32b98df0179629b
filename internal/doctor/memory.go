package doctor

import (
	"fmt"
	"math"
	"time"
)

// leak: an idle worker holds memory.
func (d *diagnosis) leak(t *Target, di *dialect) {
	busy := make(line, len(t.Times))
	some := false
	for _, b := range di.busy {
		for i, v := range t.sum(b) {
			if !math.IsNaN(v) {
				busy[i] += v
				some = true
			}
		}
	}
	if !some {
		return
	}
	for _, h := range di.held {
		used := t.sum(h.of)
		if !used.known() {
			continue
		}
		for _, l := range h.less {
			for i, v := range t.sum(l) {
				if !math.IsNaN(v) {
					used[i] -= v
				}
			}
		}
		d.held(t, di, h, busy, used)
		return // the others are older names of the same
	}
}

// held judges the longest stretch of idleness, and whether what is held grows from one to the next.
func (d *diagnosis) held(t *Target, di *dialect, h held, busy, used line) {
	moved := t.counters(append(append([]sel{}, di.resets...), di.work...))
	for i := range moved { // being idle moves the idle counter
		if v := t.sum(di.idle); di.idle.name != "" && !math.IsNaN(v[i]) {
			moved[i] -= v[i]
		}
	}
	idle := func(i int) bool { return busy[i] == 0 && !math.IsNaN(used[i]) }
	s, any := t.longest(
		func(i int) bool { return idle(i) && used[i] > 0 },
		func(i int) bool { return used[i] >= used[i-1] && moved[i] == moved[i-1] })
	need := max(d.cfg.StuckAfter, h.after)
	if !any || s.span(t) < need {
		return
	}
	f := Finding{Rule: "kv-leak", Severity: Warning, Title: fmt.Sprintf("idle for %s and still holds %g %s", round(s.span(t)), used[s.to], unit(h)),
		Evidence: []string{fmt.Sprintf("%s was %g at %s and %g at %s, with every queue empty and no request counted", h.of.name, used[s.from], clock(t.Times[s.from]), used[s.to], clock(t.Times[s.to]))},
		Cause:    "memory of ended requests was not given back: aborted or failed hand-overs whose release was forgotten, or that wait for an answer that will not come",
		Action:   "look for aborts and failed transfers in its log before the idle time; restart it before the pool is full; report it to its makers with both scrapes"}
	if first, at := t.firstIdle(idle, used, s.from); at.Before(t.Times[s.from]) && used[s.to] > first {
		f.Severity = Critical
		f.Evidence = append(f.Evidence, fmt.Sprintf("it grows: when it was idle at %s it held %g", clock(at), first))
	}
	if t.Engine == EngineBaton {
		f.Severity = Critical // it keeps nothing between requests
	}
	d.find(t, f)
}

func unit(h held) string {
	if h.unit == "of the cache" {
		return "(1 is all) " + h.unit
	}
	return h.unit + " of KV"
}

// firstIdle is what was held at the first idle scrape before another request came; scrape "before" if there is none.
func (t *Target) firstIdle(idle func(int) bool, used line, before int) (float64, time.Time) {
	for i := range before {
		if idle(i) {
			return used[i], t.Times[i]
		}
	}
	return used[before], t.Times[before]
}
