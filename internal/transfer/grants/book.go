// Package grants is the bookkeeping of one transport target: its sessions, the connections of each, and the grants
// under which these may write. The rules are here, once for all transports; what it takes to keep a byte from being
// stored, and to end a connection, is the transport's and comes in as [Hooks].
//
// A session ends by CloseSession or with its last connection; then nothing gets in any more and its grants are
// revoked. When every connection has left, it is fenced, and the Sink hears so exactly once. A revoked grant drains
// until no byte can be stored under it any more: until Fence has returned, of a transport that fences; otherwise
// until the last writer inside has left. Only then its id is forgotten and Revoke answers true.
//
// # Locks
//
// One mutex guards all of it, held for moments, never across I/O and never while the Sink is called. Order:
// locks of the Target's caller, the book's, those that the hooks under it take. Fence, Dismiss, Break and the
// Sink are called without it; Fence on the goroutine of who revokes, the rest of a CloseSession on one of its own, since
// its caller may hold a lock that the Sink wants too.
package grants

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
)

// Config describes a target.
type Config struct {
	Kind  string // the transport's name, for errors
	Size  uint64 // of the memory in bytes
	Conns int    // connections that a session may have at once; 0: any number
	Sink  transfer.Sink
}

// Hooks are what a transport does to its own connections C and with its own part P of a grant. Dismiss is needed, the others
// may be nil: nothing to do.
type Hooks[C comparable, P any] struct {
	// Under the book's lock: they do not wait and do not call the book.

	// Allow shows a new grant to the connections that its session has, which it only reads. An
	// error refuses it; nobody may know of it then.
	Allow func(g *Grant[C, P], conns map[C]struct{}) error
	// Join shows the live grants of its session to a new connection. False: there is no room, as with Config.Conns.
	Join func(c C, s *Session[C, P]) bool
	// Seal lets no further write into g and returns the connections with a writer inside, except those that
	// Enter has counted.
	Seal func(g *Grant[C, P]) []C
	// Part forgets c, whose writer is gone, in a live g.
	Part func(c C, g *Grant[C, P])

	// Without the lock, from any goroutine, several at once.

	// Fence returns when no byte will be stored under a revoked g any more: soon, whatever the peer does. It may be
	// called again. With it, the transport fences by Revoke alone, and Seal and Enter have no use.
	Fence func(g *Grant[C, P])
	// Dismiss tells the writer of c to go, perhaps after it has.
	Dismiss func(c C)
	// Break ends c although its writer may live.
	Break func(c C)
}

// Book is the book of one target. Its methods OpenSession, CloseSession, Allow and Revoke are those of [transfer.Target].
type Book[C comparable, P any] struct {
	hooks Hooks[C, P]
	cfg   Config
	// wg counts the goroutines of the target. Add only under mu and while !closed, or from a goroutine that is counted.
	wg sync.WaitGroup

	mu sync.Mutex
	l  ledger[C, P]
}

// New makes an empty book.
func New[C comparable, P any](cfg Config, h Hooks[C, P]) *Book[C, P] {
	return &Book[C, P]{cfg: cfg, hooks: h, l: newLedger(cfg, h)}
}

// Go runs f on a goroutine that Close waits for. Only before the target is known to anybody, from hooks under the lock, and
// from such goroutines.
func (b *Book[C, P]) Go(f func()) { b.wg.Go(f) }

// OpenSession implements [transfer.Target].
func (b *Book[C, P]) OpenSession(id transfer.SessionID) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.l.open(id)
}

// CloseSession implements [transfer.Target].
func (b *Book[C, P]) CloseSession(id transfer.SessionID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closeSession(id)
}

// closeSession is CloseSession under mu.
func (b *Book[C, P]) closeSession(id transfer.SessionID) {
	if d, ok := b.l.close(id); ok {
		b.wg.Go(func() { b.settle(d) })
	}
}

// settle does what is due.
func (b *Book[C, P]) settle(d due[C, P]) {
	for _, g := range d.fence {
		b.hooks.Fence(g)
	}
	for _, c := range d.dismiss {
		b.hooks.Dismiss(c)
	}
	for _, id := range d.revoked {
		b.tellRevoked(id)
	}
	b.mu.Lock()
	fenced := b.l.release(d.release, d.fence)
	b.mu.Unlock()
	if fenced {
		b.cfg.Sink.Fenced(d.release.ID)
	}
}

// tellRevoked tells the Sink, if it wants to know.
func (b *Book[C, P]) tellRevoked(id transfer.GrantID) {
	if s, ok := b.cfg.Sink.(transfer.RevokeSink); ok {
		s.Revoked(id)
	}
}

// Allow implements [transfer.Target].
func (b *Book[C, P]) Allow(g transfer.Grant) error {
	list, ok := transfer.SortSpans(g.Spans, b.cfg.Size)
	if !ok {
		return fmt.Errorf("%s: allow grant %d: spans overlap or leave the memory: %w", b.cfg.Kind, g.ID, transfer.ErrBounds)
	}
	g.Spans = list
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.l.allow(g)
}

