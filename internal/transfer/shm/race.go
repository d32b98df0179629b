//go:build race

package shm

import (
	"runtime"
	"unsafe"
)

// ringSync orders what a target does with a completion after what its source did before, when both
// are in one process; the race detector cannot see through two mappings.
var ringSync byte

func ringRelease() { runtime.RaceReleaseMerge(unsafe.Pointer(&ringSync)) }

func ringAcquire() { runtime.RaceAcquire(unsafe.Pointer(&ringSync)) }
