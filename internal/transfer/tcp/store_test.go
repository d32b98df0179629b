package tcp

import (
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/postq"
)

func TestWakeAt(t *testing.T) {
	for _, c := range []struct {
		n, left uint64
		want    int
	}{
		{1, 1, 1},
		{smallRead - 1, 1 << 30, 1},
		{smallRead, smallRead, smallRead}, // never more than are to come
		{64 << 10, 64 << 10, 64 << 10},
		{1 << 20, 256 << 10, 64 << 10},
		{1 << 20, 1 << 20, 256 << 10},
		{1 << 20, 1<<20 - 1, 128 << 10},
		{1 << 20, 3 << 20, 512 << 10},
		{300 << 10, 1 << 30, 300 << 10},
		{1 << 20, 1 << 40, 1 << 20},
		{maxStore, ^uint64(0), mostWake},
	} {
		if got := wakeAt(c.n, c.left); got != c.want {
			t.Errorf("wakeAt(%d, %d) = %d, want %d", c.n, c.left, got, c.want)
		}
	}
}

// TestLocalWindow: the kernel's queue of a connection within one machine is bounded, unless the configuration says how.
func TestLocalWindow(t *testing.T) {
	for _, c := range []struct {
		cfg   Config
		bound bool
	}{{Config{}, true}, {Config{ReceiveBuffer: 256 << 10}, false}} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		source, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer source.Close()
		accepted, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer accepted.Close()
		tc := accepted.(*net.TCPConn)
		if !sameHost(tc) {
			t.Error("a loopback connection counts as one to another machine")
		}
		got, err := newConn(&target{tr: New(c.cfg)}, tc)
		if err != nil {
			t.Fatal(err)
		}
		var window int
		_ = got.raw.Control(func(fd uintptr) { window, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_WINDOW_CLAMP) })
		if err != nil || (window == localWindow) != c.bound {
			t.Errorf("%+v: the window is bounded to %d, %v", c.cfg, window, err)
		}
	}
}

// TestTurn: a write is in long frames only while nobody waits, and within one machine.
func TestTurn(t *testing.T) {
	for _, c := range []struct {
		frame         int
		local, shorts bool
		another       bool
		want          int
	}{
		{1 << 20, true, false, false, 4 << 20},
		{1 << 20, true, true, false, 1 << 20},
		{1 << 20, true, false, true, 1 << 20},
		{1 << 20, false, false, false, 1 << 20},
		{maxFrame, true, false, false, maxFrame},
		{maxFrame / 2, true, false, false, maxFrame},
	} {
		q := postq.New(postq.Config{Limit: 4, Open: 4, Segments: 1})
		done := func(error) {}
		post := func(g transfer.GrantID) {
			if err := q.Post(transfer.Write{Grant: g, Segments: []transfer.Segment{{Src: make([]byte, 8)}}, Done: done}); err != nil {
				t.Fatal(err)
			}
		}
		post(1)
		if _, ok := q.Next(); !ok {
			t.Fatal("no item")
		}
		if c.another {
			post(2)
		}
		s := &stream{p: &peer{tr: New(Config{FrameBytes: c.frame})}, q: q, local: c.local}
		if got := s.turn(c.shorts); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}