// Revoke implements [transfer.Target]. It waits for Fence.
func (b *Book[C, P]) Revoke(id transfer.GrantID) bool {
	b.mu.Lock()
	g, ok := b.l.revoke(id)
	b.mu.Unlock()
	if g != nil {
		b.hooks.Fence(g)
		b.mu.Lock()
		b.l.drained(g)
		b.mu.Unlock()
	}
	return ok
}

// Join makes c a connection of session id, until Leave. ErrSession: there is none, or it has ended; ErrBusy: it has no room
// for another connection; ErrClosed.
func (b *Book[C, P]) Join(c C, id transfer.SessionID) (*Session[C, P], error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.l.join(c, id)
}

// Leave takes c, which has ended, out of its session. gone: its writer can not store any more; of a session with one
// that perhaps can, Fenced never comes.
func (b *Book[C, P]) Leave(c C, s *Session[C, P], gone bool) {
	b.mu.Lock()
	d := b.l.leave(c, s, gone)
	b.mu.Unlock()
	b.settle(d)
}

// Live is grant id, nil if it is not live or not of s.
func (b *Book[C, P]) Live(s *Session[C, P], id transfer.GrantID) *Grant[C, P] {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.l.live(s, id)
}

// Enter counts a writer of c into g, so that it is not drained until Exit. False: g is revoked, and the writer must not store.
func (b *Book[C, P]) Enter(c C, g *Grant[C, P]) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.l.enter(c, g)
}

// Exit counts a writer of c, which will store nothing more, out of g.
func (b *Book[C, P]) Exit(c C, g *Grant[C, P]) {
	b.mu.Lock()
	revoked, _ := b.l.exit(c, g)
	b.mu.Unlock()
	if revoked {
		b.tellRevoked(g.ID)
	}
}

// ExitRevoked is Exit of a writer that Seal has found, from grant id. False: there is none, or quiet, which is
// called under the lock, does not confirm that it has left.
func (b *Book[C, P]) ExitRevoked(c C, id transfer.GrantID, quiet func(*Grant[C, P]) bool) bool {
	b.mu.Lock()
	g := b.l.draining[id]
	ok, revoked := g != nil && g.seat(c) >= 0 && quiet(g), false
	if ok {
		revoked, _ = b.l.exit(c, g)
	}
	b.mu.Unlock()
	if revoked {
		b.tellRevoked(id)
	}
	return ok
}

// Draining are the revoked grants of s that are not drained.
func (b *Book[C, P]) Draining(s *Session[C, P]) (list []*Grant[C, P]) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, g := range b.l.draining {
		if g.sess == s {
			list = append(list, g)
		}
	}
	return list
}

// Conns are the connections of all sessions.
func (b *Book[C, P]) Conns() (list []C) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for s := range b.l.unfenced {
		for c := range s.conns {
			list = append(list, c)
		}
	}
	return list
}

// Counts is what a book holds.
type Counts struct {
	Sessions int // opened and not closed
	Unfenced int // opened and not fenced
	Grants   int // live
	Draining int // revoked and not drained
}

// Counts is what the book holds now; for tests of what is left behind.
func (b *Book[C, P]) Counts() Counts {
	b.mu.Lock()
	defer b.mu.Unlock()
	return Counts{len(b.l.sessions), len(b.l.unfenced), len(b.l.grants), len(b.l.draining)}
}

// Close closes all sessions and the door to further connections, and waits for the goroutines of the target; but if
// grace is above 0 only so long for writers that nothing but their own end fences: then it breaks their connections and
// returns an [transfer.UnfencedError]. The first call calls door, then waits, then calls last, and joins the errors; others
// only wait. door and last may be nil.
func (b *Book[C, P]) Close(grace time.Duration, door, last func() error) error {
	b.mu.Lock()
	first := !b.l.closed
	b.l.closed = true
	for id := range b.l.sessions {
		b.closeSession(id)
	}
	b.mu.Unlock()
	if !first {
		b.wg.Wait()
		return nil
	}
	var err error
	if door != nil {
		err = door()
	}
	b.wait(grace)
	err = errors.Join(err, b.unfencedError())
	if last != nil {
		err = errors.Join(err, last())
	}
	return err
}

// wait returns when no goroutine is left.
func (b *Book[C, P]) wait(grace time.Duration) {
	if grace <= 0 {
		b.wg.Wait()
		return
	}
	finished := make(chan struct{})
	go func() { // ends with the connections, at the latest when they are broken
		b.wg.Wait()
		close(finished)
	}()
	late := time.NewTimer(grace)
	defer late.Stop()
	select {
	case <-finished:
	case <-late.C:
		for _, c := range b.Conns() {
			b.hooks.Break(c)
		}
		<-finished
	}
}

// unfencedError is an UnfencedError if a session is left, when no goroutine is.
func (b *Book[C, P]) unfencedError() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.l.unfenced) == 0 {
		return nil
	}
	e := &transfer.UnfencedError{Kind: b.cfg.Kind}
	for s := range b.l.unfenced {
		e.Sessions = append(e.Sessions, s.ID)
	}
	slices.Sort(e.Sessions)
	return e
}
