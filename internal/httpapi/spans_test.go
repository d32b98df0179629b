package httpapi

import (
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/otel"
	"github.com/baton-pd/baton/internal/otel/oteltest"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sched"
)

const (
	theirTrace  = "4bf92f3577b34da6a3ce929d0e0e4736"
	theirParent = "00-" + theirTrace + "-00f067aa0ba902b7-01"
)

// tracing gives a harness a tracer that sends at once.
func tracing(t *testing.T) (*oteltest.Receiver, func(*Config)) {
	t.Helper()
	r := oteltest.Start(t)
	tr, err := otel.Open(otel.Config{Endpoint: r.Endpoint, Service: "w", Ratio: -1, BatchDelay: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tr.Close)
	return r, func(c *Config) { c.Tracer, c.Worker = tr, "w1" }
}

// tree is the received spans by name, in a trace of their own; the server's has come last.
func tree(t *testing.T, r *oteltest.Receiver, route string) (root oteltest.Span, by map[string][]oteltest.Span) {
	t.Helper()
	by = map[string][]oteltest.Span{}
	for _, s := range r.Wait(t, "the server's span", func(all []oteltest.Span) bool { return len(all) > 0 && all[len(all)-1].Name == "POST "+route }) {
		by[s.Name] = append(by[s.Name], s)
	}
	root = by["POST "+route][0]
	if root.Trace != theirTrace || root.Parent != "00f067aa0ba902b7" || root.Kind != "server" || root.Text(otel.Worker) != "w1" {
		t.Errorf("server's span %+v", root)
	}
	return root, by
}

func TestSpansOfABatch(t *testing.T) {
	r, on := tracing(t)
	h := newHarness(t, always(text(0, "ab"), end(0, sched.FinishStop)), on)
	h.get("/v1/models") // has none
	if status, body, _, err := h.post("/v1/completions", `{"prompt":["x","y"],"bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":[7,8]}`, "Traceparent", theirParent); status != 200 || err != nil {
		t.Fatalf("%d %s %v", status, body, err)
	}
	root, by := tree(t, r, "/v1/completions")
	if p := by["prompt"]; len(p) != 2 || p[0].Parent != root.ID || p[0].Text(otel.Room) == p[1].Text(otel.Room) {
		t.Errorf("prompts %+v", p)
	}
	// The fake's times: submitted, granted, first token and ended, nothing else was reached.
	if root.Text(otel.Room) != "7,8" || root.Attrs[otel.OutputTokens] != int64(4) || root.Failed || len(by) != 2 {
		t.Errorf("spans %v, root %+v", by, root)
	}
}

func TestSpansOfFailures(t *testing.T) {
	lost := &room.Cause{Code: room.CodePeerLost, Side: room.SideReceiver, Phase: "transferring", Detail: "gone", Key: room.Key{Room: 7}}
	for name, c := range map[string]struct {
		script func(*sched.Request) ([]step, error)
		body   string
		cause  string
		failed bool
	}{
		"refused by the scheduler":  {failing(lost), `{"prompt":"x"}`, "peer_lost", true},
		"in mid-stream":             {always(text(0, "a"), step{err: lost}), `{"prompt":"x","stream":true}`, "peer_lost", true},
		"aborted before its answer": {failing(&room.Cause{Code: room.CodeAborted, Side: room.SideReceiver}), `{"prompt":"x"}`, "aborted", true},
		"the client's fault":        {failing(lost), `{"prompt":7.5}`, "invalid_request", false},
	} {
		t.Run(name, func(t *testing.T) {
			r, on := tracing(t)
			h := newHarness(t, c.script, on)
			_, _, _, _ = h.post("/v1/completions", c.body, "Traceparent", theirParent) // how it is told is tested elsewhere
			root, by := tree(t, r, "/v1/completions")
			if root.Failed != c.failed || root.Text(otel.Cause) != c.cause {
				t.Errorf("failed %v, cause %q", root.Failed, root.Text(otel.Cause))
			}
			if name == "in mid-stream" { // the fake had its grant and no cells: the stage without an end failed
				if q := by["queue"]; len(q) != 1 || !q[0].Failed || q[0].Text(otel.Cause) != "peer_lost" {
					t.Errorf("stages %v", by)
				}
			}
		})
	}
}

// Without a tracer nothing is collected of a request.
func TestNoSpansWhenOff(t *testing.T) {
	s := &server{}
	j := &job{s: s, w: &response{}, stop: func() {}, streams: []sched.Stream{&fakeStream{closed: make(chan struct{})}}}
	j.close()
	if j.w.ways != nil {
		t.Error("times were collected for spans")
	}
}
