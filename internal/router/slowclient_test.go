package router

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/edge"
)

// Clients that are slow, over real sockets and the server that the command uses.

// must is how long something that must happen may take here.
const must = 20 * time.Second

// seenLeg is a worker at a real address that tells of what it is asked.
type seenLeg struct {
	addr    string
	begun   chan struct{}
	ended   chan struct{} // the request's connection was closed
	aborted chan struct{}
}

// seenWorker answers with s, and then waits until its connection is closed.
func seenWorker(t *testing.T, s script) *seenLeg {
	l := &seenLeg{begun: make(chan struct{}, 16), ended: make(chan struct{}, 16), aborted: make(chan struct{}, 16)}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		switch {
		case strings.HasSuffix(r.URL.Path, "completions"):
			l.begun <- struct{}{}
			s(w, r, nil)
			<-r.Context().Done()
			l.ended <- struct{}{}
		case r.URL.Path == "/abort_request":
			l.aborted <- struct{}{}
			_, _ = io.WriteString(w, `{"aborted":1}`)
		}
	}))
	t.Cleanup(srv.Close)
	l.addr = srv.Listener.Addr().String()
	return l
}

// happens waits for an event.
func happens(t *testing.T, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(must):
		t.Fatalf("%s has not happened", what)
	}
}

// eventually waits until f is nil.
func eventually(t *testing.T, f func() error) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(must); ; <-tick.C {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// idle: nobody is in flight anywhere.
func idle(r *Router) error {
	n := r.inflight.Load()
	for _, w := range r.all() {
		n += w.inflight.Load()
	}
	if q := r.queue.Stats(); n != 0 || q.Inflight != 0 || r.live.count() != 0 {
		return fmt.Errorf("%d requests and legs, %+v, %d live", n, q, r.live.count())
	}
	return nil
}

// atEdge serves a router between two workers as the command does.
func atEdge(t *testing.T, c Config, l edge.Limits, prefill, decode string) (addr string, r *Router) {
	t.Helper()
	c.Prefills = []Backend{{URL: "http://" + prefill, BootstrapPort: 1, Kind: KindBaton}}
	c.Decodes = []Backend{{URL: "http://" + decode, Kind: KindBaton}}
	r, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := edge.NewServer(r.Handler(), l, nil, slog.New(slog.DiscardHandler))
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	t.Cleanup(func() {
		_ = srv.Close()
		<-served
		r.Close()
	})
	return ln.Addr().String(), r
}

// dialed opens a connection and writes text.
func dialed(t *testing.T, addr, text string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(must))
	if _, err := io.WriteString(conn, text); err != nil {
		t.Fatal(err)
	}
	return conn
}

// drip writes a byte of text every now and then until the other side has had enough.
func dripText(t *testing.T, conn net.Conn, text string) {
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for i := range text {
			if _, err := io.WriteString(conn, text[i:i+1]); err != nil {
				return
			}
			<-tick.C
		}
	})
	t.Cleanup(func() {
		_ = conn.Close()
		wg.Wait()
	})
}

const head = "POST /v1/chat/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"

func TestSlowHeader(t *testing.T) {
	w := seenWorker(t, silent)
	addr, r := atEdge(t, Config{}, edge.Limits{Header: 300 * time.Millisecond}, w.addr, w.addr)
	conn := dialed(t, addr, head+"X-Slow: ")
	dripText(t, conn, strings.Repeat("a", 10_000)) // 200 s of it
	if _, err := io.ReadAll(conn); err != nil && strings.Contains(err.Error(), "timeout") {
		t.Fatal("the connection is still open")
	}
	if err := idle(r); err != nil {
		t.Error(err)
	}
}

func TestLargeHeader(t *testing.T) {
	w := seenWorker(t, silent)
	addr, _ := atEdge(t, Config{}, edge.Limits{}, w.addr, w.addr)
	for lines, status := range map[int]int{1: 404, 80: 431} { // of a KiB
		conn := dialed(t, addr, "GET /nothing HTTP/1.1\r\nHost: router\r\n"+strings.Repeat("X-Large: "+strings.Repeat("a", 1013)+"\r\n", lines)+"\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || resp.StatusCode != status {
			t.Errorf("%d KiB: %v, %v; want %d", lines, resp, err, status)
		}
	}
}

