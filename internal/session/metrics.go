package session

import (
	"errors"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/room"
)

// metrics of one Client or Server. Two that share a Registerer share the metrics.
type metrics struct {
	up       *prometheus.GaugeVec   // addr
	sessions *prometheus.CounterVec // outcome
	ends     *prometheus.CounterVec // code
	messages *prometheus.CounterVec // direction, kind
	ack      prometheus.Histogram
	panics   prometheus.Counter

	mu   sync.Mutex
	live map[string]int // sessions by label value of up
}

// Outcomes of sessions_total.
const (
	outcomeUp        = "up"        // the hello was accepted
	outcomeRefused   = "refused"   // the hello was answered with a refusal
	outcomeFailed    = "failed"    // no answer: unreachable, broken or late
	outcomeUntrusted = "untrusted" // TLS did not come about
	outcomeNoOffers  = "no_offer"  // the decode side's own memory could not be offered
)

func newMetrics(r prometheus.Registerer) *metrics {
	return &metrics{
		live: make(map[string]int),
		up: register(r, prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "baton_session_up", Help: "Live sessions by the peer: address of the prefill worker, or id of the decode worker.",
		}, []string{"addr"})),
		sessions: register(r, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "baton_sessions_total", Help: "Session attempts by outcome: up, refused, untrusted, failed, no_offer.",
		}, []string{"outcome"})),
		ends: register(r, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "baton_session_ends_total", Help: "Sessions that were up and have ended, by the code of the cause.",
		}, []string{"code"})),
		messages: register(r, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "baton_session_messages_total", Help: "Messages of sessions by direction (sent, received) and kind.",
		}, []string{"direction", "kind"})),
		ack: register(r, prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "baton_session_ack_seconds", Help: "Time from the sending of a message to its ack.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 9),
		})),
		panics: register(r, prometheus.NewCounter(prometheus.CounterOpts{
			Name: "baton_session_handler_panics_total", Help: "Panics in handlers; each ended its session.",
		})),
	}
}

// register adds c to r, or returns what is there under its name already.
func register[C prometheus.Collector](r prometheus.Registerer, c C) C {
	if r == nil {
		return c
	}
	err := r.Register(c)
	var dup prometheus.AlreadyRegisteredError
	if errors.As(err, &dup) {
		if old, ok := dup.ExistingCollector.(C); ok {
			return old
		}
	}
	return c
}

// sessionUp and sessionDown count live sessions; a peer without one keeps the value 0
// until forget.
func (m *metrics) sessionUp(addr string) {
	m.sessions.WithLabelValues(outcomeUp).Inc()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.live[addr]++
	m.up.WithLabelValues(addr).Set(float64(m.live[addr]))
}

func (m *metrics) sessionDown(addr string, code room.Code) {
	m.ends.WithLabelValues(string(code)).Inc()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.live[addr]--
	m.up.WithLabelValues(addr).Set(float64(m.live[addr]))
}

// forget drops the label of a peer without sessions: peers come and go.
func (m *metrics) forget(addr string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.live[addr] == 0 {
		delete(m.live, addr)
		m.up.DeleteLabelValues(addr)
	}
}

func (m *metrics) message(direction string, b body) {
	m.messages.WithLabelValues(direction, kindOf(b)).Inc()
}

func (m *metrics) acked(sent time.Time) { m.ack.Observe(time.Since(sent).Seconds()) }
