package router

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/httpbody"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/otel"
	"github.com/baton-pd/baton/internal/room"
)

// deadlineSlack is how long after the deadline the client's connection may still be
// written to: enough for an error event.
const deadlineSlack = 400 * time.Millisecond

// generation is the handler of a generating endpoint.
func (r *Router) generation(kind openai.Kind, path string) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		cl := newClient(w)
		cl.rec = r.journal.Begin(time.Now(), path, clientHost(req.RemoteAddr))
		span := r.traceCall(req, path)
		c, f := r.accept(cl, req, kind, path)
		if f == nil {
			c.span = span
			f = r.serve(cl, c)
			r.leave(c)
			r.live.remove(c)
			defer c.disarm()
		}
		if n := r.inflight.Add(-1); n < 0 {
			panic("router: negative number of requests") // accept always counts
		}
		if f != nil {
			cl.fail(f)
		}
		r.account(req, cl, c, f, span)
		if cl.cut {
			panic(http.ErrAbortHandler) // closes the connection without a proper end of the body
		}
	}
}

// accept reads and checks a request and registers its call. It counts the request as in flight in every case.
// On a failure the call may be nil.
func (r *Router) accept(cl *client, req *http.Request, kind openai.Kind, path string) (*call, *failure) {
	start := time.Now()
	// Until the body has been read: net/http itself reads on after a refusal.
	_ = cl.ctl.SetReadDeadline(start.Add(r.cfg.BodyTimeout)) // a recorder in a test has none
	if f := r.tooMany(r.inflight.Add(1)); f != nil {
		return nil, f
	}
	if r.base.Err() != nil {
		return nil, failureOf(&r.base)
	}
	c := &call{kind: kind, path: path, start: start, header: http.Header{}}
	deadline, e := r.parseDeadline(req, start)
	if e != nil {
		return nil, &failure{err: e}
	}
	c.deadline = deadline
	body, f := r.readBody(cl, req, deadline)
	if f != nil {
		return nil, f
	}
	if c.parsed, e = parseBody(kind, body); e != nil {
		return nil, &failure{err: e}
	}
	if e = r.bodyDeadline(c, req); e != nil {
		return nil, &failure{err: e}
	}
	deadline = c.deadline
	if c.rid == nil {
		rid := newRID()
		c.rid, c.names = quoted(rid), []string{rid}
	}
	r.follow(c)
	c.rec = cl.rec
	c.rec.Parsed(c.names[0], c.model, c.stream, c.prompts, c.choices)
	if e := r.setTicket(c, req); e != nil {
		return nil, &failure{err: e}
	}
	id := req.Header.Get(edge.HeaderRequestID)
	if id == "" {
		if id = c.names[0]; !edge.SaneID(id) {
			id = cl.w.Header().Get(edge.HeaderRequestID) // the made one
		}
	}
	cl.w.Header().Set(edge.HeaderRequestID, id)
	c.rec.Named(id)
	copyHeader(c.header, req.Header)
	delete(c.header, HeaderTimeout) // each attempt has its own
	r.forWorkers(c.header, id)
	_ = cl.ctl.SetWriteDeadline(deadline.Add(deadlineSlack)) // a recorder in a test has none
	r.arm(c, req, cl.ctl)
	cl.stall, cl.limit = r.cfg.ClientStall, c.limitWrite
	if taken, ok := r.live.add(c); !ok {
		c.disarm()
		f := routerFailure(room.CodeDuplicate, false, "a request with rid %.64q is in flight", taken)
		f.err.Param = "rid"
		return nil, f
	}
	return c, nil
}

