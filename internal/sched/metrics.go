package sched

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/room"
)

// metrics are a scheduler's figures under the namespace baton. Names that SGLang has
// are SGLang's. The gauges read the census: they cannot drift from it.
type metrics struct {
	requests   *prometheus.CounterVec
	prompt     prometheus.Counter
	generated  prometheus.Counter
	preempted  prometheus.Counter
	ttft       prometheus.Histogram
	itl        prometheus.Histogram
	e2e        prometheus.Histogram
	step       prometheus.Histogram
	chunk      prometheus.Histogram
	exportTime prometheus.Histogram
	importTime prometheus.Histogram
	exposed    prometheus.Histogram
	batch      prometheus.Histogram
}

// secondBuckets reach from a step of a small model to a long request.
var secondBuckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300}

// transferBuckets reach from the copy of a chunk to a transfer that was not hidden at all.
var transferBuckets = prometheus.ExponentialBuckets(1e-4, 2, 18)

func newMetrics(reg prometheus.Registerer, side room.Side, c *census) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "baton", Name: name, Help: help})
	}
	hist := func(name, help string, b []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "baton", Name: name, Help: help, Buckets: b})
	}
	gauge := func(name, help string, ps ...phase) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "baton", Name: name, Help: help},
			func() float64 { return float64(c.sum(ps...)) })
	}
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "baton", Name: "requests_total",
			Help: "Requests that ended, by outcome (success, cancelled, error) and cause."}, []string{"outcome", "cause"}),
		prompt:     counter("prompt_tokens_total", "Prompt tokens of requests that ended well."),
		generated:  counter("generation_tokens_total", "Tokens generated."),
		preempted:  counter("preemptions_total", "Choices swapped out, and requests still loading that stepped back, because KV cells ran out."),
		ttft:       hist("time_to_first_token_seconds", "From submission to the first token.", secondBuckets),
		itl:        hist("inter_token_latency_seconds", "Between two tokens of a choice.", secondBuckets),
		e2e:        hist("e2e_request_latency_seconds", "From submission to the end, requests that ended well.", secondBuckets),
		step:       hist("engine_step_seconds", "One decode step of the running batch.", secondBuckets),
		chunk:      hist("engine_chunk_seconds", "One prompt chunk computed.", secondBuckets),
		exportTime: hist("engine_export_seconds", "One computed chunk copied out of the engine.", transferBuckets),
		exposed: prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "baton", Name: "kv_exposed_transfer_seconds",
			Help:        "What a request waits for its KV beyond compute: on the prefill side from the end of its last chunk's computation to the room's success, on the decode side from the last chunk's landing to the end of the last import.",
			ConstLabels: prometheus.Labels{"side": side.String()}, Buckets: transferBuckets}),
		importTime: hist("engine_import_seconds", "One landed chunk imported.", secondBuckets),
		batch:      hist("engine_batch_rows", "Rows of a decode step.", []float64{1, 2, 4, 8, 16, 32, 64, 128}),
	}
	if reg == nil {
		return m
	}
	all := []prometheus.Collector{m.requests, m.prompt, m.e2e, m.chunk, m.exposed}
	if side == room.SideSender {
		all = append(all, m.exportTime,
			gauge("num_prefill_bootstrap_queue_reqs", "Requests whose room has no grant yet.", phaseBootstrap),
			gauge("num_prefill_inflight_queue_reqs", "Requests whose last chunks are being applied.", phaseInflight),
			gauge("num_running_reqs", "Requests whose prompt is being computed.", phaseForward),
			gauge("num_queue_reqs", "Requests waiting for the engine.", phaseWaiting))
	} else {
		all = append(all, m.generated, m.preempted, m.ttft, m.itl, m.step, m.importTime, m.batch,
			gauge("num_decode_prealloc_queue_reqs", "Requests waiting for cells, or for pages and the grant.", phasePrealloc, phaseConnecting),
			gauge("num_decode_transfer_queue_reqs", "Requests whose KV is landing.", phaseTransferring),
			gauge("num_running_reqs", "Requests being decoded, or prefilled here.", phaseDecoding, phaseLocal),
			gauge("num_queue_reqs", "Requests waiting for the engine.", phasePrealloc, phasePreempted))
	}
	reg.MustRegister(all...)
	return m
}

// ended counts a request once.
func (m *metrics) ended(c *room.Cause, t Phases, prompt, tokens int) {
	m.generated.Add(float64(tokens))
	if c == nil {
		m.requests.WithLabelValues("success", "").Inc()
		m.prompt.Add(float64(prompt))
		m.e2e.Observe(t.Ended.Sub(t.Submitted).Seconds())
		return
	}
	outcome := "error"
	if c.Code == room.CodeAborted || c.Code == room.CodeClientGone {
		outcome = "cancelled"
	}
	m.requests.WithLabelValues(outcome, string(c.Code)).Inc()
}

func since(h prometheus.Observer, began time.Time) { h.Observe(time.Since(began).Seconds()) }
