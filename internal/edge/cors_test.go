package edge

import (
	"io"
	"net/http"
	"strings"
	"testing"
)

func TestCORS(t *testing.T) {
	const ours, theirs = "https://chat.example.com", "https://evil.example"
	hello := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") })
	named := CORS{Origins: []string{"http://localhost:3000", ours}}
	for name, c := range map[string]struct {
		cors    CORS
		method  string
		header  []string
		status  int
		allowed string // origin in the answer
		creds   bool
		refused bool
	}{
		"no browser":            {named, "POST", nil, 200, "", false, false},
		"ours":                  {named, "POST", []string{"Origin", ours, "Sec-Fetch-Site", "cross-site"}, 200, ours, false, false},
		"theirs reads":          {named, "GET", []string{"Origin", theirs, "Sec-Fetch-Site", "cross-site"}, 200, "", false, false},
		"theirs posts":          {named, "POST", []string{"Origin", theirs, "Sec-Fetch-Site", "cross-site"}, 403, "", false, true},
		"theirs, old browser":   {named, "POST", []string{"Origin", theirs}, 403, "", false, true},
		"sandboxed":             {named, "POST", []string{"Origin", "null", "Sec-Fetch-Site", "cross-site"}, 403, "", false, true},
		"the router's own":      {named, "POST", []string{"Origin", "http://example.com", "Sec-Fetch-Site", "same-origin"}, 200, "", false, false},
		"own, old browser":      {CORS{}, "POST", []string{"Origin", "http://example.com"}, 200, "", false, false},
		"none allowed":          {CORS{}, "POST", []string{"Origin", ours, "Sec-Fetch-Site", "cross-site"}, 403, "", false, true},
		"all":                   {CORS{Origins: []string{"*"}}, "POST", []string{"Origin", theirs, "Sec-Fetch-Site", "cross-site"}, 200, "*", false, false},
		"with credentials":      {CORS{Origins: []string{ours}, Credentials: true}, "GET", []string{"Origin", ours}, 200, ours, true, false},
		"credentials, theirs":   {CORS{Origins: []string{ours}, Credentials: true}, "GET", []string{"Origin", theirs}, 200, "", false, false},
		"preflight":             {named, "OPTIONS", []string{"Origin", ours, "Access-Control-Request-Method", "POST"}, 204, ours, false, false},
		"preflight for all":     {CORS{Origins: []string{"*"}}, "OPTIONS", []string{"Origin", theirs, "Access-Control-Request-Method", "POST"}, 204, "*", false, false},
		"preflight of theirs":   {named, "OPTIONS", []string{"Origin", theirs, "Access-Control-Request-Method", "POST"}, 403, "", false, false},
		"preflight, no CORS":    {CORS{}, "OPTIONS", []string{"Origin", ours, "Access-Control-Request-Method", "POST"}, 403, "", false, false},
		"OPTIONS of no browser": {named, "OPTIONS", nil, 200, "", false, false},
	} {
		if err := c.cors.Validate(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		refused := false
		h := c.cors.Wrap(hello, func(f Refusal) { refused = f.Reason == ReasonOrigin })
		rec := ask(h, c.method, "/v1/models", append(c.header, "Access-Control-Request-Headers", "authorization,x-stainless-os")...)
		got := rec.Header()
		if rec.Code != c.status || got.Get("Access-Control-Allow-Origin") != c.allowed || refused != c.refused ||
			(got.Get("Access-Control-Allow-Credentials") != "") != c.creds {
			t.Errorf("%s: %d, refused %v, %v", name, rec.Code, refused, got)
		}
		if c.status == 204 && (got.Get("Access-Control-Allow-Headers") != "authorization,x-stainless-os" || !strings.Contains(got.Get("Access-Control-Allow-Methods"), "POST")) {
			t.Errorf("%s: %v", name, got)
		}
		// A cache must not give one origin's answer to another.
		if wants := len(c.cors.Origins) > 0 && len(c.header) > 0; wants != strings.Contains(strings.Join(got["Vary"], ","), "Origin") {
			t.Errorf("%s: Vary %q", name, got["Vary"])
		}
		if c.status == 403 {
			refusal(t, rec)
		}
	}
}

func TestCORSIsChecked(t *testing.T) {
	for _, bad := range []CORS{
		{Origins: []string{"*"}, Credentials: true}, {Origins: []string{"https://a.b", "*"}, Credentials: true}, {Credentials: true}, {Origins: []string{"a.b"}},
		{Origins: []string{"https://a.b/"}}, {Origins: []string{"https://a.b/c"}}, {Origins: []string{"https://u@a.b"}}, {Origins: []string{""}}, {Origins: []string{"null"}}, {Origins: []string{"https://*.a.b"}},
	} {
		if bad.Validate() == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
}

func TestRequestIDs(t *testing.T) {
	var seen string
	h := RequestIDs(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) { seen = req.Header.Get(HeaderRequestID) }))
	for id, kept := range map[string]bool{
		"": false, "a": true, "7f3c-99_x.y:z/1=@": true, strings.Repeat("a", 128): true, strings.Repeat("a", 129): false,
		"a b": false, "a\tb": false, `a"b`: false, `a\b`: false, "a<b": false, "é": false, "\x7f": false,
	} {
		rec := ask(h, "GET", "/", HeaderRequestID, id)
		got := rec.Header().Get(HeaderRequestID)
		if kept && (got != id || seen != id) || !kept && (got == id || len(got) != 32 || seen != "") {
			t.Errorf("%.20q: the answer has %q, the handler saw %q", id, got, seen)
		}
	}
	a, b := ask(h, "GET", "/"), ask(h, "GET", "/")
	if a.Header().Get(HeaderRequestID) == b.Header().Get(HeaderRequestID) {
		t.Error("two requests have one id")
	}
}
