package router

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

func TestBadRequests(t *testing.T) {
	inBubble(t, Config{MaxBody: 1000, MaxTimeout: time.Minute, DefaultTimeout: time.Minute}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		for name, c := range map[string]struct {
			path, body string
			header     []string
			status     int
			code       string
		}{
			"not JSON":        {"/generate", `{"text":`, nil, 400, "invalid_body"},
			"not an object":   {"/generate", `[1]`, nil, 400, "invalid_body"},
			"empty":           {"/generate", ``, nil, 400, "invalid_body"},
			"twice":           {"/generate", `{"text":"a","text":"b"}`, nil, 400, "invalid_body"},
			"bad UTF-8":       {"/generate", "{\"text\":\"\xff\"}", nil, 400, "invalid_body"},
			"NUL":             {"/generate", `{"text":"\u0000"}`, nil, 400, "invalid_body"},
			"deep":            {"/generate", `{"text":` + strings.Repeat("[", 200) + strings.Repeat("]", 200) + `}`, nil, 400, "invalid_body"},
			"stream":          {"/generate", `{"text":"a","stream":"yes"}`, nil, 400, "invalid_value"},
			"rid":             {"/generate", `{"text":"a","rid":5}`, nil, 400, "invalid_value"},
			"rid line break":  {"/generate", `{"text":"a","rid":"a\r\nX-B: c"}`, nil, 400, "invalid_value"},
			"rid empty":       {"/generate", `{"text":["a","b"],"rid":["a",""]}`, nil, 400, "invalid_value"},
			"rid long":        {"/generate", `{"text":"a","rid":"` + strings.Repeat("a", 129) + `"}`, nil, 400, "invalid_value"},
			"prompts":         {"/v1/completions", `{"prompt":[` + strings.Repeat(`"a",`, 200) + `"a"]}`, nil, 400, "invalid_value"},
			"too large":       {"/generate", `{"text":"` + strings.Repeat("a", 1000) + `"}`, nil, 413, "body_too_large"},
			"encoding":        {"/generate", `{}`, []string{"Content-Encoding", "gzip"}, 415, "invalid_body"},
			"deadline word":   {"/generate", `{}`, []string{HeaderTimeout, "soon"}, 400, "invalid_value"},
			"deadline zero":   {"/generate", `{}`, []string{HeaderTimeout, "0"}, 400, "invalid_value"},
			"deadline beyond": {"/generate", `{}`, []string{HeaderTimeout, "60001"}, 400, "invalid_value"},
			"path":            {"/v1/embeddings", `{}`, nil, 404, "not_found"},
			"method":          {"/v1/models", `{}`, nil, 405, "method_not_allowed"},
		} {
			g := b.post(t.Context(), c.path, c.body, c.header...)
			if e := g.fails(t, c.status, "invalid_request"); e.Error.Code != c.code {
				t.Errorf("%s: code %q; want %q", name, e.Error.Code, c.code)
			}
		}
		if g := b.get("/generate"); g.status != 405 || g.header.Get("Allow") != "POST" {
			t.Errorf("%d, Allow %q", g.status, g.header.Get("Allow"))
		}
		if p[0].count()+d[0].count() > 0 {
			t.Error("a bad request reached a worker")
		}
	})
}

// A body of unknown length is cut off at the limit, not read to its end.
func TestEndlessBody(t *testing.T) {
	inBubble(t, Config{MaxBody: 1 << 20}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://router/generate", endless{})
		if err != nil {
			t.Fatal(err)
		}
		resp, err := b.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusRequestEntityTooLarge {
			t.Errorf("status %d", resp.StatusCode)
		}
	})
}

// endless is spaces.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

