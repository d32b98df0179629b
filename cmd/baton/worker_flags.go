package main

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/llamacpp"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/setup"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/fault"
	"github.com/baton-pd/baton/internal/transfer/meter"
	"github.com/baton-pd/baton/internal/transfer/shm"
	"github.com/baton-pd/baton/internal/transfer/tcp"
	"github.com/baton-pd/baton/internal/worker"
)

// engineFlags choose and shape the engine; `up` passes them on to its workers.
type engineFlags struct {
	kind       string
	model      string
	name       string
	libDir     string
	cacheDir   string
	threads    int
	contextLen int
	kvCells    int
	chunk      int
	maxRunning int
	simSpec    string
}

func (e *engineFlags) add(f *pflag.FlagSet) {
	f.StringVar(&e.kind, "engine", "llamacpp", "llamacpp, or sim (deterministic test engine)")
	f.StringVar(&e.model, "model", "", "GGUF file (default: the model that 'baton setup' fetched)")
	f.StringVar(&e.name, "served-model-name", "", "name in the API (default: from the model file)")
	f.StringVar(&e.libDir, "lib-dir", "", "directory of libllama.so (default: what 'baton setup' fetched)")
	f.StringVar(&e.cacheDir, "cache-dir", "", "where 'baton setup' put things (default: $BATON_CACHE or the user's cache directory)")
	f.IntVar(&e.contextLen, "ctx", 0, "tokens of one request at most, prompt and answer (default: the model's, 4096 at most)")
	f.IntVar(&e.kvCells, "kv-cells", 0, "tokens of all running requests together (default: 4 times --ctx)")
	f.IntVar(&e.chunk, "chunk", 128, "prompt tokens a chunk; must be equal on both sides")
	f.IntVar(&e.maxRunning, "max-running", 8, "requests computed at a time")
	f.StringVar(&e.simSpec, "sim", "", "sim engine settings, key=value,... (see internal/engine/sim)")
}

// args repeats the flags for a child process.
func (e *engineFlags) args() []string {
	out := []string{"--engine", e.kind, "--chunk", strconv.Itoa(e.chunk), "--max-running", strconv.Itoa(e.maxRunning),
		"--ctx", strconv.Itoa(e.contextLen), "--kv-cells", strconv.Itoa(e.kvCells)}
	for _, p := range []struct{ flag, value string }{
		{"--model", e.model}, {"--served-model-name", e.name}, {"--lib-dir", e.libDir}, {"--cache-dir", e.cacheDir}, {"--sim", e.simSpec},
	} {
		if p.value != "" {
			out = append(out, p.flag, p.value)
		}
	}
	return out
}

// locate fills in model and library from the setup's cache where they were not named.
func (e *engineFlags) locate() error {
	if e.kind != "llamacpp" || (e.model != "" && e.libDir != "") {
		return nil
	}
	p, err := setup.Locate(e.cacheDir)
	if err != nil {
		return fmt.Errorf("%w, or name --model and --lib-dir", err)
	}
	if e.model == "" {
		e.model = p.Model
	}
	if e.libDir == "" {
		e.libDir = p.LibDir
	}
	return nil
}

// open loads the model.
func (e *engineFlags) open(log *slog.Logger) (engine.Compute, error) {
	if e.chunk < 1 || e.maxRunning < 1 || e.contextLen < 0 || e.kvCells < 0 || e.threads < 0 {
		return nil, usagef("--chunk and --max-running must be at least 1; --ctx, --kv-cells and --threads not negative")
	}
	switch e.kind {
	case "sim":
		c, err := sim.ParseConfig(e.simSpec)
		if err != nil {
			return nil, usageError{fmt.Errorf("--sim: %w", err)}
		}
		c.ChunkTokens, c.MaxSeqs = e.chunk, e.maxRunning
		if e.contextLen > 0 {
			c.ContextLen = e.contextLen
		}
		if e.kvCells > 0 {
			c.KVCells = e.kvCells
		}
		return sim.Open(c)
	case "llamacpp":
		if err := e.locate(); err != nil {
			return nil, err
		}
		cells := e.kvCells
		if cells == 0 {
			cells = 4 * max(e.contextLen, 4096)
		}
		return llamacpp.Open(llamacpp.Config{
			LibDir: e.libDir, Model: e.model, ContextLen: e.contextLen, KVCells: cells,
			MaxSeqs: e.maxRunning, Threads: e.threadCount(), ChunkTokens: e.chunk, BatchRows: e.maxRunning, Log: log,
		})
	default:
		return nil, usagef("--engine %q: use llamacpp or sim", e.kind)
	}
}

