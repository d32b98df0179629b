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
	if err := c.Watched().load(); err != nil {
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

// Authorities are the certificates of those whose word is taken for who somebody is, from a file that may change.
type Authorities struct {
	file string
	now  atomic.Pointer[x509.CertPool]
}

// OpenAuthorities reads a file of certificates in PEM.
func OpenAuthorities(file string) (*Authorities, error) {
	a := &Authorities{file: file}
	if err := a.Watched().load(); err != nil {
		return nil, err
	}
	return a, nil
}

// Watched is for [Watch].
func (a *Authorities) Watched() Watched {
	return Watched{What: "trusted certificates " + a.file, Files: []string{a.file}, Apply: a.apply}
}

func (a *Authorities) apply(texts [][]byte) error {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(texts[0]) {
		return fmt.Errorf("%s: there is no certificate in it", a.file)
	}
	a.now.Store(pool)
	return nil
}

// ServerTLS is for a port: connections that come use the certificate as it is then. With clients, only those get in who show
// a certificate that one of these has signed, as the file is then.
func (c *Certificate) ServerTLS(clients *Authorities) *tls.Config {
	t := &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.now.Load(), nil },
	}
	if clients == nil {
		return t
	}
	t.ClientAuth = tls.RequireAndVerifyClientCert
	t.SessionTicketsDisabled = true // who was trusted once is judged anew by those who are trusted now
	each := t.Clone()
	t.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		now := each.Clone()
		now.ClientCAs = clients.now.Load()
		return now, nil
	}
	return t
}

// ClientTLS says how to speak to servers over TLS. Its zero value trusts whom the system trusts.
type ClientTLS struct {
	// CA are those whose word for a server is taken [the system's].
	CA *Authorities
	// Own is the certificate that is shown to servers that want one [none].
	Own *Certificate
	// ServerName is what servers' certificates must be for [the host of their address].
	ServerName string
}

// Config is for connections that are opened now: later ones may need another, where a file has changed. It is the caller's.
func (c *ClientTLS) Config() *tls.Config {
	t := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: c.ServerName}
	if c.CA != nil {
		t.RootCAs = c.CA.now.Load()
	}
	if c.Own != nil {
		t.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return c.Own.now.Load(), nil }
	}
	return t
}
