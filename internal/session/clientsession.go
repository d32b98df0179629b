package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
	pb "github.com/baton-pd/baton/proto/baton/v1"
)

// grpcMinPing is the shortest keepalive a gRPC client can be given. The session's own
// pings are what notices a stopped peer; this one covers the time before the hello.
const grpcMinPing = 10 * time.Second

// ClientSession is the decode side of one session. Safe for concurrent use.
type ClientSession struct {
	client    *Client
	addr      string
	id        transfer.SessionID
	peer      Identity
	transport string // kind of the data plane, as chosen by the server
	link      *link
	conn      *grpc.ClientConn // owned
}

// connect makes one attempt: offer, dial, hello. The returned session is to be run. cancel
// ends ctx, which is the stream's.
func (c *Client) connect(ctx context.Context, cancel context.CancelCauseFunc, addr string) (*ClientSession, *room.Cause) {
	s := &ClientSession{client: c, addr: addr, id: transfer.SessionID(randomID())}
	offers, err := c.offer(s.id)
	if err != nil {
		c.m.sessions.WithLabelValues(outcomeNoOffers).Inc()
		cause := *room.CauseOf(err)
		cause.Detail = clip("offer memory to the prefill worker at "+addr+": "+cause.Detail, maxDetail)
		cause.Side, cause.Phase, cause.Peer = room.SideReceiver, phaseSession, addr
		return nil, &cause
	}
	late := time.AfterFunc(c.t.DialTimeout, func() {
		cancel(fmt.Errorf("no answer to the hello within %v", c.t.DialTimeout))
	})
	cause := s.greet(ctx, offers)
	if cause == nil && !late.Stop() {
		cause = c.cause(room.CodeUnavailable, addr, context.Cause(ctx).Error())
	}
	if cause == nil {
		s.link.cut = func() { cancel(nil) }
		c.m.sessionUp(addr)
		c.log.Info("session up", "side", room.SideReceiver.String(), "session", uint64(s.id), "worker", c.cfg.Identity.WorkerID, "epoch", c.cfg.Identity.Epoch,
			"peer", s.peer.WorkerID, "peer_epoch", s.peer.Epoch, "addr", addr, "transport", s.transport)
		return s, nil
	}
	late.Stop()
	if own := (*room.Cause)(nil); errors.As(context.Cause(ctx), &own) {
		cause = own // Close
	}
	cancel(nil)
	if s.conn != nil {
		_ = s.conn.Close() // only says that it was closed before
	}
	s.tellDown(cause)
	return nil, cause
}

