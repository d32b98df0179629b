// Package worker puts one worker together: engine, pools, transports, hub, session,
// scheduler and HTTP. The concrete engine and transports are chosen by the caller
// (cmd/baton, or a test); this package only knows their interfaces.
//
// Ownership: a [Worker] owns everything it was given (engine, listeners) and
// everything it made. Close ends them in the order in which work flows: no new
// requests, scheduler, sessions, hub, pools, engine.
package worker

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/httpapi"
	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/otel"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sched"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/trace"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/hub"
)

// Timeouts bound the states of a room, besides each request's own deadline, which
// every state is under. 0 for the first three: the deadline alone counts. They are 0 by
// default, because under load a healthy request may wait or compute for long in each.
type Timeouts struct {
	Bootstrap time.Duration // session, pages and grant
	Waiting   time.Duration // from the grant to the first chunk
	Transfer  time.Duration // from the first chunk to the last
	Park      time.Duration // a grant without its request
	Tombstone time.Duration // how long an ended room is remembered
	Request   time.Duration // default deadline of a request
	Max       time.Duration // largest deadline a client may ask for
}

// DefaultTimeouts are for interactive serving.
func DefaultTimeouts() Timeouts {
	return Timeouts{
		Park: 30 * time.Second, Tombstone: 60 * time.Second, Request: 300 * time.Second, Max: time.Hour,
	}
}

// Config is what both roles share.
type Config struct {
	ID         string         // host:port of the HTTP side, for people
	ModelName  string         // name in the API; "": the engine's
	Engine     engine.Compute // owned by the worker from New on
	HTTP       net.Listener   // owned
	Transports []transfer.Transport
	PoolBytes  int // KV memory outside the engine (decode: landing pages; prefill: staging)
	// PageBytes: 0 for one whole chunk a page, which lets the engine import in place. Without effect
	// where chunks are pages of ranks (engine.Info.Shards).
	PageBytes int
	// PrefixPages bounds the pages of the pool that keep prompts of ended requests for others that begin alike; 0:
	// none. Decode, and only with an engine whose chunks are pages of ranks.
	PrefixPages int
	// OnPool, if set, is told the KV memory and its page size in bytes before a transport uses it.
	OnPool     func(mem transfer.Memory, pageBytes int)
	PlainPool  bool // anonymous memory instead of a memfd: no shm
	PoisonPool bool // tests: detect stores into free pages
	HugePages  kv.HugePages
	MaxQueue   int // requests that may wait; more are answered 503
	MaxRunning int // requests computed at a time
	Timeouts   Timeouts
	Session    session.Tuning
	MaxBody    int64
	// TLS is spoken on HTTP and, as prefill, on the session port; nil: plain. PeerTLS is how a decode worker speaks to session ports, asked
	// before each attempt; nil: plain. Neither covers what the transports carry.
	TLS     *tls.Config
	PeerTLS func() *tls.Config
	// Keys are who may use the HTTP side; nil: everybody. OpenMetrics leaves /metrics open nevertheless.
	Keys        *edge.Keys
	OpenMetrics bool
	AllowLocal  bool // decode: serve requests without a room by computing the prompt itself
	LocalOnly   bool // decode: no session, no pool (monolithic)
	// RoomTrace is a file for the record of every room, see package trace; "": none.
	RoomTrace      string
	RoomTraceBytes int64 // bound of that file; 0: trace's default
	Version        string
	Tracer         *otel.Tracer // spans of requests; nil: none. The caller closes it after the worker
	Log            *slog.Logger
	Metrics        *prometheus.Registry // nil: a new one
}

// Worker is a running worker.
type Worker struct {
	Sched    sched.Scheduler
	Pool     *kv.Pool // nil when LocalOnly
	Registry *room.Registry
	Metrics  *prometheus.Registry

	cfg     Config
	http    *http.Server
	closer  []func() error // run in order by Close
	closing atomic.Bool
	failed  chan error // cap 2: a listener's loop that ended by itself
	served  chan struct{}
}

// Failed yields an error when a listening loop of the worker has ended by itself; the
// worker serves no more then and should be closed.
func (w *Worker) Failed() <-chan error { return w.failed }

