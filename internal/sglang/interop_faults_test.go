package sglang

import (
	"bytes"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sglang/zmtp"
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

// TestSGLangDecodeDies: killed, stopped and restarted under rooms of a Baton prefill, in every state of theirs.
func TestSGLangDecodeDies(t *testing.T) {
	t.Parallel()
	peerFiles(t)
	p, m, port := newPrefill(t, peerLayout(), func(c *PrefillConfig) { c.Stall = 500 * time.Millisecond })
	three := func(d *peer, base uint64) []*Sending {
		var out []*Sending
		for i := range 3 {
			s := openSend(t, p, OpenSend{Room: base + uint64(i), Chunks: []int{1, 1}, Row: i, Deadline: time.Now().Add(5 * time.Second)})
			d.receiver(base+uint64(i), []int{2 * i, 2*i + 1}, i)
			granted(t, s)
			out = append(out, s)
		}
		out[1].Send(0, []int{1})
		eventually(t, "the chunk settles", func() bool { return out[1].room.Load().Outstanding() == 0 })
		return out
	}
	t.Run("killed", func(t *testing.T) {
		d := startPeer(t, "decode", port, "--deferred")
		rooms := three(d, 10)
		start := time.Now()
		d.kill()
		rooms[2].Send(0, []int{1}) // into a dead process
		for _, s := range rooms {
			if err := ended(t, s.Done(), s.Err); causeCode(err) != room.CodePeerLost && causeCode(err) != room.CodeTransferFailed {
				t.Error(err)
			}
			s.Release()
		}
		if took := time.Since(start); took > 4*time.Second {
			t.Errorf("the loss was noticed after %v, as if by the deadline", took)
		}
		eventually(t, "drained", func() bool { return p.Registry().Stats().Rooms() == 0 })
	})
	t.Run("restarted, then stopped in a write", func(t *testing.T) {
		d := startPeer(t, "decode", port, "--deferred")
		s := openSend(t, p, OpenSend{Room: 20, Chunks: []int{1}, Row: 0})
		m.fill([]int{7}, 0, 1)
		d.receiver(20, []int{3}, 1)
		granted(t, s)
		s.Send(0, []int{7})
		d.wait(20, "Success")
		landed(t, d, []int{3}, 1, m, []int{7}, 0)
		s.Release()

		rooms := three(d, 30)
		w := rooms[0].a.way
		d.stop()
		for _, s := range rooms {
			s.Send(0, []int{1}) // for the second: out of order, which fails it
		}
		eventually(t, "both writes are under way", func() bool { w.mu.Lock(); defer w.mu.Unlock(); return len(w.flying) == 2 && len(w.queue) == 0 })
		for _, s := range rooms {
			if err := ended(t, s.Done(), s.Err); err == nil {
				t.Error("success at a stopped process")
			}
			s.Release()
		}
		eventually(t, "drained", func() bool { return p.Registry().Stats().Rooms() == 0 })
		d.signal(syscall.SIGCONT)
		d.do("abort", kw{"room": 30})
		<-time.After(300 * time.Millisecond)
		if d.do("abort_safe", kw{"room": 30}).Safe {
			t.Error("a room was acked whose write was never proven over")
		}
	})
}

// decodeRooms opens a receiver at every point of a room's life: no sender yet, offered, one chunk here.
func decodeRooms(t *testing.T, p *peer, d *Decode, port int, base uint64, deadline time.Duration) []*Receiving {
	t.Helper()
	var out []*Receiving
	for i := range 3 {
		id := base + uint64(i)
		if i > 0 {
			p.sender(id, 2, i)
		}
		r := open(t, d, OpenReceive{Room: id, Addr: loopback(port), Pages: 2, Deadline: time.Now().Add(deadline)})
		<-r.Granted()
		if err := r.Err(); err != nil {
			t.Fatal(err)
		}
		if i > 0 {
			p.wait(id, "WaitingForInput")
		}
		if i == 2 {
			p.send(id, i, []int{1})
			p.wait(id, "Transferring")
		}
		out = append(out, r)
	}
	return out
}

// back waits until every page and row is back.
func back(t *testing.T, d *Decode, m *Memory, rooms ...*Receiving) {
	t.Helper()
	for _, r := range rooms {
		r.Release()
	}
	eventually(t, "every page back", func() bool {
		return m.SlotStats().Idle() && m.RowStats().Idle() && d.Registry().Stats().Rooms() == 0
	})
	if s := m.SlotStats(); s.Misuses != 0 {
		t.Errorf("misuse of pages: %+v", s)
	}
}

// TestSGLangPrefillDies: killed, restarted at the same address, stopped, and its server gone.
func TestSGLangPrefillDies(t *testing.T) {
	t.Parallel()
	port := freePort(t)
	d, m := newDecode(t, peerLayout(), func(c *DecodeConfig) { c.Heartbeat = 300 * time.Millisecond })
	p := startPeer(t, "prefill", port)
	t.Run("killed", func(t *testing.T) {
		rooms := decodeRooms(t, p, d, port, 10, patience)
		start := time.Now()
		p.kill()
		for _, r := range rooms {
			if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodePeerLost {
				t.Error(err)
			}
		}
		t.Logf("noticed after %v", time.Since(start))
		back(t, d, m, rooms...)
		r := open(t, d, OpenReceive{Room: 15, Addr: loopback(port), Pages: 1, Deadline: time.Now().Add(1500 * time.Millisecond)})
		if err := ended(t, r.Done(), r.Err); err == nil {
			t.Error("a room without a prefill")
		}
		back(t, d, m, r)
	})
	p = startPeer(t, "prefill", port)
	t.Run("restarted at the same address", func(t *testing.T) {
		oneRoom(t, p, d, m, port, 20)
	})
	t.Run("stopped", func(t *testing.T) {
		rooms := decodeRooms(t, p, d, port, 30, patience)
		p.stop()
		for _, r := range rooms {
			if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodePeerLost || !strings.Contains(err.Error(), "heartbeat") {
				t.Error(err)
			}
		}
		back(t, d, m, rooms...)
		// Its pages are other people's now; nothing that it does when it goes on may reach them.
		m.mark()
		p.signal(syscall.SIGCONT)
		p.do("send", kw{"room": 31, "pages": []int{1, 2}})
		p.wait(31, "Failed")
		m.untouched(t)
	})
	t.Run("continued", func(t *testing.T) { oneRoom(t, p, d, m, port, 40) })
}

// mark fills the whole memory, untouched sees that it is still so.
func (m *Memory) mark() { copy(m.bytes, bytes.Repeat([]byte{0xee}, len(m.bytes))) }

func (m *Memory) untouched(t *testing.T) {
	t.Helper()
	if n := len(m.bytes) - bytes.Count(m.bytes, []byte{0xee}); n != 0 {
		t.Fatalf("%d bytes were written after the fence", n)
	}
}

// oneRoom shows that a pair works.
func oneRoom(t *testing.T, p *peer, d *Decode, m *Memory, port int, id uint64) {
	t.Helper()
	p.do("fill", kw{"pages": []int{4, 8}, "seed": int(id)})
	p.sender(id, 2, 3)
	r := open(t, d, OpenReceive{Room: id, Addr: loopback(port), Pages: 2})
	p.wait(id, "WaitingForInput")
	p.send(id, 3, []int{4}, []int{8})
	if err := ended(t, r.Done(), r.Err); err != nil {
		t.Fatal(err)
	}
	same(t, p, []int{4, 8}, 3, m, r.Pages(), r.Row())
	back(t, d, m, r)
}

// TestHeartbeatLoss: the bootstrap server goes while the prefill rank lives. The server is Baton's, the rank real.
func TestHeartbeatLoss(t *testing.T) {
	t.Parallel()
	peerFiles(t)
	b := NewBootstrap()
	port, stop := serveBootstrap(t, b, 0)
	p := startPeer(t, "prefill", port, "--no-bootstrap-server")
	if !b.Ready() {
		t.Fatal("the real prefill did not register at Baton's bootstrap server")
	}
	d, m := newDecode(t, peerLayout(), func(c *DecodeConfig) { c.Heartbeat = 200 * time.Millisecond })
	oneRoom(t, p, d, m, port, 5)
	rooms := decodeRooms(t, p, d, port, 10, patience)
	stop()
	for _, r := range rooms {
		if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodePeerLost || !strings.Contains(err.Error(), "heartbeat") {
			t.Error(err)
		}
	}
	back(t, d, m, rooms...)
	serveBootstrap(t, b, port)
	oneRoom(t, p, d, m, port, 20)
}

// TestAbortsAtSGLangPrefill: a Baton decode aborts at every point, and the prefill at every point; acks come after drain.
func TestAbortsAtSGLangPrefill(t *testing.T) {
	t.Parallel()
	port := freePort(t)
	p := startPeer(t, "prefill", port, "--deferred", "--monkey", "delay_xfer")
	d, m := newDecode(t, peerLayout(), func(c *DecodeConfig) { c.TombstoneTTL = 200 * time.Millisecond })
	cancel := func(rooms []*Receiving) {
		for _, r := range rooms {
			r.Cancel(&room.Cause{Code: room.CodeClientGone, Detail: "the client is gone"})
			if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodeClientGone {
				t.Error(err)
			}
		}
	}
	t.Run("by the decode", func(t *testing.T) {
		rooms := decodeRooms(t, p, d, port, 10, patience)
		cancel(rooms)
		p.wait(11, "Failed")
		p.wait(12, "Failed")
		back(t, d, m, rooms...)
		if s := m.SlotStats(); s.FreedDrained != 6 || s.FreedFenced != 0 {
			t.Errorf("pages came back by other proofs than acks: %+v", s)
		}
	})
	t.Run("by the decode, before it knows the prefill", func(t *testing.T) {
		r := open(t, d, OpenReceive{Room: 20, Addr: loopback(port), Pages: 2})
		cancel([]*Receiving{r})
		back(t, d, m, r)
	})
	t.Run("ack only after drain", func(t *testing.T) {
		p.sender(30, 2, 1)
		r := open(t, d, OpenReceive{Room: 30, Addr: loopback(port), Pages: 2})
		p.wait(30, "WaitingForInput")
		p.do("gate", kw{"open": false})
		p.send(30, 1, []int{1})
		p.wait(30, "Transferring")
		cancel([]*Receiving{r})
		r.Release()
		p.wait(30, "Failed")
		<-time.After(300 * time.Millisecond)
		if s := m.SlotStats(); s.Quarantine != 2 {
			t.Errorf("the pages left quarantine while the prefill was writing: %+v", s)
		}
		p.do("gate", kw{"open": true})
		back(t, d, m)
	})
	t.Run("by the prefill, which tells nobody", func(t *testing.T) {
		rooms := decodeRooms(t, p, d, port, 40, 2*time.Second)
		p.do("abort", kw{"room": 41})
		p.do("abort", kw{"room": 42})
		for _, r := range rooms {
			if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodeDeadline {
				t.Error(err)
			}
		}
		back(t, d, m, rooms...)
	})
	t.Run("by the prefill, before it knows the decode", func(t *testing.T) {
		p.sender(43, 2, 1)
		p.do("abort", kw{"room": 43})
		r := open(t, d, OpenReceive{Room: 43, Addr: loopback(port), Pages: 2, Deadline: time.Now().Add(time.Second)})
		if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodeDeadline {
			t.Error(err)
		}
		back(t, d, m, r)
	})
	t.Run("a room's number again", func(t *testing.T) {
		for range 3 {
			oneRoom(t, p, d, m, port, 50)
			if _, err := d.Open(OpenReceive{Room: 50, Addr: loopback(port), Pages: 1, Deadline: time.Now().Add(time.Minute)}); causeCode(err) != room.CodeDuplicate {
				t.Fatal(err)
			}
			p.do("clear", kw{"room": 50})
			eventually(t, "the tombstone is gone", func() bool { _, is := d.reg.Ended(room.Key{Room: 50}); return !is })
		}
	})
	t.Run("foreign and malformed messages here", func(t *testing.T) {
		push := zmtp.Dial(d.Endpoint().Addr(), zmtp.PushConfig{})
		bad := []zmtp.Message{{[]byte("HELLO")}, {[]byte(tagStatus)}, {[]byte(tagStatus), []byte("x"), []byte("4"), []byte("0")}, {[]byte(tagAbortAck), []byte("1")}, {[]byte(tagAbort), []byte("1")}}
		for _, b := range bad {
			if err := push.Send(b); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "they are counted", func() bool { s := d.Stats(); return s.Foreign+s.Malformed == uint64(len(bad)) })
		push.Close(0)
		oneRoom(t, p, d, m, port, 60)
	})
	t.Run("a foreign message there, which kills its control thread", func(t *testing.T) {
		push := zmtp.Dial(loopback(p.hello.RankPort), zmtp.PushConfig{})
		_ = push.Send(zmtp.Message{[]byte("HELLO")})
		eventually(t, "the real prefill's thread dies", func() bool { return p.log.has("bootstrap_thread died") })
		push.Close(0)
		p.do("sender", kw{"room": 70})
		r := open(t, d, OpenReceive{Room: 70, Addr: loopback(port), Pages: 2, Deadline: time.Now().Add(time.Second)})
		if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodeDeadline {
			t.Fatal(err)
		}
		r.Release()
		if s := m.SlotStats(); s.Quarantine != 2 {
			t.Errorf("pages without proof are not in quarantine: %+v", s)
		}
	})
}

// TestOldFault: the behaviour of older releases, brought back in the real code, pins the prefill's room and writes after the ack. The
// decode side ends all the same; where acks are not believed, its pages are safe too.
func TestOldFault(t *testing.T) {
	t.Parallel()
	for _, old := range []struct {
		name, monkey string
		pinned       bool // the room never ends at the prefill; else its last chunk is written after the ack
		distrust     bool
	}{
		{"pinned", "delay_xfer,max_status,rewrite_transferring,pop_infos", true, false},
		{"pinned, acks not believed", "delay_xfer,max_status,rewrite_transferring,pop_infos", true, true},
		{"written after the ack", "delay_xfer,max_status,rewrite_transferring", false, true},
	} {
		t.Run(old.name, func(t *testing.T) {
			port := freePort(t)
			p := startPeer(t, "prefill", port, "--deferred", "--monkey", old.monkey)
			d, m := newDecode(t, peerLayout(), func(c *DecodeConfig) { c.DistrustAcks = old.distrust })
			p.do("fill", kw{"pages": []int{1, 2}, "seed": 99})
			p.sender(10, 2, 1)
			r := open(t, d, OpenReceive{Room: 10, Addr: loopback(port), Pages: 2})
			p.wait(10, "WaitingForInput")
			pages := r.Pages()
			p.do("gate", kw{"open": false})
			p.send(10, 1, []int{1})
			p.wait(10, "Transferring")
			r.Cancel(&room.Cause{Code: room.CodeClientGone, Detail: "the client is gone"})
			// The manager's own word: a poll of the sender would keep the first end that it sees.
			status := func(want string) func() bool {
				return func() bool { return p.do("state", kw{"room": 10}).Status == want }
			}
			eventually(t, "the abort fails the prefill's room", status("Failed"))
			p.do("gate", kw{"open": true})
			if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodeClientGone {
				t.Error(err)
			}
			eventually(t, "the failed room is transferring again", status("Transferring"))
			back(t, d, m, r)
			if s := m.SlotStats(); old.distrust && s.FreedFenced != 2 || !old.distrust && s.FreedDrained != 2 {
				t.Errorf("pages came back by another proof: %+v", s)
			}
			for b := range m.Buffers { // somebody else's now
				for _, page := range pages {
					clear(m.KV(b, page))
				}
			}
			p.send(10, 1, []int{2})
			if old.pinned {
				<-time.After(500 * time.Millisecond)
				if s := p.do("state", kw{"room": 10}).Status; s != "Transferring" {
					t.Errorf("the old fault is not there: the prefill's room is %s", s)
				}
			} else {
				eventually(t, "its late write finds nobody", status("Failed"))
			}
			zero, _ := m.crcs([]int{pages[0]}, 0)
			for _, page := range pages {
				if got, _ := m.crcs([]int{page}, 0); !reflect.DeepEqual(got, zero) {
					t.Errorf("page %d was written after it had come back", page)
				}
			}
			oneRoom(t, p, d, m, port, 20)
		})
	}
}

// TestUnackedAbortRetiresItsLink: without deferred release the prefill never acks; the link is given up and fenced when its
// other room has ended, and that room is not harmed.
func TestUnackedAbortRetiresItsLink(t *testing.T) {
	port := freePort(t)
	t.Setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "0")
	p := startPeer(t, "prefill", port)
	if p.hello.Deferred {
		t.Fatal("the peer acks")
	}
	d, m := newDecode(t, peerLayout(), func(c *DecodeConfig) { c.AckTimeout = 200 * time.Millisecond })
	rooms := decodeRooms(t, p, d, port, 10, patience)
	rooms[1].Cancel(&room.Cause{Code: room.CodeClientGone, Detail: "the client is gone"})
	rooms[1].Release()
	eventually(t, "the link is retired", func() bool { return d.Stats().Retired == 1 })
	if s := m.SlotStats(); s.Quarantine != 2 {
		t.Errorf("%+v", s)
	}
	p.send(12, 2, []int{3})
	if err := ended(t, rooms[2].Done(), rooms[2].Err); err != nil {
		t.Fatal(err)
	}
	rooms[0].Cancel(&room.Cause{Code: room.CodeClientGone, Detail: "the client is gone"})
	back(t, d, m, rooms[0], rooms[2])
	oneRoom(t, p, d, m, port, 20) // by a new link
	if s := d.Stats(); s.LinksStarted != 2 || s.LinksEnded != 1 {
		t.Errorf("%+v", s)
	}
}

