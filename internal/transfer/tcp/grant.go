package tcp

import (
	"sync"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// grant is a live permission. spans, key and sess never change.
type grant struct {
	id    transfer.GrantID
	key   room.Key
	sess  *session
	spans []transfer.Span // sorted by offset, disjoint, inside the memory

	// mu is held during each store, so that revoke is a fence. Never held while
	// waiting for a socket. Innermost lock.
	mu      sync.Mutex
	revoked bool // under mu; never unset
}

// revoke returns when no store is under way and none can begin.
func (g *grant) revoke() {
	g.mu.Lock()
	g.revoked = true
	g.mu.Unlock()
}

// live reports whether g was not yet revoked at some moment of the call.
func (g *grant) live() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.revoked
}
