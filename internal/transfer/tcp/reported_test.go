package tcp

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// Kinds of faults that others reported (docs/reported.md), on the wire of this transport.

const page = 4096

// grantTo makes a grant of one session's room live.
func (p *pair) grantTo(t *testing.T, s transfer.SessionID, id transfer.GrantID, key room.Key, spans ...transfer.Span) {
	t.Helper()
	if err := p.tgt.Allow(transfer.Grant{ID: id, Key: key, Session: s, Spans: spans}); err != nil {
		t.Fatal(err)
	}
}

// rawOf is a source of session s made of bytes.
func (p *pair) rawOf(t *testing.T, s transfer.SessionID) *rawConn {
	t.Helper()
	r := p.raw(t)
	if st := r.hello(s); st != statusOK {
		t.Fatalf("session %d: status %d", s, st)
	}
	return r
}

func (p *pair) openSessions(t *testing.T, ids ...transfer.SessionID) {
	t.Helper()
	for _, s := range ids {
		if err := p.tgt.OpenSession(s); err != nil {
			t.Fatal(err)
		}
	}
}

// is checks that n bytes at off are v.
func (p *pair) is(t *testing.T, when string, off, n int, v byte) {
	t.Helper()
	if !bytes.Equal(p.mem[off:off+n], bytes.Repeat([]byte{v}, n)) {
		t.Fatalf("%s: the %d bytes at %d are not all %#x", when, n, off, v)
	}
}

// unsettled gives a sender that completes too early the time to be caught.
func unsettled(t *testing.T, what string, v <-chan error) {
	t.Helper()
	for range 5000 {
		runtime.Gosched()
	}
	select {
	case err := <-v:
		t.Fatalf("%s: done with %v", what, err)
	default:
	}
}

// The rest of A's write arrives behind all of B's write into the same page.
func TestReportedK1PageReuse(t *testing.T) {
	t.Run("the rest comes behind the next owner", func(t *testing.T) {
		p := listen(t, Config{}, page)
		keyB := room.Key{Room: 78}
		p.allow(t, 1, transfer.Span{Off: 0, Len: page})
		r := p.raw(t).session()
		r.send(openFrame(header{seq: 1, grant: 1, key: testKey}, []transfer.Span{{Off: 0, Len: page}}, "a", bytes.Repeat([]byte{0xaa}, page/2)))
		p.stored(t, 1, page/2-1)
		if !p.tgt.Revoke(1) {
			t.Fatal("tcp must fence")
		}
		p.grantTo(t, 1, 2, keyB, transfer.Span{Off: 0, Len: page})
		b := post(t, p.dial(t), transfer.Write{Grant: 2, Key: keyB, Segments: []transfer.Segment{{Src: bytes.Repeat([]byte{0xbb}, page)}}, Notify: []byte("b")})
		if err := recv(t, b, "B's write"); err != nil {
			t.Fatal(err)
		}
		r.send(dataFrame(1, bytes.Repeat([]byte{0xaa}, page/2)))
		if a := r.answer(); a != (answer{seq: 1, code: codeGrant}) {
			t.Fatalf("answer %+v", a)
		}
		p.is(t, "after the rest of A's write", 0, page, 0xbb)
		if n := recv(t, p.sink.landed, "notification"); n != "b" || len(p.sink.landed) != 0 {
			t.Fatalf("landed %q and %d more", n, len(p.sink.landed))
		}
	})
}

