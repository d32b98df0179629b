package httpapi

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sched"
)

func TestInformation(t *testing.T) {
	h := newHarness(t, hello, func(c *Config) {
		c.Extra = func() map[string]any { return map[string]any{"bootstrap_port": 8998} }
	})
	for path, wants := range map[string][]string{
		"/v1/models":       {`"object":"list"`, `"id":"tiny"`, `"max_model_len":200`},
		"/v1/models/tiny":  {`"id":"tiny"`, `"object":"model"`},
		"/health":          {`"status":"ok"`},
		"/health_generate": {`"status":"ok"`},
		"/server_info":     {`"role":"decode"`, `"version":"v0"`, `"bootstrap_port":8998`, `"running":2`, `"pages_free":7`, `"chunk_tokens":16`},
		"/get_server_info": {`"disaggregation_mode":"decode"`},
		"/model_info":      {`"model_path":"/models/tiny.gguf"`, `"is_generation":true`},
		"/get_model_info":  {`"has_chat_template":true`},
	} {
		status, body := h.get(path)
		if status != 200 || !json.Valid([]byte(body)) {
			t.Errorf("%s: %d %s", path, status, body)
		}
		for _, want := range wants {
			if !strings.Contains(body, want) {
				t.Errorf("%s: no %s in %s", path, want, body)
			}
		}
	}
	if status, body := h.get("/metrics"); status != 200 || !strings.Contains(body, `baton_http_requests_total{code="200",path="/v1/models"} 1`) {
		t.Errorf("metrics: %d %.300s", status, body)
	}
	if status, body, _, _ := h.post("/flush_cache", ""); status != 200 || !strings.Contains(body, `"success":true`) {
		t.Errorf("flush: %d %s", status, body)
	}
	if status, body := h.get("/v1/models/gpt-9"); status != 404 || errorOf(t, status, body).Code != openai.CodeModelNotFound {
		t.Errorf("unknown model: %d %s", status, body)
	}
}

