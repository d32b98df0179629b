package router

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/otel"
	"github.com/baton-pd/baton/internal/otel/oteltest"
	"github.com/baton-pd/baton/internal/router/accesslog"
)

// TestRefusalsAreSeen: a request that the gate refuses has a span and a line in the access log, but no place on the page; other paths have neither.
func TestRefusalsAreSeen(t *testing.T) {
	keys, secret := withKeys(t, "a per-minute=1")
	path := filepath.Join(t.TempDir(), "access.log")
	log, err := accesslog.Open(accesslog.Config{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	tr, _, _ := startTraced(t, Config{Keys: keys, AccessLog: log}, []script{okPrefill}, []script{okAnswer})
	ask := func(path, key string, want int) string {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, tr.url+path, strings.NewReader(chatBody))
		if err != nil {
			t.Fatal(err)
		}
		if key != "" {
			req.Header.Set("Authorization", key)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("%s: status %d, want %d", path, resp.StatusCode, want)
		}
		return resp.Header.Get(edge.HeaderRequestID)
	}
	ids := []string{
		ask("/v1/chat/completions", "", 401), ask("/v1/chat/completions", "Bearer nobody's", 401),
		ask("/v1/chat/completions", secret["a"], 200), ask("/v1/chat/completions", secret["a"], 429),
	}
	ask("/abort_request", "", 401)
	spans := map[int]int{} // by status
	all := tr.Wait(t, "the spans of four requests", func(s []oteltest.Span) bool { return len(named(s, chatSpan)) >= 4 })
	for _, s := range named(all, chatSpan) {
		status, _ := s.Attrs[otel.Status].(int64)
		spans[int(status)]++
		if code := s.Text(otel.Cause); status == 429 && code != "capacity" || status == 401 && code != "invalid_request" {
			t.Errorf("status %d: cause %q", status, code)
		}
	}
	if spans[401] != 2 || spans[429] != 1 || spans[200] != 1 {
		t.Errorf("spans by status: %v", spans)
	}
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) != len(ids) {
		t.Fatalf("%d lines:\n%s", len(lines), text)
	}
	seen := map[float64]bool{}
	for _, line := range lines {
		var l struct {
			ID                                float64
			Status                            int
			Outcome, Cause, Key, Path, Client string
			Detail                            string
			RequestID                         string  `json:"request_id"`
			Total                             float64 `json:"total_ms"`
		}
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatal(err)
		}
		if seen[l.ID] || l.Path != "/v1/chat/completions" || l.Client != "127.0.0.1" || !strings.Contains(strings.Join(ids, " "), l.RequestID) || l.RequestID == "" {
			t.Errorf("line %s", line)
		}
		seen[l.ID] = true
		if want := map[int]string{401: "refused invalid_request ", 429: "refused capacity a", 200: "ok  a"}[l.Status]; l.Outcome+" "+l.Cause+" "+l.Key != want {
			t.Errorf("line %s, want %q", line, want)
		}
	}
}

// TestConnectionLimit: what comes over too many connections is refused with a status, and counted; health is answered, and a place that becomes free is
// taken again.
func TestConnectionLimit(t *testing.T) {
	p, d := seenWorker(t, okPrefill), seenWorker(t, okAnswer)
	limit := edge.NewConnections(2)
	addr, _ := atEdge(t, Config{Connections: limit, Version: "v"}, edge.Limits{Connections: limit}, p.addr, d.addr)
	get := func(path string) string { return "GET " + path + " HTTP/1.1\r\nHost: r\r\n\r\n" }
	var text string // of the last answer
	read := func(c *bufio.Reader) *http.Response {
		t.Helper()
		resp, err := http.ReadResponse(c, nil)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		text = string(body)
		return resp
	}
	first := dialed(t, addr, get("/version"))
	second := dialed(t, addr, get("/version"))
	for _, c := range []*bufio.Reader{bufio.NewReader(first), bufio.NewReader(second)} {
		if resp := read(c); resp.StatusCode != 200 || resp.Close {
			t.Errorf("within the limit: %d, closed %v", resp.StatusCode, resp.Close)
		}
	}
	third := dialed(t, addr, fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%s", len(chatBody), chatBody))
	if resp := read(bufio.NewReader(third)); resp.StatusCode != 503 || resp.Header.Get("Retry-After") != "1" || !resp.Close {
		t.Errorf("over the limit: %d %v", resp.StatusCode, resp.Header)
	}
	if !strings.Contains(text, "too many connections") {
		t.Errorf("it is told %q", text)
	}
	for _, path := range []string{"/version", "/metrics"} {
		if resp := read(bufio.NewReader(dialed(t, addr, get(path)))); resp.StatusCode != 200 || !resp.Close {
			t.Errorf("%s over the limit: %d, closed %v", path, resp.StatusCode, resp.Close)
		}
	}
	for _, want := range []string{"baton_router_refusals_total{key=\"\",reason=\"max_connections\"} 1\n", "baton_router_connections "} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in the metrics", want)
		}
	}
	_ = first.Close()
	eventually(t, func() error {
		if n := limit.Open(); n != 1 {
			return fmt.Errorf("%d connections are counted, want 1", n)
		}
		return nil
	})
	if resp := read(bufio.NewReader(dialed(t, addr, get("/v1/models")))); resp.Close {
		t.Errorf("in the place that became free: %d, closed", resp.StatusCode)
	}
}

// TestRefusedBodyEndsInTime: a body that is too large and does not come is not waited for beyond the request's deadline.
func TestRefusedBodyEndsInTime(t *testing.T) {
	inBubble(t, Config{MaxBody: 1000}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		for _, framing := range []string{"Content-Length: 100000\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n800\r\n" + strings.Repeat("x", 0x800) + "\r\n"} {
			conn, err := b.net.dial(context.Background(), "mem", "router:80")
			if err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			go func() {
				_, _ = fmt.Fprintf(conn, "POST /generate HTTP/1.1\r\nHost: r\r\n%s: 200\r\n%s", HeaderTimeout, framing)
			}()
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); resp.StatusCode != 413 || took > 700*time.Millisecond {
				t.Errorf("%.20q: status %d after %v", framing, resp.StatusCode, took)
			}
			_ = resp.Body.Close()
			_ = conn.Close()
		}
	})
}
