package meter_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/fault"
	"github.com/baton-pd/baton/internal/transfer/mem"
	"github.com/baton-pd/baton/internal/transfer/meter"
	"github.com/baton-pd/baton/internal/transfer/transfertest"
)

func TestMain(m *testing.M) {
	transfertest.Main(m, func() transfer.Transport { return mem.New(nil) })
}

func TestConformance(t *testing.T) {
	transfertest.Run(t, transfertest.Options{
		New: func(*testing.T) (transfer.Transport, transfer.Transport) {
			r, m := mem.NewRegistry(), meter.New(prometheus.NewPedanticRegistry())
			return m.Wrap(mem.New(r)), m.Wrap(mem.New(r))
		},
		Caps: transfer.Caps{Fences: true},
	})
}

type sink struct{}

func (sink) Landed(transfer.GrantID, []byte) {}
func (sink) Fenced(transfer.SessionID)       {}

// TestCounts makes one of each and compares every series.
func TestCounts(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	rules := fault.MustParse("post nth=4 error\npost nth=5 busy\ndial nth=2 error")
	tr := meter.New(reg).Wrap(fault.Wrap(mem.New(nil), rules))
	target, err := tr.Listen(transfer.Memory{Bytes: make([]byte, 100), FD: -1}, sink{})
	if err != nil {
		t.Fatal(err)
	}
	if err := target.OpenSession(1); err != nil {
		t.Fatal(err)
	}
	key := room.Key{Room: 3}
	if err := target.Allow(transfer.Grant{ID: 1, Key: key, Session: 1, Spans: []transfer.Span{{Off: 0, Len: 50}}}); err != nil {
		t.Fatal(err)
	}
	peer, err := tr.Dial(t.Context(), target.Descriptor(), 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tr.Dial(t.Context(), target.Descriptor(), 1); err == nil {
		t.Fatal("second dial worked")
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := tr.Dial(canceled, target.Descriptor(), 1); err == nil {
		t.Fatal("cancelled dial worked")
	}
	post := func(g transfer.GrantID, off uint64, n int) error {
		done := make(chan error, 1)
		err := peer.Post(transfer.Write{
			Grant: g, Key: key, Notify: []byte("n"), Done: func(err error) { done <- err },
			Segments: []transfer.Segment{{Off: off, Src: make([]byte, n)}, {Off: off, Src: make([]byte, 1)}},
		})
		if err != nil {
			return err
		}
		return <-done
	}
	for i, want := range []error{nil, transfer.ErrGrant, transfer.ErrBounds, fault.ErrInjected, transfer.ErrBusy, nil} {
		c := []struct {
			g   transfer.GrantID
			off uint64
		}{{1, 0}, {2, 0}, {1, 45}, {1, 0}, {1, 0}, {1, 0}}[i]
		if err := post(c.g, c.off, 9); !errors.Is(err, want) {
			t.Fatalf("write %d: %v, want %v", i+1, err, want)
		}
	}
	target.Revoke(1)
	if got := series(t, reg)["connections{kind=mem}"]; got != 1 {
		t.Errorf("%v connections", got)
	}
	if err := errors.Join(peer.Close(), peer.Close(), target.Close()); err != nil {
		t.Fatal(err)
	}
	want := map[string]float64{
		"bytes_total{kind=mem}":                       20,
		"writes_total{kind=mem}":                      2,
		"latency_seconds{kind=mem}":                   2,
		"busy_total{kind=mem}":                        1,
		"errors_total{kind=mem,reason=bounds}":        1,
		"errors_total{kind=mem,reason=canceled}":      1,
		"errors_total{kind=mem,reason=closed}":        0,
		"errors_total{kind=mem,reason=grant}":         1,
		"errors_total{kind=mem,reason=other}":         0,
		"errors_total{kind=mem,reason=peer_lost}":     2,
		"errors_total{kind=mem,reason=session}":       0,
		"errors_total{kind=mem,reason=timeout}":       0,
		"errors_total{kind=mem,reason=too_large}":     0,
		"landed_total{kind=mem}":                      2,
		"grants_revoked_total{fenced=false,kind=mem}": 0,
		"grants_revoked_total{fenced=true,kind=mem}":  1,
		"sessions_fenced_total{kind=mem}":             1,
		"in_flight{kind=mem}":                         0,
		"connections{kind=mem}":                       0,
	}
	got := series(t, reg)
	for _, k := range slices.Sorted(maps.Keys(want)) {
		if v, ok := got[k]; !ok || v != want[k] {
			t.Errorf("%s is %v, want %v", k, v, want[k])
		}
		delete(got, k)
	}
	for k := range got {
		t.Errorf("unexpected series %s", k)
	}
}

// series gathers every value without the common prefix; of histograms the count.
func series(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			name := fmt.Sprintf("%s{%s}", strings.TrimPrefix(f.GetName(), "baton_kv_transfer_"), strings.Join(labels, ","))
			out[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return out
}
