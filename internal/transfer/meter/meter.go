// Package meter counts what a transport carries: [Meter.Wrap] decorates any
// transfer.Transport with Prometheus metrics, labelled by kind, and changes nothing else.
//
//	baton_kv_transfer_writes_total{kind}           writes applied at the destination
//	baton_kv_transfer_bytes_total{kind}            their bytes
//	baton_kv_transfer_latency_seconds{kind}        from Post to Done of those that have bytes
//	baton_kv_transfer_errors_total{kind,reason}    writes and dials that failed
//	baton_kv_transfer_busy_total{kind}             posts refused because the queue was full
//	baton_kv_transfer_in_flight{kind}              writes posted and not done
//	baton_kv_transfer_connections{kind}            open connections, prefill side
//	baton_kv_transfer_landed_total{kind}           notifications received, decode side
//	baton_kv_transfer_grants_revoked_total{kind,fenced}
//	baton_kv_transfer_sessions_fenced_total{kind}
package meter

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/transfer"
)

// Meter holds the metrics. One serves all transports of a process.
type Meter struct {
	bytes, writes, busy, landed, fenced *prometheus.CounterVec
	errors, revoked                     *prometheus.CounterVec
	inflight, conns                     *prometheus.GaugeVec
	latency                             *prometheus.HistogramVec
}

// New makes the metrics and registers them with r, which must not have them yet; nil:
// they are registered nowhere.
func New(r prometheus.Registerer) *Meter {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "baton", Subsystem: "kv_transfer", Name: name, Help: help,
		}, append([]string{"kind"}, labels...))
	}
	gauge := func(name, help string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "baton", Subsystem: "kv_transfer", Name: name, Help: help,
		}, []string{"kind"})
	}
	m := &Meter{
		bytes:    counter("bytes_total", "Bytes of writes applied at the destination."),
		writes:   counter("writes_total", "Writes applied at the destination."),
		busy:     counter("busy_total", "Posts refused because the send queue was full."),
		errors:   counter("errors_total", "Writes and dials that failed, by reason.", "reason"),
		landed:   counter("landed_total", "Notifications received."),
		revoked:  counter("grants_revoked_total", "Grants revoked, by whether that fenced them at once.", "fenced"),
		fenced:   counter("sessions_fenced_total", "Sessions whose writer can store nothing any more."),
		inflight: gauge("in_flight", "Writes posted and not done."),
		conns:    gauge("connections", "Open connections of the prefill side."),
		latency: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "baton", Subsystem: "kv_transfer", Name: "latency_seconds",
			Help:    "Time from Post to Done of writes of bytes that were applied.",
			Buckets: prometheus.ExponentialBuckets(20e-6, 2.5, 16), // 20 µs to 19 s
		}, []string{"kind"}),
	}
	if r != nil {
		r.MustRegister(m.bytes, m.writes, m.busy, m.errors, m.landed, m.revoked, m.fenced, m.inflight, m.conns, m.latency)
	}
	return m
}

// Wrap decorates t. Its counters show from now on, at 0.
func (m *Meter) Wrap(t transfer.Transport) transfer.Transport {
	kind := t.Kind()
	k := &kindMeter{
		bytes: m.bytes.WithLabelValues(kind), writes: m.writes.WithLabelValues(kind), busy: m.busy.WithLabelValues(kind),
		landed: m.landed.WithLabelValues(kind), fenced: m.fenced.WithLabelValues(kind),
		errors:   m.errors.MustCurryWith(prometheus.Labels{"kind": kind}),
		revoked:  m.revoked.MustCurryWith(prometheus.Labels{"kind": kind}),
		inflight: m.inflight.WithLabelValues(kind), conns: m.conns.WithLabelValues(kind),
		latency: m.latency.WithLabelValues(kind),
	}
	for _, r := range reasons {
		k.errors.WithLabelValues(r.name)
	}
	k.errors.WithLabelValues(reasonOther)
	k.revoked.WithLabelValues("true")
	k.revoked.WithLabelValues("false")
	return &transport{t, k}
}

