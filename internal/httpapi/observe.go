package httpapi

import (
	"context"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// httpMetrics are the HTTP side's own metrics.
type httpMetrics struct {
	requests *prometheus.CounterVec // path, code
	failures *prometheus.CounterVec // cause
	inFlight prometheus.Gauge
	seconds  *prometheus.HistogramVec // path
}

// newHTTPMetrics registers them; a nil registerer keeps them private.
func newHTTPMetrics(r prometheus.Registerer) *httpMetrics {
	m := &httpMetrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "baton_http_requests_total", Help: "HTTP requests ended, by path and status code.",
		}, []string{"path", "code"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "baton_http_failures_total", Help: "HTTP requests that failed, by cause, also those that failed in mid-stream.",
		}, []string{"cause"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "baton_http_requests_in_flight", Help: "HTTP requests being answered.",
		}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "baton_http_request_seconds", Help: "Time from a request's header to the end of its answer.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 20),
		}, []string{"path"}),
	}
	if r != nil {
		r.MustRegister(m.requests, m.failures, m.inFlight, m.seconds)
	}
	return m
}

// finish counts the request and writes its access line.
func (s *server) finish(w *response, r *http.Request, rt route, aborted bool) {
	took := s.now().Sub(w.start)
	if w.status == 0 {
		w.status = http.StatusOK // net/http writes the header after the handler
	}
	s.metrics.requests.WithLabelValues(rt.name, strconv.Itoa(w.status)).Inc()
	s.metrics.seconds.WithLabelValues(rt.name).Observe(took.Seconds())
	if w.cause != nil {
		s.metrics.failures.WithLabelValues(string(w.cause.Code)).Inc()
	}
	if s.Tracer != nil && rt.traced && r.Method == http.MethodPost {
		s.trace(w, r, rt)
	}
	level := slog.LevelInfo
	switch {
	case w.status >= 500 || aborted:
		level = slog.LevelWarn
	case rt.quiet:
		level = slog.LevelDebug
	}
	if !s.Log.Enabled(context.Background(), level) {
		return
	}
	s.Log.LogAttrs(context.Background(), level, "http", s.accessAttrs(w, r, took, aborted)...)
}

func (s *server) accessAttrs(w *response, r *http.Request, took time.Duration, aborted bool) []slog.Attr {
	attrs := []slog.Attr{
		slog.String("method", r.Method), slog.String("path", clip(r.URL.Path, 128)), slog.Int("status", w.status),
		slog.String("rid", w.id), slog.Duration("took", took),
	}
	if w.rooms != "" {
		attrs = append(attrs, slog.String("room", w.rooms))
	}
	if w.promptToks > 0 {
		attrs = append(attrs, slog.Int("prompt_tokens", w.promptToks), slog.Int("completion_tokens", w.completeToks))
	}
	p := w.phases
	for _, ph := range []struct {
		name     string
		from, to time.Time
	}{
		{"granted_after", p.Submitted, p.Granted},
		{"transferred_after", p.Submitted, p.Transferred},
		{"first_token_after", p.Submitted, p.FirstToken},
		{"ended_after", p.Submitted, p.Ended},
	} {
		if !ph.from.IsZero() && !ph.to.IsZero() {
			attrs = append(attrs, slog.Duration(ph.name, ph.to.Sub(ph.from)))
		}
	}
	if aborted {
		attrs = append(attrs, slog.Bool("aborted", true))
	}
	if w.cause != nil {
		attrs = append(attrs, slog.String("cause", string(w.cause.Code)), slog.String("phase", w.cause.Phase),
			slog.String("detail", clip(w.cause.Detail, 512)))
	}
	return attrs
}

func clip(s string, most int) string {
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}
