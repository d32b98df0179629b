package router

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/room"
)

// legMetrics tell of legs, by worker.
type legMetrics struct {
	ended   *prometheus.CounterVec   // leg, worker, policy, outcome
	seconds *prometheus.HistogramVec // leg, worker
	first   *prometheus.HistogramVec // worker
}

// Outcomes of a leg.
const (
	legOK     = "ok"     // it did its part
	legFailed = "failed" // by itself
	legLetGo  = "let_go" // the other leg, the client, a limit or the deadline ended it
)

func newLegMetrics(reg prometheus.Registerer) (*legMetrics, error) {
	buckets := []float64{0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120}
	m := &legMetrics{
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "baton_router_legs_total", Help: "Legs that have ended, by worker, the policy that chose it, and outcome: ok, failed (by itself), let_go (ended by something else).",
		}, []string{"leg", "worker", "policy", "outcome"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "baton_router_leg_seconds", Help: "Time from the sending of a leg to its end, legs that did their part.", Buckets: buckets,
		}, []string{"leg", "worker"}),
		first: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "baton_router_leg_first_token_seconds", Help: "Time from the sending of a stream's decode leg to the first of its answer.", Buckets: buckets,
		}, []string{"worker"}),
	}
	for _, c := range []prometheus.Collector{m.ended, m.seconds, m.first} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// legSeries are one worker's: looked up once, so a leg costs no search, and one that ends after its worker was forgotten
// counts where nobody looks, instead of bringing the series back.
type legSeries struct {
	ok, failed, letGo, ejections prometheus.Counter
	seconds, first               prometheus.Observer // first: decode only
}

// series makes w's, when it joins. Under the roster's lock, as is forget.
func (r *Router) series(w *worker) *legSeries {
	leg, policy := w.side.String(), r.cfg.PrefillPolicy
	if w.side == room.SideReceiver {
		policy = r.cfg.DecodePolicy
	}
	m := r.lm
	s := &legSeries{
		ok: m.ended.WithLabelValues(leg, w.name, policy, legOK), failed: m.ended.WithLabelValues(leg, w.name, policy, legFailed),
		letGo: m.ended.WithLabelValues(leg, w.name, policy, legLetGo), seconds: m.seconds.WithLabelValues(leg, w.name),
		ejections: r.m.ejections.WithLabelValues(leg, w.name),
	}
	if w.side == room.SideReceiver {
		s.first = m.first.WithLabelValues(w.name)
	}
	return s
}

// forget drops the series of a worker.
func (m *legMetrics) forget(of prometheus.Labels) {
	m.ended.DeletePartialMatch(of)
	m.seconds.DeletePartialMatch(of)
	if of["leg"] == room.SideReceiver.String() {
		m.first.DeletePartialMatch(prometheus.Labels{"worker": of["worker"]})
	}
}

// finished counts the leg and ends its span. f is how it failed, nil if it did its part. Before the worker's put, after which it may be forgotten.
func (l *leg) finished(f *failure) {
	l.traceEnd(f)
	if f != nil && l.a.ctx.Err() == nil {
		l.a.r.m.legError(l, f)
	}
	s := l.w.series
	switch {
	case s == nil || l.sent.IsZero(): // it was never sent
	case f == nil:
		s.ok.Inc()
		s.seconds.Observe(time.Since(l.sent).Seconds())
	case l.a.ctx.Err() != nil:
		s.letGo.Inc()
	default:
		s.failed.Inc()
	}
}

// began notes the stream's first token.
func (l *leg) began() {
	l.span.Event("first_token")
	if s := l.w.series; s != nil && s.first != nil {
		s.first.Observe(time.Since(l.sent).Seconds())
	}
}
