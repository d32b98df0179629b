package hub

import (
	"sync"
	"testing"
	"testing/synctest"
)

// A room's effects are queued under its lock, and queued functions take that lock. Close in
// between must not make the two wait for each other.
func TestActionsCloseUnderLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newActions()
		var roomLock sync.Mutex
		var order []string
		roomLock.Lock()
		a.do(func() {
			roomLock.Lock()
			order = append(order, "queued")
			roomLock.Unlock()
		})
		closed := make(chan struct{})
		go func() {
			a.close()
			close(closed)
		}()
		for { // until close has begun
			a.mu.Lock()
			begun := a.closed
			a.mu.Unlock()
			if begun {
				break
			}
		}
		a.do(func() { order = append(order, "late") }) // would wait for the queued one, and that for us
		roomLock.Unlock()
		<-closed
		a.do(func() { order = append(order, "after") })
		if len(order) != 3 || order[0] != "queued" || order[1] != "late" || order[2] != "after" {
			t.Fatalf("functions ran in the order %v", order)
		}
	})
}
