package tcp

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// patience bounds every wait for something that must come.
const patience = 20 * time.Second

var testKey = room.Key{Room: 77, Gen: 3}

// testSink records what arrives.
type testSink struct {
	landed chan string
	fenced chan transfer.SessionID
	gate   func(string) // called inside Landed, if set
}

func newSink() *testSink {
	return &testSink{landed: make(chan string, 1<<15), fenced: make(chan transfer.SessionID, 64)}
}

func (s *testSink) Landed(_ transfer.GrantID, notify []byte) {
	if s.gate != nil {
		s.gate(string(notify))
	}
	s.landed <- string(notify)
}

func (s *testSink) Fenced(id transfer.SessionID) { s.fenced <- id }

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

// pair is a target with one open session, 1.
type pair struct {
	tr   *Transport
	mem  []byte
	sink *testSink
	tgt  transfer.Target
}

func listen(t testing.TB, c Config, size int) *pair {
	t.Helper()
	p := &pair{tr: New(c), mem: make([]byte, size), sink: newSink()}
	tgt, err := p.tr.Listen(transfer.Memory{Bytes: p.mem, FD: -1}, p.sink)
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

// post sends and returns the channel of the verdict.
func post(t testing.TB, p transfer.Peer, w transfer.Write) <-chan error {
	t.Helper()
	done := make(chan error, 2) // a second verdict would show as a leftover
	w.Done = func(err error) { done <- err }
	if err := p.Post(w); err != nil {
		t.Fatalf("post: %v", err)
	}
	return done
}

// rawConn is a source made of bytes, to send what no peer would.
type rawConn struct {
	t  *testing.T
	nc *net.TCPConn
}

func (p *pair) raw(t *testing.T) *rawConn {
	t.Helper()
	nc, err := net.Dial("tcp", p.tgt.Descriptor().Addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() })
	_ = nc.SetDeadline(time.Now().Add(patience))
	return &rawConn{t: t, nc: nc.(*net.TCPConn)}
}

// session does the handshake for session 1.
func (r *rawConn) session() *rawConn {
	r.t.Helper()
	if st := r.hello(1); st != statusOK {
		r.t.Fatalf("handshake status %d", st)
	}
	return r
}

func (r *rawConn) hello(s transfer.SessionID) status {
	r.t.Helper()
	var out [helloLen]byte
	hello{session: s}.encode(&out)
	r.send(out[:])
	var in [welcomeLen]byte
	if _, err := io.ReadFull(r.nc, in[:]); err != nil {
		r.t.Fatalf("read welcome: %v", err)
	}
	st, err := decodeWelcome(&in)
	if err != nil {
		r.t.Fatal(err)
	}
	return st
}

func (r *rawConn) send(b []byte) {
	r.t.Helper()
	if _, err := r.nc.Write(b); err != nil {
		r.t.Fatalf("send: %v", err)
	}
}

func (r *rawConn) answer() answer {
	r.t.Helper()
	var b [answerLen]byte
	if _, err := io.ReadFull(r.nc, b[:]); err != nil {
		r.t.Fatalf("read answer: %v", err)
	}
	a, err := decodeAnswer(b[:])
	if err != nil {
		r.t.Fatal(err)
	}
	return a
}

// closed waits until the target has closed the connection.
func (r *rawConn) closed(what string) {
	r.t.Helper()
	_, err := io.Copy(io.Discard, r.nc)
	if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
		r.t.Fatalf("%s: connection still open after %v", what, patience)
	}
}

// openFrame encodes an open frame; payload may be shorter than the table's sum.
func openFrame(h header, table []transfer.Span, notify string, payload []byte) []byte {
	h.kind, h.segments, h.payload = kindOpen, len(table), uint64(len(payload))
	h.notify, h.notifyN = true, len(notify)
	for _, s := range table {
		h.total += s.Len
	}
	b := make([]byte, headerLen+len(table)*entryLen)
	h.encode(b)
	for i, s := range table {
		putEntry(b[headerLen+i*entryLen:], s.Off, s.Len)
	}
	return append(append(b, notify...), payload...)
}

func dataFrame(seq uint64, payload []byte) []byte {
	b := make([]byte, headerLen)
	h := header{kind: kindData, seq: seq, payload: uint64(len(payload))}
	h.encode(b)
	return append(b, payload...)
}
