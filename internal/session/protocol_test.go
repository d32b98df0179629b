package session_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/status"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/session/sessiontest"
	"github.com/baton-pd/baton/internal/transfer"
	pb "github.com/baton-pd/baton/proto/baton/v1"
)

// statusCause is the cause a server has put in the end of a stream.
func statusCause(t *testing.T, err error) *pb.Cause {
	t.Helper()
	s, ok := status.FromError(err)
	if !ok {
		t.Fatalf("the stream ended with %v, which is no status", err)
	}
	for _, d := range s.Details() {
		if c, ok := d.(*pb.Cause); ok {
			return c
		}
	}
	t.Fatalf("the stream ended with %v, without a cause", err)
	return nil
}

func abortOf(id uint64) *pb.ClientMessage_Abort {
	return &pb.ClientMessage_Abort{Abort: &pb.Abort{Room: id, GrantId: 1}}
}

// TestServerEndsBrokenSessions: what breaks the protocol ends that session with
// CodeProtocol, once, and nothing else.
func TestServerEndsBrokenSessions(t *testing.T) {
	for _, tc := range []struct {
		name string
		seq  uint64
		m    *pb.ClientMessage
		want string
	}{
		{"gap", 3, &pb.ClientMessage{Body: abortOf(1)}, "number 3 came where 2 was due"},
		{"repeat", 1, &pb.ClientMessage{Body: abortOf(1)}, "number 1 came where 2 was due"},
		{"zero", 0, &pb.ClientMessage{Body: abortOf(1)}, "number 0 came where 2 was due"},
		{"no body", 2, &pb.ClientMessage{}, "no body"},
		{"second hello", 2, &pb.ClientMessage{Body: &pb.ClientMessage_Hello{Hello: rawHello()}}, "hello has no place"},
		{"abort of no room", 2, &pb.ClientMessage{Body: abortOf(1 << 63)}, "not below 2^63"},
		{"grant of no room", 2, &pb.ClientMessage{Body: &pb.ClientMessage_Grant{Grant: &pb.Grant{Room: 1<<64 - 1}}}, "not below 2^63"},
		{"ack of the future", 2, &pb.ClientMessage{Body: &pb.ClientMessage_Ack{Ack: &pb.Ack{Seq: 99}}}, "ack of 99"},
		{"ack going back", 2, &pb.ClientMessage{Body: &pb.ClientMessage_Ack{}}, "ack of 0"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx := testContext(t)
			sh := sessiontest.NewServerHandler()
			peer := sessiontest.NewPeer()
			l := listen(t, "127.0.0.1:0")
			startServer(t, l, session.ServerConfig{Handler: sh, Connect: connectTo(peer)})
			c := dialRaw(t, ctx, l.addr())
			c.hello()
			tc.m.Seq = tc.seq
			if err := c.Send(tc.m); err != nil {
				t.Fatal(err)
			}
			if cause := statusCause(t, c.end()); cause.GetCode() != string(room.CodeProtocol) || !strings.Contains(cause.GetDetail(), tc.want) {
				t.Errorf("client was told %v, want %q", cause, tc.want)
			}
			if d := sh.Wait(ctx, t, "down", 1); d.Cause.Code != room.CodeProtocol || !strings.Contains(d.Cause.Detail, tc.want) {
				t.Errorf("handler was told %v", d.Cause)
			}
			wait(t, ctx, peer.Closed(), "closing of the data peer")
			if n := len(sh.Events()); n != 1 {
				t.Errorf("%d calls, want only Down: %+v", n, sh.Events())
			}
		})
	}
}

