package router

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
)

// failure is why an attempt, or a whole call, ended without an answer. The first one is the cause of
// the attempt's context. Immutable once it is there.
type failure struct {
	err   *openai.Error
	blame blame
	// derived: a worker reported what looks like the echo of the other side's failure, which
	// may be known better in a moment.
	derived bool
	// refused: nothing was reached, so the attempt tells less than an earlier one.
	refused bool
	// retryAfter is the worker's header, if it sent one.
	retryAfter string
	// gone: there is no client to tell.
	gone bool
}

func (f *failure) Error() string { return f.err.Error() }

func (f *failure) Unwrap() error { return f.err }

// cause of the failure.
func (f *failure) cause() *room.Cause { return f.err.Cause }

// failureOf finds the failure that ended ctx.
func failureOf(ctx context.Context) *failure {
	err := context.Cause(ctx)
	var f *failure
	if errors.As(err, &f) {
		return f
	}
	return &failure{err: openai.FromCause(&room.Cause{
		Code: room.CodeInternal, Side: room.SideRouter, Phase: phaseRouting, Detail: fmt.Sprintf("the request ended without a cause: %v", err),
	})}
}

// routerFailure is a failure of the request itself, not of a leg.
func routerFailure(code room.Code, retryable bool, format string, args ...any) *failure {
	return &failure{err: openai.FromCause(&room.Cause{
		Code: code, Side: room.SideRouter, Phase: phaseRouting, Retryable: retryable, Detail: fmt.Sprintf(format, args...),
	})}
}

// failed is the failure of a leg that the router found itself.
func (l *leg) failed(code room.Code, retryable bool, format string, args ...any) *failure {
	c := &room.Cause{
		Code: code, Side: l.w.side, Phase: l.phase(), Key: l.a.key(), Peer: l.w.name, Retryable: retryable,
		Detail: l.w.side.String() + " worker " + l.w.name + " " + fmt.Sprintf(format, args...),
	}
	return &failure{err: openai.FromCause(c), blame: blameOf(l.w.side)}
}

// reported is the failure of a leg that its worker told of. What the worker left out is filled in.
func (l *leg) reported(e *openai.Error, h http.Header) *failure {
	c := *e.Cause
	if c.Key == (room.Key{}) {
		c.Key = l.a.key()
	}
	if c.Side == 0 {
		c.Side = l.w.side
	}
	if c.Phase == "" {
		c.Phase = l.phase()
	}
	if c.Peer == "" {
		c.Peer = l.w.name
	}
	out := *e
	out.Cause = &c
	f := &failure{err: &out, blame: blameOf(l.w.side), retryAfter: h.Get("Retry-After")}
	switch c.Code {
	case room.CodeAborted, room.CodePeerLost:
		f.derived = true
		f.blame = blameBoth
	case room.CodeTransferFailed, room.CodeChunkDropped, room.CodeMismatch, room.CodeProtocol, room.CodeDeadline:
		f.blame = blameBoth
	default: // the worker speaks of itself, of the request, or of what the other told it
		if c.Side == room.SideSender || c.Side == room.SideReceiver {
			f.blame = blameOf(c.Side)
		}
	}
	return f
}

// statusError reads a worker's error answer. A status that says more than the cause's own is
// kept, and so is a server's fault that another worker may not share.
func (l *leg) statusError(status int, body []byte, h http.Header) *failure {
	if status/100 != 4 && status/100 != 5 {
		return l.failed(room.CodeProtocol, true, "answered with status %d", status)
	}
	e := openai.ParseError(status, body, l.w.side, l.phase())
	e.Status = status
	if status/100 == 5 && e.Cause.Code == room.CodeEngine && e.Code == string(room.CodeEngine) && !ownError(body) {
		e.Cause.Retryable = true
	}
	return l.reported(e, h)
}

// ownError: the body is Baton's error object, whose retryable flag is to be believed.
func ownError(body []byte) bool { return strings.Contains(string(body), `"retryable"`) }

// broken is the failure of a leg whose connection could not be made or broke. The
// worker is excluded or probed accordingly. Only for errors that are not of our own doing.
func (l *leg) broken(err error) *failure {
	var op *net.OpError
	switch {
	case errors.As(err, &op) && op.Op == "dial":
		l.w.exclude(plainError(err))
		f := l.failed(room.CodeUnavailable, true, "cannot be reached: %s", plainError(err))
		f.refused = true
		return f
	case handshakeFailed(err):
		l.w.exclude("TLS: " + plainError(err))
		f := l.failed(room.CodeUnavailable, true, "is not trusted, or does not trust the router: %s", plainError(err))
		f.refused = true
		return f
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE),
		errors.Is(err, io.ErrClosedPipe), errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &op), hungUp(err):
		l.w.probeNow()
		return l.failed(room.CodePeerLost, true, "broke the connection (%s)", plainError(err))
	default:
		l.w.probeNow()
		return l.failed(room.CodeProtocol, true, "does not speak HTTP as it should: %s", plainError(err))
	}
}

// hungUp reports net/http's error for a connection that its server closed before the request was written. It has
// no name to compare with. Where the connection has served before, the request is sent over another one unseen.
func hungUp(err error) bool { return strings.Contains(err.Error(), "server closed idle connection") }

// plainError is err in few words: addresses of connections are noise to clients.
func plainError(err error) string {
	var op *net.OpError
	var call *os.SyscallError
	switch {
	case errors.As(err, &call):
		return call.Err.Error()
	case errors.As(err, &op):
		return op.Err.Error()
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return "connection closed"
	default:
		return err.Error()
	}
}