// kindMeter is the metrics of one transport, looked up once.
type kindMeter struct {
	bytes, writes, busy, landed, fenced prometheus.Counter
	errors, revoked                     *prometheus.CounterVec
	inflight, conns                     prometheus.Gauge
	latency                             prometheus.Observer
}

// reasons are the label values of errors, first match wins.
var reasons = []struct {
	err  error
	name string
}{
	{transfer.ErrGrant, "grant"},
	{transfer.ErrBounds, "bounds"},
	{transfer.ErrSession, "session"},
	{transfer.ErrTooLarge, "too_large"},
	{transfer.ErrClosed, "closed"},
	{transfer.ErrPeerLost, "peer_lost"},
	{context.DeadlineExceeded, "timeout"},
	{context.Canceled, "canceled"},
}

const reasonOther = "other"

func reason(err error) string {
	for _, r := range reasons {
		if errors.Is(err, r.err) {
			return r.name
		}
	}
	return reasonOther
}

func (k *kindMeter) failed(err error) { k.errors.WithLabelValues(reason(err)).Inc() }

type transport struct {
	transfer.Transport
	k *kindMeter
}

// Dial counts the connection.
func (t *transport) Dial(ctx context.Context, d transfer.Descriptor, s transfer.SessionID) (transfer.Peer, error) {
	p, err := t.Transport.Dial(ctx, d, s)
	if err != nil {
		t.k.failed(err)
		return nil, err
	}
	t.k.conns.Inc()
	return &peer{Peer: p, k: t.k}, nil
}

// Listen counts what lands.
func (t *transport) Listen(m transfer.Memory, sink transfer.Sink) (transfer.Target, error) {
	tgt, err := t.Transport.Listen(m, &meteredSink{sink, t.k})
	if err != nil {
		return nil, err
	}
	return &target{tgt, t.k}, nil
}

type peer struct {
	transfer.Peer
	k    *kindMeter
	once sync.Once
}

// Post counts w from the moment it is accepted. In flight goes up before the real
// Post, because Done may come before that returns.
func (p *peer) Post(w transfer.Write) error {
	began, done, size := time.Now(), w.Done, 0
	for _, s := range w.Segments {
		size += len(s.Src)
	}
	w.Done = func(err error) {
		p.k.inflight.Dec()
		if err != nil {
			p.k.failed(err)
		} else {
			p.k.bytes.Add(float64(size))
			p.k.writes.Inc()
			if size > 0 { // a notification alone may wait for bytes that travel before it, whose time is counted
				p.k.latency.Observe(time.Since(began).Seconds())
			}
		}
		done(err)
	}
	p.k.inflight.Inc()
	err := p.Peer.Post(w)
	if err != nil {
		p.k.inflight.Dec()
		if errors.Is(err, transfer.ErrBusy) {
			p.k.busy.Inc()
		} else {
			p.k.failed(err)
		}
	}
	return err
}

// Close counts the connection out, once.
func (p *peer) Close() error {
	p.once.Do(p.k.conns.Dec)
	return p.Peer.Close()
}

type meteredSink struct {
	transfer.Sink
	k *kindMeter
}

// Landed counts and passes on.
func (s *meteredSink) Landed(g transfer.GrantID, notify []byte) {
	s.k.landed.Inc()
	s.Sink.Landed(g, notify)
}

// Fenced counts and passes on.
func (s *meteredSink) Fenced(id transfer.SessionID) {
	s.k.fenced.Inc()
	s.Sink.Fenced(id)
}

// Revoked passes on, if the real Sink wants to hear it.
func (s *meteredSink) Revoked(g transfer.GrantID) {
	if r, ok := s.Sink.(transfer.RevokeSink); ok {
		r.Revoked(g)
	}
}

type target struct {
	transfer.Target
	k *kindMeter
}

// Revoke counts the answer.
func (t *target) Revoke(id transfer.GrantID) bool {
	fenced := t.Target.Revoke(id)
	t.k.revoked.WithLabelValues(strconv.FormatBool(fenced)).Inc()
	return fenced
}
