package otel

import (
	"context"
	"net/http"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// Attributes that more than one place sets. Those of HTTP, errors and generative models are OpenTelemetry's.
const (
	Room    = "baton.room"    // of the hand-over, as in logs and errors
	Rooms   = "baton.rooms"   // of a batch with several prompts
	Worker  = "baton.worker"  // host:port
	Leg     = "baton.leg"     // prefill or decode
	Phase   = "baton.phase"   // how far it was
	Attempt = "baton.attempt" // from 0
	Outcome = "baton.outcome" // as in baton_router_requests_total
	Request = "baton.rid"     // request id
	Side    = "baton.side"    // which side found the failure
	Prompt  = "baton.prompt"  // place in a batch, from 0
	Chunk   = "baton.chunk"   // of a prompt, from 0

	Cause        = "error.type" // code of the first cause
	InputTokens  = "gen_ai.usage.input_tokens"
	OutputTokens = "gen_ai.usage.output_tokens"
	Model        = "gen_ai.request.model"
	Method       = "http.request.method"
	Route        = "http.route"
	Status       = "http.response.status_code"
)

// Attr is one attribute of a span.
type Attr = attribute.KeyValue

// String is a text attribute.
func String(k, v string) Attr { return attribute.String(k, v) }

// Strings is a list of texts.
func Strings(k string, v []string) Attr { return attribute.StringSlice(k, v) }

// Int is a number.
func Int(k string, v int) Attr { return attribute.Int(k, v) }

// Bool is a truth value.
func Bool(k string, v bool) Attr { return attribute.Bool(k, v) }

// Span is one piece of a request's way. nil is one of which nothing is kept.
type Span struct {
	t   *Tracer
	ctx context.Context
	s   trace.Span
}

// Recording reports whether anything is kept of the span: attributes are not worth making otherwise.
func (s *Span) Recording() bool { return s != nil && s.s.IsRecording() }

// Child begins a part of s at a time, zero for now.
func (s *Span) Child(name string, at time.Time) *Span {
	if s == nil {
		return nil
	}
	return s.t.start(s.ctx, name, trace.SpanKindInternal, at)
}

// Client begins a request of s to another process now.
func (s *Span) Client(name string) *Span {
	if s == nil {
		return nil
	}
	return s.t.start(s.ctx, name, trace.SpanKindClient, time.Time{})
}

// Inject makes s the parent of whoever gets h, in place of what h said before.
func (s *Span) Inject(h http.Header) {
	if s == nil {
		return
	}
	h.Del("Traceparent")
	h.Del("Tracestate")
	w3c.Inject(s.ctx, propagation.HeaderCarrier(h))
}

// Set adds attributes. Make them only if s is Recording.
func (s *Span) Set(attrs ...Attr) {
	if s != nil {
		s.s.SetAttributes(attrs...)
	}
}

// Event notes that something happened now.
func (s *Span) Event(name string) {
	if s != nil {
		s.s.AddEvent(name)
	}
}

// EventAt notes that something happened at a time.
func (s *Span) EventAt(name string, at time.Time) {
	if s != nil {
		s.s.AddEvent(name, trace.WithTimestamp(at))
	}
}

// Fail marks s as failed: code is the cause's, detail is for people.
func (s *Span) Fail(code, detail string) {
	if s == nil || !s.s.IsRecording() {
		return
	}
	s.s.SetAttributes(attribute.String(Cause, code))
	s.s.SetStatus(codes.Error, detail)
}

// End ends s at a time, zero for now. Later changes are without effect.
func (s *Span) End(at time.Time) {
	switch {
	case s == nil:
	case at.IsZero():
		s.s.End()
	default:
		s.s.End(trace.WithTimestamp(at))
	}
}
