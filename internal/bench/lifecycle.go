package bench

import (
	"fmt"
	"log/slog"
	"runtime"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// Lifecycle measures the room core alone: the cost of a step, the memory of rooms
// live rooms, and aborting aborts of them.
func Lifecycle(rooms, aborts int) ([]Row, error) {
	var rows []Row
	one := func(metric, unit string, v float64, n int) {
		r := row("lifecycle", "room", metric, unit, []float64{v})
		r.N = n
		rows = append(rows, r)
	}
	const steps = 2_000_000
	began := time.Now()
	for range steps / 4 {
		s := room.NewSender(1)
		for _, k := range []room.EventKind{room.EvGrant, room.EvBegin, room.EvSettle, room.EvRelease} {
			s, _ = s.Step(room.Event{Kind: k, Last: true})
		}
		if s.State() != room.StateSuccess {
			return nil, fmt.Errorf("a room ended as %v", s.State())
		}
	}
	one("step", "ns", float64(time.Since(began).Nanoseconds())/steps, steps)

	reg := room.NewRegistry(room.Config{
		Side:    room.SideSender,
		Execute: func(*room.Room, room.Event, room.Effects) []room.Event { return nil },
		Log:     slog.New(slog.DiscardHandler), TombstoneTTL: time.Minute, MaxTombstones: rooms + 1,
	})
	defer reg.Close()
	before := heap()
	deadline := time.Now().Add(time.Hour)
	live := make([]*room.Room, rooms)
	began = time.Now()
	for i := range live {
		r, err := reg.Open(room.Key{Room: uint64(i + 1)}, deadline, 1, nil)
		if err != nil {
			return nil, err
		}
		live[i] = r
	}
	one("open", "ns", float64(time.Since(began).Nanoseconds())/float64(rooms), rooms)
	one("memory a live room", "bytes", float64(heap()-before-uint64(8*rooms))/float64(rooms), rooms)

	began = time.Now()
	for _, r := range live {
		r.Apply(room.Event{Kind: room.EvGrant})
	}
	one("apply", "ns", float64(time.Since(began).Nanoseconds())/float64(rooms), rooms)

	aborts = min(aborts, rooms)
	began = time.Now()
	for i := range aborts {
		reg.Abort(live[i].Key(), &room.Cause{Code: room.CodeAborted})
	}
	one("abort", "ns", float64(time.Since(began).Nanoseconds())/float64(aborts), aborts)
	for i, r := range live[:aborts] {
		if r.State() != room.StateFailed {
			return nil, fmt.Errorf("aborted room %d is %v", i, r.State())
		}
	}
	began = time.Now()
	for _, r := range live {
		r.Apply(room.Event{Kind: room.EvRelease})
	}
	one("release", "ns", float64(time.Since(began).Nanoseconds())/float64(rooms), rooms)
	n := 0
	reg.Range(func(*room.Room) bool { n++; return true })
	if n != 0 {
		return nil, fmt.Errorf("%d rooms are left after the release of all", n)
	}
	return rows, nil
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
