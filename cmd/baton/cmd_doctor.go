package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/baton-pd/baton/internal/doctor"
	"github.com/baton-pd/baton/internal/doctor/collect"
	"github.com/baton-pd/baton/internal/doctor/probe"
	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/shm"
	"github.com/baton-pd/baton/internal/transfer/tcp"
)

type doctorFlags struct {
	metrics, scrapes, versions, probes []string
	prometheus, selector               string
	window, interval, timeout          time.Duration
	cfg                                doctor.Config
	save                               string
	json                               bool

	probeWire, probeAs, probeListen, probeAdvertise string
	patience                                        time.Duration

	tls    clientTLS
	worker *http.Client   // asks workers, by their API key if there is one
	ask    *http.Client   // asks others
	trust  edge.ClientTLS // what tls says
}

const doctorLong = `Looks for rooms that never end in a live fleet of Baton, SGLang or vLLM workers with prefill
and decode apart.

By watching (it only reads): from metrics URLs over a window (--metrics, once for each worker), from a
Prometheus server's memory (--prometheus), or from saved scrapes (--scrape, two or more in
order of time). It finds queues that nothing leaves, sides that disagree, releases of KV that only
a timeout ended, KV that an idle worker holds, restarts, and releases of SGLang that are known for it.

By asking (--probe HOST:PORT, a prefill worker's bootstrap port): opens a session as a decode worker
would, with rooms of its own that no request has, and reports what never ends. It touches no other
room and computes nothing. HOST:PORT is plain, tls://HOST:PORT over TLS.

--tls-ca and its kin are for whatever is asked over TLS. Workers that want an API key get the one
in BATON_API_KEY in the environment.

docs/doctor.md explains every finding.

Exit status: 0 healthy; 1 findings; 2 could not tell, or wrong usage.`

func newDoctor() *cobra.Command {
	f := doctorFlags{}
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Find rooms that never end in a live fleet (Baton, SGLang, vLLM)",
		Long:  doctorLong,
		Example: `  baton doctor --metrics prefill-0=http://10.0.0.1:30000 --metrics decode-0=http://10.0.0.2:30000
  baton doctor --prometheus http://prometheus:9090 --window 1h --selector 'namespace="prod"'
  baton doctor --scrape monday.prom --scrape decode-0=first.txt --scrape decode-0=second.txt
  baton doctor --probe 10.0.0.1:8998`,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	fl := c.Flags()
	fl.StringArrayVar(&f.metrics, "metrics", nil, "a worker's metrics, as NAME=URL or URL (repeatable); a name that begins with prefill or decode tells the role of a vLLM worker")
	fl.StringVar(&f.prometheus, "prometheus", "", "URL of a Prometheus server that scrapes the fleet")
	fl.StringVar(&f.selector, "selector", "", "with --prometheus: more label matchers, such as namespace=\"prod\"")
	fl.StringArrayVar(&f.scrapes, "scrape", nil, "a file of saved scrapes (see --save), or NAME=FILE with one scrape in it (repeatable, in order of time)")
	fl.DurationVar(&f.window, "window", 2*time.Minute, "how long to watch, or how far to look back")
	fl.DurationVar(&f.interval, "interval", 5*time.Second, "between scrapes; between saved ones that do not say when they are from")
	fl.DurationVar(&f.timeout, "timeout", 5*time.Second, "of one scrape or query")
	fl.DurationVar(&f.cfg.StuckAfter, "stuck-after", doctor.DefaultStuckAfter, "how long a queue may hold something while nothing leaves it")
	fl.DurationVar(&f.cfg.MaxRoomAge, "max-room-age", doctor.DefaultMaxRoomAge, "Baton: the oldest that a room may become")
	fl.StringArrayVar(&f.versions, "version", nil, "release of the SGLang workers, or NAME=RELEASE for one of them (repeatable); asked of the workers where they can be reached")
	fl.StringVar(&f.save, "save", "", "with --metrics: keep the scrapes in this directory")
	fl.StringArrayVar(&f.probes, "probe", nil, "HOST:PORT, or tls://HOST:PORT, of a prefill worker's bootstrap port to ask (repeatable)")
	fl.StringVar(&f.probeWire, "probe-wire", "baton", "protocol of the probe: baton or sglang (NIXL backend, from release 0.5.22 on)")
	fl.StringVar(&f.probeAs, "probe-as", "", "URL of a Baton decode worker to stand for: a prefill worker that does not fit it is a finding")
	fl.StringVar(&f.probeListen, "probe-listen", "", "address at which the prefill worker dials the probe's tcp data plane (default: loopback for a worker on loopback, else every interface)")
	fl.StringVar(&f.probeAdvertise, "probe-advertise", "", "address of it as the prefill worker sees it")
	fl.DurationVar(&f.patience, "probe-timeout", 5*time.Second, "how long each answer to the probe may take")
	f.tls.addTo(fl)
	fl.BoolVar(&f.json, "json", false, "print the report as JSON")
	return c
}

