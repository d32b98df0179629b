package edge_test

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/edge/edgetest"
)

const must = 30 * time.Second

// echo serves TLS on a port: each connection gets back what it sends.
func echo(t *testing.T, c *tls.Config) string {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", c)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-served
	})
	return l.Addr().String()
}

// dial opens a connection and hears an echo, so that the server has accepted it.
func dial(t *testing.T, addr string, c *tls.Config) (net.Conn, error) {
	t.Helper()
	conn, err := tls.DialWithDialer(&net.Dialer{Timeout: must}, "tcp", addr, c)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn, say(conn)
}

func say(conn net.Conn) error {
	_ = conn.SetDeadline(time.Now().Add(must))
	_, _ = io.WriteString(conn, "hello") // one that was refused already cannot be written to, but tells why
	_, err := io.ReadFull(conn, make([]byte, 5))
	return err
}

// swap puts from's CA in the place of to's, and waits until that is in use.
func swap(t *testing.T, a *edge.Authorities, to, from *edgetest.Authority) {
	t.Helper()
	hear, stop := edgetest.Follow(t, a.Watched(), 5*time.Millisecond)
	defer stop()
	to.Write("ca.pem", []byte("garbage"))
	if err := hear(); err == nil || !strings.Contains(err.Error(), "there is no certificate in it") {
		t.Fatalf("a broken file: %v", err)
	}
	text, err := os.ReadFile(from.File("ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	to.Write("ca.pem", text)
	if err := hear(); err != nil {
		t.Fatal(err)
	}
}

// Whom a port trusts may change: who is connected stays, who comes is judged by the new file, also with a session of before.
func TestClientAuthoritiesChange(t *testing.T) {
	server, first, second := edgetest.NewAuthority(t), edgetest.NewAuthority(t), edgetest.NewAuthority(t)
	server.Leaf("server", "", time.Hour)
	first.Leaf("client", "c.example", time.Hour)
	second.Leaf("client", "c.example", time.Hour)
	clients := first.Trust()
	addr := echo(t, server.Own("server").ServerTLS(clients))
	as := func(a *edgetest.Authority) *tls.Config {
		c := edge.ClientTLS{CA: server.Trust()}
		if a != nil {
			c.Own = a.Own("client")
		}
		conf := c.Config()
		conf.ClientSessionCache = tls.NewLRUClientSessionCache(8)
		return conf
	}
	one, two := as(first), as(second)
	before, err := dial(t, addr, one)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(who string, c *tls.Config, want string) {
		t.Helper()
		var op *net.OpError
		if _, err := dial(t, addr, c); !errors.As(err, &op) || op.Op != "remote error" || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", who, err, want)
		}
	}
	refused("without a certificate", as(nil), "certificate required")
	refused("of another CA", two, "")
	swap(t, clients, first, second)
	refused("of the CA of before", one, "")
	if _, err := dial(t, addr, two); err != nil {
		t.Errorf("of the new CA: %v", err)
	}
	if err := say(before); err != nil {
		t.Errorf("the connection of before: %v", err)
	}
}

// The same for those whom a client trusts.
func TestServerAuthoritiesChange(t *testing.T) {
	first, second := edgetest.NewAuthority(t), edgetest.NewAuthority(t)
	second.Leaf("server", "", time.Hour)
	addr := echo(t, second.Own("server").ServerTLS(nil))
	c := edge.ClientTLS{CA: first.Trust()}
	var untrusted *tls.CertificateVerificationError
	if _, err := dial(t, addr, c.Config()); !errors.As(err, &untrusted) {
		t.Errorf("a server of another CA: %v", err)
	}
	swap(t, c.CA, first, second)
	if _, err := dial(t, addr, c.Config()); err != nil {
		t.Errorf("after the change: %v", err)
	}
	c.ServerName = "elsewhere.example"
	if _, err := dial(t, addr, c.Config()); !errors.As(err, &untrusted) {
		t.Errorf("a server of another name: %v", err)
	}
}