func TestServerRefusesBadHello(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*pb.ClientMessage)
		code   room.Code
		field  string
		detail string
	}{
		{"no hello", func(m *pb.ClientMessage) { m.Body = abortOf(1) }, room.CodeProtocol, "", "must be hello"},
		{"number", func(m *pb.ClientMessage) { m.Seq = 2 }, room.CodeProtocol, "", "number 2"},
		{"version", func(m *pb.ClientMessage) { m.GetHello().ProtocolVersion = 99 }, room.CodeMismatch, "protocol_version", `decode worker has "99"`},
		{"engine", func(m *pb.ClientMessage) { m.GetHello().Identity.Fingerprint.Engine = "x" }, room.CodeMismatch, "engine", `prefill worker has "sim 1"`},
		{"no identity", func(m *pb.ClientMessage) { m.GetHello().Identity = nil }, room.CodeProtocol, "", "worker_id"},
		{"no fingerprint", func(m *pb.ClientMessage) { m.GetHello().Identity.Fingerprint = nil }, room.CodeProtocol, "", "fingerprint"},
		{"worker id", func(m *pb.ClientMessage) { m.GetHello().Identity.WorkerId = "a\nb" }, room.CodeProtocol, "", "worker_id"},
		{"long worker id", func(m *pb.ClientMessage) { m.GetHello().Identity.WorkerId = strings.Repeat("x", 300) }, room.CodeProtocol, "", "worker_id"},
		{"epoch", func(m *pb.ClientMessage) { m.GetHello().Identity.Epoch = 0 }, room.CodeProtocol, "", "epoch"},
		{"session", func(m *pb.ClientMessage) { m.GetHello().SessionId = 0 }, room.CodeProtocol, "", "session_id"},
		{"wait", func(m *pb.ClientMessage) { m.GetHello().WaitNs = -5 }, room.CodeProtocol, "", "wait"},
		{"offers", func(m *pb.ClientMessage) { m.GetHello().Offers = make([]*pb.Descriptor, 17) }, room.CodeProtocol, "", "offers"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx := testContext(t)
			sh := sessiontest.NewServerHandler()
			l := listen(t, "127.0.0.1:0")
			startServer(t, l, session.ServerConfig{Handler: sh})
			c := dialRaw(t, ctx, l.addr())
			m := &pb.ClientMessage{Seq: 1, Body: &pb.ClientMessage_Hello{Hello: rawHello()}}
			tc.change(m)
			if h := m.GetHello(); h != nil {
				for i := range h.Offers {
					h.Offers[i] = &pb.Descriptor{}
				}
			}
			if err := c.Send(m); err != nil {
				t.Fatal(err)
			}
			got, err := c.Recv()
			if err != nil {
				t.Fatalf("no answer: %v", err)
			}
			r := got.GetRefused()
			if r == nil || got.GetSeq() != 1 || r.GetCause().GetCode() != string(tc.code) || r.GetField() != tc.field || !strings.Contains(r.GetCause().GetDetail(), tc.detail) {
				t.Errorf("answer is %v", got)
			}
			if err := c.end(); !errors.Is(err, io.EOF) {
				t.Errorf("after the refusal the stream ended with %v", err)
			}
			if n := len(sh.Events()); n != 0 {
				t.Errorf("the handler was called: %+v", sh.Events())
			}
		})
	}
}

func TestHelloTimeout(t *testing.T) {
	ctx := testContext(t)
	l := listen(t, "127.0.0.1:0")
	startServer(t, l, session.ServerConfig{Tuning: session.Tuning{HelloTimeout: 50 * time.Millisecond}})
	if err := dialRaw(t, ctx, l.addr()).end(); !strings.Contains(err.Error(), "no hello within 50ms") {
		t.Errorf("a silent stream ended with %v", err)
	}
}

func TestSessionIDIsTakenOnce(t *testing.T) {
	ctx := testContext(t)
	sh := sessiontest.NewServerHandler()
	l := listen(t, "127.0.0.1:0")
	startServer(t, l, session.ServerConfig{Handler: sh})
	hello := rawHello()
	first := dialRaw(t, ctx, l.addr())
	first.say(&pb.ClientMessage{Body: &pb.ClientMessage_Hello{Hello: hello}})
	if m, err := first.Recv(); err != nil || m.GetHelloReply() == nil {
		t.Fatalf("first: %v, %v", m, err)
	}
	second := dialRaw(t, ctx, l.addr())
	second.say(&pb.ClientMessage{Body: &pb.ClientMessage_Hello{Hello: hello}})
	if m, err := second.Recv(); err != nil || m.GetRefused().GetCause().GetCode() != string(room.CodeDuplicate) {
		t.Errorf("second: %v, %v; want a refusal", m, err)
	}
	third := rawHello() // same worker and epoch, another session
	third.Identity = hello.Identity
	other := dialRaw(t, ctx, l.addr())
	other.say(&pb.ClientMessage{Body: &pb.ClientMessage_Hello{Hello: third}})
	if m, err := other.Recv(); err != nil || m.GetHelloReply() == nil {
		t.Errorf("third: %v, %v; want it accepted", m, err)
	}
	first.say(&pb.ClientMessage{Body: abortOf(4)})
	if e := sh.Wait(ctx, t, "abort", 1); uint64(e.Session) != hello.SessionId {
		t.Errorf("abort came on session %d", e.Session)
	}
}

