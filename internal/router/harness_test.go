package router

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memNet is a network in memory. Its connections are net.Pipe's, so it works
// in a synctest bubble, where time passes only when everybody waits.
type memNet struct {
	mu        sync.Mutex
	listeners map[string]*memListener
}

type memListener struct {
	n     *memNet
	addr  string
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newMemNet() *memNet { return &memNet{listeners: map[string]*memListener{}} }

func (n *memNet) listen(addr string) *memListener {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := &memListener{n: n, addr: addr, conns: make(chan net.Conn), done: make(chan struct{})}
	n.listeners[addr] = l
	return l
}

func (n *memNet) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	n.mu.Lock()
	l := n.listeners[addr]
	n.mu.Unlock()
	if l == nil {
		return nil, &net.OpError{Op: "dial", Net: "mem", Err: syscall.ECONNREFUSED}
	}
	ours, theirs := net.Pipe()
	select {
	case l.conns <- theirs:
		return ours, nil
	case <-l.done:
		return nil, &net.OpError{Op: "dial", Net: "mem", Err: syscall.ECONNREFUSED}
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *memListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *memListener) Close() error {
	l.once.Do(func() {
		close(l.done)
		l.n.mu.Lock()
		defer l.n.mu.Unlock()
		if l.n.listeners[l.addr] == l {
			delete(l.n.listeners, l.addr)
		}
	})
	return nil
}

type memAddr string

func (a memAddr) Network() string     { return "mem" }
func (a memAddr) String() string      { return string(a) }
func (l *memListener) Addr() net.Addr { return memAddr(l.addr) }

// leg1 is one request as a fake worker saw it.
type leg1 struct {
	body   []byte
	fields map[string]json.RawMessage
	header http.Header
	// closed: its connection was closed from the other side before the handler ended.
	closed bool
	at     time.Time
	gone   time.Time
}

func (l *leg1) rid() string {
	var s string
	_ = json.Unmarshal(l.fields["rid"], &s)
	return s
}

// room is the request's first room.
func (l *leg1) room() string {
	room, _, _ := strings.Cut(strings.Trim(string(l.fields["bootstrap_room"]), "[]"), ",")
	return room
}

// script is how a fake worker treats one generating request. It should return when r's context ends.
type script func(w http.ResponseWriter, r *http.Request, l *leg1)

// fake is a worker that behaves as its script says.
type fake struct {
	t      *testing.T
	net    *memNet
	addr   string
	mu     sync.Mutex
	script script
	health func(w http.ResponseWriter, r *http.Request)
	info   func(w http.ResponseWriter, r *http.Request) // of other paths
	load   string                                       // what /metrics says; "": nothing of load
	legs   []*leg1
	aborts map[string]time.Time // rid and room of abort_request, first time
	stuck  bool                 // answers no abort_request
	other  []string             // other requests: "GET /path"
	srv    *http.Server
	served chan error
}

func (n *memNet) worker(t *testing.T, addr string, s script) *fake {
	f := &fake{t: t, net: n, addr: addr, script: s, aborts: map[string]time.Time{}}
	f.start()
	return f
}

func (f *fake) start() {
	f.srv = &http.Server{Handler: f}
	f.served = make(chan error, 1)
	l := f.net.listen(f.addr)
	go func(srv *http.Server, served chan error) { served <- srv.Serve(l) }(f.srv, f.served)
}

// kill closes the listener and every connection. One goroutine at a time.
func (f *fake) kill() {
	if f.served == nil {
		return
	}
	_ = f.srv.Close()
	<-f.served
	f.served = nil
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	switch r.URL.Path {
	case "/generate", "/v1/completions", "/v1/chat/completions":
		l := &leg1{body: body, header: r.Header.Clone(), at: time.Now()}
		if err := json.Unmarshal(body, &l.fields); err != nil {
			f.t.Errorf("%s got a body that is not JSON: %v: %s", f.addr, err, body)
		}
		f.mu.Lock()
		f.legs = append(f.legs, l)
		s := f.script
		f.mu.Unlock()
		defer func() { // also when the script breaks the connection itself
			f.mu.Lock()
			defer f.mu.Unlock()
			l.closed, l.gone = r.Context().Err() != nil, time.Now()
		}()
		s(w, r, l)
	case "/health":
		f.mu.Lock()
		h := f.health
		f.mu.Unlock()
		if h != nil {
			h(w, r)
		}
	case "/metrics":
		f.mu.Lock()
		text := f.load
		f.mu.Unlock()
		_, _ = io.WriteString(w, text)
	case "/abort_request":
		var a struct {
			RID  string          `json:"rid"`
			Room json.RawMessage `json:"bootstrap_room"`
		}
		_ = json.Unmarshal(body, &a)
		f.mu.Lock()
		if key := a.RID + " " + string(a.Room); f.aborts[key].IsZero() {
			f.aborts[key] = time.Now()
		}
		stuck := f.stuck
		f.mu.Unlock()
		if stuck {
			<-r.Context().Done()
		}
		_, _ = io.WriteString(w, `{"aborted":1}`)
	default:
		f.mu.Lock()
		f.other = append(f.other, r.Method+" "+r.URL.Path)
		info := f.info
		f.mu.Unlock()
		if info != nil {
			info(w, r)
			return
		}
		_, _ = fmt.Fprintf(w, `{"worker":%q,"path":%q}`, f.addr, r.URL.Path)
	}
}

func (f *fake) set(s script) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.script = s
}

