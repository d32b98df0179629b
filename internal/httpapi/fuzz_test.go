package httpapi

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/baton-pd/baton/internal/sched"
)

// FuzzServe: whatever a client sends, the answer is a whole success or an error object, in
// valid UTF-8, and every stream is closed.
func FuzzServe(f *testing.F) {
	for _, ep := range endpoints {
		f.Add("POST", ep.path, "", "", "", []byte(ep.body+`}`))
		f.Add("POST", ep.path, "50", "r-1", "identity", []byte(ep.body+`,"stream":true,"n":2}`))
	}
	f.Add("POST", "/abort_request", "", "\xff", "gzip", []byte(`{"rid":"a"}`))
	f.Add("GET", "/v1/models/x", "1e3", strings.Repeat("x", 300), "", []byte(nil))
	f.Add("HEAD", "/health_generate", "-1", "", "", []byte(nil))
	fake := &fakeSched{script: func(r *sched.Request) ([]step, error) {
		if len(r.Prompt)%3 == 0 {
			return []step{{err: brokenTransfer()}}, nil
		}
		return hello(r)
	}}
	h := New(Config{Role: RoleDecode, Scheduler: fake, Tokenizer: fakeTokenizer{}, Info: testInfo, AllowLocal: true})
	f.Fuzz(func(t *testing.T, method, path, timeout, id, encoding string, body []byte) {
		req := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(body))
		req.Method, req.URL.Path = method, path
		req.Header[HeaderTimeout], req.Header["X-Request-Id"], req.Header["Content-Encoding"] = []string{timeout}, []string{id}, []string{encoding}
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, req)
		out := rec.Body.String()
		if !utf8.ValidString(out) {
			t.Fatalf("answer %q is not UTF-8", out)
		}
		switch {
		case rec.Code != 200:
			errorOf(t, rec.Code, out)
		case strings.HasPrefix(rec.Header().Get("Content-Type"), "text/event-stream"):
			if ev := events(t, out); ev[len(ev)-1] != "[DONE]" {
				t.Fatalf("stream ends in %q", ev[len(ev)-1])
			}
		case !json.Valid([]byte(out)):
			t.Fatalf("answer %q is not JSON", out)
		}
		fake.mu.Lock()
		defer fake.mu.Unlock()
		for _, st := range fake.streams {
			select {
			case <-st.closed:
			default:
				t.Fatal("a stream was not closed")
			}
		}
		fake.streams, fake.requests = nil, nil
	})
}
