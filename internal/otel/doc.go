// Package otel records requests as OpenTelemetry traces and sends them to a collector by OTLP over gRPC. Router and workers
// use it; nobody else speaks OpenTelemetry's own packages.
//
// # What it promises
//
// Off is nil: every method of a nil [Tracer] and a nil [Span] does nothing, allocates nothing, and is what callers
// have without --otlp. On, nobody waits for the collector: an ended span goes into a bounded queue, and is dropped and counted if that is
// full. [Tracer.Close] sends what is left for at most [Config.CloseTimeout] and returns with every goroutine ended, whether
// the collector answers, refuses or is silent.
//
// # Context
//
// A parent comes in and goes out as the W3C headers traceparent and tracestate. A header that is not sound is as none: the trace begins here.
// Whether a trace is recorded is its parent's choice; where there is none, [Config.Ratio] or OTEL_TRACES_SAMPLER decides.
//
// # Concurrency
//
// All methods are safe for concurrent use. Nothing global is set, so several tracers may live in one process.
package otel
