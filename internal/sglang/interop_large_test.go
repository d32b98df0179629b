package sglang

import (
	"strings"
	"sync"
	"testing"

	"github.com/baton-pd/baton/internal/room"
)

// bigLayout has room for 1,000 pages, and for 64 rooms at once; bigArgs are a peer's arguments for it.
func bigLayout() Layout {
	l := peerLayout()
	l.Slots, l.ItemLen, l.AuxSlots, l.RoomBuffer = 1100, 2048, 80, 0
	return l
}

var bigArgs = []string{"--slots", "1100", "--item-len", "2048", "--aux-slots", "80"}

// roomOfSeed is the room number that a peer's fill_aux with this seed writes where the record has its room: eight equal bytes.
func roomOfSeed(seed int) uint64 {
	id := uint64(0)
	for range 8 {
		id = id<<8 | uint64(seed%251+1)
	}
	return id
}

// scattered is n of the first of slots in an order without runs.
func scattered(n, of int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i * 7 % of // 7 and of have no common divisor
	}
	return out
}

// TestLargeAndManyFromSGLang: 1,000 pages in chunks, then 64 rooms at once, with the aux record's room checked.
func TestLargeAndManyFromSGLang(t *testing.T) {
	t.Parallel()
	port := freePort(t)
	p := startPeer(t, "prefill", port, bigArgs...)
	d, m := newDecode(t, bigLayout(), nil)
	t.Run("1000 pages", func(t *testing.T) {
		src, id := scattered(1000, 1099), roomOfSeed(9)
		p.do("fill", kw{"pages": src, "seed": 3})
		p.do("fill_aux", kw{"index": 70, "seed": 9})
		p.sender(id, 1000, 70)
		r := open(t, d, OpenReceive{Room: id, Addr: loopback(port), Pages: 1000})
		defer r.Release()
		p.wait(id, "WaitingForInput")
		p.send(id, 70, src[:300], src[300:301], src[301:])
		if err := ended(t, r.Done(), r.Err); err != nil {
			t.Fatal(err)
		}
		same(t, p, src, 70, m, r.Pages(), r.Row())
	})
	t.Run("another room's aux record", func(t *testing.T) {
		p.do("fill_aux", kw{"index": 1, "seed": 40})
		p.sender(77, 1, 1)
		r := open(t, d, OpenReceive{Room: 77, Addr: loopback(port), Pages: 1})
		defer r.Release()
		p.wait(77, "WaitingForInput")
		p.send(77, 1, []int{5})
		if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodeTransferFailed || !strings.Contains(err.Error(), "aux record") {
			t.Fatal(err)
		}
		eventually(t, "the ack", r.Drained)
	})
	t.Run("64 rooms", func(t *testing.T) {
		eventually(t, "the pages are back", func() bool { return m.SlotStats().Idle() })
		var wg sync.WaitGroup
		rooms := make([]*Receiving, 64)
		for i := range rooms {
			id := roomOfSeed(20 + i)
			p.do("fill", kw{"pages": pagesOf(i), "seed": i})
			p.do("fill_aux", kw{"index": i, "seed": 20 + i})
			p.sender(id, 16, i)
			rooms[i] = open(t, d, OpenReceive{Room: id, Addr: loopback(port), Pages: 16})
		}
		for half := range 2 { // every room's first chunk, then every room's second
			for i := range rooms {
				if half == 0 {
					p.wait(roomOfSeed(20+i), "WaitingForInput")
				}
				p.send(roomOfSeed(20+i), i, pagesOf(i)[8*half:8*half+8])
			}
		}
		for i, r := range rooms {
			if err := ended(t, r.Done(), r.Err); err != nil {
				t.Fatal(i, err)
			}
			same(t, p, pagesOf(i), i, m, r.Pages(), r.Row())
		}
		for _, r := range rooms {
			wg.Go(r.Release)
		}
		wg.Wait()
		eventually(t, "the pages are back", func() bool { return m.SlotStats().Idle() && m.RowStats().Idle() })
	})
}

// pagesOf are the 16 pages of room i of 64, in no order.
func pagesOf(i int) []int {
	out := make([]int, 16)
	for k := range out {
		out[k] = i + 64*((k*5+i)%16)
	}
	return out
}

// TestLargeAndManyToSGLang is the other direction.
func TestLargeAndManyToSGLang(t *testing.T) {
	t.Parallel()
	peerFiles(t)
	p, m, port := newPrefill(t, bigLayout(), nil)
	d := startPeer(t, "decode", port, append(bigArgs, "--deferred")...)
	t.Run("1000 pages", func(t *testing.T) {
		src, dst := scattered(1000, 1099), make([]int, 1000)
		for i := range dst {
			dst[i] = 1099 - src[i]
		}
		m.fill(src, 70, 5)
		s := openSend(t, p, OpenSend{Room: 1000, Chunks: []int{300, 1, 699}, Row: 70})
		defer s.Release()
		d.receiver(1000, dst, 3)
		granted(t, s)
		if !s.Send(0, src[:300]) || !s.Send(1, src[300:301]) || !s.Send(2, src[301:]) {
			t.Fatal(s.Err())
		}
		if err := ended(t, s.Done(), s.Err); err != nil {
			t.Fatal(err)
		}
		d.wait(1000, "Success")
		landed(t, d, dst, 3, m, src, 70)
	})
	t.Run("64 rooms", func(t *testing.T) {
		rooms := make([]*Sending, 64)
		for i := range rooms {
			m.fill(pagesOf(i), i, byte(3*i))
			rooms[i] = openSend(t, p, OpenSend{Room: uint64(1 + i), Chunks: []int{8, 8}, Row: i})
			d.receiver(uint64(1+i), pagesOf(63-i), i)
		}
		var wg sync.WaitGroup
		for i, s := range rooms {
			wg.Go(func() {
				<-s.Granted()
				s.Send(0, pagesOf(i)[:8])
				s.Send(1, pagesOf(i)[8:])
			})
		}
		wg.Wait()
		for i, s := range rooms {
			if err := ended(t, s.Done(), s.Err); err != nil {
				t.Fatal(i, err)
			}
			d.wait(uint64(1+i), "Success")
			landed(t, d, pagesOf(63-i), i, m, pagesOf(i), i)
			s.Release()
		}
	})
}
