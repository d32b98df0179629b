package session_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/session/sessiontest"
	"github.com/baton-pd/baton/internal/transfer"
	pb "github.com/baton-pd/baton/proto/baton/v1"
)

// TestRestart: K10. A restarted worker, at the same address or another, is a new
// generation, reached without help.
func TestRestart(t *testing.T) {
	ctx := testContext(t)
	ch := sessiontest.NewClientHandler()
	client := startClient(t, session.ClientConfig{Handler: ch})
	l := listen(t, "127.0.0.1:0")
	_, stop := startServer(t, l, session.ServerConfig{})
	first := get(t, ctx, client, l.addr())
	if again := get(t, ctx, client, l.addr()); again != first {
		t.Error("a second Get made another session")
	}
	l.kill()
	wait(t, ctx, first.Down(), "the end of the first session")
	stop()

	// Nobody listens: Gets wait, and get the new worker as soon as it is there.
	waiting := make(chan *session.ClientSession, 1)
	go func() {
		s, err := client.Get(ctx, l.addr())
		if err != nil {
			t.Errorf("Get during the restart: %v", err)
		}
		waiting <- s
	}()
	same := listen(t, l.addr())
	startServer(t, same, session.ServerConfig{})
	second := <-waiting
	if second == nil {
		t.FailNow()
	}
	if second.ID() == first.ID() || second.Peer().Epoch == first.Peer().Epoch {
		t.Errorf("the second session is %d of epoch %d, as the first", second.ID(), second.Peer().Epoch)
	}

	other := listen(t, "127.0.0.1:0")
	startServer(t, other, session.ServerConfig{})
	third := get(t, ctx, client, other.addr())
	if third.Peer().Epoch == second.Peer().Epoch || third.Addr() != other.addr() {
		t.Errorf("the third session is of %+v at %s", third.Peer(), third.Addr())
	}
	ch.Wait(ctx, t, "down", 1)
	downs := make(map[transfer.SessionID]int) // failed attempts have theirs too
	for _, e := range ch.Events() {
		downs[e.Session]++
	}
	if downs[first.ID()] != 1 || downs[second.ID()] != 0 || downs[third.ID()] != 0 {
		t.Errorf("Down calls: %+v", ch.Events())
	}
}

// TestKilledMidGrant: connections reset while grants are on their way. Down comes
// once, with a cause, after every other call, and nothing is accepted silently.
func TestKilledMidGrant(t *testing.T) {
	ctx := testContext(t)
	sh, ch := sessiontest.NewServerHandler(), sessiontest.NewClientHandler()
	l := listen(t, "127.0.0.1:0")
	startServer(t, l, session.ServerConfig{Handler: sh})
	client := startClient(t, session.ClientConfig{Handler: ch})
	s := get(t, ctx, client, l.addr())
	sh.React(func(e sessiontest.Event) {
		if e.Kind == "grant" {
			_ = e.Server.SendFailed(e.Key, 0, nil)
			if e.Key.Room == 100 {
				go l.kill()
			}
		}
	})
	for i := uint64(1); ; i++ {
		err := s.SendGrant(session.Grant{Key: room.Key{Room: i}, ID: transfer.GrantID(i), Pages: make([]uint32, 64), PageBytes: 64, Chunks: []int{64 * 64}})
		if err == nil {
			continue
		}
		if !errors.Is(err, session.ErrDown) {
			t.Fatalf("grant %d: %v", i, err)
		}
		break
	}
	for side, e := range map[string]sessiontest.Event{"client": ch.Wait(ctx, t, "down", 1), "server": sh.Wait(ctx, t, "down", 1)} {
		if e.Cause.Code != room.CodePeerLost && e.Cause.Code != room.CodeCapacity {
			t.Errorf("%s: cause %v", side, e.Cause)
		}
	}
	getCause(t, ctx, startClient(t, session.ClientConfig{Tuning: session.Tuning{DialTimeout: 100 * time.Millisecond}}), l.addr(), room.CodeUnavailable)
	for side, events := range map[string][]sessiontest.Event{"client": ch.Events(), "server": sh.Events()} {
		if n := len(events); events[n-1].Kind != "down" {
			t.Errorf("%s: last call is %s", side, events[n-1].Kind)
		}
		downs := 0
		for _, e := range events {
			if e.Kind == "down" {
				downs++
			}
		}
		if downs != 1 {
			t.Errorf("%s: Down called %d times", side, downs)
		}
	}
}

