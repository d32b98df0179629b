package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime/debug"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
	pb "github.com/baton-pd/baton/proto/baton/v1"
)

const (
	defaultMaxSessions = 1024
	// maxStreams bounds the streams of one connection; Baton's own client opens one.
	maxStreams = 16
	// stopTimeout is how long Close lets connections carry their last words.
	stopTimeout = time.Second
)

// Server is the prefill side: it accepts the sessions of decode workers. Safe for
// concurrent use.
type Server struct {
	pb.UnimplementedSessionServer

	cfg   ServerConfig
	t     Tuning
	m     *metrics
	log   *slog.Logger
	grpc  *grpc.Server
	conns *connSet
	wg    sync.WaitGroup // gRPC handlers, their hello readers, and sessions

	mu       sync.Mutex // guards what follows; never held across I/O or handlers
	closed   bool
	sessions map[transfer.SessionID]*ServerSession // value nil: the id is taken, the session not yet up
}

// NewServer makes a server; Serve starts it. c must have Identity, Connect and Handler.
func NewServer(c ServerConfig) *Server {
	if c.MaxSessions <= 0 {
		c.MaxSessions = defaultMaxSessions
	}
	t := c.Tuning.withDefaults()
	log := c.Log
	if log == nil {
		log = slog.Default()
	}
	s := &Server{
		cfg: c, t: t, m: newMetrics(c.Registerer), log: log,
		conns: newConnSet(2*c.MaxSessions + 64), sessions: make(map[transfer.SessionID]*ServerSession),
	}
	s.grpc = grpc.NewServer(
		grpc.Creds(s.credentials()), grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage), grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxHeaderListSize(16<<10), grpc.ConnectionTimeout(t.HelloTimeout), grpc.WaitForHandlers(true),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: max(t.KeepaliveTime, time.Second), Timeout: t.KeepaliveTimeout,
			MaxConnectionIdle: max(30*time.Second, 2*t.HelloTimeout), // a connection without a session is of no use
		}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
	)
	pb.RegisterSessionServer(s.grpc, s)
	return s
}

// Serve accepts sessions on l until Close, and owns l. nil after Close; otherwise the
// error that ended accepting: the worker is not healthy any more.
func (s *Server) Serve(l net.Listener) error {
	err := s.grpc.Serve(s.conns.listener(l))
	if s.isClosed() || errors.Is(err, grpc.ErrServerStopped) {
		return nil
	}
	if err == nil {
		err = errors.New("stopped")
	}
	return fmt.Errorf("accept sessions on %s: %w", l.Addr(), err)
}

func (s *Server) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// Close ends all sessions with CodeShutdown, closes listeners and connections, and waits
// until every handler has returned and every data peer is closed. Idempotent.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	for _, sess := range s.sessions {
		if sess != nil {
			sess.link.fail(s.cause(room.CodeShutdown, "the prefill worker is shutting down"), false)
		}
	}
	s.mu.Unlock()
	// A graceful stop lets the causes reach the clients; connections that never said
	// anything, or do not read, are broken.
	stopped := make(chan struct{})
	go func() {
		s.grpc.GracefulStop()
		close(stopped)
	}()
	timer := time.NewTimer(stopTimeout)
	defer timer.Stop()
	select {
	case <-stopped:
	case <-timer.C:
		s.conns.closeAll()
		s.grpc.Stop()
		<-stopped
	}
	s.conns.closeAll()
	s.wg.Wait()
	return nil
}

// cause is a failure found here.
func (s *Server) cause(code room.Code, detail string) *room.Cause {
	return &room.Cause{Code: code, Side: room.SideSender, Phase: phaseSession, Detail: detail, Retryable: code != room.CodeProtocol}
}

// Connect implements the gRPC service: one call is one session. It must return for the
// stream to end, so the session's receiving goroutine is another one.
func (s *Server) Connect(stream pb.Session_ConnectServer) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return statusOf(s.cause(room.CodeShutdown, "the prefill worker is shutting down"))
	}
	s.wg.Add(1)
	s.mu.Unlock()
	defer s.wg.Done()

	w := serverWire{stream}
	h, refusal, err := s.hear(stream.Context(), w)
	if err != nil {
		s.m.sessions.WithLabelValues(outcomeFailed).Inc()
		s.log.Warn("session attempt failed", "worker", s.cfg.Identity.WorkerID, "cause", err)
		return err
	}
	var sess *ServerSession
	if refusal == nil {
		sess, refusal = s.open(stream.Context(), w, h)
	}
	if refusal != nil {
		s.m.sessions.WithLabelValues(outcomeRefused).Inc()
		c := refusal.GetCause()
		s.log.Warn("session refused", "worker", s.cfg.Identity.WorkerID, "peer", h.client.WorkerID, "peer_epoch", h.client.Epoch, "code", c.GetCode(), "cause", c.GetDetail())
		return w.send(1, refusal)
	}
	return sess.serve()
}

