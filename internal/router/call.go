package router

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	mathrand "math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/otel"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/router/admission"
	"github.com/baton-pd/baton/internal/router/ending"
	"github.com/baton-pd/baton/internal/router/record"
)

// HeaderTimeout carries the milliseconds that are left of a request's deadline, from
// the client to the router and on to the workers.
const HeaderTimeout = "X-Request-Timeout-Ms"

// FieldTimeout is the body's field for the same; the router takes it out, and tells the workers by the header.
const FieldTimeout = "request_timeout_ms"

// call is one client's request. Its context ends with a *failure as cause.
type call struct {
	*parsed
	kind            openai.Kind
	path            string
	header          http.Header // goes to the workers; read only
	start, deadline time.Time
	ctx             context.Context
	cancel          context.CancelCauseFunc
	// end is ctx; fromBase and hurry are what the router's end and its own set off, see Router.arm.
	end             ending.Context
	fromBase, hurry ending.Hook
	disarm          func() // see Router.arm
	// limitWrite bounds the next writes to the client, within the deadline; stallAt is the bound in Unix nanoseconds, 0 before the first.
	limitWrite func(t time.Time)
	stallAt    atomic.Int64
	// current is the attempt under way, for the deadline's words and the log.
	current  atomic.Pointer[attempt]
	attempts int

	ticket  admission.Ticket
	keyName string   // of the API key, for people; "" without keys
	prefix  []uint64 // of the prompt, for policies that look at it
	session string
	// privileged calls take no place and are never turned away: the router's own probes.
	privileged bool
	placed     bool          // holds a place; the handler's
	waited     time.Duration // in the queue
	queued     atomic.Bool   // is waiting in the queue
	thread     *thread       // of a stream that may go on with another pair; nil: it may not
	rec        *record.Entry // what happens to it; nil for the router's own probes
	span       *otel.Span    // nil: not traced
}

// deadlineFailure says what the request was waiting for when its time was over.
func (c *call) deadlineFailure() *failure {
	limit := c.deadline.Sub(c.start)
	a := c.current.Load()
	if c.queued.Load() {
		f := routerFailure(room.CodeDeadline, false, "the deadline of %v passed while the request waited for a worker with a free place, in attempt %d", limit, c.attempts+1)
		f.err.Cause.Phase = phaseQueued
		return f
	}
	if a == nil {
		return routerFailure(room.CodeDeadline, false, "the deadline of %v passed before the request was sent to a worker", limit)
	}
	// The decode side owes the answer; but a prefill worker that is known to be silent is why it cannot.
	l := &a.decode
	if legPhase(l.at.Load()) == legWaiting || a.prefill.w.status() == statusOut && a.decode.w.status() == statusUp && !a.prefill.over.Load() {
		l = &a.prefill
	}
	return &failure{blame: blameOf(l.w.side), err: openai.FromCause(&room.Cause{
		Code: room.CodeDeadline, Side: l.w.side, Phase: l.phase(), Key: a.key(), Peer: l.w.name,
		Detail: fmt.Sprintf("the deadline of %v passed; decode worker %s: %s; prefill worker %s: %s",
			limit, a.decode.w.name, a.decode.phase(), a.prefill.w.name, a.prefill.phase()),
	})}
}

// clientGone is the failure of a call whose client left.
func (c *call) clientGone(what string) *failure {
	f := routerFailure(room.CodeClientGone, false, "%s", what)
	f.gone = true
	return f
}

// parseDeadline reads the header, or takes the default.
func (r *Router) parseDeadline(req *http.Request, start time.Time) (time.Time, *openai.Error) {
	v := req.Header.Get(HeaderTimeout)
	if v == "" {
		return start.Add(r.cfg.DefaultTimeout), nil
	}
	d, e := r.parseTimeout("header "+HeaderTimeout, HeaderTimeout, v)
	return start.Add(d), e
}

