package session_test

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/session/sessiontest"
	pb "github.com/baton-pd/baton/proto/baton/v1"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		serveAsChild()
		return
	}
	goleak.VerifyTestMain(m)
}

// patience is the bound of every wait in these tests: far above what any should take.
const patience = 30 * time.Second

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// killable is a loopback listener whose process can be made to vanish.
type killable struct {
	net.Listener
	mu    sync.Mutex
	conns []net.Conn
	dead  bool
}

func listen(t *testing.T, addr string) *killable {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatalf("listen on %s: %v", addr, err)
	}
	k := &killable{Listener: l}
	t.Cleanup(k.kill)
	return k
}

func (k *killable) addr() string { return k.Addr().String() }

func (k *killable) Accept() (net.Conn, error) {
	c, err := k.Listener.Accept()
	if err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.dead {
		_ = c.Close()
		return nil, net.ErrClosed
	}
	k.conns = append(k.conns, c)
	return c, nil
}

// kill closes the listener and resets every connection, as the kernel does for a killed process.
func (k *killable) kill() {
	_ = k.Close()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dead = true
	for _, c := range k.conns {
		if t, ok := c.(*net.TCPConn); ok {
			_ = t.SetLinger(0)
		}
		_ = c.Close()
	}
}

// startServer serves on l until the test ends or stop is called.
func startServer(t *testing.T, l net.Listener, c session.ServerConfig) (srv *session.Server, stop func()) {
	t.Helper()
	sessiontest.FillServer(&c)
	srv = session.NewServer(c)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = srv.Serve(l) // an error where the test kills the listener
	}()
	stop = sync.OnceFunc(func() {
		if err := srv.Close(); err != nil {
			t.Errorf("close server: %v", err)
		}
		<-served
	})
	t.Cleanup(stop)
	return srv, stop
}

func startClient(t *testing.T, c session.ClientConfig) *session.Client {
	t.Helper()
	sessiontest.FillClient(&c)
	client := session.NewClient(c)
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Errorf("close client: %v", err)
		}
	})
	return client
}

func get(t *testing.T, ctx context.Context, c *session.Client, addr string) *session.ClientSession {
	t.Helper()
	s, err := c.Get(ctx, addr)
	if err != nil {
		t.Fatalf("get a session to %s: %v", addr, err)
	}
	return s
}

// getCause is the error of a Get that must fail with this code.
func getCause(t *testing.T, ctx context.Context, c *session.Client, addr string, code room.Code) *room.Cause {
	t.Helper()
	_, err := c.Get(ctx, addr)
	return wantCause(t, err, code)
}

func wantCause(t *testing.T, err error, code room.Code) *room.Cause {
	t.Helper()
	var c *room.Cause
	if !errors.As(err, &c) {
		t.Fatalf("error %v is no cause; want %s", err, code)
	}
	if c.Code != code {
		t.Fatalf("cause is %v; want code %s", c, code)
	}
	return c
}

func wait(t *testing.T, ctx context.Context, c <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-ctx.Done():
		t.Fatalf("%s did not happen", what)
	}
}

// rawClient is a decode worker written by hand: no acks, no checks.
type rawClient struct {
	pb.Session_ConnectClient
	t   *testing.T
	seq uint64
}

func dialRaw(t *testing.T, ctx context.Context, addr string) *rawClient {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	stream, err := pb.NewSessionClient(conn).Connect(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return &rawClient{Session_ConnectClient: stream, t: t}
}

// say sends m with the next number.
func (c *rawClient) say(m *pb.ClientMessage) {
	c.t.Helper()
	c.seq++
	m.Seq = c.seq
	if err := c.Send(m); err != nil {
		_, why := c.Recv()
		c.t.Fatalf("send %v: %v (%v)", m, err, why)
	}
}

// rawHello is a hello that a server made by sessiontest accepts.
func rawHello() *pb.Hello {
	id := sessiontest.Identity("raw:1")
	return &pb.Hello{
		ProtocolVersion: session.ProtocolVersion, SessionId: session.NewEpoch(), WaitNs: int64(patience),
		Identity: &pb.Identity{WorkerId: id.WorkerID, Epoch: id.Epoch, Fingerprint: &pb.Fingerprint{
			Engine: id.Engine, ModelDigest: id.ModelDigest, KvLayout: id.KVLayout, Attention: id.Attention, ChunkTokens: int64(id.ChunkTokens),
		}},
	}
}

// hello brings the session up.
func (c *rawClient) hello() {
	c.t.Helper()
	c.say(&pb.ClientMessage{Body: &pb.ClientMessage_Hello{Hello: rawHello()}})
	m, err := c.Recv()
	if err != nil || m.GetHelloReply() == nil || m.GetSeq() != 1 {
		c.t.Fatalf("answer to hello: %v, %v", m, err)
	}
}

// until receives until pick says so; it returns that message, or the stream's error.
func (c *rawClient) until(pick func(*pb.ServerMessage) bool) (*pb.ServerMessage, error) {
	for {
		m, err := c.Recv()
		if err != nil || pick(m) {
			return m, err
		}
	}
}

// end receives until the stream's end and returns its error.
func (c *rawClient) end() error {
	_, err := c.until(func(*pb.ServerMessage) bool { return false })
	return err
}

// rawServer is a prefill worker written by hand.
type rawServer struct {
	pb.UnimplementedSessionServer
	connect func(pb.Session_ConnectServer) error
}

func (s *rawServer) Connect(stream pb.Session_ConnectServer) error { return s.connect(stream) }

// serveRaw runs connect for each stream until the test ends.
func serveRaw(t *testing.T, connect func(pb.Session_ConnectServer) error) (addr string) {
	t.Helper()
	l := listen(t, "127.0.0.1:0")
	srv := grpc.NewServer(grpc.WaitForHandlers(true))
	pb.RegisterSessionServer(srv, &rawServer{connect: connect})
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = srv.Serve(l)
	}()
	t.Cleanup(func() {
		srv.Stop()
		<-served
	})
	return l.addr()
}

// rawReply accepts a hello.
func rawReply(stream pb.Session_ConnectServer) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	id := rawHello().GetIdentity()
	id.WorkerId = "rawserver:1"
	return stream.Send(&pb.ServerMessage{Seq: 1, Body: &pb.ServerMessage_HelloReply{HelloReply: &pb.HelloReply{
		ProtocolVersion: session.ProtocolVersion, Identity: id, Transport: "null",
	}}})
}
