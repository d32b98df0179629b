package edge

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// Certificate is a certificate with its key from two files that may change.
type Certificate struct {
	cert, key string
	now       atomic.Pointer[tls.Certificate]
}

// OpenCertificate reads the files: PEM, the certificate first and then those that lead to its CA.
func OpenCertificate(cert, key string) (*Certificate, error) {
	if cert == "" || key == "" {
		return nil, errors.New("a certificate and its key go together: both files are needed")
	}
	c := &Certificate{cert: cert, key: key}
	texts, err := readAll([]string{cert, key})
	if err != nil {
		return nil, err
	}
	if err := c.apply(texts); err != nil {
		return nil, err
	}
	return c, nil
}

// Watched is for [Watch].
func (c *Certificate) Watched() Watched {
	return Watched{What: "certificate " + c.cert, Files: []string{c.cert, c.key}, Apply: c.apply}
}

func (c *Certificate) apply(texts [][]byte) error {
	pair, err := tls.X509KeyPair(texts[0], texts[1])
	if err != nil {
		return fmt.Errorf("certificate %s and key %s: %w", c.cert, c.key, err)
	}
	if pair.Leaf != nil && time.Now().After(pair.Leaf.NotAfter) {
		return fmt.Errorf("certificate %s: it has expired on %s", c.cert, pair.Leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	c.now.Store(&pair)
	return nil
}

// ServerTLS is for a port: connections that come use the certificate as it is then.
func (c *Certificate) ServerTLS() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.now.Load(), nil },
	}
}

// WorkerTLS says how the router speaks to workers whose address is https.
type WorkerTLS struct {
	CA string // file of the certificates that workers' are checked against [the system's]
	// Own is the router's certificate, shown to workers that want one [none].
	Own *Certificate
	// ServerName is what workers' certificates must be for [the host of their address].
	ServerName string
}

// Config reads the CA file. It is read once: a change of whom to trust wants a restart.
func (w WorkerTLS) Config() (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: w.ServerName}
	if w.CA != "" {
		text, err := readFile(w.CA)
		if err != nil {
			return nil, err
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%s: there is no certificate in it", w.CA)
		}
	}
	if w.Own != nil {
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return w.Own.now.Load(), nil }
	}
	return c, nil
}
