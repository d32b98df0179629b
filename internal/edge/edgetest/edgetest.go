// Package edgetest makes certificates for tests.
package edgetest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/edge"
)

// Authority is a CA of one test, with a directory of its own for the files: ca.pem is its certificate.
type Authority struct {
	t      *testing.T
	dir    string
	cert   *x509.Certificate
	key    *ecdsa.PrivateKey
	serial int64
}

// NewAuthority makes one that is good for an hour.
func NewAuthority(t *testing.T) *Authority {
	t.Helper()
	a := &Authority{t: t, dir: t.TempDir()}
	a.cert, a.key = a.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "CA"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, time.Hour, "ca")
	return a
}

// sign makes a certificate that is good for d, and writes name.pem and name.key. The first one is the CA's own.
func (a *Authority) sign(c *x509.Certificate, d time.Duration, name string) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	a.serial++
	c.SerialNumber, c.NotBefore, c.NotAfter = big.NewInt(a.serial), time.Now().Add(-time.Hour), time.Now().Add(d)
	parent, by := a.cert, a.key
	if parent == nil {
		parent, by = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, by)
	if err != nil {
		a.t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	a.Write(name+".pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	a.Write(name+".key", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}))
	out, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return out, key
}

// Write puts text into a file of the directory.
func (a *Authority) Write(name string, text []byte) {
	a.t.Helper()
	if err := os.WriteFile(a.File(name), text, 0o600); err != nil {
		a.t.Fatal(err)
	}
}

// File is the path of a file of the directory.
func (a *Authority) File(name string) string { return filepath.Join(a.dir, name) }

// Leaf makes NAME.pem and NAME.key for servers and clients, good for d: of host, or of 127.0.0.1 if that is "".
func (a *Authority) Leaf(name, host string, d time.Duration) {
	a.t.Helper()
	c := &x509.Certificate{Subject: pkix.Name{CommonName: name}, DNSNames: []string{host}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	if host == "" {
		c.DNSNames, c.IPAddresses = nil, []net.IP{net.IPv4(127, 0, 0, 1)}
	}
	a.sign(c, d, name)
}

// Unheard reports whether err is of a connection that was closed while something was written to it: the reason may have been there to be read, but
// HTTP's clients do not look. A test that wants to see the reason tries again.
func Unheard(err error) bool {
	return errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)
}

// Pool is the CA alone.
func (a *Authority) Pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

// Own opens NAME.pem and NAME.key.
func (a *Authority) Own(name string) *edge.Certificate {
	a.t.Helper()
	c, err := edge.OpenCertificate(a.File(name+".pem"), a.File(name+".key"))
	if err != nil {
		a.t.Fatal(err)
	}
	return c
}

// Trust opens ca.pem.
func (a *Authority) Trust() *edge.Authorities {
	a.t.Helper()
	c, err := edge.OpenAuthorities(a.File("ca.pem"))
	if err != nil {
		a.t.Fatal(err)
	}
	return c
}

// Follow watches w until stop is called, which waits for the end. hear waits for the next change that the watch tells of.
func Follow(t *testing.T, w edge.Watched, every time.Duration) (hear func() error, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	told, ended := make(chan error, 8), make(chan struct{})
	go func() {
		defer close(ended)
		edge.Watch(ctx, every, w, func(err error) { told <- err })
	}()
	hear = func() error {
		t.Helper()
		select {
		case err := <-told:
			return err
		case <-time.After(patience):
			t.Fatal("nothing was told")
			return nil
		}
	}
	return hear, func() {
		cancel()
		<-ended
	}
}

// patience is for what must happen.
const patience = 30 * time.Second
