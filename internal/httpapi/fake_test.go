package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sched"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// step is what a fake stream does at one call of Next.
type step struct {
	ev    sched.Event
	err   error
	block bool // until the request is cancelled or ctx ends
}

// fakeSched plays a script for every request and keeps what it saw.
type fakeSched struct {
	script func(r *sched.Request) ([]step, error)

	mu        sync.Mutex
	requests  []*sched.Request
	streams   []*fakeStream
	unhealthy error
	aborts    []string
	submitted chan *fakeStream // gets every stream, if not nil
}

func (f *fakeSched) Submit(ctx context.Context, r *sched.Request) (sched.Stream, error) {
	steps, err := f.script(r)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, r)
	if err != nil {
		return nil, err
	}
	st := &fakeStream{steps: steps, ended: make(chan struct{}), closed: make(chan struct{}), blocked: make(chan struct{})}
	f.streams = append(f.streams, st)
	if f.submitted != nil {
		f.submitted <- st
	}
	return st, nil
}

func (f *fakeSched) Abort(id string, c *room.Cause) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.aborts = append(f.aborts, id)
	for _, st := range f.streams {
		st.Cancel(c)
	}
	return len(f.streams)
}

func (f *fakeSched) Healthy() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.unhealthy
}

func (f *fakeSched) Snapshot() sched.Snapshot {
	return sched.Snapshot{Role: "decode", Running: 2, PagesTotal: 8, PagesFree: 7, CellsTotal: 64}
}

type fakeStream struct {
	steps []step
	at    int

	once, closeOnce, blockOnce sync.Once
	cause                      *room.Cause
	ended                      chan struct{} // cancelled
	closed                     chan struct{}
	blocked                    chan struct{} // Next has reached a blocking step
}

func (s *fakeStream) Next(ctx context.Context) (sched.Event, error) {
	select {
	case <-s.ended:
		return sched.Event{}, s.cause
	default:
	}
	if s.at == len(s.steps) {
		return sched.Event{}, io.EOF
	}
	st := s.steps[s.at]
	s.at++
	if !st.block {
		return st.ev, st.err
	}
	s.blockOnce.Do(func() { close(s.blocked) })
	select {
	case <-s.ended:
		return sched.Event{}, s.cause
	case <-ctx.Done():
		return sched.Event{}, ctx.Err()
	}
}

func (s *fakeStream) Cancel(c *room.Cause) { s.once.Do(func() { s.cause = c; close(s.ended) }) }
func (s *fakeStream) Close()               { s.closeOnce.Do(func() { close(s.closed) }) }
func (s *fakeStream) Phases() sched.Phases {
	at := time.Unix(1000, 0)
	return sched.Phases{Submitted: at, Granted: at.Add(time.Millisecond), FirstToken: at.Add(5 * time.Millisecond), Ended: at.Add(9 * time.Millisecond)}
}

// fakeTokenizer has a token a byte; 300 is EOS, 301 the first byte pair of a split character.
type fakeTokenizer struct{}

const eos = engine.Token(300)

func (fakeTokenizer) Tokenize(text string, _, special bool) ([]engine.Token, error) {
	if strings.Contains(text, "\x00") || !utf8.ValidString(text) {
		return nil, errors.New("NUL or invalid UTF-8")
	}
	var out []engine.Token
	for i := 0; i < len(text); i++ {
		if special && strings.HasPrefix(text[i:], "<EOS>") {
			out, i = append(out, eos), i+4
			continue
		}
		out = append(out, engine.Token(text[i]))
	}
	return out, nil
}
func (fakeTokenizer) Piece(t engine.Token) []byte {
	if t >= 256 {
		return nil
	}
	return []byte{byte(t)}
}
func (fakeTokenizer) IsEOG(t engine.Token) bool { return t == eos }
func (fakeTokenizer) SpecialTexts() []string    { return []string{"<EOS>"} }

var testInfo = engine.Info{
	Engine: "fake 1", ModelDigest: "abc", ModelName: "tiny", ModelPath: "/models/tiny.gguf", VocabSize: 400, ContextLen: 200, KVCells: 1000, MaxSeqs: 4,
	ChunkTokens: 16, BOS: -1, EOS: eos,
	ChatTemplate: "{% for m in messages %}{{ m.role }}: {{ m.content }}<EOS>{% endfor %}assistant:",
}

// text is an event with one token a byte.
func text(choice int, s string) step {
	ev := sched.Event{Choice: choice, Text: s}
	for i := range len(s) {
		ev.Tokens = append(ev.Tokens, sched.TokenEvent{ID: engine.Token(s[i]), Bytes: []byte{s[i]}, Logprob: -0.5,
			Top: []engine.TokenLogprob{{Token: engine.Token(s[i]), Logprob: -0.5}, {Token: 'z', Logprob: -2.25}}})
	}
	return step{ev: ev}
}

