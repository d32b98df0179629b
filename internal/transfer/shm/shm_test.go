package shm

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

func TestRevokeWithAWriterInside(t *testing.T) {
	p := listen(t, Config{}, 4096)
	p.allow(t, 1, transfer.Span{Off: 0, Len: 4096})
	r := p.raw(t)
	at := r.enter(1)
	for range 2 {
		if p.tgt.Revoke(1) {
			t.Fatal("fenced while a writer is inside")
		}
	}
	if err := p.tgt.Allow(transfer.Grant{ID: 1, Session: 1}); !errors.Is(err, transfer.ErrGrant) {
		t.Fatalf("allow of an id that is draining: %v", err)
	}
	r.roundTrip()
	none(t, p.sink.revoked, "revoked too early")
	if r.maps.ctl.enter(at) {
		t.Fatal("entered a revoked grant")
	}
	if !r.maps.ctl.leave(at) {
		t.Fatal("the writer does not know that it must report")
	}
	r.send(message{kind: kindLeft, grant: 1}, "")
	if g := recv(t, p.sink.revoked, "Revoked"); g != 1 {
		t.Fatalf("revoked %d", g)
	}
	if !p.tgt.Revoke(1) {
		t.Fatal("not fenced after the writer has left")
	}
	p.allow(t, 1, transfer.Span{Off: 0, Len: 8}) // the slot is free
	r.roundTrip()
	none(t, p.sink.revoked, "revoked twice")
	none(t, p.sink.fenced, "fenced, but the session lives")
	if s := p.tr.Stats(); s.ProtocolErrors != 0 {
		t.Fatalf("counted %+v", s)
	}
}

// A session of two connections: a revoke is quiet when both are.
func TestRevokeWithWritersOnTwoConnections(t *testing.T) {
	p := listen(t, Config{}, 4096)
	p.allow(t, 1, transfer.Span{Off: 0, Len: 4096})
	a := p.raw(t)
	b := p.raw(t) // sees the grant too, although it came later
	at, _ := a.enter(1), b.enter(1)
	if p.tgt.Revoke(1) {
		t.Fatal("fenced with two writers inside")
	}
	if !a.maps.ctl.leave(at) {
		t.Fatal("no report wanted")
	}
	a.send(message{kind: kindLeft, grant: 1}, "")
	a.roundTrip()
	none(t, p.sink.revoked, "revoked with one writer inside")
	b.end() // dies inside
	if g := recv(t, p.sink.revoked, "Revoked"); g != 1 {
		t.Fatalf("revoked %d", g)
	}
	none(t, p.sink.fenced, "fenced while a connection lives")
	a.end()
	if s := recv(t, p.sink.fenced, "Fenced"); s != 1 {
		t.Fatalf("fenced %d", s)
	}
	none(t, p.sink.revoked, "revoked twice")
}

// A writer that dies inside a grant: Fenced, not Revoked, and then nothing is draining.
func TestWriterDiesInside(t *testing.T) {
	p := listen(t, Config{}, 4096)
	p.allow(t, 1, transfer.Span{Off: 0, Len: 4096})
	p.allow(t, 2, transfer.Span{Off: 0, Len: 4096})
	r := p.raw(t)
	r.enter(1)
	if p.tgt.Revoke(1) {
		t.Fatal("fenced while a writer is inside")
	}
	r.end()
	if s := recv(t, p.sink.fenced, "Fenced"); s != 1 {
		t.Fatalf("fenced %d", s)
	}
	if !p.tgt.Revoke(1) || !p.tgt.Revoke(2) {
		t.Fatal("a dead writer's grant is not fenced")
	}
	p.tgt.CloseSession(1)
	if err := p.tgt.Close(); err != nil {
		t.Fatal(err)
	}
	none(t, p.sink.revoked, "revoked and fenced")
	none(t, p.sink.fenced, "fenced twice")
}

