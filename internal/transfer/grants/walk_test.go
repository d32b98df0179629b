package grants

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/baton-pd/baton/internal/transfer"
)

// The reference: flat lists that only grow, and every answer is found by looking through them.
type refSession struct {
	id     transfer.SessionID
	conns  []conn
	left   int // connections that have left
	owed   int // leaves and closes that are not settled
	closed bool
	over   bool // nothing gets in
	lost   bool
	told   bool // Fenced
}

type refGrant struct {
	id      transfer.GrantID
	s       *refSession
	in      []conn // one entry a writer
	revoked bool
	drained bool
	asked   bool
}

type reference struct {
	fences   bool
	sessions []*refSession
	grants   []*refGrant
}

func (r *reference) session(id transfer.SessionID) *refSession {
	for _, s := range r.sessions {
		if s.id == id {
			return s
		}
	}
	return nil
}

func (r *reference) grant(id transfer.GrantID) *refGrant {
	for _, g := range r.grants {
		if g.id == id {
			return g
		}
	}
	return nil
}

func (r *reference) revoke(g *refGrant) {
	if !g.revoked {
		g.revoked = true
		g.drained = !r.fences && len(g.in) == 0
	}
}

func (r *reference) end(s *refSession) {
	s.over = true
	for _, g := range r.grants {
		if g.s == s {
			r.revoke(g)
		}
	}
}

// counts by looking at everything.
func (r *reference) counts() (n Counts) {
	for _, s := range r.sessions {
		if !s.closed {
			n.Sessions++
		}
		if !s.told {
			n.Unfenced++
		}
	}
	for _, g := range r.grants {
		switch {
		case !g.revoked:
			n.Grants++
		case !g.drained:
			n.Draining++
		}
	}
	return n
}

// leave returns the grants of which Revoked is due.
func (r *reference) leave(s *refSession, c conn, gone bool) (due []transfer.GrantID) {
	s.left++
	s.owed++
	last := s.left == len(s.conns)
	for _, g := range r.grants {
		if !gone || g.s != s || g.revoked && last && !s.lost {
			continue
		}
		had := len(g.in)
		g.in = slices.DeleteFunc(g.in, func(o conn) bool { return o == c })
		if g.revoked && had > 0 && len(g.in) == 0 {
			g.drained = true
			if g.asked {
				due = append(due, g.id)
			}
		}
	}
	s.lost = s.lost || !gone
	if last || !gone {
		r.end(s)
	}
	return due
}

// settled: a leave or close of s was carried out, and with it the fences of list.
func (r *reference) settled(s *refSession, list []transfer.GrantID) (fenced bool) {
	s.owed--
	for _, id := range list {
		r.grant(id).drained = true
	}
	if !s.over || s.owed > 0 || s.left < len(s.conns) || s.lost {
		return false
	}
	for _, g := range r.grants {
		g.drained = g.drained || g.s == s
	}
	s.told = true
	return true
}

// walk drives ledger and reference with the same random events.
type walk struct {
	t       *testing.T
	rnd     *rand.Rand
	l       ledger[conn, own]
	r       reference
	in      map[conn]*Session[conn, own]
	owed    []due[conn, own]
	nextID  uint64
	history []string
	sealed  map[transfer.GrantID][]conn // writers that only Seal finds
}

func (w *walk) check(ok bool, format string, args ...any) {
	if !ok {
		w.t.Helper()
		w.t.Fatalf("after %q: %s", w.history, fmt.Sprintf(format, args...))
	}
}

func (w *walk) id() uint64 { w.nextID++; return w.nextID }

// old is a session id that was given, mostly.
func (w *walk) old() transfer.SessionID {
	if len(w.r.sessions) == 0 || w.rnd.IntN(20) == 0 {
		return transfer.SessionID(w.id())
	}
	return w.r.sessions[w.rnd.IntN(len(w.r.sessions))].id
}

func (w *walk) oldGrant() transfer.GrantID {
	if len(w.r.grants) == 0 || w.rnd.IntN(20) == 0 {
		return transfer.GrantID(w.id())
	}
	return w.r.grants[w.rnd.IntN(len(w.r.grants))].id
}

func (w *walk) step() {
	switch w.rnd.IntN(12) {
	case 0:
		w.open()
	case 1, 2:
		w.join()
	case 3, 4:
		w.allow()
	case 5:
		w.leave()
	case 6, 7:
		w.enter()
	case 8:
		w.exit()
	case 9:
		w.revoke()
	case 10:
		w.close()
	case 11:
		w.settle()
	}
	if got, want := (Counts{len(w.l.sessions), len(w.l.unfenced), len(w.l.grants), len(w.l.draining)}), w.r.counts(); got != want {
		w.check(false, "holds %+v, want %+v", got, want)
	}
}

