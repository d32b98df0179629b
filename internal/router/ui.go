package router

import (
	"bytes"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/router/record"
	"github.com/baton-pd/baton/internal/webui"
)

const (
	// uiEvery is the time between two states that a viewer gets.
	uiEvery = 500 * time.Millisecond
	// uiViewers is how many may watch at a time: each costs some milliseconds of computing a second.
	uiViewers = 16
	// uiRecords is how many requests a viewer is told of at most.
	uiRecords = 320
	// uiWrite bounds one write to a viewer; one that does not read is cut.
	uiWrite = 10 * time.Second
	// uiLinger is how long after its end a request is looked at again: its workers may tell its last a moment later.
	uiLinger = 5 * time.Second
)

// ui is the live part of the page.
type ui struct {
	r       *Router
	viewers atomic.Int64
	reports reports
}

// uiRoutes adds the page, unless it is off.
func (r *Router) uiRoutes(table map[string]route) {
	if r.cfg.NoUI {
		return
	}
	page := webui.Handler()
	for _, path := range []string{webui.Path, webui.Path + "/app.js", webui.Path + "/style.css", webui.Path + "/icon.svg"} {
		table[path] = route{http.MethodGet: page.ServeHTTP}
	}
	u := &ui{r: r}
	u.reports.byRoom = map[uint64]*pairReport{}
	table[webui.EventsPath] = route{http.MethodGet: u.events}
}

// uiAccess is who may use the page's paths; ok is false for others. The page itself holds nothing; a client sees its own requests in the events,
// an operator everything.
func uiAccess(path string) (a edge.Access, ok bool) {
	switch path {
	case webui.EventsPath:
		return edge.Client, true
	case webui.Path, webui.Path + "/app.js", webui.Path + "/style.css", webui.Path + "/icon.svg":
		return edge.Anyone, true
	}
	return 0, false
}

// events streams states until the viewer leaves or the router ends.
func (u *ui) events(w http.ResponseWriter, req *http.Request) {
	if u.viewers.Add(1) > uiViewers {
		u.viewers.Add(-1)
		openai.WriteError(w, routerFailure(room.CodeCapacity, true, "%d pages are open already", uiViewers).err)
		return
	}
	defer u.viewers.Add(-1)
	if !u.r.group.enter() {
		openai.WriteError(w, failureOf(&u.r.base).err)
		return
	}
	defer u.r.group.leave()
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	ctl := http.NewResponseController(w)
	v := &viewer{u: u, who: edge.From(req.Context()), sent: map[uint64]sent{}}
	tick := time.NewTicker(uiEvery)
	defer tick.Stop()
	var b bytes.Buffer
	for !u.r.gate.draining.Load() { // a page must not hold up a router that closes
		u.reports.refresh(req.Context(), u.r)
		body, err := openai.Marshal(v.state(time.Now()))
		if err != nil {
			return // it always marshals
		}
		b.Reset()
		b.WriteString("event: state\ndata: ")
		b.Write(body)
		b.WriteString("\n\n")
		_ = ctl.SetWriteDeadline(time.Now().Add(uiWrite)) // a recorder in a test has none
		if _, err := w.Write(b.Bytes()); err != nil {
			return
		}
		if ctl.Flush() != nil {
			return
		}
		select {
		case <-tick.C:
		case <-req.Context().Done():
			return
		case <-u.r.base.Done():
			return
		}
	}
}

// viewer is one page that watches.
type viewer struct {
	u    *ui
	who  *edge.Caller // nil: no keys are wanted
	sent map[uint64]sent
}

// sent is what a viewer knows of a request.
type sent struct {
	version uint64
	final   bool // nothing more can come
}

// operator: the viewer may see the fleet and everybody's requests.
func (v *viewer) operator() bool { return v.who == nil || v.who.Operator }

// state is what has changed since the viewer's last one. The first has everything.
func (v *viewer) state(now time.Time) uiState {
	r := v.u.r
	s := uiState{
		Started: r.started.UnixMilli(), Version: r.cfg.Version, Inflight: int(r.inflight.Load()), Queued: r.queue.Stats().Waiting, Operator: v.operator(),
		Policy: r.cfg.PrefillPolicy,
	}
	if r.cfg.DecodePolicy != r.cfg.PrefillPolicy {
		s.Policy += " / " + r.cfg.DecodePolicy
	}
	records := r.journal.Latest(uiRecords)
	known := map[uint64]sent{}
	for i := range records {
		rec := &records[i]
		if !v.operator() && rec.Key != v.who.Name() {
			continue
		}
		live := rec.Outcome == ""
		old, had := v.sent[rec.ID]
		if !live && had && old.final {
			known[rec.ID] = old
			continue
		}
		final := !live && now.Sub(rec.Start.Add(rec.End)) > uiLinger
		s.Requests = append(s.Requests, v.u.request(rec, now))
		known[rec.ID] = sent{version: rec.Version, final: final}
	}
	v.sent = known // what the journal has forgotten is forgotten here
	if s.Operator {
		s.Workers, s.Phases = v.u.reports.workers(r.views()), v.u.phases(records)
	}
	return s
}

// phases counts the requests by where they are: at the router by its own records, at workers by what they told.
func (u *ui) phases(records []record.Record) map[string]map[string]int {
	router := map[string]int{}
	for i := range records {
		if p := records[i].Phase(); p != "ended" {
			router[p]++
		}
	}
	router["waiting"] += router["routing"] // between two attempts, for microseconds
	delete(router, "routing")
	out := u.reports.phases()
	out["router"] = router
	return out
}
