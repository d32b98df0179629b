package session

import (
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
	pb "github.com/baton-pd/baton/proto/baton/v1"
)

// ServerSession is the prefill side of one session. Safe for concurrent use.
type ServerSession struct {
	server *Server
	id     transfer.SessionID
	client Identity
	data   transfer.Peer // owned; closed after the handler's Down
	link   *link
}

// ID of the session, made by the decode worker.
func (s *ServerSession) ID() transfer.SessionID { return s.id }

// Client is the decode worker, as it said in its hello.
func (s *ServerSession) Client() Identity { return s.client }

// Data is the connection to the decode worker's memory. It is the session's: do not
// close it.
func (s *ServerSession) Data() transfer.Peer { return s.data }

// Down is closed when the session has ended: nothing more is sent or received. The
// handler's Down follows.
func (s *ServerSession) Down() <-chan struct{} { return s.link.down }

// Cause is why the session ended; nil while it lives.
func (s *ServerSession) Cause() *room.Cause { return s.link.Cause() }

// SendFailed tells the decode side that the sender of a room has ended, or that its grant g (0:
// whichever it has) is not served. It never blocks.
// nil: delivered in order, or the handler's Down is called. ErrDown: the session has ended.
func (s *ServerSession) SendFailed(key room.Key, g transfer.GrantID, c *room.Cause) error {
	if err := s.checkKey(key, "failure"); err != nil {
		return err
	}
	return s.link.push(&pb.Failed{Room: key.Room, Generation: key.Gen, Cause: fromCause(c), GrantId: uint64(g)})
}

// SendAck tells the decode side that no write under g is or will be outstanding. Rules as of
// SendFailed.
func (s *ServerSession) SendAck(key room.Key, g transfer.GrantID) error {
	if err := s.checkKey(key, "abort ack"); err != nil {
		return err
	}
	return s.link.push(&pb.AbortAck{Room: key.Room, Generation: key.Gen, GrantId: uint64(g)})
}

func (s *ServerSession) checkKey(key room.Key, what string) error {
	if _, err := toKey(key.Room, key.Gen); err != nil {
		return &room.Cause{Code: room.CodeInvalid, Side: room.SideSender, Phase: phaseSession, Peer: s.client.WorkerID, Detail: what + " cannot be sent: " + err.Error()}
	}
	return nil
}

// serve is the session's life as seen by the gRPC handler: its return ends the stream.
func (s *ServerSession) serve() error {
	srv := s.server
	if err := s.link.wire.send(1, &pb.HelloReply{
		ProtocolVersion: ProtocolVersion, Identity: fromIdentity(srv.cfg.Identity), Transport: s.data.Kind(),
	}); err != nil {
		s.link.fail(s.link.lost(room.CodePeerLost, "the answer to its hello could not be sent: "+reason(err)), true)
	}
	srv.m.message("sent", &pb.HelloReply{})
	srv.m.sessionUp(s.client.WorkerID)
	srv.log.Info("session up", "side", room.SideSender.String(), "session", uint64(s.id), "worker", srv.cfg.Identity.WorkerID, "epoch", srv.cfg.Identity.Epoch,
		"peer", s.client.WorkerID, "peer_epoch", s.client.Epoch, "transport", s.data.Kind())
	srv.wg.Go(s.run)
	select {
	case <-s.link.down:
	case <-s.data.Down():
		s.link.fail(s.link.lost(room.CodePeerLost, fmt.Sprintf("the data connection (%s) to the decode worker was lost: %v", s.data.Kind(), s.data.Err())), false)
	}
	<-s.link.down
	return statusOf(s.link.Cause())
}

// run receives, and ends the session when the stream has ended.
func (s *ServerSession) run() {
	cause := s.link.run()
	srv := s.server
	srv.m.sessionDown(s.client.WorkerID, cause.Code)
	srv.m.forget(s.client.WorkerID)
	s.link.logDown(srv.cfg.Identity, s.client, s.id, cause)
	s.tellDown(cause)
	if err := s.data.Close(); err != nil && !errors.Is(err, transfer.ErrClosed) && !errors.Is(err, transfer.ErrPeerLost) {
		srv.log.Warn("data connection did not close cleanly", "session", uint64(s.id), "peer", s.client.WorkerID, "err", err)
	}
	srv.release(s.id)
}

func (s *ServerSession) tellDown(cause *room.Cause) {
	defer func() {
		if p := recover(); p != nil {
			s.server.m.panics.Inc()
			s.server.log.Error("session handler panicked", "on", "down", "peer", s.client.WorkerID, "panic", p, "stack", string(debug.Stack()))
		}
	}()
	s.server.cfg.Handler.Down(s, cause)
}

// handle is link.handle.
func (s *ServerSession) handle(b body) error {
	h := s.server.cfg.Handler
	switch m := b.(type) {
	case *pb.Grant:
		g, err := toGrant(m)
		var bad *badValue
		if errors.As(err, &bad) {
			return s.refuseRoom(bad)
		}
		if err != nil {
			return err
		}
		h.Grant(s, g)
		return nil
	case *pb.Abort:
		key, err := toKey(m.GetRoom(), m.GetGeneration())
		if err != nil {
			return fmt.Errorf("abort: %w", err)
		}
		c := toCause(m.GetCause())
		if c == nil {
			c = &room.Cause{Code: room.CodeAborted, Side: room.SideReceiver, Key: key, Peer: s.client.WorkerID,
				Detail: "the decode worker aborted the room without a cause"}
		}
		h.Abort(s, key, transfer.GrantID(m.GetGrantId()), c)
		return nil
	case *pb.Bye:
		if c := toCause(m.GetCause()); c != nil {
			return c
		}
		return s.link.lost(room.CodePeerLost, "the decode worker ended the session without a cause")
	default:
		return fmt.Errorf("a %s has no place in a live session", kindOf(b))
	}
}

// refuseRoom answers a grant with unacceptable values: the room ends, the session goes on.
func (s *ServerSession) refuseRoom(bad *badValue) error {
	s.server.log.Warn("grant refused", "room", bad.key.String(), "peer", s.client.WorkerID, "cause", bad.what)
	err := s.SendFailed(bad.key, 0, &room.Cause{Code: room.CodeProtocol, Side: room.SideSender, Phase: room.StateBootstrapping.String(), Key: bad.key,
		Peer: s.client.WorkerID, Detail: bad.what})
	if errors.Is(err, ErrDown) {
		return nil // its end is on the way
	}
	return err
}
