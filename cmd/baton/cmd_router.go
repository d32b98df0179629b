package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/baton-pd/baton/internal/config"
	"github.com/baton-pd/baton/internal/router"
	"github.com/baton-pd/baton/internal/router/policy"
	"github.com/baton-pd/baton/internal/supervise"
)

// routerFlags of `baton router`.
type routerFlags struct {
	listen            string
	prefills, decodes []string
	timeout, max      time.Duration
	firstByte, gap    time.Duration
	localFallback     bool
	prefillFirst      time.Duration
	prefillGap        time.Duration
	resume            bool
	maxResumes        int
	ejectAfter        int
	ejectTime         time.Duration
	health            time.Duration
	maxBodyMiB        int
	maxInflight       int
	maxPerWorker      int
	maxQueue          int
	aging             time.Duration
	policy            string
	prefillPolicy     string
	decodePolicy      string
	sessionHeader     string
	prefixMiB         int
	grace             time.Duration
	fleet             fleetFlags
	otlp              otlpFlags
	seen              seenFlags
	edge              edgeFlags
}

func newRouter(g *globals) *cobra.Command {
	var r routerFlags
	c := &cobra.Command{
		Use:   "router",
		Short: "Run the router: gives each request a room and both its workers",
		RunE:  func(cmd *cobra.Command, _ []string) error { return r.run(cmd.Context(), g) },
	}
	f := c.Flags()
	r.fleet.addTo(f)
	r.otlp.add(f)
	r.seen.addTo(f)
	r.edge.addTo(f)
	c.AddCommand(newKeygen())
	f.StringVar(&r.listen, "listen", "127.0.0.1:8080", "address to serve on")
	f.StringArrayVar(&r.prefills, "prefill", nil, "prefill worker: URL,BOOTSTRAP_PORT or URL,HOST:PORT (URL,kind=vllm without), then any of ,zone=NAME ,model=NAME and ,kind=KIND (repeat for more)")
	f.StringArrayVar(&r.decodes, "decode", nil, "decode worker: URL, then any of ,zone=NAME ,model=NAME and ,kind=KIND (repeat for more)")
	f.DurationVar(&r.timeout, "request-timeout", 300*time.Second, "default deadline of a request")
	f.DurationVar(&r.max, "max-request-timeout", time.Hour, "largest deadline a client may ask for")
	f.DurationVar(&r.firstByte, "first-byte-timeout", 0, "longest wait for a stream's first event; then another pair is tried (0: only the deadline)")
	f.DurationVar(&r.gap, "inter-token-timeout", 0, "longest silence of a stream that has begun; comments do not break it (0: only the deadline)")
	f.BoolVar(&r.localFallback, "local-fallback", false, "when no prefill worker is left to try, have a decode worker that can compute the prompt itself")
	f.DurationVar(&r.prefillFirst, "prefill-first-byte-timeout", 0, "longest wait for anything from the prefill worker; then another pair is tried (0: only the deadline)")
	f.DurationVar(&r.prefillGap, "prefill-gap-timeout", 0, "longest silence of a prefill worker that has begun to answer (0: only the deadline)")
	f.BoolVar(&r.resume, "resume", false, "a stream whose decode worker is lost or falls silent goes on with another pair (Baton workers)")
	f.IntVar(&r.maxResumes, "max-resumes", 3, "how often a stream may go on so, with --resume")
	f.IntVar(&r.ejectAfter, "eject-after", 3, "failures in a row that put a worker aside for a time (negative: never)")
	f.DurationVar(&r.ejectTime, "eject-time", 5*time.Second, "how long for, the first time; it doubles up to 16 times that")
	f.DurationVar(&r.health, "health-interval", time.Second, "time between health probes of a worker")
	f.IntVar(&r.maxBodyMiB, "max-body-mib", 32, "MiB of a request body at most; larger ones are answered 413")
	f.IntVar(&r.maxInflight, "max-inflight", 1024, "requests at a time; more wait")
	f.IntVar(&r.maxPerWorker, "max-inflight-per-worker", 0, "requests at a time at each worker; more wait (0: no limit)")
	f.IntVar(&r.maxQueue, "max-queue", 1024, "requests that may wait for a place; more are answered 429 (0: none wait)")
	f.DurationVar(&r.aging, "priority-aging", 2*time.Second, "how much waiting a step of X-Request-Priority is worth")
	f.StringVar(&r.policy, "policy", "least-inflight", "choice of workers: "+strings.Join(policy.Names(), ", "))
	f.StringVar(&r.prefillPolicy, "prefill-policy", "", "choice of prefill workers (default: --policy)")
	f.StringVar(&r.decodePolicy, "decode-policy", "", "choice of decode workers (default: --policy)")
	f.StringVar(&r.sessionHeader, "session-header", "X-Session-Id", "header that names a request's session, for session-hash")
	f.IntVar(&r.prefixMiB, "prefix-tree-mib", 64, "MiB that a leg's prefix tree may take, for prefix-cache")
	f.DurationVar(&r.grace, "shutdown-grace", 10*time.Second, "time for running streams when the router is asked to end (0: none)")
	return c
}

