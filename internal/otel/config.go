package otel

import (
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Config of a [Tracer]. Zero values take the defaults in brackets.
type Config struct {
	// Endpoint is the collector: http://host:port or host:port without TLS, https://host:port with. Required; see [Endpoint].
	Endpoint string
	Service  string // service.name, for example "baton-router"; OTEL_SERVICE_NAME comes before it
	Instance string // service.instance.id: the worker's or router's address
	Version  string // service.version
	// Ratio in [0, 1] is the share of the traces that begin here which are recorded; negative: what OTEL_TRACES_SAMPLER
	// says, or all. A parent's choice always comes first.
	Ratio float64
	// MaxQueue is how many ended spans may wait for the collector [4096]; more are dropped.
	MaxQueue int
	// BatchDelay is how long a span waits for others [1s].
	BatchDelay time.Duration
	// ExportTimeout bounds the sending of one batch with its retries [10s].
	ExportTimeout time.Duration
	// CloseTimeout bounds Close [2s].
	CloseTimeout time.Duration

	Log        *slog.Logger          // [discards]
	Registerer prometheus.Registerer // for the counters of spans [none]
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		v *time.Duration
		d time.Duration
	}{{&c.BatchDelay, time.Second}, {&c.ExportTimeout, 10 * time.Second}, {&c.CloseTimeout, 2 * time.Second}} {
		if *d.v <= 0 {
			*d.v = d.d
		}
	}
	if c.MaxQueue <= 0 {
		c.MaxQueue = 4096
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Endpoint says where traces go: to flag if it is set, otherwise where OpenTelemetry's own variables say. "" with no error: nowhere,
// traces are off. getenv is os.Getenv.
func Endpoint(flag string, getenv func(string) string) (string, error) {
	if flag != "" {
		return parseEndpoint("--otlp", flag)
	}
	if strings.EqualFold(getenv("OTEL_SDK_DISABLED"), "true") || getenv("OTEL_TRACES_EXPORTER") == "none" {
		return "", nil
	}
	for _, name := range []string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"} {
		v := getenv(name)
		if v == "" {
			continue
		}
		for _, p := range []string{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"} {
			if proto := getenv(p); proto == "grpc" {
				break
			} else if proto != "" {
				return "", fmt.Errorf("%s=%s: only grpc is spoken here; give the collector's gRPC port (4317) and unset it, or turn traces off with OTEL_TRACES_EXPORTER=none", p, proto)
			}
		}
		return parseEndpoint(name, v)
	}
	return "", nil
}

// parseEndpoint takes a URL, or host:port for plain text.
func parseEndpoint(what, v string) (string, error) {
	full := v
	if !strings.Contains(v, "://") {
		full = "http://" + v
	}
	u, err := url.Parse(full)
	switch {
	case err != nil:
		return "", fmt.Errorf("%s: %w", what, err)
	case u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.User != nil:
		return "", fmt.Errorf("%s %q: want http://host:4317, https://host:4317 or host:4317", what, v)
	}
	port := u.Port()
	if port == "" {
		port = "4317"
	}
	return u.Scheme + "://" + net.JoinHostPort(u.Hostname(), port), nil
}
