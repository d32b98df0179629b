// Package discovery finds out which workers a router has: from a file, from DNS, and, in packages below it that bring
// large clients, from etcd and Kubernetes.
//
// A [Source] always tells the whole set, never a change: a lost update is mended by the next one, and several routers
// that watch the same source come to the same fleet without talking to each other. What a source cannot read, it
// reports as an error; the set before it stays in use. Whether a listed worker is well is not a source's
// question: the router's own probes find that out.
package discovery

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"
)

// Legs of a worker.
const (
	LegPrefill = "prefill"
	LegDecode  = "decode"
)

// Worker is one backend as sources write it, in JSON or as labels.
type Worker struct {
	Leg string `json:"leg"` // LegPrefill or LegDecode
	URL string `json:"url"` // http://host:port
	// BootstrapHost [the URL's host] and BootstrapPort are where decode workers reach a prefill worker.
	BootstrapHost string `json:"bootstrap_host,omitempty"`
	BootstrapPort int    `json:"bootstrap_port,omitempty"`
	// Zone is where the worker is; Models, if not empty, all the models it has. For the router's policies.
	Zone   string   `json:"zone,omitempty"`
	Models []string `json:"models,omitempty"`
	// Kind is what its server is: baton, sglang, vllm, plain. [the router asks it]
	Kind string `json:"kind,omitempty"`
}

// Check names the first thing wrong with w, and brings its URL to the form by which workers are told apart.
func (w *Worker) Check() error {
	u, err := url.Parse(w.URL)
	switch {
	case w.Leg != LegPrefill && w.Leg != LegDecode:
		return fmt.Errorf("worker %.200q: leg %.32q: want prefill or decode", w.URL, w.Leg)
	case err != nil:
		return fmt.Errorf("worker address: %w", err)
	case u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.RawQuery != "" || u.User != nil:
		return fmt.Errorf("worker address %.200q: want http://host:port", w.URL)
	case !slices.Contains([]string{"", "baton", "sglang", "vllm", "plain"}, w.Kind):
		return fmt.Errorf("worker %.200s: kind %.32q: want baton, sglang, vllm or plain", w.URL, w.Kind)
	case w.Leg == LegPrefill && w.Kind == "plain":
		return fmt.Errorf("worker %.200s: a plain server serves alone: list it with leg decode", w.URL)
	case w.Leg == LegPrefill && w.Kind == "vllm" && w.BootstrapPort == 0: // it needs none
	case w.Leg == LegPrefill && (w.BootstrapPort < 1 || w.BootstrapPort > 65535):
		return fmt.Errorf("prefill worker %.200s: bootstrap port %d is not a port", w.URL, w.BootstrapPort)
	}
	w.URL = strings.TrimRight(w.URL, "/")
	return nil
}

// key tells workers apart, as the router does.
func (w *Worker) key() string { return w.Leg + " " + w.URL }

// Normalize sorts a set and checks that each worker is sound and there once.
func Normalize(set []Worker) error {
	for i := range set {
		if err := set[i].Check(); err != nil {
			return err
		}
	}
	Sort(set)
	for i := 1; i < len(set); i++ {
		if set[i].key() == set[i-1].key() {
			return fmt.Errorf("%s worker %s is given twice", set[i].Leg, set[i].URL)
		}
	}
	return nil
}

// Sort orders a set by leg and URL, so that a source that lists in another order has not changed it.
func Sort(set []Worker) {
	slices.SortStableFunc(set, func(a, b Worker) int { return strings.Compare(a.key(), b.key()) })
}

// Report takes what a source has found: its whole set, which then belongs to the callee, or why it does not know.
// A source calls it from one goroutine.
type Report func(set []Worker, err error)

// Source is where workers are listed.
type Source interface {
	// Name is for people and metrics: "file", "dns", ... and what it reads.
	Name() string
	// Run reports the set now and whenever it changes, until ctx ends. It returns after its last report.
	Run(ctx context.Context, report Report)
}

// changes passes on what differs from what was passed on before.
type changes struct {
	report Report
	last   []Worker
	known  bool
	failed string
}

func (c *changes) tell(set []Worker, err error) {
	if err != nil {
		c.failed = err.Error()
		c.report(nil, err)
		return
	}
	if c.known && c.failed == "" && slices.EqualFunc(c.last, set, same) {
		return
	}
	c.last, c.known, c.failed = slices.Clone(set), true, ""
	c.report(set, nil)
}

func same(a, b Worker) bool {
	models := slices.Equal(a.Models, b.Models)
	a.Models, b.Models = nil, nil
	return models && a.Leg == b.Leg && a.URL == b.URL && a.BootstrapHost == b.BootstrapHost && a.BootstrapPort == b.BootstrapPort && a.Zone == b.Zone && a.Kind == b.Kind
}

// poll reports read's answer now and every interval.
func poll(ctx context.Context, interval time.Duration, report Report, read func(context.Context) ([]Worker, error)) {
	c := changes{report: report}
	t := time.NewTicker(interval)
	defer t.Stop()
	for {
		set, err := read(ctx)
		if ctx.Err() != nil {
			return
		}
		c.tell(set, err)
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

var errInterval = errors.New("the interval must be longer than 0")
