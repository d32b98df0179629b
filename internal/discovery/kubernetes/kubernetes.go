// Package kubernetes is a source of workers in Kubernetes: the ready endpoints of the Services that a label selector
// finds. An EndpointSlice has its Service's labels: [LabelLeg] says which leg its workers are of. The port named "http" is
// where they serve, the one named "bootstrap" where prefill workers' sessions are.
package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/watch"
	client "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/rest"

	"github.com/baton-pd/baton/internal/discovery"
)

// Labels of a Service that the source reads.
const (
	LabelLeg  = "baton.dev/leg"  // prefill or decode
	LabelKind = "baton.dev/kind" // of the workers' server, as in discovery.Worker
)

// Names of a Service's ports.
const (
	portHTTP      = "http"
	portBootstrap = "bootstrap"
)

// Config of a [Source]. Zero values take the defaults in brackets.
type Config struct {
	Namespace string
	Selector  string // of Services, by label [everything with LabelLeg]
	// Resync is how often everything is read again although a watch is open [1m].
	Resync time.Duration
	// Timeout bounds one reading [10s]; Retry is the pause after a failure [200ms], which doubles up to 10s.
	Timeout, Retry time.Duration
}

const maxRetry = 10 * time.Second

// Source reads and watches EndpointSlices.
type Source struct {
	c      Config
	slices client.EndpointSliceInterface
	// last are the slices by name; the owner is Run.
	last map[string]*discoveryv1.EndpointSlice
}

// New makes a source on the API server that where names; [rest.InClusterConfig] has the pod's own.
func New(c Config, where *rest.Config) (*Source, error) {
	if c.Selector == "" {
		c.Selector = LabelLeg
	}
	if _, err := labels.Parse(c.Selector); err != nil {
		return nil, fmt.Errorf("kubernetes: selector %q: %w", c.Selector, err)
	}
	if c.Namespace == "" {
		return nil, errors.New("kubernetes: no namespace")
	}
	for _, d := range []struct {
		v *time.Duration
		d time.Duration
	}{{&c.Resync, time.Minute}, {&c.Timeout, 10 * time.Second}, {&c.Retry, 200 * time.Millisecond}} {
		if *d.v < 0 {
			return nil, fmt.Errorf("kubernetes: a negative duration: %v", *d.v)
		}
		if *d.v == 0 {
			*d.v = d.d
		}
	}
	cl, err := client.NewForConfig(where)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	return &Source{c: c, slices: cl.EndpointSlices(c.Namespace)}, nil
}

// Name is "kubernetes:", the namespace and the selector.
func (s *Source) Name() string { return "kubernetes:" + s.c.Namespace + ":" + s.c.Selector }

// Run implements [discovery.Source]. It lists, watches from there, and begins anew when the watch ends.
func (s *Source) Run(ctx context.Context, report discovery.Report) {
	discovery.Follow(ctx, "kubernetes", s.c.Retry, maxRetry, report, s.list, s.tell, s.watch)
}

// list reads every slice and returns the version to watch from.
func (s *Source) list(ctx context.Context) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.c.Timeout)
	defer cancel()
	got, err := s.slices.List(ctx, metav1.ListOptions{LabelSelector: s.c.Selector})
	if err != nil {
		return "", fmt.Errorf("list the endpoint slices of %s with %s: %w", s.c.Namespace, s.c.Selector, err)
	}
	s.last = map[string]*discoveryv1.EndpointSlice{}
	for i := range got.Items {
		s.last[got.Items[i].Name] = &got.Items[i]
	}
	return got.ResourceVersion, nil
}

// watch applies changes until the resync is due, the server ends the watch or its history has been dropped (nil), or
// it fails.
func (s *Source) watch(ctx context.Context, version string, report discovery.Report) error {
	ctx, cancel := context.WithTimeout(ctx, s.c.Resync)
	defer cancel()
	seconds := int64(s.c.Resync/time.Second) + 1
	w, err := s.slices.Watch(ctx, metav1.ListOptions{LabelSelector: s.c.Selector, ResourceVersion: version, TimeoutSeconds: &seconds})
	if err != nil {
		if ctx.Err() != nil || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
			return nil
		}
		return fmt.Errorf("watch the endpoint slices of %s: %w", s.c.Namespace, err)
	}
	defer w.Stop()
	began := time.Now()
	for e := range w.ResultChan() {
		slice, ok := e.Object.(*discoveryv1.EndpointSlice)
		switch {
		case e.Type == watch.Error:
			if err := apierrors.FromObject(e.Object); !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
				return fmt.Errorf("watch the endpoint slices of %s: %w", s.c.Namespace, err)
			}
			return nil
		case !ok:
			continue
		case e.Type == watch.Deleted:
			delete(s.last, slice.Name)
		case e.Type == watch.Added, e.Type == watch.Modified:
			s.last[slice.Name] = slice
		default:
			continue
		}
		s.tell(report)
	}
	if ctx.Err() == nil && time.Since(began) < s.c.Retry {
		return fmt.Errorf("the watch of the endpoint slices of %s ended at once", s.c.Namespace)
	}
	return nil
}

// tell reports the present set, and then, if there are any, what is wrong with one of the slices.
func (s *Source) tell(report discovery.Report) {
	set := []discovery.Worker{}
	seen := map[string]bool{}
	var bad error
	for _, slice := range s.last {
		workers, err := Workers(slice)
		if err != nil {
			bad = fmt.Errorf("kubernetes: endpoint slice %s: %w", slice.Name, err)
		}
		for _, w := range workers {
			if id := w.Leg + " " + w.URL; !seen[id] { // an endpoint may be in two slices for a moment
				seen[id] = true
				set = append(set, w)
			}
		}
	}
	discovery.Sort(set)
	report(set, nil)
	if bad != nil {
		report(nil, bad)
	}
}

// Workers are the ready endpoints of a slice. An endpoint that ends is not ready.
func Workers(slice *discoveryv1.EndpointSlice) (set []discovery.Worker, err error) {
	var port, bootstrap int32
	for _, p := range slice.Ports {
		switch {
		case p.Port == nil:
		case p.Name != nil && *p.Name == portBootstrap:
			bootstrap = *p.Port
		case p.Name != nil && *p.Name == portHTTP, len(slice.Ports) == 1:
			port = *p.Port
		}
	}
	if port == 0 {
		return nil, fmt.Errorf("no port is named %q", portHTTP)
	}
	for _, e := range slice.Endpoints {
		if r := e.Conditions.Ready; r != nil && !*r || len(e.Addresses) == 0 {
			continue
		}
		w := discovery.Worker{
			Leg: slice.Labels[LabelLeg], Kind: slice.Labels[LabelKind],
			URL: "http://" + net.JoinHostPort(e.Addresses[0], strconv.Itoa(int(port))), // one stands for all, says the API
		}
		if w.Leg == discovery.LegPrefill {
			w.BootstrapPort = int(bootstrap)
		}
		if e.Zone != nil {
			w.Zone = *e.Zone
		}
		if err = w.Check(); err != nil {
			return nil, err
		}
		set = append(set, w)
	}
	return set, nil
}
