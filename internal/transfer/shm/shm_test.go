package shm

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// patience bounds every wait for something that must come.
const patience = 20 * time.Second

// testSink records what arrives. It is a transfer.RevokeSink.
type testSink struct {
	landed  chan string
	fenced  chan transfer.SessionID
	revoked chan transfer.GrantID
}

func newSink() *testSink {
	return &testSink{landed: make(chan string, 1<<15), fenced: make(chan transfer.SessionID, 300), revoked: make(chan transfer.GrantID, 64)}
}

func (s *testSink) Landed(_ transfer.GrantID, notify []byte) { s.landed <- string(notify) }
func (s *testSink) Fenced(id transfer.SessionID)             { s.fenced <- id }
func (s *testSink) Revoked(g transfer.GrantID)               { s.revoked <- g }

// recv waits for one value of ch.
func recv[T any](t testing.TB, ch <-chan T, what string) T {
	t.Helper()
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	select {
	case v := <-ch:
		return v
	case <-timeout.C:
		t.Fatalf("%s: did not come within %v", what, patience)
		panic("unreachable")
	}
}

// memory is a mapped memfd of n bytes.
func memory(t testing.TB, n int) transfer.Memory {
	t.Helper()
	fd, err := unix.MemfdCreate("shm-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, int64(n)); err != nil {
		t.Fatal(err)
	}
	b, err := mapShared(fd, n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = unix.Munmap(b)
		_ = unix.Close(fd)
	})
	return transfer.Memory{Bytes: b, FD: fd}
}

// pair is a target with one open session, 1.
type pair struct {
	tr   *Transport
	mem  []byte
	sink *testSink
	tgt  transfer.Target
}

func listen(t testing.TB, c Config, size int) *pair {
	t.Helper()
	c.Dir = socketDir(t)
	m := memory(t, size)
	p := &pair{tr: New(c), mem: m.Bytes, sink: newSink()}
	tgt, err := p.tr.Listen(m, p.sink)
	if err != nil {
		t.Fatal(err)
	}
	p.tgt = tgt
	t.Cleanup(func() {
		if err := tgt.Close(); err != nil {
			t.Errorf("close target: %v", err)
		}
	})
	if err := tgt.OpenSession(1); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *pair) allow(t testing.TB, id transfer.GrantID, spans ...transfer.Span) {
	t.Helper()
	if err := p.tgt.Allow(transfer.Grant{ID: id, Key: testKey, Session: 1, Spans: spans}); err != nil {
		t.Fatal(err)
	}
}

func (p *pair) dial(t testing.TB) transfer.Peer {
	t.Helper()
	peer, err := p.tr.Dial(context.Background(), p.tgt.Descriptor(), 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := peer.Close(); err != nil {
			t.Errorf("close peer: %v", err)
		}
	})
	return peer
}

func post(t testing.TB, p transfer.Peer, w transfer.Write) <-chan error {
	t.Helper()
	done := make(chan error, 2) // a second verdict would show as a leftover
	w.Done = func(err error) { done <- err }
	if err := p.Post(w); err != nil {
		t.Fatalf("post: %v", err)
	}
	return done
}

// rawSource is a source driven step by step: it can be stopped, in effect, at any line of
// a writer's code.
type rawSource struct {
	t    *testing.T
	uc   *net.UnixConn
	maps mappings
}

func (p *pair) connect(t *testing.T) *rawSource {
	t.Helper()
	nc, err := net.Dial("unix", p.tgt.Descriptor().Addr)
	if err != nil {
		t.Fatal(err)
	}
	_ = nc.SetDeadline(time.Now().Add(patience))
	r := &rawSource{t: t, uc: nc.(*net.UnixConn)}
	t.Cleanup(r.end)
	return r
}

func (p *pair) raw(t *testing.T) *rawSource {
	t.Helper()
	r := p.connect(t)
	maps, err := greet(r.uc, 1, uint64(len(p.mem)))
	r.maps = maps
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// end unmaps and closes, like a process that dies.
func (r *rawSource) end() {
	r.maps.unmap()
	r.maps = mappings{}
	_ = r.uc.Close()
}

func (r *rawSource) send(m message, more string) {
	r.t.Helper()
	if _, err := r.uc.Write(append(m.append(nil), more...)); err != nil {
		r.t.Fatalf("send: %v", err)
	}
}

func (r *rawSource) read() message {
	r.t.Helper()
	var b [messageLen]byte
	if _, err := io.ReadFull(r.uc, b[:]); err != nil {
		r.t.Fatalf("read: %v", err)
	}
	var m message
	if err := m.decode(b[:]); err != nil {
		r.t.Fatal(err)
	}
	return m
}

// dismissed waits until the target has told the source to go.
func (r *rawSource) dismissed(what string) {
	r.t.Helper()
	_, err := io.Copy(io.Discard, r.uc)
	if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
		r.t.Fatalf("%s: still connected after %v", what, patience)
	}
}

