package nixl

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/transfer"
)

// cutter is a peer with no process behind it, for the cutting of writes into pieces.
func cutter(source []byte, block uint64) *peer {
	p := &peer{source: source, block: block, buffer: make([]byte, slots*slotBytes), pieces: make(map[uint64]piece), tr: &Transport{}}
	p.lines.init()
	for i := range slots {
		p.free = append(p.free, i)
	}
	return p
}

// pieces cuts a whole write and returns its jobs; it does the copies on dst.
func (p *peer) cutAll(t *testing.T, w transfer.Write, dst []byte) (jobs []job) {
	t.Helper()
	f := &flight{Write: w, state: stateStoring, line: &line{}, seq: 1}
	for i := range w.Segments {
		f.total += uint64(len(w.Segments[i].Src))
	}
	if f.total > 0 {
		p.ready = append(p.ready, f)
	}
	f.turn = true
	for f.sent < f.total {
		wk, ok := p.take()
		if !ok {
			t.Fatal("no piece was cut though all slots are free")
		}
		var j job
		p.cut(&j, wk)
		p.handOut(&j, wk)
		from := p.source
		if wk.slot >= 0 && (p.source == nil || j.Region == 1) {
			from = p.buffer
		}
		for _, b := range j.Blocks {
			copy(dst[b.To:b.To+b.Len], from[b.From:b.From+b.Len])
		}
		jobs = append(jobs, j)
		delete(p.pieces, wk.id)
		f.pieces--
		if wk.slot >= 0 {
			p.free = append(p.free, wk.slot)
		}
	}
	return jobs
}

// TestCut compares pieces with the definition of a write, for segments in and outside of registered memory.
func TestCut(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	source, outside := make([]byte, 24<<20), make([]byte, 4<<20)
	for _, b := range [][]byte{source, outside} {
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
	}
	for round := range 40 {
		got, want := make([]byte, 40<<20), make([]byte, 40<<20)
		var w transfer.Write
		at := 0
		for at < 36<<20 && len(w.Segments) < 200 {
			from := source
			if rnd.IntN(3) == 0 {
				from = outside
			}
			n := []int{0, 1, 100, 4096, 65536, 1<<20 + 1, 3 << 20}[rnd.IntN(7)]
			off := rnd.IntN(len(from) - n + 1)
			if rnd.IntN(4) > 0 {
				at += rnd.IntN(5000)
			}
			w.Segments = append(w.Segments, transfer.Segment{Off: uint64(at), Src: from[off : off+n]})
			copy(want[at:], from[off:off+n])
			at += n
		}
		var block uint64
		src := source
		switch round % 3 {
		case 0:
			src = nil
		case 1:
			block = 4096
		}
		for _, j := range cutter(src, block).cutAll(t, w, got) {
			if len(j.Blocks) > pieceBlocks || len(j.Blocks) == 0 {
				t.Fatalf("a piece of %d blocks", len(j.Blocks))
			}
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("round %d: the pieces are not the write", round)
		}
	}
}

// TestCutByIndex: whole pages go by index and are not merged; a page cut short goes by address, in a piece of
// its own.
func TestCutByIndex(t *testing.T) {
	source := make([]byte, 1<<20)
	p := cutter(source, 4096)
	w := transfer.Write{Segments: []transfer.Segment{{Off: 8192, Src: source[:4096]}, {Off: 12288, Src: source[4096:8192]}, {Off: 0, Src: source[40960 : 40960+100]}}}
	jobs := p.cutAll(t, w, make([]byte, 1<<20))
	want := []job{
		{Index: true, Blocks: []block{{0, 8192, 4096}, {4096, 12288, 4096}}},
		{Blocks: []block{{40960, 0, 100}}},
	}
	if !reflect.DeepEqual(jobs, want) {
		t.Errorf("cut into %+v, want %+v", jobs, want)
	}
	w.Segments = w.Segments[:2]
	p = cutter(source, 0)
	jobs = p.cutAll(t, w, make([]byte, 1<<20))
	if len(jobs) != 1 || len(jobs[0].Blocks) != 1 || jobs[0].Note == nil {
		t.Errorf("neighbours on both sides: %+v, want one block with the notification", jobs)
	}
}

// TestCutAllocatesNothing: a write of many blocks costs no allocation per block.
func TestCutAllocatesNothing(t *testing.T) {
	source := make([]byte, 16<<20)
	var w transfer.Write
	for i := range 4096 {
		w.Segments = append(w.Segments, transfer.Segment{Off: uint64(4095-i) * 4096, Src: source[i*4096 : i*4096+4096]})
	}
	p := cutter(source, 4096)
	f := &flight{}
	var j, back job
	var buf []byte
	n := testing.AllocsPerRun(50, func() {
		*f = flight{Write: w, state: stateStoring, total: 16 << 20}
		for f.sent < f.total {
			j.Blocks = j.Blocks[:0]
			p.cut(&j, work{f: f, slot: -1})
			buf = appendWrite(buf[:0], &j)
			if err := back.parse(buf[headerLen:]); err != nil {
				t.Fatal(err)
			}
		}
	})
	if n > 0 {
		t.Errorf("%v allocations for a write of 4,096 blocks", n)
	}
}

