package router

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
)

// probePatience is how long a probe may go without an answer until its worker does not count for readiness. With the default pause
// between probes a worker that is stopped is found out within 1.75 s. It is not out yet: a busy machine may be as slow, and
// the only harm of a wrong "not ready" is that new clients are sent elsewhere for a moment.
const probePatience = 750 * time.Millisecond

// unready says why the worker does not count for readiness; "" if it does.
func (w *worker) unready(now time.Time) string {
	if w.status() != statusUp {
		return w.why()
	}
	if at := w.asking.Load(); at != 0 {
		if d := now.Sub(time.Unix(0, at)); d > probePatience {
			return fmt.Sprintf("no answer to a probe for %v", d.Round(time.Millisecond))
		}
	}
	if d := w.outlier.left(now); d > 0 {
		return fmt.Sprintf("ejected for %v", d.Round(time.Millisecond))
	}
	return ""
}

// ready are the workers of the leg that count for readiness, and why the others do not.
func (f *fleet) ready(now time.Time) (up []*worker, others string) {
	var why []string
	for _, w := range f.workers() {
		if reason := w.unready(now); reason != "" {
			why = append(why, w.name+" ("+reason+")")
		} else {
			up = append(up, w)
		}
	}
	if gone := f.leaving.Load(); gone != nil {
		for _, w := range *gone {
			why = append(why, w.name+" (draining)")
		}
	}
	if len(why) == 0 {
		why = []string{"there is none"}
	}
	return up, strings.Join(why, "; ")
}

// ready is nil if there is a pair of workers, or one that serves alone, that are probed, answer, and are neither drained nor ejected.
// It counts them.
func (r *Router) ready() (prefills, decodes int, e *openai.Error) {
	if r.base.Err() != nil {
		return 0, 0, failureOf(&r.base).err
	}
	if r.gate.draining.Load() {
		return 0, 0, errClosing().err
	}
	now := time.Now()
	ps, noP := r.prefills.ready(now)
	ds, noD := r.decodes.ready(now)
	alone := slices.ContainsFunc(ds, func(d *worker) bool { return d.alone(r.cfg.LocalFallback) })
	paired := slices.ContainsFunc(ps, func(p *worker) bool {
		return slices.ContainsFunc(ds, func(d *worker) bool { return pairs(p, d) })
	})
	if alone || paired {
		return len(ps), len(ds), nil
	}
	var detail []string
	if len(ps) == 0 {
		detail = append(detail, "no prefill worker is up: "+noP)
	}
	if len(ds) == 0 {
		detail = append(detail, "no decode worker is up: "+noD)
	}
	if len(detail) == 0 {
		detail = []string{"no prefill and decode worker that are up are of one kind"}
	}
	return len(ps), len(ds), routerFailure(room.CodeUnavailable, true, "%s", strings.Join(detail, "; ")).err
}
