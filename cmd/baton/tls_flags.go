package main

import (
	"crypto/tls"
	"net/http"

	"github.com/spf13/pflag"

	"github.com/baton-pd/baton/internal/edge"
)

// serverTLS are the files of a port that serves TLS.
type serverTLS struct{ cert, key, clientCA string }

// open reads them; nil for a plain port. watched is what may change.
func (s serverTLS) open() (t *tls.Config, watched []edge.Watched, err error) {
	if s.cert == "" && s.key == "" {
		if s.clientCA != "" {
			return nil, nil, usagef("--tls-client-ca needs --tls-cert and --tls-key: clients show certificates over TLS only")
		}
		return nil, nil, nil
	}
	c, err := edge.OpenCertificate(s.cert, s.key)
	if err != nil {
		return nil, nil, usagef("--tls-cert and --tls-key: %w", err)
	}
	watched = append(watched, c.Watched())
	var clients *edge.Authorities
	if s.clientCA != "" {
		if clients, err = edge.OpenAuthorities(s.clientCA); err != nil {
			return nil, nil, usagef("--tls-client-ca: %w", err)
		}
		watched = append(watched, clients.Watched())
	}
	return c.ServerTLS(clients), watched, nil
}

// clientTLS are the files of who speaks TLS to others.
type clientTLS struct{ ca, cert, key, name string }

// open reads them. The flags' names are for errors.
func (c clientTLS) open(caFlag, certFlag, keyFlag string) (t edge.ClientTLS, watched []edge.Watched, err error) {
	t.ServerName = c.name
	if c.ca != "" {
		if t.CA, err = edge.OpenAuthorities(c.ca); err != nil {
			return t, nil, usagef("%s: %w", caFlag, err)
		}
		watched = append(watched, t.CA.Watched())
	}
	if c.cert != "" || c.key != "" {
		if t.Own, err = edge.OpenCertificate(c.cert, c.key); err != nil {
			return t, nil, usagef("%s and %s: %w", certFlag, keyFlag, err)
		}
		watched = append(watched, t.Own.Watched())
	}
	return t, watched, nil
}

// addTo is for commands that ask others over HTTP.
func (c *clientTLS) addTo(f *pflag.FlagSet) {
	f.StringVar(&c.ca, "tls-ca", "", "file with the certificates that https servers' are checked against (default: the system's)")
	f.StringVar(&c.cert, "tls-cert", "", "file with the certificate that is shown to servers that want one")
	f.StringVar(&c.key, "tls-key", "", "file with its key")
	f.StringVar(&c.name, "tls-server-name", "", "name that servers' certificates must be for (default: the host of their address)")
}

// client reads the files of addTo's flags. With apiKey, if not empty, every request asks by it.
func (c *clientTLS) client(apiKey string) (*http.Client, edge.ClientTLS, error) {
	t, _, err := c.open("--tls-ca", "--tls-cert", "--tls-key")
	if err != nil {
		return nil, t, err
	}
	tr := http.DefaultTransport.(*http.Transport).Clone()
	tr.TLSClientConfig = t.Config()
	if apiKey == "" {
		return &http.Client{Transport: tr}, t, nil
	}
	return &http.Client{Transport: withKey{tr, apiKey}}, t, nil
}

// withKey adds an API key to requests, but not to those that a redirect makes: their server may be anybody's.
type withKey struct {
	*http.Transport
	key string
}

// RoundTrip implements http.RoundTripper.
func (w withKey) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Response == nil {
		req = req.Clone(req.Context())
		req.Header.Set("Authorization", "Bearer "+w.key)
	}
	return w.Transport.RoundTrip(req)
}
