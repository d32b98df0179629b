package router

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A stream that has begun and then carries no event ends after the limit, whatever else comes, and both legs are released within a second.
func TestInterTokenTimeout(t *testing.T) {
	const limit = 2 * time.Second
	var pings, busy, late []any
	for range 100 {
		pings = append(pings, ": ping\n\n", 100*time.Millisecond)
		busy = append(busy, token, limit-time.Millisecond)
		late = append(late, ": ping\n\n", time.Second, ":\n", ":\n\n")
	}
	for name, c := range map[string]struct {
		d     []any
		after time.Duration // the end, from the start
	}{
		"silent":             {[]any{role, token, nil}, limit},
		"pings":              {append([]any{role, token}, pings...), limit},
		"pings, cut":         {append([]any{role, token}, late...), limit},
		"half an event":      {[]any{role, token, token[:20], nil}, limit},
		"retry fields":       {[]any{role, token, time.Second, "retry: 100\n\n", "event: ping\n\n", nil}, limit},
		"a token in between": {[]any{role, token, time.Second, token, time.Second, ": ping\n\n", nil}, limit + time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{InterTokenTimeout: limit}, []script{silent}, []script{sse(c.d...)}, func(t *testing.T, b *bed, p, d []*fake) {
				start := time.Now()
				g := b.chatStream()
				if g.took < c.after || g.took > c.after+500*time.Millisecond {
					t.Errorf("ended after %v, want %v", g.took, c.after)
				}
				at := strings.Index(g.body, `data: {"error"`)
				if at < 0 || g.err == nil {
					t.Fatalf("got %q, %v", g.body, g.err)
				}
				e := g.breaks(t, g.body[:at], "deadline")
				if e.Error.Phase != "streaming" || e.Error.Side != "decode" || e.Error.Peer != "d0:80" || e.Error.Room == "" {
					t.Errorf("the error does not say where: %s", g.body[at:])
				}
				<-time.After(time.Second)
				d[0].released(0, start, c.after+time.Second)
				p[0].released(0, start, c.after+time.Second)
			})
		})
	}
	// What is in time goes on; the wait for the first token is another limit's.
	inBubble(t, Config{InterTokenTimeout: limit}, []script{okPrefill}, []script{sse(append(append([]any{10 * time.Second, role, 10 * time.Second}, busy...), last, done)...)}, func(t *testing.T, b *bed, p, d []*fake) {
		if g := b.chatStream(HeaderTimeout, "900000"); g.status != 200 || g.err != nil || !strings.HasSuffix(g.body, last+done) {
			t.Fatalf("%d, %v: %s", g.status, g.err, g.body)
		}
	})
}

// After the finish of every choice there is nothing left to fail: a worker that falls silent or breaks off then has its stream ended for it. One
// finish or one error, never both.
func TestFinishWithoutDone(t *testing.T) {
	for name, c := range map[string]struct {
		d     script
		after time.Duration
	}{
		"silent": {sse(role, token, last, nil), 2 * time.Second},
		"pings":  {sse(role, token, last, time.Second, ": ping\n\n", nil), 2 * time.Second},
		"resets": {sse(role, token, last, errReset), 0},
		"ends":   {sse(role, token, last), 0},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{InterTokenTimeout: 2 * time.Second}, []script{okPrefill}, []script{c.d}, func(t *testing.T, b *bed, p, d []*fake) {
				start := time.Now()
				g := b.chatStream()
				if body := strings.Replace(g.body, ": ping\n\n", "", 1); g.err != nil || g.status != 200 || g.took != c.after || body != role+token+last+done {
					t.Errorf("%d %v after %v: %q", g.status, g.err, g.took, g.body)
				}
				<-time.After(time.Second)
				if c.after > 0 {
					d[0].released(0, start, c.after+time.Second)
				}
			})
		})
	}
	// With a choice that has not ended it is an error.
	inBubble(t, Config{InterTokenTimeout: time.Second}, []script{okPrefill}, []script{sse(role, last, nil)}, func(t *testing.T, b *bed, p, d []*fake) {
		b.post(t.Context(), "/v1/chat/completions", strings.Replace(streamBody, "{", `{"n":2,`, 1)).breaks(t, role+last, "deadline")
	})
}

// A client that reads slowly is not the worker's silence.
func TestSlowClientIsNoStall(t *testing.T) {
	inBubble(t, Config{InterTokenTimeout: time.Second}, []script{okPrefill}, []script{sse(role, token, ": ping\n\n", token, last, done)}, func(t *testing.T, b *bed, p, d []*fake) {
		conn, err := b.net.dial(t.Context(), "", "router:80")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: "+strconv.Itoa(len(streamBody))+"\r\n\r\n"+streamBody); err != nil {
			t.Fatal(err)
		}
		var all []byte
		buf := make([]byte, 64)
		for {
			<-time.After(1500 * time.Millisecond)
			n, err := conn.Read(buf)
			all = append(all, buf[:n]...)
			if err != nil {
				break
			}
		}
		if s := string(all); !strings.Contains(s, "[DONE]") || strings.Contains(s, `"error"`) {
			t.Errorf("got %q", s)
		}
	})
}

// The body may name the deadline; it does not reach the workers but as what is left.
func TestDeadlineInTheBody(t *testing.T) {
	for _, c := range []struct {
		body, header string
		want         time.Duration
		status       int
	}{
		{"1500", "", 1500 * time.Millisecond, 504},
		{"1500", "700", 700 * time.Millisecond, 504},
		{"700", "1500", 700 * time.Millisecond, 504},
		{"400000", "", 400 * time.Second, 504}, // longer than the default
		{"null", "800", 800 * time.Millisecond, 504},
		{"0", "", 0, 400}, {"-1", "", 0, 400}, {`"5"`, "", 0, 400}, {"1.5", "", 0, 400}, {"99999999999", "", 0, 400}, {"{}", "", 0, 400},
	} {
		inBubble(t, Config{}, []script{silent}, []script{silent}, func(t *testing.T, b *bed, p, d []*fake) {
			var h []string
			if c.header != "" {
				h = []string{HeaderTimeout, c.header}
			}
			g := b.post(context.Background(), "/v1/chat/completions", strings.Replace(chatBody, "{", `{"request_timeout_ms":`+c.body+`,`, 1), h...)
			if g.status != c.status || g.took < c.want || g.took > c.want+500*time.Millisecond {
				t.Errorf("%+v: %d after %v: %s", c, g.status, g.took, g.body)
			}
			if c.status != http.StatusGatewayTimeout {
				if !strings.Contains(g.body, "request_timeout_ms") {
					t.Errorf("%+v: %s", c, g.body)
				}
				return
			}
			synctest.Wait()
			l := d[0].leg(0)
			if left := l.header.Get(HeaderTimeout); left != strconv.FormatInt(c.want.Milliseconds(), 10) || l.fields["request_timeout_ms"] != nil {
				t.Errorf("%+v: the worker was told %q, and %s", c, left, l.body)
			}
		})
	}
}
