package router

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/otel"
	"github.com/baton-pd/baton/internal/otel/oteltest"
	"github.com/baton-pd/baton/internal/room"
)

// traced is a router between real sockets that sends its spans to a receiver.
type traced struct {
	*oteltest.Receiver
	url string
	mu  sync.Mutex
	// parents are the traceparent headers that each worker got, by its address.
	parents map[string][]string
}

// noting is a worker of a script that notes its traceparent headers.
func (tr *traced) noting(t *testing.T, s script) string {
	var addr string
	addr = tcpWorker(t, func(w http.ResponseWriter, r *http.Request, l *leg1) {
		tr.mu.Lock()
		tr.parents[addr] = append(tr.parents[addr], r.Header.Get("Traceparent"))
		tr.mu.Unlock()
		s(w, r, l)
	})
	return addr
}

// startTraced runs it; one worker for each script, whose addresses are returned.
func startTraced(t *testing.T, c Config, prefills, decodes []script) (tr *traced, p, d []string) {
	t.Helper()
	tr = &traced{Receiver: oteltest.Start(t), parents: map[string][]string{}}
	tracer, err := otel.Open(otel.Config{Endpoint: tr.Endpoint, Service: "router", Ratio: -1, BatchDelay: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tracer.Close)
	c.Tracer = tracer
	for _, s := range prefills {
		p = append(p, tr.noting(t, s))
		c.Prefills = append(c.Prefills, Backend{URL: "http://" + p[len(p)-1], BootstrapPort: 1})
	}
	for _, s := range decodes {
		d = append(d, tr.noting(t, s))
		c.Decodes = append(c.Decodes, Backend{URL: "http://" + d[len(d)-1]})
	}
	r, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(r.Handler())
	t.Cleanup(func() {
		srv.CloseClientConnections()
		srv.Close()
		r.Close()
	})
	tr.url = srv.URL
	return tr, p, d
}

// trace waits until the request's span and n spans in all have come.
func (tr *traced) trace(t *testing.T, n int) (all []oteltest.Span) {
	t.Helper()
	return tr.Wait(t, "the request's spans", func(s []oteltest.Span) bool { return len(s) >= n })
}

// named are the spans of a name, by the time of their starts.
func named(spans []oteltest.Span, name string) (out []oteltest.Span) {
	for _, s := range spans {
		if s.Name == name {
			out = append(out, s)
		}
	}
	if len(out) == 2 && out[1].Start.Before(out[0].Start) {
		out[0], out[1] = out[1], out[0]
	}
	return out
}

// one is the only span of a name.
func one(t *testing.T, spans []oteltest.Span, name string) oteltest.Span {
	t.Helper()
	s := named(spans, name)
	if len(s) != 1 {
		t.Fatalf("%d spans %q:\n%s", len(s), name, oteltest.Tree(spans))
	}
	return s[0]
}

const (
	chatSpan     = "POST /v1/chat/completions"
	clientsTrace = "4bf92f3577b34da6a3ce929d0e0e4736"
	clientsSpan  = "00f067aa0ba902b7"
)

func TestTraceOfARequest(t *testing.T) {
	tr, p, d := startTraced(t, Config{}, []script{okPrefill}, []script{sse(role, token, last, done)})
	postTCP(t, tr.url, "Traceparent", "00-"+clientsTrace+"-"+clientsSpan+"-01").ok(t, role+token+last+done)
	spans := tr.trace(t, 5)
	root, attempt := one(t, spans, chatSpan), one(t, spans, "attempt")
	room := attempt.Text(otel.Room)
	if root.Parent != clientsSpan || attempt.Parent != root.ID || one(t, spans, "queue").Parent != root.ID || room == "" ||
		root.Text(otel.Outcome) != "ok" || root.Attrs[otel.Status] != int64(200) || root.Text(otel.Model) != "m" {
		t.Errorf("wrong parents or attributes:\n%s", oteltest.Tree(spans))
	}
	for name, addr := range map[string]string{"prefill leg": p[0], "decode leg": d[0]} {
		l := one(t, spans, name)
		tr.mu.Lock()
		got := tr.parents[addr]
		tr.mu.Unlock()
		if l.Parent != attempt.ID || l.Kind != "client" || l.Text(otel.Worker) != addr || l.Text(otel.Phase) != "done" ||
			len(got) != 1 || got[0] != "00-"+clientsTrace+"-"+l.ID+"-01" {
			t.Errorf("%s: its worker got %v:\n%s", name, got, oteltest.Tree(spans))
		}
	}
	for _, s := range spans {
		if s.Trace != clientsTrace || s.Failed || s.Name != "queue" && s.Text(otel.Room) != room || s.End.Before(s.Start) {
			t.Errorf("span %s: %+v", s.Name, s)
		}
	}
	if ev := one(t, spans, "decode leg").Events; len(ev) != 1 || ev[0] != "first_token" {
		t.Errorf("events %v", ev)
	}
}

// A trace that its parent does not record is not recorded here, and goes on so.
func TestTraceNotSampled(t *testing.T) {
	arrived := make(chan struct{}, 2) // legs at the prefill worker: the answer waits for its own, so they come in order
	prefill := func(w http.ResponseWriter, r *http.Request, l *leg1) {
		arrived <- struct{}{}
		okPrefill(w, r, l)
	}
	decode := func(w http.ResponseWriter, r *http.Request, l *leg1) {
		<-arrived
		okStream(w, r, l)
	}
	tr, p, _ := startTraced(t, Config{}, []script{prefill}, []script{decode})
	postTCP(t, tr.url, "Traceparent", "00-"+clientsTrace+"-"+clientsSpan+"-00").ok(t, role+token+last+done)
	postTCP(t, tr.url, "Traceparent", "00-nonsense").ok(t, role+token+last+done)
	for _, s := range tr.trace(t, 5) {
		if s.Trace == clientsTrace {
			t.Errorf("span %s is recorded", s.Name)
		}
	}
	tr.mu.Lock()
	defer tr.mu.Unlock()
	if got := tr.parents[p[0]]; len(got) != 2 || !strings.HasPrefix(got[0], "00-"+clientsTrace) || !strings.HasSuffix(got[0], "-00") || !strings.HasSuffix(got[1], "-01") {
		t.Errorf("passed on %v", got)
	}
}

// A retry is a second attempt below the same request; the first one tells which worker failed, and why.
func TestTraceOfARetry(t *testing.T) {
	tr, _, d := startTraced(t, Config{Policy: PolicyRoundRobin}, []script{okPrefill, okPrefill}, []script{rst(""), okStream})
	// Which decode worker comes first is the policy's business: of two requests one is tried twice.
	postTCP(t, tr.url).ok(t, role+token+last+done)
	postTCP(t, tr.url).ok(t, role+token+last+done)
	spans := tr.Wait(t, "two requests and three attempts", func(s []oteltest.Span) bool { return len(named(s, chatSpan)) == 2 && len(s) >= 2+3*4 })
	var bad oteltest.Span
	for _, s := range named(spans, "attempt") {
		if s.Failed {
			bad = s
		}
	}
	if bad.Text(otel.Cause) != "peer_lost" || bad.Text("baton.decode") != d[0] || bad.Attrs[otel.Attempt] != int64(0) || !strings.Contains(bad.Message, d[0]) {
		t.Errorf("failed attempt %+v", bad)
	}
	var both []oteltest.Span
	for _, s := range named(spans, "attempt") {
		if s.Parent == bad.Parent {
			both = append(both, s)
		}
	}
	if len(both) != 2 || both[0].Text(otel.Room) == both[1].Text(otel.Room) {
		t.Errorf("want two attempts with rooms of their own:\n%s", oteltest.Tree(spans))
	}
	for _, s := range named(spans, chatSpan) {
		if s.Failed || s.Text(otel.Outcome) != "ok" {
			t.Errorf("request %+v", s)
		}
	}
}

// However a request fails, its span says so, with the cause that the client is told.
func TestTraceOfFailures(t *testing.T) {
	for name, c := range map[string]struct {
		decode         script
		body           string
		header         []string
		outcome, cause string
		failed         bool
		n              int // spans at least
	}{
		"killed in mid-stream": {sse(role, token, errReset), streamBody, nil, "stream_error", "peer_lost", true, 5},
		"says abort":           {sse(role, token, abortLast), streamBody, nil, "stream_error", "aborted", true, 5},
		"deadline":             {silent, streamBody, []string{HeaderTimeout, "1500"}, "error", "deadline", true, 5},
		"refused by a worker":  {say(400, `{"error":{"message":"no"}}`), streamBody, nil, "refused", "invalid_request", false, 5},
		"refused here":         {okStream, `{"stream":7}`, nil, "refused", "invalid_request", false, 1},
	} {
		t.Run(name, func(t *testing.T) {
			tr, _, _ := startTraced(t, Config{MaxRetries: -1}, []script{okPrefill}, []script{c.decode})
			resp := send(t, t.Context(), tr.url+"/v1/chat/completions", c.body, c.header...)
			if resp != nil {
				_, _ = io.Copy(io.Discard, resp.Body) // a client that leaves early would be the cause
				resp.Body.Close()
			}
			spans := tr.trace(t, c.n)
			root := one(t, spans, chatSpan)
			if root.Text(otel.Outcome) != c.outcome || root.Text(otel.Cause) != c.cause || root.Failed != c.failed {
				t.Errorf("want %s, %s, failed %v:\n%s", c.outcome, c.cause, c.failed, oteltest.Tree(spans))
			}
			if c.n > 1 {
				if l := one(t, spans, "decode leg"); l.Text(otel.Cause) != c.cause || l.Failed != c.failed {
					t.Errorf("want %s on the leg as well:\n%s", c.cause, oteltest.Tree(spans))
				}
			}
		})
	}
}

// send posts a body and ignores how the answer ends; nil: the client left.
func send(t *testing.T, ctx context.Context, url, body string, header ...string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	t.Cleanup(http.DefaultTransport.(*http.Transport).CloseIdleConnections)
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil && ctx.Err() == nil {
		t.Fatal(err)
	}
	return resp
}

// The client's leaving and an abort are told, too, and on both legs.
func TestTraceOfAborts(t *testing.T) {
	for name, cause := range map[string]string{"client leaves": "client_gone", "abort_request": "aborted"} {
		t.Run(name, func(t *testing.T) {
			arrived := make(chan struct{}, 1)
			tr, _, _ := startTraced(t, Config{}, []script{silent}, []script{func(w http.ResponseWriter, r *http.Request, l *leg1) {
				arrived <- struct{}{}
				silent(w, r, l)
			}})
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			ended := make(chan *http.Response, 1)
			go func() {
				ended <- send(t, ctx, tr.url+"/v1/chat/completions", `{"rid":"r1","messages":[]}`)
			}()
			<-arrived
			if cause == "client_gone" {
				leave()
			} else {
				send(t, ctx, tr.url+"/abort_request", `{"rid":"r1"}`).Body.Close()
			}
			if resp := <-ended; resp != nil {
				resp.Body.Close()
			}
			spans := tr.trace(t, 5)
			for _, s := range spans {
				if s.Name != "queue" && (!s.Failed || s.Text(otel.Cause) != cause) {
					t.Errorf("span %s does not say %s:\n%s", s.Name, cause, oteltest.Tree(spans))
				}
			}
			if root := one(t, spans, chatSpan); root.Text(otel.Request) != "r1" || root.Text(otel.Outcome) != cause {
				t.Errorf("request %+v", root)
			}
		})
	}
}

// A batch has several rooms.
func TestTraceOfABatch(t *testing.T) {
	tr, _, _ := startTraced(t, Config{}, []script{okPrefill}, []script{say(200, `{"choices":[{"index":0,"text":"a","finish_reason":"stop"},{"index":1,"text":"b","finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":2}}`)})
	send(t, t.Context(), tr.url+"/v1/completions", `{"prompt":["a","b"]}`).Body.Close()
	spans := tr.trace(t, 5)
	leg := one(t, spans, "decode leg")
	if rooms, _ := leg.Attrs[otel.Rooms].([]string); len(rooms) != 2 || rooms[0] == rooms[1] || leg.Attrs[otel.InputTokens] != int64(5) || leg.Attrs[otel.OutputTokens] != int64(2) {
		t.Errorf("rooms %v:\n%s", rooms, oteltest.Tree(spans))
	}
}

// A collector that does not answer changes nothing for clients, and the end takes no longer than its bound.
func TestSilentCollector(t *testing.T) {
	r := oteltest.Start(t)
	r.Answer(func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
	tracer, err := otel.Open(otel.Config{Endpoint: r.Endpoint, Ratio: 1, BatchDelay: time.Millisecond, MaxQueue: 3, CloseTimeout: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	srv := overTCP(t, Config{Tracer: tracer}, tcpWorker(t, okPrefill), tcpWorker(t, okStream))
	for range 20 {
		postTCP(t, srv.URL).ok(t, role+token+last+done)
	}
	r.Called(t)
	tracer.Close()
	postTCP(t, srv.URL).ok(t, role+token+last+done) // also after it
}

// Without a tracer the hooks allocate nothing.
func TestNoTraceCostsNothing(t *testing.T) {
	r := &Router{}
	req := httptest.NewRequest(http.MethodPost, "/v1/completions", nil)
	req.Header.Set("Traceparent", "00-"+clientsTrace+"-"+clientsSpan+"-01")
	c := &call{parsed: &parsed{names: []string{"x"}}}
	a := &attempt{r: r, c: c, header: req.Header, rooms: []uint64{1}}
	a.ctx = context.Background()
	a.prefill.a, a.prefill.w = a, &worker{side: room.SideSender}
	f := routerFailure(room.CodeAborted, false, "x")
	n := testing.AllocsPerRun(100, func() {
		c.span = r.traceCall(req, "/v1/completions")
		c.traceWait(0, time.Time{}, f)
		a.traceStart(0)
		if h := a.prefill.traceSend(); len(h) != 1 {
			t.Error("the header was changed")
		}
		a.prefill.span.Event("first_token")
		a.prefill.traceEnd(f)
		a.traceEnd(f)
		endCall(c.span, c, 200, "ok", f)
	})
	if n != 0 {
		t.Errorf("%v allocations a request", n)
	}
}

// BenchmarkSpans is what the spans of one request cost the router: off, not recorded, recorded with a collector that takes nothing.
func BenchmarkSpans(b *testing.B) {
	for name, ratio := range map[string]float64{"off": -1, "unsampled": 0, "recorded": 1} {
		b.Run(name, func(b *testing.B) {
			r := &Router{}
			if ratio >= 0 {
				tracer, err := otel.Open(otel.Config{Endpoint: "127.0.0.1:1", Ratio: ratio, CloseTimeout: time.Millisecond})
				if err != nil {
					b.Fatal(err)
				}
				defer tracer.Close()
				r.cfg.Tracer = tracer
			}
			req := httptest.NewRequest(http.MethodPost, "/v1/completions", nil)
			ctx, w := context.Background(), &worker{side: room.SideReceiver, name: "d", base: &url.URL{Host: "d"}}
			b.ReportAllocs()
			for b.Loop() {
				c := &call{parsed: &parsed{names: []string{"x"}}, start: time.Now()}
				c.span = r.traceCall(req, "/v1/completions")
				c.traceWait(0, c.start, nil)
				a := &attempt{r: r, c: c, start: c.start, header: req.Header, rooms: []uint64{1}, ctx: ctx}
				a.prefill.a, a.prefill.w = a, w
				a.decode.a, a.decode.w = a, w
				a.traceStart(0)
				for _, l := range []*leg{&a.prefill, &a.decode} {
					l.traceSend()
					l.traceEnd(nil)
				}
				a.traceEnd(nil)
				endCall(c.span, c, 200, "ok", nil)
			}
		})
	}
}
