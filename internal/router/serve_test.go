package router

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestBothLegsGetTheSameRoom(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		g := b.post(t.Context(), "/v1/chat/completions",
			`{"seed":9223372036854775807,"x":1.10,"bootstrap_room":7,"rid":"mine","messages":[{"role":"user","content":"\u00e9"}],"bootstrap_host":"evil"}`,
			"Authorization", "Bearer k", "Traceparent", "00-1-2-3", HeaderTimeout, "5000")
		g.ok(t, chatAnswer)
		synctest.Wait() // the fake decode worker does not need its prefill worker to answer
		pl, dl := p[0].leg(0), d[0].leg(0)
		if string(pl.body) != string(dl.body) {
			t.Fatalf("the legs differ:\n%s\n%s", pl.body, dl.body)
		}
		room := string(dl.fields["bootstrap_room"])
		want := `{"rid":"mine","bootstrap_host":"boot0","bootstrap_port":8998,"bootstrap_room":` + room +
			`,"seed":9223372036854775807,"x":1.10,"messages":[{"role":"user","content":"\u00e9"}]}`
		if string(dl.body) != want {
			t.Fatalf("body %s\nwant %s", dl.body, want)
		}
		if id, err := strconv.ParseInt(room, 10, 64); err != nil || id <= 0 || id == 7 {
			t.Errorf("room %s", room)
		}
		for _, l := range []leg1{pl, dl} {
			left, err := strconv.Atoi(l.header.Get(HeaderTimeout))
			if err != nil || left < 1 || left > 5000 {
				t.Errorf("%s: %q", HeaderTimeout, l.header.Get(HeaderTimeout))
			}
			if l.header.Get("Authorization") != "" || l.header.Get("Traceparent") != "00-1-2-3" {
				t.Errorf("headers were not passed on, or the client's key was: %v", l.header)
			}
		}
		synctest.Wait()
		if len(p[0].aborts)+len(d[0].aborts) > 0 {
			t.Errorf("a request that succeeded was aborted: %v %v", p[0].aborts, d[0].aborts)
		}
	})
}

func TestEachPromptGetsARoom(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{say(200, "["+genAnswer+","+genAnswer+"]")}, func(t *testing.T, b *bed, p, d []*fake) {
		b.post(t.Context(), "/generate", `{"text":["a","b"],"sampling_params":{}}`).ok(t, "["+genAnswer+","+genAnswer+"]")
		var rooms []uint64
		if err := json.Unmarshal(d[0].leg(0).fields["bootstrap_room"], &rooms); err != nil || len(rooms) != 2 || rooms[0] == rooms[1] {
			t.Fatalf("rooms %v, %v", rooms, err)
		}
	})
}

func TestStreamIsForwardedAsItCame(t *testing.T) {
	all := role + token + last + done
	var parts []any
	for _, c := range all {
		parts = append(parts, string(c), time.Millisecond) // cut everywhere
	}
	inBubble(t, Config{}, []script{sse(role, last, done)}, []script{sse(parts...)}, func(t *testing.T, b *bed, p, d []*fake) {
		g := b.chatStream()
		g.ok(t, all)
		if ct := g.header.Get("Content-Type"); ct != "text/event-stream" {
			t.Errorf("content type %q", ct)
		}
		d[0].set(sse(": ping\n\n", time.Second, ": ping\n\n", role, ": ping\n\n", token, last, done, "data: {\"late\":1}\n\n"))
		b.chatStream().ok(t, role+": ping\n\n"+token+last+done)
	})
}

// A client sees each event when it comes, not when the answer ends.
func TestStreamIsFlushed(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{sse(token, nil)}, func(t *testing.T, b *bed, p, d []*fake) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://router/v1/chat/completions", strings.NewReader(streamBody))
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		resp, err := b.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		buf := make([]byte, len(token))
		if n, err := resp.Body.Read(buf); err != nil || string(buf[:n]) != token || time.Since(start) > 0 {
			t.Fatalf("%q, %v after %v", buf[:n], err, time.Since(start))
		}
		cancel()
		left := time.Now()
		<-time.After(time.Second)
		d[0].released(0, left, 0)
	})
}