// CloseSession: the grants are revoked at once, the fence waits for the writer to go.
func TestFenceWaitsForTheWriter(t *testing.T) {
	p := listen(t, Config{}, 4096)
	p.allow(t, 1, transfer.Span{Off: 0, Len: 4096})
	p.allow(t, 2, transfer.Span{Off: 0, Len: 4096})
	r := p.raw(t)
	at := r.enter(1)
	p.tgt.CloseSession(1)
	if p.tgt.Revoke(1) {
		t.Fatal("fenced while a writer is inside")
	}
	if !p.tgt.Revoke(2) {
		t.Fatal("not fenced although nobody is inside")
	}
	if r.maps.ctl.enter(at) {
		t.Fatal("entered a grant of a closed session")
	}
	r.dismissed("CloseSession")
	none(t, p.sink.fenced, "fenced while the writer has the mapping")
	if _, err := p.tr.Dial(context.Background(), p.tgt.Descriptor(), 1); !errors.Is(err, transfer.ErrSession) {
		t.Fatalf("dial a closed session: %v", err)
	}
	r.end()
	if s := recv(t, p.sink.fenced, "Fenced"); s != 1 {
		t.Fatalf("fenced %d", s)
	}
	if !p.tgt.Revoke(1) {
		t.Fatal("not fenced after the session is")
	}
	if err := p.tgt.OpenSession(1); err != nil {
		t.Fatalf("open after the end: %v", err)
	}
}

// A writer that leaves after CloseSession, about which no Revoke asked, is no news.
func TestLeavingAClosedSessionIsNoNews(t *testing.T) {
	p := listen(t, Config{}, 4096)
	p.allow(t, 1, transfer.Span{Off: 0, Len: 4096})
	r := p.raw(t)
	at := r.enter(1)
	p.tgt.CloseSession(1)
	if !r.maps.ctl.leave(at) {
		t.Fatal("no report wanted")
	}
	r.send(message{kind: kindLeft, grant: 1}, "")
	r.end()
	if s := recv(t, p.sink.fenced, "Fenced"); s != 1 {
		t.Fatalf("fenced %d", s)
	}
	none(t, p.sink.revoked, "Revoked although Revoke never said false")
}

// Close does not wait for a writer that does not go, and says so.
func TestCloseNamesUnfencedSessions(t *testing.T) {
	m := memory(t, 4096)
	sink := newSink()
	tr := New(Config{Dir: socketDir(t), CloseGrace: 30 * time.Millisecond})
	tgt, err := tr.Listen(m, sink)
	if err != nil {
		t.Fatal(err)
	}
	p := &pair{tr: tr, mem: m.Bytes, sink: sink, tgt: tgt}
	for _, s := range []transfer.SessionID{1, 2} {
		if err := tgt.OpenSession(s); err != nil {
			t.Fatal(err)
		}
	}
	p.allow(t, 1, transfer.Span{Off: 0, Len: 4096})
	r := p.raw(t)
	r.enter(1)
	err = tgt.Close()
	var unfenced *transfer.UnfencedError
	if !errors.As(err, &unfenced) || len(unfenced.Sessions) != 1 || unfenced.Sessions[0] != 1 || unfenced.Error() == "" {
		t.Fatalf("close: %v", err)
	}
	if s := recv(t, sink.fenced, "fence of the session without a writer"); s != 2 {
		t.Fatalf("fenced %d", s)
	}
	if tgt.Revoke(1) {
		t.Fatal("fenced although the writer is inside")
	}
	r.dismissed("Close")
	r.end()
	if err := tgt.Close(); err != nil {
		t.Fatalf("second close: %v", err)
	}
	none(t, sink.fenced, "fenced after Close")
	if err := tgt.Allow(transfer.Grant{ID: 9, Session: 1}); !errors.Is(err, transfer.ErrClosed) {
		t.Fatalf("allow after close: %v", err)
	}
}

