package nixl

import (
	"context"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// patience bounds every wait for something that must come.
const patience = 30 * time.Second

var testKey = room.Key{Room: 42, Gen: 3}

// testSink records what arrives. It is a transfer.RevokeSink.
type testSink struct {
	landed  chan string
	fenced  chan transfer.SessionID
	revoked chan transfer.GrantID
}

func (s *testSink) Landed(_ transfer.GrantID, notify []byte) { s.landed <- string(notify) }
func (s *testSink) Fenced(id transfer.SessionID)             { s.fenced <- id }
func (s *testSink) Revoked(g transfer.GrantID)               { s.revoked <- g }

// recv waits for one value of ch.
func recv[T any](t testing.TB, ch <-chan T, what string) T {
	t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	select {
	case v := <-ch:
		return v
	case <-late.C:
		t.Fatalf("did not come: %s", what)
		panic("unreachable")
	}
}

// rig is a target with an open session, 1, and a peer on it.
type rig struct {
	tr   *Transport
	mem  []byte
	sink *testSink
	tgt  *target
	peer *peer
}

// newRig makes the target with one Config and dials with another.
func newRig(t testing.TB, target, source *Transport, size int) *rig {
	t.Helper()
	mem, f := shared(t, size)
	r := &rig{tr: target, mem: mem, sink: &testSink{landed: make(chan string, 1<<14), fenced: make(chan transfer.SessionID, 8), revoked: make(chan transfer.GrantID, 8)}}
	tgt, err := target.Listen(transfer.Memory{Bytes: mem, FD: int(f.Fd())}, r.sink)
	if err != nil {
		t.Fatal(err)
	}
	r.tgt = asTarget(tgt)
	t.Cleanup(func() { _ = tgt.Close() })
	if err := tgt.OpenSession(1); err != nil {
		t.Fatal(err)
	}
	p, err := source.Dial(context.Background(), tgt.Descriptor(), 1)
	if err != nil {
		t.Fatal(err)
	}
	r.peer = p.(*peer)
	t.Cleanup(func() { _ = p.Close() })
	return r
}

func (r *rig) allow(t testing.TB, id transfer.GrantID, spans ...transfer.Span) {
	t.Helper()
	if err := r.tgt.Allow(transfer.Grant{ID: id, Key: testKey, Session: 1, Spans: spans}); err != nil {
		t.Fatal(err)
	}
}

// post posts w; its Done, or Post's own error, comes on the channel.
func (r *rig) post(t testing.TB, w transfer.Write) <-chan error {
	t.Helper()
	done := make(chan error, 2) // a second verdict would show as a leftover
	w.Key, w.Done = testKey, func(err error) { done <- err }
	if err := r.peer.Post(w); err != nil {
		done <- err
	}
	return done
}

// helpers are the two processes.
func (r *rig) helpers() (target, source *child) {
	for _, c := range r.tgt.Conns() {
		target = c.helper()
	}
	return target, r.peer.child
}

// asTarget is here because newRig calls a parameter target.
func asTarget(t transfer.Target) *target { return t.(*target) }
