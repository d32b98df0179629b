package router

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/otel"
	"github.com/baton-pd/baton/internal/router/accesslog"
	"github.com/baton-pd/baton/internal/router/policy"
)

// Policies of choosing a worker; package policy has more.
const (
	PolicyLeastInflight = policy.LeastInflight // fewest requests of this router, in turn among equals
	PolicyRoundRobin    = policy.RoundRobin
)

// Backend is one worker.
type Backend struct {
	URL string // http://host:port
	// BootstrapHost and BootstrapPort are where decode workers reach a prefill
	// worker's sessions; unused on decode workers. The host defaults to the URL's.
	BootstrapHost string
	BootstrapPort int
	// Zone is where the worker is, for policy pair-cost; Models, if not empty, all the models it has: requests for
	// another one go to others.
	Zone   string
	Models []string
	// Kind is what its server is [asked of it].
	Kind Kind
}

// Config of a [Router]. Zero values take the defaults in brackets.
type Config struct {
	Prefills, Decodes []Backend
	// Dynamic: workers may come later, by SetWorkers or the API; none at first is no error.
	Dynamic bool
	// AdminToken is what changes of the fleet by /workers must carry as "Authorization: Bearer" ["": they are refused].
	AdminToken string
	// Keys are the clients' API keys [nil: everybody may ask]; OpenMetrics leaves /metrics open nevertheless.
	Keys        *edge.Keys
	OpenMetrics bool
	// Connections bounds the open connections of the server that Handler runs in; its fields are the router's to set [nil: no limit].
	Connections *edge.Connections
	// CORS is which browsers' pages may ask [none of other origins].
	CORS edge.CORS
	// WorkerKey goes to workers as "Authorization: Bearer" [""]; the client's own only with PassAuthorization and without a WorkerKey.
	WorkerKey         string
	PassAuthorization bool
	// WorkerTLS is for workers whose address is https [the system's CAs].
	WorkerTLS edge.ClientTLS
	Policy    string // of both legs [PolicyLeastInflight]
	// PrefillPolicy and DecodePolicy are the policies of the legs [Policy], see package policy.
	PrefillPolicy, DecodePolicy string
	PolicyOptions               policy.Options
	// SessionHeader names the session of a request, for policy session-hash [X-Session-Id].
	SessionHeader string
	// DefaultTimeout is the deadline of a request that names none in
	// X-Request-Timeout-Ms [300s], MaxTimeout the largest it may name [1h].
	DefaultTimeout, MaxTimeout time.Duration
	// FirstByteTimeout bounds the wait for a stream's first event; the request is then
	// tried on another pair, or fails. [0: only the deadline counts]
	FirstByteTimeout time.Duration
	// InterTokenTimeout bounds the silence of a stream that has begun; comments do not break it. [0: only the deadline counts]
	InterTokenTimeout time.Duration
	// PrefillFirstByteTimeout bounds the wait for anything from the prefill worker, PrefillGapTimeout its silence once it has
	// begun to answer; see prefillWatch. [0: none]
	PrefillFirstByteTimeout, PrefillGapTimeout time.Duration
	// Resume has a stream that breaks after its first byte go on with another pair, at most MaxResumes times [3], where the
	// workers can: see thread.
	Resume     bool
	MaxResumes int
	// EjectAfter is how many failures in a row, with no success between, eject a worker [3]; negative: never.
	// EjectTime is how long for, the first time [5s]; see outlier.
	EjectAfter int
	EjectTime  time.Duration
	// LocalFallback has decode workers compute prompts themselves, where they can, when no prefill worker is left to try.
	LocalFallback bool
	// BodyTimeout bounds the arrival of a request's body [30s].
	BodyTimeout time.Duration
	// ClientStall bounds the time in which a client reads nothing of what is written to it [60s]; negative: only the deadline counts.
	ClientStall time.Duration
	// HealthInterval is the pause between probes of a worker [1s], HealthTimeout bounds one [2s].
	HealthInterval, HealthTimeout time.Duration
	// DialTimeout bounds the opening of a connection to a worker [2s].
	DialTimeout time.Duration
	// MaxRetries is how often a request that failed before its first byte is tried
	// on another pair [2]; negative: never.
	MaxRetries int
	// MaxBody is the largest body of a request in bytes [32 MiB]; larger ones are answered 413.
	MaxBody int64
	// MaxAnswer is the largest answer that is not streamed, in bytes [64 MiB].
	MaxAnswer int64
	// MaxInflight is the number of requests at a time [1024]; more wait.
	MaxInflight int
	// MaxQueue is how many may wait [1024]; more are answered 429. Negative: none.
	MaxQueue int
	// MaxPerWorker is the number of legs at a worker at a time [0: no limit]; more wait.
	MaxPerWorker int
	// PriorityAging is how much waiting a step of priority is worth [2s].
	PriorityAging time.Duration

	// NoUI leaves out the page at /ui.
	NoUI bool
	// AccessLog gets each request that has ended; it stays its maker's, who closes it after the router [none].
	AccessLog *accesslog.Log

	Log        *slog.Logger          // [discards]
	Registerer prometheus.Registerer // for the router's metrics [a registry of its own]
	Gatherer   prometheus.Gatherer   // behind /metrics [the registry of its own]
	Version    string
	// Tracer makes spans of requests [nil: none are made]; the caller closes it after the router.
	Tracer *otel.Tracer
	// DialContext opens connections to workers [a net.Dialer with DialTimeout].
	DialContext func(ctx context.Context, network, addr string) (net.Conn, error)
}

