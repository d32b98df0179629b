package router

import (
	"context"
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/router/admission"
	"github.com/baton-pd/baton/internal/router/ending"
	"github.com/baton-pd/baton/internal/router/policy"
	"github.com/baton-pd/baton/internal/router/record"
	"github.com/baton-pd/baton/internal/router/wire"
)

// Router pairs requests with workers. Its methods are safe for concurrent use.
type Router struct {
	cfg               Config
	prefills, decodes fleet
	roster            roster
	m                 *metrics
	fm                *fleetMetrics
	lm                *legMetrics
	gate              gate
	started           time.Time
	handler           http.Handler

	queue *admission.Queue
	// wantsPrefix, wantsLoad: a policy looks at prompts, or at what workers say of their load.
	wantsPrefix, wantsLoad bool

	live     calls
	journal  *record.Journal
	inflight atomic.Int64
	group    group
	base     ending.Context // ends with Close, by a *failure
	stop     context.CancelCauseFunc
}

// New checks the configuration and starts to probe the workers. Close ends it.
func New(c Config) (*Router, error) {
	c = c.withDefaults()
	if err := c.validate(); err != nil {
		return nil, err
	}
	r := &Router{cfg: c, journal: record.NewJournal(recentRecords, recentFailures), started: time.Now(), live: calls{byName: map[string]*call{}}}
	r.roster.stale, r.roster.idle = map[string]string{}, make(chan struct{}, 1)
	if err := r.newPolicies(); err != nil {
		return nil, err
	}
	var err error
	if r.m, err = newMetrics(r, c.Registerer); err != nil {
		return nil, fmt.Errorf("router: register metrics: %w", err)
	}
	if r.lm, err = newLegMetrics(c.Registerer); err != nil {
		return nil, fmt.Errorf("router: register metrics: %w", err)
	}
	if r.fm, err = newFleetMetrics(r, c.Registerer); err != nil {
		return nil, fmt.Errorf("router: register metrics: %w", err)
	}
	if err := r.newGate(); err != nil {
		return nil, fmt.Errorf("router: register metrics: %w", err)
	}
	r.handler = r.enter(r.routes())
	r.stop = r.base.End
	if err := r.SetWorkers(SourceStatic, c.Prefills, c.Decodes); err != nil {
		return nil, err
	}
	r.group.spawn(func() { r.keepFleet(&r.base) })
	return r, nil
}

// newPolicies makes the queue and what chooses workers.
func (r *Router) newPolicies() (err error) {
	c := &r.cfg
	r.queue = admission.New(admission.Config{MaxInflight: c.MaxInflight, MaxWaiting: max(c.MaxQueue, 0), Aging: c.PriorityAging})
	o := c.PolicyOptions
	if o.Seed == 0 {
		o.Seed = rand.Uint64() // several routers must not choose alike
	}
	if r.prefills.policy, err = policy.New(c.PrefillPolicy, o); err != nil {
		return fmt.Errorf("router: %w", err)
	}
	o.Seed++
	if r.decodes.policy, err = policy.New(c.DecodePolicy, o); err != nil {
		return fmt.Errorf("router: %w", err)
	}
	r.prefills.most, r.decodes.most = int64(c.MaxPerWorker), int64(c.MaxPerWorker)
	r.wantsPrefix = c.PrefillPolicy == policy.PrefixCache || c.DecodePolicy == policy.PrefixCache
	r.wantsLoad = c.PrefillPolicy == policy.PairCost || c.DecodePolicy == policy.PairCost
	return nil
}

func (r *Router) newWorker(b Backend, side room.Side) (*worker, error) {
	base, host, port, err := b.parse(side == room.SideSender)
	if err != nil {
		return nil, err
	}
	w := &worker{
		side: side, name: base.Host, base: base, bootHost: host, bootPort: port, kick: make(chan struct{}, 1), since: time.Now(), releases: make(chan struct{}, releaseAtOnce),
		zone: b.Zone, models: b.Models, wantLoad: r.wantsLoad, signIn: r.signIn,
		rt: &http.Transport{
			DialContext: r.cfg.DialContext, DialTLSContext: r.dialTLS(base), DisableCompression: true,
			MaxIdleConnsPerHost: r.cfg.MaxInflight, IdleConnTimeout: 90 * time.Second,
			// HTTP/1.1 only, as for legs.
			Protocols: http1(), MaxResponseHeaderBytes: 64 << 10,
		},
		lost: r.abandon,
		changed: func(w *worker, s status, reason string) {
			if s == statusOut {
				r.cfg.Log.Warn("worker is out", "leg", side.String(), "worker", w.name, "reason", reason)
			} else {
				r.cfg.Log.Info("worker is up", "leg", side.String(), "worker", w.name)
			}
			r.queue.Kick() // somebody may have waited for it, or waits in vain now
		},
	}
	w.prefix = strings.TrimSuffix(base.EscapedPath(), "/")
	w.wire = &wire.Client{
		Addr: dialAddr(base), Host: base.Host, Dial: r.cfg.DialContext, TLS: func() *tls.Config { return r.workerTLS(base) }, TLSTimeout: r.cfg.DialTimeout,
		MaxIdle: r.cfg.MaxInflight, IdleTimeout: w.rt.IdleConnTimeout, MaxHeader: int(w.rt.MaxResponseHeaderBytes),
	}
	if b.Kind != KindDetect {
		w.fixed = true
		w.nature.Store(&nature{kind: b.Kind, local: b.Kind == KindBaton})
	}
	w.freed = func() {
		r.queue.Kick()
		r.rested(w)
	}
	return w, nil
}

