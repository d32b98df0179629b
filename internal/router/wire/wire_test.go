package wire

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newClient of an address over TCP; it has no idle connection when the test has ended.
func newClient(t *testing.T, addr string) *Client {
	t.Helper()
	c := &Client{Addr: addr, Host: "worker", Dial: (&net.Dialer{}).DialContext, MaxIdle: 4, IdleTimeout: time.Minute, MaxHeader: 64 << 10, TLSTimeout: 10 * time.Second}
	t.Cleanup(c.CloseIdle)
	return c
}

// script answers each connection of a real listener by hand.
func script(t *testing.T, serve func(n int, c net.Conn, br *bufio.Reader)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	wg.Go(func() {
		for n := 0; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			wg.Go(func() {
				defer c.Close()
				serve(n, c, bufio.NewReader(c))
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return l.Addr().String()
}

// take reads one request.
func take(br *bufio.Reader) error {
	r, err := http.ReadRequest(br)
	if err == nil {
		_, err = io.Copy(io.Discard, r.Body)
	}
	return err
}

func post(t *testing.T, c *Client, body string) (int, string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	resp, err := c.Post(ctx, &Request{Path: "/x", Header: http.Header{"A": {"1", "2"}}, Body: [2][]byte{[]byte(body)}})
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

const ok = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

// TestRequest: what a server of net/http understands, and that connections are used again.
func TestRequest(t *testing.T) {
	var opened atomic.Int32
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		w.Header().Set("Trailer", "T") // and so chunked
		fmt.Fprintf(w, "%s %s %s %v %d %d %v", r.Method, r.URL, r.Host, r.Header["A"], r.ContentLength, len(b), err)
		w.Header().Set("T", "1")
	}))
	srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			opened.Add(1)
		}
	}
	srv.Start()
	t.Cleanup(srv.Close)
	c := newClient(t, srv.Listener.Addr().String())
	for _, n := range []int{0, 1, inlineBody, inlineBody + 1, 5 << 20} {
		status, got, err := post(t, c, strings.Repeat("x", n))
		if want := fmt.Sprintf("POST /x worker [1 2] %d %d <nil>", n, n); err != nil || status != 200 || got != want {
			t.Errorf("%d bytes: %d %q, %v", n, status, got, err)
		}
	}
	if n := opened.Load(); n != 1 || c.Idle() != 1 {
		t.Errorf("%d connections were opened, %d are idle", n, c.Idle())
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := c.Post(ctx, &Request{Path: "/x", Header: http.Header{"A": {"1\r\nB: 2"}}}); err == nil || !strings.Contains(err.Error(), "line break") {
		t.Errorf("a header with a line break: %v", err)
	}
}

func TestTLS(t *testing.T) {
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body) // all of it before the answer, or net/http closes the connection
		_, _ = w.Write(b)
	}))
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	t.Cleanup(srv.Close)
	c := newClient(t, srv.Listener.Addr().String())
	c.TLS = func() *tls.Config {
		return &tls.Config{RootCAs: srv.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs, ServerName: "example.com"}
	}
	for _, n := range []int{3, 1 << 20} {
		if status, got, err := post(t, c, strings.Repeat("x", n)); err != nil || status != 200 || len(got) != n {
			t.Errorf("%d, %d bytes, %v", status, len(got), err)
		}
	}
	if c.Idle() != 1 {
		t.Errorf("%d idle connections", c.Idle())
	}
	c.CloseIdle()
	c.TLS = func() *tls.Config { return &tls.Config{ServerName: "example.com"} }
	if _, _, err := post(t, c, "x"); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a certificate of nobody: %v", err)
	}
}

// TestClosedWhileIdle: a connection that the server has closed, or has written to, is replaced unseen.
func TestClosedWhileIdle(t *testing.T) {
	for name, end := range map[string]func(c net.Conn){
		"closed": func(c net.Conn) { _ = c.Close() },
		"reset":  func(c net.Conn) { _ = c.(*net.TCPConn).SetLinger(0); _ = c.Close() },
		"talks":  func(c net.Conn) { _, _ = io.WriteString(c, ok) },
	} {
		t.Run(name, func(t *testing.T) {
			done := make(chan struct{}, 10)
			addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
				if take(br) != nil {
					return
				}
				_, _ = io.WriteString(c, ok)
				end(c)
				done <- struct{}{} // on this machine's loopback the other side has it now
				_, _ = c.Read(make([]byte, 1))
			})
			c := newClient(t, addr)
			for range 5 {
				if _, got, err := post(t, c, "x"); err != nil || got != "ok" {
					t.Fatalf("%q, %v", got, err)
				}
				<-done // before, it would be seen by the write, or not at all
			}
		})
	}
}

