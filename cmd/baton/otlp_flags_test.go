package main

import (
	"errors"
	"io"
	"log/slog"
	"reflect"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
)

// What `baton up` is told of traces reaches its children, whose flags read it back.
func TestOTLPFlags(t *testing.T) {
	for _, args := range [][]string{nil, {"--otlp", "http://c:1"}, {"--otlp-ratio", "0"}, {"--otlp", "c:4317", "--otlp-ratio", "0.25"}} {
		read := func(args []string) *otlpFlags {
			o, f := &otlpFlags{}, pflag.NewFlagSet("x", pflag.ContinueOnError)
			o.add(f)
			if err := f.Parse(args); err != nil {
				t.Fatal(err)
			}
			return o
		}
		o := read(args)
		if got := o.args(); !reflect.DeepEqual(got, args) || !reflect.DeepEqual(read(got), o) {
			t.Errorf("%v is handed on as %v", args, got)
		}
	}
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	off := otlpFlags{ratio: -1}
	if tr, err := off.open("router", "x", log, nil); tr != nil || err != nil {
		t.Errorf("without an endpoint: %v, %v", tr, err)
	}
	for _, bad := range []otlpFlags{{endpoint: "ftp://c"}, {endpoint: "c:1", ratio: 7}} {
		var usage usageError
		if tr, err := bad.open("router", "x", log, nil); !errors.As(err, &usage) {
			t.Errorf("%+v: %v, %v", bad, tr, err)
		}
	}
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
	reg := prometheus.NewRegistry()
	tr, err := off.open("router", "x", log, reg)
	if tr == nil || err != nil {
		t.Fatalf("with the variable: %v, %v", tr, err)
	}
	tr.Close()
	if n, err := reg.Gather(); err != nil || len(n) != 1 {
		t.Errorf("metrics %v, %v", n, err)
	}
}
