package router

import (
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/router/record"
)

// generating are the paths of requests that go to workers.
var generating = map[string]openai.Kind{
	"/generate": openai.KindGenerate, "/v1/completions": openai.KindCompletion, "/v1/chat/completions": openai.KindChat,
}

// refused counts a request that the gate has refused. One that would have gone to workers has its span and its line in the access log like
// any other; the page does not show it, where strangers could push out the requests of clients.
func (r *Router) refused(f edge.Refusal) {
	r.gate.refusals.WithLabelValues(f.Reason, f.Name).Inc()
	r.cfg.Log.Debug("request refused", "reason", f.Reason, "key", f.Name)
	path := strings.TrimSuffix(f.Request.URL.Path, "/")
	if _, ok := generating[path]; !ok || f.Request.Method != http.MethodPost {
		return
	}
	outcome, cause := record.Failed, &failure{err: f.Err}
	if f.Err.Status/100 == 4 {
		outcome = record.Refused
	}
	endCall(r.traceFrom(f.Request, path, f.Arrived), nil, f.Err.Status, outcome, cause)
	e := r.journal.Unkept(f.Arrived, path, clientHost(f.Request.RemoteAddr))
	e.SetKey(f.Name)
	e.Named(f.Header.Get(edge.HeaderRequestID))
	now := time.Now()
	e.End(now, now, f.Err.Status, outcome, recordCause(cause))
	r.cfg.AccessLog.Put(e)
}

// limitConnections has the limit on connections, if there is one, spare what tells of the router's health.
func (r *Router) limitConnections() error {
	c := r.cfg.Connections
	if c == nil {
		return nil
	}
	c.Refused = r.refused
	c.Always = func(path string) bool {
		switch strings.TrimSuffix(path, "/") {
		case "/health", "/version", "/metrics":
			return true
		}
		return false
	}
	return r.cfg.Registerer.Register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "baton_router_connections", Help: "Open connections of clients.",
	}, func() float64 { return float64(c.Open()) }))
}
