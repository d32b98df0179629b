package router

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/edge"
)

// withKeys makes a key for each line, "NAME [ATTRIBUTE]...", and a router's Keys of them.
func withKeys(t *testing.T, lines ...string) (*edge.Keys, map[string]string) {
	t.Helper()
	secret := map[string]string{}
	var text strings.Builder
	for _, l := range lines {
		key, hash := edge.NewKey()
		name, rest, _ := strings.Cut(l, " ")
		secret[name] = "Bearer " + key
		fmt.Fprintln(&text, name, hash, rest)
	}
	path := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(path, []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	k, err := edge.OpenKeys(path)
	if err != nil {
		t.Fatal(err)
	}
	return k, secret
}

// getAs is get with a key.
func (b *bed) getAs(path, key string) got {
	b.t.Helper()
	req, err := http.NewRequestWithContext(b.t.Context(), http.MethodGet, "http://router"+path, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	req.Header.Set("Authorization", key)
	resp, err := b.client.Do(req)
	if err != nil {
		return got{err: err}
	}
	defer resp.Body.Close()
	return got{status: resp.StatusCode, header: resp.Header}
}

func TestKeysGuardEveryPath(t *testing.T) {
	keys, secret := withKeys(t, "user", "ops operator")
	inBubble(t, Config{Keys: keys}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		for path, want := range map[string][3]int{ // without a key, a user's, an operator's
			"/health": {200, 200, 200}, "/version": {200, 200, 200}, "/v1/models": {401, 200, 200}, "/v1/models/x": {401, 200, 200},
			"/model_info": {401, 200, 200}, "/health_generate": {401, 200, 200}, "/server_info": {401, 403, 200}, "/workers": {401, 403, 200},
			"/workers/decode-d0:80": {401, 403, 200}, "/metrics": {401, 403, 200}, "/metrics/": {401, 403, 200}, "/flush_cache": {401, 403, 200}, "/nothing": {401, 403, 404},
			"/v1/../workers": {401, 404, 404}, "//workers": {401, 403, 404},
		} {
			if got := [3]int{b.get(path).status, b.getAs(path, secret["user"]).status, b.getAs(path, secret["ops"]).status}; got != want {
				t.Errorf("%s: %v; want %v", path, got, want)
			}
		}
		g := b.chat()
		if e := g.fails(t, 401, "invalid_request"); e.Error.Code != "invalid_api_key" || !strings.HasPrefix(g.header.Get("Www-Authenticate"), "Bearer") {
			t.Errorf("%s, %v", g.body, g.header)
		}
		b.chat("Authorization", "Bearer nobody's").fails(t, 401, "invalid_request")
		if d[0].count() != 2 { // of health_generate
			t.Errorf("%d requests have got through to a worker", d[0].count())
		}
		b.chat("Authorization", secret["user"]).ok(t, chatAnswer)
		b.chatStream("Authorization", secret["user"])
		for _, w := range []*fake{p[0], d[0]} {
			if l := w.leg(-1); l.header.Get("Authorization") != "" || l.header.Get("X-Api-Key") != "" {
				t.Errorf("%s was shown the client's key", w.addr)
			}
		}
		// An operator's key changes the fleet as the admin token does.
		if g := b.post(t.Context(), "/workers", `{"leg":"decode","url":"http://d9:80"}`, "Authorization", secret["user"]); g.status != 403 {
			t.Errorf("a user adds a worker: %d", g.status)
		}
		if g := b.post(t.Context(), "/workers/decode-d0:80/drain", ``, "Authorization", secret["ops"]); g.status != 200 {
			t.Errorf("an operator drains: %d %s", g.status, g.body)
		}
		for name, key := range secret {
			if strings.Contains(b.log.String(), strings.TrimPrefix(key, "Bearer ")) {
				t.Errorf("the key of %s is in the log", name)
			}
		}
	})
}

func TestOpenMetrics(t *testing.T) {
	keys, _ := withKeys(t, "user")
	inBubble(t, Config{Keys: keys, OpenMetrics: true}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		b.chat().fails(t, 401, "invalid_request")
		if g := b.get("/metrics"); g.status != 200 || !strings.Contains(g.body, `baton_router_refusals_total{key="",reason="no_key"} 1`) {
			t.Errorf("%d %s", g.status, g.body)
		}
	})
}