func end(choice int, f sched.FinishReason) step {
	return step{ev: sched.Event{Choice: choice, Finish: f}}
}

// endEOS ends with the end-of-generation token, which has no bytes.
func endEOS(choice int) step {
	return step{ev: sched.Event{Choice: choice, Finish: sched.FinishStop, Tokens: []sched.TokenEvent{{ID: eos, Logprob: -0.125}}}}
}

func always(steps ...step) func(*sched.Request) ([]step, error) {
	return func(*sched.Request) ([]step, error) { return steps, nil }
}

func failing(c *room.Cause) func(*sched.Request) ([]step, error) {
	return func(*sched.Request) ([]step, error) { return nil, c }
}

// harness is a server over a fake scheduler.
type harness struct {
	t     *testing.T
	sched *fakeSched
	srv   *httptest.Server
	reg   *prometheus.Registry
	logs  *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newHarness(t *testing.T, script func(*sched.Request) ([]step, error), edit ...func(*Config)) *harness {
	t.Helper()
	h := &harness{t: t, sched: &fakeSched{script: script}, reg: prometheus.NewRegistry(), logs: &lockedBuffer{}}
	c := Config{
		Role: RoleDecode, Scheduler: h.sched, Tokenizer: fakeTokenizer{}, Info: testInfo, AllowLocal: true, Version: "v0",
		Gatherer: h.reg, Registerer: h.reg, Log: slog.New(slog.NewJSONHandler(h.logs, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	for _, f := range edit {
		f(&c)
	}
	handler := New(c)
	s := handler.(*server)
	s.newID = func() string { return "id1" }
	h.srv = httptest.NewUnstartedServer(s)
	h.srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	h.srv.Start()
	t.Cleanup(func() {
		h.srv.CloseClientConnections()
		h.srv.Close()
		h.checkClosed()
	})
	return h
}

// checkClosed: every stream was closed, and nothing is registered any more.
func (h *harness) checkClosed() {
	h.sched.mu.Lock()
	defer h.sched.mu.Unlock()
	for i, st := range h.sched.streams {
		select {
		case <-st.closed:
		default:
			h.t.Errorf("stream %d was never closed", i)
		}
	}
}

// post sends a body and gives the whole answer. err is what reading the answer's body gave.
func (h *harness) post(path, body string, header ...string) (status int, answer string, hdr http.Header, err error) {
	h.t.Helper()
	req, rerr := http.NewRequest(http.MethodPost, h.srv.URL+path, strings.NewReader(body))
	if rerr != nil {
		h.t.Fatal(rerr)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, rerr := h.srv.Client().Do(req)
	if rerr != nil {
		h.t.Fatal(rerr)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	return res.StatusCode, string(raw), res.Header, err
}

func (h *harness) get(path string) (int, string) {
	h.t.Helper()
	res, err := h.srv.Client().Get(h.srv.URL + path)
	if err != nil {
		h.t.Fatal(err)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		h.t.Fatal(err)
	}
	return res.StatusCode, string(raw)
}

// events parses a stream; every event must be [DONE] or a valid JSON object in valid UTF-8.
func events(t *testing.T, stream string) []string {
	t.Helper()
	r := openai.NewEventReader(strings.NewReader(stream), 0)
	var out []string
	for {
		data, err := r.Next()
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatalf("event stream: %v\n%s", err, stream)
		}
		if string(data) != openai.DoneData && (!json.Valid(data) || !utf8.Valid(data) || data[0] != '{') {
			t.Fatalf("bad event %q", data)
		}
		out = append(out, string(data))
	}
}

// errorOf is the error object of a body or event.
func errorOf(t *testing.T, status int, body string) *openai.Error {
	t.Helper()
	var env struct{ Error *struct{ Cause string } }
	if err := json.Unmarshal([]byte(body), &env); err != nil || env.Error == nil || env.Error.Cause == "" {
		t.Fatalf("no error object in %q (%v)", body, err)
	}
	return openai.ParseError(status, []byte(body), room.SideRouter, "test")
}

var clocks = regexp.MustCompile(`"(created|e2e_latency|uptime_seconds)":[0-9.e-]+`)

// golden compares got with testdata/name, or writes it when REWRITE is set. Times become 0.
func golden(t *testing.T, name, got string) {
	t.Helper()
	got = clocks.ReplaceAllString(got, `"$1":0`)
	path := "testdata/" + name + ".golden"
	if os.Getenv("REWRITE") != "" {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs:\ngot:\n%s\nwant:\n%s", path, got, want)
	}
}
