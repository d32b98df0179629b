package grants

import (
	"fmt"
	"iter"
	"maps"
	"slices"

	"github.com/baton-pd/baton/internal/transfer"
)

// phase of a session, in this order, never back.
type phase uint8

const (
	open   phase = iota // by OpenSession; connections and grants get in
	ended               // by CloseSession or the last connection's end; nothing gets in, what is there goes
	fenced              // after the last reference: Sink.Fenced was, or is about to be, called. Never if lost
)

// Session is one generation of a writer. Its fields but ID are the book's.
type Session[C comparable, P any] struct {
	ID transfer.SessionID

	phase  phase
	conns  map[C]struct{}
	grants map[*Grant[C, P]]struct{} // live ones
	// refs counts the connections that have not left, and an ending that is not yet carried out. While it
	// is above 0 the session is not fenced.
	refs int
	lost bool // a connection was given up although its writer may live: never fenced
}

// Grants are the live ones, to be read only. For Join.
func (s *Session[C, P]) Grants() map[*Grant[C, P]]struct{} { return s.grants }

// Grant is one permission. The embedded [transfer.Grant] never changes; its Spans are sorted by offset, disjoint,
// inside the memory and not empty. Own is the transport's, which guards it.
type Grant[C comparable, P any] struct {
	transfer.Grant
	Own P

	sess  *Session[C, P]
	seats []seat[C] // writers inside; at most one entry a connection
	live  bool
	asked bool // Revoke has returned false: Revoked is due
}

// seat is a connection with n >= 1 writers inside a grant.
type seat[C comparable] struct {
	conn C
	n    int
}

// Inside are the connections with a writer inside, as far as the book knows. For Seal.
func (g *Grant[C, P]) Inside() iter.Seq[C] {
	return func(yield func(C) bool) {
		for _, s := range g.seats {
			if !yield(s.conn) {
				return
			}
		}
	}
}

func (g *Grant[C, P]) seat(c C) int {
	return slices.IndexFunc(g.seats, func(s seat[C]) bool { return s.conn == c })
}

func (g *Grant[C, P]) sit(c C) {
	if i := g.seat(c); i >= 0 {
		g.seats[i].n++
		return
	}
	g.seats = append(g.seats, seat[C]{c, 1})
}

// stand takes all writers of c out; false: there was none.
func (g *Grant[C, P]) stand(c C) bool {
	i := g.seat(c)
	if i >= 0 {
		g.seats = slices.Delete(g.seats, i, i+1)
	}
	return i >= 0
}

// ledger is the book without its lock: every method is total and finishes at once, and what it can not do under a
// lock it returns.
type ledger[C comparable, P any] struct {
	cfg      Config
	hooks    Hooks[C, P]
	closed   bool
	sessions map[transfer.SessionID]*Session[C, P] // from OpenSession until CloseSession
	unfenced map[*Session[C, P]]struct{}           // from OpenSession until fenced
	grants   map[transfer.GrantID]*Grant[C, P]     // live
	// draining are revoked grants under which a byte may still be stored: with a writer inside, or, of a transport
	// that fences, until Fence has returned. Disjoint from grants.
	draining map[transfer.GrantID]*Grant[C, P]
}

func newLedger[C comparable, P any](cfg Config, h Hooks[C, P]) ledger[C, P] {
	return ledger[C, P]{
		cfg: cfg, hooks: h,
		sessions: make(map[transfer.SessionID]*Session[C, P]),
		unfenced: make(map[*Session[C, P]]struct{}),
		grants:   make(map[transfer.GrantID]*Grant[C, P]),
		draining: make(map[transfer.GrantID]*Grant[C, P]),
	}
}

// due is what a transition leaves to be done without the lock, in this order.
type due[C comparable, P any] struct {
	fence   []*Grant[C, P]
	dismiss []C
	revoked []transfer.GrantID
	release *Session[C, P] // drops the reference that this held
}

func (l *ledger[C, P]) open(id transfer.SessionID) error {
	switch {
	case l.closed:
		return transfer.ErrClosed
	case id == 0 || l.sessions[id] != nil:
		return fmt.Errorf("%s: open session %d: %w", l.cfg.Kind, id, transfer.ErrSession)
	}
	s := &Session[C, P]{ID: id, conns: make(map[C]struct{}), grants: make(map[*Grant[C, P]]struct{})}
	l.sessions[id] = s
	l.unfenced[s] = struct{}{}
	return nil
}

// close forgets id and ends its session. False: there is nothing to do.
func (l *ledger[C, P]) close(id transfer.SessionID) (due[C, P], bool) {
	s := l.sessions[id]
	delete(l.sessions, id)
	if s == nil || s.phase != open {
		return due[C, P]{}, false // unknown, or what is left of it goes by itself
	}
	s.refs++
	return due[C, P]{fence: l.end(s), dismiss: slices.Collect(maps.Keys(s.conns)), release: s}, true
}

// end lets nothing more into an open s, revokes its grants and returns those to be fenced, also by a Revoke
// that has not done so yet.
func (l *ledger[C, P]) end(s *Session[C, P]) (list []*Grant[C, P]) {
	s.phase = ended
	for g := range s.grants {
		l.seal(g)
	}
	if l.hooks.Fence == nil {
		return nil
	}
	for _, g := range l.draining {
		if g.sess == s {
			list = append(list, g)
		}
	}
	return list
}

