package router

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/edge"
)

// authority is a CA of the test's own, with its files.
type authority struct {
	t      *testing.T
	dir    string
	cert   *x509.Certificate
	key    *ecdsa.PrivateKey
	serial int64
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir()}
	a.cert, a.key = a.make(&x509.Certificate{
		Subject: pkix.Name{CommonName: "CA"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, time.Hour, "ca", nil, nil)
	return a
}

// make signs a certificate that is good for d, and writes name.pem and name.key.
func (a *authority) make(c *x509.Certificate, d time.Duration, name string, parent *x509.Certificate, by *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	a.serial++
	c.SerialNumber, c.NotBefore, c.NotAfter = big.NewInt(a.serial), time.Now().Add(-time.Hour), time.Now().Add(d)
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
	a.write(name+".pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	a.write(name+".key", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}))
	out, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return out, key
}

func (a *authority) write(name string, text []byte) {
	a.t.Helper()
	if err := os.WriteFile(a.file(name), text, 0o600); err != nil {
		a.t.Fatal(err)
	}
}

func (a *authority) file(name string) string { return filepath.Join(a.dir, name) }

// leaf makes NAME.pem and NAME.key for 127.0.0.1 and host.
func (a *authority) leaf(name, host string, d time.Duration) {
	a.t.Helper()
	c := &x509.Certificate{Subject: pkix.Name{CommonName: name}, DNSNames: []string{host}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	if host == "" {
		c.DNSNames, c.IPAddresses = nil, []net.IP{net.IPv4(127, 0, 0, 1)}
	}
	a.make(c, d, name, a.cert, a.key)
}

func (a *authority) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

func (a *authority) own(name string) *edge.Certificate {
	a.t.Helper()
	c, err := edge.OpenCertificate(a.file(name+".pem"), a.file(name+".key"))
	if err != nil {
		a.t.Fatal(err)
	}
	return c
}

// tlsWorker serves s to those who have a certificate of a's.
func (a *authority) tlsWorker(s script, name string) string {
	pair, err := tls.LoadX509KeyPair(a.file(name+".pem"), a.file(name+".key"))
	if err != nil {
		a.t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if strings.HasSuffix(r.URL.Path, "completions") {
			s(w, r, nil)
		}
	}))
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: a.pool(), ClientAuth: tls.RequireAndVerifyClientCert}
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	srv.StartTLS()
	a.t.Cleanup(srv.Close)
	return srv.Listener.Addr().String()
}

// Workers that want a certificate, and are to show a good one themselves.
func TestTLSToWorkers(t *testing.T) {
	a, other := newAuthority(t), newAuthority(t)
	a.leaf("worker", "", time.Hour)
	a.leaf("named", "workers.example", time.Hour)
	a.leaf("router", "router.example", time.Hour)
	other.leaf("router", "router.example", time.Hour)
	p, d := a.tlsWorker(okPrefill, "worker"), a.tlsWorker(okStream, "worker")
	named := a.tlsWorker(okStream, "named")
	plain := tcpWorker(t, okStream)
	for name, c := range map[string]struct {
		tls    edge.WorkerTLS
		decode string
		want   string // in the error; "": it is served
	}{
		"good":                {edge.WorkerTLS{CA: a.file("ca.pem"), Own: a.own("router")}, d, ""},
		"none of its own":     {edge.WorkerTLS{CA: a.file("ca.pem")}, d, "certificate required"},
		"of another CA":       {edge.WorkerTLS{CA: a.file("ca.pem"), Own: other.own("router")}, d, "certificate"},
		"worker's unknown":    {edge.WorkerTLS{CA: other.file("ca.pem"), Own: a.own("router")}, d, "certificate signed by unknown authority"},
		"worker's other name": {edge.WorkerTLS{CA: a.file("ca.pem"), Own: a.own("router"), ServerName: "elsewhere.example"}, named, "elsewhere.example"},
		"no TLS there":        {edge.WorkerTLS{CA: a.file("ca.pem"), Own: a.own("router")}, plain, "does not look like a TLS handshake"},
	} {
		t.Run(name, func(t *testing.T) {
			conf, err := c.tls.Config()
			if err != nil {
				t.Fatal(err)
			}
			r, err := New(Config{WorkerTLS: conf, MaxRetries: -1, Prefills: []Backend{{URL: "https://" + p, BootstrapPort: 1, Kind: KindBaton}}, Decodes: []Backend{{URL: "https://" + c.decode, Kind: KindBaton}}})
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			srv := httptest.NewServer(r.Handler())
			defer srv.Close()
			g := postTCP(t, srv.URL, HeaderTimeout, "15000")
			switch {
			case c.want == "":
				g.ok(t, role+token+last+done)
			case g.status/100 != 5 || !strings.Contains(g.body, c.want):
				t.Errorf("%d %s; want %q", g.status, g.body, c.want)
			}
			if c.want != "" { // found by the probes, too, and told in readiness
				eventually(t, func() error {
					rec := httptest.NewRecorder()
					r.Handler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/health", nil))
					if rec.Code != 503 || !strings.Contains(rec.Body.String(), c.want) {
						return errors.New(rec.Body.String())
					}
					return nil
				})
			}
		})
	}
	// The name to look for may be given, for workers that are known by an address.
	conf, err := edge.WorkerTLS{CA: a.file("ca.pem"), Own: a.own("router"), ServerName: "workers.example"}.Config()
	if err != nil {
		t.Fatal(err)
	}
	r, err := New(Config{WorkerTLS: conf, Decodes: []Backend{{URL: "https://" + named, Kind: KindPlain}}})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	srv := httptest.NewServer(r.Handler())
	defer srv.Close()
	postTCP(t, srv.URL).ok(t, role+token+last+done)
}

