package shm

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/transfer"
)

// TestHugeMemory: the source maps and unmaps memory in reserved huge pages, though the pool ends within one.
func TestHugeMemory(t *testing.T) {
	pool, err := kv.Open(kv.Config{Name: "huge", PageBytes: 4096, Pages: 700, Huge: kv.HugeTLB})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := pool.Close(); err != nil {
			t.Error(err)
		}
	}()
	if pool.Huge() != kv.HugeTLB {
		t.Skip("2 reserved huge pages are needed: sysctl vm.nr_hugepages=2")
	}
	mem, fd := pool.Memory()
	tr := New(Config{Dir: socketDir(t)})
	sink := newSink()
	tgt, err := tr.Listen(transfer.Memory{Bytes: mem, FD: fd}, sink)
	if err != nil {
		t.Fatal(err)
	}
	defer tgt.Close()
	if err := tgt.OpenSession(1); err != nil {
		t.Fatal(err)
	}
	size := uint64(len(mem))
	if err := tgt.Allow(transfer.Grant{ID: 1, Session: 1, Spans: []transfer.Span{{Off: 0, Len: size}}}); err != nil {
		t.Fatal(err)
	}
	peer, err := tr.Dial(t.Context(), tgt.Descriptor(), 1)
	if err != nil {
		t.Fatal(err)
	}
	src := bytes.Repeat([]byte{7}, len(mem))
	done := make(chan error, 1)
	if err := peer.Post(transfer.Write{Grant: 1, Segments: []transfer.Segment{{Src: src}}, Done: func(err error) { done <- err }}); err != nil {
		t.Fatal(err)
	}
	if err := recv(t, done, "the end of the write"); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(mem, src) {
		t.Error("other bytes arrived")
	}
	if err := peer.Close(); err != nil {
		t.Error(err)
	}
	if id := recv(t, sink.fenced, "the fence"); id != 1 {
		t.Errorf("session %d is fenced", id)
	}
	if left := mappingsOf(t, "memfd:baton-kv-huge"); left != 1 {
		t.Errorf("%d mappings of the pool are left, want the pool's own", left)
	}
}

// mappingsOf counts this process's mappings of files with that name.
func mappingsOf(t *testing.T, name string) int {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(maps), name)
}

// TestBudget: slow slices shorten the next ones, fast ones lengthen them, both within bounds.
func TestBudget(t *testing.T) {
	b := maxSlice
	for range 20 {
		b = nextBudget(b, time.Second)
	}
	if b != minSlice {
		t.Errorf("after slow slices %d, want %d", b, minSlice)
	}
	if got := nextBudget(2*minSlice, sliceTime*3/4); got != 2*minSlice {
		t.Errorf("a slice of fair length changed the next to %d", got)
	}
	for range 20 {
		b = nextBudget(b, time.Microsecond)
	}
	if b != maxSlice {
		t.Errorf("after fast slices %d, want %d", b, maxSlice)
	}
}