func (e *engineFlags) threadCount() int {
	if e.threads > 0 {
		return e.threads
	}
	return runtime.NumCPU()
}

// workerFlags are the flags of `prefill` and `decode`.
type workerFlags struct {
	engineFlags
	listen, id                  string
	transport                   string
	dataListen, dataAdvertise   string
	shmDir                      string
	nixl                        nixlFlags
	faults                      string
	otlp                        otlpFlags
	roomTrace                   string
	roomTraceMiB                int
	maxQueue                    int
	poolMiB                     int
	pageBytes                   int
	prefixPages                 int // decode only
	maxBodyMiB                  int
	poison                      bool
	hugePages                   kv.HugePages
	timeouts                    worker.Timeouts
	keepaliveTime, keepaliveMax time.Duration
	shutdownGrace               time.Duration
	monolithic, local           bool // decode only
	edge                        workerEdge
}

func (w *workerFlags) add(f *pflag.FlagSet, listen string) {
	w.engineFlags.add(f)
	w.timeouts = worker.DefaultTimeouts()
	f.IntVar(&w.threads, "threads", 0, "compute threads (default: all cores; never more than cores over all workers of a machine)")
	f.StringVar(&w.listen, "listen", listen, "address of the HTTP side")
	f.StringVar(&w.id, "id", "", "name in logs and errors (default: the listening address)")
	f.StringVar(&w.transport, "transport", "auto", "auto (shm on the same machine, otherwise tcp), shm, tcp or nixl")
	f.StringVar(&w.dataListen, "data-listen", "", "decode: address of the tcp transport, or of nixl's control port (default: the host of --listen, any port)")
	f.StringVar(&w.dataAdvertise, "data-advertise", "", "decode: address that prefill workers reach it by (default: the listening one)")
	f.StringVar(&w.shmDir, "shm-dir", "", "decode: directory of the shm transport's socket (default: a private one in the temporary directory)")
	w.nixl.add(f)
	w.otlp.add(f)
	w.edge.addTo(f)
	f.IntVar(&w.maxQueue, "max-queue", 256, "requests that may wait; more are answered 503")
	f.IntVar(&w.poolMiB, "pool-mib", 512, "MiB of KV memory outside the engine: decode's landing pages, prefill's staging")
	f.Var(&w.hugePages, "huge-pages", "of that memory: advise (transparent ones where the kernel lets us), hugetlb (reserved ones, vm.nr_hugepages) or off")
	f.IntVar(&w.pageBytes, "page-bytes", 0, "bytes a page (default: one whole chunk)")
	f.IntVar(&w.maxBodyMiB, "max-body-mib", 32, "MiB of a request body at most; larger ones are answered 413")
	f.BoolVar(&w.poison, "poison-pages", false, "check that nothing is stored into free pages (slow; for tests)")
	f.DurationVar(&w.timeouts.Bootstrap, "bootstrap-timeout", w.timeouts.Bootstrap, "longest wait for session, pages and grant (0: only the request's deadline)")
	f.DurationVar(&w.timeouts.Waiting, "waiting-timeout", w.timeouts.Waiting, "longest wait from the grant to the first chunk (0: only the request's deadline)")
	f.DurationVar(&w.timeouts.Transfer, "transfer-timeout", w.timeouts.Transfer, "longest time from the first chunk to the last (0: only the request's deadline)")
	f.DurationVar(&w.timeouts.Park, "park-timeout", w.timeouts.Park, "prefill: how long a grant waits for its request")
	f.DurationVar(&w.timeouts.Request, "request-timeout", w.timeouts.Request, "default deadline of a request")
	f.DurationVar(&w.timeouts.Max, "max-request-timeout", w.timeouts.Max, "largest deadline a client may ask for")
	f.DurationVar(&w.keepaliveTime, "keepalive-time", 2*time.Second, "silence after which a session's peer is pinged")
	f.DurationVar(&w.keepaliveMax, "keepalive-timeout", 3*time.Second, "time for the ping's answer; then the session is lost")
	f.DurationVar(&w.shutdownGrace, "shutdown-grace", 10*time.Second, "time for running streams when the worker is asked to end (0: none)")
	f.StringVar(&w.roomTrace, "room-trace", "", "file for a record of every room's events, checked by baton race --check-trace; appended to")
	f.IntVar(&w.roomTraceMiB, "room-trace-mib", 256, "MiB of that file at most; what does not fit is dropped, and the trace reported incomplete")
	f.StringVar(&w.faults, "fault", "", "file of transfer fault rules (for tests; see docs/faults.md)")
}

