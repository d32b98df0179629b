package edge

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"testing"
	"time"
)

// TestSurplus: connections over the limit that say nothing neither keep others from asking after the server's health nor grow in number; all are counted
// until they end.
func TestSurplus(t *testing.T) {
	const must = 20 * time.Second
	limit := NewConnections(1)
	limit.Always = func(path string) bool { return path == "/health" }
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "fine") })
	srv := NewServer(limit.Wrap(h), Limits{Connections: limit}, nil, slog.New(slog.DiscardHandler))
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	defer func() {
		_ = srv.Close()
		<-served
		tick := time.NewTicker(time.Millisecond) // their goroutines end after the server
		defer tick.Stop()
		for end := time.Now().Add(must); limit.Open() > 0; <-tick.C {
			if time.Now().After(end) {
				t.Errorf("%d connections are counted after the server's end", limit.Open())
				return
			}
		}
	}()
	dial := func() net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(must))
		return c
	}
	ask := func(c net.Conn, path string, want int) {
		t.Helper()
		fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		if _ = resp.Body.Close(); resp.StatusCode != want {
			t.Errorf("%s: status %d, want %d", path, resp.StatusCode, want)
		}
	}
	within := dial()
	ask(within, "/", 200)
	oldest := dial()
	for range surplus + 5 {
		dial()
	}
	ask(dial(), "/health", 200) // the server has accepted all that were before it
	ask(dial(), "/", 503)
	if n := limit.Open(); n > 1+surplus {
		t.Errorf("%d connections are open, want at most %d", n, 1+surplus)
	}
	if n, err := oldest.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("the oldest over the limit is still open: %d, %v", n, err)
	} else if e, ok := err.(net.Error); ok && e.Timeout() {
		t.Error("the oldest over the limit is still open")
	}
	ask(within, "/", 200) // it has lost nothing
}

// TestDefaultConnections: it is a number that a server can have.
func TestDefaultConnections(t *testing.T) {
	if n := DefaultConnections(); n < 1 || n > 65536 {
		t.Errorf("%d", n)
	}
	if n := NewConnections(7).Most(); n != 7 {
		t.Errorf("a limit of %d, want 7", n)
	}
}