// TestIdleWithoutSocket: where a connection cannot be looked at, the write finds out, and is repeated only if nothing was written.
func TestIdleWithoutSocket(t *testing.T) {
	var served sync.WaitGroup
	t.Cleanup(served.Wait)
	dials := 0
	c := newClient(t, "memory")
	c.Dial = func(context.Context, string, string) (net.Conn, error) {
		dials++
		ours, theirs := net.Pipe()
		served.Go(func() {
			if take(bufio.NewReader(theirs)) == nil {
				_, _ = io.WriteString(theirs, ok)
			}
			_ = theirs.Close()
		})
		return ours, nil
	}
	for n := 1; n <= 3; n++ {
		_, got, err := post(t, c, "x")
		if err != nil || got != "ok" || dials != n {
			t.Errorf("%q, %v after %d connections, want %d", got, err, dials, n)
		}
		served.Wait()
	}
}

// TestNoSecondSend: a request that the server may have read is not sent again.
func TestNoSecondSend(t *testing.T) {
	var taken atomic.Int32
	addr := script(t, func(n int, c net.Conn, br *bufio.Reader) {
		for {
			if take(br) != nil {
				return
			}
			if taken.Add(1); taken.Load() == 2 {
				return
			}
			_, _ = io.WriteString(c, ok)
		}
	})
	c := newClient(t, addr)
	if _, got, err := post(t, c, "x"); err != nil || got != "ok" {
		t.Fatalf("%q, %v", got, err)
	}
	if _, _, err := post(t, c, "x"); !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
	if n := taken.Load(); n != 2 {
		t.Errorf("the server got %d requests", n)
	}
}

// TestAnswers: bodies of each form, and which of them leave the connection usable.
func TestAnswers(t *testing.T) {
	for name, a := range map[string]struct {
		answer, body string
		kept         bool
		err          string
	}{
		"length":       {ok, "ok", true, ""},
		"chunks":       {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n", "ok", true, ""},
		"none":         {"HTTP/1.1 204 No\r\n\r\n", "", true, ""},
		"empty":        {"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "", true, ""},
		"close":        {"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", "ok", false, ""},
		"1.0":          {"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", "ok", false, ""},
		"to the end":   {"HTTP/1.1 200 OK\r\n\r\nok", "ok", false, ""},
		"cut":          {"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", "ok", false, "unexpected EOF"},
		"cut chunk":    {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nok", "ok", false, "unexpected EOF"},
		"more":         {ok + "x", "ok", false, ""},
		"interim":      {"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + ok, "ok", true, ""},
		"interims":     {strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", maxInterim+1) + ok, "", false, errInterim.Error()},
		"switch":       {"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "", false, errSwitch.Error()},
		"large header": {"HTTP/1.1 200 OK\r\nA: " + strings.Repeat("a", 70<<10) + "\r\n" + ok[17:], "", false, errHeaderTooLarge.Error()},
		"large later":  {"HTTP/1.1 200 OK\r\nContent-Length: 70000\r\n\r\n" + strings.Repeat("a", 70000), strings.Repeat("a", 70000), true, ""},
		"no HTTP":      {"hello\r\n\r\n", "", false, "malformed HTTP"},
		"nothing":      {"", "", false, "EOF"},
		"two lengths":  {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok", "", false, "Content-Length"},
	} {
		t.Run(name, func(t *testing.T) {
			hold := make(chan struct{})
			addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
				if take(br) != nil {
					return
				}
				_, _ = io.WriteString(c, a.answer)
				if a.kept || name == "more" {
					<-hold
				}
			})
			c := newClient(t, addr)
			_, got, err := post(t, c, "x")
			if got != a.body || a.err == "" && err != nil || a.err != "" && (err == nil || !strings.Contains(err.Error(), a.err)) {
				t.Errorf("%.100q, %v", got, err)
			}
			if name == "more" { // the byte may come after the body
				for c.Idle() > 0 {
					c.Reap()
				}
			}
			if kept := c.Idle() == 1; kept != a.kept {
				t.Errorf("the connection is kept: %v", kept)
			}
			close(hold)
		})
	}
}

// TestEarlyAnswer: a server that answers without reading a large body is heard, and the connection not used again.
func TestEarlyAnswer(t *testing.T) {
	hold := make(chan struct{})
	addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		_, _ = br.ReadString('\n')
		_, _ = io.WriteString(c, "HTTP/1.1 413 Large\r\nContent-Length: 2\r\n\r\nno")
		<-hold
	})
	c := newClient(t, addr)
	status, got, err := post(t, c, strings.Repeat("x", 64<<20))
	if err != nil || status != 413 || got != "no" || c.Idle() != 0 {
		t.Errorf("%d %q, %v, %d idle", status, got, err, c.Idle())
	}
	close(hold)
}

// TestContext: its end ends a request in every phase, with the cause, and closes the connection.
func TestContext(t *testing.T) {
	why := errors.New("the reason")
	for _, phase := range []string{"dial", "write", "header", "body"} {
		t.Run(phase, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			seen := make(chan struct{}) // the phase is reached
			gone := make(chan struct{}) // the server has seen the end
			addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
				if phase == "write" {
					_, _ = br.ReadString('\n')
					close(seen)
					<-ctx.Done()
					_, _ = io.Copy(io.Discard, br)
					close(gone)
					return
				}
				if take(br) != nil {
					return
				}
				if phase == "body" {
					_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nhalf")
				}
				close(seen)
				_, _ = br.ReadByte()
				close(gone)
			})
			c := newClient(t, addr)
			body := []byte("x")
			switch phase {
			case "dial":
				c.Dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
					close(seen)
					<-ctx.Done()
					close(gone)
					return nil, ctx.Err()
				}
			case "write":
				body = bytes.Repeat(body, 64<<20)
			}
			answered := make(chan struct{}) // the header has been read
			go func() {
				<-seen
				if phase == "body" {
					<-answered
				}
				cancel(why)
			}()
			resp, err := c.Post(ctx, &Request{Path: "/", Body: [2][]byte{nil, body}})
			if phase == "body" {
				if err != nil {
					t.Fatal(err)
				}
				close(answered)
				if _, err := io.ReadAll(resp.Body); err == nil {
					t.Error("the body came to an end")
				}
				_ = resp.Body.Close()
			} else if !errors.Is(err, why) {
				t.Errorf("%v", err)
			}
			<-gone
			if c.Idle() != 0 {
				t.Errorf("%d connections are idle", c.Idle())
			}
		})
	}
}