// arm makes the call's context, which the deadline and the client's leaving end; c.disarm undoes
// it. When the context ends early, a write that waits for a slow client ends soon, too.
func (r *Router) arm(c *call, req *http.Request, ctl *http.ResponseController) {
	c.ctx, c.cancel = &c.end, c.end.End
	c.fromBase.Run = func() { c.cancel(r.base.Err()) }
	r.base.Watch(&c.fromBase)
	t := time.AfterFunc(time.Until(c.deadline), func() { c.cancel(c.deadlineFailure()) })
	stop := context.AfterFunc(req.Context(), func() { c.cancel(c.clientLeft()) })
	var mu sync.Mutex
	ended := false // the connection may serve another request: it is not ours any more
	c.hurry.Run = func() {
		mu.Lock()
		defer mu.Unlock()
		if !ended {
			_ = ctl.SetWriteDeadline(time.Now().Add(deadlineSlack)) // a recorder has none
		}
	}
	c.end.Watch(&c.hurry)
	c.limitWrite = func(t time.Time) {
		mu.Lock()
		defer mu.Unlock()
		if ended || c.ctx.Err() != nil { // hurry has its say
			return
		}
		if last := c.deadline.Add(deadlineSlack); t.After(last) {
			t = last
		}
		c.stallAt.Store(t.UnixNano())
		_ = ctl.SetWriteDeadline(t) // a recorder has none
	}
	c.disarm = func() {
		c.end.Unwatch(&c.hurry)
		r.base.Unwatch(&c.fromBase)
		mu.Lock()
		ended = true
		mu.Unlock()
		t.Stop()
		stop()
		c.cancel(context.Canceled)
	}
}

// readBody reads at most MaxBody bytes within BodyTimeout.
func (r *Router) readBody(cl *client, req *http.Request, deadline time.Time) ([]byte, *failure) {
	refuse := func(status int, code, param, format string, args ...any) ([]byte, *failure) {
		cl.w.Header().Set("Connection", "close") // nobody will read the rest
		return nil, &failure{err: openai.NewError(status, code, param, format, args...)}
	}
	if enc := req.Header.Get("Content-Encoding"); enc != "" && !strings.EqualFold(enc, "identity") {
		return refuse(http.StatusUnsupportedMediaType, openai.CodeInvalidBody, "Content-Encoding", "content encoding %.32q is not supported", enc)
	}
	if req.ContentLength > r.cfg.MaxBody {
		httpbody.DrainUntil(cl.w, req, deadline)
		return refuse(http.StatusRequestEntityTooLarge, openai.CodeBodyTooLarge, "", "the body has %d bytes; at most %d", req.ContentLength, r.cfg.MaxBody)
	}
	if time.Until(deadline) < r.cfg.BodyTimeout {
		_ = cl.ctl.SetReadDeadline(deadline) // a recorder in a test has none
	}
	body, err := httpbody.ReadAbout(http.MaxBytesReader(cl.w, req.Body, r.cfg.MaxBody), req.ContentLength)
	var large *http.MaxBytesError
	switch {
	case err == nil:
		// net/http notices the client's leaving by reading on.
		_ = cl.ctl.SetReadDeadline(time.Time{})
		return body, nil
	case errors.As(err, &large):
		httpbody.DrainUntil(cl.w, req, deadline)
		return refuse(http.StatusRequestEntityTooLarge, openai.CodeBodyTooLarge, "", "the body has more than %d bytes", r.cfg.MaxBody)
	case errors.Is(err, os.ErrDeadlineExceeded) && time.Until(deadline) <= 0:
		cl.w.Header().Set("Connection", "close")
		return nil, routerFailure(room.CodeDeadline, false, "the request's deadline passed before its body had arrived")
	case errors.Is(err, os.ErrDeadlineExceeded):
		return refuse(http.StatusRequestTimeout, openai.CodeBodyTimeout, "", "the body did not arrive within %v", r.cfg.BodyTimeout)
	case errors.Is(err, io.ErrUnexpectedEOF), req.Context().Err() != nil:
		f := routerFailure(room.CodeClientGone, false, "the client left while it sent its request")
		f.gone = true
		return nil, f
	default:
		return refuse(http.StatusBadRequest, openai.CodeInvalidBody, "", "read the body: %v", err)
	}
}

