package httpapi

import (
	"net/http"
	"time"

	"github.com/baton-pd/baton/internal/otel"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sched"
)

// way is what a prompt's spans are made of, when it has ended.
type way struct {
	times sched.Phases
	room  string // "": none
	local bool   // on a decode worker: the prompt was computed here
}

// ways of all prompts; only asked for when traces are on.
func (j *job) ways() []way {
	out := make([]way, len(j.streams))
	for i, st := range j.streams {
		out[i] = way{times: st.Phases(), local: j.s.Role == RoleDecode && len(j.req.Bootstrap) == 0}
		if i < len(j.req.Bootstrap) {
			out[i].room = j.req.Bootstrap[i].Key.String()
		}
	}
	return out
}

// trace makes the spans of a generation that has ended, below the router's: they need nothing but times, so a request that
// runs pays nothing for them.
func (s *server) trace(w *response, r *http.Request, rt route) {
	root := s.Tracer.Server(r.Header, http.MethodPost+" "+rt.name, w.start)
	if !root.Recording() {
		root.End(time.Time{})
		return
	}
	root.Set(otel.String(otel.Method, r.Method), otel.String(otel.Route, rt.name), otel.Int(otel.Status, w.status), otel.String(otel.Request, w.id),
		otel.String(otel.Leg, s.Role), otel.String(otel.Worker, s.Worker), otel.String(otel.Model, s.Info.ModelName),
		otel.Int(otel.InputTokens, w.promptToks), otel.Int(otel.OutputTokens, w.completeToks))
	if w.rooms != "" {
		root.Set(otel.String(otel.Room, w.rooms))
	}
	if c := w.cause; c != nil {
		root.Set(otel.String(otel.Side, c.Side.String()), otel.String(otel.Phase, c.Phase))
		if w.status/100 == 4 && c.Code != room.CodeAborted && c.Code != room.CodeClientGone { // the client's fault is no error here
			root.Set(otel.String(otel.Cause, string(c.Code)))
		} else {
			root.Fail(string(c.Code), c.Error())
		}
	}
	for i, p := range w.ways {
		parent, many := root, len(w.ways) > 1
		if many {
			parent = root.Child("prompt", p.times.Submitted)
			parent.Set(otel.Int(otel.Prompt, i), otel.String(otel.Room, p.room))
		}
		s.traceStages(w, parent, p)
		if many {
			parent.End(p.times.Ended)
		}
	}
	root.End(time.Time{})
}

// stage is a stretch of a prompt's way.
type stage struct {
	name     string
	from, to time.Time // zero: not reached
	chunks   bool      // the prompt's chunks were computed in it
	events   []sched.ChunkTime
}

// stages of a prompt on this worker, by the scheduler's phases.
func (s *server) stages(p way) []stage {
	t := p.times
	switch {
	case s.Role == RolePrefill:
		return []stage{
			{name: "bootstrap", from: t.Submitted, to: t.Granted}, {name: "queue", from: t.Granted, to: t.Reserved},
			{name: "prefill", from: t.Reserved, to: t.Computed, chunks: true}, {name: "transfer", from: t.Sent, to: t.Transferred},
		}
	case p.local:
		return []stage{
			{name: "queue", from: t.Submitted, to: t.Reserved}, {name: "prefill", from: t.Reserved, to: t.Transferred, chunks: true},
			{name: "decode", from: t.Transferred, to: t.Ended},
		}
	default:
		return []stage{
			{name: "queue", from: t.Submitted, to: t.Reserved}, {name: "bootstrap", from: t.Reserved, to: t.Granted},
			{name: "transfer", from: t.Granted, to: t.Landed, events: t.Chunks}, {name: "import", from: t.Landed, to: t.Transferred},
			{name: "decode", from: t.Transferred, to: t.Ended},
		}
	}
}

// traceStages makes the spans of one prompt. A stage without an end is where the request failed.
func (s *server) traceStages(w *response, parent *otel.Span, p way) {
	for _, st := range s.stages(p) {
		failed := w.cause != nil && (st.to.IsZero() || st.name == "decode")
		if st.from.IsZero() || st.to.IsZero() && !failed {
			continue
		}
		span := parent.Child(st.name, st.from)
		if p.room != "" {
			span.Set(otel.String(otel.Room, p.room))
		}
		if st.chunks {
			for i, c := range p.times.Chunks {
				chunk := span.Child("chunk", c.From)
				chunk.Set(otel.Int(otel.Chunk, i))
				chunk.End(c.To)
			}
		}
		for _, c := range st.events {
			span.EventAt("chunk_landed", c.To)
		}
		if st.name == "decode" && !p.times.FirstToken.IsZero() {
			span.EventAt("first_token", p.times.FirstToken)
		}
		if failed {
			span.Fail(string(w.cause.Code), w.cause.Error())
		}
		if st.to.IsZero() {
			st.to = p.times.Ended
		}
		span.End(st.to)
	}
}