func TestDrippingBody(t *testing.T) {
	w := seenWorker(t, silent)
	keys, secret := withKeys(t, "a max-inflight=1")
	addr, r := atEdge(t, Config{BodyTimeout: 300 * time.Millisecond, Keys: keys}, edge.Limits{}, w.addr, w.addr)
	conn := dialed(t, addr, head+"Authorization: "+secret["a"]+"\r\nContent-Length: 10000\r\n\r\n{")
	dripText(t, conn, strings.Repeat(" ", 9_999))
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || resp.StatusCode != http.StatusRequestTimeout {
		t.Fatalf("%v, %v", resp, err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil || !strings.Contains(string(body), `"code":"body_timeout"`) || !resp.Close {
		t.Errorf("%s, %v, %v", body, err, resp.Header)
	}
	eventually(t, func() error {
		if n := keys.Inflight("a"); n != 0 {
			return fmt.Errorf("%d requests of a", n)
		}
		return idle(r)
	})
	if len(w.begun) > 0 {
		t.Error("half a request was sent to a worker")
	}
}

// A client that does not read its stream holds a worker's slot no longer than --client-stall-timeout: both legs are closed and told.
func TestClientThatDoesNotRead(t *testing.T) {
	var endless script = func(w http.ResponseWriter, req *http.Request, _ *leg1) {
		w.Header().Set("Content-Type", "text/event-stream")
		event := strings.Replace(token, "hel", strings.Repeat("x", 32<<10), 1)
		for req.Context().Err() == nil {
			if _, err := io.WriteString(w, event); err != nil {
				return
			}
		}
	}
	large, err := json.Marshal(strings.Repeat("x", 24<<20))
	if err != nil {
		t.Fatal(err)
	}
	whole := say(200, strings.Replace(chatAnswer, `"hello"`, string(large), 1))
	for name, c := range map[string]struct {
		decode script
		body   string
		legs   int // that are released: a whole answer has been read from its worker
	}{"stream": {endless, streamBody, 2}, "whole": {whole, chatBody, 1}} {
		t.Run(name, func(t *testing.T) {
			p, d := seenWorker(t, silent), seenWorker(t, c.decode)
			if c.legs == 1 { // its connection goes back to be used again
				d = &seenLeg{addr: tcpWorker(t, c.decode), begun: make(chan struct{}, 1)}
				d.begun <- struct{}{}
			}
			log := &lockedLog{}
			keys, secret := withKeys(t, "a max-inflight=1")
			addr, r := atEdge(t, Config{ClientStall: 400 * time.Millisecond, Keys: keys, Log: slog.New(slog.NewTextHandler(log, nil))}, edge.Limits{}, p.addr, d.addr)
			conn := dialed(t, addr, head+fmt.Sprintf("Authorization: %s\r\nContent-Length: %d\r\n\r\n%s", secret["a"], len(c.body), c.body))
			happens(t, "the prefill leg", p.begun)
			happens(t, "the decode leg", d.begun)
			happens(t, "the prefill leg's end", p.ended)
			happens(t, "the prefill leg's abort", p.aborted)
			if c.legs == 2 {
				happens(t, "the decode leg's end", d.ended)
				happens(t, "the decode leg's abort", d.aborted)
			}
			eventually(t, func() error {
				if n := keys.Inflight("a"); n != 0 {
					return fmt.Errorf("%d requests of a", n)
				}
				return idle(r)
			})
			if !strings.Contains(log.String(), "cause=client_gone") || !strings.Contains(log.String(), "has not read its answer") {
				t.Errorf("the log says %s", log)
			}
			// What it finds when it reads at last is no whole answer.
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatal(err)
			}
			if n, err := io.Copy(io.Discard, resp.Body); err == nil {
				t.Errorf("%d bytes, and then a proper end", n)
			}
		})
	}
}

// Who reads slowly, but reads, has all the time of its deadline: a minute and a half here, with a limit of four seconds.
func TestClientThatReadsSlowly(t *testing.T) {
	answer := role + strings.Repeat(strings.Replace(token, "hel", strings.Repeat("x", 4<<10), 1), 140) + last + done
	inBubble(t, Config{ClientStall: 4 * time.Second}, []script{okPrefill}, []script{sse(answer)}, func(t *testing.T, b *bed, p, d []*fake) {
		resp, err := b.client.Post("http://router/v1/chat/completions", "application/json", strings.NewReader(streamBody))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		start, n := time.Now(), 0
		for buf := make([]byte, 4<<10); ; {
			<-time.After(700 * time.Millisecond)
			m, err := io.ReadFull(resp.Body, buf)
			n += m
			if err != nil {
				if n != len(answer) {
					t.Fatalf("after %v and %d of %d bytes: %v", time.Since(start), n, len(answer), err)
				}
				break
			}
		}
		if d := time.Since(start); d < 90*time.Second {
			t.Errorf("it was not slow at all: %v", d)
		}
	})
}
