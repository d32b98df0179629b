package tcp

import "sync"

// guard is what tcp keeps with a grant.
type guard struct {
	// mu is held during each store, so that revoke is a fence. Never held while
	// waiting for a socket. Innermost lock.
	mu      sync.Mutex
	revoked bool // under mu; never unset
}

// revoke returns when no store is under way and none can begin.
func (g *guard) revoke() {
	g.mu.Lock()
	g.revoked = true
	g.mu.Unlock()
}

// live reports whether g was not yet revoked at some moment of the call.
func (g *guard) live() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.revoked
}