// setAttrs reads "zone=a,model=m,model=n", what may follow a worker's address in flag.
func setAttrs(b *router.Backend, flag, attrs string) error {
	for attr := range strings.SplitSeq(attrs, ",") {
		switch key, value, _ := strings.Cut(attr, "="); {
		case value == "":
			return usagef("%s: %q: want zone=NAME, model=NAME or kind=baton, sglang, vllm or plain", flag, attr)
		case key == "kind":
			b.Kind = router.Kind(value) // New refuses what it does not know
		case key == "zone":
			b.Zone = value
		case key == "model":
			b.Models = append(b.Models, value)
		default:
			return usagef("%s: a worker has no %q: want zone=NAME, model=NAME or kind=baton, sglang, vllm or plain", flag, key)
		}
	}
	return nil
}

// parseDecode reads "URL" and attributes.
func parseDecode(s string) (router.Backend, error) {
	addr, attrs, more := strings.Cut(s, ",")
	u, err := url.Parse(addr)
	if err != nil || u.Host == "" {
		return router.Backend{}, usagef("--decode %q: want a URL, for example http://10.0.0.6:8082", s)
	}
	b := router.Backend{URL: strings.TrimRight(addr, "/")}
	if more {
		err = setAttrs(&b, "--decode", attrs)
	}
	return b, err
}

// parsePrefill reads "URL,PORT" or "URL,HOST:PORT", and attributes.
func parsePrefill(s string) (router.Backend, error) {
	addr, rest, ok := strings.Cut(s, ",")
	boot, attrs, more := strings.Cut(rest, ",")
	u, err := url.Parse(addr)
	if !ok || err != nil || u.Host == "" {
		return router.Backend{}, usagef("--prefill %q: want URL,BOOTSTRAP_PORT, for example http://10.0.0.5:8081,8998", s)
	}
	if strings.Contains(boot, "=") { // vLLM's workers need no bootstrap port
		b := router.Backend{URL: strings.TrimRight(addr, "/")}
		if err = setAttrs(&b, "--prefill", rest); err == nil && b.Kind != router.KindVLLM {
			err = usagef("--prefill %q: a bootstrap port is needed, unless kind=vllm", s)
		}
		return b, err
	}
	host, port := u.Hostname(), boot
	if h, p, err := net.SplitHostPort(boot); err == nil {
		host, port = h, p
	}
	n, err := strconv.Atoi(port)
	if err != nil || n < 1 || n > 65535 {
		return router.Backend{}, usagef("--prefill %q: bootstrap port %q is not a port number", s, port)
	}
	b := router.Backend{URL: strings.TrimRight(addr, "/"), BootstrapHost: host, BootstrapPort: n}
	if more {
		err = setAttrs(&b, "--prefill", attrs)
	}
	return b, err
}

