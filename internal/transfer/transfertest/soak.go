package transfertest

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// The functions of this file are tests of what a transport leaves behind and allocates, for those that have both
// ends in one process. They are no part of the suite: each transport calls them with its own sizes.

var soakKey = room.Key{Room: 77, Gen: 3}

type soakSink struct {
	landed atomic.Int64
	fenced chan transfer.SessionID
}

func (s *soakSink) Landed(transfer.GrantID, []byte) { s.landed.Add(1) }
func (s *soakSink) Fenced(id transfer.SessionID)    { s.fenced <- id }

// pair is a target over zeroed memory with one open session, 1.
type pair struct {
	tb   testing.TB
	tr   transfer.Transport
	tgt  transfer.Target
	mem  []byte
	sink *soakSink
}

func newPair(tb testing.TB, tr transfer.Transport, size int) *pair {
	tb.Helper()
	pool, err := kv.Open(kv.Config{Name: "soak", PageBytes: 4096, Pages: (size + 4095) / 4096})
	if err != nil {
		tb.Fatalf("open memory: %v", err)
	}
	b, fd := pool.Memory()
	p := &pair{tb: tb, tr: tr, mem: b, sink: &soakSink{fenced: make(chan transfer.SessionID, 64)}}
	if p.tgt, err = tr.Listen(transfer.Memory{Bytes: b, FD: fd}, p.sink); err != nil {
		tb.Fatalf("listen: %v", err)
	}
	tb.Cleanup(func() {
		if err := errors.Join(p.tgt.Close(), pool.Close()); err != nil {
			tb.Errorf("close: %v", err)
		}
	})
	p.open(1)
	return p
}

func (p *pair) open(s transfer.SessionID) {
	p.tb.Helper()
	if err := p.tgt.OpenSession(s); err != nil {
		p.tb.Fatal(err)
	}
}

func (p *pair) allow(id transfer.GrantID, s transfer.SessionID, spans ...transfer.Span) {
	p.tb.Helper()
	if err := p.tgt.Allow(transfer.Grant{ID: id, Key: soakKey, Session: s, Spans: spans}); err != nil {
		p.tb.Fatal(err)
	}
}

// dial connects to session s; the peer is closed at the end, too.
func (p *pair) dial(s transfer.SessionID) transfer.Peer {
	p.tb.Helper()
	peer, err := p.tr.Dial(p.tb.Context(), p.tgt.Descriptor(), s)
	if err != nil {
		p.tb.Fatal(err)
	}
	p.tb.Cleanup(func() { _ = peer.Close() })
	return peer
}

// awaitFence waits for a fence of any session.
func (p *pair) awaitFence() {
	p.tb.Helper()
	select {
	case <-p.sink.fenced:
	case <-time.After(patience):
		p.tb.Fatal("never came: Fenced")
	}
}

// blocks allows n blocks of size bytes from offset 0 under grant 1, and returns segments for them.
func (p *pair) blocks(n, size int) []transfer.Segment {
	p.tb.Helper()
	p.allow(1, 1, transfer.Span{Len: uint64(n * size)})
	segs := make([]transfer.Segment, n)
	for i := range segs {
		segs[i] = transfer.Segment{Off: uint64(i * size), Src: make([]byte, size)}
	}
	return segs
}

// writing returns a function that writes segs under grant 1 and waits until they are applied.
func (p *pair) writing(segs []transfer.Segment) func() {
	p.tb.Helper()
	peer, done := p.dial(1), make(chan error, 1)
	w := transfer.Write{Grant: 1, Key: soakKey, Segments: segs, Done: func(err error) { done <- err }}
	return func() {
		if err := peer.Post(w); err != nil {
			p.tb.Fatal(err)
		}
		if err := <-done; err != nil {
			p.tb.Fatal(err)
		}
	}
}

// Footprint is what the process has: Mappings are those of memfds.
type Footprint struct{ Goroutines, Files, Mappings int }

// TakeFootprint looks.
func TakeFootprint(t testing.TB) Footprint {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return Footprint{runtime.NumGoroutine(), len(fds), strings.Count(string(maps), "/memfd:")}
}

// Await waits until the process has no more than before.
func (before Footprint) Await(t *testing.T) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	end := time.After(patience)
	for {
		now := TakeFootprint(t)
		if now.Goroutines <= before.Goroutines && now.Files <= before.Files && now.Mappings <= before.Mappings {
			return
		}
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("has %+v, had %+v", now, before)
		}
	}
}

// Soak makes 10,000 writes of two segments from four goroutines, each under a grant of its own that is revoked at
// its end. Goroutines, files and mappings are what they were; idle reports whether the target, with one open session that
// still has its connection, holds no grant.
func Soak(t *testing.T, tr transfer.Transport, idle func(transfer.Target) error) {
	const (
		writers = 4
		each    = 2500
		page    = 4096
	)
	newPair(t, tr, 64) // the poller's own files exist before the baseline is taken
	before := TakeFootprint(t)
	t.Run("soak", func(t *testing.T) {
		p := newPair(t, tr, writers*8*page)
		peer := p.dial(1)
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() { p.grantAndWrite(peer, w*each+1, each, uint64(w*8*page), page) })
		}
		wg.Wait()
		if got := p.sink.landed.Load(); got != writers*each {
			t.Fatalf("%d notifications, want %d", got, writers*each)
		}
		if err := idle(p.tgt); err != nil {
			t.Fatal(err)
		}
	})
	before.Await(t)
}

