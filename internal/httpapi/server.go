// Package httpapi is the HTTP side of a worker: OpenAI's endpoints, SGLang's, and
// the streaming of answers. It parses with package openai, submits to a
// [sched.Scheduler] and writes what comes back; it holds no model state.
//
// # Errors
//
// Before the first byte of an answer a failure is an HTTP status with an error
// object. To keep that promise for streams too, the header is held back until the
// first event (or failure) of the request is known. After the first byte a failure is
// one error event, no [DONE], and an aborted connection, so that even a client that
// reads no events sees a body that did not end properly.
//
// # Ownership
//
// A request's streams belong to its handler, which closes them on every way out.
// Goroutines exist only while a request with several prompts is merged, and the
// handler waits for them. The client's disconnect, /abort_request and the deadline
// each cancel every stream of the request.
package httpapi

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/otel"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sched"
)

// Roles of a worker.
const (
	RolePrefill = "prefill"
	RoleDecode  = "decode"
)

// Config is what [New] needs. Zero values of the optional fields take the defaults named here.
type Config struct {
	Role       string // RolePrefill or RoleDecode
	Scheduler  sched.Scheduler
	Tokenizer  engine.Tokenizer
	Info       engine.Info
	Log        *slog.Logger
	Version    string
	Worker     string       // its name, for traces
	Tracer     *otel.Tracer // makes spans of generations; nil: none are made
	AllowLocal bool         // decode: a request without a room computes its prompt here

	Extra      func() map[string]any // additions to /server_info; may be nil
	FlushCache func() error          // may be nil: there is no cache to flush
	Gatherer   prometheus.Gatherer   // behind /metrics; nil: 404
	Registerer prometheus.Registerer // for the HTTP side's own metrics; may be nil

	DefaultTimeout  time.Duration // of a request that names none; 300 s
	MaxTimeout      time.Duration // largest a request may name; 1 h
	BodyTimeout     time.Duration // for a body to arrive; 60 s
	HealthTimeout   time.Duration // of /health_generate; 20 s
	MaxBody         int64         // bytes; 32 MiB
	MaxPromptTokens int           // Info.ContextLen-1
}

