package repotest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/otel"
	"github.com/baton-pd/baton/internal/router"
	"github.com/baton-pd/baton/internal/router/accesslog"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/mem"
	"github.com/baton-pd/baton/internal/transfer/meter"
	"github.com/baton-pd/baton/internal/worker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// metric is what code or page says of one.
type metric struct {
	kind   string // counter, gauge, histogram; "" if not known
	labels []string
}

// startWorker runs a worker with everything that cmd/baton gives one, and returns its HTTP address.
func startWorker(t *testing.T, role string, network *mem.Transport, bootstrap net.Listener) (string, *prometheus.Registry) {
	t.Helper()
	eng, err := sim.Open(sim.Config{ChunkTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	reg := prometheus.NewRegistry()
	c := worker.Config{ID: role, Engine: eng, HTTP: l, Transports: []transfer.Transport{meter.New(reg).Wrap(network)}, Metrics: reg,
		PoolBytes: 1 << 20, MaxQueue: 8, MaxRunning: 4, Timeouts: worker.DefaultTimeouts(), Log: slog.New(slog.DiscardHandler)}
	var w *worker.Worker
	if role == "prefill" {
		w, err = worker.NewPrefill(c, bootstrap)
	} else {
		w, err = worker.NewDecode(c)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, stop := context.WithTimeout(context.Background(), 5*time.Second)
		defer stop()
		if err := w.Close(ctx); err != nil {
			t.Errorf("close %s: %v", role, err)
		}
	})
	return l.Addr().String(), reg
}

// running is every baton_* metric that a router and both workers have after some traffic.
func running(t *testing.T) map[string]metric {
	t.Helper()
	network := mem.New(mem.NewRegistry())
	boot, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(boot.Addr().String())
	bootPort, _ := strconv.Atoi(port)
	pAddr, pReg := startWorker(t, "prefill", network, boot)
	dAddr, dReg := startWorker(t, "decode", network, nil)
	rReg := prometheus.NewRegistry()
	tracer, err := otel.Open(otel.Config{Endpoint: "127.0.0.1:1", Ratio: 0, Registerer: rReg}) // nothing is sent
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tracer.Close)
	access, err := accesslog.Open(accesslog.Config{Path: filepath.Join(t.TempDir(), "access.log"), Registerer: rReg})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = access.Close() }) // its file goes anyway
	rt, err := router.New(router.Config{Connections: edge.NewConnections(1), Tracer: tracer, AccessLog: access, Registerer: rReg, Gatherer: rReg,
		Prefills: []router.Backend{{URL: "http://" + pAddr, BootstrapPort: bootPort}}, Decodes: []router.Backend{{URL: "http://" + dAddr}}})
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(rt.Handler())
	t.Cleanup(func() { srv.Close(); rt.Close() })
	for want, body := range map[int]string{
		200: `{"prompt":"the quick brown fox jumps over the lazy dog","max_tokens":3,"stream":true}`,
		400: `{"prompt":"x","no_such_field":1}`,
	} {
		res, err := srv.Client().Post(srv.URL+"/v1/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || res.StatusCode != want {
			t.Fatalf("status %d, want %d: %s %v", res.StatusCode, want, text, err)
		}
	}
	out := map[string]metric{}
	for _, reg := range []*prometheus.Registry{pReg, dReg, rReg} {
		describe(t, reg, out)
	}
	return out
}

var descText = regexp.MustCompile(`^Desc\{fqName: ("(?:[^"\\]|\\.)*"), help: .*, constLabels: \{(.*)\}, variableLabels: \{(.*)\}\}$`)