// setMetrics has /metrics answer with text.
func (f *fake) setMetrics(text string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.load = text
}

// count is the number of generating requests seen.
func (f *fake) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.legs)
}

// leg returns a copy of request i, from the end if negative.
func (f *fake) leg(i int) leg1 {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if i < 0 {
		i += len(f.legs)
	}
	if i < 0 || i >= len(f.legs) {
		f.t.Fatalf("%s saw %d requests", f.addr, len(f.legs))
	}
	return *f.legs[i]
}

// released fails the test unless request i was released both ways, within limit after since.
func (f *fake) released(i int, since time.Time, limit time.Duration) {
	f.t.Helper()
	l := f.leg(i)
	f.mu.Lock()
	abort, told := f.aborts[l.rid()+" "+l.room()]
	f.mu.Unlock()
	switch {
	case !l.closed:
		f.t.Errorf("%s: the connection of request %d is still open", f.addr, i)
	case l.gone.Sub(since) > limit:
		f.t.Errorf("%s: the connection of request %d was closed after %v", f.addr, i, l.gone.Sub(since))
	}
	switch {
	case !told:
		f.t.Errorf("%s was not told to abort request %d, %s", f.addr, i, l.rid())
	case abort.Sub(since) > limit:
		f.t.Errorf("%s was told to abort request %d after %v", f.addr, i, abort.Sub(since))
	}
}

// bed is a router between fakes.
type bed struct {
	t       *testing.T
	net     *memNet
	r       *Router
	client  *http.Client
	log     *lockedLog
	closers []func()
}

type lockedLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// inBubble runs f with a router between prefill workers p0.. and decode workers d0.., one for each script.
func inBubble(t *testing.T, c Config, prefills, decodes []script, f func(t *testing.T, b *bed, p, d []*fake)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bed{t: t, net: newMemNet(), log: &lockedLog{}}
		var p, d []*fake
		for i, s := range prefills {
			p = append(p, b.net.worker(t, "p"+strconv.Itoa(i)+":80", s))
			c.Prefills = append(c.Prefills, Backend{URL: "http://" + p[i].addr, BootstrapHost: "boot" + strconv.Itoa(i), BootstrapPort: 8998 + i})
		}
		for i, s := range decodes {
			d = append(d, b.net.worker(t, "d"+strconv.Itoa(i)+":80", s))
			c.Decodes = append(c.Decodes, Backend{URL: "http://" + d[i].addr})
		}
		c.DialContext = b.net.dial
		c.Log = slog.New(slog.NewTextHandler(b.log, nil))
		t.Cleanup(func() {
			b.close()
			for _, w := range append(p, d...) {
				w.kill()
			}
			<-time.After(time.Second) // net/http lingers on connections that it closed itself
		})
		b.start(c)
		synctest.Wait() // the first probes have ended
		f(t, b, p, d)
	})
}

