package router

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const adminToken = "only for the test"

// call does one administrative request with the token.
func (b *bed) admin(method, path, body string) (int, workerView, string) {
	b.t.Helper()
	req, err := http.NewRequestWithContext(b.t.Context(), method, "http://router"+path, strings.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+adminToken)
	resp, err := b.client.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	var v workerView
	_ = json.Unmarshal(text, &v) // an error has other fields
	return resp.StatusCode, v, string(text)
}

// backends of fakes on either leg.
func backends(fs ...*fake) (out []Backend) {
	for _, f := range fs {
		b := Backend{URL: "http://" + f.addr}
		if f.addr[0] == 'p' {
			b.BootstrapPort = 8998
		}
		out = append(out, b)
	}
	return out
}

// only makes what the test gives the whole fleet.
func (b *bed) only(p, d []*fake) {
	b.t.Helper()
	if err := b.r.SetWorkers("test", backends(p...), backends(d...)); err != nil {
		b.t.Fatal(err)
	}
	if err := b.r.SetWorkers(SourceStatic, nil, nil); err != nil {
		b.t.Fatal(err)
	}
	synctest.Wait()
}

// ids of all workers, with "-" behind those that get no new requests.
func (b *bed) ids() (out []string) {
	synctest.Wait()
	for _, v := range b.r.views() {
		if v.Draining {
			v.ID += "-"
		}
		out = append(out, v.ID)
	}
	return out
}

func (b *bed) wantIDs(what string, want ...string) {
	b.t.Helper()
	if got := b.ids(); !slices.Equal(got, want) {
		b.t.Fatalf("%s: workers %q; want %q", what, got, want)
	}
}

func repeat(s script, n int) []script { return slices.Repeat([]script{s}, n) }

var slowStream = sse(role, time.Second, token, time.Second, last, done)

const slowAnswer = role + token + last + done

// Streams run while the set of workers changes a hundred times; not one of them notices.
func TestStreamsSurviveChanges(t *testing.T) {
	inBubble(t, Config{}, repeat(okPrefill, 3), repeat(slowStream, 4), func(t *testing.T, b *bed, p, d []*fake) {
		rng := rand.New(rand.NewPCG(1, 2))
		results := make(chan got)
		const streams = 60
		go func() {
			for range streams {
				go func() { results <- b.chatStream() }()
				<-time.After(90 * time.Millisecond)
			}
		}()
		changed := make(chan error, 1)
		go func() {
			for range 100 {
				n, m := 1+rng.IntN(len(p)), 1+rng.IntN(len(d))
				rng.Shuffle(len(p), func(i, j int) { p[i], p[j] = p[j], p[i] })
				rng.Shuffle(len(d), func(i, j int) { d[i], d[j] = d[j], d[i] })
				if err := b.r.SetWorkers(SourceStatic, backends(p[:n]...), backends(d[:m]...)); err != nil {
					changed <- err
					return
				}
				<-time.After(55 * time.Millisecond)
			}
			changed <- nil
		}()
		for range streams {
			(<-results).ok(t, slowAnswer)
		}
		if err := <-changed; err != nil {
			t.Fatal(err)
		}
		for _, f := range d {
			if f.count() == 0 {
				t.Errorf("%s had no stream: the test shows little", f.addr)
			}
		}
		if err := b.r.SetWorkers(SourceStatic, backends(p[0]), backends(d[0])); err != nil {
			t.Fatal(err)
		}
		if n := len(b.ids()); n != 2 {
			t.Errorf("%d workers are left: %q", n, b.ids())
		}
	})
}

func TestVanishedWorkerIsDrained(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{slowStream, okStream}, func(t *testing.T, b *bed, p, d []*fake) {
		b.only(p, d[:1])
		first := make(chan got)
		go func() { first <- b.chatStream() }()
		synctest.Wait()
		b.only(p, d[1:])
		b.wantIDs("while its stream runs", "prefill-p0:80", "decode-d0:80-", "decode-d1:80")
		b.chatStream().ok(t, slowAnswer)
		if d[0].count() != 1 || d[1].count() != 1 {
			t.Errorf("d0 had %d requests, d1 %d; a drained worker gets none", d[0].count(), d[1].count())
		}
		b.only(p, d)
		b.wantIDs("when it has come back", "prefill-p0:80", "decode-d0:80", "decode-d1:80")
		b.only(p, d[1:])
		(<-first).ok(t, slowAnswer)
		b.wantIDs("when its stream has ended", "prefill-p0:80", "decode-d1:80")

		b.only(p, nil)
		if e := b.chat().fails(t, 503, "unavailable"); !strings.Contains(e.Error.Message, "no usable decode worker: there is none") {
			t.Errorf("without decode workers: %q", e.Error.Message)
		}
	})
}

