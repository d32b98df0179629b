package wire

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"
)

// A TLS server that reads nothing more cannot hold up the end of a request: a goodbye to it is not waited for.
func TestEndDoesNotWaitForTLS(t *testing.T) {
	srv := httptest.NewTLSServer(http.NotFoundHandler()) // for its certificate
	certs, roots := srv.TLS.Certificates, srv.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	srv.Close()
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		defer theirs.Close()
		served := make(chan error, 1)
		go func() {
			s := tls.Server(theirs, &tls.Config{Certificates: certs})
			_, err := http.ReadRequest(bufio.NewReader(s))
			served <- err // and nothing is read or written any more
		}()
		c := &Client{Addr: "x:1", Host: "x", MaxIdle: 1, MaxHeader: 1 << 10, TLSTimeout: time.Minute,
			Dial: func(context.Context, string, string) (net.Conn, error) { return ours, nil },
			TLS:  func() *tls.Config { return &tls.Config{RootCAs: roots, ServerName: "example.com"} }}
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errors.New("the deadline"))
		defer cancel()
		start := time.Now()
		_, err := c.Post(ctx, &Request{Path: "/", Header: http.Header{}})
		if took := time.Since(start); err == nil || err.Error() != "the deadline" || took != time.Second {
			t.Errorf("%v after %v", err, took)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
}