// loopEnded reports the end of a listening loop unless the worker is closing.
func (w *Worker) loopEnded(what string, err error) {
	if !w.closing.Load() {
		w.failed <- fmt.Errorf("%s ended by itself: %w", what, err)
	}
}

func (c *Config) validate() error {
	switch {
	case c.Engine == nil || c.HTTP == nil || c.Log == nil:
		return errors.New("worker: engine, listener and log are required")
	case len(c.Transports) == 0 && !c.LocalOnly:
		return errors.New("worker: at least one transport is required")
	case c.PrefixPages != 0 && c.LocalOnly:
		return errors.New("worker: a prefix cache is for a decode worker that receives KV, not for a monolithic one")
	case c.PrefixPages != 0 && c.Engine.Info().Shards == (kv.Shards{}):
		return fmt.Errorf("worker: a prefix cache needs an engine whose KV is pages of ranks; the blocks of %s can only be used whole", c.Engine.Info().Engine)
	case c.MaxQueue < 1 || c.MaxRunning < 1:
		return errors.New("worker: queue and running limits must be at least 1")
	}
	return nil
}

// identity is who this worker is to its peers; the epoch is new at every start.
func (c *Config) identity() session.Identity {
	in := c.Engine.Info()
	return session.Identity{
		WorkerID: c.ID,
		Epoch:    session.NewEpoch(),
		Fingerprint: session.Fingerprint{
			Engine: in.Engine, ModelDigest: in.ModelDigest, KVLayout: in.KVLayout, Attention: in.Attention, ChunkTokens: in.ChunkTokens,
		},
		Shards: in.Shards,
	}
}

// openPool sizes pages and opens the pool.
func (c *Config) openPool(name string) (*kv.Pool, error) {
	page := c.PageBytes
	if page == 0 {
		page = c.Engine.ChunkBytes(c.Engine.Info().ChunkTokens)
	}
	page = (page + 4095) &^ 4095
	if s := c.Engine.Info().Shards; s != (kv.Shards{}) {
		page = s.PageBytes() // a page of the pool is a page of a rank
	}
	pages := max(c.PoolBytes/page, 1)
	p, err := kv.Open(kv.Config{Name: name, PageBytes: page, Pages: pages, Plain: c.PlainPool, Poison: c.PoisonPool, PrefixPages: c.PrefixPages, Huge: c.HugePages, Log: c.Log})
	if err != nil {
		return nil, fmt.Errorf("open KV pool of %d pages of %d bytes: %w", pages, page, err)
	}
	if c.OnPool != nil {
		b, fd := p.Memory()
		c.OnPool(transfer.Memory{Bytes: b, FD: fd}, page)
	}
	return p, nil
}

// observer opens the room trace, if one is asked for; close ends it after the hub.
func (c *Config) observer(side room.Side) (o room.Observer, close func() error, err error) {
	if c.RoomTrace == "" {
		return nil, func() error { return nil }, nil
	}
	w, err := trace.Open(trace.Config{
		Path: c.RoomTrace, MaxBytes: c.RoomTraceBytes, Worker: c.ID, Side: side, Tombstone: c.Timeouts.Tombstone, Log: c.Log,
	})
	if err != nil {
		return nil, nil, err
	}
	return w, w.Close, nil
}

func newWorker(c Config) (*Worker, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	if c.Metrics == nil {
		c.Metrics = prometheus.NewRegistry()
	}
	w := &Worker{cfg: c, Metrics: c.Metrics, failed: make(chan error, 2), served: make(chan struct{})}
	w.Metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return w, nil
}

