package main

import (
	"log/slog"
	"os"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"github.com/baton-pd/baton/internal/otel"
)

// otlpFlags turn traces on, for router and workers alike.
type otlpFlags struct {
	endpoint string
	ratio    float64
}

func (o *otlpFlags) add(f *pflag.FlagSet) {
	f.StringVar(&o.endpoint, "otlp", "", "send OpenTelemetry traces to this collector by gRPC: http://HOST:4317, https:// with TLS (default: $OTEL_EXPORTER_OTLP_ENDPOINT; off without)")
	f.Float64Var(&o.ratio, "otlp-ratio", -1, "share of the traces that begin here which are recorded, 0 to 1; 0: none (default: $OTEL_TRACES_SAMPLER, or all)")
}

// args repeats the flags for a child process.
func (o *otlpFlags) args() (args []string) {
	if o.endpoint != "" {
		args = append(args, "--otlp", o.endpoint)
	}
	if o.ratio >= 0 {
		args = append(args, "--otlp-ratio", strconv.FormatFloat(o.ratio, 'g', -1, 64))
	}
	return args
}

// open is the role's tracer, nil if traces are off. The caller closes it last.
func (o *otlpFlags) open(role, instance string, log *slog.Logger, reg prometheus.Registerer) (*otel.Tracer, error) {
	endpoint, err := otel.Endpoint(o.endpoint, os.Getenv)
	if err != nil {
		return nil, usageError{err}
	}
	if endpoint == "" {
		return nil, nil
	}
	t, err := otel.Open(otel.Config{Endpoint: endpoint, Service: "baton-" + role, Instance: instance, Version: version, Ratio: o.ratio, Log: log, Registerer: reg})
	if err != nil {
		return nil, usageError{err}
	}
	log.Info("traces are sent", "collector", endpoint)
	return t, nil
}
