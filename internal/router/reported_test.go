package router

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// Kinds of faults that others reported (docs/reported.md), at the router.

// stub is a worker at a real address that notes when its request was given up and aborted.
type stub struct {
	addr    string
	left    chan struct{} // closed when that request's connection was given up
	aborted chan string   // rid of each abort_request
}

// newStub answers with status after delay, once both legs have arrived; status 0: never.
func newStub(t *testing.T, status int, delay time.Duration, both *meeting) *stub {
	s := &stub{left: make(chan struct{}), aborted: make(chan string, 8)}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		switch {
		case r.URL.Path == "/abort_request":
			var a struct{ RID string }
			_ = json.Unmarshal(body, &a)
			s.aborted <- a.RID
		case !strings.HasSuffix(r.URL.Path, "completions"):
		case status == 0:
			both.arrive(r.Context())
			<-r.Context().Done()
			close(s.left)
		default:
			both.arrive(r.Context())
			<-time.After(delay)
			w.WriteHeader(status)
			_, _ = io.WriteString(w, `{"error":{"message":"refused by the stub"}}`)
		}
	}))
	t.Cleanup(srv.Close)
	s.addr = srv.Listener.Addr().String()
	return s
}

// The report: one leg answers 4xx or 5xx in 10 ms, the other never. On real sockets: it ends long before its deadline of a minute.
// TestFirstFailureEndsBoth has more answers, and the exact times, in a simulated net.
func TestReportedK4OneSidedEnd(t *testing.T) {
	for _, c := range []struct {
		name            string
		prefill, decode int
	}{
		{"prefill answers 400 and decode never", 400, 0},
		{"decode answers 503 and prefill never", 0, 503},
		{"decode answers 400 and prefill never", 0, 400},
		{"prefill answers 503 and decode never", 503, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			both := newMeeting(2)
			p, d := newStub(t, c.prefill, 10*time.Millisecond, both), newStub(t, c.decode, 10*time.Millisecond, both)
			silent := p
			if c.decode == 0 {
				silent = d
			}
			srv := overTCP(t, Config{}, p.addr, d.addr)
			g := postTCP(t, srv.URL, HeaderTimeout, "60000")
			if want := c.prefill + c.decode; g.status != want || !strings.Contains(g.body, "refused by the stub") || g.took > must {
				t.Errorf("the client got %d after %v: %s", g.status, g.took, g.body)
			}
			limit := time.After(must)
			select {
			case <-silent.left:
			case <-limit:
				t.Fatal("the silent worker still has the request")
			}
			select {
			case rid := <-silent.aborted:
				if rid == "" {
					t.Error("an abort without a name")
				}
			case <-limit:
				t.Fatal("the silent worker was not told to abort")
			}
		})
	}
}

func TestReportedK5CancelRace(t *testing.T) {
	// A client leaves while its first attempt fails: no second one is made for it.
	t.Run("gone between two attempts", func(t *testing.T) {
		inBubble(t, Config{Policy: PolicyRoundRobin}, []script{silent}, []script{silent, okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			d[0].set(func(w http.ResponseWriter, r *http.Request, l *leg1) {
				<-time.After(200 * time.Millisecond)
				leave()
				synctest.Wait() // the router knows
				say(503, "busy")(w, r, l)
			})
			if g := b.post(ctx, "/v1/chat/completions", chatBody); g.err == nil {
				t.Fatalf("got an answer: %+v", g)
			}
			<-time.After(time.Second)
			if d[0].count() != 1 || d[1].count() != 0 || p[0].count() != 1 {
				t.Errorf("requests: d0 %d, d1 %d, p0 %d", d[0].count(), d[1].count(), p[0].count())
			}
		})
	})
	// The abort of one client's request and another request of the same name at the same time: the room tells them apart.
	t.Run("the abort names the room", func(t *testing.T) {
		inBubble(t, Config{}, []script{silent}, []script{silent}, func(t *testing.T, b *bed, p, d []*fake) {
			ctx, leave := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer leave()
			b.post(ctx, "/generate", `{"rid":"same","text":"x"}`)
			<-time.After(time.Second)
			d[0].set(say(200, genAnswer))
			p[0].set(okPrefill)
			b.post(t.Context(), "/generate", `{"rid":"same","text":"x"}`).ok(t, genAnswer)
			d[0].released(0, time.Now(), time.Second)
			one, two := d[0].leg(0), d[0].leg(1)
			if _, hit := d[0].aborts[two.rid()+" "+two.room()]; hit || one.room() == two.room() {
				t.Errorf("rooms %s and %s, aborts %v", one.room(), two.room(), d[0].aborts)
			}
		})
	})
}

