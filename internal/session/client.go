package session

import (
	"context"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// Client keeps one session to each prefill worker it is asked for.
type Client struct{}

// NewClient makes a client without sessions.
func NewClient(c ClientConfig) *Client { return &Client{} }

// Get waits for a live session.
func (c *Client) Get(ctx context.Context, addr string) (*ClientSession, error) { return nil, ErrDown }

// Close ends all sessions and waits for them.
func (c *Client) Close() error { return nil }

// ClientSession is the decode side of one session.
type ClientSession struct{}

// ID of the session.
func (s *ClientSession) ID() transfer.SessionID { return 0 }

// Peer is the prefill worker.
func (s *ClientSession) Peer() Identity { return Identity{} }

// Down is closed when the session has ended.
func (s *ClientSession) Down() <-chan struct{} { return nil }

// SendGrant sends a grant.
func (s *ClientSession) SendGrant(g Grant) error { return ErrDown }

// SendAbort sends an abort.
func (s *ClientSession) SendAbort(key room.Key, g transfer.GrantID, c *room.Cause) error {
	return ErrDown
}