// TestUnread: a body that was not read to its end costs the connection, at once.
func TestUnread(t *testing.T) {
	gone := make(chan struct{})
	addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		_ = take(br)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nhalf")
		_, _ = br.ReadByte()
		close(gone)
	})
	c := newClient(t, addr)
	resp, err := c.Post(t.Context(), &Request{Path: "/"})
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	<-gone
	if _, err := resp.Body.Read(make([]byte, 1)); !errors.Is(err, errClosed) || c.Idle() != 0 {
		t.Errorf("%v, %d idle", err, c.Idle())
	}
}

// TestPool: it is bounded, old connections go, and CloseIdle is meant for those in use as well.
func TestPool(t *testing.T) {
	addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		for take(br) == nil {
			_, _ = io.WriteString(c, ok)
		}
	})
	c := newClient(t, addr)
	open := func(n int) (all []*http.Response) {
		for range n {
			resp, err := c.Post(t.Context(), &Request{Path: "/"})
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, resp)
		}
		return all
	}
	read := func(all []*http.Response) {
		for _, r := range all {
			_, _ = io.Copy(io.Discard, r.Body)
			_ = r.Body.Close()
		}
	}
	if read(open(c.MaxIdle + 3)); c.Idle() != c.MaxIdle {
		t.Errorf("%d idle, want %d", c.Idle(), c.MaxIdle)
	}
	c.IdleTimeout = 0
	if c.Reap(); c.Idle() != 0 {
		t.Errorf("%d idle after their time", c.Idle())
	}
	c.IdleTimeout = time.Minute
	used := open(2)
	c.CloseIdle()
	if read(used); c.Idle() != 0 {
		t.Errorf("%d idle, opened before CloseIdle", c.Idle())
	}
	if read(open(1)); c.Idle() != 1 {
		t.Errorf("%d idle, want 1", c.Idle())
	}
}

// TestConcurrent: many goroutines share the pool, and each gets its own answer.
func TestConcurrent(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) }))
	t.Cleanup(srv.Close)
	c := newClient(t, srv.Listener.Addr().String())
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 50 {
				want := fmt.Sprintf("%d of %d", i, g)
				if _, got, err := post(t, c, want); err != nil || got != want {
					t.Errorf("%q, %v, want %q", got, err, want)
					return
				}
			}
		})
	}
	wg.Wait()
	if n := c.Idle(); n < 1 || n > c.MaxIdle {
		t.Errorf("%d idle", n)
	}
}

// TestAbort: it ends a Read under way, and never a later request of the same connection.
func TestAbort(t *testing.T) {
	addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		for n := 0; take(br) == nil; n++ {
			if n == 3 {
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nhalf")
				continue
			}
			_, _ = io.WriteString(c, ok)
		}
	})
	c := newClient(t, addr)
	for n := range 4 {
		resp, err := c.Post(t.Context(), &Request{Path: "/"})
		if err != nil {
			t.Fatal(err)
		}
		if n == 3 {
			read := make(chan error, 1)
			go func() {
				_, err := io.ReadAll(resp.Body)
				read <- err
			}()
			Abort(resp)
			if err := <-read; err == nil {
				t.Error("the body came to an end")
			}
			break
		}
		if b, err := io.ReadAll(resp.Body); string(b) != "ok" || err != nil {
			t.Errorf("%q, %v", b, err)
		}
		Abort(resp) // too late
		if c.Idle() != 1 {
			t.Errorf("%d idle connections", c.Idle())
		}
	}
	if c.Idle() != 0 {
		t.Errorf("%d idle connections", c.Idle())
	}
}
