package session_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/session/sessiontest"
	"github.com/baton-pd/baton/internal/transfer"
)

func TestMessagesCross(t *testing.T) {
	ctx := testContext(t)
	sh, ch := sessiontest.NewServerHandler(), sessiontest.NewClientHandler()
	offers := []transfer.Descriptor{{Kind: "tcp", Addr: "h:1", Host: "boot", Size: 1 << 40, Meta: map[string]string{"a": "b", "md": "\xff\x00"}}}
	offered := make(chan []transfer.Descriptor, 1)
	peer := sessiontest.NewPeer()
	serverID, clientID := sessiontest.Identity("prefill:8000"), sessiontest.Identity("decode:8001")
	p := sessiontest.NewPair(t,
		session.ServerConfig{Identity: serverID, Handler: sh, Connect: func(_ context.Context, _ transfer.SessionID, o []transfer.Descriptor) (transfer.Peer, error) {
			offered <- o
			return peer, nil
		}},
		session.ClientConfig{Identity: clientID, Handler: ch, Offer: func(transfer.SessionID) ([]transfer.Descriptor, error) { return offers, nil }})
	s := get(t, ctx, p.Client, p.Addr)
	if got := <-offered; !reflect.DeepEqual(got, offers) {
		t.Errorf("offers arrived as %+v, want %+v", got, offers)
	}
	if s.Peer() != serverID || s.ID() == 0 || s.Transport() != "null" || s.Addr() != p.Addr {
		t.Errorf("session %d to %+v by %q at %q", s.ID(), s.Peer(), s.Transport(), s.Addr())
	}

	key := room.Key{Room: 1<<63 - 1, Gen: 7}
	g := session.Grant{Key: key, ID: 42, Pages: []uint32{3, 1, 1<<32 - 1}, PageBytes: 4096, Chunks: []int{8192, 0, 17}, Digest: 1<<64 - 1, Timeout: 90 * time.Second}
	cause := &room.Cause{Code: room.CodeEngine, Side: room.SideReceiver, Phase: "transferring", Key: key, Peer: "prefill:1", Detail: "naïve \"detail\"", Retryable: true}
	if err := errors.Join(s.SendGrant(g), s.SendAbort(key, 42, cause), s.SendAbort(room.Key{Room: 5}, 0, nil)); err != nil {
		t.Fatal(err)
	}
	got := sh.Wait(ctx, t, "grant", 1)
	if !reflect.DeepEqual(got.Grant, g) {
		t.Errorf("grant arrived as %+v, want %+v", got.Grant, g)
	}
	ss := got.Server
	if ss.ID() != s.ID() || ss.Client() != clientID || ss.Data() != peer {
		t.Errorf("server session %d of %+v", ss.ID(), ss.Client())
	}
	if a := sh.Wait(ctx, t, "abort", 1); a.Key != key || a.GrantID != 42 || !reflect.DeepEqual(a.Cause, cause) {
		t.Errorf("abort arrived as %+v", a)
	}
	if a := sh.Wait(ctx, t, "abort", 2); a.Key.Room != 5 || a.GrantID != 0 || a.Cause.Code != room.CodeAborted {
		t.Errorf("abort without cause arrived as %+v", a)
	}

	cause.Side = room.SideSender
	if err := errors.Join(ss.SendFailed(key, 42, cause), ss.SendAck(key, 42)); err != nil {
		t.Fatal(err)
	}
	if a := ch.Wait(ctx, t, "abort_ack", 1); a.Session != s.ID() || a.Key != key || a.GrantID != 42 {
		t.Errorf("ack arrived as %+v", a)
	}
	if f := ch.Events()[0]; f.Kind != "failed" || f.Key != key || f.GrantID != 42 || !reflect.DeepEqual(f.Cause, cause) {
		t.Errorf("first call was %+v, want the failure", f)
	}
}