// TestClientNoticesBadServers: servers written by hand that keep the connection up but
// not the protocol.
func TestClientNoticesBadServers(t *testing.T) {
	type stream = pb.Session_ConnectServer
	drain := func(s stream) error {
		for {
			if _, err := s.Recv(); err != nil {
				return err
			}
		}
	}
	say := func(s stream, m *pb.ServerMessage) error {
		if err := s.Send(m); err != nil {
			return err
		}
		return drain(s)
	}
	failed := &pb.ServerMessage_Failed{Failed: &pb.Failed{Room: 1}}
	quiet := session.Tuning{KeepaliveTime: time.Hour}
	for _, tc := range []struct {
		name string
		tune session.Tuning
		then func(stream) error
		code room.Code
		want string
	}{
		{"never acks", session.Tuning{AckTimeout: 100 * time.Millisecond, KeepaliveTime: time.Hour}, drain, room.CodePeerLost, "not handled a message (abort)"},
		{"never reads", session.Tuning{AckTimeout: 100 * time.Millisecond, KeepaliveTime: time.Hour},
			func(s stream) error { <-s.Context().Done(); return nil }, room.CodePeerLost, "not handled a message (abort)"},
		{"never answers pings", session.Tuning{KeepaliveTime: 50 * time.Millisecond, KeepaliveTimeout: 100 * time.Millisecond}, drain, room.CodePeerLost, "not answered a ping"},
		{"gap", quiet, func(s stream) error { return say(s, &pb.ServerMessage{Seq: 3, Body: failed}) }, room.CodeProtocol, "3 came where 2"},
		{"repeat", quiet, func(s stream) error { return say(s, &pb.ServerMessage{Seq: 1, Body: failed}) }, room.CodeProtocol, "1 came where 2"},
		{"no body", quiet, func(s stream) error { return say(s, &pb.ServerMessage{Seq: 2}) }, room.CodeProtocol, "no body"},
		{"second reply", quiet, func(s stream) error {
			return say(s, &pb.ServerMessage{Seq: 2, Body: &pb.ServerMessage_HelloReply{HelloReply: &pb.HelloReply{}}})
		}, room.CodeProtocol, "no place"},
		{"refusal too late", quiet, func(s stream) error {
			return say(s, &pb.ServerMessage{Seq: 2, Body: &pb.ServerMessage_Refused{Refused: &pb.Refused{}}})
		}, room.CodeProtocol, "no place"},
		{"failure of no room", quiet, func(s stream) error {
			return say(s, &pb.ServerMessage{Seq: 2, Body: &pb.ServerMessage_Failed{Failed: &pb.Failed{Room: 1 << 63}}})
		}, room.CodeProtocol, "2^63"},
		{"ack of no room", quiet, func(s stream) error {
			return say(s, &pb.ServerMessage{Seq: 2, Body: &pb.ServerMessage_AbortAck{AbortAck: &pb.AbortAck{Room: 1 << 63}}})
		}, room.CodeProtocol, "2^63"},
		{"false ack", quiet, func(s stream) error {
			return say(s, &pb.ServerMessage{Seq: 2, Body: &pb.ServerMessage_Ack{Ack: &pb.Ack{Seq: 1000}}})
		}, room.CodeProtocol, "ack of 1000"},
		{"ends without reason", quiet, func(stream) error { return nil }, room.CodePeerLost, "without a reason"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx := testContext(t)
			addr := serveRaw(t, func(s stream) error {
				if err := rawReply(s); err != nil {
					return err
				}
				return tc.then(s)
			})
			ch := sessiontest.NewClientHandler()
			client := startClient(t, session.ClientConfig{Handler: ch, Tuning: tc.tune})
			s := get(t, ctx, client, addr)
			if !strings.Contains(tc.name, "pings") {
				_ = s.SendAbort(room.Key{Room: 1}, 1, nil) // the session may have ended already
			}
			d := ch.Wait(ctx, t, "down", 1)
			if d.Cause.Code != tc.code || !strings.Contains(d.Cause.Detail, tc.want) || d.Cause.Peer != addr {
				t.Errorf("cause %v, want %s with %q", d.Cause, tc.code, tc.want)
			}
			if len(ch.Events()) != 1 {
				t.Errorf("calls: %+v", ch.Events())
			}
		})
	}
}

