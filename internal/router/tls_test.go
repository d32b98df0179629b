package router

import (
	"bufio"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/edge/edgetest"
)

// tlsWorker serves s to those who have a certificate of a's.
func tlsWorker(t *testing.T, a *edgetest.Authority, s script, name string) string {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(a.File(name+".pem"), a.File(name+".key"))
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if strings.HasSuffix(r.URL.Path, "completions") {
			s(w, r, nil)
		}
	}))
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: a.Pool(), ClientAuth: tls.RequireAndVerifyClientCert}
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	srv.StartTLS()
	t.Cleanup(srv.Close)
	return srv.Listener.Addr().String()
}

// Workers that want a certificate, and are to show a good one themselves.
func TestTLSToWorkers(t *testing.T) {
	a, other := edgetest.NewAuthority(t), edgetest.NewAuthority(t)
	a.Leaf("worker", "", time.Hour)
	a.Leaf("named", "workers.example", time.Hour)
	a.Leaf("router", "router.example", time.Hour)
	other.Leaf("router", "router.example", time.Hour)
	p, d := tlsWorker(t, a, okPrefill, "worker"), tlsWorker(t, a, okStream, "worker")
	named := tlsWorker(t, a, okStream, "named")
	plain := tcpWorker(t, okStream)
	for name, c := range map[string]struct {
		tls    edge.ClientTLS
		decode string
		want   string // in the error; "": it is served
	}{
		"good":                {edge.ClientTLS{CA: a.Trust(), Own: a.Own("router")}, d, ""},
		"none of its own":     {edge.ClientTLS{CA: a.Trust()}, d, "certificate required"},
		"of another CA":       {edge.ClientTLS{CA: a.Trust(), Own: other.Own("router")}, d, "certificate"},
		"worker's unknown":    {edge.ClientTLS{CA: other.Trust(), Own: a.Own("router")}, d, "certificate signed by unknown authority"},
		"worker's other name": {edge.ClientTLS{CA: a.Trust(), Own: a.Own("router"), ServerName: "elsewhere.example"}, named, "elsewhere.example"},
		"no TLS there":        {edge.ClientTLS{CA: a.Trust(), Own: a.Own("router")}, plain, "does not look like a TLS handshake"},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := New(Config{WorkerTLS: c.tls, MaxRetries: -1, Prefills: []Backend{{URL: "https://" + p, BootstrapPort: 1, Kind: KindBaton}}, Decodes: []Backend{{URL: "https://" + c.decode, Kind: KindBaton}}})
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			srv := httptest.NewServer(r.Handler())
			defer srv.Close()
			g := postTCP(t, srv.URL, HeaderTimeout, "15000")
			for try := 0; try < 20 && (strings.Contains(g.body, "connection reset") || strings.Contains(g.body, "broken pipe")); try++ {
				g = postTCP(t, srv.URL, HeaderTimeout, "15000") // the server's refusal was lost with its connection
			}
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
	conf := edge.ClientTLS{CA: a.Trust(), Own: a.Own("router"), ServerName: "workers.example"}
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
	a := edgetest.NewAuthority(t)
	a.Leaf("port", "", time.Hour)
	cert := a.Own("port")
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
	srv := edge.NewServer(r.Handler(), edge.Limits{}, cert.ServerTLS(nil), slog.New(slog.DiscardHandler))
	served := make(chan error, 1)
	go func() { served <- srv.ServeTLS(ln, "", "") }()
	hear, stop := edgetest.Follow(t, cert.Watched(), 20*time.Millisecond)
	defer func() {
		stop()
		_ = srv.Close()
		<-served
		r.Close()
	}()
	shown := func() (serial int64, version uint16, proto string) {
		t.Helper()
		conn, err := tls.DialWithDialer(&net.Dialer{Timeout: must}, "tcp", ln.Addr().String(), &tls.Config{RootCAs: a.Pool(), NextProtos: []string{"h2", "http/1.1"}})
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
	if conn, err := tls.Dial("tcp", ln.Addr().String(), &tls.Config{RootCAs: a.Pool(), MaxVersion: tls.VersionTLS11}); err == nil {
		_ = conn.Close()
		t.Error("TLS 1.1 is spoken")
	}
	conn, err := tls.Dial("tcp", ln.Addr().String(), &tls.Config{RootCAs: a.Pool()})
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
	a.Write("port.pem", []byte("-----BEGIN CERTIFICATE-----\n"))
	if err := hear(); err == nil || !strings.Contains(err.Error(), "port.pem") {
		t.Errorf("a broken file: %v", err)
	}
	if now, _, _ := shown(); now != first {
		t.Errorf("a broken file changed the certificate: %d", now)
	}
	a.Leaf("port", "", time.Hour)
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
	a := edgetest.NewAuthority(t)
	a.Leaf("good", "", time.Hour)
	a.Leaf("other", "", time.Hour)
	a.Leaf("old", "", -time.Minute)
	a.Write("garbage", []byte("garbage"))
	for want, files := range map[string][2]string{
		"both files are needed":       {a.File("good.pem"), ""},
		"no such file":                {a.File("none.pem"), a.File("good.key")},
		"does not match":              {a.File("good.pem"), a.File("other.key")},
		"failed to find any PEM data": {a.File("garbage"), a.File("good.key")},
		"it has expired on ":          {a.File("old.pem"), a.File("old.key")},
	} {
		if _, err := edge.OpenCertificate(files[0], files[1]); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
	for want, ca := range map[string]string{"there is no certificate in it": a.File("garbage"), "no such file": a.File("none")} {
		if _, err := edge.OpenAuthorities(ca); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
}
