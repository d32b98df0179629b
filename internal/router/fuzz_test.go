package router

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/baton-pd/baton/internal/openai"
)

// rawWorkers are workers that answer each generating request with the bytes in answer and close
// the connection, whatever those bytes are. Everything else is answered as it should be.
type rawWorkers struct {
	answer map[string]string // by worker
	wg     sync.WaitGroup
}

func (w *rawWorkers) dial(_ context.Context, _, addr string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	w.wg.Go(func() {
		defer theirs.Close()
		in := bufio.NewReader(theirs)
		for {
			req, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			if _, err := io.Copy(io.Discard, req.Body); err != nil {
				return
			}
			switch req.URL.Path {
			case "/generate", "/v1/completions", "/v1/chat/completions":
				_, _ = io.WriteString(theirs, w.answer[addr])
				return
			}
			if _, err := io.WriteString(theirs, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"); err != nil {
				return
			}
		}
	})
	return ours, nil
}

func httpAnswer(status int, contentType, body string) string {
	return fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s", status, contentType, len(body), body)
}

// FuzzServe: whatever a client sends and whatever bytes workers answer, the client gets a whole
// answer, an error object, or a stream that ends in [DONE] or breaks off after an error event; and
// nothing of the request is left.
func FuzzServe(f *testing.F) {
	const chat, stream = "/v1/chat/completions", "text/event-stream"
	good := httpAnswer(200, "application/json", chatAnswer)
	f.Add(chat, chatBody, "5000", "r-1", good, good)
	f.Add(chat, streamBody, "", "", good, httpAnswer(200, stream, role+token+last+done))
	f.Add(chat, streamBody, "", "", good, httpAnswer(200, stream, role+token+abortLast+done))
	f.Add(chat, streamBody, "", "\xff", good, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:")
	f.Add("/generate", `{"text":"a"}`, "-1", "", good, httpAnswer(200, "application/json", genAbort))
	f.Add("/generate", `{"text":["a","b"],"stream":true}`, "", "", httpAnswer(500, "text/plain", "no"), httpAnswer(200, stream, "data: {}\n\n"))
	f.Add("/v1/completions", `{"prompt":"a"}`, "", "", good, "HTTP/1.1 429 X\r\nRetry-After: 1\r\n\r\n{\"error\":{\"message\":\"m\"}}")
	f.Add(chat, streamBody, "", "", good, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Baton-Token-Ids: 1\r\n\r\n: baton-tokens 5\n"+token+": baton-tokens  end\n"+last+done)
	f.Add("/abort_request", `{"rid":"x"}`, "", "", "", "")
	f.Add("/v1/models/x", "", "", "", "", "")
	f.Add("/health_generate", "", "", "", good, "HTTP/9.9 abc\r\n\r\n")
	f.Fuzz(func(t *testing.T, path, body, timeout, id, prefill, decode string) {
		req := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body))
		if body == "" {
			req = httptest.NewRequest(http.MethodGet, "/", nil)
		}
		req.URL = &url.URL{Path: path}
		req.Header[HeaderTimeout], req.Header["X-Request-Id"] = []string{timeout}, []string{id}
		// In a bubble, so that the router's own waits take no time.
		synctest.Test(t, func(t *testing.T) {
			serveOne(t, req, &rawWorkers{answer: map[string]string{"p:80": prefill, "d:80": decode}})
		})
	})
}

// serveOne gives req to a new router and checks its answer and what is left.
func serveOne(t *testing.T, req *http.Request, workers *rawWorkers) {
	r, err := New(Config{Prefills: []Backend{{URL: "http://p", BootstrapPort: 1}}, Decodes: []Backend{{URL: "http://d"}},
		DialContext: workers.dial, MaxRetries: -1, Resume: true, MaxBody: 1 << 20, MaxAnswer: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	rec, cut := httptest.NewRecorder(), false
	func() {
		defer func() {
			if p := recover(); p != nil && p != http.ErrAbortHandler { //nolint:errorlint // the sentinel itself
				panic(p)
			} else if p != nil {
				cut = true
			}
		}()
		r.Handler().ServeHTTP(rec, req)
	}()
	checkAnswer(t, rec, cut)
	if n, live := r.inflight.Load(), r.live.count(); n != 0 || live != 0 {
		t.Errorf("%d requests in flight, %d names at the end", n, live)
	}
	r.Close()
	for _, w := range r.all() {
		if n := w.inflight.Load(); n != 0 {
			t.Errorf("%d legs at %s at the end", n, w.name)
		}
	}
	synctest.Wait() // a dial that nobody waits for any more may still be under way
	for _, w := range r.all() {
		w.rt.CloseIdleConnections()
	}
	workers.wg.Wait()
}

// checkAnswer holds what a client gets against the contract; cut: the connection broke off.
func checkAnswer(t *testing.T, rec *httptest.ResponseRecorder, cut bool) {
	t.Helper()
	body, kind := rec.Body.Bytes(), rec.Header().Get("Content-Type")
	var e wireError
	switch {
	case cut || rec.Code == http.StatusOK && strings.HasPrefix(kind, "text/event-stream"):
		end := ""
		for events := openai.NewEventReader(bytes.NewReader(body), 0); ; {
			data, err := events.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatalf("stream %q: %v", body, err)
			}
			end = string(data)
		}
		if told := json.Unmarshal([]byte(end), &e) == nil && e.Error.Cause != ""; cut && !told || !cut && end != openai.DoneData {
			t.Fatalf("stream ends in %q, broken off: %v", end, cut)
		}
	case rec.Code >= 400:
		if json.Unmarshal(body, &e) != nil || e.Error.Message == "" || e.Error.Code == "" {
			t.Fatalf("status %d with %q", rec.Code, body)
		}
	case strings.HasPrefix(kind, "application/json") && !json.Valid(body):
		t.Fatalf("answer %q is not JSON", body)
	}
}

// FuzzBackend: an address is refused with the address named, or can be asked.
func FuzzBackend(f *testing.F) {
	f.Add("http://10.0.0.1:80", "", 8998, true)
	f.Add("https://[::1]:80/x", "h", 1, true)
	f.Add("http://user@h", "", 0, false)
	f.Add("http://h:1?x", "", 70000, true)
	f.Add("//h", "", 1, true)
	f.Fuzz(func(t *testing.T, addr, boot string, port int, prefill bool) {
		base, host, got, err := Backend{URL: addr, BootstrapHost: boot, BootstrapPort: port}.parse(prefill)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "router: ") {
				t.Fatalf("%v", err)
			}
			return
		}
		if host == "" || got != port || prefill && (port < 1 || port > 65535) {
			t.Fatalf("%q %q %d became %q %d", addr, boot, port, host, got)
		}
		req, err := http.NewRequest(http.MethodGet, base.JoinPath("/health").String(), nil)
		if err != nil || req.URL.Host == "" || !strings.HasSuffix(req.URL.Path, "/health") {
			t.Fatalf("%q cannot be asked: %v", addr, err)
		}
	})
}