func (c Config) withDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&c.DefaultTimeout, 300*time.Second)
	def(&c.MaxTimeout, time.Hour)
	def(&c.BodyTimeout, 60*time.Second)
	def(&c.HealthTimeout, 20*time.Second)
	c.DefaultTimeout = min(c.DefaultTimeout, c.MaxTimeout)
	if c.MaxBody <= 0 {
		c.MaxBody = 32 << 20
	}
	if c.MaxPromptTokens <= 0 {
		c.MaxPromptTokens = c.Info.ContextLen - 1
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// server is the handler made by New.
type server struct {
	Config
	routes      map[string]route
	template    *openai.Template // nil if templateErr
	templateErr *openai.Error
	live        *liveRequests
	metrics     *httpMetrics
	probe       chan struct{} // held by the running /health_generate
	started     time.Time
	counter     atomic.Uint64 // makes ids unique in this process

	now   func() time.Time
	newID func() string
}

// handlerFunc answers a request. An error it returns has not been told to the client yet.
type handlerFunc func(w *response, r *http.Request) *openai.Error

// route is the methods of one path.
type route struct {
	name    string // for metrics
	methods map[string]handlerFunc
	quiet   bool // access lines only at debug level
	traced  bool // requests have spans
}

// New makes the handler of a worker. A chat template that does not compile is
// logged, and refuses chats only. It panics if Role, Scheduler or Tokenizer is missing.
func New(c Config) http.Handler {
	if c.Role != RolePrefill && c.Role != RoleDecode || c.Scheduler == nil || c.Tokenizer == nil {
		panic("httpapi: New needs a role, a scheduler and a tokenizer")
	}
	s := &server{
		Config: c.withDefaults(), live: newLiveRequests(time.Now), probe: make(chan struct{}, 1),
		started: time.Now(), now: time.Now, newID: randomID,
	}
	s.metrics = newHTTPMetrics(s.Registerer)
	var err error
	if s.template, err = openai.NewTemplate(s.Info, s.Tokenizer); err != nil {
		s.template = nil
		if s.templateErr = openai.ErrNoTemplate; !errors.Is(err, openai.ErrNoTemplate) {
			s.Log.Warn("chat template refused; chats are answered with 400", "model", s.Info.ModelName, "err", err)
			s.templateErr = openai.NewError(http.StatusBadRequest, openai.CodeInvalidValue, "messages",
				"the model's chat template cannot be used (%v); use /v1/completions", err)
		}
	}
	s.routes = s.table()
	return s
}

func (s *server) table() map[string]route {
	get := func(h handlerFunc) map[string]handlerFunc {
		return map[string]handlerFunc{http.MethodGet: h, http.MethodHead: h}
	}
	post := func(h handlerFunc) map[string]handlerFunc { return map[string]handlerFunc{http.MethodPost: h} }
	t := map[string]route{
		"/v1/chat/completions": {methods: post(s.generation(openai.KindChat)), traced: true},
		"/v1/completions":      {methods: post(s.generation(openai.KindCompletion)), traced: true},
		"/generate":            {methods: post(s.generation(openai.KindGenerate)), traced: true},
		"/abort_request":       {methods: post(s.abortRequest)},
		"/flush_cache":         {methods: map[string]handlerFunc{http.MethodPost: s.flushCache, http.MethodGet: s.flushCache}},
		"/v1/models":           {methods: get(s.models), quiet: true},
		"/health":              {methods: get(s.health), quiet: true},
		"/health_generate":     {methods: get(s.healthGenerate), quiet: true},
		"/server_info":         {methods: get(s.serverInfo), quiet: true},
		"/get_server_info":     {methods: get(s.serverInfo), quiet: true},
		"/rooms":               {methods: get(s.rooms), quiet: true},
		"/model_info":          {methods: get(s.modelInfo), quiet: true},
		"/get_model_info":      {methods: get(s.modelInfo), quiet: true},
		// No /version: smg takes a worker that has one for vLLM, and does not pair it as SGLang's.
	}
	if s.Gatherer != nil {
		h := promhttp.HandlerFor(s.Gatherer, promhttp.HandlerOpts{})
		t["/metrics"] = route{quiet: true, methods: get(func(w *response, r *http.Request) *openai.Error {
			h.ServeHTTP(w, r)
			return nil
		})}
	}
	for path, r := range t {
		r.name = path
		t[path] = r
	}
	return t
}

const modelPrefix = "/v1/models/"

// find is the route and handler of a request; the error is a 404 or 405.
func (s *server) find(r *http.Request) (route, handlerFunc, *openai.Error) {
	rt, ok := s.routes[r.URL.Path]
	if !ok && strings.HasPrefix(r.URL.Path, modelPrefix) {
		rt = route{name: modelPrefix + "{id}", quiet: true, methods: map[string]handlerFunc{
			http.MethodGet: s.model, http.MethodHead: s.model,
		}}
		ok = true
	}
	if !ok {
		return route{name: "other"}, nil, openai.NewError(http.StatusNotFound, openai.CodeNotFound, "", "no such path on a %s worker", s.Role)
	}
	h := rt.methods[r.Method]
	if h == nil {
		return rt, nil, openai.NewError(http.StatusMethodNotAllowed, openai.CodeMethodNotAllowed, "", "%s does not take this method", rt.name)
	}
	return rt, h, nil
}

// ServeHTTP answers any request, counts it and writes its access line.
func (s *server) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	w := &response{ResponseWriter: rw, ctl: http.NewResponseController(rw), start: s.now()}
	w.id = r.Header.Get("X-Request-Id")
	if w.fromClient = openai.ValidRID(w.id); !w.fromClient {
		w.id = s.newID()
	}
	w.Header().Set("X-Request-Id", w.id)
	rt, h, e := s.find(r)
	s.metrics.inFlight.Inc()
	defer func() {
		p := recover()
		if p != nil && p != http.ErrAbortHandler { //nolint:errorlint // the sentinel is compared as net/http does
			s.Log.Error("handler panicked", "path", rt.name, "rid", w.id, "panic", fmt.Sprint(p))
			w.cause = &room.Cause{Code: room.CodeInternal, Detail: "the handler failed"}
			if p = http.ErrAbortHandler; w.status == 0 {
				openai.WriteError(w, openai.FromCause(w.cause))
				p = nil
			}
		}
		s.metrics.inFlight.Dec()
		s.finish(w, r, rt, p != nil)
		if p != nil {
			panic(p)
		}
	}()
	// A client that does not read must not hold the handler for ever. Handlers that
	// take longer by design move the deadline.
	w.writeBy(w.start.Add(max(time.Minute, s.BodyTimeout+10*time.Second))) // also that the body did not arrive
	// Nor one that does not send: net/http reads what a handler leaves of the body, so
	// the deadline stays on unless the body has been read whole.
	if r.ContentLength != 0 {
		_ = w.ctl.SetReadDeadline(w.start.Add(s.BodyTimeout))
	}
	if e == nil {
		e = h(w, r)
	} else if rt.methods != nil {
		allow := make([]string, 0, len(rt.methods))
		for _, m := range []string{http.MethodGet, http.MethodHead, http.MethodPost} {
			if rt.methods[m] != nil {
				allow = append(allow, m)
			}
		}
		w.Header().Set("Allow", strings.Join(allow, ", "))
	}
	if e != nil {
		w.fail(e)
	}
}

// response is the ResponseWriter of one request plus what its access line needs.
// One goroutine uses it.
type response struct {
	http.ResponseWriter
	ctl        *http.ResponseController
	start      time.Time
	id         string // X-Request-Id
	fromClient bool   // id came in the header
	status     int    // 0: nothing written yet
	streaming  bool
	cause      *room.Cause // why the request failed

	// For the access line of a generation.
	rooms                    string
	promptToks, completeToks int
	phases                   sched.Phases
	ways                     []way // of each prompt, if traces are on
}

// Unwrap lets http.ResponseController reach the connection.
func (w *response) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *response) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *response) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	return w.ResponseWriter.Write(p)
}

// writeBy bounds all writes of this response. Test recorders have no deadlines; that is no error.
func (w *response) writeBy(t time.Time) { _ = w.ctl.SetWriteDeadline(t) }

// fail tells the client. In a stream that has begun it never returns: the
// connection is aborted so that the body does not look complete.
func (w *response) fail(e *openai.Error) {
	w.cause = e.Cause
	if w.status == 0 {
		openai.WriteError(w, e)
		_ = w.ctl.Flush() // before streams are closed, which may take a while
		return
	}
	if w.streaming {
		if _, err := w.Write(openai.AppendEvent(nil, e.Body())); err == nil {
			_ = w.ctl.Flush()
		}
	}
	panic(http.ErrAbortHandler)
}

// json answers 200 with v.
func (w *response) json(v any) *openai.Error {
	body, err := openai.Marshal(v)
	if err != nil {
		return openai.FromErr(fmt.Errorf("marshal answer: %w", err))
	}
	return w.body(body)
}

func (w *response) body(body []byte) *openai.Error {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", fmt.Sprint(len(body)+1))
	if _, err := w.Write(append(body, '\n')); err != nil {
		w.cause = &room.Cause{Code: room.CodeClientGone, Detail: "the client left before its answer was written"}
	}
	return nil
}