// dialAddr is where base is, with its port.
func dialAddr(base *url.URL) string {
	if base.Port() != "" {
		return base.Host
	}
	if base.Scheme == "https" {
		return net.JoinHostPort(base.Hostname(), "443")
	}
	return net.JoinHostPort(base.Hostname(), "80")
}

// workerTLS is how a new connection to base speaks TLS. nil: plain.
func (r *Router) workerTLS(base *url.URL) *tls.Config {
	if base.Scheme != "https" {
		return nil
	}
	c := r.cfg.WorkerTLS.Config()
	c.NextProtos = []string{"http/1.1"}
	if c.ServerName == "" {
		c.ServerName = base.Hostname()
	}
	return c
}

// dialTLS opens a connection for http.Transport, which would use for ever whom it trusted at first.
func (r *Router) dialTLS(base *url.URL) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		raw, err := r.cfg.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return wire.Handshake(ctx, raw, r.workerTLS(base), r.cfg.DialTimeout)
	}
}

func http1() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	return p
}

// Handler serves the router's HTTP side.
func (r *Router) Handler() http.Handler { return r.handler }

// Close ends every request that still runs with cause "shutdown", tells their workers, and waits until
// their attempts have ended and no goroutine of the router is left. Handlers return soon after; their
// server's owner waits for them.
func (r *Router) Close() {
	r.stop(errClosing())
	r.group.close()
	for _, w := range r.all() {
		w.closeIdle()
	}
}

// route is a path and what serves it by method.
type route map[string]http.HandlerFunc

// routes is the table of everything the router answers.
func (r *Router) routes() http.Handler {
	table := map[string]route{
		"/v1/models":       {http.MethodGet: r.relay("/v1/models")},
		"/model_info":      {http.MethodGet: r.relay("/model_info")},
		"/get_model_info":  {http.MethodGet: r.relay("/model_info")},
		"/server_info":     {http.MethodGet: r.serverInfo},
		"/get_server_info": {http.MethodGet: r.serverInfo},
		"/workers":         {http.MethodGet: r.listWorkers, http.MethodPost: r.addWorker},
		"/version": {http.MethodGet: func(w http.ResponseWriter, _ *http.Request) {
			writeJSON(w, http.StatusOK, map[string]string{"version": r.cfg.Version})
		}},
		"/health":              {http.MethodGet: r.health},
		"/health_generate":     {http.MethodGet: r.healthGenerate},
		"/abort_request":       {http.MethodPost: r.abortRequest},
		"/flush_cache":         {http.MethodGet: r.flushCache, http.MethodPost: r.flushCache},
		"/generate":            {},
		"/v1/completions":      {},
		"/v1/chat/completions": {},
	}
	for path, kind := range generating {
		table[path][http.MethodPost] = r.gate.guard.Limit(r.generation(kind, path))
	}
	if r.cfg.Gatherer != nil {
		h := promhttp.HandlerFor(r.cfg.Gatherer, promhttp.HandlerOpts{})
		table["/metrics"] = route{http.MethodGet: h.ServeHTTP}
	}
	r.uiRoutes(table)
	oneModel := route{http.MethodGet: func(w http.ResponseWriter, req *http.Request) { r.relay(req.URL.Path)(w, req) }}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		methods, known := table[strings.TrimSuffix(req.URL.Path, "/")]
		if !known && strings.HasPrefix(req.URL.Path, "/workers/") {
			r.changeWorker(w, req)
			return
		}
		if !known && strings.HasPrefix(req.URL.Path, "/v1/models/") && !strings.Contains(req.URL.Path, "..") {
			methods, known = oneModel, true
		}
		method := req.Method
		if method == http.MethodHead {
			method = http.MethodGet
		}
		switch h := methods[method]; {
		case h != nil:
			h(w, req)
		case known:
			allow := make([]string, 0, len(methods))
			for m := range methods {
				allow = append(allow, m)
			}
			w.Header().Set("Allow", strings.Join(allow, ", "))
			openai.WriteError(w, openai.NewError(http.StatusMethodNotAllowed, openai.CodeMethodNotAllowed, "", "%.16s is not allowed for %s", req.Method, req.URL.Path))
		default:
			openai.WriteError(w, openai.NewError(http.StatusNotFound, openai.CodeNotFound, "", "there is nothing at %.128s", req.URL.Path))
		}
	})
}
