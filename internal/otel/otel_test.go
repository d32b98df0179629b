package otel_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/baton-pd/baton/internal/otel"
	"github.com/baton-pd/baton/internal/otel/oteltest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open makes a tracer that sends at once.
func open(t *testing.T, c otel.Config) *otel.Tracer {
	t.Helper()
	c.Service = "test"
	if c.BatchDelay == 0 {
		c.BatchDelay = time.Millisecond
	}
	tr, err := otel.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tr.Close)
	return tr
}

// counts are the samples of baton_trace_spans_total by result.
func counts(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			out[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
		}
	}
	return out
}

const (
	theirTrace = "4bf92f3577b34da6a3ce929d0e0e4736"
	theirSpan  = "00f067aa0ba902b7"
)

func parent(flags string) http.Header {
	return http.Header{"Traceparent": {"00-" + theirTrace + "-" + theirSpan + "-" + flags}, "Tracestate": {"vendor=x"}}
}

// The client's span is the parent, ours go on to the next process, and everything set arrives.
func TestSpansArrive(t *testing.T) {
	r := oteltest.Start(t)
	tr := open(t, otel.Config{Endpoint: strings.TrimPrefix(r.Endpoint, "http://"), Ratio: -1}) // without a scheme, too
	began := time.Now().Add(-time.Minute)
	s := tr.Server(parent("01"), "request", began)
	leg := s.Client("leg")
	h := http.Header{"Traceparent": {"garbage"}, "Tracestate": {"old=1"}}
	leg.Inject(h)
	leg.Set(otel.String(otel.Room, "7"), otel.Strings(otel.Rooms, []string{"7", "8"}), otel.Int(otel.Status, 200), otel.Bool("ok", true))
	leg.Event("first")
	leg.Fail("peer_lost", "it was killed")
	leg.End(time.Time{})
	s.Child("queue", began).End(began.Add(time.Second))
	s.End(time.Time{})
	spans := r.Wait(t, "three spans", func(s []oteltest.Span) bool { return len(s) == 3 })
	by := map[string]oteltest.Span{}
	for _, s := range spans {
		by[s.Name] = s
		if s.Trace != theirTrace || s.Service != "test" {
			t.Errorf("span %s is of trace %s and service %q", s.Name, s.Trace, s.Service)
		}
	}
	root, l, q := by["request"], by["leg"], by["queue"]
	if root.Parent != theirSpan || root.Kind != "server" || !root.Start.Equal(began) || root.Failed {
		t.Errorf("root %+v", root)
	}
	if l.Parent != root.ID || l.Kind != "client" || !l.Failed || l.Message != "it was killed" || l.Text(otel.Cause) != "peer_lost" || l.Text(otel.Room) != "7" ||
		fmt.Sprint(l.Attrs[otel.Rooms]) != "[7 8]" || l.Attrs[otel.Status] != int64(200) || l.Attrs["ok"] != true || fmt.Sprint(l.Events) != "[first]" {
		t.Errorf("leg %+v", l)
	}
	if q.Parent != root.ID || q.Kind != "internal" || q.End.Sub(q.Start) != time.Second {
		t.Errorf("queue %+v", q)
	}
	if want := "00-" + theirTrace + "-" + l.ID + "-01"; h.Get("Traceparent") != want || h.Get("Tracestate") != "vendor=x" {
		t.Errorf("passed on %v, want traceparent %s", h, want)
	}
}

// The parent's choice comes first; without one the ratio decides. What is not recorded passes its context on all the same.
func TestSampling(t *testing.T) {
	r := oteltest.Start(t)
	never, always := open(t, otel.Config{Endpoint: r.Endpoint, Ratio: 0}), open(t, otel.Config{Endpoint: r.Endpoint, Ratio: 1})
	for name, c := range map[string]struct {
		tr   *otel.Tracer
		h    http.Header
		want bool
	}{
		"no parent, none": {never, http.Header{}, false}, "no parent, all": {always, http.Header{}, true},
		"sampled parent, none": {never, parent("01"), true}, "unsampled parent, all": {always, parent("00"), false},
		"bad parent, none": {never, http.Header{"Traceparent": {"00-zz-1-01"}}, false}, "bad parent, all": {always, http.Header{"Traceparent": {"ff-" + theirTrace}}, true},
	} {
		s := c.tr.Server(c.h, name, time.Time{})
		if s.Recording() != c.want {
			t.Errorf("%s: recorded: %v", name, s.Recording())
		}
		h := http.Header{}
		s.Inject(h)
		if flag := strings.HasSuffix(h.Get("Traceparent"), "-01"); len(h.Get("Traceparent")) != 55 || flag != c.want {
			t.Errorf("%s: passed on %v", name, h)
		}
		s.End(time.Time{})
	}
	never.Close()
	always.Close()
	if got := r.Spans(); len(got) != 3 {
		t.Errorf("%d spans arrived, want 3:\n%s", len(got), oteltest.Tree(got))
	}
	t.Setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
	if open(t, otel.Config{Endpoint: r.Endpoint, Ratio: -1}).Server(nil, "x", time.Time{}).Recording() {
		t.Error("OTEL_TRACES_SAMPLER has no effect")
	}
}

