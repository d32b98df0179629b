package shm

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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
		_ = unix.Munmap(b[:cap(b)])
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
	put  uint64 // completions in the ring
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

// send puts a completion into the ring and everything else on the socket.
func (r *rawSource) send(m message, more string) {
	r.t.Helper()
	if m.kind == kindDone && r.maps.ctl.b != nil {
		if !r.maps.ctl.put(r.put, &m, []byte(more)) {
			r.t.Fatal("ring is full")
		}
		r.put++
		if !r.maps.ctl.sleeper() {
			return
		}
		m, more = message{kind: kindWake}, ""
	}
	if m.kind == kindLeft && r.maps.ctl.b != nil {
		r.maps.ctl.letters().Add(1)
	}
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
