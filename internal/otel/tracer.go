package otel

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Tracer makes spans and sends them. nil is one that is off.
type Tracer struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	kill     context.CancelFunc // ends exports for good
	timeout  time.Duration      // of Close
	close    sync.Once
}

// Open starts to send; no connection is needed for it to succeed. Errors are wrong settings.
func Open(c Config) (*Tracer, error) {
	c = c.withDefaults()
	endpoint, err := parseEndpoint("otel: endpoint", c.Endpoint)
	if err != nil {
		return nil, err
	}
	if c.Ratio > 1 {
		return nil, fmt.Errorf("otel: a share of %v of the traces: want 0 to 1", c.Ratio)
	}
	// The environment still gives headers, certificates and compression.
	next, err := otlptracegrpc.New(context.Background(),
		otlptracegrpc.WithEndpointURL(endpoint), otlptracegrpc.WithTimeout(c.ExportTimeout),
		otlptracegrpc.WithRetry(otlptracegrpc.RetryConfig{Enabled: true, InitialInterval: 500 * time.Millisecond, MaxInterval: 2 * time.Second, MaxElapsedTime: c.ExportTimeout}))
	if err != nil {
		return nil, fmt.Errorf("otel: exporter for %s: %w", endpoint, err)
	}
	res, err := resource.New(context.Background(),
		resource.WithAttributes(attribute.String("service.name", c.Service), attribute.String("service.version", c.Version), attribute.String("service.instance.id", c.Instance)),
		resource.WithTelemetrySDK(), resource.WithFromEnv())
	if err != nil && !errors.Is(err, resource.ErrPartialResource) {
		return nil, fmt.Errorf("otel: OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	t := &Tracer{timeout: c.CloseTimeout}
	kill, cancel := context.WithCancel(context.Background())
	t.kill = cancel
	q := &queue{kill: kill, next: next, most: int64(c.MaxQueue), log: c.Log, endpoint: endpoint}
	if err := q.register(c.Registerer); err != nil {
		cancel()
		return nil, errors.Join(fmt.Errorf("otel: register metrics: %w", err), next.Shutdown(context.Background()))
	}
	q.batches = sdktrace.NewBatchSpanProcessor(exporter{q},
		sdktrace.WithMaxQueueSize(c.MaxQueue), sdktrace.WithMaxExportBatchSize(min(512, c.MaxQueue)),
		sdktrace.WithBatchTimeout(c.BatchDelay), sdktrace.WithExportTimeout(c.ExportTimeout))
	opts := []sdktrace.TracerProviderOption{sdktrace.WithResource(res), sdktrace.WithSpanProcessor(q)}
	if c.Ratio >= 0 {
		opts = append(opts, sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(c.Ratio))))
	}
	t.provider = sdktrace.NewTracerProvider(opts...)
	t.tracer = t.provider.Tracer("github.com/baton-pd/baton", trace.WithInstrumentationVersion(c.Version))
	return t, nil
}

// Close sends what waits, within the time of Config, and ends. Spans that end later are dropped. Idempotent.
func (t *Tracer) Close() {
	if t == nil {
		return
	}
	t.close.Do(func() {
		late := time.AfterFunc(t.timeout, t.kill)
		defer late.Stop()
		// Without a deadline of its own it waits for its goroutine, which kill ends.
		_ = t.provider.Shutdown(context.Background()) // exports tell of their failures themselves
		t.kill()
	})
}

var w3c propagation.TraceContext

// Server begins the span of a request that came in with header h, at start. nil if t is.
func (t *Tracer) Server(h http.Header, name string, start time.Time) *Span {
	if t == nil {
		return nil
	}
	ctx := w3c.Extract(context.Background(), propagation.HeaderCarrier(h))
	return t.start(ctx, name, trace.SpanKindServer, start)
}

func (t *Tracer) start(ctx context.Context, name string, kind trace.SpanKind, at time.Time) *Span {
	opts := make([]trace.SpanStartOption, 0, 2)
	opts = append(opts, trace.WithSpanKind(kind))
	if !at.IsZero() {
		opts = append(opts, trace.WithTimestamp(at))
	}
	ctx, s := t.tracer.Start(ctx, name, opts...)
	return &Span{t: t, ctx: ctx, s: s}
}
