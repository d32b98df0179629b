package shm

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/grants"
)

// count is the process's goroutines and open files.
func count(t testing.TB) (goroutines, files int) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return runtime.NumGoroutine(), len(fds)
}

// mapped counts the mappings of memfds in this process.
func mapped(t testing.TB) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), "/memfd:")
}

// backTo waits until goroutines, files and mappings are what they were.
func backTo(t *testing.T, goroutines, files, maps int) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	end := time.After(patience)
	for {
		g, f := count(t)
		m := mapped(t)
		if g <= goroutines && f <= files && m <= maps {
			return
		}
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("%d goroutines, %d files, %d mappings; were %d, %d, %d", g, f, m, goroutines, files, maps)
		}
	}
}

func TestSoakReturnsToBaseline(t *testing.T) {
	const (
		writers = 4
		each    = 2500
		page    = 4096
	)
	src := make([]byte, 3*page)
	listen(t, Config{}, 64) // the poller's own files exist before the baseline is taken
	goroutines, files := count(t)
	maps := mapped(t)
	t.Run("soak", func(t *testing.T) {
		p := listen(t, Config{Queue: 32}, writers*8*page)
		peer := p.dial(t)
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				base := uint64(w * 8 * page)
				free := make(chan struct{}, 16)
				for i := range each {
					id := transfer.GrantID(w*each + i + 1)
					if err := p.tgt.Allow(transfer.Grant{ID: id, Key: testKey, Session: 1, Spans: []transfer.Span{{Off: base, Len: 8 * page}}}); err != nil {
						t.Errorf("allow: %v", err)
						return
					}
					free <- struct{}{}
					wr := transfer.Write{Grant: id, Key: testKey, Notify: []byte("n"), Segments: []transfer.Segment{
						{Off: base, Src: src[:1+i%page]}, {Off: base + page, Src: src[:i%len(src)]}}}
					wr.Done = func(err error) {
						if err != nil {
							t.Errorf("write: %v", err)
						}
						if !p.tgt.Revoke(id) {
							t.Errorf("grant %d: not fenced after its only write", id)
						}
						<-free
					}
					for {
						err := peer.Post(wr)
						if err == nil {
							break
						}
						if !errors.Is(err, transfer.ErrBusy) {
							t.Errorf("post: %v", err)
							return
						}
						runtime.Gosched()
					}
				}
				for range cap(free) {
					free <- struct{}{}
				}
			})
		}
		wg.Wait()
		if got := len(p.sink.landed); got != writers*each {
			t.Fatalf("%d notifications, want %d", got, writers*each)
		}
		tg := p.tgt.(*target)
		if n := tg.Counts(); n.Grants+n.Draining != 0 {
			t.Fatalf("left: %+v", n)
		}
		for _, c := range tg.Conns() {
			if c.table.used != [slots]bool{} || len(c.table.arena.holes) != 1 {
				t.Fatal("the grant table is not empty")
			}
		}
	})
	backTo(t, goroutines, files, maps)
}

func TestConnectionsLeaveNothingBehind(t *testing.T) {
	p := listen(t, Config{}, 4096)
	p.dial(t)
	goroutines, files := count(t)
	maps := mapped(t)
	for i := range 200 {
		s := transfer.SessionID(i + 10)
		if err := p.tgt.OpenSession(s); err != nil {
			t.Fatal(err)
		}
		if err := p.tgt.Allow(transfer.Grant{ID: transfer.GrantID(i + 1), Key: testKey, Session: s}); err != nil {
			t.Fatal(err)
		}
		peer, err := p.tr.Dial(t.Context(), p.tgt.Descriptor(), s)
		if err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 {
			_ = peer.Close()
			recv(t, p.sink.fenced, "fence")
			p.tgt.CloseSession(s)
		} else {
			p.tgt.CloseSession(s)
			recv(t, p.sink.fenced, "fence")
			_ = peer.Close()
		}
	}
	backTo(t, goroutines, files, maps)
	tg := p.tgt.(*target)
	if n := tg.Counts(); n != (grants.Counts{Sessions: 1, Unfenced: 1}) {
		t.Fatalf("left: %+v", n)
	}
}