// Whatever the collector does, ending spans takes no time and Close not much; each span is counted once.
func TestBadCollectors(t *testing.T) {
	silent := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	refuses := func(context.Context) error { return status.Error(codes.PermissionDenied, "no") }
	busy := func(context.Context) error { return status.Error(codes.Unavailable, "later") }
	for name, answer := range map[string]func(context.Context) error{"silent": silent, "refuses": refuses, "busy": busy, "absent": nil, "accepts and says nothing": nil} {
		t.Run(name, func(t *testing.T) {
			endpoint := ""
			switch name {
			case "absent":
				l, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				endpoint = l.Addr().String()
				l.Close()
			case "accepts and says nothing": // not even HTTP/2 settings
				l, err := net.Listen("tcp", "127.0.0.1:0") // the kernel accepts
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				endpoint = l.Addr().String()
			default:
				r := oteltest.Start(t)
				r.Answer(answer)
				endpoint = r.Endpoint
			}
			reg := prometheus.NewRegistry()
			tr := open(t, otel.Config{Endpoint: endpoint, Ratio: 1, MaxQueue: 100, ExportTimeout: time.Hour, CloseTimeout: 200 * time.Millisecond, Registerer: reg})
			const n = 1000
			for range n {
				tr.Server(nil, "x", time.Time{}).End(time.Time{})
			}
			tr.Close() // hangs if it does not end exports
			tr.Server(nil, "late", time.Time{}).End(time.Time{})
			got := counts(t, reg)
			if got["exported"] != 0 || got["failed"]+got["dropped"] < n || got["failed"]+got["dropped"] > n+1 || got["dropped"] == 0 {
				t.Errorf("%v of %d spans", got, n+1)
			}
		})
	}
}

// A collector that comes back gets what follows, and the log tells of both changes, once.
func TestCollectorComesBack(t *testing.T) {
	r := oteltest.Start(t)
	r.Answer(func(context.Context) error { return status.Error(codes.InvalidArgument, "no") })
	var log lockedLog
	reg := prometheus.NewRegistry()
	tr := open(t, otel.Config{Endpoint: r.Endpoint, Ratio: 1, Registerer: reg, Log: slog.New(slog.NewTextHandler(&log, nil))})
	tr.Server(nil, "lost", time.Time{}).End(time.Time{})
	r.Called(t)
	r.Answer(nil)
	tr.Server(nil, "kept", time.Time{}).End(time.Time{})
	spans := r.Wait(t, "a span", func(s []oteltest.Span) bool { return len(s) > 0 })
	tr.Close()
	if got := counts(t, reg); spans[0].Name != "kept" || got["exported"] != 1 || got["failed"] != 1 || got["dropped"] != 0 {
		t.Errorf("spans %v, counts %v", spans, got)
	}
	if text := log.String(); strings.Count(text, "cannot be sent") != 1 || strings.Count(text, "sent again") != 1 {
		t.Errorf("log:\n%s", text)
	}
}

// Off costs nothing.
func TestOffAllocatesNothing(t *testing.T) {
	var tr *otel.Tracer
	h := http.Header{"Traceparent": {"00-" + theirTrace + "-" + theirSpan + "-01"}}
	n := testing.AllocsPerRun(1000, func() {
		s := tr.Server(h, "request", time.Time{})
		c := s.Client("leg")
		c.Inject(h)
		if c.Recording() {
			c.Set(otel.String(otel.Room, "7"))
		}
		c.Event("first")
		c.Fail("peer_lost", "x")
		c.End(time.Time{})
		s.Child("queue", time.Time{}).End(time.Time{})
		s.End(time.Time{})
	})
	tr.Close()
	if n != 0 || h.Get("Traceparent") == "" {
		t.Errorf("%v allocations a request, header %v", n, h)
	}
}

func TestEndpoint(t *testing.T) {
	for _, c := range []struct {
		flag, env string
		want, err string
	}{
		{},
		{flag: "collector", want: "http://collector:4317"},
		{flag: "10.0.0.1:9", want: "http://10.0.0.1:9"},
		{flag: "[::1]:9", want: "http://[::1]:9"},
		{flag: "https://c/", want: "https://c:4317"},
		{flag: "ftp://c", err: "--otlp"},
		{flag: "http://c/v1/traces", err: "--otlp"},
		{flag: "http://", err: "--otlp"},
		{env: "OTEL_EXPORTER_OTLP_ENDPOINT=http://c:1", want: "http://c:1"},
		{env: "OTEL_EXPORTER_OTLP_ENDPOINT=http://c:1 OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://d:2", want: "http://d:2"},
		{env: "OTEL_EXPORTER_OTLP_ENDPOINT=http://c:1", flag: "d:2", want: "http://d:2"},
		{env: "OTEL_EXPORTER_OTLP_ENDPOINT=http://c:1 OTEL_SDK_DISABLED=true"},
		{env: "OTEL_EXPORTER_OTLP_ENDPOINT=http://c:1 OTEL_TRACES_EXPORTER=none"},
		{env: "OTEL_EXPORTER_OTLP_ENDPOINT=http://c:1 OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf", err: "only grpc"},
		{env: "OTEL_EXPORTER_OTLP_ENDPOINT=http://c:1 OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=grpc", want: "http://c:1"},
		{env: "OTEL_EXPORTER_OTLP_ENDPOINT=c:x", err: "OTEL_EXPORTER_OTLP_ENDPOINT"},
	} {
		got, err := otel.Endpoint(c.flag, func(name string) string {
			for kv := range strings.FieldsSeq(c.env) {
				if k, v, _ := strings.Cut(kv, "="); k == name {
					return v
				}
			}
			return ""
		})
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("flag %q, %s: %q, %v", c.flag, c.env, got, err)
		}
	}
	if _, err := otel.Open(otel.Config{Endpoint: "http://c", Ratio: 1.5}); err == nil {
		t.Error("a ratio of 1.5 is taken")
	}
}

type lockedLog struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
