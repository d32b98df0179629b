package config

import (
	"runtime"
	"runtime/debug"
	"testing"
)

func TestSpareProcs(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(before)
	t.Setenv("GOMAXPROCS", "1")
	if SpareProcs(); runtime.GOMAXPROCS(0) != before {
		t.Errorf("%d, though the environment says how many", runtime.GOMAXPROCS(0))
	}
	t.Setenv("GOMAXPROCS", "")
	if SpareProcs(); runtime.GOMAXPROCS(0) != before+spareProcs {
		t.Errorf("%d, want %d more than %d", runtime.GOMAXPROCS(0), spareProcs, before)
	}
}

func TestHeapFloor(t *testing.T) {
	percent := func() int {
		now := debug.SetGCPercent(100)
		debug.SetGCPercent(now)
		return now
	}
	before := percent()
	t.Setenv("GOGC", "77")
	done := HeapFloor()
	if percent() != before {
		t.Errorf("%d %%, though the environment says how many", percent())
	}
	done()
	t.Setenv("GOGC", "")
	t.Setenv("GOMEMLIMIT", "64MiB")
	done = HeapFloor()
	if percent() != before {
		t.Errorf("%d %%, though the environment limits the memory", percent())
	}
	done()
	t.Setenv("GOMEMLIMIT", "")
	done = HeapFloor()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	if percent() != heapPercent || m.NextGC < heapFloorBytes/100*(100+heapPercent) {
		t.Errorf("%d %%, the next collection at %d bytes", percent(), m.NextGC)
	}
	done()
	if percent() != before {
		t.Errorf("%d %% afterwards, before %d", percent(), before)
	}
}
