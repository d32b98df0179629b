package doctor

import (
	"fmt"
	"math"
	"time"
)

// queue looks for requests that do not leave q.
func (d *diagnosis) queue(t *Target, di *dialect, q queue, gauge line) {
	out := t.counters(q.out)
	s, any := t.longest(
		func(i int) bool { return gauge[i] > 0 },
		func(i int) bool { return gauge[i] >= gauge[i-1] && out[i] == out[i-1] })
	need := max(d.cfg.StuckAfter, q.bound)
	s.queue = q
	if any && s.span(t) >= need {
		if q.handover {
			d.stuck[t] = append(d.stuck[t], s)
		}
		d.pinned(t, s, gauge, out)
		return
	}
	d.crowded(t, di, q, gauge, out)
}

// pinned reports a stretch in which nothing left the queue.
func (d *diagnosis) pinned(t *Target, s stretch, gauge, out line) {
	f := Finding{Rule: "stuck-queue", Severity: Critical,
		Title: fmt.Sprintf("%s: %g did not move for %s", s.queue.name, gauge[s.from], round(s.span(t))),
		Evidence: []string{fmt.Sprintf("%s was %g at %s and %g at %s, and in none of the %d scrapes lower", s.queue.gauge.name, gauge[s.from], clock(t.Times[s.from]),
			gauge[s.to], clock(t.Times[s.to]), s.to-s.from+1),
			fmt.Sprintf("every counter of leaving it stood still at %g: %s", out[s.to], names(s.queue.out))},
	}
	if s.to < len(t.Times)-1 {
		f.Severity = Warning
		f.Title += ", then went on"
	}
	f.Cause, f.Action = t.pinCause(s.queue)
	d.find(t, f)
}

// pinCause explains by engine and side.
func (t *Target) pinCause(q queue) (cause, action string) {
	switch {
	case t.Engine == EngineBaton && q.role == RoleNone:
		return "a write of a failed room is still under way: its writer is stopped or wedged", "let the prefill worker go on, or kill it; see docs/faults.md"
	case t.Engine == EngineBaton:
		return "a write or a notification of this room is stalled, or its peer is stopped. The request's deadline will end it; until then it holds pages",
			"compare the ages in baton_room_oldest_age_seconds with your deadlines; look at the peer in baton_session_up and at its process"
	case t.Engine == EngineVLLM:
		return "the KV of these requests never came: the prefill side is gone or has let its blocks expire, or the handshake hangs",
			"look at the prefill instances' restarts and vllm:nixl_num_kv_expired_reqs; abort the requests; restart this instance if they stay"
	case q.role == RolePrefill && q.handover:
		return "a transfer that will never end: a room resurrected after an abort (releases up to 0.5.15), or handles that stay in progress because the decode process is stopped or gone without an error. This queue has no deadline in any release",
			"find the request by its bootstrap_room in both logs; see whether its decode worker lives; only a restart of this prefill worker frees the request and its KV. Upgrade if its release is reported too"
	case q.gauge.name == "sglang:num_decode_deferred_kv_release_reqs":
		return "the prefill side has not said that it has drained, and the release timeout has not run either", "look at the prefill workers of these requests; check SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
	case q.handover:
		return "the completion for these requests was lost, or the prefill side will never send it (it died, its control thread died, or its release ends transfers in another way). SGLANG_DISAGGREGATION_WAITING_TIMEOUT (300 s) ends the wait, and that of every other one behind it",
			"look at the prefill workers' logs for these bootstrap_rooms and for a dead bootstrap thread; check that all workers run the same release"
	default:
		return "the other side does not take part: no metadata comes, or memory for it is never free",
			"look at the other side's queues and at its KV usage; check that the router sends each request to both workers"
	}
}

// names lists what selectors read.
func names(list []sel) string {
	out := ""
	for i, s := range list {
		if i > 0 {
			out += ", "
		}
		out += s.name
		for k, v := range s.labels {
			out += fmt.Sprintf("{%s=%q}", k, v[0])
		}
	}
	return out
}

