package wire

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The forms of answers that a cut anywhere must not change.
var forms = map[string]struct{ answer, body string }{
	"length":   {ok, "ok"},
	"chunks":   {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nok\r\nc\r\n, and so on.\r\n0\r\n\r\n", "ok, and so on."},
	"trailer":  {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nA: b\r\nC: d\r\n\r\n", "ok"},
	"uncommon": {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nA: b\r\nA: c\r\n\r\n2\r\nok\r\n0\r\n\r\n", "ok"},
	"bare":     {"HTTP/1.1 200 OK\nContent-Length: 2\n\nok", "ok"},
	"interim":  {"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + ok, "ok"},
	"empty":    {"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", ""},
}

// TestPieces: an answer that comes in two pieces is the same wherever it was cut, and leaves the connection usable.
func TestPieces(t *testing.T) {
	for name, f := range forms {
		t.Run(name, func(t *testing.T) {
			more := make(chan struct{}, 1)
			addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
				for n := 0; take(br) == nil; n = (n + 1) % (len(f.answer) + 1) {
					_, _ = io.WriteString(c, f.answer[:n])
					select {
					case more <- struct{}{}: // the reader is let go, to find the rest missing, or not
					default:
					}
					_, _ = io.WriteString(c, f.answer[n:])
				}
			})
			c := newClient(t, addr)
			for n := range len(f.answer) + 1 {
				if _, got, err := post(t, c, "x"); err != nil || got != f.body {
					t.Fatalf("cut at %d: %q, %v", n, got, err)
				}
				<-more
				if c.Idle() != 1 {
					t.Fatalf("cut at %d: the connection is not kept", n)
				}
			}
		})
	}
}

// TestHandsOut: content that has come is handed out although the worker hangs in the framing after it.
func TestHandsOut(t *testing.T) {
	const head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
	for name, rest := range map[string]string{
		"before the line's end": "", "in it": "\r", "before a chunk": "\r\n", "in a chunk's head": "\r\n1f", "before its content": "\r\n1f\r\n",
		"before the last line": "\r\n0\r\n", "in it, too": "\r\n0\r\n\r", "in a trailer": "\r\n0\r\nA: b\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			hold := make(chan struct{})
			addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
				_ = take(br)
				_, _ = io.WriteString(c, head+"5\r\nevent"+rest)
				<-hold
			})
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // what hangs fails
			defer cancel()
			resp, err := newClient(t, addr).Post(ctx, &Request{Path: "/"})
			if err != nil {
				t.Fatal(err)
			}
			var got [5]byte
			if _, err := io.ReadFull(resp.Body, got[:]); err != nil || string(got[:]) != "event" {
				t.Errorf("%q, %v", got, err)
			}
			_ = resp.Body.Close()
			close(hold)
		})
	}
}

// TestEndings: how a connection ends that was waited on, and that nothing of what came before is lost.
func TestEndings(t *testing.T) {
	const part = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nha"
	for name, e := range map[string]struct {
		first string
		end   func(c *net.TCPConn)
		got   string
		is    error
	}{
		"closed":            {"", func(c *net.TCPConn) { _ = c.Close() }, "", io.ErrUnexpectedEOF},
		"reset":             {"", func(c *net.TCPConn) { _ = c.SetLinger(0); _ = c.Close() }, "", syscall.ECONNRESET},
		"closed in a head":  {part[:17], func(c *net.TCPConn) { _ = c.Close() }, "", io.ErrUnexpectedEOF},
		"closed in a body":  {part, func(c *net.TCPConn) { _ = c.CloseWrite() }, "ha", io.ErrUnexpectedEOF},
		"closed behind it":  {part + "lf!", func(c *net.TCPConn) { _ = c.Close() }, "half!", nil},
		"half-closed early": {"", func(c *net.TCPConn) { _ = c.CloseWrite() }, "", io.ErrUnexpectedEOF},
	} {
		t.Run(name, func(t *testing.T) {
			addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
				if take(br) != nil {
					return
				}
				_, _ = io.WriteString(c, ok)
				if take(br) != nil { // an idle connection, so that it is looked at
					return
				}
				_, _ = io.WriteString(c, e.first)
				e.end(c.(*net.TCPConn))
				_, _ = io.Copy(io.Discard, br)
			})
			c := newClient(t, addr)
			if _, got, err := post(t, c, "x"); err != nil || got != "ok" {
				t.Fatalf("%q, %v", got, err)
			}
			if _, got, err := post(t, c, "x"); got != e.got || !errors.Is(err, e.is) {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

// TestAbortAnywhere: the context's end, at any moment of an exchange, ends it once and closes the connection or leaves a sound one.
func TestAbortAnywhere(t *testing.T) {
	addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		for take(br) == nil {
			_, _ = io.WriteString(c, forms["chunks"].answer)
		}
	})
	c := newClient(t, addr)
	for range 300 {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			cancel()
		}()
		resp, err := c.Post(ctx, &Request{Path: "/"})
		if err == nil {
			b, err := io.ReadAll(resp.Body)
			if err == nil && string(b) != forms["chunks"].body {
				t.Fatalf("%q", b)
			}
			_ = resp.Body.Close()
		} else if !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		<-ended
		if _, got, err := post(t, c, strings.Repeat("x", 100)); err != nil || got != forms["chunks"].body {
			t.Fatalf("the next: %q, %v", got, err)
		}
	}
}

// TestMore: the field beside the header is sent, once.
func TestMore(t *testing.T) {
	got := make(chan http.Header, 1)
	addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		if r, err := http.ReadRequest(br); err == nil {
			got <- r.Header
			_, _ = io.WriteString(c, ok)
		}
	})
	resp, err := newClient(t, addr).Post(t.Context(), &Request{Path: "/", Header: http.Header{"A": {"1"}}, More: [2]string{"B", "2"}})
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if h := <-got; len(h) != 3 || h.Get("A") != "1" || len(h["B"]) != 1 || h.Get("B") != "2" { // and Content-Length
		t.Errorf("%v", h)
	}
}