func TestGetSharesOneAttempt(t *testing.T) {
	ctx := testContext(t)
	var mu sync.Mutex
	offers := 0
	p := sessiontest.NewPair(t, session.ServerConfig{}, session.ClientConfig{Offer: func(transfer.SessionID) ([]transfer.Descriptor, error) {
		mu.Lock()
		defer mu.Unlock()
		offers++
		return nil, nil
	}})
	got := make([]*session.ClientSession, 64)
	var wg sync.WaitGroup
	for i := range got {
		wg.Go(func() { got[i], _ = p.Client.Get(ctx, p.Addr) })
	}
	wg.Wait()
	for i, s := range got {
		if s == nil || s != got[0] {
			t.Fatalf("Get %d gave session %p, Get 0 gave %p", i, s, got[0])
		}
	}
	if offers != 1 {
		t.Errorf("%d attempts for 64 concurrent Gets, want 1", offers)
	}
}

func TestConcurrentSendersKeepTheirOrder(t *testing.T) {
	ctx := testContext(t)
	sh, ch := sessiontest.NewServerHandler(), sessiontest.NewClientHandler()
	p := sessiontest.NewPair(t, session.ServerConfig{Handler: sh}, session.ClientConfig{Handler: ch})
	s := get(t, ctx, p.Client, p.Addr)
	sh.React(func(e sessiontest.Event) { // echo: both directions are busy
		if e.Kind == "abort" {
			if err := e.Server.SendAck(e.Key, e.GrantID); err != nil {
				t.Errorf("echo: %v", err)
			}
		}
	})
	const senders, each = 8, 400
	var wg sync.WaitGroup
	for i := range senders {
		wg.Go(func() {
			for k := range each {
				if err := s.SendAbort(room.Key{Room: uint64(i)}, transfer.GrantID(k+1), nil); err != nil {
					t.Errorf("sender %d: %v", i, err)
					return
				}
			}
		})
	}
	wg.Wait()
	ch.Wait(ctx, t, "abort_ack", senders*each)
	for name, events := range map[string][]sessiontest.Event{"server": sh.Events(), "client": ch.Events()} {
		last := make(map[uint64]transfer.GrantID)
		for _, e := range events {
			if e.GrantID != last[e.Key.Room]+1 {
				t.Fatalf("%s: sender %d's message %d came after %d", name, e.Key.Room, e.GrantID, last[e.Key.Room])
			}
			last[e.Key.Room] = e.GrantID
		}
	}
}

func TestCloseTellsThePeer(t *testing.T) {
	for _, who := range []string{"client", "server"} {
		t.Run(who, func(t *testing.T) {
			ctx := testContext(t)
			sh, ch := sessiontest.NewServerHandler(), sessiontest.NewClientHandler()
			peer := sessiontest.NewPeer()
			p := sessiontest.NewPair(t, session.ServerConfig{Handler: sh, Connect: connectTo(peer)}, session.ClientConfig{Handler: ch})
			s := get(t, ctx, p.Client, p.Addr)
			sh.React(func(e sessiontest.Event) {
				select {
				case <-peer.Closed():
					t.Errorf("the data peer was closed before %s returned", e.Kind)
				default:
				}
			})
			if who == "client" {
				_ = p.Client.Close()
			} else {
				_ = p.Server.Close()
			}
			wait(t, ctx, s.Down(), "the end of the session")
			for side, c := range map[string]*room.Cause{"server": sh.Wait(ctx, t, "down", 1).Cause, "client": ch.Wait(ctx, t, "down", 1).Cause} {
				if c.Code != room.CodeShutdown || !c.Retryable {
					t.Errorf("%s: cause of the end is %v", side, c)
				}
			}
			wait(t, ctx, peer.Closed(), "closing of the data peer")
			err := s.SendAbort(room.Key{Room: 1}, 0, nil)
			if !errors.Is(err, session.ErrDown) {
				t.Errorf("send after the end: %v", err)
			}
			wantCause(t, err, room.CodeShutdown)
			if who == "client" {
				getCause(t, ctx, p.Client, p.Addr, room.CodeShutdown)
			}
			if n := sh.Count("down") + ch.Count("down"); n != 2 {
				t.Errorf("Down was called %d times, want once a side", n)
			}
		})
	}
}