// seal revokes a live g.
func (l *ledger[C, P]) seal(g *Grant[C, P]) {
	g.live = false
	delete(l.grants, g.ID)
	delete(g.sess.grants, g)
	if l.hooks.Seal != nil {
		for _, c := range l.hooks.Seal(g) {
			g.sit(c)
		}
	}
	if l.hooks.Fence != nil || len(g.seats) > 0 {
		l.draining[g.ID] = g
	}
}

// release drops a reference of s after its grants in fenced were fenced, and reports whether the whole session is
// now, which it does once.
func (l *ledger[C, P]) release(s *Session[C, P], list []*Grant[C, P]) bool {
	for _, g := range list {
		l.drained(g)
	}
	s.refs--
	if s.refs > 0 || s.phase != ended || s.lost {
		return false
	}
	s.phase = fenced
	delete(l.unfenced, s)
	maps.DeleteFunc(l.draining, func(_ transfer.GrantID, g *Grant[C, P]) bool { return g.sess == s })
	return true
}

// drained: no byte is stored under a revoked g any more.
func (l *ledger[C, P]) drained(g *Grant[C, P]) {
	if l.draining[g.ID] == g {
		delete(l.draining, g.ID)
	}
}

// allow makes g, whose spans are right, live.
func (l *ledger[C, P]) allow(g transfer.Grant) error {
	s := l.sessions[g.Session]
	switch {
	case l.closed:
		return transfer.ErrClosed
	case s == nil || s.phase != open:
		return fmt.Errorf("%s: allow grant %d of session %d: %w", l.cfg.Kind, g.ID, g.Session, transfer.ErrSession)
	case g.ID == 0 || l.grants[g.ID] != nil || l.draining[g.ID] != nil:
		return fmt.Errorf("%s: allow grant %d: id is 0 or in use: %w", l.cfg.Kind, g.ID, transfer.ErrGrant)
	}
	live := &Grant[C, P]{Grant: g, sess: s, live: true}
	if l.hooks.Allow != nil {
		if err := l.hooks.Allow(live, s.conns); err != nil {
			return fmt.Errorf("%s: allow grant %d: %w", l.cfg.Kind, g.ID, err)
		}
	}
	l.grants[g.ID] = live
	s.grants[live] = struct{}{}
	return nil
}

// revoke ends grant id. Not nil: when the transport has fenced it, it is drained. ok: no byte is stored under it then.
func (l *ledger[C, P]) revoke(id transfer.GrantID) (fence *Grant[C, P], ok bool) {
	if g := l.grants[id]; g != nil {
		l.seal(g)
	}
	g := l.draining[id]
	switch {
	case g == nil:
		return nil, true
	case l.hooks.Fence != nil:
		return g, true
	}
	g.asked = true
	return nil, false
}

// live is grant id, if it is live and s's.
func (l *ledger[C, P]) live(s *Session[C, P], id transfer.GrantID) *Grant[C, P] {
	if g := l.grants[id]; g != nil && g.sess == s {
		return g
	}
	return nil
}

// join makes c a connection of session id.
func (l *ledger[C, P]) join(c C, id transfer.SessionID) (*Session[C, P], error) {
	s := l.sessions[id]
	switch {
	case l.closed:
		return nil, transfer.ErrClosed
	case s == nil || s.phase != open:
		return nil, transfer.ErrSession
	case l.cfg.Conns > 0 && len(s.conns) >= l.cfg.Conns:
		return nil, transfer.ErrBusy
	case l.hooks.Join != nil && !l.hooks.Join(c, s):
		return nil, transfer.ErrBusy
	}
	s.conns[c] = struct{}{}
	s.refs++
	return s, nil
}

// leave takes c out of s, which ends with its last connection, or with one whose writer is not gone.
func (l *ledger[C, P]) leave(c C, s *Session[C, P], gone bool) due[C, P] {
	d := due[C, P]{release: s}
	delete(s.conns, c)
	if gone {
		d.revoked = l.unseat(c, s)
	}
	s.lost = s.lost || !gone
	if s.phase == open && (s.lost || len(s.conns) == 0) {
		d.fence, d.dismiss = l.end(s), slices.Collect(maps.Keys(s.conns))
	}
	return d
}

// unseat forgets c, whose writer is gone, in the grants of s and returns those for which Revoked is due. With the
// last connection of a session that is not lost Fenced comes instead; until then what it was inside counts as draining.
func (l *ledger[C, P]) unseat(c C, s *Session[C, P]) (revoked []transfer.GrantID) {
	for g := range s.grants {
		g.stand(c)
		if l.hooks.Part != nil {
			l.hooks.Part(c, g)
		}
	}
	if len(s.conns) == 0 && !s.lost {
		return nil
	}
	for id, g := range l.draining {
		if g.stand(c) && len(g.seats) == 0 {
			l.drained(g)
			if g.asked {
				revoked = append(revoked, id)
			}
		}
	}
	return revoked
}

// enter counts a writer of c into g. False: g is revoked.
func (l *ledger[C, P]) enter(c C, g *Grant[C, P]) bool {
	if g.live {
		g.sit(c)
	}
	return g.live
}

// exit counts a writer of c out of g; false: none is inside. revoked: Revoked is due.
func (l *ledger[C, P]) exit(c C, g *Grant[C, P]) (revoked, ok bool) {
	i := g.seat(c)
	if i < 0 {
		return false, false
	}
	if g.seats[i].n--; g.seats[i].n == 0 {
		g.stand(c)
	}
	if len(g.seats) > 0 || l.draining[g.ID] != g {
		return false, true
	}
	l.drained(g)
	return g.asked, true
}
