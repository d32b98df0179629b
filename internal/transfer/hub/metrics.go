package hub

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/room"
)

// metrics of one side. Names follow SGLang's PD metrics where they exist.
type metrics struct {
	side            string
	endedTotal      *prometheus.CounterVec
	failedTotal     prometheus.Counter
	duplicateGrants prometheus.Counter
	staleAborts     prometheus.Counter
	stray           prometheus.Counter
	chunkLatency    prometheus.Histogram
	roomLatency     prometheus.Histogram
	roomBytes       prometheus.Histogram
}

func newMetrics(side room.Side, reg *room.Registry, r prometheus.Registerer) *metrics {
	labels := prometheus.Labels{"side": side.String()}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "baton", Name: name, Help: help, ConstLabels: labels})
	}
	m := &metrics{
		side: side.String(),
		endedTotal: prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "baton", Name: "rooms_ended_total",
			Help: "Rooms that reached a terminal state, by state and first cause.", ConstLabels: labels}, []string{"state", "cause"}),
		failedTotal:     counter("num_transfer_failed_reqs_total", "Rooms that failed."),
		duplicateGrants: counter("duplicate_grants_total", "Grants for a room that already has one."),
		staleAborts:     counter("stale_aborts_total", "Aborts whose session does not own the room."),
		stray:           counter("stray_messages_total", "Messages and notifications for rooms, grants or sessions that are gone; they changed nothing."),
		chunkLatency: prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "baton", Name: "kv_transfer_chunk_seconds",
			Help: "From posting a chunk to its completion.", ConstLabels: labels, Buckets: prometheus.ExponentialBuckets(1e-4, 2, 18)}),
		roomLatency: prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "baton", Name: "kv_transfer_room_seconds",
			Help: "From the grant to the last chunk of a room.", ConstLabels: labels, Buckets: prometheus.ExponentialBuckets(1e-3, 2, 18)}),
		roomBytes: prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "baton", Name: "kv_transfer_room_bytes",
			Help: "KV bytes of a room.", ConstLabels: labels, Buckets: prometheus.ExponentialBuckets(1<<16, 4, 12)}),
	}
	if r != nil {
		r.MustRegister(m.endedTotal, m.failedTotal, m.duplicateGrants, m.staleAborts, m.stray,
			m.chunkLatency, m.roomLatency, m.roomBytes, roomCollector{side: side, reg: reg})
	}
	return m
}

// ended counts a terminal room; called under its lock, once.
func (m *metrics) ended(r *room.Room) {
	code := ""
	if c := r.Cause(); c != nil {
		code = string(c.Code)
		m.failedTotal.Inc()
	}
	m.endedTotal.WithLabelValues(r.State().String(), code).Inc()
}

func (m *metrics) chunk(d time.Duration) { m.chunkLatency.Observe(d.Seconds()) }

func (m *metrics) transferred(bytes int, d time.Duration) {
	m.roomBytes.Observe(float64(bytes))
	m.roomLatency.Observe(d.Seconds())
}

var (
	roomsDesc = prometheus.NewDesc("baton_rooms", "Rooms that are not forgotten yet, by state.", []string{"side", "state"}, nil)
	ageDesc   = prometheus.NewDesc("baton_room_oldest_age_seconds", "Age of the oldest room in a state; a non-terminal one that only grows is a pin.", []string{"side", "state"}, nil)
	tombDesc  = prometheus.NewDesc("baton_room_tombstones", "Ended or aborted rooms that are remembered.", []string{"side"}, nil)
	evictDesc = prometheus.NewDesc("baton_room_tombstones_evicted_total", "Rooms forgotten before their time, for want of space.", []string{"side"}, nil)
	drainDesc = prometheus.NewDesc("baton_rooms_undrained", "Rooms that have failed and for which bytes may still be stored.", []string{"side"}, nil)
	eventDesc = prometheus.NewDesc("baton_room_events_ignored_total", "Events that changed nothing: of another life (stale), repeated (duplicate), a later cause of a failed room (late_cause); and writes and grants not made because the room had ended (skipped).", []string{"side", "kind"}, nil)
)

// roomCollector reads the registry when scraped.
type roomCollector struct {
	side room.Side
	reg  *room.Registry
}

func (c roomCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- roomsDesc
	ch <- ageDesc
	ch <- tombDesc
	ch <- evictDesc
	ch <- drainDesc
	ch <- eventDesc
}

func (c roomCollector) Collect(ch chan<- prometheus.Metric) {
	s := c.reg.Stats()
	for st := room.StateFailed; st <= room.StateSuccess; st++ {
		ch <- prometheus.MustNewConstMetric(roomsDesc, prometheus.GaugeValue, float64(s.Live[st]), c.side.String(), st.String())
		ch <- prometheus.MustNewConstMetric(ageDesc, prometheus.GaugeValue, s.OldestAge[st].Seconds(), c.side.String(), st.String())
	}
	ch <- prometheus.MustNewConstMetric(tombDesc, prometheus.GaugeValue, float64(s.Tombstones), c.side.String())
	ch <- prometheus.MustNewConstMetric(evictDesc, prometheus.CounterValue, float64(s.EvictedTombstones), c.side.String())
	ch <- prometheus.MustNewConstMetric(drainDesc, prometheus.GaugeValue, float64(s.Undrained), c.side.String())
	for kind, n := range map[string]uint64{"stale": s.Stale, "duplicate": s.Duplicates, "late_cause": s.LateCauses, "skipped": s.Skipped} {
		ch <- prometheus.MustNewConstMetric(eventDesc, prometheus.CounterValue, float64(n), c.side.String(), kind)
	}
}
