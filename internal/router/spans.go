package router

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"strconv"
	"time"

	"github.com/baton-pd/baton/internal/otel"
	"github.com/baton-pd/baton/internal/room"
)

// This file makes the spans of a request (docs/router.md, Traces): the request, its waits in the queue, its attempts, and their
// legs. Each function returns at once when traces are off, which a nil span says.

// traceCall begins a request's span, below the client's own if it names one.
func (r *Router) traceCall(req *http.Request, path string) *otel.Span {
	if r.cfg.Tracer == nil {
		return nil
	}
	return r.traceFrom(req, path, time.Now())
}

// traceFrom is traceCall for a request that arrived at start.
func (r *Router) traceFrom(req *http.Request, path string, start time.Time) *otel.Span {
	if r.cfg.Tracer == nil {
		return nil
	}
	s := r.cfg.Tracer.Server(req.Header, http.MethodPost+" "+path, start)
	if s.Recording() {
		s.Set(otel.String(otel.Method, http.MethodPost), otel.String(otel.Route, path))
	}
	return s
}

// endCall ends it as account found it. c is nil if the request was never accepted.
func endCall(s *otel.Span, c *call, status int, outcome string, f *failure) {
	if s == nil {
		return
	}
	if s.Recording() {
		s.Set(otel.String(otel.Outcome, outcome), otel.Int(otel.Status, status))
		if c != nil {
			s.Set(otel.String(otel.Request, c.names[0]), otel.String(otel.Model, c.model), otel.Int("baton.attempts", c.attempts), otel.Bool("baton.stream", c.stream))
			if a := c.current.Load(); a != nil {
				s.Set(otel.String(otel.Room, a.key().String()))
			}
		}
		failSpan(s, f)
	}
	s.End(time.Time{})
}

// failSpan tells a failure; nil is none. A request that is the client's own fault is no error of ours, as OpenTelemetry has it for servers.
func failSpan(s *otel.Span, f *failure) {
	if f == nil {
		return
	}
	c := f.cause()
	s.Set(otel.String(otel.Side, c.Side.String()), otel.String(otel.Phase, c.Phase))
	if c.Key != (room.Key{}) {
		s.Set(otel.String(otel.Room, c.Key.String()))
	}
	if f.err.Status/100 == 4 && !f.gone && c.Code != room.CodeAborted {
		s.Set(otel.String(otel.Cause, string(c.Code)))
		return
	}
	s.Fail(string(c.Code), c.Error())
}

// traceWait records that attempt n waited for a pair from start to now.
func (c *call) traceWait(n int, start time.Time, f *failure) {
	if c.span == nil {
		return
	}
	s := c.span.Child("queue", start)
	if s.Recording() {
		s.Set(otel.Int(otel.Attempt, n))
		failSpan(s, f)
	}
	s.End(time.Time{})
}

// traceStart begins the span of attempt n.
func (a *attempt) traceStart(n int) {
	if a.c.span == nil {
		return
	}
	a.span = a.c.span.Child("attempt", a.start)
	if !a.span.Recording() {
		return
	}
	a.span.Set(otel.Int(otel.Attempt, n), otel.String("baton.prefill", a.prefill.w.name), otel.String("baton.decode", a.decode.w.name))
	a.span.Set(a.roomAttrs()...)
	if t := a.c.thread; t != nil && t.goes {
		a.span.Set(otel.Bool("baton.resumed", true))
	}
}

// roomAttrs name the attempt's rooms.
func (a *attempt) roomAttrs() []otel.Attr {
	attrs := []otel.Attr{otel.String(otel.Room, a.key().String())}
	if len(a.rooms) > 1 {
		all := make([]string, len(a.rooms))
		for i, id := range a.rooms {
			all[i] = strconv.FormatUint(id, 10)
		}
		attrs = append(attrs, otel.Strings(otel.Rooms, all))
	}
	return attrs
}

// traceEnd ends it.
func (a *attempt) traceEnd(f *failure) {
	if a.span == nil {
		return
	}
	if a.span.Recording() {
		failSpan(a.span, f)
	}
	a.span.End(time.Time{})
}

// traceSend begins the leg's span and returns the header that makes the worker's spans part of it.
func (l *leg) traceSend() http.Header {
	h := l.a.header
	if l.a.span == nil {
		return h
	}
	l.span = l.a.span.Client(l.w.side.String() + " leg")
	if l.span.Recording() {
		l.span.Set(otel.String(otel.Leg, l.w.side.String()), otel.String(otel.Worker, l.w.name), otel.String("server.address", l.w.base.Hostname()))
		l.span.Set(l.a.roomAttrs()...)
	}
	h = maps.Clone(h) // both legs have the same
	l.span.Inject(h)
	return h
}

// traceEnd ends it; f is how the leg failed. One that was let go of because the answer was complete has not failed.
func (l *leg) traceEnd(f *failure) {
	if l.span == nil {
		return
	}
	if l.span.Recording() {
		if f != nil && errors.Is(context.Cause(l.a.ctx), context.Canceled) {
			l.span.Event("released")
		} else {
			failSpan(l.span, f)
		}
		if l.usage.Completion > 0 {
			l.span.Set(otel.Int(otel.InputTokens, l.usage.Prompt), otel.Int(otel.OutputTokens, l.usage.Completion))
		}
		l.span.Set(otel.String(otel.Phase, l.phase())) // where this leg was; the one that failed may be the other
	}
	l.span.End(time.Time{})
}
