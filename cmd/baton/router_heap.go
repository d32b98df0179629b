package main

import "runtime"

// heapFloorBytes is how much the router's heap may grow between two collections at least.
const heapFloorBytes = 64 << 20

// heapFloor keeps a small heap from being collected all the time: a router makes much garbage and holds little, so without it a fifth of its
// CPU goes there. The memory is never touched, and so takes no room but addresses. done lets go of it.
func heapFloor() (done func()) {
	floor := make([]byte, heapFloorBytes)
	return func() { runtime.KeepAlive(floor) }
}