func TestSlowBody(t *testing.T) {
	for _, c := range []struct {
		name, header, status, says string
		after                      time.Duration
	}{
		{"body's time", "", "408", "body_timeout", time.Second},
		{"request's deadline", HeaderTimeout + ": 300\r\n", "504", `"cause":"deadline"`, 300 * time.Millisecond},
	} {
		inBubble(t, Config{BodyTimeout: time.Second}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
			conn, err := b.net.dial(t.Context(), "", "router:80")
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := io.WriteString(conn, "POST /generate HTTP/1.1\r\nHost: x\r\n"+c.header+"Content-Length: 100\r\n\r\n{"); err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			answer, err := io.ReadAll(conn)
			if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 "+c.status) || !strings.Contains(string(answer), c.says) || time.Since(start) > c.after+time.Second {
				t.Fatalf("%s: %q, %v after %v", c.name, answer, err, time.Since(start))
			}
		})
	}
}

func TestTooManyInFlight(t *testing.T) {
	inBubble(t, Config{MaxInflight: 1, MaxQueue: -1}, []script{okPrefill}, []script{silent}, func(t *testing.T, b *bed, p, d []*fake) {
		ctx, cancel := context.WithCancel(t.Context())
		first := make(chan got)
		go func() { first <- b.post(ctx, "/v1/chat/completions", chatBody) }()
		<-time.After(time.Second)
		g := b.chat()
		if e := g.fails(t, 429, "capacity"); e.Error.Phase != "queued" {
			t.Errorf("phase %q", e.Error.Phase)
		}
		if g.header.Get("Retry-After") == "" {
			t.Error("no Retry-After")
		}
		cancel()
		<-first
		<-time.After(time.Second)
		d[0].set(okAnswer)
		b.chat().ok(t, chatAnswer)
	})
}

func TestSameRIDTwice(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{silent}, func(t *testing.T, b *bed, p, d []*fake) {
		body := `{"rid":"a","text":"x"}`
		ctx, cancel := context.WithCancel(t.Context())
		first := make(chan got)
		go func() { first <- b.post(ctx, "/generate", body) }()
		<-time.After(time.Second)
		b.post(t.Context(), "/generate", body).fails(t, 409, "duplicate_room")
		b.post(t.Context(), "/generate", `{"rid":["b","a"],"text":["x","y"]}`).fails(t, 409, "duplicate_room")
		if n := d[0].count(); n != 1 || len(d[0].aborts) > 0 {
			t.Errorf("the first request was disturbed: %d requests, aborts %v", n, d[0].aborts)
		}
		cancel()
		<-first
		<-time.After(time.Second)
		d[0].set(say(200, genAnswer))
		b.post(t.Context(), "/generate", body).ok(t, genAnswer)
		b.post(t.Context(), "/generate", `{"rid":[],"text":"x"}`).ok(t, genAnswer) // names nothing
	})
}

func TestAbortRequest(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{sse(role, token, nil)}, func(t *testing.T, b *bed, p, d []*fake) {
		start := time.Now()
		first := make(chan got)
		go func() {
			first <- b.post(t.Context(), "/v1/chat/completions", strings.Replace(streamBody, "{", `{"rid":"mine",`, 1))
		}()
		<-time.After(time.Second)
		b.post(t.Context(), "/abort_request", `{"rid":"mine"}`).ok(t, "{\"aborted\":1}\n")
		(<-first).breaks(t, role+token, "aborted")
		<-time.After(time.Second)
		d[0].released(0, start, time.Second)
		// An id that is not ours may be another router's: every worker hears of it.
		if g := b.post(t.Context(), "/abort_request", `{"rid":"other"}`); g.status != 200 || !strings.Contains(g.body, `"aborted":0`) {
			t.Errorf("%d %s", g.status, g.body)
		}
		if _, ok := p[0].aborts["other "]; !ok {
			t.Error("the prefill worker was not told")
		}
		b.post(t.Context(), "/abort_request", `{}`).fails(t, 400, "invalid_request")

		d[0].set(silent)
		go func() { first <- b.chat() }()
		<-time.After(time.Second)
		if g := b.post(t.Context(), "/abort_request", `{"abort_all":true}`); g.status != 200 || !strings.Contains(g.body, `"aborted":1`) {
			t.Errorf("%d %s", g.status, g.body)
		}
		(<-first).fails(t, 499, "aborted")
	})
}