// NewPrefill builds and starts a prefill worker. bootstrap is owned.
func NewPrefill(c Config, bootstrap net.Listener) (*Worker, error) {
	if c.PrefixPages != 0 {
		return nil, errors.New("worker: a prefill worker keeps no prefixes")
	}
	w, err := newWorker(c)
	if err != nil {
		return nil, err
	}
	pool, err := c.openPool("staging")
	if err != nil {
		return nil, err
	}
	w.Pool = pool
	observe, closeTrace, err := c.observer(room.SideSender)
	if err != nil {
		return nil, errors.Join(err, pool.Close())
	}
	w.Metrics.MustRegister(pool.Collector())
	senders := hub.NewSenders(hub.SendersConfig{
		Staging: pool, Shards: c.Engine.Info().Shards, BootstrapTimeout: c.Timeouts.Bootstrap, WaitingTimeout: c.Timeouts.Waiting, TransferTimeout: c.Timeouts.Transfer,
		ParkTimeout: c.Timeouts.Park, TombstoneTTL: c.Timeouts.Tombstone, Observe: observe, Log: c.Log, Registerer: w.Metrics,
	})
	w.Registry = senders.Registry()
	server := session.NewServer(session.ServerConfig{
		Identity: c.identity(), Connect: connector(c.Transports), Handler: senders, Log: c.Log, Tuning: c.Session, TLS: c.TLS, Registerer: w.Metrics,
	})
	sessions := make(chan struct{})
	go func() {
		defer close(sessions)
		w.loopEnded("session listener", server.Serve(bootstrap))
	}()
	p := sched.NewPrefill(sched.PrefillConfig{
		Engine: c.Engine, Senders: senders, MaxQueue: c.MaxQueue, MaxActive: c.MaxRunning, Account: w.holdings, Log: c.Log, Registerer: w.Metrics,
	})
	w.Sched = p
	w.closer = []func() error{
		p.Close,
		func() error { err := server.Close(); <-sessions; return err },
		func() error { senders.Close(); return nil },
		closeTrace, pool.Close, c.Engine.Close,
	}
	w.serve("prefill")
	return w, nil
}

// NewDecode builds and starts a decode worker.
func NewDecode(c Config) (*Worker, error) {
	w, err := newWorker(c)
	if err != nil {
		return nil, err
	}
	if c.LocalOnly {
		d := sched.NewDecode(sched.DecodeConfig{Engine: c.Engine, MaxQueue: c.MaxQueue, MaxRunning: c.MaxRunning, Log: c.Log, Registerer: w.Metrics})
		w.Sched = d
		w.closer = []func() error{d.Close, c.Engine.Close}
		w.serve("decode")
		return w, nil
	}
	pool, err := c.openPool("landing")
	if err != nil {
		return nil, err
	}
	w.Pool = pool
	observe, closeTrace, err := c.observer(room.SideReceiver)
	if err != nil {
		return nil, errors.Join(err, pool.Close())
	}
	w.Metrics.MustRegister(pool.Collector())
	receivers, err := hub.NewReceivers(hub.ReceiversConfig{
		Pool: pool, Shards: c.Engine.Info().Shards, Transports: c.Transports, BootstrapTimeout: c.Timeouts.Bootstrap, WaitingTimeout: c.Timeouts.Waiting,
		TransferTimeout: c.Timeouts.Transfer, TombstoneTTL: c.Timeouts.Tombstone, Observe: observe, Log: c.Log, Registerer: w.Metrics,
	})
	if err != nil {
		return nil, errors.Join(err, closeTrace(), pool.Close())
	}
	w.Registry = receivers.Registry()
	client := session.NewClient(session.ClientConfig{
		Identity: c.identity(), Offer: receivers.Offer, Handler: receivers, Log: c.Log, Tuning: c.Session, TLS: c.PeerTLS, Registerer: w.Metrics,
	})
	receivers.Start(client)
	d := sched.NewDecode(sched.DecodeConfig{
		Engine: c.Engine, Receivers: receivers, KeepPrefixes: c.PrefixPages > 0, MaxQueue: c.MaxQueue, MaxRunning: c.MaxRunning, Account: w.holdings, Log: c.Log, Registerer: w.Metrics,
	})
	w.Sched = d
	w.closer = []func() error{d.Close, client.Close, receivers.Close, closeTrace, pool.Close, c.Engine.Close}
	w.serve("decode")
	return w, nil
}