// One leg refuses, the other is silent: the client has the first cause at once, and the silent
// worker is released.
func TestFirstFailureEndsBoth(t *testing.T) {
	busy := say(503, `{"error":{"message":"queue full"}}`, "Retry-After", "7")
	for name, c := range map[string]struct {
		p, d   script
		status int
		cause  string
		side   string
	}{
		"prefill 400": {say(400, `{"error":{"message":"bad temperature"}}`), silent, 400, "invalid_request", "prefill"},
		"prefill 503": {busy, silent, 503, "unavailable", "prefill"},
		"decode 503":  {silent, busy, 503, "unavailable", "decode"},
		"decode 429":  {silent, say(429, `slow down`, "Retry-After", "7"), 429, "capacity", "decode"},
		"decode 404":  {silent, say(404, `{"object":"error","message":"no such model"}`), 404, "invalid_request", "decode"},
		"prefill 500": {say(500, "boom"), silent, 500, "engine_failed", "prefill"},
		"prefill aborts with 200": {
			say(200, genAbort), silent, 503, "engine_failed", "prefill",
		},
		"prefill aborts in a stream": {sse(abortLast, done), silent, 499, "aborted", "prefill"},
		"prefill sends an error event": {
			sse("data: {\"error\":{\"message\":\"oom\"}}\n\n", done), silent, 500, "engine_failed", "prefill",
		},
		"decode aborts with 200":      {silent, say(200, genAbort), 503, "engine_failed", "decode"},
		"decode aborts in a stream":   {silent, sse(role[:0], abortLast, done), 499, "aborted", "decode"},
		"decode sends an error event": {silent, sse("data: {\"error\":{\"message\":\"oom\"}}\n\n", done), 500, "engine_failed", "decode"},
		"prefill resets":              {reset, silent, 502, "peer_lost", "prefill"},
		"decode resets":               {silent, reset, 502, "peer_lost", "decode"},
		"prefill breaks off":          {sse(role, errReset), silent, 502, "peer_lost", "prefill"},
		"decode answers nothing":      {silent, say(200, ""), 502, "protocol", "decode"},
		"decode answers half":         {silent, say(200, `{"choices":[{"index":0`), 502, "protocol", "decode"},
		"decode 503 with a silent body": {silent, func(w http.ResponseWriter, r *http.Request, _ *leg1) {
			w.Header().Set("Retry-After", "7")
			w.WriteHeader(503)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}, 503, "unavailable", "decode"},
		"decode redirects": {silent, say(302, "", "Location", "http://elsewhere/"), 502, "protocol", "decode"},
	} {
		t.Run(name, func(t *testing.T) {
			moment := 10 * time.Millisecond // for the other leg to arrive
			inBubble(t, Config{}, []script{after(moment, c.p)}, []script{after(moment, c.d)}, func(t *testing.T, b *bed, p, d []*fake) {
				start := time.Now()
				g := b.chat()
				e := g.fails(t, c.status, c.cause)
				if g.took > 400*time.Millisecond {
					t.Errorf("the client waited %v", g.took)
				}
				if e.Error.Side != c.side || e.Error.Room == "" || e.Error.Phase == "" || e.Error.Peer == "" {
					t.Errorf("the error does not say where: %s", g.body)
				}
				if room := string(d[0].leg(0).fields["bootstrap_room"]); e.Error.Room != room {
					t.Errorf("room %s; the legs have %s", e.Error.Room, room)
				}
				if want := g.header.Get("Retry-After"); strings.Contains(name, "503") && want != "7" {
					t.Errorf("Retry-After %q", want)
				}
				<-time.After(time.Second)
				if c.side == "prefill" {
					d[0].released(0, start, 500*time.Millisecond)
				} else {
					p[0].released(0, start, 500*time.Millisecond)
				}
			})
		})
	}
}

