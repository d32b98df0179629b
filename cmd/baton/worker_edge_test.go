package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/edge/edgetest"
	"github.com/baton-pd/baton/internal/worker"
)

// Files that are missing or do not fit are found before a model is loaded.
func TestWorkerEdgeFlags(t *testing.T) {
	a := edgetest.NewAuthority(t)
	a.Leaf("worker", "", time.Hour)
	none, ca := filepath.Join(t.TempDir(), "none"), a.File("ca.pem")
	own := serverTLS{cert: a.File("worker.pem"), key: a.File("worker.key")}
	client := clientTLS{cert: own.cert, key: own.key}
	for want, e := range map[string]workerEdge{
		"--tls-cert and --tls-key: a certificate":                  {tls: serverTLS{cert: own.cert}},
		"--tls-client-ca needs":                                    {tls: serverTLS{clientCA: ca}},
		"--tls-client-ca: open":                                    {tls: serverTLS{cert: own.cert, key: own.key, clientCA: none}},
		"--peer-ca: open":                                          {peer: clientTLS{ca: none}},
		"--peer-cert and --peer-cert-key: a cert":                  {peerTLS: true, peer: clientTLS{cert: own.cert}},
		"--peer-cert, --peer-cert-key and --peer-server-name need": {peer: client},
		"--api-key-file: key file":                                 {keys: os.DevNull},
	} {
		err := e.configure(&worker.Config{})
		if err == nil || !strings.HasPrefix(err.Error(), want) || !errors.As(err, new(usageError)) {
			t.Errorf("error %v; want %q, as a usage error", err, want)
		}
	}
	for name, c := range map[string]struct {
		edge            workerEdge
		tls, peer, show bool
		watched         int
	}{
		"nothing":                     {},
		"TLS":                         {edge: workerEdge{tls: own}, tls: true, watched: 1},
		"peers by the system's CAs":   {edge: workerEdge{peerTLS: true}, peer: true},
		"the port's for peers, too":   {edge: workerEdge{tls: own, peer: clientTLS{ca: ca}}, tls: true, peer: true, show: true, watched: 3},
		"a certificate for peers":     {edge: workerEdge{peerTLS: true, peer: client}, peer: true, show: true, watched: 1},
		"everything, clients checked": {edge: workerEdge{tls: serverTLS{own.cert, own.key, ca}, peer: clientTLS{ca: ca, name: "p"}}, tls: true, peer: true, show: true, watched: 4},
	} {
		var got worker.Config
		if err := c.edge.configure(&got); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if (got.TLS != nil) != c.tls || (got.PeerTLS != nil) != c.peer || len(c.edge.watched) != c.watched {
			t.Errorf("%s: port %v, peers %v, %d files watched", name, got.TLS != nil, got.PeerTLS != nil, len(c.edge.watched))
		}
		if c.peer && (got.PeerTLS().GetClientCertificate != nil) != c.show {
			t.Errorf("%s: a certificate of its own is shown: %v", name, !c.show)
		}
	}
}

// The workers of baton up are spoken to without TLS: flags that would have them refuse that are refused.
func TestUpRefusesTLS(t *testing.T) {
	for _, u := range []upFlags{{extra: []string{"--tls-cert=c"}}, {extraOf: [2][]string{{"--tls-client-ca=c"}, nil}}, {extraOf: [2][]string{nil, {"--max-queue=3", "--peer-ca=c"}}}} {
		u.prefills, u.decodes, u.transport, u.listen = 1, 1, "auto", "127.0.0.1:0"
		if err := u.validate(); err == nil || !strings.Contains(err.Error(), "without TLS") || !errors.As(err, new(usageError)) {
			t.Errorf("%+v: %v", u, err)
		}
	}
}