func TestReportedK2EarlyCompletion(t *testing.T) {
	const size = 32 << 20
	// The report: the goroutine that applies stands still, 32 MiB are sent.
	t.Run("apply stopped", func(t *testing.T) {
		p := listen(t, Config{}, size+2*page)
		inside, applying := make(chan string, 1), make(chan struct{})
		resume := sync.OnceFunc(func() { close(applying) })
		t.Cleanup(resume) // before the target is closed, which waits for its goroutines
		p.sink.gate = func(s string) {
			if s == "stop" {
				inside <- s
				<-applying
			}
		}
		p.allow(t, 1, transfer.Span{Off: 0, Len: size + 2*page})
		peer := p.dial(t)
		write := func(note string, off uint64, src []byte) <-chan error {
			return post(t, peer, transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{{Off: off, Src: src}}, Notify: []byte(note)})
		}
		stop := write("stop", size, []byte{1})
		recv(t, inside, "the stopped goroutine")
		big := write("big", 0, bytes.Repeat([]byte{0xb1}, size))
		small := write("small", size+page, bytes.Repeat([]byte{0x51}, page)) // every socket buffer takes it
		for what, v := range map[string]<-chan error{"stop": stop, "big": big, "small": small} {
			unsettled(t, what, v)
		}
		p.is(t, "while nothing is applied", 0, size, 0)
		resume()
		for _, v := range []<-chan error{stop, big, small} {
			if err := recv(t, v, "verdict"); err != nil {
				t.Fatal(err)
			}
		}
		p.is(t, "complete", 0, size, 0xb1)
		p.is(t, "complete", size+page, page, 0x51)
	})
	// Every byte was taken from the socket, and then the target is gone.
	t.Run("taken but never applied", func(t *testing.T) {
		peer, c, _ := fakeTarget(t, Config{})
		v := post(t, peer, transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{{Src: make([]byte, size)}}, Notify: []byte("n")})
		for sent := uint64(0); sent < size; {
			sent += nextFrame(t, c).payload
		}
		unsettled(t, "all bytes are on the other side, unanswered", v)
		_ = c.Close()
		if err := recv(t, v, "verdict"); !errors.Is(err, transfer.ErrPeerLost) {
			t.Fatalf("a vanished target gave %v", err)
		}
	})
	// The report's second case: refused after 1 MiB, while the rest of the frame is in the sender's hands.
	t.Run("rejected after 1 MiB", func(t *testing.T) {
		peer, c, _ := fakeTarget(t, Config{FrameBytes: maxFrame})
		src := bytes.Repeat([]byte{0xa5}, size)
		v := post(t, peer, transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{{Src: src}}})
		head := make([]byte, headerLen+entryLen)
		if _, err := io.ReadFull(c, head); err != nil {
			t.Fatal(err)
		}
		first := make([]byte, maxFrame)
		if _, err := io.ReadFull(c, first[:1<<20]); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(appendAnswer(nil, answer{seq: 1, code: codeGrant})); err != nil {
			t.Fatal(err)
		}
		untilRead(t, peer)
		unsettled(t, "the refusal came while the sender still reads the source", v)
		if _, err := io.ReadFull(c, first[1<<20:]); err != nil {
			t.Fatal(err)
		}
		if err := recv(t, v, "verdict"); !errors.Is(err, transfer.ErrGrant) {
			t.Fatalf("verdict %v", err)
		}
		clear(src) // ours again
		if i := slices.IndexFunc(first, func(b byte) bool { return b != 0xa5 }); i >= 0 {
			t.Fatalf("byte %d on the wire is %#x", i, first[i])
		}
		if h := nextFrame(t, c); h.kind != kindAbandon || h.seq != 1 {
			t.Fatalf("then frame %+v", h)
		}
	})
}