func TestMaxSessions(t *testing.T) {
	ctx := testContext(t)
	sh := sessiontest.NewServerHandler()
	l := listen(t, "127.0.0.1:0")
	startServer(t, l, session.ServerConfig{Handler: sh, MaxSessions: 1})
	a, b := startClient(t, session.ClientConfig{}), startClient(t, session.ClientConfig{Tuning: session.Tuning{DialTimeout: 100 * time.Millisecond}})
	get(t, ctx, a, l.addr())
	getCause(t, ctx, b, l.addr(), room.CodeCapacity)
	_ = a.Close()
	sh.Wait(ctx, t, "down", 1)
	// The place is free as soon as the data peer is closed, a moment after Down.
	for {
		_, err := b.Get(ctx, l.addr())
		if err == nil {
			break
		}
		wantCause(t, err, room.CodeCapacity)
	}
}

// TestBadGrantEndsItsRoomOnly: values that can be attributed to a room are answered there.
func TestBadGrantEndsItsRoomOnly(t *testing.T) {
	ctx := testContext(t)
	sh := sessiontest.NewServerHandler()
	l := listen(t, "127.0.0.1:0")
	startServer(t, l, session.ServerConfig{Handler: sh})
	c := dialRaw(t, ctx, l.addr())
	c.hello()
	for i, change := range []func(*pb.Grant){
		func(g *pb.Grant) { g.GrantId = 0 },
		func(g *pb.Grant) { g.Pages = make([]uint32, 1<<19+1) },
		func(g *pb.Grant) { g.PageBytes = 0 },
		func(g *pb.Grant) { g.PageBytes = -1 },
		func(g *pb.Grant) { g.PageBytes = 1 << 41 },
		func(g *pb.Grant) { g.Chunks = nil },
		func(g *pb.Grant) { g.Chunks = make([]int64, 1<<16+1) },
		func(g *pb.Grant) { g.Chunks = []int64{4, -1} },
		func(g *pb.Grant) { g.Chunks = []int64{1 << 62} },
		func(g *pb.Grant) { g.TimeoutNs = -1 },
		func(g *pb.Grant) { g.TimeoutNs = 1<<63 - 1 },
	} {
		g := &pb.Grant{Room: uint64(i), Generation: 3, GrantId: 1, Pages: []uint32{0}, PageBytes: 64, Chunks: []int64{5}}
		change(g)
		c.say(&pb.ClientMessage{Body: &pb.ClientMessage_Grant{Grant: g}})
		m, err := c.until(func(m *pb.ServerMessage) bool { return m.GetFailed() != nil })
		if err != nil {
			t.Fatalf("grant %d ended the session: %v", i, err)
		}
		if f := m.GetFailed(); f.GetRoom() != uint64(i) || f.GetGeneration() != 3 || f.GetCause().GetCode() != string(room.CodeProtocol) {
			t.Errorf("grant %d was answered %v", i, f)
		}
	}
	good := &pb.Grant{Room: 77, GrantId: 1, Pages: []uint32{0}, PageBytes: 64, Chunks: []int64{5}}
	c.say(&pb.ClientMessage{Body: &pb.ClientMessage_Grant{Grant: good}})
	if e := sh.Wait(ctx, t, "grant", 1); e.Key.Room != 77 {
		t.Errorf("a bad grant reached the handler: %+v", e)
	}
}

// TestGarbageOnThePort: K9. Whatever comes in, a valid session works beside and after it,
// and Close does not wait for a connection that says nothing.
func TestGarbageOnThePort(t *testing.T) {
	ctx := testContext(t)
	sh := sessiontest.NewServerHandler()
	l := listen(t, "127.0.0.1:0")
	_, stop := startServer(t, l, session.ServerConfig{Handler: sh, Tuning: session.Tuning{HelloTimeout: time.Hour}})
	client := startClient(t, session.ClientConfig{})
	before := get(t, ctx, client, l.addr())

	silent, err := net.Dial("tcp", l.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	noise := make([]byte, 16<<20)
	_, _ = rand.Read(noise)
	const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	for name, b := range map[string][]byte{
		"one byte": {0}, "http": []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), "16 MiB": noise,
		"preface and noise": append([]byte(preface), noise[:1<<16]...),
		// A SETTINGS frame, then HEADERS on stream 0, which HTTP/2 forbids.
		"bad frame":    append([]byte(preface), 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 1, 1, 4, 0, 0, 0, 0, 0x82),
		"half preface": []byte(preface[:9]),
		"long frames":  append([]byte(preface), bytes.Repeat([]byte{0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1}, 999)...),
	} {
		conn, err := net.Dial("tcp", l.addr())
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		_, _ = conn.Write(b) // the server may hang up in the middle
		_ = conn.Close()
	}
	if err := before.SendAbort(room.Key{Room: 1}, 1, nil); err != nil {
		t.Fatalf("the session beside the garbage: %v", err)
	}
	sh.Wait(ctx, t, "abort", 1)
	after := startClient(t, session.ClientConfig{})
	if err := get(t, ctx, after, l.addr()).SendAbort(room.Key{Room: 2}, 1, nil); err != nil {
		t.Fatal(err)
	}
	sh.Wait(ctx, t, "abort", 2)
	stopped := make(chan struct{})
	go func() {
		stop()
		close(stopped)
	}()
	wait(t, ctx, stopped, "closing beside a silent connection")
}

