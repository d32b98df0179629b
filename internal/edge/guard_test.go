package edge

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// ask sends a request to h. header is names and values.
func ask(h http.Handler, method, path string, header ...string) *httptest.ResponseRecorder {
	req := httptest.NewRequest(method, path, strings.NewReader("{}"))
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, req)
	return rec
}

// refusal is the error object of an answer.
func refusal(t *testing.T, rec *httptest.ResponseRecorder) (code, message string) {
	t.Helper()
	var e struct {
		Error struct{ Code, Message string }
	}
	if err := json.Unmarshal(rec.Body.Bytes(), &e); err != nil || rec.Header().Get("Content-Type") != "application/json" {
		t.Fatalf("%d %s: %v", rec.Code, rec.Body, err)
	}
	return e.Error.Code, e.Error.Message
}

func TestGuard(t *testing.T) {
	user, hu := NewKey()
	ops, ho := NewKey()
	k, _ := keyFile(t, "u "+hu, "ops "+ho+" operator")
	var refused []string
	g := Guard{Keys: k, AdminToken: "a-token-of-sixteen", Refused: func(f Refusal) { refused = append(refused, f.Reason+" "+f.Name) }}
	access := func(path string) Access {
		return map[string]Access{"/open": Anyone, "/client": Client}[path] // others: Operator
	}
	h := g.Wrap(access, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if c := From(req.Context()); c != nil {
			_, _ = io.WriteString(w, c.Name())
		}
	}))
	for _, c := range []struct {
		path, header, value string
		status              int
		want                string
	}{
		{"/open", "", "", 200, ""},
		{"/open", "Authorization", "Bearer wrong", 200, ""},
		{"/client", "Authorization", "Bearer " + user, 200, "u"},
		{"/client", "Authorization", "bearer  " + user + " ", 200, "u"},
		{"/client", "X-Api-Key", user, 200, "u"},
		{"/client", "Authorization", "Bearer a-token-of-sixteen", 200, "(admin token)"},
		{"/client", "", "", 401, ReasonNoKey},
		{"/client", "Authorization", user, 401, ReasonNoKey},
		{"/client", "Authorization", "Basic " + user, 401, ReasonNoKey},
		{"/client", "Authorization", "Bearer " + user[:len(user)-1], 401, ReasonBadKey},
		{"/client", "X-Api-Key", hu, 401, ReasonBadKey},
		{"/fleet", "Authorization", "Bearer " + user, 403, ReasonOperator},
		{"/fleet", "Authorization", "Bearer " + ops, 200, "ops"},
		{"/fleet", "Authorization", "Bearer a-token-of-sixteen", 200, "(admin token)"},
		{"/fleet", "", "", 401, ReasonNoKey},
	} {
		refused = nil
		rec := ask(h, "GET", c.path, c.header, c.value)
		if rec.Code != c.status {
			t.Errorf("%s %q: %d %s", c.path, c.value, rec.Code, rec.Body)
			continue
		}
		if c.status == 200 {
			if rec.Body.String() != c.want || len(refused) > 0 {
				t.Errorf("%s %q: %q, refused %q", c.path, c.value, rec.Body, refused)
			}
			continue
		}
		if code, message := refusal(t, rec); code == "" || strings.Contains(message, user[6:20]) {
			t.Errorf("%s %q: code %q, message %q", c.path, c.value, code, message)
		}
		if challenged := strings.HasPrefix(rec.Header().Get("Www-Authenticate"), "Bearer"); challenged != (c.status == 401) {
			t.Errorf("%s %q: challenge %q", c.path, c.value, rec.Header().Get("Www-Authenticate"))
		}
		if len(refused) != 1 || !strings.HasPrefix(refused[0], c.want+" ") {
			t.Errorf("%s %q: refused %q; want %s", c.path, c.value, refused, c.want)
		}
	}
}

func TestGuardWithoutKeysLetsPass(t *testing.T) {
	g := Guard{AdminToken: "a-token-of-sixteen"}
	h := g.Wrap(func(string) Access { return Operator }, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if From(req.Context()) != nil {
			t.Error("somebody is known")
		}
	}))
	if rec := ask(h, "GET", "/"); rec.Code != 200 {
		t.Error(rec.Code)
	}
}

func TestGuardLimits(t *testing.T) {
	key, hash := NewKey()
	k, _ := keyFile(t, "u "+hash+" max-inflight=1 per-minute=2")
	g := Guard{Keys: k}
	var h http.Handler
	depth := 0
	h = g.Wrap(func(string) Access { return Client }, g.Limit(func(w http.ResponseWriter, req *http.Request) {
		if depth++; depth > 1 {
			t.Fatal("the limit lets two in")
		}
		defer func() { depth-- }()
		rec := ask(h, "POST", "/", "X-Api-Key", key)
		if code, message := refusal(t, rec); rec.Code != 429 || code != "rate_limit_exceeded" || !strings.Contains(message, "u has 1 requests in flight") || rec.Header().Get("Retry-After") != "1" {
			t.Errorf("%d %s, %v", rec.Code, rec.Body, rec.Header())
		}
	}))
	for range 2 {
		if rec := ask(h, "POST", "/", "X-Api-Key", key); rec.Code != 200 {
			t.Fatal(rec.Code, rec.Body)
		}
	}
	rec := ask(h, "POST", "/", "X-Api-Key", key)
	if _, message := refusal(t, rec); rec.Code != 429 || !strings.Contains(message, "u may make 2 requests a minute") || rec.Header().Get("Retry-After") != "30" ||
		rec.Header().Get("X-Should-Retry") != "true" {
		t.Errorf("%d %s, %v", rec.Code, rec.Body, rec.Header())
	}
	if n := k.Inflight("u"); n != 0 {
		t.Errorf("%d in flight", n)
	}
}

// A handler that panics, as those of cut streams do, gives its place back.
func TestLimitSurvivesPanics(t *testing.T) {
	key, hash := NewKey()
	k, _ := keyFile(t, "u "+hash+" max-inflight=1")
	g := Guard{Keys: k}
	h := g.Wrap(func(string) Access { return Client }, g.Limit(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }))
	for range 3 {
		func() {
			defer func() {
				if recover() != http.ErrAbortHandler {
					t.Error("no panic, or another")
				}
			}()
			ask(h, "POST", "/", "X-Api-Key", key)
		}()
	}
	if n := k.Inflight("u"); n != 0 {
		t.Errorf("%d in flight", n)
	}
}