// TestIdleSessionStaysUp: pings that are answered keep it alive, and the next one comes
// KeepaliveTime later whatever KeepaliveTimeout is.
func TestIdleSessionStaysUp(t *testing.T) {
	ctx := testContext(t)
	pinged := make(chan struct{})
	addr := serveRaw(t, func(s pb.Session_ConnectServer) error {
		if err := rawReply(s); err != nil {
			return err
		}
		for seq := uint64(2); ; seq++ {
			m, err := s.Recv()
			if err != nil {
				return err
			}
			if m.GetPing() == nil {
				return errors.New("something other than a ping")
			}
			if err := s.Send(&pb.ServerMessage{Seq: seq, Body: &pb.ServerMessage_Ack{Ack: &pb.Ack{Seq: m.GetSeq()}}}); err != nil {
				return err
			}
			if seq == 6 {
				close(pinged)
			}
		}
	})
	client := startClient(t, session.ClientConfig{Tuning: session.Tuning{KeepaliveTime: 20 * time.Millisecond, KeepaliveTimeout: time.Hour}})
	s := get(t, ctx, client, addr)
	wait(t, ctx, pinged, "the fifth ping")
	if c := s.Cause(); c != nil {
		t.Errorf("the session ended: %v", c)
	}
}

// TestOverflow: a peer that takes nothing fills the send queue. Sending never blocks; the
// session ends with a cause.
func TestOverflow(t *testing.T) {
	ctx := testContext(t)
	addr := serveRaw(t, func(s pb.Session_ConnectServer) error {
		if err := rawReply(s); err != nil {
			return err
		}
		<-s.Context().Done()
		return nil
	})
	ch := sessiontest.NewClientHandler()
	client := startClient(t, session.ClientConfig{Handler: ch, Tuning: session.Tuning{AckTimeout: time.Hour, KeepaliveTime: time.Hour}})
	s := get(t, ctx, client, addr)
	detail := &room.Cause{Detail: strings.Repeat("x", 4000)}
	var err error
	for err == nil && ctx.Err() == nil {
		err = s.SendAbort(room.Key{Room: 1}, 1, detail)
	}
	if !errors.Is(err, session.ErrDown) {
		t.Fatalf("overflow gave %v", err)
	}
	wantCause(t, err, room.CodeCapacity)
	if d := ch.Wait(ctx, t, "down", 1); d.Cause.Code != room.CodeCapacity || !strings.Contains(d.Cause.Detail, "overflow") {
		t.Errorf("cause %v", d.Cause)
	}
}