func connectTo(p transfer.Peer) func(context.Context, transfer.SessionID, []transfer.Descriptor) (transfer.Peer, error) {
	return func(context.Context, transfer.SessionID, []transfer.Descriptor) (transfer.Peer, error) { return p, nil }
}

func TestLossOfTheDataPeerEndsTheSession(t *testing.T) {
	ctx := testContext(t)
	sh, ch := sessiontest.NewServerHandler(), sessiontest.NewClientHandler()
	peer := sessiontest.NewPeer()
	p := sessiontest.NewPair(t, session.ServerConfig{Handler: sh, Connect: connectTo(peer)}, session.ClientConfig{Handler: ch})
	get(t, ctx, p.Client, p.Addr)
	peer.Break(errors.New("reset by the switch"))
	for side, c := range map[string]*room.Cause{"server": sh.Wait(ctx, t, "down", 1).Cause, "client": ch.Wait(ctx, t, "down", 1).Cause} {
		if c.Code != room.CodePeerLost || c.Side != room.SideSender || !strings.Contains(c.Detail, "reset by the switch") {
			t.Errorf("%s: cause of the end is %v", side, c)
		}
	}
	wait(t, ctx, peer.Closed(), "closing of the data peer")
}

func TestHandlerPanicEndsOnlyItsSession(t *testing.T) {
	for _, side := range []string{"server", "client"} {
		t.Run(side, func(t *testing.T) {
			ctx := testContext(t)
			sh, ch := sessiontest.NewServerHandler(), sessiontest.NewClientHandler()
			p := sessiontest.NewPair(t, session.ServerConfig{Handler: sh}, session.ClientConfig{Handler: ch})
			s := get(t, ctx, p.Client, p.Addr)
			boom := func(sessiontest.Event) { panic("boom") } // in the message and in Down
			if side == "server" {
				sh.React(boom)
			} else {
				ch.React(boom)
				sh.React(func(e sessiontest.Event) {
					if e.Kind == "abort" {
						_ = e.Server.SendAck(e.Key, e.GrantID)
					}
				})
			}
			if err := s.SendAbort(room.Key{Room: 9}, 1, nil); err != nil {
				t.Fatal(err)
			}
			for name, c := range map[string]*room.Cause{"server": sh.Wait(ctx, t, "down", 1).Cause, "client": ch.Wait(ctx, t, "down", 1).Cause} {
				if c.Code != room.CodeInternal || !strings.Contains(c.Detail, "boom") {
					t.Errorf("%s: cause of the end is %v", name, c)
				}
			}
			sh.React(nil)
			ch.React(nil)
			if again := get(t, ctx, p.Client, p.Addr); again == s {
				t.Error("Get gave the dead session")
			}
		})
	}
}

func TestMismatchNamesTheField(t *testing.T) {
	for _, tc := range []struct {
		field       string
		change      func(*session.Identity)
		ours, their string // decode's and prefill's value
	}{
		{"engine", func(i *session.Identity) { i.Engine = "sim 2" }, "sim 2", "sim 1"},
		{"model_digest", func(i *session.Identity) { i.ModelDigest = "d1" }, "d1", "d0"},
		{"kv_layout", func(i *session.Identity) { i.KVLayout = "layers=3" }, "layers=3", "layers=2"},
		{"attention", func(i *session.Identity) { i.Attention = "flash=0" }, "flash=0", "flash=1"},
		{"chunk_tokens", func(i *session.Identity) { i.ChunkTokens = 32 }, "32", "16"},
	} {
		t.Run(tc.field, func(t *testing.T) {
			ctx := testContext(t)
			id := sessiontest.Identity("decode:1")
			tc.change(&id)
			ch := sessiontest.NewClientHandler()
			p := sessiontest.NewPair(t, session.ServerConfig{Connect: func(context.Context, transfer.SessionID, []transfer.Descriptor) (transfer.Peer, error) {
				t.Error("the data plane of a mismatch was dialled")
				return nil, errors.New("no")
			}}, session.ClientConfig{Identity: id, Handler: ch})
			c := getCause(t, ctx, p.Client, p.Addr, room.CodeMismatch)
			for _, want := range []string{tc.field, fmt.Sprintf("decode worker has %q", tc.ours), fmt.Sprintf("prefill worker has %q", tc.their), p.Addr} {
				if !strings.Contains(c.Detail, want) {
					t.Errorf("detail %q does not tell %q", c.Detail, want)
				}
			}
			if d := ch.Wait(ctx, t, "down", 1); d.Addr != p.Addr || d.Cause.Code != room.CodeMismatch {
				t.Errorf("the offer was taken back with %+v", d)
			}
		})
	}
}

