package shm

import (
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

var testKey = room.Key{Room: 77, Gen: 3}

func newTestTable(t testing.TB) (*table, control) {
	t.Helper()
	c, fd, err := newControl()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = unix.Munmap(c.b)
		_ = unix.Close(fd)
	})
	if err := c.check(); err != nil {
		t.Fatal(err)
	}
	return newTable(c), c
}

func TestGrantIsFoundOnlyByItsNames(t *testing.T) {
	tab, ctl := newTestTable(t)
	if _, ok := ctl.find(1, testKey); ok {
		t.Fatal("found in an empty table")
	}
	slot, ok := tab.put(1, testKey, []transfer.Span{{Off: 8, Len: 8}})
	if !ok {
		t.Fatal("table full")
	}
	for _, k := range []room.Key{{}, {Room: 77}, {Room: 78, Gen: 3}} {
		if _, ok := ctl.find(1, k); ok {
			t.Errorf("found under key %v", k)
		}
	}
	if _, ok := ctl.find(1+slots, testKey); ok {
		t.Error("found under the id of a neighbour")
	}
	p, ok := ctl.find(1, testKey)
	if !ok || p.slot != slot {
		t.Fatalf("found %v, %v", p, ok)
	}
	if ctl.leave(p) {
		t.Error("a grant that is live asks for a report")
	}
	if !tab.revoke(slot) {
		t.Fatal("nobody is inside")
	}
	if ctl.enter(p) {
		t.Fatal("entered a revoked grant")
	}
	if _, ok := ctl.find(1, testKey); ok {
		t.Fatal("found after revoke")
	}
}

func TestRevokeSeesTheWriter(t *testing.T) {
	tab, ctl := newTestTable(t)
	slot, _ := tab.put(5, testKey, nil)
	p, ok := ctl.find(5, testKey)
	if !ok {
		t.Fatal("not found")
	}
	if tab.revoke(slot) || tab.quiet(slot) {
		t.Fatal("a writer is inside, yet the grant is quiet")
	}
	if ctl.enter(p) {
		t.Fatal("a second writer entered after the revoke")
	}
	if _, ok := ctl.find(5, testKey); ok {
		t.Fatal("found after revoke")
	}
	if !tab.used[slot] {
		t.Fatal("slot is free although a writer is inside")
	}
	if !ctl.leave(p) {
		t.Fatal("the last writer out does not report")
	}
	if !tab.quiet(slot) || tab.used[slot] {
		t.Fatal("not quiet after the writer has left")
	}
	// The next life of the slot is not the writer's.
	if again, _ := tab.put(5+slots, testKey, nil); again != slot {
		t.Fatalf("slot %d, want %d", again, slot)
	}
	if ctl.enter(p) {
		t.Fatal("entered another grant with an old place")
	}
}

// Writers enter and leave while the grant is revoked: either Revoke says that it is quiet,
// or exactly one writer reports, and in both cases nobody gets in afterwards.
func TestRevokeRacesWithWriters(t *testing.T) {
	tab, ctl := newTestTable(t)
	told, quiet := 0, 0
	for id := transfer.GrantID(1); id <= 3000; id++ {
		slot, ok := tab.put(id, testKey, nil)
		if !ok {
			t.Fatal("table full")
		}
		var wg sync.WaitGroup
		reports := make([]int, 2)
		for w := range reports {
			wg.Go(func() {
				p, ok := ctl.find(id, testKey)
				for ok {
					runtime.Gosched()
					if ctl.leave(p) {
						reports[w]++
					}
					ok = ctl.enter(p)
				}
			})
		}
		if id%2 == 0 {
			runtime.Gosched()
		}
		was := tab.revoke(slot)
		wg.Wait()
		n := reports[0] + reports[1]
		switch {
		case was && n == 0:
			quiet++
		case !was && n == 1:
			told++
			if !tab.quiet(slot) {
				t.Fatalf("grant %d: reported, but a writer is inside", id)
			}
		default:
			t.Fatalf("grant %d: quiet at revoke %v, %d reports", id, was, n)
		}
	}
	t.Logf("%d revokes were quiet, %d were reported", quiet, told)
}

func TestTableFillsUpAndEmpties(t *testing.T) {
	tab, _ := newTestTable(t)
	for round := range 2 {
		var taken []int
		for i := range window { // the same place for all
			slot, ok := tab.put(transfer.GrantID(7+i*slots), testKey, nil)
			if !ok {
				t.Fatalf("round %d: full after %d", round, i)
			}
			taken = append(taken, slot)
		}
		if _, ok := tab.put(7+window*slots, testKey, nil); ok {
			t.Fatal("a grant beyond the window")
		}
		for _, s := range taken {
			if !tab.revoke(s) {
				t.Fatal("not quiet")
			}
		}
	}
	if _, ok := tab.put(1, testKey, make([]transfer.Span, spans)); !ok {
		t.Fatal("all spans are free")
	}
	if _, ok := tab.put(2, testKey, make([]transfer.Span, 1)); ok {
		t.Fatal("no span is free")
	}
	if tab.used[2] {
		t.Fatal("a refused grant keeps its slot")
	}
	if _, ok := tab.put(2, testKey, nil); !ok {
		t.Fatal("a grant without spans needs none")
	}
}