func (b *bed) start(c Config) {
	b.t.Helper()
	r, err := New(c)
	if err != nil {
		b.t.Fatal(err)
	}
	b.r = r
	srv := &http.Server{Handler: r.Handler(), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
	l := b.net.listen("router:80")
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	tr := &http.Transport{DialContext: b.net.dial}
	b.client = &http.Client{Transport: tr}
	b.closers = append(b.closers, func() {
		tr.CloseIdleConnections()
		_ = srv.Close()
		<-served
		r.Close()
	})
}

func (b *bed) close() {
	for _, f := range b.closers {
		f()
	}
	if n := b.r.inflight.Load(); n != 0 {
		b.t.Errorf("%d requests are counted as in flight at the end", n)
	}
	if n := b.r.live.count(); n != 0 {
		b.t.Errorf("%d requests are registered at the end", n)
	}
	for _, w := range b.r.all() {
		if n := w.inflight.Load(); n != 0 {
			b.t.Errorf("%d legs are counted at %s at the end", n, w.name)
		}
	}
}

// answer is what a client got.
type got struct {
	status int
	header http.Header
	body   string
	err    error // of the body: nil if it ended properly
	took   time.Duration
}

// post sends a body and reads the answer to its end.
func (b *bed) post(ctx context.Context, path, body string, header ...string) got {
	b.t.Helper()
	return b.postTo(ctx, "http://router"+path, body, header...)
}

func (b *bed) postTo(ctx context.Context, url, body string, header ...string) got {
	b.t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	start := time.Now()
	resp, err := b.client.Do(req)
	if err != nil {
		return got{err: err, took: time.Since(start)}
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return got{status: resp.StatusCode, header: resp.Header, body: string(text), err: err, took: time.Since(start)}
}

func (b *bed) chat(header ...string) got {
	b.t.Helper()
	return b.post(b.t.Context(), "/v1/chat/completions", chatBody, header...)
}

func (b *bed) chatStream(header ...string) got {
	b.t.Helper()
	return b.post(b.t.Context(), "/v1/chat/completions", streamBody, header...)
}

func (b *bed) get(path string) got {
	b.t.Helper()
	start := time.Now()
	resp, err := b.client.Get("http://router" + path)
	if err != nil {
		return got{err: err}
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return got{status: resp.StatusCode, header: resp.Header, body: string(text), err: err, took: time.Since(start)}
}

const (
	chatBody   = `{"model":"m","messages":[{"role":"user","content":"hi"}]}`
	streamBody = `{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}`
)

// wireError is an error object as clients see it.
type wireError struct {
	Error struct {
		Message   string `json:"message"`
		Cause     string `json:"cause"`
		Code      string `json:"code"`
		Side      string `json:"side"`
		Phase     string `json:"phase"`
		Room      string `json:"room"`
		Peer      string `json:"peer"`
		Retryable bool   `json:"retryable"`
	} `json:"error"`
}

// fails checks that g is an error status with this cause, and returns the error.
func (g got) fails(t *testing.T, status int, cause string) wireError {
	t.Helper()
	var e wireError
	if g.err != nil || g.status != status {
		t.Fatalf("got %d %q (%v); want status %d", g.status, g.body, g.err, status)
	}
	if err := json.Unmarshal([]byte(g.body), &e); err != nil || e.Error.Cause != cause {
		t.Fatalf("got %s (%v); want cause %q", g.body, err, cause)
	}
	return e
}

// breaks checks that g is a stream that began with prefix, then told of one error with this cause, and
// did not end properly.
func (g got) breaks(t *testing.T, prefix, cause string) wireError {
	t.Helper()
	if g.status != http.StatusOK || !errors.Is(g.err, io.ErrUnexpectedEOF) {
		t.Fatalf("got %d, %q, end %v; want a stream that breaks off", g.status, g.body, g.err)
	}
	rest, ok := strings.CutPrefix(g.body, prefix)
	data, isEvent := strings.CutPrefix(rest, "data: ")
	var e wireError
	if !ok || !isEvent || !strings.HasSuffix(rest, "\n\n") || strings.Count(rest, "\n\n") != 1 || json.Unmarshal([]byte(data), &e) != nil {
		t.Fatalf("got %q; want %q and one error event", g.body, prefix)
	}
	if e.Error.Cause != cause || e.Error.Retryable {
		t.Fatalf("got error %s; want cause %q, not retryable", rest, cause)
	}
	return e
}

func (g got) ok(t *testing.T, body string) {
	t.Helper()
	if g.err != nil || g.status != http.StatusOK || g.body != body {
		t.Fatalf("got %d %q (%v); want 200 %q", g.status, g.body, g.err, body)
	}
}

// Scripts.

const (
	chatAnswer = `{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}]}`
	genAnswer  = `{"text":"hello","meta_info":{"id":"x","finish_reason":{"type":"length","length":1}}}`
	genAbort   = `{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"no memory","status_code":503}}}`
	role       = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n"
	token      = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hel\"},\"finish_reason\":null}]}\n\n"
	last       = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"lo\"},\"finish_reason\":\"stop\"}]}\n\n"
	abortLast  = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"abort\"}]}\n\n"
	done       = "data: [DONE]\n\n"
)

// after waits first.
func after(d time.Duration, s script) script {
	return func(w http.ResponseWriter, r *http.Request, l *leg1) {
		select {
		case <-time.After(d):
			s(w, r, l)
		case <-r.Context().Done():
		}
	}
}

// say answers with a status and a body.
func say(status int, body string, header ...string) script {
	return func(w http.ResponseWriter, _ *http.Request, _ *leg1) {
		w.Header().Set("Content-Type", "application/json")
		for i := 0; i < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// silent never answers.
func silent(_ http.ResponseWriter, r *http.Request, _ *leg1) { <-r.Context().Done() }

// sse streams parts, see writeParts.
func sse(parts ...any) script {
	return func(w http.ResponseWriter, r *http.Request, _ *leg1) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush()
		writeParts(w, r, parts)
	}
}

// writeParts writes an answer's parts: a duration waits, a nil waits until the leg is released, errReset breaks the
// connection.
func writeParts(w http.ResponseWriter, r *http.Request, parts []any) {
	for _, p := range parts {
		switch p := p.(type) {
		case string:
			_, _ = io.WriteString(w, p)
			w.(http.Flusher).Flush()
		case time.Duration:
			select {
			case <-time.After(p):
			case <-r.Context().Done():
				return
			}
		case nil:
			<-r.Context().Done()
			return
		case error:
			panic(http.ErrAbortHandler)
		}
	}
}

var errReset = errors.New("reset")

// reset breaks the connection before anything is answered.
func reset(http.ResponseWriter, *http.Request, *leg1) { panic(http.ErrAbortHandler) }

var (
	okAnswer  = say(200, chatAnswer)
	okStream  = sse(role, token, last, done)
	okPrefill = say(200, chatAnswer)
)
