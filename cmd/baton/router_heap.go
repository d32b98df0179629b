package main

import (
	"os"
	"runtime"
	"runtime/debug"
)

const (
	// heapFloorBytes is added to what the collector takes for the router's live heap.
	heapFloorBytes = 128 << 20
	// heapPercent is how much the heap may grow until the next collection, of live heap and floor together.
	heapPercent = 20
)

// heapFloor keeps a small heap from being collected all the time: a router makes much garbage and holds little, so without it a fifth of its
// CPU goes there. A large heap, of thousands of streams, grows by less than Go's default. The floor is never touched, and so takes no room
// but addresses. The environment's GOGC is left alone. done undoes it.
func heapFloor() (done func()) {
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
