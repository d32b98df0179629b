package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/baton-pd/baton/internal/discovery"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 30 * time.Second

func ptr[T any](v T) *T { return &v }

// slice with one endpoint for each address; one that begins with "-" is not ready.
func slice(name, leg string, addrs ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		TypeMeta:   metav1.TypeMeta{Kind: "EndpointSlice", APIVersion: "discovery.k8s.io/v1"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{LabelLeg: leg}},
		Ports:      []discoveryv1.EndpointPort{{Name: ptr("bootstrap"), Port: ptr(int32(8998))}, {Name: ptr("http"), Port: ptr(int32(80))}},
	}
	for _, a := range addrs {
		a, down := strings.CutPrefix(a, "-")
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}, Zone: ptr("z"), Conditions: discoveryv1.EndpointConditions{Ready: ptr(!down)}})
	}
	return s
}

// api is a fake API server with one namespace of slices.
type api struct {
	mu      sync.Mutex
	version int
	down    bool
	slices  map[string]*discoveryv1.EndpointSlice
	watches map[chan []byte]bool
	history [][]byte // the events by version, as far as they are kept
	lists   int
	query   string
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	a.query = r.URL.Query().Get("labelSelector")
	if r.URL.Path != "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices" || a.down {
		a.mu.Unlock()
		http.Error(w, "down", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if r.URL.Query().Get("watch") == "" {
		defer a.mu.Unlock()
		a.lists++
		list := discoveryv1.EndpointSliceList{
			TypeMeta: metav1.TypeMeta{Kind: "EndpointSliceList", APIVersion: "discovery.k8s.io/v1"},
			ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(a.version)},
		}
		for _, s := range a.slices {
			list.Items = append(list.Items, *s)
		}
		_ = json.NewEncoder(w).Encode(list)
		return
	}
	ch := make(chan []byte, 100)
	from, err := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	if err != nil || from > len(a.history) {
		a.mu.Unlock()
		http.Error(w, "no such version", http.StatusBadRequest)
		return
	}
	for _, e := range a.history[from:] { // what came between
		ch <- e
	}
	a.watches[ch] = true
	a.mu.Unlock()
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	for {
		select {
		case e, ok := <-ch:
			if !ok {
				return
			}
			_, _ = w.Write(e)
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

// tell sends an event to every watch.
func (a *api) tell(kind string, object any) {
	e, _ := json.Marshal(map[string]any{"type": kind, "object": object})
	if kind != "ERROR" {
		a.history = append(a.history, e)
	}
	for ch := range a.watches {
		ch <- e
	}
}

func (a *api) put(s *discoveryv1.EndpointSlice) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	kind := "MODIFIED"
	if a.slices[s.Name] == nil {
		kind = "ADDED"
	}
	s.ResourceVersion = strconv.Itoa(a.version)
	a.slices[s.Name] = s
	a.tell(kind, s)
}

func (a *api) remove(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	a.tell("DELETED", a.slices[name])
	delete(a.slices, name)
}

// cut ends every watch; then says that the history has gone, as a server does after a long time.
func (a *api) cut(expired bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if expired {
		a.tell("ERROR", metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Reason: metav1.StatusReasonExpired, Code: http.StatusGone})
	}
	for ch := range a.watches {
		close(ch)
		delete(a.watches, ch)
	}
}

type said struct {
	set []string
	err error
}

type bed struct {
	t    *testing.T
	api  *api
	told chan said
}

func newBed(t *testing.T, first ...*discoveryv1.EndpointSlice) *bed {
	t.Helper()
	b := &bed{t: t, told: make(chan said, 10_000), api: &api{slices: map[string]*discoveryv1.EndpointSlice{}, watches: map[chan []byte]bool{}}}
	for _, s := range first {
		b.api.put(s)
	}
	srv := httptest.NewServer(b.api)
	tr := &http.Transport{}
	s, err := New(Config{Namespace: "ns", Retry: 10 * time.Millisecond}, &rest.Config{Host: srv.URL, Transport: tr})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Run(ctx, func(set []discovery.Worker, err error) {
			x := said{err: err}
			for _, w := range set {
				x.set = append(x.set, fmt.Sprintf("%s %s %d %s", w.Leg, w.URL, w.BootstrapPort, w.Zone))
			}
			b.told <- x
		})
	}()
	t.Cleanup(func() { cancel(); <-ended; tr.CloseIdleConnections(); srv.Close() })
	return b
}

func (b *bed) await(what string, want ...string) (errs []error) {
	b.t.Helper()
	late := time.After(patience)
	for {
		select {
		case s := <-b.told:
			if s.err != nil {
				errs = append(errs, s.err)
			} else if slices.Equal(s.set, want) {
				return errs
			}
		case <-late:
			b.t.Fatalf("%s: never told %q; errors %v", what, want, errs)
		}
	}
}

const (
	p1 = "prefill http://10.0.0.1:80 8998 z"
	d1 = "decode http://10.0.1.1:80 0 z"
	d2 = "decode http://10.0.1.2:80 0 z"
)

func TestEndpointsComeAndGo(t *testing.T) {
	b := newBed(t, slice("p", "prefill", "10.0.0.1"), slice("d", "decode", "10.0.1.1", "-10.0.1.2"))
	b.await("the ready ones", d1, p1)
	b.api.put(slice("d", "decode", "10.0.1.1", "10.0.1.2"))
	b.await("another is ready", d1, d2, p1)
	b.api.put(slice("d", "decode", "-10.0.1.1", "10.0.1.2"))
	b.await("one is not any more", d2, p1)
	b.api.put(slice("d-2", "decode", "10.0.1.1", "10.0.1.2")) // being moved from one slice to another
	b.await("in two slices", d1, d2, p1)
	b.api.remove("d")
	b.api.remove("p")
	b.await("slices removed", d1, d2)
	b.api.mu.Lock()
	defer b.api.mu.Unlock()
	if b.api.query != LabelLeg || b.api.lists != 1 {
		t.Errorf("selector %q, %d lists", b.api.query, b.api.lists)
	}
}

// A watch that ends or has lost its place is begun anew from a list, without an error.
func TestWatchIsRenewed(t *testing.T) {
	b := newBed(t, slice("d", "decode", "10.0.1.1"))
	b.await("at first", d1)
	for _, expired := range []bool{true, false} {
		<-time.After(20 * time.Millisecond) // longer than Retry: a watch that ends at once is an error
		b.api.cut(expired)
		b.api.put(slice("d", "decode", "10.0.1.2"))
		if errs := b.await("after a cut", d2); len(errs) != 0 {
			t.Errorf("expired %v: errors %v", expired, errs)
		}
		b.api.put(slice("d", "decode", "10.0.1.1"))
		b.await("and on", d1)
	}
}

// An API server that is away leaves the set as it was.
func TestServerAway(t *testing.T) {
	b := newBed(t, slice("d", "decode", "10.0.1.1"))
	b.await("at first", d1)
	b.api.mu.Lock()
	b.api.down = true
	b.api.mu.Unlock()
	b.api.cut(false)
	for s := range b.told {
		if s.err == nil && !slices.Equal(s.set, []string{d1}) {
			t.Fatalf("told %q while the server is away", s.set)
		}
		if s.err != nil && strings.Contains(s.err.Error(), "list the endpoint slices of ns") {
			break
		}
	}
	b.api.mu.Lock()
	b.api.down = false
	b.api.mu.Unlock()
	b.api.put(slice("d", "decode", "10.0.1.2"))
	b.await("back", d2)
}

func TestBrokenSliceHidesNoOther(t *testing.T) {
	bad := slice("x", "both", "10.0.9.9")
	b := newBed(t, bad, slice("d", "decode", "10.0.1.1"))
	b.await("the sound one", d1)
	if s := <-b.told; s.err == nil || !strings.Contains(s.err.Error(), "endpoint slice x") {
		t.Errorf("told %+v", s)
	}
	noPort := slice("y", "decode", "10.0.9.9")
	noPort.Ports = noPort.Ports[:0]
	if set, err := Workers(noPort); err == nil {
		t.Errorf("%v without a port", set)
	}
}

// The manifests are what the API knows, field for field, and fit each other.
func TestManifestsAreSound(t *testing.T) {
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	files, err := filepath.Glob("../../../deploy/kubernetes/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no manifests: %v", err)
	}
	kinds := map[string]int{}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		docs := yaml.NewDocumentDecoder(f)
		for {
			text := make([]byte, 1<<20)
			n, err := docs.Read(text)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			_, kind, err := decoder.Decode(text[:n], nil, nil)
			if err != nil {
				t.Errorf("%s: %v", filepath.Base(name), err)
				continue
			}
			kinds[kind.Kind]++
		}
		_ = docs.Close()
	}
	for _, kind := range []string{"ServiceAccount", "Role", "RoleBinding", "Deployment", "Service"} {
		if kinds[kind] == 0 {
			t.Errorf("no %s among %v", kind, kinds)
		}
	}
}