func TestDataPlaneRefusal(t *testing.T) {
	for _, tc := range []struct {
		name    string
		connect func(context.Context) (transfer.Peer, error)
		code    room.Code
		detail  string
	}{
		{"error", func(context.Context) (transfer.Peer, error) { return nil, errors.New("no route to shm") }, room.CodeUnavailable, "no route to shm"},
		{"own cause", func(context.Context) (transfer.Peer, error) {
			return nil, &room.Cause{Code: room.CodeCapacity, Detail: "out of mappings"}
		}, room.CodeCapacity, "out of mappings"},
		{"panic", func(context.Context) (transfer.Peer, error) { panic("dial bug") }, room.CodeUnavailable, "dial bug"},
		{"nothing", func(context.Context) (transfer.Peer, error) { return nil, nil }, room.CodeUnavailable, "no transport"},
		{"slow", func(ctx context.Context) (transfer.Peer, error) { <-ctx.Done(); return nil, ctx.Err() }, room.CodeUnavailable, "deadline exceeded"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx := testContext(t)
			// The server's patience is the shorter, so that its refusal is there first on a busy machine too.
			server, tune := session.Tuning{DialTimeout: 300 * time.Millisecond}, session.Tuning{DialTimeout: time.Second}
			p := sessiontest.NewPair(t, session.ServerConfig{Tuning: server, Connect: func(ctx context.Context, _ transfer.SessionID, _ []transfer.Descriptor) (transfer.Peer, error) {
				return tc.connect(ctx)
			}}, session.ClientConfig{Tuning: tune})
			c := getCause(t, ctx, p.Client, p.Addr, tc.code)
			if !strings.Contains(c.Detail, tc.detail) || !strings.Contains(c.Detail, p.Addr) {
				t.Errorf("detail %q lacks %q or the address", c.Detail, tc.detail)
			}
		})
	}
}

func TestOfferFailure(t *testing.T) {
	for _, tc := range []struct {
		name  string
		offer func() ([]transfer.Descriptor, error)
		code  room.Code
	}{
		{"error", func() ([]transfer.Descriptor, error) { return nil, errors.New("no memory here") }, room.CodeInternal},
		{"cause", func() ([]transfer.Descriptor, error) {
			return nil, &room.Cause{Code: room.CodeShutdown, Detail: "no memory here"}
		}, room.CodeShutdown},
		{"panic", func() ([]transfer.Descriptor, error) { panic("no memory here") }, room.CodeInternal},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ch := sessiontest.NewClientHandler()
			p := sessiontest.NewPair(t, session.ServerConfig{}, session.ClientConfig{Handler: ch, Offer: func(transfer.SessionID) ([]transfer.Descriptor, error) { return tc.offer() }})
			c := getCause(t, testContext(t), p.Client, p.Addr, tc.code)
			if !strings.Contains(c.Detail, "no memory here") {
				t.Errorf("detail %q", c.Detail)
			}
			if n := ch.Count("down"); n != 0 {
				t.Errorf("Down was called %d times for a session that was never offered", n)
			}
		})
	}
}