// TestPools: both sides with pools of the same pages, as workers have: from registered memory, by index, and
// mixed with other memory.
func TestPools(t *testing.T) {
	needLibrary(t)
	const page, pages = 64 << 10, 256
	pool, err := kv.Open(kv.Config{Name: "nixl-test", PageBytes: page, Pages: pages})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pool.Close() })
	b, fd := pool.Memory()
	for i := range b {
		b[i] = byte(i*i>>7 + i)
	}
	target, source := New(testConfig()), New(testConfig())
	source.UsePool(transfer.Memory{Bytes: b, FD: fd}, page)
	target.UsePool(transfer.Memory{Bytes: make([]byte, 1), FD: -1}, page)
	r := newRig(t, target, source, page*pages)
	if r.peer.block != page {
		t.Fatalf("blocks of %d bytes were agreed on, want %d", r.peer.block, page)
	}
	r.allow(t, 1, transfer.Span{Len: page * pages})
	rnd := rand.New(rand.NewPCG(7, 8))
	want := make([]byte, len(r.mem))
	var w transfer.Write
	for i, from := range rnd.Perm(pages) {
		src := b[from*page : (from+1)*page]
		switch i % 50 {
		case 7:
			src = src[:page/3]
		case 9:
			src = bytes.Clone(src)
		}
		w.Segments = append(w.Segments, transfer.Segment{Off: uint64(i * page), Src: src})
		copy(want[i*page:], src)
	}
	w.Grant, w.Notify = 1, []byte("all pages")
	if err := recv(t, r.post(t, w), "Done"); err != nil {
		t.Fatal(err)
	}
	if got := recv(t, r.sink.landed, "Landed"); got != "all pages" {
		t.Errorf("landed %q", got)
	}
	if !bytes.Equal(r.mem, want) {
		t.Error("the memory is not what was written")
	}
}

// TestOrder: the chunks of a room land in the order in which they were posted, whatever their sizes.
func TestOrder(t *testing.T) {
	needLibrary(t)
	r := newRig(t, New(testConfig()), New(testConfig()), 8<<20)
	r.allow(t, 1, transfer.Span{Len: 8 << 20})
	rnd := rand.New(rand.NewPCG(9, 10))
	src := make([]byte, 8<<20)
	const n = 200
	var done []<-chan error
	for i := range n {
		size := []int{0, 10, 5000, 3 << 20}[rnd.IntN(4)]
		done = append(done, r.post(t, transfer.Write{Grant: 1, Notify: fmt.Appendf(nil, "%d", i), Segments: []transfer.Segment{{Src: src[:size]}}}))
	}
	for i := range n {
		if got := recv(t, r.sink.landed, "Landed"); got != fmt.Sprint(i) {
			t.Fatalf("landing %d is of write %s", i, got)
		}
	}
	for _, d := range done {
		if err := recv(t, d, "Done"); err != nil {
			t.Error(err)
		}
	}
}

// TestNoteComesLast: the notification of a write of several pieces is sent when all of them are complete, in
// whatever order that happens.
func TestNoteComesLast(t *testing.T) {
	p := cutter(make([]byte, 20<<20), 0)
	p.wake.L = &p.mu
	p.out = newOutbox()
	f := &flight{Write: transfer.Write{Segments: []transfer.Segment{{Src: p.source}}}, total: 20 << 20, state: stateStoring, line: &line{}, seq: 1}
	p.ready = append(p.ready, f)
	var ids []uint64
	for len(p.ready) > 0 {
		w, _ := p.take()
		var j job
		p.cut(&j, w)
		p.handOut(&j, w)
		ids = append(ids, w.id)
		if j.Note != nil {
			t.Fatalf("piece %d carries the notification", len(ids))
		}
	}
	if len(ids) != 3 {
		t.Fatalf("%d pieces, want 3", len(ids))
	}
	for i, at := range []int{1, 2, 0} {
		if f.state != stateStoring || len(p.notes) != 0 {
			t.Fatalf("after %d of 3 pieces the notification is due", i)
		}
		if err := p.done(appendWords(nil, evDone, ids[at])[headerLen:]); err != nil {
			t.Fatal(err)
		}
	}
	if f.state != stateNoting || len(p.notes) != 1 {
		t.Error("after all pieces the notification is not due")
	}
	if err := p.done(appendWords(nil, evDone, ids[0])[headerLen:]); err == nil {
		t.Error("a piece was complete twice")
	}
}

// TestOneAfterTheOther: of one grant a write is begun when the one before is stored, though both have been let in;
// of another grant it need not wait.
func TestOneAfterTheOther(t *testing.T) {
	p := cutter(make([]byte, 1<<20), 0)
	p.wake.L = &p.mu
	p.out = newOutbox()
	p.tr.cfg.Queue = 10
	var done []int
	for i, g := range []transfer.GrantID{1, 1, 2} {
		w := transfer.Write{Grant: g, Segments: []transfer.Segment{{Src: p.source}}, Done: func(error) { done = append(done, i) }}
		if err := p.Post(w); err != nil {
			t.Fatal(err)
		}
	}
	for f := p.nextToAsk(); f != nil; f = p.nextToAsk() {
		if err := p.answered(f.seq, verdictEnter); err != nil {
			t.Fatal(err)
		}
	}
	if len(p.flights) != 3 || len(p.ready) != 2 || p.ready[0].Grant == p.ready[1].Grant {
		t.Fatalf("%d let in, %d may store, want 3 and one of each grant", len(p.flights), len(p.ready))
	}
	for len(done) < 3 {
		w, ok := p.take()
		if !ok {
			t.Fatalf("nothing to do after %v", done)
		}
		var j job
		p.cut(&j, w)
		p.handOut(&j, w)
		if err := p.done(appendWords(nil, evDone, w.id)[headerLen:]); err != nil {
			t.Fatal(err)
		}
		if err := p.answered(w.f.seq, verdictDone); err != nil {
			t.Fatal(err)
		}
	}
	if len(p.flights) != 0 || p.count != 0 || len(p.byGrant) != 0 || len(p.ready) != 0 {
		t.Errorf("left over: %+v", p.lines)
	}
}