// verdictError carries the exit status of a report that was printed.
type verdictError struct{ verdict doctor.Verdict }

func (e verdictError) Error() string {
	if e.verdict == doctor.Findings {
		return "the fleet is not healthy"
	}
	return "could not tell whether the fleet is healthy"
}

// ExitStatus is for report.
func (e verdictError) ExitStatus() int { return e.verdict.ExitStatus() }

// untold is a failure to get at what was asked for.
type untold struct{ error }

// ExitStatus is for report.
func (untold) ExitStatus() int { return doctor.Unknown.ExitStatus() }

// Unwrap is the failure.
func (u untold) Unwrap() error { return u.error }

func (f *doctorFlags) run(ctx context.Context, out io.Writer) error {
	if err := f.validate(); err != nil {
		return usageError{err}
	}
	var err error
	if f.worker, f.trust, err = f.tls.client(os.Getenv(keyEnv)); err != nil {
		return err
	}
	defer f.worker.CloseIdleConnections()
	if f.ask, _, err = f.tls.client(""); err != nil {
		return err
	}
	defer f.ask.CloseIdleConnections()
	probers, err := f.prober(ctx)
	if err != nil {
		return untold{err}
	}
	scrapes, about, err := f.collect(ctx)
	if err != nil {
		return untold{err}
	}
	fleet, err := doctor.Build(scrapes, about)
	if err != nil {
		return untold{err}
	}
	if err := f.setVersions(fleet); err != nil {
		return usageError{err}
	}
	var results []doctor.ProbeResult
	for i, addr := range f.probes {
		results = append(results, probers[i].Probe(ctx, strings.TrimPrefix(addr, overTLS)))
	}
	r := doctor.Diagnose(fleet, results, f.cfg)
	if f.json {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		if err := enc.Encode(r); err != nil {
			return err
		}
	} else {
		r.WriteText(out)
	}
	if r.Verdict != doctor.Healthy {
		return verdictError{r.Verdict}
	}
	return nil
}

func (f *doctorFlags) validate() error {
	sources := 0
	for _, given := range []bool{len(f.metrics) > 0, f.prometheus != "", len(f.scrapes) > 0} {
		if given {
			sources++
		}
	}
	switch {
	case sources == 0 && len(f.probes) == 0:
		return fmt.Errorf("nothing to look at: give --metrics, --prometheus, --scrape or --probe")
	case sources > 1:
		return fmt.Errorf("--metrics, --prometheus and --scrape exclude each other")
	case f.window <= 0 || f.interval <= 0 || f.timeout <= 0 || f.patience <= 0:
		return fmt.Errorf("--window, --interval, --timeout and --probe-timeout must be above 0")
	case f.save != "" && len(f.metrics) == 0:
		return fmt.Errorf("--save needs --metrics")
	case f.selector != "" && f.prometheus == "":
		return fmt.Errorf("--selector needs --prometheus")
	case f.probeWire != "baton" && f.probeWire != "sglang":
		return fmt.Errorf("--probe-wire %q: use baton or sglang", f.probeWire)
	case f.probeWire == "sglang" && f.probeAs != "":
		return fmt.Errorf("--probe-as is for Baton's protocol")
	case f.probeWire == "sglang" && slices.ContainsFunc(f.probes, func(a string) bool { return strings.HasPrefix(a, overTLS) }):
		return fmt.Errorf("--probe %s is for Baton's protocol", overTLS)
	}
	return f.cfg.Validate()
}

