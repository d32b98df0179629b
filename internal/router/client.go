package router

import (
	"net/http"
	"strconv"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/router/record"
)

// firstWriteTime bounds the writing of an error that is a whole answer.
const firstWriteTime = 5 * time.Second

// client is the connection of a call's client. Only the handler's goroutine uses it.
type client struct {
	w   http.ResponseWriter
	ctl *http.ResponseController
	// started: an answer has begun; what follows cannot be a status any more.
	started bool
	status  int
	first   time.Time // of the first byte
	cut     bool      // the answer must not end like a whole one
	// rec is the request's record; nil: it has none.
	rec *record.Entry
	// stall is how long a write may take, limit sets it, armed is when it was set last.
	stall time.Duration
	limit func(time.Time)
	armed time.Time
}

var chunkedCoding = []string{"chunked"} // read only

func newClient(w http.ResponseWriter) *client {
	return &client{w: w, ctl: http.NewResponseController(w)}
}

// begin sends the header.
func (cl *client) begin(h http.Header, status int) {
	if cl.started {
		return
	}
	cl.started, cl.status, cl.first = true, status, time.Now()
	passHeader(cl.w.Header(), h)
	cl.w.WriteHeader(status)
}

// events sends whole events of a stream. The last go out with the end of the answer, when the handler returns.
func (cl *client) events(h http.Header, status int, p []byte, last bool) error {
	if last && !cl.started {
		cl.w.Header()["Transfer-Encoding"] = chunkedCoding // net/http would give it a length
	}
	cl.begin(h, status)
	if err := cl.write(p); err != nil || last {
		return err
	}
	return cl.ctl.Flush()
}

// whole sends an answer that is not a stream.
func (cl *client) whole(h http.Header, status int, body []byte) error {
	cl.w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	cl.begin(h, status)
	return cl.write(body)
}

// fail tells the client of f: by a status before the first byte, afterwards by one error event
// and a connection that breaks off.
func (cl *client) fail(f *failure) {
	e := f.err.Of(cl.w.Header())
	// What ended the request bounded the writes of before (see Router.arm), perhaps some time ago on a busy machine: the
	// error has its own time.
	limit := deadlineSlack
	if !cl.started {
		// The first bytes of an answer fit any socket: they wait for no client, only for us on
		// a machine that is very busy, where a client must not find a closed connection instead.
		limit = firstWriteTime
	}
	_ = cl.ctl.SetWriteDeadline(time.Now().Add(limit)) // a recorder in a test has none
	if cl.started {
		cl.cut = true
		if f.gone {
			return
		}
		again := *e
		cause := *e.Cause
		cause.Retryable = false // part of the answer has been seen
		again.Cause = &cause
		if _, err := cl.w.Write(openai.AppendEvent(nil, again.Body())); err == nil {
			_ = cl.ctl.Flush() // the client may be gone; there is nobody left to tell
		}
		return
	}
	cl.status = e.Status
	h := cl.w.Header()
	if e.Cause.Key != (room.Key{}) {
		h.Set("X-Baton-Room", e.Cause.Key.String())
	}
	body := append(e.Body(), '\n')
	e.SetHeader(h)
	if f.retryAfter != "" {
		h.Set("Retry-After", f.retryAfter)
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	cl.w.WriteHeader(e.Status)
	_, _ = cl.w.Write(body) // the client may be gone; there is nobody left to tell
}
