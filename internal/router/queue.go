package router

import (
	"bytes"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/router/admission"
	"github.com/baton-pd/baton/internal/router/policy"
)

// HeaderPriority is the header by which a client says how urgent a request is: a whole number in
// [-MaxPriority, MaxPriority], higher first, 0 without it. It comes before a "priority" in the body.
const HeaderPriority = "X-Request-Priority"

// MaxPriority is the highest priority.
const MaxPriority = 100

// phaseQueued is the phase of a request that waits for a place.
const phaseQueued = "queued"

// unreadRoom is how many requests beyond places and queue are read at a time: enough to find out whether one should
// have another's place.
const unreadRoom = 64

// costBytes of body are as much work as an answer.
const costBytes = 4096

// errTurnedAway is the failure of a request that finds no room.
func errTurnedAway(full *admission.FullError) *failure {
	e := *openai.FromCause(&room.Cause{Code: room.CodeCapacity, Side: room.SideRouter, Phase: phaseQueued, Retryable: true, Detail: full.Error()})
	e.Status = http.StatusTooManyRequests
	return &failure{err: &e, retryAfter: strconv.Itoa(int((full.RetryAfter + time.Second - 1) / time.Second))}
}

// tooMany turns a request away before its body is read, if n requests are here already.
func (r *Router) tooMany(n int64) *failure {
	if n <= int64(r.cfg.MaxInflight)+int64(max(r.cfg.MaxQueue, 0))+unreadRoom {
		return nil
	}
	return errTurnedAway(r.queue.Busy())
}

// setTicket fills in what queue and policies need to know of the call.
func (r *Router) setTicket(c *call, req *http.Request) *openai.Error {
	h := req.Header
	c.ticket = admission.Ticket{
		Class: r.class(c.model), Priority: c.priority,
		Cost: float64(c.choices) + float64(len(c.rest))/costBytes,
	}
	if v := h.Get(HeaderPriority); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < -MaxPriority || n > MaxPriority {
			return invalidValue(HeaderPriority, "header %s must be a whole number in [%d, %d]", HeaderPriority, -MaxPriority, MaxPriority)
		}
		c.ticket.Priority = n
	}
	c.identify(req)
	c.session = h.Get(r.cfg.SessionHeader)
	if r.wantsPrefix {
		c.prefix = policy.Blocks(nil, c.prompt)
	}
	c.prompt = nil // it is another copy of most of the body
	return nil
}

// class of a request: who can use the same workers. Models that nobody is said to have are one class, or a client could make
// as many as it likes.
func (r *Router) class(model string) string {
	if model == "" {
		return ""
	}
	for _, w := range r.all() {
		if slices.Contains(w.models, model) {
			return model
		}
	}
	return "*"
}

// acquire waits for a pair for attempt n of c. On success both workers have a leg counted, and the call
// has a place. The failure says that there is no pair, that the queue is full, or what ended the call.
func (r *Router) acquire(c *call, n int, avoid map[*worker]bool, last blame) (p, d *worker, f *failure) {
	t := c.ticket
	t.Again = n > 0 || c.privileged
	var missing string
	c.queued.Store(true)
	c.rec.Wait()
	start := time.Now()
	err := r.queue.Acquire(c.ctx, t, func() bool {
		p, d, missing = r.find(c, avoid, last)
		return p != nil || missing != ""
	})
	c.queued.Store(false)
	wait := time.Since(start)
	c.waited += wait
	c.rec.Waited(wait)
	if n == 0 {
		r.m.queue.Observe(wait.Seconds())
		c.placed = err == nil && !t.Again
	}
	var full *admission.FullError
	switch {
	case errors.As(err, &full):
		f = errTurnedAway(full)
	case err != nil:
		f = failureOf(c.ctx)
	case missing != "":
		f = routerFailure(room.CodeUnavailable, true, "%s", missing)
	}
	c.traceWait(n, start, f)
	if f != nil {
		return nil, nil, f
	}
	return p, d, nil
}

// leave gives the call's place to the next.
func (r *Router) leave(c *call) {
	if c.placed {
		c.placed = false
		r.queue.Release()
	}
}

// readPriority takes the body's "priority": a whole number.
func (p *parsed) readPriority(raw []byte) *openai.Error {
	if len(raw) == 0 || isNull(raw) {
		return nil
	}
	n, err := strconv.Atoi(string(bytes.TrimSpace(raw)))
	if err != nil || n < -MaxPriority || n > MaxPriority {
		return invalidValue("priority", "priority must be a whole number in [%d, %d]", -MaxPriority, MaxPriority)
	}
	p.priority = n
	return nil
}
