package room

import (
	"io"
	"log/slog"
	"runtime"
	"testing"
	"time"
)

var lifecycle = []EventKind{EvGrant, EvBegin, EvSettle, EvRelease}

func BenchmarkSenderStep(b *testing.B) {
	s := NewSender(1)
	for i := 0; b.Loop(); i++ {
		if i%len(lifecycle) == 0 {
			s = NewSender(1)
		}
		s, _ = s.Step(Event{Kind: lifecycle[i%len(lifecycle)]})
	}
	if s.State() == StateFailed {
		b.Fatal(s.Cause())
	}
}

func BenchmarkReceiverStep(b *testing.B) {
	events := []Event{{Kind: EvGranted}, {Kind: EvLanded}, {Kind: EvLanded, Chunk: 1, Last: true}, {Kind: EvRelease}}
	r := NewReceiver(2)
	for i := 0; b.Loop(); i++ {
		if i%len(events) == 0 {
			r = NewReceiver(2)
		}
		r, _ = r.Step(events[i%len(events)])
	}
	if r.State() == StateFailed {
		b.Fatal(r.Cause())
	}
}

// BenchmarkLifecycle is a whole room through the registry: open, grant, one chunk,
// release. ns/event counts the five of them alike.
func BenchmarkLifecycle(b *testing.B) {
	g := NewRegistry(Config{Side: SideSender, Execute: func(*Room, Event, Effects) []Event { return nil }, Log: slog.New(slog.DiscardHandler)})
	defer g.Close()
	deadline := time.Now().Add(time.Hour)
	b.ReportAllocs()
	n := 0
	for ; b.Loop(); n++ {
		r, err := g.Open(Key{Room: uint64(n)}, deadline, 1, nil)
		if err != nil {
			b.Fatal(err)
		}
		for _, k := range lifecycle {
			r.Apply(Event{Kind: k})
		}
	}
	if s := g.Stats(); s.Succeeded != uint64(n) || s.Rooms() != 0 {
		b.Fatalf("%d rooms, %+v", n, s)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n)/float64(1+len(lifecycle)), "ns/event")
}

// BenchmarkApply is one event that changes a counter and nothing else, on many rooms in
// turn, so that the caches do not help; with bounds, so that due times move.
func BenchmarkApply(b *testing.B) {
	const rooms = 1 << 16
	g := NewRegistry(Config{Side: SideSender, Log: slog.New(slog.DiscardHandler),
		Bounds: map[State]time.Duration{StateBootstrapping: time.Hour, StateWaitingForInput: time.Minute, StateTransferring: time.Hour}})
	defer g.Close()
	live := openMany(b, g, rooms, 1<<30)
	for _, r := range live {
		r.Apply(Event{Kind: EvGrant})
	}
	i := 0
	for ; b.Loop(); i++ {
		r := live[i%rooms]
		if fx := r.Apply(Event{Kind: EvBegin, Chunk: i / rooms}); fx != FxWrite {
			b.Fatal(fx)
		}
	}
}

// BenchmarkMillion reports the memory of a live room and the cost of 100,000 aborts
// among a million.
func BenchmarkMillion(b *testing.B) {
	const rooms, aborts = 1_000_000, 100_000
	for b.Loop() {
		before := heapBytes()
		g := NewRegistry(Config{Side: SideSender, Log: slog.New(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelError}))})
		began := time.Now()
		live := openMany(b, g, rooms, 4)
		b.ReportMetric(float64(time.Since(began).Nanoseconds())/rooms, "ns/open")
		b.ReportMetric(float64(heapBytes()-before-8*rooms)/rooms, "bytes/room")
		for _, r := range live[:rooms/2] {
			_ = r.Done()
		}
		b.ReportMetric(float64(heapBytes()-before-8*rooms)/rooms, "bytes/room-half-awaited")
		cause := &Cause{Code: CodeAborted, Detail: "bench"}
		began = time.Now()
		for _, r := range live[:aborts] {
			if fx, ok := g.Abort(r.Key(), cause); !ok || !fx.Has(FxSendAck|FxTerminal) {
				b.Fatal(fx, ok)
			}
		}
		b.ReportMetric(float64(time.Since(began).Nanoseconds())/aborts, "ns/abort")
		began = time.Now()
		s := g.Stats()
		b.ReportMetric(float64(time.Since(began).Milliseconds()), "ms/stats")
		if s.Live[StateFailed] != aborts || s.Failed[CodeAborted] != aborts {
			b.Fatalf("%+v", s)
		}
		for _, r := range live {
			r.Apply(Event{Kind: EvRelease})
		}
		if n := g.Stats().Rooms(); n != 0 {
			b.Fatalf("%d rooms are left", n)
		}
		g.Close()
		runtime.KeepAlive(live)
	}
}

func openMany(b *testing.B, g *Registry, n, chunks int) []*Room {
	b.Helper()
	deadline := time.Now().Add(time.Hour)
	live := make([]*Room, n)
	for i := range live {
		r, err := g.Open(Key{Room: uint64(i + 1)}, deadline, chunks, nil)
		if err != nil {
			b.Fatal(err)
		}
		live[i] = r
	}
	return live
}

func heapBytes() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
