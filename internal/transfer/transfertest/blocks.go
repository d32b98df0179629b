package transfertest

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

func testDescribe(t *testing.T, o Options) {
	r := newRig(t, o, 1<<16, nil)
	d := r.target.Descriptor()
	target, _ := o.New(t)
	if d.Kind != target.Kind() || d.Kind != r.source.Kind() {
		t.Errorf("kinds: descriptor %q, target %q, source %q", d.Kind, target.Kind(), r.source.Kind())
	}
	if d.Size != uint64(len(r.mem)) {
		t.Errorf("descriptor says %d bytes, registered %d", d.Size, len(r.mem))
	}
	if target.Caps() != o.Caps {
		t.Errorf("caps %+v, want %+v", target.Caps(), o.Caps)
	}
	if !r.source.Reachable(d) {
		t.Errorf("own target %+v is not reachable", d)
	}
	d.Kind = "pigeon"
	if r.source.Reachable(d) {
		t.Error("a target of another kind is reachable")
	}
	p, _ := r.dial()
	if p.Kind() != r.source.Kind() {
		t.Errorf("peer kind %q, want %q", p.Kind(), r.source.Kind())
	}
	if err := p.Err(); err != nil {
		t.Errorf("Err of a live peer: %v", err)
	}
}

// blockSizes around what implementations cut at: words, iovecs, pages, slices, sockets.
var blockSizes = []int{
	1, 1, 2, 3, 7, 8, 9, 63, 64, 65, 511, 4095, 4096, 4097, 16<<10 - 1, 64 << 10, 64<<10 + 1,
	100_003, 256 << 10, 256<<10 + 1, 1 << 20, 1<<20 + 3, 2<<20 + 5,
}

// testScatter writes blocks of all sizes to random places, each byte once, and then
// compares the whole memory, so that a byte outside shows as well.
func testScatter(t *testing.T, o Options) {
	r := newRig(t, o, 12<<20, nil)
	p, s := r.dial()
	want := r.snapshot()

	sizes := append(slices.Clone(blockSizes), blockSizes[:17]...)
	r.rng.Shuffle(len(sizes), func(i, j int) { sizes[i], sizes[j] = sizes[j], sizes[i] })
	var spans []transfer.Span
	var segs []transfer.Segment
	at := r.rng.IntN(100)
	for _, n := range sizes {
		if k := len(spans) - 1; k >= 0 && r.rng.IntN(3) == 0 {
			spans[k].Len += uint64(n) // next to the block before, in the same span
		} else {
			at += 1 + r.rng.IntN(6000)
			spans = append(spans, transfer.Span{Off: uint64(at), Len: uint64(n)})
		}
		src := r.random(n + 3)[r.rng.IntN(3):][:n:n] // of any alignment
		segs = append(segs, transfer.Segment{Off: uint64(at), Src: src})
		copy(want[at:], src)
		at += n
	}
	if at > len(r.mem) {
		t.Fatalf("blocks need %d bytes", at)
	}
	g := r.allow(s, spans...)
	r.rng.Shuffle(len(segs), func(i, j int) { segs[i], segs[j] = segs[j], segs[i] })
	var outs []*outcome
	var notes []string
	for len(segs) > 0 {
		n := min(1+r.rng.IntN(5), len(segs))
		note := fmt.Sprintf("write %d", len(notes))
		outs = append(outs, r.post(p, note, write(g, note, segs[:n]...)))
		notes = append(notes, note)
		segs = segs[n:]
	}
	for _, out := range outs {
		if err := out.wait(t); err != nil {
			t.Fatalf("%s: %v", out.name, err)
		}
	}
	r.same("after all writes", want)
	got := r.sink.landings(g.ID)
	slices.Sort(got)
	slices.Sort(notes)
	if !slices.Equal(got, notes) {
		t.Errorf("landed %q, want %q", got, notes)
	}
}