func (w *walk) open() {
	id := transfer.SessionID(w.id())
	again := len(w.r.sessions) > 0 && w.rnd.IntN(4) == 0
	if again {
		id = w.old()
	}
	s := w.r.session(id)
	if s != nil && s.closed {
		return // the contract excludes a second life
	}
	w.history = append(w.history, fmt.Sprint("open ", id))
	err := w.l.open(id)
	w.check((err == nil) == (s == nil) && (err == nil || errors.Is(err, transfer.ErrSession)), "open: %v", err)
	if s == nil {
		w.r.sessions = append(w.r.sessions, &refSession{id: id})
	}
}

func (w *walk) join() {
	id, c := w.old(), conn(w.id())
	w.history = append(w.history, fmt.Sprint("join ", id, c))
	s := w.r.session(id)
	got, err := w.l.join(c, id)
	switch {
	case s == nil || s.over || s.closed:
		w.check(errors.Is(err, transfer.ErrSession), "join: %v", err)
	case len(s.conns)-s.left >= w.l.cfg.Conns:
		w.check(errors.Is(err, transfer.ErrBusy), "join: %v", err)
	default:
		w.check(err == nil && got.ID == id, "join: %v", err)
		s.conns = append(s.conns, c)
		w.in[c] = got
	}
}

func (w *walk) allow() {
	id := transfer.GrantID(w.id())
	if w.rnd.IntN(6) == 0 {
		id = w.oldGrant()
	}
	g := grantOf(id, w.old())
	w.history = append(w.history, fmt.Sprint("allow ", id, " of ", g.Session))
	s, known := w.r.session(g.Session), w.r.grant(id)
	if known != nil && known.drained {
		return // the contract excludes a second life
	}
	err := w.l.allow(g)
	switch {
	case s == nil || s.over || s.closed:
		w.check(errors.Is(err, transfer.ErrSession), "allow: %v", err)
	case known != nil:
		w.check(errors.Is(err, transfer.ErrGrant), "allow: %v", err)
	default:
		w.check(err == nil, "allow: %v", err)
		w.r.grants = append(w.r.grants, &refGrant{id: id, s: s})
	}
}

// someConn is a connection that has not left, with its session.
func (w *walk) someConn() (conn, *refSession) {
	keys := slices.Sorted(maps.Keys(w.in))
	if len(keys) == 0 {
		return 0, nil
	}
	c := keys[w.rnd.IntN(len(keys))]
	return c, w.r.session(w.in[c].ID)
}

func (w *walk) leave() {
	c, s := w.someConn()
	if s == nil {
		return
	}
	gone := w.rnd.IntN(8) > 0
	w.history = append(w.history, fmt.Sprint("leave ", c, gone))
	d := w.l.leave(c, w.in[c], gone)
	delete(w.in, c)
	want := w.r.leave(s, c, gone)
	slices.Sort(d.revoked)
	slices.Sort(want)
	w.check(slices.Equal(d.revoked, want), "leave: Revoked of %v, want %v", d.revoked, want)
	w.owed = append(w.owed, d)
}

// enter counts a writer in; one of two only in the shared memory, so to speak, where Seal finds it.
func (w *walk) enter() {
	c, s := w.someConn()
	g := w.r.grant(w.oldGrant())
	if s == nil || g == nil {
		return
	}
	w.history = append(w.history, fmt.Sprint("enter ", c, g.id))
	live := w.l.live(w.in[c], g.id)
	w.check((live != nil) == (g.s == s && !g.revoked), "enter: live %v", live != nil)
	if live == nil || w.r.fences {
		return
	}
	if w.rnd.IntN(2) == 0 && !slices.Contains(w.sealed[g.id], c) {
		w.sealed[g.id] = append(w.sealed[g.id], c)
	} else {
		w.check(w.l.enter(c, live), "enter: refused")
	}
	g.in = append(g.in, c)
}