// serve tries the call on pairs of workers until it is answered, may not be tried again, or no pair is left.
func (r *Router) serve(cl *client, c *call) *failure {
	avoid := map[*worker]bool{}
	var last *failure
	var second opinion
	for n := 0; ; n++ {
		var where blame
		if last != nil {
			where = last.blame
		}
		p, d, f := r.acquire(c, n, avoid, where)
		if f != nil {
			if last != nil && c.ctx.Err() == nil {
				if cl.started {
					last = last.with("; it does not go on elsewhere: " + f.cause().Detail)
				}
				f = last
			}
			return second.or(f, cl.started)
		}
		a := r.newAttempt(c, n, p, d)
		f = a.run(cl)
		c.rec.Tried(time.Now(), recordCause(f))
		if f == nil {
			second.disproved(r)
			return nil
		}
		r.judge(a, f)
		if f.refused && last != nil {
			f = last // it says more about what happened to the request
		}
		again := !cl.started && n < r.cfg.MaxRetries && c.ctx.Err() == nil && f.blame != 0 && (f.cause().Retryable || second.wanted(a, f))
		if cl.started {
			again, f = r.goOn(c, f, last)
		}
		if !again {
			return second.or(f, cl.started)
		}
		last = f
		if f.blame&blamePrefill != 0 {
			avoid[p] = true
		}
		if f.blame&blameDecode != 0 {
			avoid[d] = true
		}
		r.m.retries.WithLabelValues(string(f.cause().Code)).Inc()
		r.cfg.Log.Info("attempt failed, trying another pair", "room", a.key().String(), "prefill", p.name, "decode", d.name,
			"cause", string(f.cause().Code), "side", f.cause().Side.String(), "phase", f.cause().Phase, "detail", f.cause().Detail)
	}
}

// account counts and logs the end of a request: one line each.
func (r *Router) account(req *http.Request, cl *client, c *call, f *failure, span *otel.Span) {
	outcome, cause, level := "ok", "none", slog.LevelInfo
	if f != nil {
		level = slog.LevelWarn
		cause = string(f.cause().Code)
		switch {
		case f.gone:
			outcome, level = "client_gone", slog.LevelInfo
		case cl.started:
			outcome = "stream_error"
		case f.cause().Code == room.CodeAborted:
			outcome, level = "aborted", slog.LevelInfo
		case f.err.Status/100 == 4:
			outcome, level = "refused", slog.LevelInfo
		default:
			outcome = "error"
		}
	}
	r.m.requests.WithLabelValues(outcome, cause).Inc()
	r.recordEnd(cl, outcome, f)
	endCall(span, c, cl.status, outcome, f)
	if c != nil {
		r.observe(cl, c)
	}
	if !r.cfg.Log.Enabled(req.Context(), level) {
		return
	}
	attrs := append(make([]slog.Attr, 0, 20), slog.String("path", req.URL.Path), slog.String("outcome", outcome), slog.Int("status", cl.status))
	if f != nil {
		attrs = append(attrs, slog.String("cause", cause), slog.String("side", f.cause().Side.String()), slog.String("phase", f.cause().Phase),
			slog.String("detail", f.cause().Detail))
	}
	if c != nil {
		attrs = append(attrs, times(cl, c)...)
	}
	r.cfg.Log.LogAttrs(context.WithoutCancel(req.Context()), level, "request", attrs...)
}

// observe counts a call's durations.
func (r *Router) observe(cl *client, c *call) {
	r.m.seconds.Observe(time.Since(c.start).Seconds())
	if !cl.first.IsZero() && c.stream {
		r.m.first.Observe(cl.first.Sub(c.start).Seconds())
	}
}

// times are a call's workers, room and phases, for the log.
func times(cl *client, c *call) []slog.Attr {
	attrs := []slog.Attr{slog.Int("attempts", c.attempts), slog.Bool("stream", c.stream), slog.String("rid", c.names[0])}
	if c.waited > time.Millisecond {
		attrs = append(attrs, slog.Float64("queue_ms", ms(c.waited)))
	}
	if !cl.first.IsZero() {
		attrs = append(attrs, slog.Float64("first_ms", ms(cl.first.Sub(c.start))))
	}
	if a := c.current.Load(); a != nil {
		attrs = append(attrs, slog.String("room", a.key().String()), slog.String("prefill", a.prefill.w.name), slog.String("decode", a.decode.w.name))
		if d := a.prefill.ended.Load(); d > 0 {
			attrs = append(attrs, slog.Float64("prefill_ms", ms(time.Duration(d))))
		}
	}
	return append(attrs, slog.Float64("total_ms", ms(time.Since(c.start))))
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