// A Baton worker's own cause passes through with its words.
func TestWorkerCauseIsKept(t *testing.T) {
	body := `{"error":{"message":"write of chunk 3 failed","type":"server_error","code":"transfer_failed","param":null,` +
		`"cause":"transfer_failed","side":"prefill","phase":"transferring","room":"42","peer":"d0:9","retryable":false}}`
	inBubble(t, Config{}, []script{silent}, []script{say(502, body)}, func(t *testing.T, b *bed, p, d []*fake) {
		g := b.chat()
		g.fails(t, 502, "transfer_failed")
		if want := strings.Replace(body, `false}}`, `false,"request_id":"`+g.header.Get("X-Request-Id")+`"}}`, 1) + "\n"; g.body != want {
			t.Fatalf("got  %s\nwant %s", g.body, want)
		}
	})
}

// What looks like an echo waits a moment for the cause itself, and only a moment.
func TestEchoWaitsForTheCause(t *testing.T) {
	aborted := `{"error":{"message":"aborted by the other side","cause":"aborted","phase":"transferring"}}`
	full := `{"error":{"message":"no pages","cause":"capacity","retryable":true}}`
	inBubble(t, Config{}, []script{say(499, aborted)}, []script{after(50*time.Millisecond, say(503, full))}, func(t *testing.T, b *bed, p, d []*fake) {
		b.chat().fails(t, 503, "capacity")
		d[0].set(silent)
		g := b.chat()
		g.fails(t, 499, "aborted")
		if g.took > 150*time.Millisecond {
			t.Errorf("the echo was held for %v", g.took)
		}
		d[0].set(say(499, strings.Replace(aborted, "other side", "prefill side", 1)))
		if g := b.chat(); g.took > 0 || g.status != 499 {
			t.Errorf("two echoes: %d after %v", g.status, g.took)
		}
	})
}

func TestDeadline(t *testing.T) {
	for name, c := range map[string]struct {
		p, d  script
		want  string // in the message
		begun string // what the client gets of a stream
	}{
		"silent before headers":     {silent, silent, "decode worker d0:80: waiting_for_headers; prefill worker p0:80: waiting_for_headers", ""},
		"silent after prefill":      {okPrefill, silent, "prefill worker p0:80: done", ""},
		"silent before first token": {okPrefill, sse(nil), "decode worker d0:80: waiting_for_first_token", ""},
		"only comments":             {okPrefill, sse(": ping\n\n", time.Second, ": ping\n\n", nil), "decode worker d0:80: waiting_for_first_token", ""},
		"silent after the role":     {silent, sse(role, nil), "decode worker d0:80: waiting_for_first_token", role},
		"silent in mid-stream":      {okPrefill, sse(role, token, nil), "decode worker d0:80: streaming", role + token},
		"pings in mid-stream":       {okPrefill, sse(role, token, time.Second, ": ping\n\n", nil), "decode worker d0:80: streaming", role + token + ": ping\n\n"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{}, []script{c.p}, []script{c.d}, func(t *testing.T, b *bed, p, d []*fake) {
				start := time.Now()
				g := b.chatStream(HeaderTimeout, "2000")
				var e wireError
				if c.begun == "" {
					e = g.fails(t, 504, "deadline")
				} else {
					e = g.breaks(t, c.begun, "deadline")
				}
				if g.took < 2*time.Second || g.took > 2500*time.Millisecond {
					t.Errorf("ended after %v", g.took)
				}
				if !strings.Contains(e.Error.Message, c.want) || e.Error.Room == "" || e.Error.Side != "decode" || e.Error.Peer != "d0:80" {
					t.Errorf("the error does not say where: %s", g.body)
				}
				<-time.After(time.Second)
				d[0].released(0, start, 2500*time.Millisecond)
			})
		})
	}
}