// describe adds what reg has; a metric without a sample is described all the same.
func describe(t *testing.T, reg *prometheus.Registry, out map[string]metric) {
	t.Helper()
	descs := make(chan *prometheus.Desc)
	go func() {
		reg.Describe(descs)
		close(descs)
	}()
	for d := range descs {
		m := descText.FindStringSubmatch(d.String())
		if m == nil {
			t.Errorf("a description reads otherwise than it did: %s", d)
			continue
		}
		name, _ := strconv.Unquote(m[1])
		if !strings.HasPrefix(name, "baton_") {
			continue
		}
		var labels []string
		for l := range strings.SplitSeq(m[2]+","+m[3], ",") {
			if l, _, _ = strings.Cut(strings.TrimSpace(l), "="); l != "" {
				labels = append(labels, l)
			}
		}
		slices.Sort(labels)
		old, known := out[name]
		if known && !slices.Equal(old.labels, labels) {
			t.Errorf("%s has labels %v at one place and %v at another", name, old.labels, labels)
		}
		out[name] = metric{kind: old.kind, labels: labels}
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if m, ours := out[f.GetName()]; ours {
			m.kind = strings.ToLower(f.GetType().String())
			out[f.GetName()] = m
		}
	}
}

var metricRow = regexp.MustCompile("(?m)^\\| `(baton_[a-z0-9_]+)` \\| (\\w+) \\| ([^|]*) \\|")

// documented reads the tables of docs/metrics.md.
func documented(t *testing.T) map[string]metric {
	t.Helper()
	out := map[string]metric{}
	for _, m := range metricRow.FindAllStringSubmatch(string(read(t, "docs/metrics.md")), -1) {
		if _, twice := out[m[1]]; twice {
			t.Errorf("docs/metrics.md explains %s twice", m[1])
		}
		labels := strings.FieldsFunc(m[3], func(r rune) bool { return r == ' ' || r == ',' || r == '–' })
		slices.Sort(labels)
		out[m[1]] = metric{kind: m[2], labels: labels}
	}
	return out
}

// TestMetricsAreDocumented compares a running stack with docs/metrics.md, both ways.
func TestMetricsAreDocumented(t *testing.T) {
	have, page := running(t), documented(t)
	if len(have) < 50 {
		t.Fatalf("only %d metrics found", len(have))
	}
	for name, m := range have {
		p, ok := page[name]
		switch {
		case !ok:
			t.Errorf("docs/metrics.md does not explain %s %v", name, m)
		case !slices.Equal(p.labels, m.labels):
			t.Errorf("docs/metrics.md gives %s the labels %v; they are %v", name, p.labels, m.labels)
		case m.kind != "" && p.kind != m.kind:
			t.Errorf("docs/metrics.md calls %s a %s; it is a %s", name, p.kind, m.kind)
		}
	}
	for name := range page {
		if _, ok := have[name]; !ok {
			t.Errorf("docs/metrics.md explains %s, which nothing has", name)
		}
	}
}

// TestAccountingIsComplete: what /server_info shows is what a test of the idle baseline reads; a renamed
// field would make such a test blind.
func TestAccountingIsComplete(t *testing.T) {
	network := mem.New(mem.NewRegistry())
	addr, _ := startWorker(t, "decode", network, nil)
	res, err := http.Get("http://" + addr + "/server_info")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	var info struct {
		State map[string]any     `json:"state"`
		Pool  map[string]float64 `json:"pool"`
		Rooms map[string]float64 `json:"rooms"`
	}
	if err := json.NewDecoder(res.Body).Decode(&info); err != nil {
		t.Fatal(err)
	}
	for _, k := range []string{"Total", "Free", "Quarantine", "Leases", "PoisonHits", "Misuses"} {
		if _, ok := info.Pool[k]; !ok {
			t.Errorf("server_info has no pool.%s: %v", k, info.Pool)
		}
	}
	for _, k := range []string{"cells_used", "seqs_used", "prealloc", "transfer", "running", "preempted", "rooms", "pages_total", "pages_free"} {
		if _, ok := info.State[k]; !ok {
			t.Errorf("server_info has no state.%s: %v", k, info.State)
		}
	}
	if info.Pool["Total"] == 0 || fmt.Sprint(info.State["pages_total"]) != fmt.Sprint(info.Pool["Total"]) {
		t.Errorf("state says %v pages, pool %v", info.State["pages_total"], info.Pool["Total"])
	}
}