func (w *walk) exit() {
	g := w.r.grant(w.oldGrant())
	c, s := w.someConn()
	if g == nil || s == nil || g.s != s {
		return
	}
	w.history = append(w.history, fmt.Sprint("exit ", c, g.id))
	i := slices.Index(g.in, c)
	if k := slices.Index(w.sealed[g.id], c); k >= 0 && !g.revoked { // leaves without a word
		w.sealed[g.id] = slices.Delete(w.sealed[g.id], k, k+1)
		g.in = slices.Delete(g.in, i, i+1)
		return
	}
	real := w.l.grants[g.id]
	if real == nil {
		if real = w.l.draining[g.id]; real == nil {
			return
		}
		w.check(!w.l.enter(c, real), "enter: a revoked grant lets in")
	}
	revoked, ok := w.l.exit(c, real)
	w.check(ok == (i >= 0), "exit: %v", ok)
	if i < 0 {
		return
	}
	g.in = slices.Delete(g.in, i, i+1)
	g.drained = g.revoked && len(g.in) == 0
	w.check(revoked == (g.drained && g.asked), "exit: Revoked %v", revoked)
}

func (w *walk) revoke() {
	id := w.oldGrant()
	w.history = append(w.history, fmt.Sprint("revoke ", id))
	fence, ok := w.l.revoke(id)
	g := w.r.grant(id)
	if g == nil {
		w.check(fence == nil && ok, "revoke of an unknown grant: %v", ok)
		return
	}
	w.r.revoke(g)
	w.check((fence != nil) == (w.r.fences && !g.drained), "revoke: to be fenced %v", fence != nil)
	if fence != nil {
		g.drained = true
		w.l.drained(fence)
	}
	w.check(ok == g.drained, "revoke: %v", ok)
	g.asked = !ok
}

func (w *walk) close() {
	id := w.old()
	w.history = append(w.history, fmt.Sprint("close ", id))
	d, ok := w.l.close(id)
	s := w.r.session(id)
	w.check(ok == (s != nil && !s.over && !s.closed), "close: something to do %v", ok)
	if s == nil {
		return
	}
	if s.closed = true; !ok {
		return
	}
	s.owed++
	w.r.end(s)
	w.check(len(d.dismiss) == len(s.conns)-s.left, "close: dismisses %v", d.dismiss)
	w.owed = append(w.owed, d)
}

// settle carries out one of the leaves and closes.
func (w *walk) settle() {
	if len(w.owed) == 0 {
		return
	}
	i := w.rnd.IntN(len(w.owed))
	d := w.owed[i]
	w.owed = slices.Delete(w.owed, i, i+1)
	w.history = append(w.history, fmt.Sprint("settle ", d.release.ID))
	var list []transfer.GrantID
	for _, g := range d.fence {
		list = append(list, g.ID)
	}
	got := w.l.release(d.release, d.fence)
	want := w.r.settled(w.r.session(d.release.ID), list)
	w.check(got == want, "settle: fenced %v, want %v", got, want)
}

// TestRandomWalk: whatever happens, in whatever order, every answer is the reference's; and at last nothing is left but
// sessions that can not be fenced.
func TestRandomWalk(t *testing.T) {
	for seed := range uint64(4000) {
		w := &walk{t: t, rnd: rand.New(rand.NewPCG(seed, 6)), in: map[conn]*Session[conn, own]{}, sealed: map[transfer.GrantID][]conn{}}
		h := Hooks[conn, own]{Seal: func(g *Grant[conn, own]) []conn { return w.sealed[g.ID] }}
		if w.r.fences = seed%2 == 0; w.r.fences {
			h = Hooks[conn, own]{Fence: func(*Grant[conn, own]) {}}
		}
		h = publishing(h)
		part := h.Part
		h.Part = func(c conn, g *Grant[conn, own]) {
			w.sealed[g.ID] = slices.DeleteFunc(w.sealed[g.ID], func(o conn) bool { return o == c })
			part(c, g)
		}
		w.l = newLedger(Config{Kind: "test", Size: size, Conns: 2}, h)
		for range 120 {
			w.step()
		}
		for _, s := range w.r.sessions { // the end
			d, ok := w.l.close(s.id)
			if s.closed = true; ok {
				s.owed++
				w.r.end(s)
				w.owed = append(w.owed, d)
			}
		}
		for len(w.in) > 0 {
			w.leave()
		}
		for len(w.owed) > 0 {
			w.settle()
		}
		for s := range w.l.unfenced {
			w.check(s.lost, "session %d is not fenced", s.ID)
		}
		for id, g := range w.l.draining {
			w.check(g.sess.lost, "grant %d is not drained", id)
		}
		w.check(len(w.l.sessions)+len(w.l.grants) == 0, "left: %d sessions, %d grants", len(w.l.sessions), len(w.l.grants))
	}
}
