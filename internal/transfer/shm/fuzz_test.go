package shm

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
)

// FuzzSource sends arbitrary bytes after a good handshake. The target must go on serving
// others, and fence the session when the source has gone.
func FuzzSource(f *testing.F) {
	note := message{kind: kindDone, value: 1, grant: 1, notify: true, notifyN: 2}
	f.Add(append(note.append(nil), "hi"...))
	for _, m := range goodMessages {
		f.Add(m.append(nil))
	}
	p := listen(f, Config{}, 4096)
	session := transfer.SessionID(1)
	f.Fuzz(func(t *testing.T, b []byte) {
		session++
		if err := p.tgt.OpenSession(session); err != nil {
			t.Fatal(err)
		}
		if err := p.tgt.Allow(transfer.Grant{ID: 1, Key: testKey, Session: session, Spans: []transfer.Span{{Off: 0, Len: 8}}}); err != nil {
			t.Fatal(err)
		}
		nc, err := net.Dial("unix", p.tgt.Descriptor().Addr)
		if err != nil {
			t.Fatal(err)
		}
		uc := nc.(*net.UnixConn)
		_ = uc.SetDeadline(time.Now().Add(patience))
		maps, err := greet(uc, session, 4096)
		if err != nil {
			t.Fatal(err)
		}
		copy(maps.ctl.entry(0), b)
		maps.ctl.ringPut().Store(uint64(len(b) % 3))
		_, _ = uc.Write(b)
		_ = uc.CloseWrite()
		_, _ = io.Copy(io.Discard, uc)
		maps.unmap()
		_ = uc.Close()
		if s := recv(t, p.sink.fenced, "Fenced"); s != session {
			t.Fatalf("fenced %d, want %d", s, session)
		}
		p.tgt.CloseSession(session)
		for len(p.sink.landed) > 0 {
			if n := len(<-p.sink.landed); n > transfer.MaxNotify {
				t.Fatalf("notification of %d bytes", n)
			}
		}
	})
}

// FuzzTarget lets a target answer a hello with anything and with up to three descriptors of
// several files. The source's descriptors and mappings are gone afterwards, and each of its
// writes has ended once.
func FuzzTarget(f *testing.F) {
	f.Add(welcome(4096), byte(2), byte(0x01))
	f.Add(welcome(4096), byte(2), byte(0x02))
	f.Add(welcome(4096), byte(3), byte(0x11))
	f.Add(welcome(8192), byte(2), byte(0x01))
	answer := message{kind: kindAnswer, value: 1}
	f.Add(answer.append(welcome(4096)), byte(2), byte(0x01))
	answer.value = 2
	f.Add(answer.append(welcome(4096)), byte(2), byte(0x01))
	ctl, ctlFD, err := newControl()
	if err != nil {
		f.Fatal(err)
	}
	newTable(ctl).put(1, testKey, []transfer.Span{{Off: 0, Len: 8}})
	f.Cleanup(func() { _ = unix.Munmap(ctl.b); _ = unix.Close(ctlFD) })
	files := []int{memory(f, 4096).FD, ctlFD, memory(f, 100).FD, memory(f, controlSize).FD}
	tr := New(Config{})
	f.Fuzz(func(t *testing.T, reply []byte, n, which byte) {
		var fds []int
		for i := range n % 4 {
			fds = append(fds, files[(which>>(2*i)+i*(which>>7))%4])
		}
		ctl.asleep().Store(1) // so that the write is told on the socket
		ours, theirs := socketPair(t)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			defer theirs.Close()
			_, _ = io.ReadFull(theirs, make([]byte, messageLen))
			var oob []byte
			if len(fds) > 0 && len(reply) > 0 {
				oob = unix.UnixRights(fds...)
			}
			_, _, _ = theirs.WriteMsgUnix(reply[:min(len(reply), messageLen)], oob, nil)
			if len(reply) > messageLen {
				_, _ = io.ReadFull(theirs, make([]byte, messageLen)) // the wake after the write's completion
				_, _ = theirs.Write(reply[messageLen:])
			}
			_ = theirs.CloseWrite()
			_, _ = io.Copy(io.Discard, theirs)
		}()
		defer func() { <-ended }()
		maps, err := greet(ours, 1, 4096)
		if err != nil {
			maps.unmap()
			_ = ours.Close()
			return
		}
		if len(maps.mem) != 4096 || len(maps.ctl.b) != controlSize {
			t.Errorf("mapped %d and %d bytes", len(maps.mem), len(maps.ctl.b))
		}
		peer := newPeer(tr, ours, maps)
		verdicts := make(chan error, 2)
		done := func(err error) { verdicts <- err }
		if peer.Post(transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{{Src: make([]byte, 8)}}, Done: done}) != nil {
			done(transfer.ErrPeerLost)
		}
		verdict := recv(t, verdicts, "verdict")
		said := message{kind: kindAnswer, value: 1}
		if verdict == nil && !bytes.Contains(reply, said.append(nil)) {
			t.Fatal("the write completed, which the target never said")
		}
		_ = peer.Close()
		if len(verdicts) != 0 {
			t.Fatal("two verdicts of one write")
		}
	})
}

// socketPair is two connected sockets with deadlines.
func socketPair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	path := socketDir(t) + "/s"
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if a, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"}); err == nil {
		b, err = ln.AcceptUnix()
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []*net.UnixConn{a, b} {
		_ = c.SetDeadline(time.Now().Add(patience))
	}
	return a, b
}

// FuzzControl writes anything into a control area. A writer that looks a grant up in it comes
// back, stays inside the area, and is never allowed to store outside the memory.
func FuzzControl(f *testing.F) {
	patch := func(at int, v uint64) []byte {
		return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint32(nil, uint32(at/8)), v)
	}
	slot := slotsAt + slotOf(1, 0)*slotLen
	f.Add(patch(slot, 1<<lifeShift|stateLive), uint64(0), uint64(8))
	f.Add(patch(slot+28, 1<<31), uint64(0), uint64(8))
	f.Add(append(patch(slot+24, 1<<40|uint64(testKey.Gen)), patch(slot+32, spans-1)...), uint64(1<<63), uint64(1<<63))
	f.Add(append(patch(spansAt, 1<<63), patch(spansAt+8, 1<<63)...), uint64(4090), uint64(7))
	b, err := unix.Mmap(-1, 0, controlSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = unix.Munmap(b) })
	c := control{b}
	newTable(c).put(1, testKey, []transfer.Span{{Off: 0, Len: 64}, {Off: 128, Len: 64}})
	const size = 4096
	f.Fuzz(func(t *testing.T, patches []byte, off, n uint64) {
		var undo []func()
		for ; len(patches) >= 12 && len(undo) < 64; patches = patches[12:] {
			at := int(binary.LittleEndian.Uint32(patches)%(controlSize/8)) * 8
			was := c.u64(at).Swap(binary.LittleEndian.Uint64(patches[4:]))
			undo = append(undo, func() { c.u64(at).Store(was) })
		}
		defer func() {
			for i := range undo {
				undo[len(undo)-1-i]()
			}
		}()
		_ = c.check()
		for id := range transfer.GrantID(4) {
			p, ok := c.find(id, testKey)
			if !ok {
				continue
			}
			for _, r := range [][2]uint64{{off, n}, {off % (2 * size), n % (2 * size)}, {0, 64}, {size, 1}} {
				if c.allowed(p, r[0], r[1], size) && (r[0] > size || r[1] > size-r[0]) {
					t.Fatalf("%d bytes at %d of %d are allowed", r[1], r[0], size)
				}
			}
			_ = c.leave(p)
		}
	})
}