func TestUnsendableValues(t *testing.T) {
	ctx := testContext(t)
	sh := sessiontest.NewServerHandler()
	p := sessiontest.NewPair(t, session.ServerConfig{Handler: sh}, session.ClientConfig{})
	s := get(t, ctx, p.Client, p.Addr)
	good := session.Grant{Key: room.Key{Room: 1}, ID: 1, Pages: []uint32{1}, PageBytes: 1, Chunks: []int{1}, Timeout: time.Second}
	for name, change := range map[string]func(*session.Grant){
		"room":      func(g *session.Grant) { g.Key.Room = 1 << 63 },
		"id":        func(g *session.Grant) { g.ID = 0 },
		"pages":     func(g *session.Grant) { g.Pages = make([]uint32, 1<<19+1) },
		"chunks":    func(g *session.Grant) { g.Chunks = nil },
		"chunk":     func(g *session.Grant) { g.Chunks = []int{-1} },
		"page size": func(g *session.Grant) { g.PageBytes = 0 },
	} {
		g := good
		change(&g)
		if err := s.SendGrant(g); !errors.Is(err, &room.Cause{Code: room.CodeInvalid}) {
			t.Errorf("%s: SendGrant gave %v", name, err)
		}
	}
	if err := s.SendAbort(room.Key{Room: 1 << 63}, 0, nil); !errors.Is(err, &room.Cause{Code: room.CodeInvalid}) {
		t.Errorf("SendAbort gave %v", err)
	}
	good.Timeout = -time.Second // the deadline has just passed
	if err := s.SendGrant(good); err != nil {
		t.Fatal(err)
	}
	if g := sh.Wait(ctx, t, "grant", 1); g.Grant.Timeout <= 0 {
		t.Errorf("a passed deadline arrived as %v, which means none", g.Grant.Timeout)
	}
	ss := sh.Events()[0].Server
	for _, err := range []error{ss.SendFailed(room.Key{Room: 1 << 63}, 0, nil), ss.SendAck(room.Key{Room: 1 << 63}, 1)} {
		if !errors.Is(err, &room.Cause{Code: room.CodeInvalid}) {
			t.Errorf("server side gave %v", err)
		}
	}
}

func TestMetrics(t *testing.T) {
	ctx := testContext(t)
	sr, cr := prometheus.NewRegistry(), prometheus.NewRegistry()
	sh, ch := sessiontest.NewServerHandler(), sessiontest.NewClientHandler()
	p := sessiontest.NewPair(t, session.ServerConfig{Registerer: sr, Handler: sh}, session.ClientConfig{Registerer: cr, Handler: ch})
	s := get(t, ctx, p.Client, p.Addr)
	if err := s.SendAbort(room.Key{Room: 1}, 1, nil); err != nil {
		t.Fatal(err)
	}
	ss := sh.Wait(ctx, t, "abort", 1).Server
	if err := ss.SendAck(room.Key{Room: 1}, 1); err != nil {
		t.Fatal(err)
	}
	ch.Wait(ctx, t, "abort_ack", 1)
	compare(t, cr, "baton_session_up", `baton_session_up{addr="prefill:1"} 1`)
	compare(t, sr, "baton_session_up", `baton_session_up{addr="decode:8001"} 1`)
	_ = p.Client.Close()
	_ = p.Server.Close()
	compare(t, cr, "baton_session_up", `baton_session_up{addr="prefill:1"} 0`)
	compare(t, sr, "baton_session_up", ``) // decode workers come and go
	for _, r := range []*prometheus.Registry{sr, cr} {
		compare(t, r, "baton_sessions_total", `baton_sessions_total{outcome="up"} 1`)
		compare(t, r, "baton_session_ends_total", `baton_session_ends_total{code="shutdown"} 1`)
	}
}

// compare checks the samples of one metric, without their help lines.
func compare(t *testing.T, g prometheus.Gatherer, name, want string) {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			got = append(got, fmt.Sprintf("%s{%s} %v", name, strings.Join(labels, ","), m.GetGauge().GetValue()+m.GetCounter().GetValue()))
		}
	}
	if s := strings.Join(got, "\n"); s != want {
		t.Errorf("metric %s is\n%s\nwant\n%s", name, s, want)
	}
}