// parseTimeout reads milliseconds.
func (r *Router) parseTimeout(what, param, v string) (time.Duration, *openai.Error) {
	most := r.cfg.MaxTimeout.Milliseconds()
	ms, err := strconv.ParseInt(v, 10, 64)
	if err != nil || ms < 1 || ms > most {
		return 0, invalidValue(param, "%s must be a whole number in [1, %d]", what, most)
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// bodyDeadline takes the body's own deadline into account: it replaces the default, and of two that the client named the
// sooner counts. Both run from the request's arrival.
func (r *Router) bodyDeadline(c *call, req *http.Request) *openai.Error {
	if c.timeout == "" {
		return nil
	}
	d, e := r.parseTimeout(FieldTimeout, FieldTimeout, c.timeout)
	if e != nil {
		return e
	}
	if at := c.start.Add(d); req.Header.Get(HeaderTimeout) == "" || at.Before(c.deadline) {
		c.deadline = at
	}
	return nil
}

// hopHeaders belong to one connection, or are made anew for the next.
var hopHeaders = map[string]bool{
	"Connection": true, "Proxy-Connection": true, "Keep-Alive": true, "Proxy-Authenticate": true, "Proxy-Authorization": true,
	"Te": true, "Trailer": true, "Transfer-Encoding": true, "Upgrade": true, "Content-Length": true, "Expect": true,
	"Accept-Encoding": true, "Date": true, "Host": true, "Origin": true,
}

// copyHeader adds what may pass from one connection to another. The values are shared: nobody changes them in place.
func copyHeader(dst, src http.Header) {
	named := ""
	for _, v := range src["Connection"] {
		named += "," + strings.ToLower(v) + ","
	}
	for k, v := range src {
		if hopHeaders[k] || edge.IsCORS(k) || named != "" && strings.Contains(strings.ReplaceAll(named, " ", ""), ","+strings.ToLower(k)+",") {
			continue
		}
		dst[k] = v[:len(v):len(v)]
	}
}

// newRooms makes ids that are never 0 and below 2^63. Two live requests share one with a
// chance of one in 2^63 a pair, and then the workers refuse the second.
func newRooms(n int) []uint64 {
	rooms := make([]uint64, 0, n)
	for len(rooms) < n {
		if id := mathrand.Uint64() >> 1; id != 0 {
			rooms = append(rooms, id)
		}
	}
	return rooms
}

// newRID makes a request id that nobody can guess.
func newRID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read does not fail
	return hex.EncodeToString(b[:])
}

// quoted is a made request id as JSON.
func quoted(rid string) json.RawMessage { return json.RawMessage(`"` + rid + `"`) }

// calls finds live calls by the request ids that clients know.
type calls struct {
	mu     sync.Mutex
	byName map[string]*call
}

// add registers c; the name that is already taken, if one is.
func (cs *calls) add(c *call) (taken string, ok bool) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for _, n := range c.names {
		if cs.byName[n] != nil {
			return n, false
		}
	}
	for _, n := range c.names {
		cs.byName[n] = c
	}
	return "", true
}

func (cs *calls) remove(c *call) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for _, n := range c.names {
		delete(cs.byName, n)
	}
}

// abort cancels the call of this name (all: every one) of those that may be, and says how many it hit.
func (cs *calls) abort(name string, all bool, may func(c *call) bool) int {
	cs.mu.Lock()
	hit := map[*call]bool{}
	for n, c := range cs.byName {
		if (all || n == name) && may(c) {
			hit[c] = true
		}
	}
	cs.mu.Unlock()
	for c := range hit {
		c.cancel(routerFailure(room.CodeAborted, false, "aborted by /abort_request"))
	}
	return len(hit)
}

// all lists the live calls.
func (cs *calls) all() []*call {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	out := make([]*call, 0, len(cs.byName))
	for n, c := range cs.byName {
		if n == c.names[0] { // once each
			out = append(out, c)
		}
	}
	return out
}

// count is the number of names of live calls.
func (cs *calls) count() int {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return len(cs.byName)
}
