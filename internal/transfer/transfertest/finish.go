package transfertest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/baton-pd/baton/internal/transfer"
)

// testCompleteAfterApply looks at the memory from inside Landed: every byte must be
// there, and Done must not have been called before Landed has returned.
func testCompleteAfterApply(t *testing.T, o Options) {
	const block = 3<<20 + 17
	type expect struct {
		at       uint64
		src      []byte
		done     *outcome
		returned atomic.Bool // Landed is about to return
	}
	var want sync.Map // notify -> *expect
	var r *rig
	r = newRig(t, o, 4*block, func(_ transfer.GrantID, notify []byte) {
		v, ok := want.Load(string(notify))
		if !ok {
			t.Errorf("landed %q, which was never sent", notify)
			return
		}
		e := v.(*expect)
		if !bytes.Equal(r.mem[e.at:e.at+uint64(len(e.src))], e.src) {
			t.Errorf("%s landed before all its bytes", notify)
		}
		// Give a transport that completes too early the time to be caught.
		for range 2000 {
			runtime.Gosched()
		}
		if e.done.calls.Load() != 0 {
			t.Errorf("%s: Done before Landed has returned", notify)
		}
		e.returned.Store(true)
	})
	p, s := r.dial()
	g := r.allow(s, r.whole())
	var all []*expect
	for i, n := range []int{block, 1, 4096, 70_000, 1 << 20, block, 0, 5} {
		name := fmt.Sprintf("write %d", i)
		e := &expect{at: uint64(i%4) * block, src: r.random(n), done: &outcome{name: name, ended: make(chan struct{})}}
		want.Store(name, e)
		w := write(g, name, transfer.Segment{Off: e.at, Src: e.src})
		w.Done = func(err error) {
			if err == nil && !e.returned.Load() {
				err = errors.New("completed before Landed has returned")
			}
			e.done.done(err)
		}
		// One at a time: writes overlap, and a later one's bytes may be there when an earlier one lands.
		if err := p.Post(w); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := e.done.wait(t); err != nil {
			t.Errorf("%s of %d bytes: %v", name, n, err)
		}
		all = append(all, e)
	}
	r.within("Peer.Close", func() { _ = p.Close() })
	for _, e := range all {
		if n := e.done.calls.Load(); n != 1 {
			t.Errorf("%s: Done called %d times", e.done.name, n)
		}
	}
}

// testGrantOrder posts writes over the same bytes, long and short in turn, under two grants: those of each land in the order in which
// they were posted, and the last one's bytes stay.
func testGrantOrder(t *testing.T, o Options) {
	const part = 3<<20 + 17
	r := newRig(t, o, 2*part, nil)
	p, s := r.dial()
	grants := []transfer.Grant{r.allow(s, transfer.Span{Len: part}), r.allow(s, transfer.Span{Off: part, Len: part})}
	want := r.snapshot()
	var outs []*outcome
	const writes = 16
	for i := range writes {
		for k, g := range grants {
			size := []int{part, 1, 70_000, 300_000, 0, 4096, 1 << 20, 5}[(i+k)%8]
			seg := transfer.Segment{Off: uint64(k) * part, Src: r.random(size)}
			copy(want[seg.Off:], seg.Src)
			outs = append(outs, r.post(p, fmt.Sprintf("grant %d write %d", k, i), write(g, fmt.Sprintf("%02d", i), seg)))
		}
	}
	for _, out := range outs {
		if err := out.wait(t); err != nil {
			t.Fatalf("%s: %v", out.name, err)
		}
	}
	r.same("after writes over each other", want)
	for k, g := range grants {
		if got := r.sink.landings(g.ID); len(got) != writes || !slices.IsSorted(got) {
			t.Errorf("grant %d: landed %v", k, got)
		}
	}
}

// testPostFromDone posts each write from the Done of the one before, which would
// deadlock if Done ran under a lock that Post takes.
func testPostFromDone(t *testing.T, o Options) {
	r := newRig(t, o, 1<<16, nil)
	p, s := r.dial()
	g := r.allow(s, r.whole())
	const chain = 300
	last := &outcome{name: "last of the chain", ended: make(chan struct{})}
	var step func(i int)
	step = func(i int) {
		w := write(g, "link", transfer.Segment{Off: uint64(i), Src: []byte{byte(i)}})
		w.Done = func(err error) {
			if err != nil || i == chain-1 {
				last.done(err)
				return
			}
			step(i + 1)
		}
		if err := p.Post(w); err != nil {
			last.done(fmt.Errorf("post %d: %w", i, err))
		}
	}
	step(0)
	if err := last.wait(t); err != nil {
		t.Fatal(err)
	}
	for i := range chain {
		if r.mem[i] != byte(i) {
			t.Fatalf("byte %d is %d", i, r.mem[i])
		}
	}
	if n := len(r.sink.landings(g.ID)); n != chain {
		t.Errorf("%d of %d notifications landed", n, chain)
	}
}

