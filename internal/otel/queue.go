package otel

import (
	"context"
	"log/slog"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// queue stands around the SDK's batches, which drop spans without a word: it counts what happens to each, bounds what waits,
// and ends exports for good when Close's time is over. Its counters tell of all sampled spans that have ended.
type queue struct {
	batches  sdktrace.SpanProcessor
	next     sdktrace.SpanExporter
	kill     context.Context // ends exports
	most     int64
	waiting  atomic.Int64 // ended and not exported, <= most but for spans that end at the same moment
	closed   atomic.Bool
	failing  atomic.Bool // the last batch failed: logged once
	log      *slog.Logger
	endpoint string

	sent, failed, dropped prometheus.Counter
}

func (q *queue) register(reg prometheus.Registerer) error {
	spans := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "baton_trace_spans_total", Help: "Spans that have ended, by what became of them: exported, failed (the collector did not take them), dropped (too many waited, or the process was ending).",
	}, []string{"result"})
	q.sent, q.failed, q.dropped = spans.WithLabelValues("exported"), spans.WithLabelValues("failed"), spans.WithLabelValues("dropped")
	if reg == nil {
		return nil
	}
	return reg.Register(spans)
}

// OnStart implements sdktrace.SpanProcessor.
func (q *queue) OnStart(context.Context, sdktrace.ReadWriteSpan) {}

// OnEnd implements sdktrace.SpanProcessor. It never blocks.
func (q *queue) OnEnd(s sdktrace.ReadOnlySpan) {
	if !s.SpanContext().IsSampled() {
		return
	}
	switch {
	case q.closed.Load():
		q.dropped.Inc()
		return
	case q.waiting.Add(1) > q.most:
		q.waiting.Add(-1)
		q.dropped.Inc()
		return
	}
	q.batches.OnEnd(s) // has room for q.most
}

// Shutdown implements sdktrace.SpanProcessor.
func (q *queue) Shutdown(ctx context.Context) error {
	q.closed.Store(true)
	return q.batches.Shutdown(ctx)
}

// ForceFlush implements sdktrace.SpanProcessor.
func (q *queue) ForceFlush(ctx context.Context) error { return q.batches.ForceFlush(ctx) }

// exporter is the far end of a queue.
type exporter struct{ q *queue }

// ExportSpans implements sdktrace.SpanExporter. One call at a time. Failures are told here, once for each time that they begin,
// and not to the SDK's global handler.
func (e exporter) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	q := e.q
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(q.kill, cancel)()
	err := q.next.ExportSpans(ctx, spans)
	q.waiting.Add(-int64(len(spans)))
	if err != nil {
		q.failed.Add(float64(len(spans)))
		if !q.failing.Swap(true) {
			q.log.Warn("traces cannot be sent; requests are not affected", "collector", q.endpoint, "spans", len(spans), "err", err)
		}
		return nil
	}
	q.sent.Add(float64(len(spans)))
	if q.failing.Swap(false) {
		q.log.Info("traces are sent again", "collector", q.endpoint)
	}
	return nil
}

// Shutdown implements sdktrace.SpanExporter.
func (e exporter) Shutdown(ctx context.Context) error { return e.q.next.Shutdown(ctx) }