// TestStuckHandlerIsNoticed: a peer whose handler loop hangs keeps its connection up and
// its pings going, but does not ack.
func TestStuckHandlerIsNoticed(t *testing.T) {
	ctx := testContext(t)
	sh := sessiontest.NewServerHandler()
	release := make(chan struct{})
	sh.React(func(e sessiontest.Event) {
		if e.Kind == "abort" {
			<-release
		}
	})
	p := sessiontest.NewPair(t, session.ServerConfig{Handler: sh, Tuning: session.Tuning{KeepaliveTime: 20 * time.Millisecond, KeepaliveTimeout: time.Hour}},
		session.ClientConfig{Tuning: session.Tuning{KeepaliveTime: 20 * time.Millisecond, KeepaliveTimeout: time.Hour, AckTimeout: 200 * time.Millisecond}})
	s := get(t, ctx, p.Client, p.Addr)
	if err := s.SendAbort(room.Key{Room: 1}, 1, nil); err != nil {
		t.Fatal(err)
	}
	wait(t, ctx, s.Down(), "the end of the session")
	if c := s.Cause(); c.Code != room.CodePeerLost || !strings.Contains(c.Detail, "not handled a message (abort)") {
		t.Errorf("cause %v", c)
	}
	close(release)
	sh.Wait(ctx, t, "down", 1)
}

// TestOneErrorDoesNotBlacklist: K10. The first connections break; Get itself goes on, and
// a later Get is not put off.
func TestOneErrorDoesNotBlacklist(t *testing.T) {
	ctx := testContext(t)
	l := listen(t, "127.0.0.1:0")
	startServer(t, l, session.ServerConfig{})
	dials := make(chan int, 1)
	dials <- 0
	client := startClient(t, session.ClientConfig{Tuning: session.Tuning{BackoffMin: 10 * time.Millisecond},
		DialOptions: []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			n := <-dials
			dials <- n + 1
			if n < 3 {
				return nil, errors.New("transient trouble")
			}
			return (&net.Dialer{}).DialContext(ctx, "tcp", addr)
		})}})
	get(t, ctx, client, l.addr())
}

// TestFreshGetIsNotPutOff: after many failures the pause has grown to BackoffMax; a new Get
// waits for BackoffMin at most.
func TestFreshGetIsNotPutOff(t *testing.T) {
	ctx := testContext(t)
	ch := sessiontest.NewClientHandler()
	client := startClient(t, session.ClientConfig{Handler: ch, Tuning: session.Tuning{BackoffMin: time.Millisecond, BackoffMax: time.Hour, DialTimeout: time.Second}})
	l := listen(t, "127.0.0.1:0")
	l.kill()
	c := getCause(t, ctx, client, l.addr(), room.CodeUnavailable) // up to a pause that exceeds its patience
	for _, want := range []string{l.addr(), "connection refused"} {
		if !strings.Contains(c.Detail, want) {
			t.Errorf("detail %q lacks %q", c.Detail, want)
		}
	}
	if !c.Retryable || c.Peer != l.addr() {
		t.Errorf("cause %+v", c)
	}
	if n := ch.Count("down"); n < 3 {
		t.Errorf("%d attempts were made, want several", n)
	}
	same := listen(t, l.addr())
	startServer(t, same, session.ServerConfig{})
	get(t, ctx, client, l.addr())
}

func TestGetStopsWithItsContext(t *testing.T) {
	ctx := testContext(t)
	hello := make(chan struct{}, 1)
	addr := serveRaw(t, func(s pb.Session_ConnectServer) error { // never answers
		hello <- struct{}{}
		<-s.Context().Done()
		return nil
	})
	ch := sessiontest.NewClientHandler()
	client := startClient(t, session.ClientConfig{Handler: ch, Tuning: session.Tuning{DialTimeout: time.Hour}})
	short, cancel := context.WithCancelCause(ctx)
	go func() {
		<-hello
		cancel(errors.New("the request is gone"))
	}()
	c := getCause(t, short, client, addr, room.CodeUnavailable)
	if !strings.Contains(c.Detail, "the request is gone") || !strings.Contains(c.Detail, addr) {
		t.Errorf("detail %q", c.Detail)
	}
	if n := ch.Count("down"); n != 0 {
		t.Errorf("the shared attempt ended with one of its Gets")
	}
	_ = client.Close()
	if d := ch.Wait(ctx, t, "down", 1); d.Cause.Code != room.CodeShutdown {
		t.Errorf("Close ended the attempt with %v", d.Cause)
	}
}

