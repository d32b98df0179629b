package trace

import (
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// BenchmarkTraced is what room's BenchmarkLifecycle measures, with a trace to a file: the
// time of whoever applies the events, six records a room, and the share that was dropped.
func BenchmarkTraced(b *testing.B) {
	w, err := Open(Config{Path: filepath.Join(b.TempDir(), "t"), MaxBytes: 1 << 40, Side: room.SideSender, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	g := room.NewRegistry(room.Config{Side: room.SideSender, Observe: w, Log: slog.New(slog.DiscardHandler), Execute: func(*room.Room, room.Event, room.Effects) []room.Event { return nil }})
	deadline := time.Now().Add(time.Hour)
	n := 0
	for ; b.Loop(); n++ {
		r, err := g.Open(room.Key{Room: uint64(n)}, deadline, 1, nil)
		if err != nil {
			b.Fatal(err)
		}
		for _, k := range []room.EventKind{room.EvGrant, room.EvBegin, room.EvSettle, room.EvRelease} {
			r.Apply(room.Event{Kind: k})
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n)/5, "ns/event")
	g.Close()
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(100*float64(w.dropped)/float64(6*n), "%dropped")
}

// BenchmarkCheck is a record's share of a check.
func BenchmarkCheck(b *testing.B) {
	t := new(testing.T)
	w := randomWorld(t, 1, 50)
	p, d := w.p.bytes(), w.d.bytes()
	for b.Loop() {
		if rep := check(t, p, d); !rep.OK() {
			b.Fatal(rep.text())
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*(len(w.p.records)+len(w.d.records))), "ns/record")
	w.p.reg.Close()
	w.d.reg.Close()
}
