package kvbench

import (
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	distanceBatches = 12  // the least of them counts: others were interrupted
	distanceTurns   = 250 // exchanges of a batch
)

// coreDistance is the time, in nanoseconds, that a cache line takes from one of this process's two cores to the
// other. False if it may use another number of cores than two, of which nobody knows where the next round will run.
func coreDistance() (float64, bool) {
	var allowed unix.CPUSet
	if unix.SchedGetaffinity(0, &allowed) != nil || allowed.Count() != 2 {
		return 0, false
	}
	var ids []int
	for i := 0; len(ids) < 2; i++ {
		if allowed.IsSet(i) {
			ids = append(ids, i)
		}
	}
	var line struct {
		_ [64]byte
		v atomic.Int64
		_ [64]byte
	}
	// Both are on their cores before one of them looks for the other: a thread that spins does not let another one begin on its core.
	there, met, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		defer pin(ids[1], &allowed)()
		close(there)
		<-met
		for i := range int64(distanceBatches * distanceTurns) {
			for line.v.Load() != 2*i+1 {
			}
			line.v.Store(2*i + 2)
		}
	}()
	defer pin(ids[0], &allowed)()
	<-there
	close(met)
	least := int64(1) << 62
	for b := range int64(distanceBatches) {
		began := now()
		for i := b * distanceTurns; i < (b+1)*distanceTurns; i++ {
			line.v.Store(2*i + 1)
			for line.v.Load() != 2*i+2 {
			}
		}
		least = min(least, now()-began)
	}
	<-done
	return float64(least) / (2 * distanceTurns), true
}

// pin keeps the calling goroutine on core cpu until the function returned is called.
func pin(cpu int, before *unix.CPUSet) func() {
	runtime.LockOSThread()
	var one unix.CPUSet
	one.Set(cpu)
	_ = unix.SchedSetaffinity(0, &one) // where it fails the distance is of one core, which is near
	return func() {
		_ = unix.SchedSetaffinity(0, before)
		runtime.UnlockOSThread()
	}
}