// Two clients wait for one place: by weight, whatever they write into headers, and no higher than their ceiling.
func TestKeysInTheQueue(t *testing.T) {
	keys, secret := withKeys(t, "heavy weight=3", "light max-priority=0")
	inBubble(t, Config{Keys: keys, MaxInflight: 1}, []script{okPrefill}, []script{after(time.Second, okAnswer)}, func(t *testing.T, b *bed, p, d []*fake) {
		var wg sync.WaitGroup
		for i := range 8 {
			for _, name := range []string{"light", "heavy"} {
				wg.Go(func() {
					b.chat("Authorization", secret[name], HeaderPriority, "100", edge.HeaderRequestID, fmt.Sprint(name, i)).ok(t, chatAnswer)
				})
				synctest.Wait()
			}
		}
		wg.Wait()
		heavy := 0
		for i := 1; i <= 8; i++ { // the first has found the place free
			if strings.HasPrefix(d[0].leg(i).header.Get(edge.HeaderRequestID), "heavy") {
				heavy++
			}
		}
		if heavy < 6 {
			t.Errorf("of the first 8 %d are of the client with three times the weight and the higher priority", heavy)
		}
	})
}

func TestKeyLimits(t *testing.T) {
	keys, secret := withKeys(t, "a max-inflight=1", "b")
	inBubble(t, Config{Keys: keys}, []script{okPrefill}, []script{after(time.Second, okAnswer)}, func(t *testing.T, b *bed, p, d []*fake) {
		var wg sync.WaitGroup
		wg.Go(func() { b.chat("Authorization", secret["a"]).ok(t, chatAnswer) })
		synctest.Wait()
		g := b.chat("Authorization", secret["a"])
		if e := g.fails(t, 429, "capacity"); e.Error.Code != "rate_limit_exceeded" || !e.Error.Retryable || g.header.Get("Retry-After") == "" || g.took > 0 {
			t.Errorf("%s %v after %v", g.body, g.header, g.took)
		}
		b.chat("Authorization", secret["b"]).ok(t, chatAnswer) // another's limit is not its own
		wg.Wait()
		// A client that leaves gives its place back.
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		b.post(ctx, "/v1/chat/completions", chatBody, "Authorization", secret["a"])
		cancel()
		<-time.After(time.Second)
		b.chat("Authorization", secret["a"]).ok(t, chatAnswer)
		if n := keys.Inflight("a") + keys.Inflight("b"); n != 0 {
			t.Errorf("%d are counted at the end", n)
		}
	})
}

// A client ends its own requests only; an operator anybody's.
func TestAbortOfOthers(t *testing.T) {
	keys, secret := withKeys(t, "a", "b", "ops operator")
	inBubble(t, Config{Keys: keys}, []script{okPrefill}, []script{sse(token, nil)}, func(t *testing.T, b *bed, p, d []*fake) {
		stream := strings.Replace(streamBody, "{", `{"rid":"mine",`, 1)
		var wg sync.WaitGroup
		begin := func() {
			wg.Go(func() {
				b.post(t.Context(), "/v1/chat/completions", stream, "Authorization", secret["a"]).breaks(t, token, "aborted")
			})
			<-time.After(time.Second)
		}
		aborts := func(key, body string, want string) {
			t.Helper()
			if g := b.post(t.Context(), "/abort_request", body, "Authorization", key); g.status != 200 || !strings.HasPrefix(g.body, want) {
				t.Errorf("%s: %d %s; want %s", body, g.status, g.body, want)
			}
		}
		begin()
		aborts(secret["b"], `{"rid":"mine"}`, `{"aborted":0}`)
		aborts(secret["b"], `{"abort_all":true}`, `{"aborted":0}`)
		d[0].mu.Lock()
		if n := len(d[0].aborts); n != 0 {
			t.Errorf("%d aborts reached the worker", n)
		}
		d[0].mu.Unlock()
		aborts(secret["a"], `{"rid":"mine"}`, `{"aborted":1}`)
		wg.Wait()
		begin()
		aborts(secret["ops"], `{"rid":"mine"}`, `{"aborted":1}`)
		wg.Wait()
	})
}