func TestUnknownPathsAndMethods(t *testing.T) {
	h := newHarness(t, hello)
	for _, path := range []string{"/", "/v1", "/version", "/v1/embeddings", "/v1/models", "/generate/x", "/../etc"} {
		method := http.MethodGet
		if path == "/v1/models" {
			method = http.MethodDelete
		}
		req, err := http.NewRequest(method, h.srv.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := h.srv.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		var body strings.Builder
		if err := res.Write(&body); err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		want := 404
		if method == http.MethodDelete {
			if want = 405; res.Header.Get("Allow") != "GET, HEAD" {
				t.Errorf("Allow %q", res.Header.Get("Allow"))
			}
		}
		if res.StatusCode != want || !strings.Contains(body.String(), `"cause":"invalid_request"`) {
			t.Errorf("%s %s: %s", method, path, body.String())
		}
	}
	if status, body := h.get("/v1/chat/completions"); status != 405 {
		t.Errorf("GET of a POST path: %d %s", status, body)
	}
}

func TestUnhealthy(t *testing.T) {
	h := newHarness(t, hello)
	h.sched.unhealthy = errors.New("the loop has not moved for 9 s")
	for _, path := range []string{"/health", "/health_generate"} {
		status, body := h.get(path)
		if e := errorOf(t, status, body); status != 503 || !strings.Contains(e.Cause.Detail, "9 s") {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
}

func TestHealthGenerateRunsARealRequest(t *testing.T) {
	h := newHarness(t, hello)
	if status, body := h.get("/health_generate"); status != 200 {
		t.Fatalf("%d %s", status, body)
	}
	r := h.sched.requests[0]
	if len(r.Prompt) != 1 || r.MaxTokens != 1 || r.N != 1 || r.Deadline.IsZero() {
		t.Errorf("probe %+v", r)
	}
	h = newHarness(t, hello, func(c *Config) { c.Role = RolePrefill })
	if status, body := h.get("/health_generate"); status != 200 || len(h.sched.requests) != 0 {
		t.Errorf("prefill: %d %s, %d requests", status, body, len(h.sched.requests))
	}
	h = newHarness(t, failing(&room.Cause{Code: room.CodeEngine, Detail: "no engine"}))
	if status, body := h.get("/health_generate"); status != 503 || !strings.Contains(body, "no engine") {
		t.Errorf("%d %s", status, body)
	}
	h = newHarness(t, always(step{block: true}), func(c *Config) { c.HealthTimeout = 30 * time.Millisecond })
	status, body := h.get("/health_generate")
	if e := errorOf(t, status, body); status != 503 || e.Cause.Code != room.CodeDeadline {
		t.Errorf("stuck: %d %s", status, body)
	}
}

func TestRequestIDs(t *testing.T) {
	h := newHarness(t, hello)
	for _, c := range []struct{ header, rid, want string }{
		{"", "", "id1"}, {"abc", "", "abc"}, {"", "r9", "r9"}, {"abc", "r9", "abc"},
		{strings.Repeat("x", 129), "", "id1"}, {"a b", "", "id1"},
	} {
		body := completionBody + `}`
		if c.rid != "" {
			body = completionBody + `,"rid":"` + c.rid + `"}`
		}
		var header []string
		if c.header != "" {
			header = []string{"X-Request-Id", c.header}
		}
		_, _, hdr, _ := h.post("/v1/completions", body, header...)
		if got := hdr.Get("X-Request-Id"); got != c.want {
			t.Errorf("header %.10q rid %q: X-Request-Id %q, want %q", c.header, c.rid, got, c.want)
		}
	}
}

func TestLiveRequestsForget(t *testing.T) {
	now := time.Unix(0, 0)
	l := newLiveRequests(func() time.Time { return now })
	none := func(*room.Cause) {}
	c := &room.Cause{Code: room.CodeAborted}
	l.abort(openai.Abort{RID: "a"}, c)
	now = now.Add(rememberFor + 1)
	lr, aborted := l.add([]string{"a"}, nil, none)
	if aborted {
		t.Error("an abort was remembered too long")
	}
	l.remove(lr)
	for range 3 * rememberMost {
		now = now.Add(1)
		l.abort(openai.Abort{RID: now.String()}, c)
	}
	if len(l.recent) > rememberMost || len(l.order) > rememberMost {
		t.Errorf("%d notes kept", len(l.recent))
	}
	if l.count() != 0 {
		t.Errorf("%d live", l.count())
	}
	// Two requests of one name: an abort hits both, and each leaves by itself.
	hits := 0
	x, _ := l.add([]string{"n"}, []uint64{1, 2}, func(*room.Cause) { hits++ })
	y, _ := l.add([]string{"n", "m"}, []uint64{3}, func(*room.Cause) { hits++ })
	if got := l.abort(openai.Abort{RID: "n"}, c); got != 2 || hits != 2 {
		t.Errorf("abort hit %d, cancelled %d", got, hits)
	}
	// With a room it hits one of them, and a late one for another room none, now or later.
	ofRoom := func(room uint64) openai.Abort { return openai.Abort{RID: "n", Room: room, OfRoom: true} }
	if l.abort(ofRoom(2), c) != 1 || l.abort(ofRoom(3), c) != 1 || l.abort(ofRoom(4), c) != 0 || hits != 4 {
		t.Errorf("aborts of rooms hit %d", hits)
	}
	l.remove(x)
	if got := l.abort(openai.Abort{RID: "n"}, c); got != 1 {
		t.Errorf("abort hit %d", got)
	}
	l.remove(y)
	z, aborted := l.add([]string{"n"}, []uint64{5}, none)
	if aborted {
		t.Error("the abort of another room's request hit the next one of that name")
	}
	l.remove(z)
	if _, aborted := l.add([]string{"n"}, []uint64{4}, none); !aborted {
		t.Error("an abort that came before its request was forgotten")
	}
	if l.count() != 0 {
		t.Errorf("%d live", l.count())
	}
}

var _ sched.Scheduler = (*fakeSched)(nil)