// offer guards the callback.
func (c *Client) offer(id transfer.SessionID) (d []transfer.Descriptor, err error) {
	defer func() {
		if p := recover(); p != nil {
			c.m.panics.Inc()
			c.log.Error("session offer panicked", "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return c.cfg.Offer(id)
}

// greet dials and exchanges the hello; it fills in s.
func (s *ClientSession) greet(ctx context.Context, offers []transfer.Descriptor) *room.Cause {
	c := s.client
	conn, err := grpc.NewClient("passthrough:///"+s.addr, append([]grpc.DialOption{
		grpc.WithTransportCredentials(c.credentials()),
		grpc.WithNoProxy(), // workers reach each other directly
		grpc.WithDisableServiceConfig(),
		grpc.WithIdleTimeout(0),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: c.t.DialTimeout}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: max(c.t.KeepaliveTime, grpcMinPing), Timeout: c.t.KeepaliveTimeout, PermitWithoutStream: true,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
	}, c.cfg.DialOptions...)...)
	if err != nil {
		return s.failed(ctx, room.CodeUnavailable, "dial", err)
	}
	s.conn = conn
	stream, err := pb.NewSessionClient(conn).Connect(ctx)
	if err != nil {
		return s.failed(ctx, room.CodeUnavailable, "dial", err)
	}
	w := clientWire{stream}
	h := hello{session: s.id, client: c.cfg.Identity, offers: offers, wait: c.t.DialTimeout}
	if err := w.send(1, fromHello(h)); err != nil && !errors.Is(err, io.EOF) { // EOF: recv tells why
		return s.failed(ctx, room.CodePeerLost, "send hello", err)
	}
	seq, b, err := w.recv()
	if err != nil {
		return s.failed(ctx, room.CodePeerLost, "wait for the answer to the hello", err)
	}
	c.m.message("sent", &pb.Hello{})
	c.m.message("received", b)
	return s.answered(w, seq, b)
}

// answered judges the server's first message.
func (s *ClientSession) answered(w clientWire, seq uint64, b body) *room.Cause {
	c := s.client
	broken := func(what string) *room.Cause {
		c.m.sessions.WithLabelValues(outcomeFailed).Inc()
		return c.cause(room.CodeProtocol, s.addr, fmt.Sprintf("what listens at %s broke the protocol: %s", s.addr, what))
	}
	if seq != 1 {
		return broken(fmt.Sprintf("its first message has number %d", seq))
	}
	if r, ok := b.(*pb.Refused); ok {
		c.m.sessions.WithLabelValues(outcomeRefused).Inc()
		return s.refused(r)
	}
	r, ok := b.(*pb.HelloReply)
	if !ok {
		return broken(fmt.Sprintf("it answered the hello with %s", kindOf(b)))
	}
	id, what := toIdentity(r.GetIdentity())
	if what != "" {
		return broken("in its hello, " + what)
	}
	s.peer, s.transport = id, clip(r.GetTransport(), maxID)
	if field, theirs, ours, differ := differs(r.GetProtocolVersion(), ProtocolVersion, id, c.cfg.Identity); differ {
		c.m.sessions.WithLabelValues(outcomeRefused).Inc()
		return s.mismatch(field, theirs, ours)
	}
	s.link = newLink(w, c.t, c.m, c.log, room.SideReceiver, s.addr)
	s.link.handle = s.handle
	s.link.farewell = func(seq uint64, cause *room.Cause) {
		_ = w.send(seq, &pb.Bye{Cause: fromCause(cause)}) // best effort: the stream's end says the rest
		_ = w.stream.CloseSend()
	}
	return nil
}

// failed is the cause of an attempt that got no answer.
func (s *ClientSession) failed(ctx context.Context, code room.Code, act string, err error) *room.Cause {
	why := reason(err)
	if ctx.Err() == nil && aboutTLS(why) {
		s.client.m.sessions.WithLabelValues(outcomeUntrusted).Inc()
		return s.client.untrusted(s.addr, why)
	}
	s.client.m.sessions.WithLabelValues(outcomeFailed).Inc()
	if c := causeInStatus(err); c != nil {
		c.Peer = s.addr
		return c
	}
	if ctx.Err() != nil {
		code, why = room.CodeUnavailable, context.Cause(ctx).Error()
	}
	return s.client.cause(code, s.addr, fmt.Sprintf("no session to the prefill worker at %s: %s: %s", s.addr, act, why))
}

// refused turns a refusal into the error of Get.
func (s *ClientSession) refused(r *pb.Refused) *room.Cause {
	if f := r.GetField(); f != "" {
		return s.mismatch(clip(f, maxCauseShort), clip(r.GetServerValue(), maxDetail/4), clip(r.GetClientValue(), maxDetail/4))
	}
	c := toCause(r.GetCause())
	if c == nil {
		return s.client.cause(room.CodeProtocol, s.addr, "the prefill worker at "+s.addr+" refused the session without a cause")
	}
	c.Peer = s.addr
	c.Detail = clip("the prefill worker at "+s.addr+" refused the session: "+c.Detail, maxDetail)
	return c
}

// mismatch names the field in which the two workers differ. Another pair may fit; this one
// will not, so Get does not try again by itself.
func (s *ClientSession) mismatch(field, theirs, ours string) *room.Cause {
	hint := "start both workers with the same build, model and settings"
	if field == fieldTP {
		hint = "start one of them with another number of ranks"
	}
	return s.client.cause(room.CodeMismatch, s.addr, mismatchDetail(field, theirs, ours)+"; "+hint+" (prefill worker at "+s.addr+")")
}

// ID of the session.
func (s *ClientSession) ID() transfer.SessionID { return s.id }

// Peer is the prefill worker, as it said in its hello.
func (s *ClientSession) Peer() Identity { return s.peer }

// Addr is the address the session was made for.
func (s *ClientSession) Addr() string { return s.addr }

// Transport is the kind of the data plane, chosen by the prefill worker.
func (s *ClientSession) Transport() string { return s.transport }

// Down is closed when the session has ended: nothing more is sent or received. The
// handler's Down follows.
func (s *ClientSession) Down() <-chan struct{} { return s.link.down }

// Cause is why the session ended; nil while it lives.
func (s *ClientSession) Cause() *room.Cause { return s.link.Cause() }

// SendGrant sends g and never blocks. nil: g is delivered in order, or the handler's Down
// is called. ErrDown: the session has ended. A *room.Cause of CodeInvalid: g has values that cannot be
// sent; the session goes on. g's slices may be reused after the call.
func (s *ClientSession) SendGrant(g Grant) error {
	g.Pages = slices.Clone(g.Pages)
	m := fromGrant(g)
	what := badGrant(m)
	if _, err := toKey(m.Room, m.Generation); err != nil {
		what = err.Error()
	}
	if what == "" && proto.Size(m) > maxMessage-64 {
		what = fmt.Sprintf("its message of %d bytes is larger than %d", proto.Size(m), maxMessage-64)
	}
	if what != "" {
		return &room.Cause{Code: room.CodeInvalid, Side: room.SideReceiver, Phase: phaseSession, Key: g.Key, Peer: s.addr,
			Detail: fmt.Sprintf("%s cannot be sent: %s", g, what)}
	}
	return s.link.push(m)
}

// SendAbort ends the room at the prefill side, which answers AbortAck(key, g) when
// drained. g is 0 if no grant was sent. Rules as of SendGrant.
func (s *ClientSession) SendAbort(key room.Key, g transfer.GrantID, c *room.Cause) error {
	if _, err := toKey(key.Room, key.Gen); err != nil {
		return &room.Cause{Code: room.CodeInvalid, Side: room.SideReceiver, Phase: phaseSession, Peer: s.addr, Detail: "abort cannot be sent: " + err.Error()}
	}
	return s.link.push(&pb.Abort{Room: key.Room, Generation: key.Gen, GrantId: uint64(g), Cause: fromCause(c)})
}

// run is the session's life, on the goroutine that calls the handler.
func (s *ClientSession) run() {
	cause := s.link.run()
	_ = s.conn.Close() // only says that it was closed before
	s.client.m.sessionDown(s.addr, cause.Code)
	s.link.logDown(s.client.cfg.Identity, s.peer, s.id, cause)
	s.tellDown(cause)
}

func (s *ClientSession) tellDown(cause *room.Cause) {
	defer func() {
		if p := recover(); p != nil {
			s.client.m.panics.Inc()
			s.client.log.Error("session handler panicked", "on", "down", "peer", s.addr, "panic", p, "stack", string(debug.Stack()))
		}
	}()
	s.client.cfg.Handler.Down(s.id, s.addr, cause)
}

// handle is link.handle.
func (s *ClientSession) handle(b body) error {
	h := s.client.cfg.Handler
	switch m := b.(type) {
	case *pb.Failed:
		key, err := toKey(m.GetRoom(), m.GetGeneration())
		if err != nil {
			return fmt.Errorf("failed: %w", err)
		}
		c := toCause(m.GetCause())
		if c == nil {
			c = &room.Cause{Code: room.CodeProtocol, Side: room.SideSender, Key: key, Peer: s.addr,
				Detail: "the prefill worker failed the room without a cause"}
		}
		h.Failed(s.id, key, transfer.GrantID(m.GetGrantId()), c)
		return nil
	case *pb.AbortAck:
		key, err := toKey(m.GetRoom(), m.GetGeneration())
		if err != nil {
			return fmt.Errorf("abort_ack: %w", err)
		}
		h.AbortAck(s.id, key, transfer.GrantID(m.GetGrantId()))
		return nil
	default:
		return fmt.Errorf("a %s has no place in a live session", kindOf(b))
	}
}