// hostOf is the host part of a listening address.
func hostOf(addr string) string {
	host, _, err := net.SplitHostPort(addr)
	if err != nil || host == "" {
		return "127.0.0.1"
	}
	return host
}

// transports builds the enabled ones in order of preference, metered and, if asked
// for, with faults. onPool is set to what wants to know the KV memory, if anything does.
func (w *workerFlags) transports(log *slog.Logger, reg prometheus.Registerer, onPool *func(transfer.Memory, int)) ([]transfer.Transport, error) {
	dataListen := w.dataListen
	if dataListen == "" {
		dataListen = net.JoinHostPort(hostOf(w.listen), "0")
	}
	var ts []transfer.Transport
	add := map[string]func(){
		"shm": func() { ts = append(ts, shm.New(shm.Config{Dir: w.shmDir})) },
		"tcp": func() {
			ts = append(ts, tcp.New(tcp.Config{Listen: dataListen, Advertise: w.dataAdvertise}))
		},
	}
	switch w.transport {
	case "auto":
		add["shm"]()
		add["tcp"]()
	case "shm", "tcp":
		add[w.transport]()
	case "nixl":
		t, err := w.nixl.open(w.cacheDir, dataListen, w.dataAdvertise, log)
		if err != nil {
			return nil, err
		}
		ts, *onPool = append(ts, t), t.UsePool
	default:
		return nil, usagef("--transport %q: use auto, shm, tcp or nixl", w.transport)
	}
	var rules *fault.Rules
	if w.faults != "" {
		text, err := os.ReadFile(w.faults)
		if err != nil {
			return nil, usageError{fmt.Errorf("--fault: %w", err)}
		}
		if rules, err = fault.Parse(string(text)); err != nil {
			return nil, usageError{fmt.Errorf("--fault %s: %w", w.faults, err)}
		}
		log.Warn("transfer faults are injected", "file", w.faults, "rules", strings.TrimSpace(string(text)))
	}
	m := meter.New(reg)
	for i := range ts {
		if rules != nil {
			ts[i] = fault.Wrap(ts[i], rules)
		}
		ts[i] = m.Wrap(ts[i])
	}
	return ts, nil
}

// config is the worker's, without its log and transports.
func (w *workerFlags) config(eng engine.Compute, l net.Listener) worker.Config {
	return worker.Config{
		ID: w.id, ModelName: w.name, Engine: eng, HTTP: l, PoolBytes: w.poolMiB << 20, PageBytes: w.pageBytes, PrefixPages: w.prefixPages, PoisonPool: w.poison, HugePages: w.hugePages,
		MaxQueue: w.maxQueue, MaxRunning: w.maxRunning, Timeouts: w.timeouts,
		Session:   session.Tuning{KeepaliveTime: w.keepaliveTime, KeepaliveTimeout: w.keepaliveMax},
		RoomTrace: w.roomTrace, RoomTraceBytes: int64(w.roomTraceMiB) << 20,
		MaxBody: int64(w.maxBodyMiB) << 20, AllowLocal: w.local, LocalOnly: w.monolithic, Version: version,
	}
}

// build makes the worker of a role; it owns cfg's engine and listeners.
func (w *workerFlags) build(role string, cfg worker.Config, bootstrap net.Listener) (*worker.Worker, error) {
	if w.roomTrace != "" && (cfg.LocalOnly || w.roomTraceMiB < 1) {
		return nil, usagef("--room-trace needs --room-trace-mib of at least 1, and a worker that has rooms: not --monolithic")
	}
	if !cfg.LocalOnly {
		ts, err := w.transports(cfg.Log, cfg.Metrics, &cfg.OnPool)
		if err != nil {
			return nil, err
		}
		cfg.Transports = ts
	}
	if role == "prefill" {
		return worker.NewPrefill(cfg, bootstrap)
	}
	return worker.NewDecode(cfg)
}