// One absolute deadline: what the body and a first attempt took is not given again.
func TestReportedK7Deadline(t *testing.T) {
	left := func(t *testing.T, l leg1) time.Duration {
		ms, err := strconv.Atoi(l.header.Get(HeaderTimeout))
		if err != nil {
			t.Fatalf("%s: %v", HeaderTimeout, err)
		}
		return time.Duration(ms) * time.Millisecond
	}
	t.Run("a slow body is on the same clock", func(t *testing.T) {
		inBubble(t, Config{}, []script{okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
			conn, err := b.net.dial(t.Context(), "", "router:80")
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			head := "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + HeaderTimeout + ": 2000\r\nContent-Length: " + strconv.Itoa(len(chatBody)) + "\r\n\r\n"
			for _, part := range []string{head, chatBody[:10], chatBody[10:]} {
				if _, err := io.WriteString(conn, part); err != nil {
					t.Fatal(err)
				}
				<-time.After(600 * time.Millisecond)
			}
			if answer, err := io.ReadAll(conn); err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 200") {
				t.Fatalf("%q, %v", answer, err)
			}
			for _, l := range []leg1{p[0].leg(0), d[0].leg(0)} {
				if got := left(t, l); got > 800*time.Millisecond || got < 700*time.Millisecond {
					t.Errorf("a worker was given %v of 2 s after 1.2 s", got)
				}
			}
		})
	})
	t.Run("a retry has what is left", func(t *testing.T) {
		inBubble(t, Config{Policy: PolicyRoundRobin}, []script{silent, silent}, []script{after(1500*time.Millisecond, say(503, "busy")), silent}, func(t *testing.T, b *bed, p, d []*fake) {
			d[1].set(after(1500*time.Millisecond, say(503, "busy"))) // whichever is first
			g := b.chat(HeaderTimeout, "2000")
			if g.status != 504 && g.status != 503 || g.took > 2500*time.Millisecond {
				t.Fatalf("%d after %v", g.status, g.took)
			}
			first, second := d[0].leg(0), d[1].leg(0)
			if second.at.Before(first.at) {
				first, second = second, first
			}
			if a, b := left(t, first), left(t, second); a != 2*time.Second || b > 500*time.Millisecond {
				t.Errorf("the first attempt was given %v, the second %v", a, b)
			}
		})
	})
}

// A transient error blames nobody for longer than it lasts.
func TestReportedK10StickyBlame(t *testing.T) {
	t.Run("one error keeps nobody out", func(t *testing.T) {
		for name, bad := range map[string]script{"500": say(500, "boom"), "reset": reset, "cut": sse(role, token, errReset)} {
			inBubble(t, Config{MaxRetries: -1}, []script{okPrefill}, []script{bad}, func(t *testing.T, b *bed, p, d []*fake) {
				if g := b.chatStream(); g.status == 200 && g.err == nil {
					t.Fatalf("%s: %+v", name, g)
				}
				d[0].set(okStream)
				<-time.After(250 * time.Millisecond) // a short pause is allowed
				b.chatStream().ok(t, role+token+last+done)
			})
		}
	})
}

// Workers that say what is not so.
func TestReportedK13FalseEnd(t *testing.T) {
	// The report: the engine aborts in mid-stream, and the worker ends with finish "abort" and [DONE].
	t.Run("finish abort and DONE after three tokens", func(t *testing.T) {
		for _, end := range []string{
			abortLast + done,
			"data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"error\"}]}\n\n" + done,
			"data: {\"choices\":[],\"error\":\"engine died\"}\n\n" + done,
			done,
		} {
			inBubble(t, Config{}, []script{okPrefill}, []script{sse(role, token, token, token, end)}, func(t *testing.T, b *bed, p, d []*fake) {
				g := b.chatStream()
				if !strings.HasPrefix(g.body, role+token+token+token) || g.err == nil || strings.Contains(g.body, "[DONE]") || strings.Count(g.body, `data: {"error":`) != 1 {
					t.Errorf("after %q the client got %q, %v", end, g.body, g.err)
				}
			})
		}
	})
}