// TestAllowedAgainstBytes checks the search in shared memory against one byte a byte.
func TestAllowedAgainstBytes(t *testing.T) {
	const size = 48
	tab, ctl := newTestTable(t)
	rnd := rand.New(rand.NewPCG(1, 2))
	for id := transfer.GrantID(1); id <= 200; id++ {
		var list []transfer.Span
		for at := rnd.Uint64N(6); at < size; {
			n := min(1+rnd.Uint64N(9), size-at)
			list = append(list, transfer.Span{Off: at, Len: n})
			at += n + rnd.Uint64N(6)
		}
		owner := make([]int, size) // which span owns a byte, 0 none
		for k, s := range list {
			for i := range s.Len {
				owner[s.Off+i] = k + 1
			}
		}
		slot, _ := tab.put(id, testKey, list)
		p, ok := ctl.find(id, testKey)
		if !ok {
			t.Fatal("not found")
		}
		for off := uint64(0); off < size; off++ {
			for n := uint64(1); off+n <= size; n++ {
				want := owner[off] != 0 && !slices.ContainsFunc(owner[off:off+n], func(o int) bool { return o != owner[off] })
				if got := ctl.allowed(p, off, n, size); got != want {
					t.Fatalf("%v: allowed(%d+%d) = %v", list, off, n, got)
				}
			}
		}
		ctl.leave(p)
		if !tab.revoke(slot) {
			t.Fatal("not quiet")
		}
	}
	if len(tab.arena.holes) != 1 || tab.arena.holes[0] != (hole{0, spans}) {
		t.Fatalf("spans are lost: %v", tab.arena.holes)
	}
}

// What a broken target may put into shared memory must not lead a writer out of its mapping.
func TestWriterDistrustsTheTable(t *testing.T) {
	tab, ctl := newTestTable(t)
	slot, _ := tab.put(1, testKey, []transfer.Span{{Off: 0, Len: math.MaxUint64}})
	p, _ := ctl.find(1, testKey)
	for _, r := range [][2]uint64{{0, 101}, {100, 1}, {101, 0}, {math.MaxUint64, 2}, {50, math.MaxUint64}} {
		if ctl.allowed(p, r[0], r[1], 100) {
			t.Errorf("%d+%d of 100 bytes is allowed", r[0], r[1])
		}
	}
	at := slotsAt + slot*slotLen
	for _, bad := range [][2]uint32{{math.MaxUint32, 0}, {1, spans}, {spans, 1}, {1, math.MaxUint32}} {
		ctl.u32(at + 28).Store(bad[0])
		ctl.u32(at + 32).Store(bad[1])
		if ctl.allowed(p, 0, 1, 100) {
			t.Errorf("%d spans from number %d on are believed", bad[0], bad[1])
		}
	}
}

func TestArenaAgainstBitmap(t *testing.T) {
	const size = 200
	type block struct{ at, n uint32 }
	a := newArena(size)
	owned := make([]bool, size)
	var blocks []block
	rnd := rand.New(rand.NewPCG(3, 4))
	for step := range 5000 {
		if n := rnd.Uint32N(30); rnd.IntN(2) == 0 {
			at, ok := a.take(n)
			run, longest := uint32(0), uint32(0)
			for _, o := range owned {
				if run++; o {
					run = 0
				}
				longest = max(longest, run)
			}
			if ok != (longest >= n) {
				t.Fatalf("step %d: take %d: %v, longest run %d", step, n, ok, longest)
			}
			if !ok || n == 0 {
				continue
			}
			for i := at; i < at+n; i++ {
				if owned[i] {
					t.Fatalf("step %d: number %d handed out twice", step, i)
				}
				owned[i] = true
			}
			blocks = append(blocks, block{at, n})
		} else if len(blocks) > 0 {
			i := rnd.IntN(len(blocks))
			b := blocks[i]
			blocks = slices.Delete(blocks, i, i+1)
			a.give(b.at, b.n)
			for j := b.at; j < b.at+b.n; j++ {
				owned[j] = false
			}
		}
	}
	a.give(0, 0)
	for _, b := range blocks {
		a.give(b.at, b.n)
	}
	if len(a.holes) != 1 || a.holes[0] != (hole{0, size}) {
		t.Fatalf("holes at the end: %v", a.holes)
	}
}
