package sglang

import (
	"bytes"
	"log/slog"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// TestDataParallelRanks: Baton on both sides of this wire, two prefill ranks behind one bootstrap server that one of them reaches by
// HTTP; each room goes to the rank that its number names.
func TestDataParallelRanks(t *testing.T) {
	t.Parallel()
	needNIXL(t)
	b := NewBootstrap()
	port, _ := serveBootstrap(t, b, 0)
	var ranks []*Prefill
	var mems []*Memory
	for i := range 2 {
		m, err := OpenMemory(peerLayout())
		if err != nil {
			t.Fatal(err)
		}
		p, err := NewPrefill(PrefillConfig{Memory: m, NIXL: nixlConfig(), DPSize: 2, DPRank: i, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = p.Close()
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		})
		ranks, mems = append(ranks, p), append(mems, m)
	}
	if err := b.Register(ranks[0].Route()); err != nil {
		t.Fatal(err)
	}
	if b.Ready() {
		t.Fatal("ready with one rank of two")
	}
	if err := ranks[1].Register(t.Context(), loopback(port)); err != nil {
		t.Fatal(err)
	}
	l := peerLayout()
	l.RoomBuffer = -1
	d, m := newDecode(t, l, nil)
	for id := uint64(10); id < 14; id++ {
		p, src := ranks[id%2], mems[id%2]
		src.fill([]int{int(id)}, 1, byte(id))
		r := open(t, d, OpenReceive{Room: id, Addr: loopback(port), Pages: 1})
		s := openSend(t, p, OpenSend{Room: id, Chunks: []int{1}, Row: 1})
		granted(t, s)
		s.Send(0, []int{int(id)})
		if err := ended(t, r.Done(), r.Err); err != nil {
			t.Fatal(err)
		}
		for buffer := range l.Buffers {
			if !bytes.Equal(m.KV(buffer, r.Pages()[0]), src.KV(buffer, int(id))) {
				t.Errorf("room %d: buffer %d differs", id, buffer)
			}
		}
		s.Release()
		r.Release()
	}
	if s := d.Stats(); s.LinksStarted != 2 {
		t.Errorf("%+v", s)
	}
}

// TestStrangersCannotEndRooms: statuses and acks of other rooms, ranks and generations change nothing and are counted.
func TestStrangersCannotEndRooms(t *testing.T) {
	t.Parallel()
	needNIXL(t)
	p, _, port := newPrefill(t, peerLayout(), nil)
	d, m := newDecode(t, peerLayout(), nil)
	r := open(t, d, OpenReceive{Room: 5, Addr: loopback(port), Pages: 1})
	s := openSend(t, p, OpenSend{Room: 5, Chunks: []int{1}})
	granted(t, s)
	d.status(&Status{Room: 6, Status: 4})
	d.status(&Status{Room: 5, Status: 4, Rank: 1})
	d.status(&Status{Room: 5, Status: 2})
	d.status(&Status{Room: 5, Status: 9})
	if rec := d.find(5); rec.acked(&AbortAck{Room: 5, Gen: 0}) || rec.acked(&AbortAck{Room: 5, Gen: 1}) {
		t.Error("an ack that nobody asked for was taken")
	}
	// Another decode worker's abort of this room is answered, and changes nothing.
	p.abort(&Abort{Room: 5, Endpoint: Endpoint{"127.0.0.1", 9}, Gen: 3, HasGen: true})
	if st := d.Stats(); st.Stray != 2 || st.Ignored != 2 || r.State() != room.StateWaitingForInput || s.State() != room.StateWaitingForInput {
		t.Errorf("%+v %v %v", st, r.State(), s.State())
	}
	r.Cancel(&room.Cause{Code: room.CodeClientGone, Detail: "the client is gone"})
	rec := d.find(5)
	if rec.acked(&AbortAck{Room: 5, Gen: rec.gen + 1}) || rec.acked(&AbortAck{Room: 5, Gen: rec.gen, Rank: 1}) {
		t.Error("an ack of another life was taken")
	}
	if err := ended(t, s.Done(), s.Err); causeCode(err) != room.CodeAborted {
		t.Error(err)
	}
	s.Release()
	back(t, d, m, r)
}

// TestAuxArrivesLate: a success whose aux record is not visible yet waits for it.
func TestAuxArrivesLate(t *testing.T) {
	t.Parallel()
	needNIXL(t)
	l := peerLayout()
	l.RoomBuffer = 0
	p, _, port := newPrefill(t, l, nil)
	d, m := newDecode(t, l, nil)
	r := open(t, d, OpenReceive{Room: 5, Addr: loopback(port), Pages: 1})
	s := openSend(t, p, OpenSend{Room: 5, Chunks: []int{1}})
	granted(t, s)
	d.status(&Status{Room: 5, Status: 4})
	<-time.After(50 * time.Millisecond)
	if r.State().Terminal() {
		t.Fatal("success without the record", r.Err())
	}
	s.Send(0, []int{1}) // brings it, and a second status
	if err := ended(t, r.Done(), r.Err); err != nil {
		t.Fatal(err)
	}
	if got := m.roomOf(r.Row()); got != 5 {
		t.Error(got)
	}
	s.Release()
	back(t, d, m, r)
}

// TestLayouts: what can not be is refused, and the standard record has the sizes of the release.
func TestLayouts(t *testing.T) {
	for i, change := range []func(*Layout){
		func(l *Layout) { l.Buffers = 0 }, func(l *Layout) { l.Slots = 1 << 40 }, func(l *Layout) { l.ItemLen = 1 << 60 }, func(l *Layout) { l.AuxItemLens = nil },
		func(l *Layout) { l.AuxItemLens = []int{0} }, func(l *Layout) { l.RoomBuffer = 2 }, func(l *Layout) { l.AuxItemLens, l.RoomBuffer = []int{4}, 0 },
	} {
		l := peerLayout()
		change(&l)
		if m, err := OpenMemory(l); err == nil {
			t.Errorf("case %d was taken", i)
			_ = m.Close()
		}
	}
	lens, at := StandardAux(128, 4096)
	if len(lens) != 10 || at != 9 || lens[4] != 512 || lens[8] != 4096 || lens[0] != 64 {
		t.Error(lens, at)
	}
}
