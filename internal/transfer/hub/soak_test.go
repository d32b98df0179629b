package hub_test

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/shm"
	"github.com/baton-pd/baton/internal/transfer/tcp"
)

// footprint is what must not grow with the number of transfers.
type footprint struct {
	heap              uint64
	goroutines, files int
}

func takeFootprint(t *testing.T) footprint {
	t.Helper()
	runtime.GC()
	runtime.GC() // what the first one finalized
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return footprint{m.HeapAlloc, runtime.NumGoroutine(), len(files)}
}

// TestSoak: whole transfers through both hubs over a real transport, one in ten of them ended by
// the decode side in its middle. Heap, goroutines, files, rooms and pages are afterwards what they were when a
// tenth had been done. BATON_PROVE=1 does 100,000 over each transport.
func TestSoak(t *testing.T) {
	n := 2000
	if os.Getenv("BATON_PROVE") != "" {
		n = 100_000
	}
	for _, tr := range []transfer.Transport{tcp.New(tcp.Config{}), shm.New(shm.Config{Dir: t.TempDir()})} {
		t.Run(tr.Kind(), func(t *testing.T) {
			w := newWorld(t, options{over: tr, pages: 256, ttl: 50 * time.Millisecond})
			var next atomic.Uint64
			next.Store(1)
			batch := func(n int) {
				last := next.Load() + uint64(n)
				var wg sync.WaitGroup
				for range 8 {
					wg.Go(func() {
						for id := next.Add(1); id <= last; id = next.Add(1) {
							w.whole(id)
						}
					})
				}
				wg.Wait()
				next.Store(last)
				await(t, "both sides idle", w.idle(t))
			}
			batch(n / 10)
			before := takeFootprint(t)
			batch(n - n/10)
			after := takeFootprint(t)
			t.Logf("%d transfers: heap %d KiB, then %d KiB; goroutines %d, then %d; files %d, then %d", n,
				before.heap>>10, after.heap>>10, before.goroutines, after.goroutines, before.files, after.files)
			const noise = 1 << 20
			if after.heap > before.heap+before.heap/10+noise || after.goroutines > before.goroutines+2 || after.files > before.files {
				t.Error("it grows")
			}
		})
	}
}

// whole is one transfer of three chunks, every third with chunks in parts; one in ten is cancelled between the second and the third.
func (w *world) whole(id uint64) {
	const n = 3
	r, s := w.receive(id, n), w.send(id, n)
	cut := id%10 == 0
	await(w.t, "grant", s.Granted())
	for i := range n {
		if cut && i == n-1 {
			r.Cancel(&room.Cause{Code: room.CodeClientGone})
			break
		}
		b, err := s.Buffer(w.t.Context(), i)
		if err != nil {
			w.t.Errorf("room %d, buffer of chunk %d: %v", id, i, err)
			break
		}
		for _, part := range b {
			part[0], part[len(part)-1] = byte(id), byte(i)
		}
		if id%3 == 0 {
			s.SendPart(i, []transfer.Span{{Off: 1000, Len: 2000}}, false)
		}
		s.Send(i)
	}
	await(w.t, "end of the receiver", r.Done())
	await(w.t, "end of the sender", s.Done())
	if !cut {
		if r.Err() != nil || s.Err() != nil {
			w.t.Errorf("room %d: %v, %v", id, r.Err(), s.Err())
		}
		for i := range n {
			for _, part := range r.Chunk(i) {
				if part[0] != byte(id) || part[len(part)-1] != byte(i) {
					w.t.Errorf("room %d: wrong bytes in chunk %d", id, i)
				}
			}
		}
	}
	r.Release()
	s.Release()
}

// idle is closed when no room is left on either side and no page is held.
func (w *world) idle(t *testing.T) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, reg := range []*room.Registry{w.senders.Registry(), w.receivers.Registry()} {
			if err := reg.Drain(t.Context()); err != nil {
				t.Error(err)
			}
		}
		for freed := w.landing.Freed(); !w.landing.Stats().Idle(); freed = w.landing.Freed() {
			<-freed
		}
	}()
	return done
}

// TestLargePool: 8 GiB are registered, and mapped by the other side, without a byte being
// copied or touched.
func TestLargePool(t *testing.T) {
	const page, size = 64 << 10, 8 << 30
	pool, err := kv.Open(kv.Config{Name: "large", PageBytes: page, Pages: size / page})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = pool.Close() }()
	bytes, fd := pool.Memory()
	before := resident(t)
	for _, tr := range []transfer.Transport{tcp.New(tcp.Config{}), shm.New(shm.Config{Dir: t.TempDir()})} {
		landed := make(chan struct{}, 1)
		target, err := tr.Listen(transfer.Memory{Bytes: bytes, FD: fd}, notifySink{landed})
		if err != nil {
			t.Fatal(err)
		}
		const session, last = 5, size - page
		if err := target.OpenSession(session); err != nil {
			t.Fatal(err)
		}
		if err := target.Allow(transfer.Grant{ID: 9, Session: session, Spans: []transfer.Span{{Off: last, Len: page}}}); err != nil {
			t.Fatal(err)
		}
		peer, err := tr.Dial(t.Context(), target.Descriptor(), session)
		if err != nil {
			t.Fatal(err)
		}
		src := make([]byte, page)
		for i := range src {
			src[i] = byte(i) ^ tr.Kind()[0]
		}
		done := make(chan error, 1)
		err = peer.Post(transfer.Write{Grant: 9, Segments: []transfer.Segment{{Off: last, Src: src}}, Notify: []byte{}, Done: func(err error) { done <- err }})
		if err != nil {
			t.Fatal(err)
		}
		if err := await(t, "write", done); err != nil {
			t.Error(err)
		}
		await(t, "notification", landed)
		if !slices.Equal(bytes[last:], src) {
			t.Errorf("%s: the last page is wrong", tr.Kind())
		}
		if err := errors.Join(peer.Close(), target.Close()); err != nil {
			t.Error(err)
		}
	}
	if grown := resident(t) - before; grown > 64<<20 {
		t.Errorf("resident memory grew by %d MiB", grown>>20)
	}
}

type notifySink struct{ landed chan struct{} }

func (s notifySink) Landed(transfer.GrantID, []byte) { s.landed <- struct{}{} }
func (s notifySink) Fenced(transfer.SessionID)       {}

// resident is this process's memory in bytes.
func resident(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	var total, res int
	if _, err := fmt.Sscan(string(b), &total, &res); err != nil {
		t.Fatal(err)
	}
	return res * os.Getpagesize()
}
