package router

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// writes records what is written to connections, a write each.
type writes struct {
	net.Listener
	mu  sync.Mutex
	all []string
}

type recordedConn struct {
	net.Conn
	w *writes
}

func (w *writes) Accept() (net.Conn, error) {
	c, err := w.Listener.Accept()
	return &recordedConn{c, w}, err
}

func (c *recordedConn) Write(p []byte) (int, error) {
	c.w.mu.Lock()
	c.w.all = append(c.w.all, string(p))
	c.w.mu.Unlock()
	return c.Conn.Write(p)
}

// chunked is text as one chunk.
func chunked(text string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(text), text) }

// streamWorker answers streams with one write, the end included or not.
func streamWorker(t *testing.T, end string) string {
	t.Helper()
	hold := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if !strings.HasSuffix(r.URL.Path, "completions") {
			return
		}
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		defer c.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"+chunked(role)+chunked(token)+chunked(last)+chunked(done)+end)
		if end == "" {
			<-hold
		}
	}))
	t.Cleanup(srv.Close)
	t.Cleanup(func() { close(hold) })
	return srv.Listener.Addr().String()
}

// TestOneWrite: a stream's last events and its end go to the client in one write, with the head if they came at once; and [DONE] does not wait for a worker that does not end.
func TestOneWrite(t *testing.T) {
	for name, end := range map[string]string{"ends": chunkEnd, "does not end": ""} {
		t.Run(name, func(t *testing.T) {
			r, err := New(Config{Prefills: []Backend{{URL: "http://" + streamWorker(t, chunkEnd), BootstrapPort: 1}}, Decodes: []Backend{{URL: "http://" + streamWorker(t, end)}}})
			if err != nil {
				t.Fatal(err)
			}
			srv := httptest.NewUnstartedServer(r.Handler())
			w := &writes{Listener: srv.Listener}
			srv.Listener = w
			srv.Start()
			t.Cleanup(func() {
				srv.Close()
				r.Close()
			})
			c, err := net.Dial("tcp", srv.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(20 * time.Second))
			req, _ := http.NewRequest(http.MethodPost, "http://router/v1/chat/completions", strings.NewReader(streamBody))
			if err := req.Write(c); err != nil {
				t.Fatal(err)
			}
			resp, err := http.ReadResponse(bufio.NewReader(c), req)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			if err != nil || !strings.HasSuffix(string(body), done) || resp.ContentLength != -1 {
				t.Fatalf("%q, %v, %d bytes announced", body, err, resp.ContentLength)
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			final := w.all[len(w.all)-1]
			if with := strings.Contains(final, "[DONE]") && strings.HasSuffix(final, chunkEnd); with != (end != "") {
				t.Errorf("written: %q", w.all)
			}
		})
	}
}
