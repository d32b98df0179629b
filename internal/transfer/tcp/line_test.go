package tcp

import (
	"bytes"
	"errors"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
)

// withLine is how many of the target's connections have a line.
func withLine(p *pair) (n int) {
	for _, c := range p.tgt.(*target).Conns() {
		c.mu.Lock()
		if c.line != nil {
			n++
		}
		c.mu.Unlock()
	}
	return n
}

// writeOK writes n bytes of v under grant 1 and waits.
func writeOK(t *testing.T, p *pair, peer transfer.Peer, v byte, n int) {
	t.Helper()
	err := recv(t, post(t, peer, transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{{Src: bytes.Repeat([]byte{v}, n)}}}), "verdict")
	if err != nil {
		t.Fatalf("a write of %d bytes: %v", n, err)
	}
	p.is(t, "after a write", 0, n, v)
}

// A connection has a thread of its own from its first long write on, and gives it back at its end; short ones and
// refused ones bring none.
func TestLongWritesHaveAThread(t *testing.T) {
	const long = 4 << 20
	p := listen(t, Config{}, long)
	p.allow(t, 1, transfer.Span{Len: long})
	peer := p.dial(t)
	writeOK(t, p, peer, 1, quickBytes)
	bad := post(t, peer, transfer.Write{Grant: 2, Key: testKey, Segments: []transfer.Segment{{Src: make([]byte, long)}}})
	if err := recv(t, bad, "verdict"); !errors.Is(err, transfer.ErrGrant) {
		t.Fatalf("a write without a grant: %v", err)
	}
	if n := withLine(p); n != 0 {
		t.Fatalf("%d connections have a line before a long write", n)
	}
	for v := range byte(3) {
		writeOK(t, p, peer, 2+v, long)
		writeOK(t, p, peer, 9+v, 1)
	}
	if n, lines, writers := withLine(p), p.tr.lines.used.Load(), p.tr.writers.used.Load(); n != 1 || lines != 1 || writers != 1 {
		t.Fatalf("%d connections have a line; %d lines and %d writers are counted, want 1 each", n, lines, writers)
	}
	p.tgt.CloseSession(1) // wakes the reader, which waits for the next write
	recv(t, peer.Down(), "the peer's end")
	recv(t, p.sink.fenced, "fence")
	if err := peer.Close(); err != nil {
		t.Fatal(err)
	}
	if lines, writers := p.tr.lines.used.Load(), p.tr.writers.used.Load(); lines != 0 || writers != 0 {
		t.Fatalf("%d lines and %d writers are counted at the end", lines, writers)
	}
}

// Without a thread left, long writes go through Go's poller.
func TestThreadsAreBounded(t *testing.T) {
	const long = 4 << 20
	p := listen(t, Config{}, long)
	p.tr.lines.used.Store(maxLines)
	p.tr.writers.used.Store(maxLines)
	p.allow(t, 1, transfer.Span{Len: long})
	peer := p.dial(t)
	writeOK(t, p, peer, 1, long)
	writeOK(t, p, peer, 2, long)
	if n, lines, writers := withLine(p), p.tr.lines.used.Load(), p.tr.writers.used.Load(); n != 0 || lines != maxLines || writers != maxLines {
		t.Fatalf("%d connections have a line; %d lines and %d writers are counted", n, lines, writers)
	}
}

// A long write's reader gives way for politeStores after each short write, and has the poller looked into meanwhile.
func TestALongWritesReaderGivesWay(t *testing.T) {
	const long = 1 << 20
	p := listen(t, Config{}, long)
	tg := p.tgt.(*target)
	c := &conn{t: tg}
	looked := make(chan struct{}, politeStores)
	c.looked = func() {
		c.looking.Store(false)
		looked <- struct{}{}
	}
	c.giveWay()
	if c.courtesy.Left != 0 || c.looking.Load() {
		t.Fatal("gives way although there was no short write")
	}
	p.allow(t, 1, transfer.Span{Len: long})
	writeOK(t, p, p.dial(t), 1, 1)
	c.giveWay()
	recv(t, looked, "a look into the poller")
	if c.courtesy.Left != politeStores-1 {
		t.Fatalf("gives way %d times more, want %d", c.courtesy.Left, politeStores-1)
	}
	for range politeStores {
		c.giveWay()
	}
	if c.courtesy.Left != 0 {
		t.Fatalf("gives way %d times more", c.courtesy.Left)
	}
}

// stuckLine is a line whose peer reads nothing, so that nothing more can be sent.
func stuckLine(t *testing.T) *line {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	near, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	far, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = far.Close() })
	l, err := newLine(near.(*net.TCPConn))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.send(make([]byte, 64<<20), time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("64 MiB to a peer that does not read: %v", err)
	}
	return l
}

// abort ends each wait of the owner.
func TestAbortEndsALinesWaits(t *testing.T) {
	never := func(uintptr) bool { return false }
	for name, wait := range map[string]func(l *line) error{
		"read":  func(l *line) error { return l.Read(never) },
		"write": func(l *line) error { return l.Write(never) },
		"send": func(l *line) error {
			for { // the kernel may take some bytes more
				if err := l.send(make([]byte, 1<<20), time.Hour); err != nil {
					return err
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := stuckLine(t)
			begun, ended := make(chan struct{}), make(chan error, 1)
			go func() {
				close(begun)
				ended <- wait(l)
			}()
			<-begun
			for range 100 {
				runtime.Gosched()
			}
			l.abort()
			if err := recv(t, ended, "the end of the wait"); err == nil {
				t.Error("no error")
			}
			l.close()
			l.abort() // of a descriptor that may be another's by now: nothing
		})
	}
}

// untilFull waits until the kernel takes no more of a long write.
func untilFull(t *testing.T, p transfer.Peer) {
	t.Helper()
	for full := false; !full; runtime.Gosched() {
		if err := p.(*peer).bulk.raw.Control(func(fd uintptr) {
			f := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
			n, err := unix.Poll(f, 0)
			full = n == 0 && err == nil
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// Close ends a sender whose peer has stopped reading, and settles what it was sending.
func TestCloseEndsAStuckSender(t *testing.T) {
	p := listen(t, Config{}, 64<<20)
	inside, release := gated(t, p)
	defer release()
	p.allow(t, 1, transfer.Span{Len: 64 << 20})
	peer := p.dial(t)
	first := post(t, peer, transfer.Write{Grant: 1, Key: testKey, Notify: []byte("!a"), Segments: []transfer.Segment{{Src: make([]byte, 1<<20)}}})
	recv(t, inside, "the first write") // its reader reads nothing more
	stuck := post(t, peer, transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{{Src: make([]byte, 64<<20)}}})
	untilFull(t, peer)
	unsettled(t, "a write that cannot be read", stuck)
	closed := make(chan error, 1)
	go func() { closed <- peer.Close() }()
	if err := recv(t, closed, "Close"); err != nil {
		t.Error(err)
	}
	for _, v := range []<-chan error{first, stuck} {
		if err := recv(t, v, "verdict"); !errors.Is(err, transfer.ErrClosed) {
			t.Errorf("verdict %v", err)
		}
	}
}
