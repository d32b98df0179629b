package config

import (
	"os"
	"runtime"
	"runtime/debug"
)

const (
	// heapFloorBytes is added to what the collector takes for the live heap.
	heapFloorBytes = 128 << 20
	// heapPercent is how much the heap may grow until the next collection, of live heap and floor together.
	heapPercent = 20
)

// HeapFloor keeps a small heap from being collected all the time. A router makes much garbage and holds little, so without it a fifth of its
// CPU goes there; beside a worker's transfers each collection takes a core for a millisecond or two, which whoever a short
// write wakes may have to wait for. A large heap, of thousands of streams, grows by less than Go's default. The floor is never touched, and so takes no room
// but addresses; but it counts for GOMEMLIMIT, so where the environment sets that nothing is done. GOGC is left alone too.
// Called once by a process that serves; done undoes it.
func HeapFloor() (done func()) {
	if os.Getenv("GOMEMLIMIT") != "" {
		return func() {}
	}
	floor := make([]byte, heapFloorBytes)
	if os.Getenv("GOGC") != "" {
		return func() { runtime.KeepAlive(floor) }
	}
	before := debug.SetGCPercent(heapPercent)
	return func() {
		debug.SetGCPercent(before)
		runtime.KeepAlive(floor)
	}
}