func TestServerThatNeverAnswersTheHello(t *testing.T) {
	addr := serveRaw(t, func(s pb.Session_ConnectServer) error { <-s.Context().Done(); return nil })
	client := startClient(t, session.ClientConfig{Tuning: session.Tuning{DialTimeout: 100 * time.Millisecond}})
	c := getCause(t, testContext(t), client, addr, room.CodeUnavailable)
	if !strings.Contains(c.Detail, "no answer to the hello within 100ms") {
		t.Errorf("detail %q", c.Detail)
	}
}

func TestBadAnswersToTheHello(t *testing.T) {
	id := func(change func(*pb.Identity)) *pb.ServerMessage {
		i := rawHello().GetIdentity()
		change(i)
		return &pb.ServerMessage{Seq: 1, Body: &pb.ServerMessage_HelloReply{HelloReply: &pb.HelloReply{ProtocolVersion: session.ProtocolVersion, Identity: i}}}
	}
	for _, tc := range []struct {
		name string
		m    *pb.ServerMessage
		code room.Code
		want string
	}{
		{"number", &pb.ServerMessage{Seq: 2}, room.CodeProtocol, "number 2"},
		{"no body", &pb.ServerMessage{Seq: 1}, room.CodeProtocol, "unknown"},
		{"other body", &pb.ServerMessage{Seq: 1, Body: &pb.ServerMessage_Ping{Ping: &pb.Ping{}}}, room.CodeProtocol, "ping"},
		{"no epoch", id(func(i *pb.Identity) { i.Epoch = 0 }), room.CodeProtocol, "epoch"},
		{"lax server", id(func(i *pb.Identity) { i.Fingerprint.KvLayout = "other" }), room.CodeMismatch, `kv_layout differs: the prefill worker has "other", the decode worker has "layers=2"`},
		{"refused without cause", &pb.ServerMessage{Seq: 1, Body: &pb.ServerMessage_Refused{Refused: &pb.Refused{}}}, room.CodeProtocol, "without a cause"},
		{"version", &pb.ServerMessage{Seq: 1, Body: &pb.ServerMessage_Refused{Refused: &pb.Refused{Field: "protocol_version", ServerValue: "2", ClientValue: "1"}}},
			room.CodeMismatch, `protocol_version differs: the prefill worker has "2", the decode worker has "1"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			addr := serveRaw(t, func(s pb.Session_ConnectServer) error {
				if _, err := s.Recv(); err != nil {
					return err
				}
				return s.Send(tc.m)
			})
			ch := sessiontest.NewClientHandler()
			c := getCause(t, testContext(t), startClient(t, session.ClientConfig{Handler: ch}), addr, tc.code)
			if !strings.Contains(c.Detail, tc.want) {
				t.Errorf("detail %q lacks %q", c.Detail, tc.want)
			}
			if n := ch.Count("down"); n != 1 {
				t.Errorf("the offer was taken back %d times", n)
			}
		})
	}
}

func TestBadAddresses(t *testing.T) {
	client := startClient(t, session.ClientConfig{Tuning: session.Tuning{DialTimeout: 50 * time.Millisecond}})
	for _, addr := range []string{"", "a\x00b", "\xff\xfe:1", "a b:1", strings.Repeat("x", 300)} {
		if c := getCause(t, testContext(t), client, addr, room.CodeInvalid); c.Retryable {
			t.Errorf("%q: %+v", addr, c)
		}
	}
	for _, addr := range []string{"noport", "127.0.0.1:99999", "%zz:1"} {
		getCause(t, testContext(t), client, addr, room.CodeUnavailable)
	}
}