// testManyWriters has 8 goroutines on 3 sessions, each with a grant and a part of the
// memory of its own.
func testManyWriters(t *testing.T, o Options) {
	const sessions, writers, writes, part = 3, 8, 60, 96 << 10
	r := newRig(t, o, writers*part, nil)
	want := make([]byte, len(r.mem))
	peers := make([]transfer.Peer, sessions)
	ids := make([]transfer.SessionID, sessions)
	for i := range peers {
		peers[i], ids[i] = r.dial()
	}
	grants := make([]transfer.Grant, writers)
	plans := make([][]transfer.Segment, writers)
	for k := range writers {
		base := uint64(k * part)
		grants[k] = r.allow(ids[k%sessions], transfer.Span{Off: base, Len: part})
		for i := range writes { // 60 blocks of up to 1600 bytes fill the part
			seg := transfer.Segment{Off: base + uint64(i)*(part/writes), Src: r.random(1 + r.rng.IntN(part/writes))}
			plans[k] = append(plans[k], seg)
		}
	}
	copy(want, r.mem)
	for _, plan := range plans {
		for _, seg := range plan {
			copy(want[seg.Off:], seg.Src)
		}
	}
	var wg sync.WaitGroup
	for k := range writers {
		wg.Go(func() {
			for i, seg := range plans[k] {
				var note [8]byte
				binary.LittleEndian.PutUint64(note[:], uint64(i)+1)
				out := r.post(peers[k%sessions], fmt.Sprintf("writer %d write %d", k, i), write(grants[k], string(note[:]), seg))
				if i%7 == 0 { // sometimes in step, mostly ahead
					<-out.ended
				}
			}
		})
	}
	r.within("all writers", wg.Wait)
	r.mu.Lock()
	outs := r.outcomes
	r.mu.Unlock()
	if len(outs) != writers*writes {
		t.Errorf("%d of %d writes were accepted", len(outs), writers*writes)
	}
	for _, out := range outs {
		if err := out.wait(t); err != nil {
			t.Fatalf("%s: %v", out.name, err)
		}
	}
	r.same("after all writers", want)
	for k, g := range grants {
		seen := make(map[uint64]int)
		for _, n := range r.sink.landings(g.ID) {
			seen[binary.LittleEndian.Uint64([]byte(n))]++
		}
		for i := range writes {
			if n := seen[uint64(i)+1]; n != 1 {
				t.Errorf("writer %d write %d landed %d times", k, i, n)
			}
		}
	}
}

// testFullQueue holds the destination, fills the queue until Post says ErrBusy, and lets
// go: what was accepted completes, what was refused never happens.
func testFullQueue(t *testing.T, o Options) {
	gate := make(chan struct{})
	r := newRig(t, o, 1<<20, func(transfer.GrantID, []byte) { <-gate })
	p, s := r.dial()
	g := r.allow(s, r.whole())
	var outs []*outcome
	var busy error
	for i := 0; busy == nil && i < 1<<17; i++ {
		var out *outcome
		src := []byte{1, 2, 3, byte(i)}
		out, busy = r.offer(p, fmt.Sprintf("write %d", i), write(g, fmt.Sprint(i), transfer.Segment{Off: uint64(i % 1000), Src: src}))
		if out != nil {
			outs = append(outs, out)
		}
	}
	if !errors.Is(busy, transfer.ErrBusy) {
		close(gate)
		t.Fatalf("a queue of %d writes was not enough: %v", len(outs), busy)
	}
	tick := r.ticker()
	close(gate)
	for _, out := range outs {
		if err := out.wait(t); err != nil {
			t.Fatalf("%s: %v", out.name, err)
		}
	}
	// Some Done comes after the refusal, and then there is room.
	r.within("waiting for a Done after ErrBusy", func() { <-tick })
	r.must(p, "retry", write(g, "retry"))
	seen := make(map[string]int)
	for _, n := range r.sink.landings(g.ID) {
		seen[n]++
	}
	for i := range outs {
		if n := seen[fmt.Sprint(i)]; n != 1 {
			t.Errorf("write %d landed %d times", i, n)
		}
	}
	if len(seen) != len(outs)+1 || seen["retry"] != 1 {
		t.Errorf("%d different writes landed, want %d and the retry", len(seen), len(outs))
	}
}