func TestWrongSetKeepsTheLastGood(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{okStream}, func(t *testing.T, b *bed, p, d []*fake) {
		b.only(p, d)
		for _, bad := range [][]Backend{{{URL: "d9:80"}}, append(backends(d[0]), backends(d[0])...)} {
			if err := b.r.SetWorkers("test", backends(p[0]), bad); err == nil {
				t.Fatalf("%v was taken", bad)
			}
			b.wantIDs("after a wrong set", "prefill-p0:80", "decode-d0:80")
		}
		metrics := b.get("/metrics").body
		for _, want := range []string{
			`baton_router_source_stale{source="test"} 1`, `baton_router_source_updates_total{result="failed",source="test"} 2`,
			`baton_router_worker_draining{leg="decode",worker="d0:80"} 0`,
		} {
			if !strings.Contains(metrics, want) {
				t.Errorf("no %s in /metrics", want)
			}
		}
		if n := strings.Count(b.log.String(), "the last good one stays"); n != 2 {
			t.Errorf("%d log lines for two different failures", n)
		}
		b.only(p, d)
		if metrics := b.get("/metrics").body; !strings.Contains(metrics, `baton_router_source_stale{source="test"} 0`) {
			t.Error("still stale after a good set")
		}
	})
}

// A worker may be listed by several sources; it goes when the last one has dropped it.
func TestSourcesAddUp(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{okStream}, func(t *testing.T, b *bed, p, d []*fake) {
		for _, s := range []string{"dns", "file"} {
			if err := b.r.SetWorkers(s, backends(p...), backends(d...)); err != nil {
				t.Fatal(err)
			}
		}
		for _, s := range []string{SourceStatic, "dns"} {
			_ = b.r.SetWorkers(s, nil, nil)
			b.wantIDs("without "+s, "prefill-p0:80", "decode-d0:80")
		}
		_ = b.r.SetWorkers("file", nil, nil)
		b.wantIDs("at last")
	})
}

func TestWorkersAPI(t *testing.T) {
	inBubble(t, Config{AdminToken: adminToken}, []script{okPrefill}, []script{slowStream}, func(t *testing.T, b *bed, p, d []*fake) {
		d1 := b.net.worker(t, "d1:80", okStream)
		defer d1.kill()
		add := `{"leg":"decode","url":"http://d1:80"}`
		for i, want := range []int{http.StatusCreated, http.StatusOK} {
			if status, v, text := b.admin(http.MethodPost, "/workers", add); status != want || v.ID != "decode-d1:80" || v.Draining {
				t.Fatalf("addition %d: %d %s", i, status, text)
			}
		}
		first := make(chan got)
		go func() { first <- b.chatStream() }()
		synctest.Wait()
		if d[0].count()+d1.count() != 1 {
			t.Fatal("the stream is nowhere")
		}
		if status, v, text := b.admin(http.MethodPost, "/workers/decode-d0:80/drain", ""); status != 200 || !v.Draining {
			t.Fatalf("drain: %d %s", status, text)
		}
		before := d[0].count()
		for range 4 {
			b.chatStream().ok(t, slowAnswer)
		}
		if d[0].count() != before {
			t.Error("a drained worker got a request")
		}
		(<-first).ok(t, slowAnswer)
		b.wantIDs("drained and idle, it stays until it is deleted", "prefill-p0:80", "decode-d0:80-", "decode-d1:80")
		if status, v, text := b.admin(http.MethodPost, "/workers/http%3A%2F%2Fd0:80/undrain", ""); status != 200 || v.Draining {
			t.Fatalf("undrain by URL: %d %s", status, text)
		}
		if status, _, text := b.admin(http.MethodDelete, "/workers/d0:80", ""); status != 200 || !strings.Contains(text, `"state":"gone"`) {
			t.Fatalf("delete by host:port: %d %s", status, text)
		}
		b.wantIDs("deleted", "prefill-p0:80", "decode-d1:80")
		if status, _, _ := b.admin(http.MethodDelete, "/workers/d0:80", ""); status != 404 {
			t.Errorf("deleted again: %d", status)
		}
		b.chatStream().ok(t, slowAnswer)
	})
}

func TestDeleteWaitsForStreams(t *testing.T) {
	inBubble(t, Config{AdminToken: adminToken}, []script{okPrefill}, []script{slowStream}, func(t *testing.T, b *bed, p, d []*fake) {
		first := make(chan got)
		go func() { first <- b.chatStream() }()
		synctest.Wait()
		if status, v, text := b.admin(http.MethodDelete, "/workers/decode-d0:80", ""); status != 200 || !v.Draining || v.Inflight != 1 {
			t.Fatalf("delete: %d %s", status, text)
		}
		if e := b.chat().fails(t, 503, "unavailable"); !strings.Contains(e.Error.Message, "d0:80 (draining)") {
			t.Errorf("message %q", e.Error.Message)
		}
		(<-first).ok(t, slowAnswer)
		b.wantIDs("when the stream has ended", "prefill-p0:80")
	})
}

