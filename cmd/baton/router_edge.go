package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/router"
)

// edgeInterval is the time between two readings of files that may change.
const edgeInterval = time.Second

// edgeFlags say who may come in, over what, and how slow they may be.
type edgeFlags struct {
	keys         string // a file
	openMetrics  bool
	cors         edge.CORS
	tls          serverTLS
	workerKey    string // a file
	passKey      bool
	workerTLS    clientTLS
	header, body time.Duration
	stall        time.Duration
	connections  int // 0: the default
	limit        *edge.Connections

	watched   []edge.Watched // what configure has read
	serverTLS *tls.Config
}

func (e *edgeFlags) addTo(fs *pflag.FlagSet) {
	fs.StringVar(&e.keys, "api-key-file", "", "file with the hashes of the clients' API keys and their limits, may change; without it everybody may ask (see baton router keygen)")
	fs.BoolVar(&e.openMetrics, "open-metrics", false, "with --api-key-file: serve /metrics without a key")
	fs.StringArrayVar(&e.cors.Origins, "cors-origin", nil, "origin whose pages may use the router from browsers, for example https://chat.example.com, or * (repeat for more)")
	fs.BoolVar(&e.cors.Credentials, "cors-credentials", false, "let browsers send cookies, for a gateway before the router; not with *")
	fs.StringVar(&e.tls.cert, "tls-cert", "", "file with the router's certificate and what leads to its CA, may change: serve HTTPS")
	fs.StringVar(&e.tls.key, "tls-key", "", "file with its key")
	fs.StringVar(&e.tls.clientCA, "tls-client-ca", "", "file with the certificates of those who sign clients' certificates, may change: nobody else gets in")
	fs.StringVar(&e.workerKey, "worker-api-key-file", "", "file with the API key that the router sends to workers")
	fs.BoolVar(&e.passKey, "pass-client-key", false, "send the client's Authorization and X-Api-Key on to workers")
	fs.StringVar(&e.workerTLS.ca, "worker-ca", "", "file with the certificates that https workers' are checked against, may change (default: the system's)")
	fs.StringVar(&e.workerTLS.cert, "worker-cert", "", "file with the router's certificate for workers that want one, may change")
	fs.StringVar(&e.workerTLS.key, "worker-cert-key", "", "file with its key")
	fs.StringVar(&e.workerTLS.name, "worker-server-name", "", "name that workers' certificates must be for (default: the host of their address)")
	fs.DurationVar(&e.header, "header-timeout", 10*time.Second, "time for a request's header to arrive")
	fs.DurationVar(&e.body, "body-timeout", 30*time.Second, "time for a request's body to arrive")
	fs.IntVar(&e.connections, "max-connections", 0, "open connections of clients at a time; more are refused with 503, but for /health, /version and /metrics (0: half of the files that may be open, 65536 at most)")
	fs.DurationVar(&e.stall, "client-stall-timeout", time.Minute, "longest time in which a client reads nothing of its answer; then the request ends (0: only the deadline)")
}

// configure reads the files and puts everything into c.
func (e *edgeFlags) configure(c *router.Config) (err error) {
	for name, d := range map[string]time.Duration{"header-timeout": e.header, "body-timeout": e.body} {
		if d < 0 { // 0 is the default
			return usagef("--%s must be positive", name)
		}
	}
	if e.keys != "" {
		if c.Keys, err = edge.OpenKeys(e.keys); err != nil {
			return usagef("--api-key-file: %w", err)
		}
		e.watched = append(e.watched, c.Keys.Watched())
	}
	c.OpenMetrics, c.CORS, c.PassAuthorization, c.BodyTimeout, c.ClientStall = e.openMetrics, e.cors, e.passKey, e.body, e.stall
	if e.stall == 0 {
		c.ClientStall = -1
	}
	most := e.connections
	if most == 0 {
		most = edge.DefaultConnections()
	}
	e.limit = edge.NewConnections(most)
	c.Connections = e.limit
	if e.workerKey != "" {
		if c.WorkerKey, err = readSecret(e.workerKey); err != nil {
			return usagef("--worker-api-key-file: %w", err)
		}
	}
	var files []edge.Watched
	if e.serverTLS, files, err = e.tls.open(); err != nil {
		return err
	}
	e.watched = append(e.watched, files...)
	if c.WorkerTLS, files, err = e.workerTLS.open("--worker-ca", "--worker-cert", "--worker-cert-key"); err != nil {
		return err
	}
	e.watched = append(e.watched, files...)
	return nil
}

// readSecret reads a file of one line.
func readSecret(file string) (string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	secret := strings.TrimSpace(string(text))
	if secret == "" || strings.ContainsFunc(secret, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return "", fmt.Errorf("%s: want one line of visible ASCII", file)
	}
	return secret, nil
}

// watch keeps what was read from files current until the returned function, which waits, is called.
func watch(ctx context.Context, log *slog.Logger, files []edge.Watched) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	for _, w := range files {
		wg.Go(func() {
			edge.Watch(ctx, edgeInterval, w, func(err error) {
				if err != nil {
					log.Error("could not take a change; what was there stays in use", "of", w.What, "err", err)
				} else {
					log.Info("has changed and is in use", "of", w.What)
				}
			})
		})
	}
	return func() {
		cancel()
		wg.Wait()
	}
}

// serve serves rt on l until ctx ends. Then nobody new comes in, running requests have the grace to end, and the rest is
// told that the router shuts down.
func (e *edgeFlags) serve(ctx context.Context, rt *router.Router, l net.Listener, grace time.Duration, log *slog.Logger, ready func()) error {
	srv := edge.NewServer(rt.Handler(), edge.Limits{Header: e.header, Connections: e.limit}, e.serverTLS, log)
	served := make(chan error, 1)
	go func() { served <- edge.Serve(srv, l) }()
	ready()
	select {
	case err := <-served:
		rt.Close()
		return fmt.Errorf("serve on %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	log.Info("shutting down", "grace", grace)
	rt.Drain()
	err := shutdown(ctx, srv, grace)
	rt.Close() // what still runs is told that the router shuts down
	if err != nil {
		if err = shutdown(ctx, srv, farewell); err != nil {
			err = srv.Close()
		}
	}
	<-served
	return err
}

// shutdown closes the port and waits for connections to become idle.
func shutdown(ctx context.Context, srv *http.Server, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	return srv.Shutdown(ctx)
}

// farewell is the time for writing the last errors to clients.
const farewell = time.Second

// newKeygen is `baton router keygen`.
func newKeygen() *cobra.Command {
	var name string
	c := &cobra.Command{
		Use:   "keygen",
		Short: "Make an API key and its line for --api-key-file",
		Long: `Make an API key and its line for --api-key-file.

The key itself is printed once and kept nowhere: the file has its hash. What may follow the hash on the line:
weight=2 max-priority=0 max-inflight=8 per-minute=60 operator, and more hashes of the same client.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return keygen(cmd.OutOrStdout(), name) },
	}
	c.Flags().StringVar(&name, "name", "", "whose key it is, for logs, metrics and the queue")
	return c
}

func keygen(to io.Writer, name string) error {
	if err := edge.CheckName(name); err != nil {
		return usagef("--name: %w", err)
	}
	key, hash := edge.NewKey()
	_, err := fmt.Fprintf(to, "key, for the client:  %s\nline, for the file:   %s %s\n", key, name, hash)
	return err
}