// untilRead waits until the peer's process has taken everything from its socket.
func untilRead(t *testing.T, p transfer.Peer) {
	t.Helper()
	for waiting := 1; waiting > 0; runtime.Gosched() {
		if err := p.(*peer).bulk.raw.Control(func(fd uintptr) {
			n, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ)
			if err != nil {
				t.Fatal(err)
			}
			waiting = n
		}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestReportedK3Identity(t *testing.T) {
	// The report: four writers for slot 23, of which one counts; A ends, B has the slot and its data, then A's slow
	// writer lands. B's room has the same id and the next generation.
	t.Run("four writers for slot 23", func(t *testing.T) {
		const slot = 23 * page
		p := listen(t, Config{}, 64*page)
		p.openSessions(t, 2, 3, 4)
		keyA, keyB := room.Key{Room: 5, Gen: 1}, room.Key{Room: 5, Gen: 2}
		p.grantTo(t, 1, 10, keyA, transfer.Span{Off: slot, Len: page})
		var writers []*rawConn
		frame := func(seq uint64, g transfer.GrantID, k room.Key, n int) []byte {
			f := openFrame(header{seq: seq, grant: g, key: k}, []transfer.Span{{Off: slot, Len: page}}, "w", bytes.Repeat([]byte{0xaa}, page))
			return f[:len(f)-page+n]
		}
		for s := range transfer.SessionID(4) {
			writers = append(writers, p.rawOf(t, s+1))
		}
		for _, w := range writers[1:] {
			w.send(frame(1, 10, keyA, page))
			if a := w.answer(); a != (answer{seq: 1, code: codeGrant}) {
				t.Fatalf("a writer that was not asked: %+v", a)
			}
		}
		slow := writers[0]
		slow.send(frame(1, 10, keyA, page/2))
		p.stored(t, 10, slot)
		p.tgt.Revoke(10) // A ends
		p.grantTo(t, 2, 11, keyB, transfer.Span{Off: slot, Len: page})
		b := openFrame(header{seq: 2, grant: 11, key: keyB}, []transfer.Span{{Off: slot, Len: page}}, "b", bytes.Repeat([]byte{0xbb}, page))
		writers[1].send(b)
		if a := writers[1].answer(); a != (answer{seq: 2, code: codeOK}) {
			t.Fatalf("B's writer: %+v", a)
		}
		slow.send(bytes.Repeat([]byte{0xaa}, page/2))
		for _, late := range []struct {
			w   *rawConn
			seq uint64
			g   transfer.GrantID
			key room.Key
		}{
			{slow, 1, 0, keyA},              // the slow write itself
			{slow, 2, 10, keyA},             // once more
			{slow, 3, 11, keyA},             // B's grant, its own room
			{slow, 4, 11, keyB},             // every name right, but another's session
			{writers[1], 3, 11, keyA},       // B's session and grant, A's room
			{writers[2], 2, 11, keyB},       // a third session
			{writers[3], 2, 10, room.Key{}}, // no room at all
		} {
			if late.g != 0 {
				late.w.send(frame(late.seq, late.g, late.key, page))
			}
			if a := late.w.answer(); a != (answer{seq: late.seq, code: codeGrant}) {
				t.Errorf("write %d under grant %d as room %v: %+v", late.seq, late.g, late.key, a)
			}
		}
		p.is(t, "at the end", slot, page, 0xbb)
		if n := recv(t, p.sink.landed, "notification"); n != "b" || len(p.sink.landed) != 0 {
			t.Fatalf("landed %q and %d more", n, len(p.sink.landed))
		}
	})
}

// A prefill process dies in the middle of a write of an aborted room; one that claims to be it comes back.
func TestReportedK6ForgottenResource(t *testing.T) {
	t.Run("a writer rises from the dead", func(t *testing.T) {
		p := listen(t, Config{}, page)
		p.allow(t, 1, transfer.Span{Off: 0, Len: page})
		r := p.raw(t).session()
		frame := openFrame(header{seq: 1, grant: 1, key: testKey}, []transfer.Span{{Off: 0, Len: page}}, "a", bytes.Repeat([]byte{0xaa}, page))
		r.send(frame[:len(frame)-page/2])
		p.stored(t, 1, 0)
		_ = r.nc.SetLinger(0)
		_ = r.nc.Close()
		if s := recv(t, p.sink.fenced, "fence"); s != 1 || !p.tgt.Revoke(1) {
			t.Fatalf("session %d is fenced, its grant is not", s)
		}
		p.openSessions(t, 2)
		p.grantTo(t, 2, 2, testKey, transfer.Span{Off: 0, Len: page})
		clear(p.mem)
		if st := p.raw(t).hello(1); st != statusSession {
			t.Errorf("its old session: status %d", st)
		}
		again := p.rawOf(t, 2)
		again.send(frame)
		if a := again.answer(); a != (answer{seq: 1, code: codeGrant}) {
			t.Errorf("its old grant in a new session: %+v", a)
		}
		p.is(t, "after the dead writer's writes", 0, page, 0)
		if got := p.tr.Stats(); got.GrantRefused != 1 || got.UnknownSessions != 1 {
			t.Errorf("counted %+v", got)
		}
	})
}

// 0, 1, 2 and 9 frames, one byte, 16 MiB of noise, before and after the handshake; a room that waited all the time
// then gets its data, on a connection that was there before.
func TestReportedK9Garbage(t *testing.T) {
	t.Run("data port", func(t *testing.T) {
		p := listen(t, Config{}, page)
		p.allow(t, 1, transfer.Span{Off: 0, Len: page})
		peer := p.dial(t)
		noise := make([]byte, 16<<20)
		_, _ = rand.NewChaCha8([32]byte{1}).Read(noise)
		for _, n := range []int{0, 1, 2, 9} {
			r := p.raw(t).session()
			for i := range n - 1 { // well made, but of no grant
				r.send(openFrame(header{seq: uint64(i + 1), grant: 999, key: testKey}, []transfer.Span{{Off: 0, Len: 1}}, "x", []byte{7}))
				if a := r.answer(); a.code != codeGrant {
					t.Errorf("frame %d of %d: %+v", i, n, a)
				}
			}
			if n > 0 {
				r.send(bytes.Repeat([]byte{0x5a}, headerLen))
			}
			_ = r.nc.CloseWrite()
			r.closed("frames")
		}
		for _, b := range [][]byte{noise[:1], noise} {
			for _, greet := range []bool{false, true} {
				r := p.raw(t)
				if greet {
					r.session()
				}
				_, _ = r.nc.Write(b) // the target may close in the middle
				_ = r.nc.CloseWrite()
				r.closed("noise")
			}
		}
		if st := p.tr.Stats(); st.ProtocolErrors < 4 || st.BadHandshakes != 2 || st.GrantRefused != 1+8 {
			t.Errorf("counted %+v", st)
		}
		w := transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{{Src: bytes.Repeat([]byte{1}, page)}}, Notify: []byte("valid")}
		if err := recv(t, post(t, peer, w), "the waiting room's write"); err != nil {
			t.Fatal(err)
		}
		p.is(t, "the waiting room", 0, page, 1)
	})
}