// hear waits for the hello and judges it. An error is the status of a stream that gets no
// answer.
func (s *Server) hear(ctx context.Context, w wire) (hello, *pb.Refused, error) {
	type first struct {
		seq uint64
		b   body
		err error
	}
	got := make(chan first, 1)
	s.wg.Go(func() { // ends with the stream at the latest
		var f first
		f.seq, f.b, f.err = w.recv()
		got <- f
	})
	timer := time.NewTimer(s.t.HelloTimeout)
	defer timer.Stop()
	var f first
	select {
	case f = <-got:
	case <-timer.C:
		return hello{}, nil, status.Errorf(codes.DeadlineExceeded, "no hello within %v", s.t.HelloTimeout)
	case <-ctx.Done():
		return hello{}, nil, status.FromContextError(ctx.Err()).Err()
	}
	if f.err != nil {
		return hello{}, nil, f.err
	}
	s.m.message("received", f.b)
	m, ok := f.b.(*pb.Hello)
	if !ok || f.seq != 1 {
		return hello{}, s.refusal(s.cause(room.CodeProtocol, fmt.Sprintf("the first message is %s number %d; it must be hello number 1", kindOf(f.b), f.seq))), nil
	}
	// The version first: another version may have another hello.
	if v := m.GetProtocolVersion(); v != ProtocolVersion {
		field, ours, theirs, _ := differs(ProtocolVersion, v, Identity{}, Identity{})
		return hello{}, s.mismatch(field, ours, theirs), nil
	}
	h, err := toHello(m)
	if err != nil {
		return h, s.refusal(s.cause(room.CodeProtocol, err.Error())), nil
	}
	if field, ours, theirs, differ := differs(ProtocolVersion, ProtocolVersion, s.cfg.Identity, h.client); differ {
		return h, s.mismatch(field, ours, theirs), nil
	}
	return h, nil, nil
}

func (s *Server) refusal(c *room.Cause) *pb.Refused { return &pb.Refused{Cause: fromCause(c)} }

func (s *Server) mismatch(field, ours, theirs string) *pb.Refused {
	r := s.refusal(s.cause(room.CodeMismatch, mismatchDetail(field, clip(ours, maxDetail/4), clip(theirs, maxDetail/4))))
	r.Field, r.ServerValue, r.ClientValue = field, clip(ours, maxField), clip(theirs, maxField)
	return r
}

// open reserves the id, dials the data plane, and brings the session up.
func (s *Server) open(ctx context.Context, w wire, h hello) (*ServerSession, *pb.Refused) {
	if c := s.reserve(h.session); c != nil {
		return nil, s.refusal(c)
	}
	// The answer must be there before the client's patience ends.
	dial, stop := context.WithTimeout(ctx, min(s.t.DialTimeout, h.wait)*9/10)
	data, err := s.connect(dial, h)
	stop()
	if err != nil {
		s.release(h.session)
		c := s.cause(room.CodeUnavailable, clip(fmt.Sprintf("the prefill worker cannot connect to the decode worker's memory: %v", err), maxDetail))
		if own := (*room.Cause)(nil); errors.As(err, &own) {
			c.Code, c.Retryable = own.Code, own.Retryable
		}
		return nil, s.refusal(c)
	}
	sess := &ServerSession{server: s, id: h.session, client: h.client, data: data}
	sess.link = newLink(w, s.t, s.m, s.log, room.SideSender, h.client.WorkerID)
	sess.link.handle = sess.handle
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sessions[h.session] = sess
	if s.closed {
		sess.link.fail(s.cause(room.CodeShutdown, "the prefill worker is shutting down"), false)
	}
	return sess, nil
}

// reserve takes a session id; a cause if that cannot be.
func (s *Server) reserve(id transfer.SessionID) *room.Cause {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, taken := s.sessions[id]
	switch {
	case s.closed:
		return s.cause(room.CodeShutdown, "the prefill worker is shutting down")
	case taken:
		c := s.cause(room.CodeDuplicate, fmt.Sprintf("session_id %d is in use", id))
		c.Retryable = false
		return c
	case len(s.sessions) >= s.cfg.MaxSessions:
		return s.cause(room.CodeCapacity, fmt.Sprintf("the prefill worker has %d sessions, which is its limit", len(s.sessions)))
	}
	s.sessions[id] = nil
	return nil
}

func (s *Server) release(id transfer.SessionID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, id)
}

// connect guards the callback.
func (s *Server) connect(ctx context.Context, h hello) (p transfer.Peer, err error) {
	defer func() {
		if r := recover(); r != nil {
			s.m.panics.Inc()
			s.log.Error("session connect panicked", "peer", h.client.WorkerID, "panic", r, "stack", string(debug.Stack()))
			p, err = nil, fmt.Errorf("panic: %v", r)
		}
	}()
	p, err = s.cfg.Connect(ctx, h.session, h.offers)
	if err == nil && p == nil {
		err = errors.New("no transport was chosen")
	}
	return p, err
}
