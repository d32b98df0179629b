package edge

import (
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// Limits of a client that is slow before its request is there. Zero values take the defaults in brackets.
type Limits struct {
	// Header bounds the arrival of a request's header, and the TLS handshake [10s].
	Header time.Duration
	// Idle is how long a connection may wait for its next request [2m].
	Idle time.Duration
	// HeaderBytes is the largest header [64 KiB]; larger ones are answered 431.
	HeaderBytes int
	// Connections counts and bounds the server's connections [nobody counts].
	Connections *Connections
}

// NewServer serves h. It speaks HTTP/1.1 only, also over TLS: a connection carries one request, so that what ends a
// request also ends, or frees, its connection. log takes net/http's own words.
func NewServer(h http.Handler, l Limits, t *tls.Config, log *slog.Logger) *http.Server {
	if l.Header == 0 {
		l.Header = 10 * time.Second
	}
	if l.Idle == 0 {
		l.Idle = 2 * time.Minute
	}
	if l.HeaderBytes == 0 {
		l.HeaderBytes = 64 << 10
	}
	p := new(http.Protocols)
	p.SetHTTP1(true)
	srv := &http.Server{
		Handler: h, ReadHeaderTimeout: l.Header, IdleTimeout: l.Idle, MaxHeaderBytes: l.HeaderBytes, Protocols: p, TLSConfig: t,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	if l.Connections != nil {
		l.Connections.attach(srv)
	}
	return srv
}

// Serve serves ln with what NewServer has made, over TLS if it was given a configuration, until srv is closed.
func Serve(srv *http.Server, ln net.Listener) error {
	if srv.TLSConfig != nil {
		return srv.ServeTLS(ln, "", "")
	}
	return srv.Serve(ln)
}