// One write of many blocks, again and again: neither side may allocate per block.
func TestSteadyStateDoesNotAllocate(t *testing.T) {
	const blocks, block = 512, 4096
	p := listen(t, Config{}, blocks*block)
	p.allow(t, 1, transfer.Span{Off: 0, Len: blocks * block})
	peer := p.dial(t)
	src := make([]byte, block)
	segs := make([]transfer.Segment, blocks)
	for i := range segs {
		segs[i] = transfer.Segment{Off: uint64(i * block), Src: src}
	}
	done := make(chan error, 1)
	w := transfer.Write{Grant: 1, Key: testKey, Segments: segs, Done: func(err error) { done <- err }}
	round := func() {
		if err := peer.Post(w); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	round()
	if n := testing.AllocsPerRun(50, round); n > 8 {
		t.Fatalf("%v allocations for a write of %d blocks", n, blocks)
	}
}

func BenchmarkWrite(b *testing.B) {
	const blocks, block = 64, 64 << 10
	p := listen(b, Config{}, blocks*block)
	p.allow(b, 1, transfer.Span{Off: 0, Len: blocks * block})
	peer := p.dial(b)
	segs := make([]transfer.Segment, blocks)
	for i := range segs {
		segs[i] = transfer.Segment{Off: uint64(i * block), Src: make([]byte, block)}
	}
	free := make(chan struct{}, 4)
	w := transfer.Write{Grant: 1, Key: testKey, Segments: segs, Done: func(err error) {
		if err != nil {
			b.Error(err)
		}
		<-free
	}}
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

// TestRunsOfSegmentsAreStoredExactly: segments that follow each other on one side, both or none, some
// longer than a slice, some empty, some shorter than their array.
func TestRunsOfSegmentsAreStoredExactly(t *testing.T) {
	const size = 3 << 20
	rnd := rand.New(rand.NewPCG(1, 2))
	for round := range 20 {
		p := listen(t, Config{}, size)
		p.allow(t, 1, transfer.Span{Off: 0, Len: size})
		src := make([]byte, size)
		for i := range src {
			src[i] = byte(rnd.Uint32()) | 1 // never what the memory holds
		}
		want := make([]byte, size)
		var segs []transfer.Segment
		for at, from := 0, 0; at < size-700<<10 && from < size-700<<10; {
			n := []int{0, 1, 4096, 5000, 600 << 10}[rnd.IntN(5)]
			s := src[from : from+n]
			if rnd.IntN(3) == 0 {
				s = src[from : from+n : from+n]
			}
			segs = append(segs, transfer.Segment{Off: uint64(at), Src: s})
			copy(want[at:], s)
			at, from = at+n+rnd.IntN(2)*100, from+n+rnd.IntN(2)*50
		}
		peer := p.dial(t)
		if err := recv(t, post(t, peer, transfer.Write{Grant: 1, Key: testKey, Segments: segs}), "verdict"); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(p.mem, want) {
			t.Fatalf("round %d: wrong bytes", round)
		}
	}
}

// TestAllocationsDoNotGrowWithSegments.
func TestAllocationsDoNotGrowWithSegments(t *testing.T) {
	perWrite := func(blocks int) float64 {
		p := listen(t, Config{}, blocks*4096)
		p.allow(t, 1, transfer.Span{Off: 0, Len: uint64(blocks * 4096)})
		peer := p.dial(t)
		segs := make([]transfer.Segment, blocks)
		for i := range segs {
			segs[i] = transfer.Segment{Off: uint64(i * 4096), Src: make([]byte, 4096)}
		}
		done := make(chan error, 1)
		w := transfer.Write{Grant: 1, Key: testKey, Segments: segs, Done: func(err error) { done <- err }}
		return testing.AllocsPerRun(50, func() {
			if err := peer.Post(w); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		})
	}
	if one, many := perWrite(1), perWrite(2048); many > one+4 {
		t.Errorf("%v allocations for 1 segment, %v for 2048", one, many)
	}
}
