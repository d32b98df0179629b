package router

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Policies of choosing a worker, for both legs.
const (
	PolicyLeastInflight = "least-inflight" // fewest requests of this router, in turn among equals
	PolicyRoundRobin    = "round-robin"
)

// Backend is one worker.
type Backend struct {
	URL string // http://host:port
	// BootstrapHost and BootstrapPort are where decode workers reach a prefill
	// worker's sessions; unused on decode workers. The host defaults to the URL's.
	BootstrapHost string
	BootstrapPort int
}

// Config of a [Router]. Zero values take the defaults in brackets.
type Config struct {
	Prefills, Decodes []Backend
	Policy            string // [PolicyLeastInflight]
	// DefaultTimeout is the deadline of a request that names none in
	// X-Request-Timeout-Ms [300s], MaxTimeout the largest it may name [1h].
	DefaultTimeout, MaxTimeout time.Duration
	// FirstByteTimeout bounds the wait for a stream's first event; the request is then
	// tried on another pair, or fails. [0: only the deadline counts]
	FirstByteTimeout time.Duration
	// BodyTimeout bounds the arrival of a request's body [30s].
	BodyTimeout time.Duration
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
	// MaxInflight is the number of requests at a time [1024]; more are answered 503.
	MaxInflight int

	Log        *slog.Logger          // [discards]
	Registerer prometheus.Registerer // for the router's metrics [a registry of its own]
	Gatherer   prometheus.Gatherer   // behind /metrics [the registry of its own]
	Version    string
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
	if c.MaxRetries == 0 {
		c.MaxRetries = 2
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
	if len(c.Prefills) == 0 || len(c.Decodes) == 0 {
		return errors.New("router: at least one prefill and one decode worker are needed")
	}
	if c.Policy != PolicyLeastInflight && c.Policy != PolicyRoundRobin {
		return fmt.Errorf("router: policy %q: use %s or %s", c.Policy, PolicyLeastInflight, PolicyRoundRobin)
	}
	for _, d := range []time.Duration{c.DefaultTimeout, c.MaxTimeout, c.FirstByteTimeout, c.BodyTimeout, c.HealthInterval, c.HealthTimeout, c.DialTimeout} {
		if d < 0 {
			return fmt.Errorf("router: a negative duration: %v", d)
		}
	}
	if c.DefaultTimeout > c.MaxTimeout {
		return fmt.Errorf("router: the default deadline %v is larger than the largest, %v", c.DefaultTimeout, c.MaxTimeout)
	}
	if c.MaxBody < 0 || c.MaxAnswer < 0 || c.MaxInflight < 0 {
		return errors.New("router: a negative limit")
	}
	return nil
}

// parse checks a backend and returns its base address and, for prefill, where its sessions are.
func (b Backend) parse(prefill bool) (base *url.URL, host string, port int, err error) {
	base, err = url.Parse(b.URL)
	switch {
	case err != nil:
		return nil, "", 0, fmt.Errorf("router: worker address: %w", err)
	case base.Scheme != "http" && base.Scheme != "https" || base.Hostname() == "" || base.RawQuery != "" || base.User != nil:
		return nil, "", 0, fmt.Errorf("router: worker address %q: want http://host:port", b.URL)
	case prefill && (b.BootstrapPort < 1 || b.BootstrapPort > 65535):
		return nil, "", 0, fmt.Errorf("router: prefill worker %s: bootstrap port %s is not a port", b.URL, strconv.Itoa(b.BootstrapPort))
	}
	if base.Path == "" {
		base.Path = "/" // JoinPath on an empty path makes a relative one
	}
	if host = b.BootstrapHost; host == "" {
		host = base.Hostname()
	}
	return base, host, b.BootstrapPort, nil
}
