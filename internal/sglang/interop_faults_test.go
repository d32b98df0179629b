package sglang

import (
	"bytes"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

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
