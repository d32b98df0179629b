package config

import (
	"runtime"
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