// connector dials the data plane of a session: the first offer, in our order of
// transports, that can be reached.
func connector(ts []transfer.Transport) func(context.Context, transfer.SessionID, []transfer.Descriptor) (transfer.Peer, error) {
	return func(ctx context.Context, s transfer.SessionID, offers []transfer.Descriptor) (transfer.Peer, error) {
		var errs []error
		for _, t := range ts {
			for _, d := range offers {
				if d.Kind != t.Kind() || !t.Reachable(d) {
					continue
				}
				p, err := t.Dial(ctx, d, s)
				if err == nil {
					return p, nil
				}
				errs = append(errs, fmt.Errorf("transport %s at %s: %w", d.Kind, d.Addr, err))
			}
		}
		if len(errs) > 0 {
			return nil, errors.Join(errs...)
		}
		kinds := make([]string, 0, len(offers))
		for _, d := range offers {
			kinds = append(kinds, d.Kind)
		}
		return nil, fmt.Errorf("the decode worker offers transports %v and none of them is enabled and reachable here", kinds)
	}
}

// serve starts the HTTP side.
func (w *Worker) serve(role string) {
	info := w.cfg.Engine.Info()
	if w.cfg.ModelName != "" {
		info.ModelName = w.cfg.ModelName
	}
	var flush func() error
	if w.cfg.PrefixPages > 0 {
		flush = func() error { w.Pool.ForgetPrefixes(); return nil }
	}
	h := httpapi.New(httpapi.Config{
		Role: role, Scheduler: w.Sched, Tokenizer: w.cfg.Engine.Tokenizer(), Info: info,
		Extra: w.accounting, Gatherer: w.Metrics, Registerer: w.Metrics,
		DefaultTimeout: w.cfg.Timeouts.Request, MaxTimeout: w.cfg.Timeouts.Max, MaxBody: w.cfg.MaxBody,
		AllowLocal: w.cfg.AllowLocal || w.cfg.LocalOnly, FlushCache: flush, Log: w.cfg.Log, Version: w.cfg.Version,
		Worker: w.cfg.ID, Tracer: w.cfg.Tracer,
	})
	w.http = edge.NewServer(w.guard(h), edge.Limits{}, w.cfg.TLS, w.cfg.Log)
	go func() {
		defer close(w.served)
		w.loopEnded("HTTP listener", edge.Serve(w.http, w.cfg.HTTP))
	}()
}

// guard asks for a key before h, where keys are wanted: for everything but what tells whether the worker lives. Limits of keys are for routers' clients
// and are not looked at: a request that a worker turned away for one would count as its failure.
func (w *Worker) guard(h http.Handler) http.Handler {
	g := &edge.Guard{Keys: w.cfg.Keys}
	return g.Wrap(func(path string) edge.Access {
		if path == "/health" || path == "/metrics" && w.cfg.OpenMetrics {
			return edge.Anyone
		}
		return edge.Client
	}, h)
}

// Close ends the worker: running streams get until ctx ends, then everything is
// cancelled (CodeShutdown). Returns when nothing of it is left.
func (w *Worker) Close(ctx context.Context) error {
	w.closing.Store(true)
	var errs []error
	if err := w.http.Shutdown(ctx); err != nil {
		w.Sched.Abort("", &room.Cause{Code: room.CodeShutdown, Detail: "the worker is shutting down", Retryable: true})
		grace, stop := context.WithTimeout(context.Background(), 2*time.Second)
		if err := w.http.Shutdown(grace); err != nil {
			errs = append(errs, w.http.Close())
		}
		stop()
	}
	<-w.served
	for _, f := range w.closer {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// holdings adds what the hub holds to the scheduler's snapshot.
func (w *Worker) holdings(s *sched.Snapshot) {
	p, r := w.Pool.Stats(), w.Registry.Stats()
	s.PagesTotal, s.PagesFree, s.PagesQuarantine = p.Total, p.Free, p.Quarantine
	s.Rooms, s.Tombstones = r.Rooms(), r.Tombstones
}

// accounting is what /server_info adds: everything that must return to the idle
// baseline, counted at its source.
func (w *Worker) accounting() map[string]any {
	m := map[string]any{"goroutines": runtime.NumGoroutine()}
	if fds, err := os.ReadDir("/proc/self/fd"); err == nil {
		m["open_files"] = len(fds)
	}
	if w.Pool != nil {
		m["pool"] = w.Pool.Stats()
		m["pool_huge_pages"] = w.Pool.Huge().String()
	}
	if w.Registry != nil {
		s := w.Registry.Stats()
		rooms := 0
		for _, n := range s.Live {
			rooms += n
		}
		m["rooms"] = map[string]any{"live": rooms, "tombstones": s.Tombstones}
	}
	return m
}
