package router

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/room"
)

// metrics are the router's own.
type metrics struct {
	requests  *prometheus.CounterVec // outcome, cause
	retries   *prometheus.CounterVec // cause
	legErrors *prometheus.CounterVec // leg, worker, cause
	releases  *prometheus.CounterVec // leg, result
	ejections *prometheus.CounterVec // leg, worker
	resumes   *prometheus.CounterVec // cause
	resumeGap prometheus.Histogram
	seconds   prometheus.Histogram
	queue     prometheus.Histogram
	first     prometheus.Histogram
}

func newMetrics(r *Router, reg prometheus.Registerer) (*metrics, error) {
	buckets := prometheus.ExponentialBuckets(0.002, 2.5, 14) // 2 ms to 300 s
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "baton_router_requests_total", Help: "Requests by how they ended: ok, refused (4xx), aborted, error, stream_error, client_gone; and their first cause.",
		}, []string{"outcome", "cause"}),
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "baton_router_retries_total", Help: "Attempts that were followed by another on a different pair, by cause.",
		}, []string{"cause"}),
		legErrors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "baton_router_worker_errors_total", Help: "Legs that failed by themselves, by worker and cause.",
		}, []string{"leg", "worker", "cause"}),
		releases: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "baton_router_releases_total", Help: "Abort requests sent to workers for ended attempts, by result.",
		}, []string{"leg", "result"}),
		ejections: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "baton_router_ejections_total", Help: "Workers put aside for a time because requests on them failed in a row.",
		}, []string{"leg", "worker"}),
		resumes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "baton_router_resumes_total", Help: "Attempts to go on with a broken stream on another pair, by the cause of its breaking.",
		}, []string{"cause"}),
		resumeGap: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "baton_router_resume_seconds", Help: "Time from the breaking of a stream to the first event of the pair that goes on with it.", Buckets: buckets,
		}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "baton_router_request_seconds", Help: "Time from a request's acceptance to its end.", Buckets: buckets,
		}),
		queue: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "baton_router_queue_seconds", Help: "Time that a request waited for a place, whether it got one or not.",
			Buckets: append([]float64{0.0001}, buckets...),
		}),
		first: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "baton_router_first_event_seconds", Help: "Time from a streaming request's acceptance to its first event.", Buckets: buckets,
		}),
	}
	all := []prometheus.Collector{
		m.requests, m.retries, m.legErrors, m.releases, m.ejections, m.resumes, m.resumeGap, m.seconds, m.queue, m.first, &workerCollector{r},
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "baton_router_inflight_requests", Help: "Requests that have not ended.",
		}, func() float64 { return float64(r.inflight.Load()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "baton_router_queued_requests", Help: "Requests that wait for a place.",
		}, func() float64 { return float64(r.queue.Stats().Waiting) }),
	}
	for _, c := range all {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// legError counts a leg's own failure.
func (m *metrics) legError(l *leg, f *failure) {
	m.legErrors.WithLabelValues(l.w.side.String(), l.w.name, string(f.cause().Code)).Inc()
}

// workerCollector reads the workers' state when asked.
type workerCollector struct{ r *Router }

var (
	descInflight = prometheus.NewDesc("baton_router_worker_inflight", "Legs at a worker that have not ended.", []string{"leg", "worker"}, nil)
	descIdle     = prometheus.NewDesc("baton_router_worker_idle_connections", "Connections kept open to a worker for its next legs.", []string{"leg", "worker"}, nil)
	descUp       = prometheus.NewDesc("baton_router_worker_up", "1 if the last health probe succeeded and nothing contradicted it since.", []string{"leg", "worker"}, nil)
)

var descPrefix = prometheus.NewDesc("baton_router_prefix_tree_bytes", "Memory of the leg's prefix tree, by estimate; 0 without policy prefix-cache.", []string{"leg"}, nil)

// Describe implements prometheus.Collector.
func (c *workerCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- descInflight
	ch <- descIdle
	ch <- descUp
	ch <- descPrefix
}

// Collect implements prometheus.Collector.
func (c *workerCollector) Collect(ch chan<- prometheus.Metric) {
	for leg, f := range map[room.Side]*fleet{room.SideSender: &c.r.prefills, room.SideReceiver: &c.r.decodes} {
		ch <- prometheus.MustNewConstMetric(descPrefix, prometheus.GaugeValue, float64(f.treeStats().Bytes), leg.String())
	}
	for _, w := range c.r.all() {
		up := 0.0
		if w.status() == statusUp {
			up = 1
		}
		ch <- prometheus.MustNewConstMetric(descInflight, prometheus.GaugeValue, float64(w.inflight.Load()), w.side.String(), w.name)
		ch <- prometheus.MustNewConstMetric(descIdle, prometheus.GaugeValue, float64(w.wire.Idle()), w.side.String(), w.name)
		ch <- prometheus.MustNewConstMetric(descUp, prometheus.GaugeValue, up, w.side.String(), w.name)
	}
}
