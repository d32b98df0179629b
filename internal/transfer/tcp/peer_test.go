package tcp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
)

// fakeTarget is a peer and the other ends of its two connections, which the test plays.
func fakeTarget(t *testing.T, c Config) (p transfer.Peer, bulk, quick net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	accepted := make(chan net.Conn, 2)
	go func() {
		for range cap(accepted) {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			var b [welcomeLen]byte
			_, _ = io.ReadFull(nc, make([]byte, helloLen))
			statusOK.encode(&b)
			_, _ = nc.Write(b[:])
			accepted <- nc
		}
	}()
	peer, err := New(c).Dial(context.Background(), transfer.Descriptor{Kind: "tcp", Addr: ln.Addr().String()}, 1)
	if err != nil {
		t.Fatal(err)
	}
	bulk, quick = recv(t, accepted, "first connection of the peer"), recv(t, accepted, "second connection of the peer")
	_ = bulk.SetDeadline(time.Now().Add(patience))
	_ = quick.SetDeadline(time.Now().Add(patience))
	t.Cleanup(func() {
		_ = peer.Close()
		_ = bulk.Close()
		_ = quick.Close()
	})
	return peer, bulk, quick
}

// nextFrame reads one frame's header and throws its payload away.
func nextFrame(t *testing.T, c net.Conn) header {
	t.Helper()
	var b [headerLen]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		t.Fatalf("read header: %v", err)
	}
	var h header
	if err := h.decode(b[:]); err != nil {
		t.Fatal(err)
	}
	rest := int64(h.segments*entryLen+h.notifyN) + int64(h.payload)
	if n, err := io.CopyN(io.Discard, c, rest); err != nil {
		t.Fatalf("frame ended after %d of %d bytes: %v", n, rest, err)
	}
	return h
}

// A write refused at its first bytes: the source stops sending it, says so, and reports the
// refusal only when it reads the segments no more. The next write is as good as any.
func TestRefusedWriteIsAbandoned(t *testing.T) {
	peer, c, _ := fakeTarget(t, Config{FrameBytes: 64 << 10})
	const frame = lonelyTurns * 64 << 10
	src := make([]byte, 64<<20)
	v := post(t, peer, transfer.Write{Grant: 1, Segments: []transfer.Segment{{Src: src}}})
	if h := nextFrame(t, c); h.kind != kindOpen || h.seq != 1 || h.total != uint64(len(src)) || h.payload != frame {
		t.Fatalf("first frame %+v", h)
	}
	if _, err := c.Write(appendAnswer(nil, answer{seq: 1, code: codeGrant})); err != nil {
		t.Fatal(err)
	}
	sent := uint64(frame)
	for {
		h := nextFrame(t, c)
		sent += h.payload
		if h.seq != 1 {
			t.Fatalf("frame %+v", h)
		}
		if h.kind == kindAbandon {
			break
		}
	}
	if sent == uint64(len(src)) {
		t.Error("everything was sent all the same")
	}
	if err := recv(t, v, "verdict"); !errors.Is(err, transfer.ErrGrant) {
		t.Fatalf("verdict %v", err)
	}
	v = post(t, peer, transfer.Write{Grant: 1, Segments: []transfer.Segment{{Src: src[:quickBytes+1]}}})
	for left := uint64(quickBytes + 1); left > 0; {
		h := nextFrame(t, c)
		if h.seq != 2 || (h.kind == kindOpen) != (left == quickBytes+1) {
			t.Fatalf("next write %+v", h)
		}
		left -= h.payload
	}
	if _, err := c.Write(appendAnswer(nil, answer{seq: 2})); err != nil {
		t.Fatal(err)
	}
	if err := recv(t, v, "verdict"); err != nil {
		t.Fatal(err)
	}
}

// Closing a peer whose target does not read must not hang, and must settle every write
// once, after its segments are free.
func TestCloseBreaksAStalledConnection(t *testing.T) {
	peer, _, _ := fakeTarget(t, Config{Queue: 4})
	var verdicts []<-chan error
	for range 4 {
		verdicts = append(verdicts, post(t, peer, transfer.Write{Grant: 1, Segments: []transfer.Segment{{Src: make([]byte, 32<<20)}}}))
	}
	if err := peer.Post(transfer.Write{Grant: 1, Done: func(error) { t.Error("done of a refused post") }}); !errors.Is(err, transfer.ErrBusy) {
		t.Fatalf("post to a full queue: %v", err)
	}
	closed := make(chan error, 1)
	go func() { closed <- peer.Close() }()
	if err := recv(t, closed, "close"); err != nil {
		t.Fatal(err)
	}
	for _, v := range verdicts {
		if len(v) != 1 {
			t.Fatalf("%d verdicts when Close has returned", len(v))
		}
		if err := <-v; !errors.Is(err, transfer.ErrClosed) {
			t.Fatalf("verdict %v", err)
		}
	}
	if err := peer.Post(transfer.Write{Grant: 1}); !errors.Is(err, transfer.ErrClosed) {
		t.Fatalf("post after close: %v", err)
	}
}

// A target that answers nonsense loses the connection; nothing else happens.
func TestPeerRefusesWrongAnswers(t *testing.T) {
	for name, reply := range map[string][]byte{
		"garbage":        bytes.Repeat([]byte{0xab}, answerLen),
		"unknown write":  appendAnswer(nil, answer{seq: 5}),
		"unknown code":   appendAnswer(nil, answer{seq: 1, code: 77}),
		"answered twice": appendAnswer(appendAnswer(nil, answer{seq: 1, code: codeGrant}), answer{seq: 1}),
	} {
		t.Run(name, func(t *testing.T) {
			peer, _, c := fakeTarget(t, Config{})
			v := post(t, peer, transfer.Write{Grant: 1})
			if _, err := io.ReadFull(c, make([]byte, headerLen)); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Write(reply); err != nil {
				t.Fatal(err)
			}
			recv(t, peer.Down(), "down")
			if err := peer.Err(); !errors.Is(err, transfer.ErrPeerLost) {
				t.Errorf("ended with %v", err)
			}
			if err := recv(t, v, "verdict"); err == nil {
				t.Error("a wrong answer completed a write")
			}
		})
	}
}