// enter is what a writer does before a slice.
func (r *rawSource) enter(id transfer.GrantID) place {
	r.t.Helper()
	at, ok := r.maps.ctl.find(id, testKey)
	if !ok {
		r.t.Fatalf("grant %d not found", id)
	}
	return at
}

// none checks that nothing has come.
func none[T any](t *testing.T, ch <-chan T, what string) {
	t.Helper()
	select {
	case v := <-ch:
		t.Fatalf("%s: %v", what, v)
	default:
	}
}

// roundTrip makes sure that the target has handled all messages sent before.
func (r *rawSource) roundTrip() {
	r.t.Helper()
	r.send(message{kind: kindDone, value: 99, grant: 424242}, "")
	if m := r.read(); m.value != 99 || m.code != verdictGrant {
		r.t.Fatalf("answer %+v", m)
	}
}

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
	var unfenced *UnfencedError
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
		"good, then noise":        append(sent(message{kind: kindDone, value: 1, grant: 55}), bytes.Repeat([]byte{1}, messageLen)...),
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

func TestHandshakeIsBounded(t *testing.T) {
	p := listen(t, Config{Handshake: 50 * time.Millisecond, MaxHalfOpen: 2}, 4096)
	p.connect(t).dismissed("silent connection")
	slow := p.connect(t)
	_, _ = slow.uc.Write([]byte("BSH"))
	slow.dismissed("slow connection")
	if err := p.tgt.Close(); err != nil {
		t.Fatal(err)
	}
	if s := p.tr.Stats(); s.BadHandshakes != 2 {
		t.Fatalf("counted %+v", s)
	}
}

func TestBadHandshakesAreCounted(t *testing.T) {
	p := listen(t, Config{Handshake: patience, MaxConns: 1}, 4096)
	bad := p.connect(t)
	bad.send(message{kind: kindLeft, grant: 1}, "")
	bad.dismissed("no hello")
	old := p.connect(t)
	old.send(message{kind: kindHello, value: 1, code: version + 1}, "")
	if m := old.read(); m.kind != kindWelcome || status(m.code) != statusVersion {
		t.Fatalf("answer to another version: %+v", m)
	}
	unknown := p.connect(t)
	unknown.send(message{kind: kindHello, value: 33, code: version}, "")
	if m := unknown.read(); status(m.code) != statusSession {
		t.Fatalf("answer to an unknown session: %+v", m)
	}
	unknown.dismissed("unknown session")
	p.dial(t)
	if _, err := p.tr.Dial(context.Background(), p.tgt.Descriptor(), 1); !errors.Is(err, transfer.ErrSession) {
		t.Fatalf("second connection: %v", err)
	}
	look, err := net.Dial("unix", p.tgt.Descriptor().Addr)
	if err != nil {
		t.Fatal(err)
	}
	_ = look.Close() // somebody cleaning the directory: not counted
	if err := p.tgt.Close(); err != nil {
		t.Fatal(err)
	}
	if s := p.tr.Stats(); s.BadHandshakes != 2 || s.UnknownSessions != 2 {
		t.Fatalf("counted %+v", s)
	}
}

func TestHalfOpenConnectionsAreBounded(t *testing.T) {
	p := listen(t, Config{Handshake: patience, MaxHalfOpen: 2}, 4096)
	a, b := p.connect(t), p.connect(t)
	c := p.connect(t) // accepted in order: finds both places taken
	c.dismissed("third half-open connection")
	if got := p.tr.Stats().HalfOpenRefused; got != 1 {
		t.Fatalf("%d refused", got)
	}
	if err := p.tgt.Close(); err != nil {
		t.Fatal(err)
	}
	a.dismissed("Close")
	b.dismissed("Close")
}

// fakeTarget accepts one source and answers its hello with reply and descriptors.
func fakeTarget(t *testing.T, reply []byte, fds []int, then func(*net.UnixConn)) transfer.Descriptor {
	t.Helper()
	path := filepath.Join(socketDir(t), "fake")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	t.Cleanup(func() {
		_ = ln.Close()
		<-ended
	})
	go func() {
		defer close(ended)
		uc, err := ln.AcceptUnix()
		if err != nil {
			return
		}
		defer uc.Close()
		_, _ = io.ReadFull(uc, make([]byte, messageLen))
		var oob []byte
		if len(fds) > 0 {
			oob = unix.UnixRights(fds...)
		}
		_, _, _ = uc.WriteMsgUnix(reply, oob, nil)
		if then != nil {
			then(uc)
		}
		_, _ = io.Copy(io.Discard, uc)
	}()
	boot, err := bootID()
	if err != nil {
		t.Fatal(err)
	}
	return transfer.Descriptor{Kind: "shm", Addr: path, Host: boot, Size: 4096}
}

