package hub

import (
	"slices"
	"sync"
	"testing"
	"time"
)

// A room's effects are queued under its lock, and queued functions take that lock. Close in
// between must not make the two wait for each other.
func TestActionsCloseUnderLock(t *testing.T) {
	a := newActions()
	var roomLock sync.Mutex
	var order []string // under roomLock
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
	for begun := false; !begun; { // until close has begun
		a.mu.Lock()
		begun = a.closed
		a.mu.Unlock()
	}
	go func() {
		defer roomLock.Unlock()
		a.do(func() { // runs on the goroutine of actions, which needs our lock first
			roomLock.Lock()
			order = append(order, "late")
			roomLock.Unlock()
		})
	}()
	select {
	case <-closed:
	case <-time.After(10 * time.Second):
		t.Fatal("close and the holder of a room's lock wait for each other")
	}
	a.do(func() { order = append(order, "after") })
	if want := []string{"queued", "late", "after"}; !slices.Equal(order, want) {
		t.Fatalf("functions ran in the order %v, want %v", order, want)
	}
}