// Limits of the rule about queues that never empty.
const (
	// crowdedScrapes is how many scrapes must see the queue. Were they independent, and the queue
	// used by a fifth, all of them would see it once in 10^7 windows.
	crowdedScrapes = 10
	crowdedShare   = 0.2
)

// crowded finds a pin behind traffic. By Little's law the mean length of a queue is the time
// that its requests spent in it over the time that passed. If what came out spent far less
// than the shortest length ever seen, something stays inside that never comes out.
func (d *diagnosis) crowded(t *Target, di *dialect, q queue, gauge, out line) {
	n := len(t.Times)
	span := t.Times[n-1].Sub(t.Times[0])
	if q.spent.name == "" || n < crowdedScrapes || span < max(d.cfg.StuckAfter, q.bound) {
		return
	}
	if di.idle.name != "" && !t.sum(di.idle).known() {
		return // its gauges may be old; only the idle seconds would tell
	}
	least := math.Inf(1)
	for i := range t.Times {
		if math.IsNaN(gauge[i]) || i > 0 && out[i] < out[i-1] {
			return
		}
		least = min(least, gauge[i])
		if idle := t.sum(di.idle); di.idle.name != "" && i > 0 && idle[i] != idle[i-1] {
			return // it was empty between two scrapes
		}
	}
	sum := t.counters([]sel{{name: q.spent.name + "_sum", labels: q.spent.labels}})
	count := t.counters([]sel{{name: q.spent.name + "_count", labels: q.spent.labels}})
	spent := (sum[n-1] - sum[0]) * float64(q.unit) / float64(span)
	done := count[n-1] - count[0]
	if least < 1 || done < 1 || spent >= crowdedShare*least {
		return
	}
	f := Finding{Rule: "pinned-under-traffic", Severity: Critical, Title: fmt.Sprintf("%s: at least %g never leave while others pass", q.name, least),
		Evidence: []string{fmt.Sprintf("%s was never below %g in %d scrapes over %s", q.gauge.name, least, n, round(span)),
			fmt.Sprintf("the %g that came out spent %s each, which explains a mean length of %.3f", done,
				round(time.Duration((sum[n-1]-sum[0])/done*float64(q.unit))), spent)}}
	f.Cause, f.Action = t.pinCause(q)
	d.find(t, f)
}

// hidden: SGLang's scheduler shows its gauges only after a batch or when wholly idle. A pin on a
// worker without traffic stops both, so the gauges keep the value from before; the seconds
// counted as idle tell.
func (d *diagnosis) hidden(t *Target, di *dialect) {
	if di.idle.name == "" {
		return
	}
	idle, spins, work := t.sum(di.idle), t.sum(di.spins), t.counters(di.work)
	if !idle.known() || !spins.known() {
		return
	}
	s, any := t.longest(
		func(i int) bool { return !math.IsNaN(idle[i]) },
		func(i int) bool { return idle[i] == idle[i-1] && spins[i] > spins[i-1] && work[i] == work[i-1] })
	// The scheduler adds its accounts up every few seconds.
	if !any || s.span(t) < max(d.cfg.StuckAfter, sglangRelease) {
		return
	}
	for _, f := range d.out.Findings {
		if f.Target == t.Name && f.Rule == "stuck-queue" {
			return // said already, with the queue's name
		}
	}
	f := Finding{Rule: "busy-without-work", Severity: Critical, Title: fmt.Sprintf("the scheduler holds something and computed nothing for %s", round(s.span(t))),
		Evidence: []string{fmt.Sprintf("%s stood still at %.1f from %s to %s, so some queue was never empty", di.idle.name, idle[s.to], clock(t.Times[s.from]), clock(t.Times[s.to])),
			fmt.Sprintf("%s went from %.1f to %.1f, so its loop runs", di.spins.name, spins[s.from], spins[s.to]),
			"no token was computed and no request left a queue in that time; the queue gauges are from before it, because they are shown only after a batch"}}
	if s.to < len(t.Times)-1 {
		f.Severity = Warning
	}
	role := t.Role
	f.Cause, f.Action = t.pinCause(queue{role: role, handover: true})
	d.find(t, f)
}
