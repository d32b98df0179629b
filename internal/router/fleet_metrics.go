package router

import (
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// fleetMetrics tell of what lists workers, and of workers that leave.
type fleetMetrics struct {
	r       *Router
	updates *prometheus.CounterVec // source, result
}

var (
	descDraining = prometheus.NewDesc("baton_router_worker_draining", "1 if the worker gets no new requests: drained, or listed nowhere any more.", []string{"leg", "worker"}, nil)
	descEjected  = prometheus.NewDesc("baton_router_worker_ejected", "1 while the worker is put aside because requests on it failed in a row.", []string{"leg", "worker"}, nil)
	descStale    = prometheus.NewDesc("baton_router_source_stale", "1 if the last attempt to learn the workers from this source failed; the set before it is in use.", []string{"source"}, nil)
)

func newFleetMetrics(r *Router, reg prometheus.Registerer) (*fleetMetrics, error) {
	m := &fleetMetrics{r: r, updates: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "baton_router_source_updates_total", Help: "Sets of workers told by a source (or changes by the API): ok, or failed, which leaves the set before it in use.",
	}, []string{"source", "result"})}
	for _, c := range []prometheus.Collector{m.updates, m} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// Describe implements prometheus.Collector.
func (m *fleetMetrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- descDraining
	ch <- descEjected
	ch <- descStale
}

// Collect implements prometheus.Collector.
func (m *fleetMetrics) Collect(ch chan<- prometheus.Metric) {
	m.r.roster.mu.Lock()
	members, stale := slices.Clone(m.r.roster.members), maps.Clone(m.r.roster.stale)
	workers := make([]*worker, 0, len(members))
	for _, mb := range members {
		workers = append(workers, mb.w)
	}
	m.r.roster.mu.Unlock()
	flag := func(d *prometheus.Desc, on bool, labels ...string) {
		v := 0.0
		if on {
			v = 1
		}
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	now := time.Now()
	for _, w := range workers {
		flag(descDraining, w.leaving.Load(), w.side.String(), w.name)
		flag(descEjected, w.outlier.left(now) > 0, w.side.String(), w.name)
	}
	for source, why := range stale {
		flag(descStale, why != "", source)
	}
}

// forgetWorker drops the series that carry a worker's name, or a fleet that changes would fill the memory with them.
func (r *Router) forgetWorker(w *worker) {
	of := prometheus.Labels{"leg": w.side.String(), "worker": w.name}
	r.m.legErrors.DeletePartialMatch(of)
	r.m.ejections.DeletePartialMatch(of)
	r.lm.forget(of)
}
