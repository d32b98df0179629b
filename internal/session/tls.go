package session

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/baton-pd/baton/internal/room"
)

// credentials are those of an attempt.
func (c *Client) credentials() credentials.TransportCredentials {
	if c.cfg.TLS == nil {
		return insecure.NewCredentials()
	}
	return credentials.NewTLS(c.cfg.TLS())
}

// trustWords are in the detail of every cause that [Untrusted] knows.
const trustWords = "one of the two does not trust the other"

// Untrusted reports whether there was no session because TLS did not come about: a certificate is missing or not good, or only one side
// speaks TLS.
func Untrusted(c *room.Cause) bool {
	return c != nil && c.Code == room.CodeMismatch && strings.Contains(c.Detail, trustWords)
}

// aboutTLS: why, gRPC's words for an attempt that failed, tells of TLS. There is nothing else to tell by: it turns errors into text. A server
// that wants TLS answers a client's plain preface with an alert, which is no frame of HTTP/2.
func aboutTLS(why string) bool {
	return strings.Contains(why, "tls: ") || strings.Contains(why, "error reading server preface: http2: ")
}

// untrusted is the cause of an attempt that failed for TLS. It is a mismatch: another pair may fit, this one will not before somebody changes a file.
func (c *Client) untrusted(addr, why string) *room.Cause {
	does := "this decode worker speaks TLS (--peer-ca, --peer-cert)"
	if c.cfg.TLS == nil {
		does = "this decode worker does not speak TLS (--peer-tls)"
	}
	return c.cause(room.CodeMismatch, addr, clip(fmt.Sprintf("no session to the prefill worker at %s: %s, or only one speaks TLS: %s; %s", addr, trustWords, why, does), maxDetail))
}

// credentials are the port's, and tell whom they turned away.
func (s *Server) credentials() credentials.TransportCredentials {
	if s.cfg.TLS == nil {
		return insecure.NewCredentials()
	}
	return tellTale{credentials.NewTLS(s.cfg.TLS), s}
}

// tellTale counts and logs handshakes that failed, which gRPC keeps to itself.
type tellTale struct {
	credentials.TransportCredentials
	server *Server
}

// ServerHandshake implements credentials.TransportCredentials. Of a handshake that failed the connection stays open until the client has read why: closed
// with bytes of the client's unread, it would be reset, and the alert lost.
func (t tellTale) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	held := &heldConn{Conn: raw, held: true}
	c, info, err := t.TransportCredentials.ServerHandshake(held)
	if held.held = false; err == nil {
		return c, info, nil
	}
	if !errors.Is(err, io.EOF) && !t.server.isClosed() { // EOF: somebody looked whether the port is open
		t.server.m.sessions.WithLabelValues(outcomeUntrusted).Inc()
		t.server.log.Warn("TLS handshake failed: no session", "worker", t.server.cfg.Identity.WorkerID, "from", raw.RemoteAddr().String(), "err", err)
	}
	_ = raw.SetDeadline(time.Now().Add(alertTime))
	if plain := (tls.RecordHeaderError{}); errors.As(err, &plain) {
		_, _ = raw.Write(protocolAlert) // the client may be gone
	}
	_, _ = io.CopyN(io.Discard, raw, maxMessage) // as above
	_ = raw.Close()
	return nil, nil, err
}

// alertTime is what a client that was turned away has for reading why.
const alertTime = time.Second

// protocolAlert is what a server of TLS 1.2 may answer to what is no TLS (RFC 5246, 7.2): alert, fatal, protocol_version; and close_notify, so that it is
// as long as the header of a frame of HTTP/2, which it cannot be.
var protocolAlert = []byte{21, 3, 3, 0, 2, 2, 70, 21, 3, 3, 0, 2, 1, 0}

// heldConn is not closed while held, which its only user sets.
type heldConn struct {
	net.Conn
	held bool
}

// Close closes it, unless it is held.
func (c *heldConn) Close() error {
	if c.held {
		return nil
	}
	return c.Conn.Close()
}

// Clone implements credentials.TransportCredentials.
func (t tellTale) Clone() credentials.TransportCredentials {
	return tellTale{t.TransportCredentials.Clone(), t.server}
}