// A source that breaks the protocol is told to go; its session is fenced when it has gone,
// not before.
func TestBrokenMessagesEndOnlyTheirConnection(t *testing.T) {
	p := listen(t, Config{}, 4096)
	p.allow(t, 1, transfer.Span{Off: 0, Len: 4096})
	p.dial(t) // keeps the session alive
	sent := func(ms ...message) []byte {
		var b []byte
		for _, m := range ms {
			b = m.append(b)
		}
		return b
	}
	for name, b := range map[string][]byte{
		"noise":                   bytes.Repeat([]byte{0x5a}, 300),
		"zeros":                   make([]byte, messageLen),
		"hello again":             sent(message{kind: kindHello, value: 1, code: version}),
		"an answer":               sent(message{kind: kindAnswer, value: 1}),
		"left a grant never seen": sent(message{kind: kindLeft, grant: 55}),
		"left a live grant":       sent(message{kind: kindLeft, grant: 1}),
		"good, then noise":        append(sent(message{kind: kindWake}), bytes.Repeat([]byte{1}, messageLen)...),
		"completion, not in ring": sent(message{kind: kindDone, value: 1, grant: 1}),
	} {
		t.Run(name, func(t *testing.T) {
			before := p.tr.Stats().ProtocolErrors
			r := p.raw(t)
			_, _ = r.uc.Write(b)
			r.dismissed(name)
			if got := p.tr.Stats().ProtocolErrors; got != before+1 {
				t.Fatalf("%d protocol errors counted, want %d", got, before+1)
			}
			r.end()
		})
	}
	for name, m := range map[string]message{
		"noise in the ring":    {kind: 77},
		"a left in the ring":   {kind: kindLeft, grant: 1},
		"a wake in the ring":   {kind: kindWake},
		"notification too big": {kind: kindDone, value: 1, grant: 1, notify: true, notifyN: transfer.MaxNotify + 1},
	} {
		t.Run(name, func(t *testing.T) {
			before := p.tr.Stats().ProtocolErrors
			r := p.raw(t)
			r.maps.ctl.put(0, &m, nil)
			r.send(message{kind: kindWake}, "")
			r.dismissed(name)
			if got := p.tr.Stats().ProtocolErrors; got != before+1 {
				t.Fatalf("%d protocol errors counted, want %d", got, before+1)
			}
			r.end()
		})
	}
	t.Run("left while inside", func(t *testing.T) {
		p.allow(t, 2, transfer.Span{Off: 0, Len: 4096})
		r := p.raw(t)
		r.enter(2)
		if p.tgt.Revoke(2) {
			t.Fatal("fenced while a writer is inside")
		}
		r.send(message{kind: kindLeft, grant: 2}, "")
		r.dismissed("a lie")
		none(t, p.sink.revoked, "the lie was believed")
		r.end()
		if g := recv(t, p.sink.revoked, "Revoked"); g != 2 {
			t.Fatalf("revoked %d", g)
		}
	})
	w := transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{{Src: []byte("works")}}, Notify: []byte("works")}
	if err := recv(t, post(t, p.dial(t), w), "write after garbage"); err != nil {
		t.Fatal(err)
	}
	none(t, p.sink.fenced, "fenced, but a connection lives")
}

func TestRefusalsAreCounted(t *testing.T) {
	p := listen(t, Config{}, 8192)
	p.allow(t, 1, transfer.Span{Off: 1024, Len: 1024}, transfer.Span{Off: 2048, Len: 1024})
	peer := p.dial(t)
	before := bytes.Clone(p.mem)
	src := bytes.Repeat([]byte{7}, 1024)
	for _, tc := range []struct {
		w    transfer.Write
		want error
	}{
		{transfer.Write{Grant: 2, Key: testKey}, transfer.ErrGrant},
		{transfer.Write{Grant: 1, Key: room.Key{Room: 77, Gen: 4}}, transfer.ErrGrant},
		{transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{{Off: 1024, Src: src}, {Off: 1536, Src: src}}}, transfer.ErrBounds},
		{transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{{Off: 1<<64 - 8, Src: src}}}, transfer.ErrBounds},
	} {
		if err := recv(t, post(t, peer, tc.w), "verdict"); !errors.Is(err, tc.want) {
			t.Errorf("%v, want %v", err, tc.want)
		}
	}
	if !bytes.Equal(p.mem, before) {
		t.Error("a refused write stored bytes")
	}
	if s := p.tr.Stats(); s.GrantRefused != 2 || s.BoundsRefused != 2 || s.ProtocolErrors != 0 {
		t.Errorf("counted %+v", s)
	}
}

