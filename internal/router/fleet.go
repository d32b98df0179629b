package router

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"

	"github.com/baton-pd/baton/internal/room"
)

// Sources of workers that are the router's own. Others are named by whoever calls [Router.SetWorkers].
const (
	SourceStatic = "static" // given in Config
	SourceAPI    = "api"    // added by POST /workers
)

// errClosed is what a change of the fleet gets after Close.
var errClosed = errors.New("router: the router is shutting down")

// member is a worker and why it is there. A worker takes requests while a source lists it and the operator has not
// drained it; otherwise it finishes what it has. One that no source lists is forgotten as soon as it is idle.
// Its fields are the roster's.
type member struct {
	w       *worker
	key     string // side and host:port: what makes a worker the same
	backend Backend
	stop    context.CancelFunc // ends its probes
	from    map[string]bool    // the sources that list it
	drained bool               // by the operator
}

func (m *member) serving() bool { return len(m.from) > 0 && !m.drained }

// roster is everything the router knows as a worker, in the order of arrival. Its lock comes before the queue's and the
// fleets'.
type roster struct {
	mu      sync.Mutex
	members []*member
	idle    chan struct{}     // asks for a look at who may be forgotten; buffered
	stale   map[string]string // source: why its last update failed, and the set before it stays; "" if it did not
}

// workerID is a worker's name in /workers: stable, from its leg and URL.
func workerID(w *worker) string { return w.side.String() + "-" + w.name }

// listing is a set that a source wants, checked.
type listing struct {
	b    Backend
	side room.Side
	w    *worker // for use if the worker is new
	key  string
}

// checkSet parses a whole set, so that a wrong one changes nothing.
func (r *Router) checkSet(prefills, decodes []Backend) ([]listing, error) {
	out := make([]listing, 0, len(prefills)+len(decodes))
	seen := map[string]bool{}
	for i, b := range slices.Concat(prefills, decodes) {
		side := room.SideSender
		if i >= len(prefills) {
			side = room.SideReceiver
		}
		w, err := r.newWorker(b, side)
		if err != nil {
			return nil, err
		}
		l := listing{b: b, side: side, w: w, key: workerID(w)}
		if seen[l.key] {
			return nil, fmt.Errorf("router: %s worker %s is given twice", side, w.name)
		}
		seen[l.key] = true
		out = append(out, l)
	}
	return out, nil
}

// SetWorkers makes prefills and decodes what source lists, in place of what it listed before; the fleet is the union
// of all sources. Streams go on whatever changes: a worker that no source lists any more gets no new requests and is
// forgotten when its last one has ended; one that comes back before is used again. A set with anything wrong in it is
// refused as a whole, counted and logged, and the one before stays.
func (r *Router) SetWorkers(source string, prefills, decodes []Backend) error {
	set, err := r.checkSet(prefills, decodes)
	if err != nil {
		r.SourceFailed(source, err)
		return err
	}
	return r.change(source, func() {
		wanted := make(map[string]bool, len(set))
		for _, l := range set {
			wanted[l.key] = true
			r.list(source, l)
		}
		for _, m := range r.roster.members {
			if !wanted[m.key] {
				delete(m.from, source)
			}
		}
	})
}

// SourceFailed tells that source could not say what its workers are: the last good set stays.
func (r *Router) SourceFailed(source string, err error) {
	r.fm.updates.WithLabelValues(source, "failed").Inc()
	r.roster.mu.Lock()
	defer r.roster.mu.Unlock()
	if r.roster.stale[source] != err.Error() { // a source that retries would fill the log
		r.roster.stale[source] = err.Error()
		r.cfg.Log.Warn("no new set of workers; the last good one stays", "source", source, "err", err)
	}
}

// change runs f on the roster and lets its result take effect.
func (r *Router) change(source string, f func()) error {
	if !r.group.enter() {
		return errClosed
	}
	defer r.group.leave()
	r.roster.mu.Lock()
	defer r.roster.mu.Unlock()
	if r.roster.stale[source] != "" {
		r.cfg.Log.Info("workers can be told again", "source", source)
	}
	r.roster.stale[source] = ""
	r.fm.updates.WithLabelValues(source, "ok").Inc()
	f()
	r.settleFleet()
	return nil
}

