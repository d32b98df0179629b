package router

import (
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/room"
)

// gate is who may come in; see package edge.
type gate struct {
	guard    edge.Guard
	refusals *prometheus.CounterVec // reason, key
	draining atomic.Bool
}

func (r *Router) newGate() error {
	r.gate.refusals = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "baton_router_refusals_total",
		Help: "Requests refused before they were looked at, by reason and the name of the API key, empty where there is none.",
	}, []string{"reason", "key"})
	r.gate.guard = edge.Guard{Keys: r.cfg.Keys, AdminToken: r.cfg.AdminToken, Refused: r.refused}
	if err := r.limitConnections(); err != nil {
		return err
	}
	return r.cfg.Registerer.Register(r.gate.refusals)
}

// access is who may use a path, where keys are wanted.
func (r *Router) access(path string) edge.Access {
	path = strings.TrimSuffix(path, "/")
	if a, ok := uiAccess(path); ok {
		return a
	}
	switch path {
	case "/health", "/version":
		return edge.Anyone
	case "/metrics":
		if r.cfg.OpenMetrics {
			return edge.Anyone
		}
		return edge.Operator
	case "/model_info", "/get_model_info", "/health_generate", "/generate", "/abort_request":
		return edge.Client
	}
	if strings.HasPrefix(path, "/v1/") {
		return edge.Client
	}
	return edge.Operator
}

// enter puts everything that comes before the handlers around them.
func (r *Router) enter(h http.Handler) http.Handler {
	h = r.gate.guard.Wrap(r.access, h)
	if c := r.cfg.Connections; c != nil {
		h = c.Wrap(h)
	}
	return edge.RequestIDs(r.cfg.CORS.Wrap(h, r.refused))
}

// Drain says that the router is about to close: it is not ready any more. What comes is still served.
func (r *Router) Drain() { r.gate.draining.Store(true) }

// identify fills in who asks: the name of its key, or without keys what tells clients apart.
func (c *call) identify(req *http.Request) {
	who := edge.From(req.Context())
	if who == nil {
		c.ticket.Key = edge.Secret(req.Header)
		return
	}
	c.keyName, c.ticket.Key = who.Name(), who.Name()
	c.rec.SetKey(c.keyName)
	if who.Key != nil {
		c.ticket.Weight = who.Key.Weight
		c.ticket.Priority = min(c.ticket.Priority, who.Key.MaxPriority)
	}
}

// owns: the caller may end requests of the key called name.
func owns(who *edge.Caller, name string) bool {
	return who == nil || who.Operator || who.Name() == name
}

// forWorkers makes of a client's header what its workers get: not its key, unless that is wanted, but the router's own.
func (r *Router) forWorkers(h http.Header, id string) {
	if !r.cfg.PassAuthorization {
		delete(h, "Authorization")
		delete(h, "X-Api-Key")
	}
	r.signIn(h)
	h.Set(edge.HeaderRequestID, id)
	h.Set("Content-Type", "application/json")
}

// signIn adds the router's key for workers.
func (r *Router) signIn(h http.Header) {
	if r.cfg.WorkerKey != "" {
		h.Set("Authorization", "Bearer "+r.cfg.WorkerKey)
	}
}

// onePiece is how much is written under one bound, in bytes: who takes less than that in the time is too slow.
const onePiece = 64 << 10

// write writes p, however large, as long as the client reads.
func (cl *client) write(p []byte) error {
	for len(p) > 0 {
		n := min(len(p), onePiece)
		cl.bound()
		if _, err := cl.w.Write(p[:n]); err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// bound moves on the time by which the client must have read something: stall from now, or up to a quarter less, so that it is
// not moved with every token.
func (cl *client) bound() {
	if cl.stall <= 0 || cl.limit == nil {
		return
	}
	if now := time.Now(); now.Sub(cl.armed) > cl.stall/4 {
		cl.armed = now
		cl.limit(now.Add(cl.stall))
	}
}

// lost is the failure of a write to the client.
func (cl *client) lost(c *call, err error) *failure {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return c.clientLeft()
	}
	return c.clientGone("write to the client: " + plainError(err))
}

// clientLeft is the failure when net/http has found the connection closed; it closes it itself when a write has taken too long.
func (c *call) clientLeft() *failure {
	if at := c.stallAt.Load(); at != 0 && time.Now().UnixNano() >= at {
		return c.clientGone("the client has not read its answer for too long")
	}
	return c.clientGone("the client closed its connection")
}

// errClosing is what requests get that the router's end has ended.
func errClosing() *failure {
	return routerFailure(room.CodeShutdown, true, "the router is shutting down")
}

// passHeader adds a worker's header to the client's answer, but for what is the router's to say: the request's id, and
// which origins may read it.
func passHeader(own, h http.Header) {
	id, vary := own[edge.HeaderRequestID], own["Vary"]
	copyHeader(own, h)
	if id != nil {
		own[edge.HeaderRequestID] = id
	}
	if vary != nil {
		own["Vary"] = vary
	}
}

// handshakeFailed: there is no TLS connection, for a reason that will not go away by itself. A worker that does not accept the router's certificate
// says so, in TLS 1.3, in place of its first answer.
func handshakeFailed(err error) bool {
	var untrusted *tls.CertificateVerificationError
	var noTLS tls.RecordHeaderError
	var op *net.OpError
	return errors.As(err, &untrusted) || errors.As(err, &noTLS) || errors.As(err, &op) && op.Op == "remote error"
}
