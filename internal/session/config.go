package session

import (
	"context"
	"crypto/tls"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"github.com/baton-pd/baton/internal/transfer"
)

// Tuning holds the time settings common to both sides. A value <= 0 means the
// default given with each field.
type Tuning struct {
	// KeepaliveTime is how long nothing may be heard of the peer before it is
	// pinged. Default 2 s.
	KeepaliveTime time.Duration
	// KeepaliveTimeout is how long the ack of a ping may take. An idle peer that
	// was stopped is noticed after KeepaliveTime + KeepaliveTimeout. Default 3 s.
	KeepaliveTimeout time.Duration
	// DialTimeout bounds one attempt: connecting and the hello, with the data
	// plane's dial in it. It is also how long a Get goes on trying a peer that
	// cannot be reached. Default 5 s.
	DialTimeout time.Duration
	// AckTimeout is how long the peer may take to handle a message, counted
	// from the call of the Send method. Default 5 s.
	AckTimeout time.Duration
	// HelloTimeout is how long a new connection may take to say hello. Default 5 s.
	HelloTimeout time.Duration
	// BackoffMin and BackoffMax bound the pause after a failed attempt, which
	// doubles with every failure in a row and carries jitter. Defaults 100 ms and 2 s.
	BackoffMin, BackoffMax time.Duration
}

// withDefaults returns t with every unset value filled in.
func (t Tuning) withDefaults() Tuning {
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{
		{&t.KeepaliveTime, 2 * time.Second},
		{&t.KeepaliveTimeout, 3 * time.Second},
		{&t.DialTimeout, 5 * time.Second},
		{&t.AckTimeout, 5 * time.Second},
		{&t.HelloTimeout, 5 * time.Second},
		{&t.BackoffMin, 100 * time.Millisecond},
		{&t.BackoffMax, 2 * time.Second},
	} {
		if *d.v <= 0 {
			*d.v = d.def
		}
	}
	t.BackoffMax = max(t.BackoffMax, t.BackoffMin)
	return t
}

// ClientConfig configures a [Client].
type ClientConfig struct {
	// Identity of this decode worker.
	Identity Identity
	// Offer opens the memory of this worker to session s and describes it. After
	// an Offer without error the Handler's Down is called exactly once for s, even
	// if the session never came up. An Offer that returns an error has to undo
	// its own work; Down is not called.
	Offer func(s transfer.SessionID) ([]transfer.Descriptor, error)
	// Handler hears the prefill side.
	Handler ClientHandler
	// Log gets a line for each session that comes up or ends; nil: slog.Default.
	Log *slog.Logger
	Tuning
	// TLS is asked before each attempt how to speak TLS to the prefill worker: files behind it may change. The result is this
	// package's; without a ServerName the host of the address counts. nil: sessions are not encrypted.
	TLS func() *tls.Config
	// DialOptions are added to those of every gRPC connection (tests: a bufconn dialer).
	DialOptions []grpc.DialOption
	// Registerer gets the metrics; nil: they are kept but not shown.
	Registerer prometheus.Registerer
}

// ServerConfig configures a [Server].
type ServerConfig struct {
	// Identity of this prefill worker.
	Identity Identity
	// Connect dials the data plane of session s during the hello; ctx bounds it. The
	// peer is the server's: closed after the Handler's Down has returned.
	Connect func(ctx context.Context, s transfer.SessionID, offers []transfer.Descriptor) (transfer.Peer, error)
	// Handler hears the decode side.
	Handler ServerHandler
	// Log gets a line for each session that comes up or ends; nil: slog.Default.
	Log *slog.Logger
	Tuning
	// TLS, if not nil, is how decode workers are to speak to this port; others are refused.
	TLS *tls.Config
	// MaxSessions bounds the live sessions; more are refused with CodeCapacity. Default 1024.
	MaxSessions int
	// Registerer gets the metrics; nil: they are kept but not shown.
	Registerer prometheus.Registerer
}
