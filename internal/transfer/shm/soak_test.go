package shm

import (
	"errors"
	"fmt"
	"testing"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/grants"
	"github.com/baton-pd/baton/internal/transfer/transfertest"
)

// idle: the only session has its connection and nothing else.
func idle(tgt transfer.Target) error {
	tg := tgt.(*target)
	if n := tg.Counts(); n != (grants.Counts{Sessions: 1, Unfenced: 1}) {
		return fmt.Errorf("left: %+v", n)
	}
	for _, c := range tg.Conns() {
		if c.table.used != [slots]bool{} || len(c.table.arena.holes) != 1 {
			return errors.New("the grant table is not empty")
		}
	}
	return nil
}

func TestSoakReturnsToBaseline(t *testing.T) {
	transfertest.Soak(t, New(Config{Dir: socketDir(t), Queue: 32}), idle)
}

func TestConnectionsLeaveNothingBehind(t *testing.T) {
	transfertest.Connections(t, New(Config{Dir: socketDir(t)}), idle)
}

func TestSteadyStateDoesNotAllocate(t *testing.T) {
	transfertest.SteadyAllocations(t, New(Config{Dir: socketDir(t)}))
}

func TestAllocationsDoNotGrowWithSegments(t *testing.T) {
	transfertest.SegmentAllocations(t, New(Config{Dir: socketDir(t)}))
}

func TestRunsOfSegmentsAreStoredExactly(t *testing.T) {
	transfertest.Runs(t, New(Config{Dir: socketDir(t)}), 3<<20, 600<<10)
}

func BenchmarkWrite(b *testing.B) { transfertest.BenchmarkWrite(b, New(Config{Dir: socketDir(b)})) }
