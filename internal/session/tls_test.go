package session_test

import (
	"crypto/tls"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/edge/edgetest"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/session/sessiontest"
)

// Sessions over TLS, and every way in which they do not come about: at once, with a cause that names both ends and says why, on both sides.
func TestSessionsOverTLS(t *testing.T) {
	a, other := edgetest.NewAuthority(t), edgetest.NewAuthority(t)
	a.Leaf("prefill", "", time.Hour)
	a.Leaf("named", "prefill.example", time.Hour)
	a.Leaf("decode", "decode.example", time.Hour)
	other.Leaf("decode", "decode.example", time.Hour)
	mutual := a.Own("prefill").ServerTLS(a.Trust())
	client := func(c edge.ClientTLS) func() *tls.Config { return c.Config }
	good := client(edge.ClientTLS{CA: a.Trust(), Own: a.Own("decode")})
	for name, c := range map[string]struct {
		server *tls.Config
		client func() *tls.Config
		want   string // in the cause; "": there is a session
		seen   bool   // by the server
	}{
		"mutual":               {mutual, good, "", false},
		"server only":          {a.Own("prefill").ServerTLS(nil), client(edge.ClientTLS{CA: a.Trust()}), "", false},
		"other name, expected": {a.Own("named").ServerTLS(a.Trust()), client(edge.ClientTLS{CA: a.Trust(), Own: a.Own("decode"), ServerName: "prefill.example"}), "", false},
		"other name":           {a.Own("named").ServerTLS(a.Trust()), good, "127.0.0.1", true},
		"no certificate":       {mutual, client(edge.ClientTLS{CA: a.Trust()}), "certificate required", true},
		"client of another CA": {mutual, client(edge.ClientTLS{CA: a.Trust(), Own: other.Own("decode")}), "remote error: tls: ", true},
		"server of another CA": {mutual, client(edge.ClientTLS{CA: other.Trust(), Own: a.Own("decode")}), "certificate signed by unknown authority", true},
		"TLS to a plain port":  {nil, good, "does not look like a TLS handshake", false},
		"plain to a TLS port":  {mutual, nil, "does not speak TLS", true},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := testContext(t)
			l := listen(t, "127.0.0.1:0")
			theirs, ours := prometheus.NewRegistry(), prometheus.NewRegistry()
			startServer(t, l, session.ServerConfig{TLS: c.server, Registerer: theirs})
			// The patience of an attempt is far above what it takes: who is not trusted is told at once.
			cl := startClient(t, session.ClientConfig{TLS: c.client, Registerer: ours, Tuning: session.Tuning{DialTimeout: patience}})
			untrusted := func(r *prometheus.Registry) float64 { return outcome(t, r, "untrusted") }
			if c.want == "" {
				s := get(t, ctx, cl, l.addr())
				if err := s.SendAbort(room.Key{Room: 1}, 0, nil); err != nil {
					t.Error(err)
				}
				if untrusted(ours)+untrusted(theirs) != 0 {
					t.Error("somebody is counted as not trusted")
				}
				return
			}
			cause := getCause(t, ctx, cl, l.addr(), room.CodeMismatch)
			if !session.Untrusted(cause) || !strings.Contains(cause.Detail, c.want) || !strings.Contains(cause.Detail, l.addr()) || cause.Side != room.SideReceiver || cause.Peer != l.addr() {
				t.Errorf("%+v; want %q", cause, c.want)
			}
			if n := untrusted(ours); n != 1 {
				t.Errorf("the decode side counts %v", n)
			}
			tick := time.NewTicker(5 * time.Millisecond)
			defer tick.Stop()
			for c.seen && untrusted(theirs) == 0 { // it counts when the client knows already
				select {
				case <-tick.C:
				case <-ctx.Done():
					t.Fatal("the prefill side counts nothing")
				}
			}
			if n := untrusted(theirs); n > 0 && !c.seen {
				t.Errorf("the prefill side counts %v", n)
			}
		})
	}
}

// outcome is baton_sessions_total of one outcome.
func outcome(t *testing.T, r *prometheus.Registry, which string) float64 {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "baton_sessions_total" && m.GetLabel()[0].GetValue() == which {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

// Certificates change under a session that is up; the next one is made with the new ones.
func TestSessionOutlivesCertificates(t *testing.T) {
	ctx := testContext(t)
	first, second := edgetest.NewAuthority(t), edgetest.NewAuthority(t)
	for _, a := range []*edgetest.Authority{first, second} {
		a.Leaf("prefill", "", time.Hour)
		a.Leaf("decode", "decode.example", time.Hour)
	}
	now := first // what the decode side's files hold
	cl := startClient(t, session.ClientConfig{TLS: func() *tls.Config {
		c := edge.ClientTLS{CA: now.Trust(), Own: now.Own("decode")}
		return c.Config()
	}})
	sh := sessiontest.NewServerHandler()
	l1, l2 := listen(t, "127.0.0.1:0"), listen(t, "127.0.0.1:0")
	startServer(t, l1, session.ServerConfig{TLS: first.Own("prefill").ServerTLS(first.Trust()), Handler: sh})
	startServer(t, l2, session.ServerConfig{TLS: second.Own("prefill").ServerTLS(second.Trust())})
	s := get(t, ctx, cl, l1.addr())
	getCause(t, ctx, cl, l2.addr(), room.CodeMismatch)
	now = second
	get(t, ctx, cl, l2.addr())
	if err := s.SendAbort(room.Key{Room: 1}, 0, nil); err != nil {
		t.Fatal(err)
	}
	sh.Wait(ctx, t, "abort", 1)
}

// A client that connects and says nothing, or leaves, is no news; one that is refused and never reads does not hold the port.
func TestSilentTLSClients(t *testing.T) {
	ctx := testContext(t)
	a := edgetest.NewAuthority(t)
	a.Leaf("prefill", "", time.Hour)
	l := listen(t, "127.0.0.1:0")
	reg := prometheus.NewRegistry()
	_, stop := startServer(t, l, session.ServerConfig{TLS: a.Own("prefill").ServerTLS(nil), Registerer: reg})
	for _, says := range []string{"", "GET / HTTP/1.1\r\n\r\n"} {
		conn, err := net.Dial("tcp", l.addr())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := conn.Write([]byte(says)); err != nil {
			t.Fatal(err)
		}
	}
	c := edge.ClientTLS{CA: a.Trust()}
	get(t, ctx, startClient(t, session.ClientConfig{TLS: c.Config}), l.addr())
	stop() // returns although both are still there
	if n := outcome(t, reg, "up"); n != 1 {
		t.Errorf("%v sessions are counted", n)
	}
}