// grantAndWrite makes n writes, at most 16 at a time, under the grants from first on, into 8 pages at base.
func (p *pair) grantAndWrite(peer transfer.Peer, first, n int, base uint64, page int) {
	src := make([]byte, 3*page)
	free := make(chan struct{}, 16)
	for i := range n {
		id := transfer.GrantID(first + i)
		if err := p.tgt.Allow(transfer.Grant{ID: id, Key: soakKey, Session: 1, Spans: []transfer.Span{{Off: base, Len: uint64(8 * page)}}}); err != nil {
			p.tb.Errorf("allow: %v", err)
			return
		}
		free <- struct{}{}
		w := transfer.Write{Grant: id, Key: soakKey, Notify: []byte("n"), Segments: []transfer.Segment{
			{Off: base, Src: src[:1+i%page]}, {Off: base + uint64(page), Src: src[:i%len(src)]}}}
		w.Done = func(err error) {
			if err != nil {
				p.tb.Errorf("write: %v", err)
			}
			if !p.tgt.Revoke(id) {
				p.tb.Errorf("grant %d: not fenced after its only write", id)
			}
			<-free
		}
		err := peer.Post(w)
		for ; errors.Is(err, transfer.ErrBusy); err = peer.Post(w) {
			runtime.Gosched()
		}
		if err != nil {
			p.tb.Errorf("post: %v", err)
			return
		}
	}
	for range cap(free) {
		free <- struct{}{}
	}
}

// Connections opens and ends 200 sessions with a grant and a connection, from either side. idle as for [Soak].
func Connections(t *testing.T, tr transfer.Transport, idle func(transfer.Target) error) {
	p := newPair(t, tr, 4096)
	p.dial(1)
	before := TakeFootprint(t)
	for i := range 200 {
		s := transfer.SessionID(i + 10)
		p.open(s)
		p.allow(transfer.GrantID(i+1), s)
		peer, err := tr.Dial(t.Context(), p.tgt.Descriptor(), s)
		if err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 {
			_ = peer.Close()
			p.awaitFence()
			p.tgt.CloseSession(s)
		} else {
			p.tgt.CloseSession(s)
			p.awaitFence()
			_ = peer.Close()
		}
	}
	before.Await(t)
	if err := idle(p.tgt); err != nil {
		t.Fatal(err)
	}
}

// SteadyAllocations makes one write of many blocks, again and again: neither side may allocate per block.
func SteadyAllocations(t *testing.T, tr transfer.Transport) {
	const blocks, block = 512, 4096
	p := newPair(t, tr, blocks*block)
	round := p.writing(p.blocks(blocks, block))
	round()
	if n := testing.AllocsPerRun(50, round); n > 8 {
		t.Fatalf("%v allocations for a write of %d blocks", n, blocks)
	}
}

// SegmentAllocations: a write of many segments allocates no more than one of a single segment.
func SegmentAllocations(t *testing.T, tr transfer.Transport) {
	perWrite := func(blocks int) float64 {
		p := newPair(t, tr, blocks*4096)
		return testing.AllocsPerRun(50, p.writing(p.blocks(blocks, 4096)))
	}
	if one, many := perWrite(1), perWrite(2048); many > one+4 {
		t.Errorf("%v allocations for 1 segment, %v for 2048", one, many)
	}
}

// Runs stores segments into size bytes that follow each other on one side, both or none, some of long bytes, which should be
// more than the transport moves at once, some empty, some shorter than their array.
func Runs(t *testing.T, tr transfer.Transport, size, long int) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for round := range 20 {
		p := newPair(t, tr, size)
		p.allow(1, 1, transfer.Span{Len: uint64(size)})
		src := make([]byte, size)
		for i := range src {
			src[i] = byte(rnd.Uint32()) | 1 // never what the memory holds
		}
		want := make([]byte, len(p.mem))
		var segs []transfer.Segment
		most := size - long - 100<<10
		for at, from := 0, 0; at < most && from < most; {
			n := []int{0, 1, 4096, 5000, long}[rnd.IntN(5)]
			s := src[from : from+n]
			if rnd.IntN(3) == 0 {
				s = src[from : from+n : from+n]
			}
			segs = append(segs, transfer.Segment{Off: uint64(at), Src: s})
			copy(want[at:], s)
			at, from = at+n+rnd.IntN(2)*100, from+n+rnd.IntN(2)*50
		}
		p.writing(segs)()
		if !bytes.Equal(p.mem, want) {
			t.Fatalf("round %d: wrong bytes", round)
		}
	}
}

// BenchmarkWrite writes 64 blocks of 64 KiB, four writes at a time.
func BenchmarkWrite(b *testing.B, tr transfer.Transport) {
	const blocks, block = 64, 64 << 10
	p := newPair(b, tr, blocks*block)
	free := make(chan struct{}, 4)
	w := transfer.Write{Grant: 1, Key: soakKey, Segments: p.blocks(blocks, block), Done: func(err error) {
		if err != nil {
			b.Error(err)
		}
		<-free
	}}
	peer := p.dial(1)
	b.SetBytes(blocks * block)
	for b.Loop() {
		free <- struct{}{}
		if err := peer.Post(w); err != nil {
			b.Fatal(err)
		}
	}
	for range cap(free) {
		free <- struct{}{}
	}
}