func (r *routerFlags) config(log *slog.Logger, reg *prometheus.Registry) (router.Config, error) {
	c := router.Config{
		Policy: r.policy, PrefillPolicy: r.prefillPolicy, DecodePolicy: r.decodePolicy, SessionHeader: r.sessionHeader,
		PolicyOptions: policy.Options{MaxBytes: r.prefixMiB << 20}, MaxPerWorker: r.maxPerWorker, PriorityAging: r.aging, DefaultTimeout: r.timeout, MaxTimeout: r.max, FirstByteTimeout: r.firstByte, InterTokenTimeout: r.gap, LocalFallback: r.localFallback, PrefillFirstByteTimeout: r.prefillFirst, PrefillGapTimeout: r.prefillGap, Resume: r.resume, MaxResumes: r.maxResumes, EjectAfter: r.ejectAfter, EjectTime: r.ejectTime, HealthInterval: r.health,
		MaxBody: int64(r.maxBodyMiB) << 20, MaxInflight: r.maxInflight, Log: log, Registerer: reg, Gatherer: reg, Version: version,
	}
	if c.MaxQueue = r.maxQueue; c.MaxQueue == 0 {
		c.MaxQueue = -1
	}
	for _, s := range r.prefills {
		b, err := parsePrefill(s)
		if err != nil {
			return c, err
		}
		c.Prefills = append(c.Prefills, b)
	}
	for _, s := range r.decodes {
		b, err := parseDecode(s)
		if err != nil {
			return c, err
		}
		c.Decodes = append(c.Decodes, b)
	}
	alone := r.localFallback || !slices.ContainsFunc(c.Decodes, func(b router.Backend) bool { return b.Kind != router.KindPlain })
	c.Dynamic = r.fleet.named()
	if !c.Dynamic && (len(c.Prefills) == 0 && !alone || len(c.Decodes) == 0) {
		return c, usagef("at least one --prefill and one --decode worker are needed, or decode workers that serve alone: kind=plain, or --local-fallback; or a source of workers: --workers-file, --workers-dns, --workers-etcd, --workers-kubernetes, --admin-token-file")
	}
	var err error
	if c.AdminToken, err = r.fleet.token(); err != nil {
		return c, err
	}
	return c, r.edge.configure(&c)
}

func (r *routerFlags) run(ctx context.Context, g *globals) error {
	log, err := g.logger(os.Stderr)
	if err != nil {
		return err
	}
	log = log.With("role", "router")
	ctx, stop := supervise.WatchParent(ctx)
	defer stop()
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	cfg, err := r.config(log, reg)
	if err != nil {
		return err
	}
	sources, err := r.fleet.sources()
	if err != nil {
		return err
	}
	closeSeen, err := r.seen.open(&cfg, reg, log)
	if err != nil {
		return usageError{err}
	}
	defer closeSeen()
	l, err := net.Listen("tcp", r.listen)
	if err != nil {
		return usageError{fmt.Errorf("--listen: %w", err)}
	}
	if cfg.Tracer, err = r.otlp.open("router", l.Addr().String(), log, reg); err != nil {
		return errors.Join(err, l.Close())
	}
	defer cfg.Tracer.Close()
	defer config.HeapFloor()()
	rt, err := router.New(cfg)
	if err != nil {
		return errors.Join(usageError{err}, l.Close())
	}
	defer feed(ctx, rt, log, sources)()
	defer watch(ctx, log, r.edge.watched)()
	return r.edge.serve(ctx, rt, l, r.grace, log, func() {
		if err := supervise.Ready(supervise.ReadyInfo{Role: "router", HTTP: l.Addr().String()}); err != nil {
			log.Warn("could not report readiness", "err", err)
		}
		log.Info("ready", "http", l.Addr().String(), "prefill", len(cfg.Prefills), "decode", len(cfg.Decodes))
	})
}