// By force: what has not begun to answer is tried elsewhere, what has gets an error; both are released.
func TestDeleteByForce(t *testing.T) {
	inBubble(t, Config{AdminToken: adminToken, Policy: PolicyRoundRobin}, []script{silent}, []script{sse(role, token, nil), silent}, func(t *testing.T, b *bed, p, d []*fake) {
		d2 := b.net.worker(t, "d2:80", okStream)
		defer d2.kill()
		results := map[int]chan got{0: make(chan got, 1), 1: make(chan got, 1)}
		for i := range results {
			go func() { results[i] <- b.chatStream() }()
		}
		synctest.Wait()
		if status, _, text := b.admin(http.MethodPost, "/workers", `{"worker_type":"decode","url":"http://d2:80"}`); status != 201 {
			t.Fatalf("add: %d %s", status, text)
		}
		start := time.Now()
		for _, id := range []string{"decode-d0:80", "decode-d1:80"} {
			if status, _, text := b.admin(http.MethodDelete, "/workers/"+id+"?force", ""); status != 200 {
				t.Fatalf("delete: %d %s", status, text)
			}
		}
		broken, whole := <-results[0], <-results[1]
		if broken.err == nil {
			broken, whole = whole, broken
		}
		whole.ok(t, slowAnswer)
		if e := broken.breaks(t, role+token, "aborted"); !strings.Contains(e.Error.Message, "decode worker d0:80 was removed from the fleet by force") {
			t.Errorf("message %q", e.Error.Message)
		}
		<-time.After(time.Second)
		d[0].released(0, start, time.Second)
		d[1].released(0, start, time.Second)
		b.wantIDs("afterwards", "prefill-p0:80", "decode-d2:80")
	})
}

func TestWorkersAPIRefuses(t *testing.T) {
	inBubble(t, Config{AdminToken: adminToken}, []script{okPrefill}, []script{okStream}, func(t *testing.T, b *bed, p, d []*fake) {
		b.only(p, d)
		for _, c := range []struct {
			method, path, body string
			status             int
			want               string
		}{
			{"POST", "/workers", `{"leg":"decode"}`, 400, "want http://host:port"},
			{"POST", "/workers", `{"leg":"both","url":"http://d9:80"}`, 400, "want prefill or decode"},
			{"POST", "/workers", `{"leg":"prefill","url":"http://p9:80"}`, 400, "bootstrap port"},
			{"POST", "/workers", `{"leg":"decode","url":"http://d9:80","rol":1}`, 400, "rol"},
			{"POST", "/workers", `{"leg":"decode","url":"http://d9:80"}{`, 400, "something after"},
			{"DELETE", "/workers/decode-d9:80", "", 404, "no worker decode-d9:80"},
			{"DELETE", "/workers/decode-d0:80", "", 409, "listed by test"},
			{"POST", "/workers/decode-d0:80/boil", "", 404, "nothing at"},
			{"POST", "/workers/decode-d0:80", "", 405, "not allowed"},
			{"DELETE", "/workers", "", 405, "not allowed"},
		} {
			if status, _, text := b.admin(c.method, c.path, c.body); status != c.status || !strings.Contains(text, c.want) {
				t.Errorf("%s %s %s: %d %s; want %d with %q", c.method, c.path, c.body, status, text, c.status, c.want)
			}
		}
		b.wantIDs("after all that", "prefill-p0:80", "decode-d0:80")
		if g := b.get("/workers/decode-d0:80"); g.status != 200 || !strings.Contains(g.body, `"sources":["test"]`) {
			t.Errorf("%d %s", g.status, g.body)
		}
		for _, token := range []string{"", "Bearer x", "Basic " + adminToken} {
			if g := b.post(t.Context(), "/workers", `{"leg":"decode","url":"http://d9:80"}`, "Authorization", token); g.status != 401 {
				t.Errorf("with Authorization %q: %d %s", token, g.status, g.body)
			}
		}
		b.r.cfg.AdminToken = ""
		if status, _, text := b.admin("POST", "/workers/decode-d0:80/drain", ""); status != 403 || !strings.Contains(text, "--admin-token-file") {
			t.Errorf("without a token: %d %s", status, text)
		}
	})
}