// TestTooLargeMessage ends its session, not the server.
func TestTooLargeMessage(t *testing.T) {
	ctx := testContext(t)
	sh := sessiontest.NewServerHandler()
	l := listen(t, "127.0.0.1:0")
	startServer(t, l, session.ServerConfig{Handler: sh})
	c := dialRaw(t, ctx, l.addr())
	c.hello()
	_ = c.Send(&pb.ClientMessage{Seq: 2, Body: &pb.ClientMessage_Bye{Bye: &pb.Bye{Cause: &pb.Cause{Detail: strings.Repeat("x", 5<<20)}}}})
	if err := c.end(); err == nil {
		t.Error("the stream goes on")
	}
	if d := sh.Wait(ctx, t, "down", 1); d.Cause.Code != room.CodePeerLost {
		t.Errorf("cause %v", d.Cause)
	}
	get(t, ctx, startClient(t, session.ClientConfig{}), l.addr())
}

// TestServerNoticesSilence: a client that neither acks nor answers pings is given up, by
// AckTimeout with traffic and by the keepalive without.
func TestServerNoticesSilence(t *testing.T) {
	for _, tc := range []struct {
		name string
		tune session.Tuning
		want string
	}{
		{"traffic", session.Tuning{AckTimeout: 100 * time.Millisecond, KeepaliveTime: time.Hour}, "has not handled a message (failed)"},
		{"idle", session.Tuning{KeepaliveTime: 50 * time.Millisecond, KeepaliveTimeout: 100 * time.Millisecond}, "not answered a ping"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx := testContext(t)
			sh := sessiontest.NewServerHandler()
			ready := make(chan *session.ServerSession, 1)
			sh.React(func(e sessiontest.Event) {
				if e.Kind == "abort" {
					ready <- e.Server
				}
			})
			l := listen(t, "127.0.0.1:0")
			startServer(t, l, session.ServerConfig{Handler: sh, Tuning: tc.tune})
			c := dialRaw(t, ctx, l.addr())
			c.hello()
			if tc.name == "traffic" {
				c.say(&pb.ClientMessage{Body: abortOf(1)})
				if err := (<-ready).SendFailed(room.Key{Room: 1}, 0, nil); err != nil {
					t.Fatal(err)
				}
			}
			if cause := statusCause(t, c.end()); cause.GetCode() != string(room.CodePeerLost) || !strings.Contains(cause.GetDetail(), tc.want) {
				t.Errorf("client was told %v", cause)
			}
			if d := sh.Wait(ctx, t, "down", 1); !strings.Contains(d.Cause.Detail, tc.want) {
				t.Errorf("handler was told %v", d.Cause)
			}
		})
	}
}

// TestServerShutdownDuringHello: a Connect that is still dialling does not hold Close.
func TestServerShutdownDuringHello(t *testing.T) {
	ctx := testContext(t)
	dialling := make(chan struct{})
	l := listen(t, "127.0.0.1:0")
	_, stop := startServer(t, l, session.ServerConfig{Tuning: session.Tuning{DialTimeout: time.Hour},
		Connect: func(ctx context.Context, _ transfer.SessionID, _ []transfer.Descriptor) (transfer.Peer, error) {
			close(dialling)
			<-ctx.Done()
			return nil, fmt.Errorf("given up: %w", context.Cause(ctx))
		}})
	c := dialRaw(t, ctx, l.addr())
	c.say(&pb.ClientMessage{Body: &pb.ClientMessage_Hello{Hello: rawHello()}})
	wait(t, ctx, dialling, "the dial")
	stopped := make(chan struct{})
	go func() {
		stop()
		close(stopped)
	}()
	wait(t, ctx, stopped, "closing during a hello")
}