// withDefaults returns a filled copy.
func (c Config) withDefaults() Config {
	for _, d := range []struct {
		v *time.Duration
		d time.Duration
	}{
		{&c.MaxTimeout, time.Hour}, {&c.DefaultTimeout, min(300*time.Second, c.MaxTimeout)}, {&c.BodyTimeout, 30 * time.Second},
		{&c.HealthInterval, time.Second}, {&c.HealthTimeout, 2 * time.Second}, {&c.DialTimeout, 2 * time.Second},
		{&c.EjectTime, 5 * time.Second}, {&c.ClientStall, time.Minute},
		{&c.PriorityAging, 2 * time.Second},
	} {
		if *d.v == 0 {
			*d.v = d.d
		}
	}
	if c.DefaultTimeout == 0 {
		c.DefaultTimeout = min(300*time.Second, c.MaxTimeout)
	}
	if c.Policy == "" {
		c.Policy = PolicyLeastInflight
	}
	if c.PrefillPolicy == "" {
		c.PrefillPolicy = c.Policy
	}
	if c.DecodePolicy == "" {
		c.DecodePolicy = c.Policy
	}
	if c.SessionHeader == "" {
		c.SessionHeader = "X-Session-Id"
	}
	if c.MaxQueue == 0 {
		c.MaxQueue = 1024
	}
	if c.EjectAfter == 0 {
		c.EjectAfter = 3
	}
	if c.MaxRetries == 0 {
		c.MaxRetries = 2
	}
	if c.MaxResumes == 0 {
		c.MaxResumes = 3
	}
	if c.MaxBody == 0 {
		c.MaxBody = 32 << 20
	}
	if c.MaxAnswer == 0 {
		c.MaxAnswer = 64 << 20
	}
	if c.MaxInflight == 0 {
		c.MaxInflight = 1024
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Registerer == nil {
		own := prometheus.NewRegistry()
		c.Registerer = own
		if c.Gatherer == nil {
			c.Gatherer = own
		}
	}
	if c.DialContext == nil {
		c.DialContext = (&net.Dialer{Timeout: c.DialTimeout, KeepAlive: 15 * time.Second}).DialContext
	}
	return c
}

// validate names the first thing wrong with a filled configuration.
func (c Config) validate() error {
	needsPrefill := !c.LocalFallback
	if needsPrefill {
		needsPrefill = slices.ContainsFunc(c.Decodes, func(b Backend) bool { return b.Kind != KindPlain })
	}
	if !c.Dynamic && (len(c.Decodes) == 0 || len(c.Prefills) == 0 && needsPrefill) {
		return errors.New("router: at least one prefill and one decode worker are needed; plain servers alone will do")
	}
	for _, name := range []string{c.Policy, c.PrefillPolicy, c.DecodePolicy} {
		if !policy.Known(name) {
			return fmt.Errorf("router: policy %q: use one of %s", name, strings.Join(policy.Names(), ", "))
		}
	}
	for _, d := range []time.Duration{c.DefaultTimeout, c.MaxTimeout, c.FirstByteTimeout, c.InterTokenTimeout, c.PrefillFirstByteTimeout, c.PrefillGapTimeout, c.EjectTime, c.BodyTimeout, c.HealthInterval, c.HealthTimeout, c.DialTimeout, c.PriorityAging} {
		if d < 0 {
			return fmt.Errorf("router: a negative duration: %v", d)
		}
	}
	if c.DefaultTimeout > c.MaxTimeout {
		return fmt.Errorf("router: the default deadline %v is larger than the largest, %v", c.DefaultTimeout, c.MaxTimeout)
	}
	if !isToken(c.SessionHeader) {
		return fmt.Errorf("router: session header %q: not a header's name", c.SessionHeader)
	}
	if err := c.CORS.Validate(); err != nil {
		return fmt.Errorf("router: %w", err)
	}
	if c.MaxBody < 0 || c.MaxAnswer < 0 || c.MaxInflight < 0 || c.MaxPerWorker < 0 || c.MaxResumes < 0 {
		return errors.New("router: a negative limit")
	}
	return nil
}

// isToken: s may name a header.
func isToken(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return !(r >= '0' && r <= '9' || r >= 'A' && r <= 'Z' || r >= 'a' && r <= 'z' || strings.ContainsRune("!#$%&'*+-.^_`|~", r))
	})
}

// parse checks a backend and returns its base address and, for prefill, where its sessions are.
func (b Backend) parse(prefill bool) (base *url.URL, host string, port int, err error) {
	base, err = url.Parse(b.URL)
	switch {
	case err != nil:
		return nil, "", 0, fmt.Errorf("router: worker address: %w", err)
	case base.Scheme != "http" && base.Scheme != "https" || base.Hostname() == "" || base.RawQuery != "" || base.User != nil:
		return nil, "", 0, fmt.Errorf("router: worker address %q: want http://host:port", b.URL)
	}
	if err := b.checkKind(prefill); err != nil {
		return nil, "", 0, err
	}
	if base.Path == "" {
		base.Path = "/" // JoinPath on an empty path makes a relative one
	}
	if host = b.BootstrapHost; host == "" {
		host = base.Hostname()
	}
	return base, host, b.BootstrapPort, nil
}
