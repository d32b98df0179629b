package main

import (
	"github.com/spf13/pflag"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/worker"
)

// workerEdge says who may speak to a worker, and over what.
type workerEdge struct {
	tls         serverTLS
	keys        string // a file
	openMetrics bool
	peerTLS     bool // decode only, as peer
	peer        clientTLS

	watched []edge.Watched // what configure has read
}

func (e *workerEdge) addTo(f *pflag.FlagSet) {
	f.StringVar(&e.tls.cert, "tls-cert", "", "file with the worker's certificate and what leads to its CA, may change: speak TLS on --listen and --bootstrap-listen")
	f.StringVar(&e.tls.key, "tls-key", "", "file with its key")
	f.StringVar(&e.tls.clientCA, "tls-client-ca", "", "file with the certificates of those who sign the router's and decode workers' certificates, may change: nobody else gets in")
	f.StringVar(&e.keys, "api-key-file", "", "file with the hashes of the API keys of who may use --listen, may change: the router's --worker-api-key-file (see baton router keygen)")
	f.BoolVar(&e.openMetrics, "open-metrics", false, "with --api-key-file: serve /metrics without a key")
}

// addPeer is for decode workers.
func (e *workerEdge) addPeer(f *pflag.FlagSet) {
	f.BoolVar(&e.peerTLS, "peer-tls", false, "speak TLS to prefill workers' bootstrap ports (with --peer-ca, too)")
	f.StringVar(&e.peer.ca, "peer-ca", "", "file with the certificates that prefill workers' are checked against, may change (default: the system's)")
	f.StringVar(&e.peer.cert, "peer-cert", "", "file with the certificate that is shown to prefill workers, may change (default: --tls-cert)")
	f.StringVar(&e.peer.key, "peer-cert-key", "", "file with its key")
	f.StringVar(&e.peer.name, "peer-server-name", "", "name that prefill workers' certificates must be for (default: the host of their address)")
}

// configure reads the files and puts everything into c.
func (e *workerEdge) configure(c *worker.Config) (err error) {
	var files []edge.Watched
	if c.TLS, files, err = e.tls.open(); err != nil {
		return err
	}
	e.watched = append(e.watched, files...)
	if e.keys != "" {
		if c.Keys, err = edge.OpenKeys(e.keys); err != nil {
			return usagef("--api-key-file: %w", err)
		}
		e.watched = append(e.watched, c.Keys.Watched())
	}
	c.OpenMetrics = e.openMetrics
	return e.configurePeer(c)
}

// configurePeer is configure for what a decode worker says to prefill workers.
func (e *workerEdge) configurePeer(c *worker.Config) error {
	on := e.peerTLS || e.peer.ca != ""
	if !on {
		if e.peer != (clientTLS{}) {
			return usagef("--peer-cert, --peer-cert-key and --peer-server-name need --peer-tls or --peer-ca")
		}
		return nil
	}
	if e.peer.cert == "" && e.peer.key == "" {
		e.peer.cert, e.peer.key = e.tls.cert, e.tls.key
	}
	t, files, err := e.peer.open("--peer-ca", "--peer-cert", "--peer-cert-key")
	if err != nil {
		return err
	}
	e.watched = append(e.watched, files...)
	c.PeerTLS = t.Config
	return nil
}