func (f *doctorFlags) collect(ctx context.Context) ([]doctor.Scrape, map[string]doctor.About, error) {
	switch {
	case len(f.metrics) > 0:
		w := collect.Watch{Window: f.window, Interval: f.interval, Timeout: f.timeout, Save: f.save, Client: f.worker}
		for _, m := range f.metrics {
			e, err := collect.ParseEndpoint(m)
			if err != nil {
				return nil, nil, fmt.Errorf("--metrics: %w", err)
			}
			w.Endpoints = append(w.Endpoints, e)
		}
		return w.Run(ctx)
	case f.prometheus != "":
		p := collect.Prometheus{URL: f.prometheus, Selector: f.selector, Window: f.window, Step: f.interval, Timeout: f.timeout, Client: f.ask}
		scrapes, err := p.Scrapes(ctx)
		if err == nil && len(scrapes) == 0 {
			err = fmt.Errorf("the Prometheus server at %s has no series of Baton, SGLang or vLLM in the last %s", f.prometheus, f.window)
		}
		return scrapes, nil, err
	case len(f.scrapes) > 0:
		return collect.Files(f.scrapes, f.interval)
	default:
		return nil, nil, nil
	}
}

// setVersions applies --version.
func (f *doctorFlags) setVersions(fleet []*doctor.Target) error {
	for _, v := range f.versions {
		name, release, one := strings.Cut(v, "=")
		if !one {
			name, release = "", v
		}
		found := false
		for _, t := range fleet {
			if one && t.Name == name || !one && t.Engine == doctor.EngineSGLang {
				t.Version, found = release, true
			}
		}
		if !found && (one || len(f.probes) == 0) {
			return fmt.Errorf("--version %s: no such target is in the scrapes", v)
		}
	}
	return nil
}

// release is what --version says of all workers.
func (f *doctorFlags) release() string {
	for _, v := range f.versions {
		if !strings.Contains(v, "=") {
			return v
		}
	}
	return ""
}

// overTLS begins the address of a bootstrap port that speaks TLS.
const overTLS = "tls://"

// prober makes one prober for each --probe.
func (f *doctorFlags) prober(ctx context.Context) ([]doctor.Prober, error) {
	var out []doctor.Prober
	for _, addr := range f.probes {
		if f.probeWire == "sglang" {
			out = append(out, probe.SGLang{Release: f.release(), Listen: f.probeListen, Advertise: f.probeAdvertise, Patience: f.patience})
			continue
		}
		b := probe.Baton{Patience: f.patience}
		addr, secret := strings.CutPrefix(addr, overTLS)
		if secret {
			b.TLS = f.trust.Config
		}
		if f.probeAs != "" {
			id, err := f.standFor(ctx)
			if err != nil {
				return nil, fmt.Errorf("--probe-as: %w", err)
			}
			b.As = &id
		}
		listen := f.probeListen
		if listen == "" {
			listen = "0.0.0.0:0"
			if host := hostOf(addr); host == "127.0.0.1" || host == "localhost" {
				listen = "127.0.0.1:0"
			}
		}
		b.Transports = []transfer.Transport{shm.New(shm.Config{}), tcp.New(tcp.Config{Listen: listen, Advertise: f.probeAdvertise})}
		out = append(out, b)
	}
	return out, nil
}

// standFor asks the worker at --probe-as for its fingerprint.
func (f *doctorFlags) standFor(ctx context.Context) (session.Identity, error) {
	ctx, stop := context.WithTimeout(ctx, f.timeout)
	defer stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(f.probeAs, "/")+"/server_info", nil)
	if err != nil {
		return session.Identity{}, err
	}
	res, err := f.worker.Do(req)
	if err != nil {
		return session.Identity{}, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, 8<<20))
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answers %s", req.URL.Redacted(), res.Status)
	}
	if err != nil {
		return session.Identity{}, err
	}
	return probe.ParseIdentity(body)
}