// A worker that answers by its own deadline, a little before the router's, is heard.
func TestDefaultDeadline(t *testing.T) {
	inBubble(t, Config{DefaultTimeout: 3 * time.Second}, []script{silent}, []script{silent}, func(t *testing.T, b *bed, p, d []*fake) {
		if g := b.chat(); g.status != 504 || g.took < 3*time.Second || g.took > 3500*time.Millisecond {
			t.Fatalf("%d after %v", g.status, g.took)
		}
		if left := d[0].leg(0).header.Get(HeaderTimeout); left != "3000" {
			t.Errorf("%s: %s", HeaderTimeout, left)
		}
	})
}

// After the first byte every failure is one error event and an end that is not clean.
func TestBrokenStreams(t *testing.T) {
	other := "data: {\"choices\":[{\"index\":1,\"delta\":{\"content\":\"x\"},\"finish_reason\":\"stop\"}]}\n\n"
	for name, c := range map[string]struct {
		p, d   script
		body   string
		prefix string
		cause  string
	}{
		"cut without finish":   {okPrefill, sse(role, token), streamBody, role + token, "protocol"},
		"cut inside an event":  {okPrefill, sse(role, token, last[:20]), streamBody, role + token, "protocol"},
		"reset":                {okPrefill, sse(role, token, errReset), streamBody, role + token, "peer_lost"},
		"reset inside":         {okPrefill, sse(role, token+last[:20], errReset), streamBody, role + token, "peer_lost"},
		"done without finish":  {okPrefill, sse(role, token, done), streamBody, role + token, "protocol"},
		"abort at the end":     {okPrefill, sse(role, token, abortLast, done), streamBody, role + token, "aborted"},
		"error event and done": {okPrefill, sse(role, token, "data: {\"error\":{\"message\":\"oom\",\"code\":500}}\n\n", done), streamBody, role + token, "engine_failed"},
		"one read": {
			okPrefill, sse(role + token + "data: {\"error\":{\"message\":\"oom\",\"cause\":\"engine_failed\"}}\n\n" + done), streamBody, role + token, "engine_failed",
		},
		"not JSON":                    {okPrefill, sse(role, token, "data: {\"choices\":\n\n"), streamBody, role + token, "protocol"},
		"second choice never ends":    {okPrefill, sse(role, last, done), strings.Replace(streamBody, "{", `{"n":2,`, 1), role + last, "protocol"},
		"first choice never ends":     {okPrefill, sse(role, other, done), strings.Replace(streamBody, "{", `{"n":2,`, 1), role + other, "protocol"},
		"prefill fails before tokens": {after(time.Second, say(502, "x")), sse(role, nil), streamBody, role, "engine_failed"},
		"prefill dies before tokens":  {after(time.Second, reset), sse(role, nil), streamBody, role, "peer_lost"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{}, []script{c.p}, []script{c.d}, func(t *testing.T, b *bed, p, d []*fake) {
				g := b.post(t.Context(), "/v1/chat/completions", c.body)
				e := g.breaks(t, c.prefix, c.cause)
				if e.Error.Room == "" || e.Error.Phase == "" || strings.Contains(g.body, "[DONE]") {
					t.Errorf("got %q", g.body)
				}
			})
		})
	}
}

// Once the decode worker answers, it has the KV: the loss of the prefill worker does not matter any more.
func TestPrefillMayDieAfterItsWork(t *testing.T) {
	inBubble(t, Config{}, []script{after(time.Second, reset)}, []script{sse(role, token, 2*time.Second, last, done)}, func(t *testing.T, b *bed, p, d []*fake) {
		b.chatStream().ok(t, role+token+last+done)
	})
}