func welcome(size uint64) []byte {
	m := message{kind: kindWelcome, code: uint32(statusOK), value: size}
	return m.append(nil)
}

func TestDialRefusesABrokenTarget(t *testing.T) {
	m := memory(t, 4096)
	small := memory(t, 100)
	ctl, ctlFD, err := newControl()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ctlFD)
	defer unix.Munmap(ctl.b)
	other := memory(t, controlSize) // zeros: not a control area
	goroutines, files := count(t)
	maps := mapped(t)
	done := message{kind: kindDone, value: 1}
	for name, tc := range map[string]struct {
		reply []byte
		fds   []int
	}{
		"closes at once":        {nil, nil},
		"half an answer":        {welcome(4096)[:10], nil},
		"noise":                 {bytes.Repeat([]byte{7}, messageLen), nil},
		"another message":       {done.append(nil), []int{m.FD, ctlFD}},
		"no descriptors":        {welcome(4096), nil},
		"one descriptor":        {welcome(4096), []int{m.FD}},
		"three descriptors":     {welcome(4096), []int{m.FD, ctlFD, ctlFD}},
		"many descriptors":      {welcome(4096), []int{m.FD, m.FD, m.FD, m.FD, m.FD, m.FD, m.FD, m.FD, m.FD, m.FD, m.FD, m.FD}},
		"another size":          {welcome(8192), []int{m.FD, ctlFD}},
		"memory too small":      {welcome(4096), []int{small.FD, ctlFD}},
		"control too small":     {welcome(4096), []int{m.FD, m.FD}},
		"control without magic": {welcome(4096), []int{m.FD, other.FD}},
	} {
		t.Run(name, func(t *testing.T) {
			then := func(*net.UnixConn) {}
			if len(tc.reply) < messageLen {
				then = func(uc *net.UnixConn) { _ = uc.CloseWrite() }
			}
			d := fakeTarget(t, tc.reply, tc.fds, then)
			if peer, err := New(Config{}).Dial(context.Background(), d, 1); err == nil {
				_ = peer.Close()
				t.Fatal("connected")
			}
		})
	}
	backTo(t, goroutines, files, maps)
	boot, _ := bootID()
	for name, d := range map[string]transfer.Descriptor{
		"kind": {Kind: "tcp", Host: boot}, "machine": {Kind: "shm", Host: "x"}, "path": {Kind: "shm", Host: boot, Addr: "/nonexistent/socket"},
	} {
		if _, err := New(Config{}).Dial(context.Background(), d, 1); err == nil {
			t.Errorf("%s: connected", name)
		}
	}
}

func TestPeerRefusesWrongAnswers(t *testing.T) {
	answer := func(ms ...message) []byte {
		var b []byte
		for _, m := range ms {
			b = m.append(b)
		}
		return b
	}
	for name, reply := range map[string][]byte{
		"garbage":        bytes.Repeat([]byte{0xab}, messageLen),
		"unknown write":  answer(message{kind: kindAnswer, value: 5}),
		"unknown code":   answer(message{kind: kindAnswer, value: 1, code: 9}),
		"not an answer":  answer(message{kind: kindLeft, grant: 1}),
		"answered twice": answer(message{kind: kindAnswer, value: 1, code: verdictGrant}, message{kind: kindAnswer, value: 1}),
	} {
		t.Run(name, func(t *testing.T) {
			m := memory(t, 4096)
			ctl, fd, err := newControl()
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			defer unix.Munmap(ctl.b)
			newTable(ctl).put(1, testKey, nil)
			d := fakeTarget(t, welcome(4096), []int{m.FD, fd}, func(uc *net.UnixConn) {
				_, _ = io.ReadFull(uc, make([]byte, messageLen)) // the write's completion
				_, _ = uc.Write(reply)
			})
			tr := New(Config{})
			peer, err := tr.Dial(context.Background(), d, 1)
			if err != nil {
				t.Fatal(err)
			}
			v := post(t, peer, transfer.Write{Grant: 1, Key: testKey})
			recv(t, peer.Down(), "down")
			if err := peer.Err(); !errors.Is(err, transfer.ErrPeerLost) {
				t.Errorf("ended with %v", err)
			}
			if err := recv(t, v, "verdict"); err == nil {
				t.Error("a wrong answer completed a write")
			}
			if got := tr.Stats().ProtocolErrors; got != 1 {
				t.Errorf("%d protocol errors counted", got)
			}
			_ = peer.Close()
		})
	}
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
