package grants

import (
	"maps"
	"slices"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const size = 1 << 10

// conn of the tests is a number.
type conn = int

// own is what the tests keep with a grant.
type own struct {
	mu      sync.Mutex
	revoked bool
	shown   []conn // by Allow and Join
}

// told records what the Sink and the hooks without the lock heard.
type told struct {
	mu        sync.Mutex
	fenced    []transfer.SessionID
	revoked   []transfer.GrantID
	dismissed []conn
	news      *sync.Cond // of mu: one of the lists has grown
}

func newTold() *told {
	s := &told{}
	s.news = sync.NewCond(&s.mu)
	return s
}

func (s *told) note(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	s.news.Broadcast()
}

func (s *told) Landed(transfer.GrantID, []byte) {}
func (s *told) Fenced(id transfer.SessionID)    { s.note(func() { s.fenced = append(s.fenced, id) }) }
func (s *told) Revoked(id transfer.GrantID)     { s.note(func() { s.revoked = append(s.revoked, id) }) }
func (s *told) dismiss(c conn)                  { s.note(func() { s.dismissed = append(s.dismissed, c) }) }

// until waits for f.
func (s *told) until(f func(s *told) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for !f(s) {
		s.news.Wait()
	}
}

func grantOf(id transfer.GrantID, s transfer.SessionID) transfer.Grant {
	return transfer.Grant{ID: id, Session: s, Key: room.Key{Room: 7, Gen: 1}, Spans: []transfer.Span{{Off: 64, Len: 64}, {Off: 0, Len: 8}}}
}

// publishing shows grants as shm does: each is in the list of the connections that know it.
func publishing(h Hooks[conn, own]) Hooks[conn, own] {
	h.Allow = func(g *Grant[conn, own], conns map[conn]struct{}) error {
		g.Own.shown = slices.Collect(maps.Keys(conns))
		return nil
	}
	h.Join = func(c conn, s *Session[conn, own]) bool {
		for g := range s.Grants() {
			g.Own.shown = append(g.Own.shown, c)
		}
		return true
	}
	h.Part = func(c conn, g *Grant[conn, own]) {
		g.Own.shown = slices.DeleteFunc(g.Own.shown, func(o conn) bool { return o == c })
	}
	return h
}