// A prefill leg that does not end although the answer has is released a little later.
func TestPrefillLagsBehind(t *testing.T) {
	inBubble(t, Config{}, []script{silent}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		start := time.Now()
		if g := b.chat(); g.status != 200 || g.took > 0 {
			t.Fatalf("%d after %v", g.status, g.took)
		}
		<-time.After(2 * prefillGrace)
		p[0].released(0, start, prefillGrace)
		if len(d[0].aborts) > 0 {
			t.Errorf("the decode worker was told to abort a finished request")
		}
	})
}

// A client that leaves frees both workers at once, also while they are silent.
func TestClientLeaves(t *testing.T) {
	for name, c := range map[string]struct{ p, d script }{
		"both silent":    {silent, silent},
		"decode silent":  {okPrefill, silent},
		"prefill silent": {silent, sse(nil)},
		"mid-stream":     {silent, sse(role, token, nil)},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{}, []script{c.p}, []script{c.d}, func(t *testing.T, b *bed, p, d []*fake) {
				ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
				defer cancel()
				left := time.Now().Add(200 * time.Millisecond)
				if g := b.post(ctx, "/v1/chat/completions", streamBody); g.err == nil {
					t.Fatalf("got an answer: %+v", g)
				}
				<-time.After(time.Second)
				d[0].released(0, left, 100*time.Millisecond)
				if !strings.Contains(name, "decode") {
					p[0].released(0, left, 100*time.Millisecond)
				}
				if !strings.Contains(b.log.String(), "outcome=client_gone") {
					t.Errorf("log:\n%s", b.log)
				}
			})
		})
	}
}

// A client that stops reading cannot hold the request beyond its deadline.
func TestClientStopsReading(t *testing.T) {
	var parts []any
	for range 100 {
		parts = append(parts, token)
	}
	inBubble(t, Config{}, []script{okPrefill}, []script{sse(append(parts, last, done)...)}, func(t *testing.T, b *bed, p, d []*fake) {
		conn, err := b.net.dial(t.Context(), "", "router:80")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := conn.Write([]byte("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + HeaderTimeout + ": 1000\r\nContent-Length: " +
			strconv.Itoa(len(streamBody)) + "\r\n\r\n" + streamBody)); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		<-time.After(1500 * time.Millisecond)
		if n := b.r.inflight.Load(); n != 0 {
			t.Errorf("%d requests are in flight", n)
		}
		d[0].released(0, start, 1500*time.Millisecond)
	})
}

func TestRetryOnAnotherPair(t *testing.T) {
	for name, bad := range map[string]script{
		"busy":                say(503, "busy"),
		"server error":        say(500, "boom"),
		"resets":              reset,
		"breaks before event": sse(": ping\n\n", errReset),
		"ends before event":   sse(),
		"bad answer":          say(200, "{"),
		"aborts by itself":    say(200, genAbort),
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{Policy: PolicyRoundRobin}, []script{okPrefill}, []script{after(time.Millisecond, bad), okStream}, func(t *testing.T, b *bed, p, d []*fake) {
				b.chatStream().ok(t, role+token+last+done)
				synctest.Wait() // the fake decode worker does not need its prefill worker to answer
				if d[0].count() != 1 || d[1].count() != 1 || p[0].count() != 2 {
					t.Fatalf("requests: d0 %d, d1 %d, p0 %d", d[0].count(), d[1].count(), p[0].count())
				}
				one, two := p[0].leg(0), p[0].leg(1)
				if one.rid() == two.rid() || string(one.fields["bootstrap_room"]) == string(two.fields["bootstrap_room"]) {
					t.Errorf("the attempts share a name:\n%s\n%s", one.body, two.body)
				}
			})
		})
	}
}

