package sglang

import (
	"hash/crc32"
	"log/slog"
	"reflect"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// peerLayout is the layout of a peer without arguments.
func peerLayout() Layout {
	return Layout{Buffers: 4, Slots: 64, ItemLen: 4096, PageSize: 1, DType: "bfloat16", AuxItemLens: []int{64, 32}, AuxSlots: 16, RoomBuffer: -1}
}

// newDecode is a decode manager over memory of layout l.
func newDecode(t testing.TB, l Layout, change func(*DecodeConfig)) (*Decode, *Memory) {
	t.Helper()
	m, err := OpenMemory(l)
	if err != nil {
		t.Fatal(err)
	}
	c := DecodeConfig{Memory: m, NIXL: nixlConfig(), Log: slog.New(slog.DiscardHandler), Heartbeat: time.Second}
	if change != nil {
		change(&c)
	}
	d, err := NewDecode(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(5 * time.Second); err != nil {
			t.Error(err)
		}
		if s := d.Registry().Stats(); s.Rooms() != 0 {
			t.Errorf("rooms left: %+v", s)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return d, m
}

func open(t testing.TB, d *Decode, o OpenReceive) *Receiving {
	t.Helper()
	if o.Deadline.IsZero() {
		o.Deadline = time.Now().Add(patience)
	}
	o.DPRank = -1
	r, err := d.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// ended waits for the end of a room and returns its cause.
func ended(t testing.TB, done <-chan struct{}, err func() error) error {
	t.Helper()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("the room did not end")
	}
	return err()
}

// crcs are the checksums of pages in every KV buffer, and of an aux row, as a peer computes them.
func (m *Memory) crcs(pages []int, row int) (kv [][]uint32, aux []uint32) {
	for b := range m.Buffers {
		var of []uint32
		for _, p := range pages {
			of = append(of, crc32.ChecksumIEEE(m.KV(b, p)))
		}
		kv = append(kv, of)
	}
	for b := range m.AuxItemLens {
		aux = append(aux, crc32.ChecksumIEEE(m.Aux(b, row)))
	}
	return kv, aux
}

// send has a peer's prefill send pages of one room in chunks.
func (p *peer) send(id uint64, aux int, chunks ...[]int) {
	p.t.Helper()
	for _, c := range chunks {
		p.do("send", kw{"room": id, "pages": c})
	}
}

func (p *peer) sender(id uint64, pages, aux int) {
	p.t.Helper()
	p.do("sender", kw{"room": id})
	p.do("sender_init", kw{"room": id, "num_pages": pages, "aux_index": aux})
}

// same compares what landed with the peer's own.
func same(t testing.TB, p *peer, src []int, auxSrc int, m *Memory, dst []int, row int) {
	t.Helper()
	want := p.do("crc", kw{"pages": src, "aux": auxSrc})
	kv, aux := m.crcs(dst, row)
	if !reflect.DeepEqual(kv, want.CRC) || !reflect.DeepEqual(aux, want.Aux) {
		t.Fatalf("pages %v differ from the peer's %v:\n%v %v\n%v %v", dst, src, kv, aux, want.CRC, want.Aux)
	}
}

// TestDecodeFromSGLang: the real prefill sends one room in two chunks of scattered pages.
func TestDecodeFromSGLang(t *testing.T) {
	t.Parallel()
	port := freePort(t)
	p := startPeer(t, "prefill", port)
	d, m := newDecode(t, peerLayout(), nil)
	src := []int{3, 9, 4, 60, 10}
	p.do("fill", kw{"pages": src, "seed": 11})
	p.do("fill_aux", kw{"index": 2, "seed": 5})
	p.sender(4242, 5, 2)
	r := open(t, d, OpenReceive{Room: 4242, Addr: loopback(port), Pages: 5})
	p.wait(4242, "WaitingForInput")
	p.send(4242, 2, src[:3], src[3:])
	if err := ended(t, r.Done(), r.Err); err != nil {
		t.Fatal(err)
	}
	if p.wait(4242, "Success", "Failed") != "Success" {
		t.Fatal("the prefill failed")
	}
	if r.State() != room.StateSuccess {
		t.Fatalf("state %v", r.State())
	}
	same(t, p, src, 2, m, r.Pages(), r.Row())
	r.Release()
	eventually(t, "every page back", func() bool { return m.SlotStats().Idle() && m.RowStats().Idle() })
}