// list puts one worker into source's set. Under the roster's lock, by a member of the group.
func (r *Router) list(source string, l listing) {
	i := slices.IndexFunc(r.roster.members, func(m *member) bool { return m.key == l.key })
	if i < 0 {
		r.cfg.Log.Info("worker joins", "leg", l.side.String(), "worker", l.w.name, "source", source)
		i = len(r.roster.members)
		r.roster.members = append(r.roster.members, &member{key: l.key, from: map[string]bool{}})
	}
	m := r.roster.members[i]
	m.from[source] = true
	if m.w != nil && reflect.DeepEqual(m.backend, l.b) {
		return
	}
	if m.w != nil {
		// The same address with, say, another bootstrap port: another process. Legs that run end on the old terms.
		r.cfg.Log.Info("worker is replaced", "leg", l.side.String(), "worker", l.w.name, "source", source)
		m.w.leaving.Store(true)
		m.stop()
	}
	ctx, stop := context.WithCancel(&r.base)
	l.w.series = r.series(l.w)
	m.w, m.backend, m.stop = l.w, l.b, stop
	r.group.spawn(func() {
		l.w.watch(ctx, r.cfg.HealthInterval, r.cfg.HealthTimeout)
		l.w.closeIdle()
	})
}

// settleFleet forgets members that are not listed and idle, and publishes those that take requests. Under the roster's lock.
func (r *Router) settleFleet() {
	// First nobody may be sent to those that leave, then it counts whether they are idle.
	serving := map[room.Side][]*worker{}
	leaving := map[room.Side][]*worker{}
	for _, m := range r.roster.members {
		side, was := m.w.side, m.w.leaving.Load()
		m.w.leaving.Store(!m.serving())
		if m.serving() {
			serving[side] = append(serving[side], m.w)
		} else {
			leaving[side] = append(leaving[side], m.w)
			if !was {
				r.cfg.Log.Info("worker is drained", "leg", side.String(), "worker", m.w.name, "inflight", m.w.inflight.Load())
			}
		}
	}
	for side, f := range map[room.Side]*fleet{room.SideSender: &r.prefills, room.SideReceiver: &r.decodes} {
		now := leaving[side]
		f.leaving.Store(&now)
		if !slices.Equal(f.workers(), serving[side]) {
			r.replace(f, serving[side])
		}
	}
	r.roster.members = slices.DeleteFunc(r.roster.members, func(m *member) bool {
		if len(m.from) > 0 || m.w.inflight.Load() > 0 {
			return false
		}
		r.forget(m)
		return true
	})
}

// forget lets go of a member's resources.
func (r *Router) forget(m *member) {
	m.stop()
	m.w.closeIdle() // and those that become idle later
	r.forgetWorker(m.w)
	r.cfg.Log.Info("worker has left", "leg", m.w.side.String(), "worker", m.w.name)
}

// rested is called when a leg at w has ended: a worker that leaves may be idle now. It takes no lock.
func (r *Router) rested(w *worker) {
	if !w.leaving.Load() {
		return
	}
	w.closeIdle()
	select {
	case r.roster.idle <- struct{}{}:
	default: // it is to look already
	}
}

// keepFleet forgets workers that have left, until ctx ends.
func (r *Router) keepFleet(ctx context.Context) {
	for {
		select {
		case <-r.roster.idle:
			r.roster.mu.Lock()
			r.settleFleet()
			r.roster.mu.Unlock()
		case <-ctx.Done():
			return
		}
	}
}

// all lists every worker, prefill first, with those that leave.
func (r *Router) all() []*worker {
	r.roster.mu.Lock()
	defer r.roster.mu.Unlock()
	var prefills, decodes []*worker
	for _, m := range r.roster.members {
		if m.w.side == room.SideSender {
			prefills = append(prefills, m.w)
		} else {
			decodes = append(decodes, m.w)
		}
	}
	return append(prefills, decodes...)
}