// The grant ends between the last slice and the completion message.
func TestCompletionAfterRevokeIsRefused(t *testing.T) {
	p := listen(t, Config{}, 4096)
	p.allow(t, 1, transfer.Span{Off: 0, Len: 4096})
	r := p.raw(t)
	at := r.enter(1)
	r.maps.mem[0] = 1
	r.maps.ctl.leave(at)
	if !p.tgt.Revoke(1) {
		t.Fatal("not fenced")
	}
	r.send(message{kind: kindDone, value: 4, grant: 1, notify: true, notifyN: 4}, "note")
	if m := r.read(); m.kind != kindAnswer || m.value != 4 || m.code != verdictGrant {
		t.Fatalf("answer %+v", m)
	}
	none(t, p.sink.landed, "landed under a revoked grant")
}

// A fault in the caller's memory must cost the connection, not the process, and the
// session is fenced.
func TestFaultEndsTheConnection(t *testing.T) {
	p := listen(t, Config{}, 1<<20)
	p.allow(t, 1, transfer.Span{Off: 0, Len: 1 << 20})
	src := memory(t, 1<<20)
	if err := unix.Ftruncate(src.FD, 4096); err != nil { // reading further is SIGBUS
		t.Fatal(err)
	}
	peer := p.dial(t)
	v := post(t, peer, transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{{Src: src.Bytes}}, Notify: []byte("n")})
	if err := recv(t, v, "verdict"); !errors.Is(err, transfer.ErrPeerLost) || !errors.Is(err, errFault) {
		t.Fatalf("verdict %v", err)
	}
	recv(t, peer.Down(), "down")
	if s := recv(t, p.sink.fenced, "Fenced"); s != 1 {
		t.Fatalf("fenced %d", s)
	}
	none(t, p.sink.landed, "landed")
}

func TestListenRefuses(t *testing.T) {
	m := memory(t, 4096)
	dir := socketDir(t)
	for name, tc := range map[string]struct {
		c Config
		m transfer.Memory
	}{
		"no descriptor":    {Config{Dir: dir}, transfer.Memory{Bytes: make([]byte, 4096), FD: -1}},
		"no memory":        {Config{Dir: dir}, transfer.Memory{FD: m.FD}},
		"file too small":   {Config{Dir: dir}, transfer.Memory{Bytes: make([]byte, 8192), FD: m.FD}},
		"bad descriptor":   {Config{Dir: dir}, transfer.Memory{Bytes: make([]byte, 8192), FD: 1 << 20}},
		"long path":        {Config{Dir: filepath.Join(dir, string(bytes.Repeat([]byte("x"), 100)))}, m},
		"no directory":     {Config{Dir: filepath.Join(os.Args[0], "sub")}, m},
		"negative limit":   {Config{Dir: dir, Queue: -1}, m},
		"negative timeout": {Config{Dir: dir, CloseGrace: -1}, m},
	} {
		if tgt, err := New(tc.c).Listen(tc.m, newSink()); err == nil {
			_ = tgt.Close()
			t.Errorf("%s: accepted", name)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 1 {
		t.Errorf("files left: %v, %v", left, err)
	}
}

func TestFullTableIsBusy(t *testing.T) {
	p := listen(t, Config{}, 4096)
	r := p.raw(t)
	for i := range window {
		p.allow(t, transfer.GrantID(5+i*slots), transfer.Span{Off: 0, Len: 8})
	}
	full := transfer.Grant{ID: 5 + window*slots, Key: testKey, Session: 1}
	if err := p.tgt.Allow(full); !errors.Is(err, transfer.ErrBusy) {
		t.Fatalf("allow beyond the table: %v", err)
	}
	if !p.tgt.Revoke(5) {
		t.Fatal("not fenced")
	}
	if err := p.tgt.Allow(full); err != nil {
		t.Fatalf("allow after a revoke: %v", err)
	}
	r.enter(full.ID)
}