// The router's own port: a new certificate is shown to who comes then, and streams go on.
func TestTLSPortReloads(t *testing.T) {
	a := newAuthority(t)
	a.leaf("port", "", time.Hour)
	cert := a.own("port")
	release := make(chan struct{})
	d := tcpWorker(t, func(w http.ResponseWriter, r *http.Request, l *leg1) {
		sse(role, token)(w, r, l)
		<-release
		_, _ = io.WriteString(w, last+done)
	})
	r, err := New(Config{Decodes: []Backend{{URL: "http://" + d, Kind: KindPlain}}})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := edge.NewServer(r.Handler(), edge.Limits{}, cert.ServerTLS(), slog.New(slog.DiscardHandler))
	served := make(chan error, 1)
	go func() { served <- srv.ServeTLS(ln, "", "") }()
	ctx, stop := context.WithCancel(context.Background())
	told, watched := make(chan error, 8), make(chan struct{})
	go func() {
		defer close(watched)
		edge.Watch(ctx, 20*time.Millisecond, cert.Watched(), func(err error) { told <- err })
	}()
	defer func() {
		stop()
		<-watched
		_ = srv.Close()
		<-served
		r.Close()
	}()
	shown := func() (serial int64, version uint16, proto string) {
		t.Helper()
		conn, err := tls.DialWithDialer(&net.Dialer{Timeout: must}, "tcp", ln.Addr().String(), &tls.Config{RootCAs: a.pool(), NextProtos: []string{"h2", "http/1.1"}})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		s := conn.ConnectionState()
		return s.PeerCertificates[0].SerialNumber.Int64(), s.Version, s.NegotiatedProtocol
	}
	first, version, proto := shown()
	if version != tls.VersionTLS13 || proto != "http/1.1" {
		t.Errorf("version %x, protocol %q", version, proto)
	}
	if conn, err := tls.Dial("tcp", ln.Addr().String(), &tls.Config{RootCAs: a.pool(), MaxVersion: tls.VersionTLS11}); err == nil {
		_ = conn.Close()
		t.Error("TLS 1.1 is spoken")
	}
	conn, err := tls.Dial("tcp", ln.Addr().String(), &tls.Config{RootCAs: a.pool()})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(2 * must))
	if _, err := io.WriteString(conn, head+"Connection: close\r\nContent-Length: "+strconv.Itoa(len(streamBody))+"\r\n\r\n"+streamBody); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || resp.StatusCode != 200 {
		t.Fatal(resp, err)
	}
	hear := func() error {
		t.Helper()
		select {
		case err := <-told:
			return err
		case <-time.After(must):
			t.Fatal("nothing was told")
			return nil
		}
	}
	a.write("port.pem", []byte("-----BEGIN CERTIFICATE-----\n"))
	if err := hear(); err == nil || !strings.Contains(err.Error(), "port.pem") {
		t.Errorf("a broken file: %v", err)
	}
	if now, _, _ := shown(); now != first {
		t.Errorf("a broken file changed the certificate: %d", now)
	}
	a.leaf("port", "", time.Hour)
	for hear() != nil { // of the new certificate with the old key, perhaps
	}
	if now, _, _ := shown(); now == first {
		t.Error("the old certificate is still shown")
	}
	close(release)
	body, err := io.ReadAll(resp.Body)
	if err != nil || string(body) != role+token+last+done {
		t.Errorf("the stream of before: %q, %v", body, err)
	}
}

func TestBadCertificates(t *testing.T) {
	a := newAuthority(t)
	a.leaf("good", "", time.Hour)
	a.leaf("other", "", time.Hour)
	a.leaf("old", "", -time.Minute)
	a.write("garbage", []byte("garbage"))
	for want, files := range map[string][2]string{
		"both files are needed":       {a.file("good.pem"), ""},
		"no such file":                {a.file("none.pem"), a.file("good.key")},
		"does not match":              {a.file("good.pem"), a.file("other.key")},
		"failed to find any PEM data": {a.file("garbage"), a.file("good.key")},
		"it has expired on ":          {a.file("old.pem"), a.file("old.key")},
	} {
		if _, err := edge.OpenCertificate(files[0], files[1]); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
	for want, ca := range map[string]string{"there is no certificate in it": a.file("garbage"), "no such file": a.file("none")} {
		if _, err := (edge.WorkerTLS{CA: ca}).Config(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
}