// What workers are told of who asks: the router's key, everywhere.
func TestWorkerKey(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]int{}
	note := func(what string, h http.Header) {
		mu.Lock()
		defer mu.Unlock()
		seen[what+" "+h.Get("Authorization")]++
	}
	inBubble(t, Config{WorkerKey: "ours", PassAuthorization: true}, []script{silent}, []script{silent}, func(t *testing.T, b *bed, p, d []*fake) {
		d[0].mu.Lock()
		d[0].health = func(_ http.ResponseWriter, req *http.Request) { note("probe", req.Header) }
		d[0].info = func(_ http.ResponseWriter, req *http.Request) { note(req.URL.Path, req.Header) }
		d[0].mu.Unlock()
		b.chat("Authorization", "Bearer client", "X-Api-Key", "client", HeaderTimeout, "2500").fails(t, 504, "deadline")
		b.get("/v1/models")
		mu.Lock()
		defer mu.Unlock()
		if len(seen) != 2 || seen["probe Bearer ours"] < 2 || seen["/v1/models Bearer ours"] != 1 {
			t.Errorf("seen: %v", seen)
		}
		for _, w := range []*fake{p[0], d[0]} {
			if got := w.leg(0).header["Authorization"]; len(got) != 1 || got[0] != "Bearer ours" {
				t.Errorf("%s: Authorization %q", w.addr, got)
			}
		}
	})
	inBubble(t, Config{PassAuthorization: true}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		b.chat("Authorization", "Bearer client").ok(t, chatAnswer)
		if got := d[0].leg(0).header.Get("Authorization"); got != "Bearer client" {
			t.Errorf("Authorization %q", got)
		}
	})
}

// One id from the client to both workers and back, in headers and errors, whatever workers call it.
func TestRequestIDEverywhere(t *testing.T) {
	theirs := say(200, chatAnswer, edge.HeaderRequestID, "theirs", "Access-Control-Allow-Origin", "*", "Vary", "Cookie")
	inBubble(t, Config{CORS: edge.CORS{Origins: []string{"https://ours.example"}}}, []script{okPrefill}, []script{theirs}, func(t *testing.T, b *bed, p, d []*fake) {
		g := b.chat(edge.HeaderRequestID, "abc-1", "Origin", "https://ours.example")
		g.ok(t, chatAnswer)
		if got := g.header; got.Get(edge.HeaderRequestID) != "abc-1" || got.Get("Access-Control-Allow-Origin") != "https://ours.example" || got.Get("Vary") != "Origin" {
			t.Errorf("header %v", got)
		}
		synctest.Wait()
		for _, w := range []*fake{p[0], d[0]} {
			if l := w.leg(0); l.header.Get(edge.HeaderRequestID) != "abc-1" || l.header.Get("Origin") != "" {
				t.Errorf("%s was sent %v", w.addr, l.header)
			}
		}
		id := func(g got) string {
			t.Helper()
			h := g.header.Get(edge.HeaderRequestID)
			if h == "" || !strings.Contains(g.body, `"request_id":"`+h+`"`) {
				t.Errorf("id %q, body %s", h, g.body)
			}
			return h
		}
		if got := id(b.post(t.Context(), "/v1/chat/completions", "{", edge.HeaderRequestID, "abc-2")); got != "abc-2" {
			t.Errorf("id %q", got)
		}
		if got := id(b.post(t.Context(), "/v1/chat/completions", "{", edge.HeaderRequestID, "a \"b")); len(got) != 32 {
			t.Errorf("id %q", got)
		}
		id(b.get("/nothing"))
		d[0].set(sse(token, errReset))
		g = b.chatStream(edge.HeaderRequestID, "abc-3")
		g.breaks(t, token, "peer_lost")
		if id(g) != "abc-3" {
			t.Errorf("header %v", g.header)
		}
		d[0].set(silent)
		made := id(b.chat(HeaderTimeout, "10"))
		if l := d[0].leg(-1); made != l.rid() {
			t.Errorf("the made id is %q, the rid %q", made, l.rid())
		}
		d[0].set(okAnswer)
		for rid, kept := range map[string]bool{"mine-1": true, `a\"b`: false} { // a rid may be what an id may not
			g := b.post(t.Context(), "/v1/chat/completions", strings.Replace(chatBody, "{", `{"rid":"`+rid+`",`, 1))
			g.ok(t, chatAnswer)
			if got := g.header.Get(edge.HeaderRequestID); (got == rid) != kept || !edge.SaneID(got) {
				t.Errorf("rid %s: id %q", rid, got)
			}
		}
	})
}