// testManySegments has more blocks in one write than an iovec may hold on some systems.
func testManySegments(t *testing.T, o Options) {
	r := newRig(t, o, 1<<20, nil)
	p, s := r.dial()
	g := r.allow(s, r.whole())
	want := r.snapshot()
	var segs []transfer.Segment
	for at := 0; len(segs) < 2500; at += 400 {
		src := r.random(r.rng.IntN(400)) // some are empty
		segs = append(segs, transfer.Segment{Off: uint64(at), Src: src})
		copy(want[at:], src)
	}
	note := string(make([]byte, transfer.MaxNotify))
	r.must(p, "2500 segments", write(g, note, segs...))
	r.same("after the write", want)
	if got := r.sink.landings(g.ID); !slices.Equal(got, []string{note}) {
		t.Errorf("landed %q", got)
	}
}

// testRefusals posts what must not be stored, next to what may be.
func testRefusals(t *testing.T, o Options) {
	r := newRig(t, o, 1<<20, nil)
	p, s := r.dial()
	p2, s2 := r.dial()
	size := uint64(len(r.mem))
	g := r.allow(s, transfer.Span{Off: 4096, Len: 8192}, transfer.Span{Off: 20480, Len: 100}, transfer.Span{Off: size - 64, Len: 64})
	other := r.allow(s2, transfer.Span{Off: 65536, Len: 4096})
	revoked := r.allow(s, transfer.Span{Off: 131072, Len: 4096})
	r.target.Revoke(revoked.ID)
	ended := r.allow(r.open(), transfer.Span{Off: 262144, Len: 4096})
	r.target.CloseSession(ended.Session)

	seg := func(off uint64, n int) transfer.Segment { return transfer.Segment{Off: off, Src: r.random(n)} }
	good := func() transfer.Segment { return seg(4096, 4096) }
	wrongKey := func(change func(*room.Key)) transfer.Grant {
		k := g
		change(&k.Key)
		return k
	}
	for _, c := range []struct {
		name string
		peer transfer.Peer
		w    transfer.Write
		want error
	}{
		{"one byte before a span", p, write(g, "x", seg(4095, 10)), transfer.ErrBounds},
		{"over the end of a span", p, write(g, "x", seg(12287, 2)), transfer.ErrBounds},
		{"right after a span", p, write(g, "x", seg(12288, 1)), transfer.ErrBounds},
		{"larger than a span", p, write(g, "x", seg(4096, 8193)), transfer.ErrBounds},
		{"over the gap of two spans", p, write(g, "x", seg(12000, 8500)), transfer.ErrBounds},
		{"at 0", p, write(g, "x", seg(0, 64)), transfer.ErrBounds},
		{"over the end of memory", p, write(g, "x", seg(size-10, 11)), transfer.ErrBounds},
		{"behind memory", p, write(g, "x", seg(size, 1)), transfer.ErrBounds},
		{"at 2^63", p, write(g, "x", seg(1<<63, 16)), transfer.ErrBounds},
		{"end overflows to 0", p, write(g, "x", seg(math.MaxUint64-15, 16)), transfer.ErrBounds},
		{"end overflows into a span", p, write(g, "x", seg(math.MaxUint64-15, 16+5000)), transfer.ErrBounds},
		{"good, then outside", p, write(g, "x", good(), seg(12288, 1)), transfer.ErrBounds},
		{"outside, then good", p, write(g, "x", seg(12288, 1), good()), transfer.ErrBounds},
		{"unknown grant", p, write(transfer.Grant{ID: g.ID + 1000, Key: g.Key}, "x", good()), transfer.ErrGrant},
		{"grant 0", p, write(transfer.Grant{Key: g.Key}, "x", good()), transfer.ErrGrant},
		{"grant of another session", p, write(other, "x", seg(65536, 4096)), transfer.ErrGrant},
		{"grant of this session from another", p2, write(g, "x", good()), transfer.ErrGrant},
		{"revoked grant", p, write(revoked, "x", seg(131072, 4096)), transfer.ErrGrant},
		{"grant of a closed session", p, write(ended, "x", seg(262144, 4096)), transfer.ErrGrant},
		{"another room", p, write(wrongKey(func(k *room.Key) { k.Room++ }), "x", good()), transfer.ErrGrant},
		{"another generation", p, write(wrongKey(func(k *room.Key) { k.Gen++ }), "x", good()), transfer.ErrGrant},
		{"notification under a revoked grant", p, write(revoked, "x"), transfer.ErrGrant},
		{"notification under an unknown grant", p, write(transfer.Grant{ID: g.ID + 1000, Key: g.Key}, "x"), transfer.ErrGrant},
	} {
		before := r.snapshot()
		if err := r.post(c.peer, c.name, c.w).wait(t); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		r.same(c.name, before)
	}
	r.sink.mu.Lock()
	if n := len(r.sink.landed); n != 0 {
		t.Errorf("%d notifications of refused writes landed: %v", n, r.sink.landed)
	}
	r.sink.mu.Unlock()

	// A refusal is the write's, not the connection's.
	want := r.snapshot()
	w, w2 := good(), seg(65536, 4096)
	copy(want[w.Off:], w.Src)
	copy(want[w2.Off:], w2.Src)
	r.must(p, "good write after the refusals", write(g, "", w))
	r.must(p2, "good write after the refusals, other session", write(other, "", w2))
	r.same("good writes", want)
}

