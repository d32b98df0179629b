package session

import (
	"net"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// Server accepts sessions of decode workers.
type Server struct{}

// NewServer makes a server; Serve starts it.
func NewServer(c ServerConfig) *Server { return &Server{} }

// Serve accepts sessions on l until Close. It owns l.
func (s *Server) Serve(l net.Listener) error { return ErrDown }

// Close ends all sessions and waits for them.
func (s *Server) Close() error { return nil }

// ServerSession is the prefill side of one session.
type ServerSession struct{}

// ID of the session.
func (s *ServerSession) ID() transfer.SessionID { return 0 }

// Client is the decode worker.
func (s *ServerSession) Client() Identity { return Identity{} }

// Data is the data plane's connection.
func (s *ServerSession) Data() transfer.Peer { return nil }

// Down is closed when the session has ended.
func (s *ServerSession) Down() <-chan struct{} { return nil }

// SendFailed tells that the sender of a room ended.
func (s *ServerSession) SendFailed(key room.Key, c *room.Cause) error { return ErrDown }

// SendAck tells that no write under g is or will be outstanding.
func (s *ServerSession) SendAck(key room.Key, g transfer.GrantID) error { return ErrDown }
