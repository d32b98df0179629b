// Package session is the control channel between a decode worker (client) and a
// prefill worker (server): one gRPC bidirectional stream, one generation of the
// peer. It carries hello (version, fingerprint, memory descriptors), grants, failures,
// aborts and abort acks. Messages are delivered in order or the session ends;
// the end of a session is an event for every room of it.
package session

import (
	"fmt"
	"strconv"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// ProtocolVersion is refused if it differs.
const ProtocolVersion = 1

// Fingerprint is what two workers must have in common to exchange KV.
type Fingerprint struct {
	Engine, ModelDigest, KVLayout, Attention string
	ChunkTokens                              int
}

// Diff names the first field in which f and g differ; ok false if none.
func (f Fingerprint) Diff(g Fingerprint) (field, ours, theirs string, differ bool) {
	for _, p := range []struct{ n, a, b string }{
		{"engine", f.Engine, g.Engine},
		{"model_digest", f.ModelDigest, g.ModelDigest},
		{"kv_layout", f.KVLayout, g.KVLayout},
		{"attention", f.Attention, g.Attention},
		{"chunk_tokens", strconv.Itoa(f.ChunkTokens), strconv.Itoa(g.ChunkTokens)},
	} {
		if p.a != p.b {
			return p.n, p.a, p.b, true
		}
	}
	return "", "", "", false
}

// Identity is who a worker is.
type Identity struct {
	WorkerID string // for people: host:port of its HTTP side
	Epoch    uint64 // random at process start: the generation of the worker
	Fingerprint
}

// Grant is the decode side's permission, as sent.
type Grant struct {
	Key       room.Key
	ID        transfer.GrantID
	Pages     []uint32      // in chunk order; chunk i takes ceil(Chunks[i]/PageBytes) of them
	PageBytes int           // of the decode side's pool
	Chunks    []int         // exact bytes of each chunk as the decode side computed them
	Digest    uint64        // of the prompt's tokens
	Timeout   time.Duration // until the request's deadline, at the moment of sending
}

// String is for logs.
func (g Grant) String() string {
	return fmt.Sprintf("grant %d room %s, %d chunks, %d pages", g.ID, g.Key, len(g.Chunks), len(g.Pages))
}

// ClientHandler hears the prefill side. Called in order from the session's
// receive goroutine; must not block.
type ClientHandler interface {
	// Failed: the sender of this room ended with this cause.
	Failed(s transfer.SessionID, key room.Key, c *room.Cause)
	// AbortAck: no write under this grant is or will be outstanding.
	AbortAck(s transfer.SessionID, key room.Key, g transfer.GrantID)
	// Down: the session has ended; once, after every other call for s.
	Down(s transfer.SessionID, addr string, c *room.Cause)
}

// ServerHandler hears the decode side; same rules.
type ServerHandler interface {
	Grant(s *ServerSession, g Grant)
	// Abort: g is 0 if the decode side never sent a grant for the room.
	Abort(s *ServerSession, key room.Key, g transfer.GrantID, c *room.Cause)
	Down(s *ServerSession, c *room.Cause)
}

// Planned API (client.go, server.go):
//
//	func NewClient(c ClientConfig) *Client
//	  // ClientConfig{Identity; Offer func(transfer.SessionID) ([]transfer.Descriptor, error);
//	  //   Handler ClientHandler; Log *slog.Logger; KeepaliveTime, KeepaliveTimeout, DialTimeout, AckTimeout, BackoffMin, BackoffMax time.Duration; Registerer prometheus.Registerer}
//	func (c *Client) Get(ctx context.Context, addr string) (*ClientSession, error) // waits for a live session; error is *room.Cause
//	func (s *ClientSession) ID() transfer.SessionID
//	func (s *ClientSession) Peer() Identity
//	func (s *ClientSession) SendGrant(g Grant) error      // never blocks; ErrDown if the session has ended
//	func (s *ClientSession) SendAbort(key room.Key, g transfer.GrantID, c *room.Cause) error
//	func (s *ClientSession) Down() <-chan struct{}
//	func (c *Client) Close() error                        // ends all sessions, waits
//
//	func NewServer(c ServerConfig) *Server
//	  // ServerConfig{Identity; Connect func(ctx context.Context, s transfer.SessionID, offers []transfer.Descriptor) (transfer.Peer, error);
//	  //   Handler ServerHandler; Log; same time settings; Registerer}
//	func (s *Server) Serve(l net.Listener) error          // until Close
//	func (s *Server) Close() error                        // ends all sessions, waits
//	func (s *ServerSession) ID() transfer.SessionID
//	func (s *ServerSession) Client() Identity
//	func (s *ServerSession) Data() transfer.Peer           // dialled by Connect during the hello
//	func (s *ServerSession) SendFailed(key room.Key, c *room.Cause) error // never blocks
//	func (s *ServerSession) SendAck(key room.Key, g transfer.GrantID) error