// testAllowRefusals: grants that would let a writer out of the memory, or belong to nobody.
func testAllowRefusals(t *testing.T, o Options) {
	r := newRig(t, o, 1<<16, nil)
	s := r.open()
	size := uint64(len(r.mem))
	g := r.allow(s, transfer.Span{Off: 0, Len: size})
	for _, c := range []struct {
		name string
		g    transfer.Grant
		want error // nil: any
	}{
		{"span over the end", transfer.Grant{ID: g.ID + 100, Session: s, Spans: []transfer.Span{{Off: 1, Len: size}}}, transfer.ErrBounds},
		{"span that overflows", transfer.Grant{ID: g.ID + 101, Session: s, Spans: []transfer.Span{{Off: 16, Len: math.MaxUint64 - 8}}}, transfer.ErrBounds},
		{"span behind the end", transfer.Grant{ID: g.ID + 102, Session: s, Spans: []transfer.Span{{Off: size + 1, Len: 0}}}, transfer.ErrBounds},
		{"session never opened", transfer.Grant{ID: g.ID + 103, Session: s + 1000}, transfer.ErrSession},
		{"id in use", transfer.Grant{ID: g.ID, Session: s}, nil},
		{"id 0", transfer.Grant{ID: 0, Session: s}, nil},
	} {
		if err := r.target.Allow(c.g); err == nil || c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

// testNothingToStore: writes without bytes still tell and still complete.
func testNothingToStore(t *testing.T, o Options) {
	r := newRig(t, o, 1<<16, nil)
	p, s := r.dial()
	g := r.allow(s, transfer.Span{Off: 4096, Len: 4096})
	empty := r.allow(s)
	before := r.snapshot()
	r.must(p, "notification only", write(g, "note"))
	r.must(p, "empty segment", write(g, "empty", transfer.Segment{Off: 4096}))
	r.must(p, "nothing at all", write(g, ""))
	r.must(p, "notification under a grant without spans", write(empty, "bare"))
	if err := r.post(p, "byte under a grant without spans", write(empty, "", transfer.Segment{Off: 4096, Src: []byte{1}})).wait(t); !errors.Is(err, transfer.ErrBounds) {
		t.Errorf("byte under a grant without spans: %v", err)
	}
	r.same("after empty writes", before)
	got := r.sink.landings(g.ID)
	slices.Sort(got)
	if !slices.Equal(got, []string{"empty", "note"}) {
		t.Errorf("landed %q", got)
	}
	if got := r.sink.landings(empty.ID); !slices.Equal(got, []string{"bare"}) {
		t.Errorf("landed %q under the empty grant", got)
	}
}

func testTooLarge(t *testing.T, o Options) {
	r := newRig(t, o, 1<<16, nil)
	p, s := r.dial()
	g := r.allow(s, r.whole())
	o1, err := r.offer(p, "long notification", write(g, string(make([]byte, transfer.MaxNotify+1))))
	if o1 != nil || !errors.Is(err, transfer.ErrTooLarge) {
		t.Errorf("notification of %d bytes: %v, want %v from Post", transfer.MaxNotify+1, err, transfer.ErrTooLarge)
	}
}