// TestFenceUnderWrite: the real prefill's write is on its way, and stuck, when the link is fenced. It gets an error, and not a byte of it
// comes to pages that are somebody else's by then.
func TestFenceUnderWrite(t *testing.T) {
	t.Parallel()
	port := freePort(t)
	l := peerLayout()
	l.ItemLen = 1 << 18 // 40 MiB in all, more than sockets take
	p := startPeer(t, "prefill", port, "--item-len", "262144", "--deferred")
	d, m := newDecode(t, l, func(c *DecodeConfig) { c.AckTimeout = 300 * time.Millisecond })
	src := scattered(40, 64)
	p.do("fill", kw{"pages": src, "seed": 7})
	p.sender(10, 40, 1)
	r := open(t, d, OpenReceive{Room: 10, Addr: loopback(port), Pages: 40})
	p.wait(10, "WaitingForInput")
	if err := syscall.Kill(r.link.agent.Pid(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	p.send(10, 1, src)
	p.wait(10, "Transferring")
	r.Cancel(&room.Cause{Code: room.CodeClientGone, Detail: "the client is gone"})
	p.wait(10, "Failed")
	r.Release()
	if s := m.SlotStats(); s.Quarantine != 40 {
		t.Errorf("%+v", s)
	}
	back(t, d, m)
	if s := m.SlotStats(); s.FreedFenced != 40 {
		t.Errorf("pages came back by another proof: %+v", s)
	}
	m.mark()
	<-time.After(500 * time.Millisecond) // what was on its way would come now
	m.untouched(t)
	p.do("clear", kw{"room": 10})
	eventually(t, "the real prefill is free again", func() bool { return p.log.has("transport error") || p.log.has("Unexpected transfer worker error") })
}

// TestSGLangDecodeLosesBootstrap: the real decode misses heartbeats and gives its rooms up; Baton's prefill hears of it and acks.
func TestSGLangDecodeLosesBootstrap(t *testing.T) {
	t.Parallel()
	peerFiles(t)
	p, _, _ := newPrefill(t, peerLayout(), nil)
	b := NewBootstrap()
	if err := b.Register(p.Route()); err != nil {
		t.Fatal(err)
	}
	port, stop := serveBootstrap(t, b, 0)
	d := startPeer(t, "decode", port, "--deferred")
	s := openSend(t, p, OpenSend{Room: 7, Chunks: []int{1, 1}})
	d.receiver(7, []int{1, 2}, 1)
	granted(t, s)
	s.Send(0, []int{1})
	stop()
	d.wait(7, "Failed")
	d.do("abort", kw{"room": 7}) // what its scheduler does with a failed room
	if err := ended(t, s.Done(), s.Err); causeCode(err) != room.CodeAborted {
		t.Error(err)
	}
	eventually(t, "the ack", func() bool { return d.do("abort_safe", kw{"room": 7}).Safe })
	s.Release()
}