func TestInformation(t *testing.T) {
	inBubble(t, Config{Version: "v9"}, []script{say(200, genAnswer)}, []script{say(200, genAnswer), say(200, genAnswer)}, func(t *testing.T, b *bed, p, d []*fake) {
		for path, want := range map[string]string{
			"/v1/models":       `"path":"/v1/models"`,
			"/v1/models/a/b":   `"path":"/v1/models/a/b"`,
			"/version":         `{"version":"v9"}`,
			"/model_info":      `"path":"/model_info"`,
			"/server_info":     `"prefill":[{"leg":"prefill","worker":"p0:80","status":200,"answer":{"worker":"p0:80","path":"/server_info"}}]`,
			"/get_server_info": `"version":"v9"`,
			"/workers":         `{"leg":"prefill","worker":"p0:80","url":"http://p0:80/","bootstrap":"boot0:8998","state":"up"`,
			"/health":          `{"decode":2,"prefill":1,"status":"ok"}`,
			"/health_generate": `"prefill":"p0:80"`,
			"/flush_cache":     `"success":true`,
			"/metrics":         `baton_router_worker_up{leg="decode",worker="d1:80"} 1`,
		} {
			if g := b.get(path); g.status != 200 || g.err != nil || !strings.Contains(g.body, want) {
				t.Errorf("%s: %d %s %v; want %s", path, g.status, g.body, g.err, want)
			}
		}
		d[0].kill()
		for range 2 {
			if g := b.get("/v1/models"); g.status != 200 || !strings.Contains(g.body, "d1:80") {
				t.Errorf("/v1/models with one worker gone: %d %s", g.status, g.body)
			}
		}
		if g := b.get("/flush_cache"); g.status != 502 || !strings.Contains(g.body, `{"leg":"decode","worker":"d0:80","error":"connection refused"}`) {
			t.Errorf("/flush_cache with one worker gone: %d %s", g.status, g.body)
		}
		d[1].kill()
		<-time.After(time.Second)
		b.get("/v1/models").fails(t, 503, "unavailable")
		b.get("/health_generate").fails(t, 503, "unavailable")
		b.get("/health").fails(t, 503, "unavailable")
	})
}

func TestHealthGenerateFails(t *testing.T) {
	inBubble(t, Config{}, []script{silent}, []script{silent}, func(t *testing.T, b *bed, p, d []*fake) {
		start := time.Now()
		g := b.get("/health_generate")
		g.fails(t, 503, "deadline")
		if g.took > generateTimeout+500*time.Millisecond {
			t.Errorf("took %v", g.took)
		}
		<-time.After(time.Second)
		p[0].released(0, start, generateTimeout+500*time.Millisecond)
	})
}

// The counters tell how requests ended, and each has one log line with its cause.
func TestAccounts(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{okStream}, func(t *testing.T, b *bed, p, d []*fake) {
		b.chatStream().ok(t, role+token+last+done)
		d[0].set(say(500, "boom"))
		b.chat().fails(t, 500, "engine_failed")
		d[0].set(sse(role, token))
		b.chatStream()
		g := b.get("/metrics")
		for _, want := range []string{
			`baton_router_requests_total{cause="none",outcome="ok"} 1`,
			`baton_router_requests_total{cause="engine_failed",outcome="error"} 1`,
			`baton_router_requests_total{cause="protocol",outcome="stream_error"} 1`,
			`baton_router_worker_errors_total{cause="engine_failed",leg="decode",worker="d0:80"} 1`,
			`baton_router_request_seconds_count 3`,
			`baton_router_inflight_requests 0`,
		} {
			if !strings.Contains(g.body, want) {
				t.Errorf("metrics lack %s:\n%s", want, g.body)
			}
		}
		log := b.log.String()
		if n := strings.Count(log, "msg=request "); n != 3 {
			t.Errorf("%d lines for 3 requests", n)
		}
		for _, want := range []string{"outcome=error", "cause=engine_failed", "side=decode", "phase=reading_answer", "prefill=p0:80", "decode=d0:80", "room=", "total_ms="} {
			if !strings.Contains(log, want) {
				t.Errorf("the log lacks %s:\n%s", want, log)
			}
		}
	})
}
