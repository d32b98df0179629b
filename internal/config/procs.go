package config

import (
	"os"
	"runtime"
)

// spareProcs more goroutines than cores may run Go code or be in a system call that Go's monitor has not noticed yet.
const spareProcs = 2

// SpareProcs raises GOMAXPROCS by some, unless the environment sets it. A goroutine in a system call (tcp's of long writes, one
// that computes in a native library) holds one of GOMAXPROCS processors until Go's monitor takes it away, which can
// be 10 ms later; with one a core, whoever a short write wakes would have none for so long. Called once, by processes that transfer.
func SpareProcs() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + spareProcs)
	}
}
