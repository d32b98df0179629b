package router

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// These tests use real sockets, whose failures differ from those of pipes.

// overTCP starts a router between one prefill and one decode worker at real addresses.
func overTCP(tb testing.TB, c Config, prefill, decode string) *httptest.Server {
	tb.Helper()
	c.Prefills = []Backend{{URL: "http://" + prefill, BootstrapPort: 1}}
	c.Decodes = []Backend{{URL: "http://" + decode}}
	r, err := New(c)
	if err != nil {
		tb.Fatal(err)
	}
	srv := httptest.NewServer(r.Handler())
	tb.Cleanup(func() {
		srv.CloseClientConnections()
		srv.Close()
		r.Close()
	})
	return srv
}

// worker serves one script at a real address.
func tcpWorker(tb testing.TB, s script) string {
	tb.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if strings.HasSuffix(r.URL.Path, "completions") {
			s(w, r, nil)
		}
	}))
	tb.Cleanup(srv.Close)
	return srv.Listener.Addr().String()
}

// rst answers what it is told and then resets the connection, as a killed process does.
func rst(first string) script {
	return func(w http.ResponseWriter, _ *http.Request, _ *leg1) {
		if first != "" {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, first)
			_ = http.NewResponseController(w).Flush()
		}
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		_ = conn.(*net.TCPConn).SetLinger(0)
		_ = conn.Close()
	}
}

// meeting lets the legs of one request go on when all of them have arrived: over real sockets no time is long enough for that.
type meeting struct {
	missing atomic.Int32
	all     chan struct{}
}

func newMeeting(n int32) *meeting {
	m := &meeting{all: make(chan struct{})}
	m.missing.Store(n)
	return m
}

func (m *meeting) arrive(ctx context.Context) {
	if m.missing.Add(-1) == 0 {
		close(m.all)
	}
	select {
	case <-m.all:
	case <-ctx.Done():
	}
}

func postTCP(t *testing.T, url string, header ...string) got {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader(streamBody))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	start := time.Now()
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	defer http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	body, err := io.ReadAll(resp.Body)
	return got{status: resp.StatusCode, header: resp.Header, body: string(body), err: err, took: time.Since(start)}
}

func TestResetOverTCP(t *testing.T) {
	ok := tcpWorker(t, okPrefill)
	wait := tcpWorker(t, silent)
	e := postTCP(t, overTCP(t, Config{}, ok, tcpWorker(t, rst(""))).URL).fails(t, 502, "peer_lost")
	if !strings.Contains(e.Error.Message, "broke the connection") {
		t.Errorf("message %q", e.Error.Message)
	}
	postTCP(t, overTCP(t, Config{}, tcpWorker(t, rst("")), wait).URL).fails(t, 502, "peer_lost")
	// The bytes before a reset may be lost with it: either way the client is told.
	g := postTCP(t, overTCP(t, Config{}, ok, tcpWorker(t, rst(role+token))).URL)
	if g.status == http.StatusOK {
		g.breaks(t, role+token, "peer_lost")
	} else {
		g.fails(t, 502, "peer_lost")
	}
}

func TestRefusedOverTCP(t *testing.T) {
	// Bound, but nobody listens: no other process can take the port either.
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	at, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	gone := fmt.Sprintf("127.0.0.1:%d", at.(*syscall.SockaddrInet4).Port)
	e := postTCP(t, overTCP(t, Config{}, gone, tcpWorker(t, silent)).URL).fails(t, 503, "unavailable")
	if !strings.Contains(e.Error.Message, "prefill worker") || !strings.Contains(e.Error.Message, "connection refused") {
		t.Errorf("message %q", e.Error.Message)
	}
}

// A stopped process: the kernel still takes its connections, nobody answers.
func TestStoppedOverTCP(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	g := postTCP(t, overTCP(t, Config{}, tcpWorker(t, okPrefill), l.Addr().String()).URL, HeaderTimeout, "300")
	g.fails(t, 504, "deadline")
	if g.took < 300*time.Millisecond || g.took > must {
		t.Errorf("took %v", g.took)
	}
}

// BenchmarkStream is one answer of eight tokens through the router, in parallel.
func BenchmarkStream(b *testing.B) {
	answer := role + strings.Repeat(token, 8) + last + done
	srv := overTCP(b, Config{}, tcpWorker(b, okPrefill), tcpWorker(b, sse(role, token, token, token, token, token, token, token, token, last, done)))
	tr := &http.Transport{MaxIdleConnsPerHost: 64}
	defer tr.CloseIdleConnections()
	client := &http.Client{Transport: tr}
	b.ReportAllocs()
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			resp, err := client.Post(srv.URL+"/v1/chat/completions", "application/json", strings.NewReader(streamBody))
			if err != nil {
				b.Error(err)
				return
			}
			body, err := io.ReadAll(resp.Body)
			if cerr := resp.Body.Close(); err != nil || cerr != nil || string(body) != answer {
				b.Errorf("%q, %v, %v", body, err, cerr)
				return
			}
		}
	})
}

// BenchmarkFeed is the reading of one event of a stream.
func BenchmarkFeed(b *testing.B) {
	s := new(stream)
	s.reset(2, "streaming", 1)
	if _, _, err := s.feed([]byte(token)); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.SetBytes(int64(len(token)))
	for b.Loop() {
		if _, e, err := s.feed([]byte(token)); e != nil || err != nil {
			b.Fatal(e, err)
		}
	}
}

// hungUpConn is a connection that its server has closed before anything was sent.
type hungUpConn struct{ net.Conn }

func (hungUpConn) Read([]byte) (int, error)    { return 0, io.EOF }
func (hungUpConn) Write(p []byte) (int, error) { return len(p), nil }

// TestHungUpBeforeTheRequest: a process that ends with connections in its accept queue closes them. net/http has an
// error without a name for that, which is no fault of the worker's HTTP.
func TestHungUpBeforeTheRequest(t *testing.T) {
	ok := tcpWorker(t, okPrefill)
	dial := new(net.Dialer)
	seen := 0
	for range 100 {
		c := Config{MaxRetries: -1, DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dial.DialContext(ctx, network, ok)
			if err == nil && addr != ok {
				conn = hungUpConn{conn}
			}
			return conn, err
		}}
		g := postTCP(t, overTCP(t, c, ok, "127.0.0.1:1").URL)
		if g.status == http.StatusServiceUnavailable { // a probe was faster
			continue
		}
		if e := g.fails(t, 502, "peer_lost"); strings.Contains(e.Error.Message, "idle") {
			seen++
		}
	}
	t.Logf("%d of 100 were found before the request was sent", seen) // more with the race detector
	l := &leg{a: &attempt{rooms: []uint64{1}}, w: &worker{side: room.SideReceiver, kick: make(chan struct{}, 1)}}
	if f := l.broken(errors.New("http: server closed idle connection")); f.cause().Code != room.CodePeerLost || f.blame != blameDecode {
		t.Errorf("net/http's words for it become %v, blame %v", f, f.blame)
	}
}
