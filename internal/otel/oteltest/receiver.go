// Package oteltest is a collector for tests: an OTLP receiver over gRPC in the test's own process, which keeps
// every span, or misbehaves on purpose.
package oteltest

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
)

// Span is a received one, in plain values.
type Span struct {
	Trace, ID, Parent string // hex; Parent is "" for a root
	Name, Service     string
	Kind              string // server, client, internal
	Start, End        time.Time
	Attrs             map[string]any // string, int64, bool, []string
	Failed            bool
	Message           string // of the status
	Events            []string
}

// Text is a string attribute, "" without it.
func (s Span) Text(key string) string {
	v, _ := s.Attrs[key].(string)
	return v
}

// Receiver listens on loopback until its test ends.
type Receiver struct {
	collector.UnimplementedTraceServiceServer
	Endpoint string // http://host:port

	mu      sync.Mutex
	spans   []Span
	calls   int
	changed chan struct{} // closed and replaced with every call
	answer  func(ctx context.Context) error
}

// Start runs a receiver. It may be told to misbehave by Answer.
func Start(tb testing.TB) *Receiver {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	r := &Receiver{Endpoint: "http://" + l.Addr().String(), changed: make(chan struct{})}
	srv := grpc.NewServer()
	collector.RegisterTraceServiceServer(srv, r)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	tb.Cleanup(func() {
		srv.Stop()
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			tb.Errorf("receiver: %v", err)
		}
	})
	return r
}

// Answer has f decide on each call before its spans are kept; nil: all are taken. f may block until ctx ends.
func (r *Receiver) Answer(f func(ctx context.Context) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answer = f
}

// Export implements the collector's service.
func (r *Receiver) Export(ctx context.Context, req *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	r.mu.Lock()
	f := r.answer
	r.note()
	r.mu.Unlock()
	if f != nil {
		if err := f(ctx); err != nil {
			return nil, err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rs := range req.GetResourceSpans() {
		service := ""
		for _, kv := range rs.GetResource().GetAttributes() {
			if kv.GetKey() == "service.name" {
				service = kv.GetValue().GetStringValue()
			}
		}
		for _, ss := range rs.GetScopeSpans() {
			for _, s := range ss.GetSpans() {
				r.spans = append(r.spans, plain(service, s))
			}
		}
	}
	r.note()
	return &collector.ExportTraceServiceResponse{}, nil
}

// note wakes who waits. Under mu.
func (r *Receiver) note() {
	r.calls++
	close(r.changed)
	r.changed = make(chan struct{})
}

func plain(service string, s *trace.Span) Span {
	out := Span{
		Trace: hex.EncodeToString(s.GetTraceId()), ID: hex.EncodeToString(s.GetSpanId()), Parent: hex.EncodeToString(s.GetParentSpanId()),
		Name: s.GetName(), Service: service, Kind: strings.ToLower(strings.TrimPrefix(s.GetKind().String(), "SPAN_KIND_")),
		Start: time.Unix(0, int64(s.GetStartTimeUnixNano())), End: time.Unix(0, int64(s.GetEndTimeUnixNano())),
		Attrs: map[string]any{}, Failed: s.GetStatus().GetCode() == trace.Status_STATUS_CODE_ERROR, Message: s.GetStatus().GetMessage(),
	}
	for _, kv := range s.GetAttributes() {
		out.Attrs[kv.GetKey()] = value(kv.GetValue())
	}
	for _, e := range s.GetEvents() {
		out.Events = append(out.Events, e.GetName())
	}
	return out
}

func value(v *common.AnyValue) any {
	switch v := v.GetValue().(type) {
	case *common.AnyValue_StringValue:
		return v.StringValue
	case *common.AnyValue_IntValue:
		return v.IntValue
	case *common.AnyValue_BoolValue:
		return v.BoolValue
	case *common.AnyValue_ArrayValue:
		var list []string
		for _, e := range v.ArrayValue.GetValues() {
			list = append(list, e.GetStringValue())
		}
		return list
	default:
		return fmt.Sprint(v)
	}
}

// Spans are those received so far.
func (r *Receiver) Spans() []Span {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.spans)
}

// Wait returns the spans when ok accepts them; the test fails if it does not for long.
func (r *Receiver) Wait(tb testing.TB, what string, ok func([]Span) bool) []Span {
	tb.Helper()
	late := time.NewTimer(20 * time.Second)
	defer late.Stop()
	for {
		r.mu.Lock()
		spans, changed := slices.Clone(r.spans), r.changed
		r.mu.Unlock()
		if ok(spans) {
			return spans
		}
		select {
		case <-changed:
		case <-late.C:
			tb.Fatalf("waited in vain for %s; received:\n%s", what, Tree(spans))
			return nil
		}
	}
}

// Called waits until the receiver has been called, whatever it answered.
func (r *Receiver) Called(tb testing.TB) {
	tb.Helper()
	r.Wait(tb, "a call", func([]Span) bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.calls > 0
	})
}

// Tree draws spans below their parents, for people.
func Tree(spans []Span) string {
	known := map[string]bool{}
	for _, s := range spans {
		known[s.ID] = true
	}
	var b strings.Builder
	var draw func(parent string, depth int)
	draw = func(parent string, depth int) {
		var below []Span
		for _, s := range spans {
			if s.Parent == parent || parent == "" && !known[s.Parent] {
				below = append(below, s)
			}
		}
		slices.SortStableFunc(below, func(a, c Span) int { return a.Start.Compare(c.Start) })
		for _, s := range below {
			state := ""
			if s.Failed {
				state = " FAILED " + s.Message
			}
			fmt.Fprintf(&b, "%s%s: %s (%s) %v%s %v %v\n", strings.Repeat("  ", depth), s.Service, s.Name, s.Kind, s.End.Sub(s.Start), state, s.Attrs, s.Events)
			draw(s.ID, depth+1)
		}
	}
	draw("", 0)
	return b.String()
}