// The same address with another bootstrap port is another process.
func TestReplacedBackend(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{slowStream}, func(t *testing.T, b *bed, p, d []*fake) {
		first := make(chan got)
		go func() { first <- b.chatStream() }()
		synctest.Wait()
		if err := b.r.SetWorkers(SourceStatic, []Backend{{URL: "http://p0:80", BootstrapPort: 7777}}, backends(d...)); err != nil {
			t.Fatal(err)
		}
		b.chatStream().ok(t, slowAnswer)
		(<-first).ok(t, slowAnswer)
		if got := string(p[0].leg(1).fields["bootstrap_port"]); got != "7777" {
			t.Errorf("the second request went to bootstrap port %s", got)
		}
		b.wantIDs("in the end", "prefill-p0:80", "decode-d0:80")
	})
}

// Several routers share workers and nothing else.
func TestTwoRoutersOneFleet(t *testing.T) {
	inBubble(t, Config{}, repeat(okPrefill, 2), repeat(slowStream, 2), func(t *testing.T, b *bed, p, d []*fake) {
		r, err := New(Config{Dynamic: true, DialContext: b.net.dial})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if err := r.SetWorkers("test", backends(p...), backends(d...)); err != nil {
			t.Fatal(err)
		}
		other := &http.Server{Handler: r.Handler()}
		served := make(chan error, 1)
		l := b.net.listen("other:80")
		go func() { served <- other.Serve(l) }()
		defer func() { _ = other.Close(); <-served }()
		synctest.Wait()
		results := make(chan got)
		const each = 20
		for range each {
			go func() { results <- b.chatStream() }()
			go func() {
				resp, err := b.client.Post("http://other/v1/chat/completions", "application/json", strings.NewReader(streamBody))
				if err != nil {
					results <- got{err: err}
					return
				}
				defer resp.Body.Close()
				text, err := io.ReadAll(resp.Body)
				results <- got{status: resp.StatusCode, body: string(text), err: err}
			}()
		}
		for range 2 * each {
			(<-results).ok(t, slowAnswer)
		}
		rooms := map[string]bool{}
		for _, f := range d {
			if f.count() != each {
				t.Errorf("%s had %d of %d requests", f.addr, f.count(), 2*each)
			}
			for i := range f.count() {
				l := f.leg(i)
				rooms[l.room()] = true
			}
		}
		if len(rooms) != 2*each {
			t.Errorf("%d rooms for %d requests", len(rooms), 2*each)
		}
	})
}

// A thousand workers come, serve and go: goroutines, memory and metrics are as before.
func TestFleetReturnsToBaseline(t *testing.T) {
	inBubble(t, Config{Policy: "prefix-cache"}, []script{okPrefill}, []script{okStream}, func(t *testing.T, b *bed, p, d []*fake) {
		reg := b.r.cfg.Registerer.(*prometheus.Registry)
		measure := func() (goroutines, series int, heap uint64) {
			<-time.After(2 * time.Minute) // connections that nobody needs are closed
			synctest.Wait()
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			families, err := reg.Gather()
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range families {
				if strings.HasPrefix(f.GetName(), "baton_router_") {
					series += len(f.GetMetric())
				}
			}
			return runtime.NumGoroutine(), series, m.HeapAlloc
		}
		round := func(i int) {
			w := b.net.worker(t, "d"+strconv.Itoa(1000+i)+":80", okStream)
			if i%5 == 0 {
				w.set(reset) // fails, is blamed, and the request tried elsewhere
			}
			if err := b.r.SetWorkers(SourceStatic, backends(p...), backends(d[0], w)); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				body := fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"%d hi"}],"stream":true}`, i)
				b.post(t.Context(), "/v1/chat/completions", body).ok(t, slowAnswer)
			}
			if err := b.r.SetWorkers(SourceStatic, backends(p...), backends(d...)); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			w.kill()
		}
		for i := range 50 {
			round(i)
		}
		goroutines, series, heap := measure()
		for i := range 1000 {
			round(i)
			d[0].mu.Lock()
			d[0].legs, d[0].aborts = nil, map[string]time.Time{} // the fakes' own memory
			d[0].mu.Unlock()
			p[0].mu.Lock()
			p[0].legs, p[0].aborts = nil, map[string]time.Time{}
			p[0].mu.Unlock()
		}
		b.log.mu.Lock()
		b.log.b.Reset()
		b.log.mu.Unlock()
		b.wantIDs("in the end", "prefill-p0:80", "decode-d0:80")
		goroutines2, series2, heap2 := measure()
		if goroutines2 > goroutines+2 || series2 > series {
			t.Errorf("goroutines %d, then %d; series %d, then %d", goroutines, goroutines2, series, series2)
		}
		if heap2 > heap+4<<20 {
			t.Errorf("heap %d KiB, then %d KiB", heap>>10, heap2>>10)
		}
		t.Logf("goroutines %d, then %d; series %d, then %d; heap %d KiB, then %d KiB", goroutines, goroutines2, series, series2, heap>>10, heap2>>10)
	})
}
