package doctor

import (
	"fmt"
	"math"
	"strings"
	"time"
)

// disagreement: one side of a hand-over waits while the other has nothing.
func (d *diagnosis) disagreement() {
	for _, di := range dialects {
		if di.engine == EngineVLLM {
			continue // no gauge of the prefill side
		}
		for _, side := range []Role{RolePrefill, RoleDecode} {
			d.disagree(di, side)
		}
	}
}

func (d *diagnosis) disagree(di dialect, waiting Role) {
	other := RoleDecode
	if waiting == RoleDecode {
		other = RolePrefill
	}
	var peers []*Target
	for _, t := range d.fleet {
		if t.Engine == di.engine && t.Role == other && len(t.Times) > 1 {
			peers = append(peers, t)
		}
	}
	if len(peers) == 0 {
		return
	}
	for _, t := range d.fleet {
		for _, s := range d.stuck[t] {
			if t.Engine != di.engine || s.queue.role != waiting {
				continue
			}
			from, to := t.Times[s.from], t.Times[s.to]
			var saw []string
			for _, p := range peers {
				if n, ok := p.empty(di, from, to); ok {
					saw = append(saw, fmt.Sprintf("%s had every queue empty in all of its %d scrapes of that time", p.Name, n))
				}
			}
			if len(saw) < len(peers) {
				continue // somebody may be the other half
			}
			d.find(t, d.oneSided(s, waiting, t, saw))
		}
	}
}

func (d *diagnosis) oneSided(s stretch, waiting Role, t *Target, saw []string) Finding {
	f := Finding{Rule: "disagreement", Severity: Critical,
		Title:    fmt.Sprintf("%s holds requests that no worker on the other side knows", s.queue.name),
		Evidence: append([]string{fmt.Sprintf("%s was above 0 from %s to %s", s.queue.gauge.name, clock(t.Times[s.from]), clock(t.Times[s.to]))}, saw...),
		Cause:    "the decode side has ended these requests (abort, failure, restart) and the prefill side did not: the abort was lost, or its failure was overwritten by a late status",
		Action:   "the requests are dead: restart this prefill worker when it suits, and upgrade if its release is reported too",
	}
	if waiting == RoleDecode {
		f.Cause = "the prefill side has finished or forgotten these requests: its last status was lost, or its release tells completion in another way than this one reads"
		f.Action = "check that both sides run the same release; the decode side's own timeout (SGLang: 300 s) ends them; abort them if clients wait"
	}
	if s.to < len(t.Times)-1 {
		f.Severity = Warning
	}
	return f
}

// empty reports whether every queue was empty in each of the target's n >= 2 scrapes between two moments.
func (t *Target) empty(di dialect, from, to time.Time) (n int, ok bool) {
	busy := make([]line, 0, len(di.busy))
	for _, b := range di.busy {
		busy = append(busy, t.sum(b))
	}
	for i, at := range t.Times {
		if at.Before(from) || at.After(to) {
			continue
		}
		seen := false
		for _, l := range busy {
			if l[i] > 0 {
				return 0, false
			}
			seen = seen || !math.IsNaN(l[i])
		}
		if !seen {
			return 0, false
		}
		n++
	}
	return n, n >= 2
}

// versions looks releases up.
func (d *diagnosis) versions() {
	seen := map[Role]map[release][]string{RolePrefill: {}, RoleDecode: {}}
	for _, t := range d.fleet {
		if t.Engine != EngineSGLang {
			continue
		}
		if t.Backend != "" && t.Backend != "nixl" {
			d.note(t, "its transfer backend is %s; the table of releases is about nixl", t.Backend)
			continue
		}
		if t.Version == "" {
			d.note(t, "its release is not known, so it was not looked up; give it with --version")
			continue
		}
		r, err := parseRelease(t.Version)
		if err != nil {
			d.note(t, "its release was not looked up: %v", err)
			continue
		}
		d.known(t, r)
		if names := seen[t.Role]; names != nil {
			names[r] = append(names[r], t.Name)
		}
	}
	for p, ps := range seen[RolePrefill] {
		for dec, ds := range seen[RoleDecode] {
			d.mixed(p, dec, ps, ds)
		}
	}
}

// known reports what is known of one release.
func (d *diagnosis) known(t *Target, r release) {
	row := lookup(r)
	switch {
	case row == nil:
		d.note(t, "release %s is newer than the table, which ends with %s", t.Version, lastKnown)
	case row.fault == "":
		d.note(t, "release %s: %s", t.Version, row.weakness)
	default:
		d.find(t, *versionFinding(t.Version, row))
	}
}

// mixed reports releases that do not understand each other.
func (d *diagnosis) mixed(p, dec release, ps, ds []string) {
	why := incompatible(p, dec)
	if why == "" {
		return
	}
	d.out.Findings = append(d.out.Findings, Finding{Rule: "version-mix", Severity: Critical, Target: strings.Join(append(ps, ds...), ","),
		Title:    fmt.Sprintf("prefill workers of %s and decode workers of %s do not understand each other", p, dec),
		Evidence: []string{fmt.Sprintf("prefill %s: %s; decode %s: %s", p, strings.Join(ps, ", "), dec, strings.Join(ds, ", "))},
		Cause:    why, Action: "run one release on all workers of a fleet; upgrade a fleet as a whole, or pair old with old by the router's pools"})
}

// MayAskSGLang reports whether a prefill worker of this release can be asked by a probe without harm and
// answers; the finding is what the table knows of it, nil if it knows no fault.
func MayAskSGLang(version string) (ask bool, f *Finding, err error) {
	r, err := parseRelease(version)
	if err != nil {
		return false, nil, err
	}
	if row := lookup(r); row != nil && row.fault != "" {
		return false, versionFinding(version, row), nil
	}
	return true, nil, nil
}

func versionFinding(version string, row *row) *Finding {
	return &Finding{Rule: "version", Severity: Warning, Title: fmt.Sprintf("SGLang %s has a known fault in its NIXL backend", version),
		Evidence: []string{"release " + version + " is in the row \"" + row.name() + "\" of the table"}, Cause: row.fault, Action: row.action}
}