func TestNoRetry(t *testing.T) {
	for name, c := range map[string]struct {
		bad    script
		status int
	}{
		"own, not retryable": {say(502, `{"error":{"message":"x","cause":"engine_failed","retryable":false}}`), 502},
		"asked for":          {say(200, `{"choices":[{"index":0,"finish_reason":"abort"}]}`), 499},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{Policy: PolicyRoundRobin}, []script{okPrefill, okPrefill}, []script{c.bad, okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
				if g := b.chat(); g.status != c.status || d[1].count() != 0 {
					t.Fatalf("got %d %s; the other worker saw %d requests", g.status, g.body, d[1].count())
				}
			})
		})
	}
}

// After as many pairs as allowed the last cause is told.
func TestRetriesEnd(t *testing.T) {
	busy := say(503, "busy")
	inBubble(t, Config{MaxRetries: 1}, []script{okPrefill}, []script{busy, busy, busy}, func(t *testing.T, b *bed, p, d []*fake) {
		b.chat().fails(t, 503, "unavailable")
		if n := d[0].count() + d[1].count() + d[2].count(); n != 2 {
			t.Errorf("%d attempts", n)
		}
	})
	inBubble(t, Config{MaxRetries: -1}, []script{okPrefill}, []script{busy, busy}, func(t *testing.T, b *bed, p, d []*fake) {
		b.chat().fails(t, 503, "unavailable")
		if n := d[0].count() + d[1].count(); n != 1 {
			t.Errorf("%d attempts", n)
		}
	})
}

func TestFirstByteTimeout(t *testing.T) {
	inBubble(t, Config{Policy: PolicyRoundRobin, FirstByteTimeout: time.Second}, []script{okPrefill}, []script{sse(nil), okStream}, func(t *testing.T, b *bed, p, d []*fake) {
		g := b.chatStream()
		g.ok(t, role+token+last+done)
		if g.took != time.Second {
			t.Errorf("took %v", g.took)
		}
		d[1].set(sse(role, token, 3*time.Second, last, done)) // slow later on is not late
		d[0].set(sse(role, token, 3*time.Second, last, done))
		b.chatStream().ok(t, role+token+last+done)
	})
}

// A worker that died in the middle is told of as such, not as "refused" by the retry.
func TestLostWorkerIsNotCalledRefused(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{silent}, func(t *testing.T, b *bed, p, d []*fake) {
		killed := make(chan struct{})
		go func() {
			defer close(killed)
			<-time.After(time.Second)
			d[0].kill()
		}()
		g := b.chat()
		<-killed
		g.fails(t, 502, "peer_lost")
		if g.took != time.Second {
			t.Errorf("told after %v", g.took)
		}
		<-time.After(time.Second)
		e := b.chat().fails(t, 503, "unavailable")
		if !strings.Contains(e.Error.Message, "no usable decode worker: d0:80 (health probe: connection refused, out for ") {
			t.Errorf("message %q", e.Error.Message)
		}
		if g := b.get("/health"); g.status != 503 || !strings.Contains(g.body, "no decode worker is up") {
			t.Errorf("health %d %s", g.status, g.body)
		}
		d[0].set(okAnswer)
		d[0].start()
		<-time.After(time.Second)
		b.chat().ok(t, chatAnswer)
		if g := b.get("/health"); g.status != 200 {
			t.Errorf("health %d %s", g.status, g.body)
		}
	})
}

func TestCloseEndsRequests(t *testing.T) {
	inBubble(t, Config{}, []script{silent}, []script{sse(token, nil)}, func(t *testing.T, b *bed, p, d []*fake) {
		start := time.Now()
		go func() {
			<-time.After(time.Second)
			b.r.Close()
		}()
		g := b.chatStream()
		if e := g.breaks(t, token, "shutdown"); e.Error.Room == "" || e.Error.Phase != "streaming" {
			t.Errorf("the error does not say where: %s", g.body)
		}
		if g.took != time.Second {
			t.Errorf("took %v", g.took)
		}
		b.chat().fails(t, 503, "shutdown")
		synctest.Wait()
		p[0].released(0, start, time.Second)
		d[0].released(0, start, time.Second)
	})
}
