package transfertest

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/baton-pd/baton/internal/transfer"
)

// flood posts n writes of size bytes side by side under g, from offset 0, and returns
// their outcomes and contents.
func (r *rig) flood(p transfer.Peer, g transfer.Grant, n, size int) (outs []*outcome, srcs [][]byte) {
	for range n {
		srcs = append(srcs, r.random(size))
	}
	half := size / 2
	for i, src := range srcs {
		outs = append(outs, r.post(p, fmt.Sprintf("flood %d", i), write(g, "flood",
			transfer.Segment{Off: uint64(i * size), Src: src[:half]},
			transfer.Segment{Off: uint64(i*size + half), Src: src[half:]})))
	}
	return outs, srcs
}

// settle waits for the outcomes. A nil error must mean that the bytes are there.
func (r *rig) settle(outs []*outcome, srcs [][]byte) {
	r.t.Helper()
	at := 0
	for i, out := range outs {
		err := out.wait(r.t)
		if err == nil && !bytes.Equal(r.mem[at:at+len(srcs[i])], srcs[i]) {
			r.t.Errorf("%s: complete, but its bytes are not there", out.name)
		}
		at += len(srcs[i])
	}
}

// testRevokeWhileWriting revokes at ever different moments of large writes. Once
// Revoke has said that the grant is fenced, or Revoked has come, no byte moves.
func testRevokeWhileWriting(t *testing.T, o Options) {
	const writes, size = 3, 2 << 20
	r := newRig(t, o, writes*size+4096, nil)
	p, s := r.dial()
	whole, cut, drained := 0, 0, 0
	for round := range 24 {
		g := r.allow(s, transfer.Span{Off: 0, Len: writes * size})
		outs, srcs := r.flood(p, g, writes, size)
		if round%4 == 3 { // let one through first
			r.sink.await(t, "a first landing", func() bool { return r.sink.landedOf(g.ID) > 0 })
		}
		if round%4 != 1 { // else at once, which hits also on a single processor
			for range r.rng.IntN(200) {
				runtime.Gosched()
			}
		}
		if !r.revoke(g.ID) {
			r.awaitRevoked(g.ID)
			drained++
		}
		stable := r.snapshot()
		for _, out := range outs {
			_ = out.wait(t)
		}
		r.same(fmt.Sprintf("round %d, after the revoke", round), stable)
		r.settle(outs, srcs)
		for _, out := range outs {
			switch {
			case out.err == nil:
				whole++
			case errors.Is(out.err, transfer.ErrGrant):
				cut++
			default:
				t.Errorf("%s: %v, want nil or %v", out.name, out.err, transfer.ErrGrant)
			}
		}
		after := r.snapshot()
		late := r.post(p, "late write", write(g, "late", transfer.Segment{Off: 1, Src: r.random(9000)}))
		if err := late.wait(t); !errors.Is(err, transfer.ErrGrant) {
			t.Errorf("late write: %v, want %v", err, transfer.ErrGrant)
		}
		r.same("late write", after)
	}
	for _, l := range r.sink.landed {
		if l.notify == "late" {
			t.Error("a late write landed")
		}
	}
	t.Logf("%d writes completed, %d were cut off; %d revokes had to wait for the writer", whole, cut, drained)
	if cut == 0 {
		t.Error("no revoke hit a write: the test shows nothing")
	}
}

func testRevokeUnknown(t *testing.T, o Options) {
	r := newRig(t, o, 1<<16, nil)
	p, s := r.dial()
	g := r.allow(s, r.whole())
	r.must(p, "write", write(g, "x", transfer.Segment{Off: 0, Src: r.random(100)}))
	if !r.target.Revoke(g.ID + 1000) {
		t.Error("revoke of an id that never was: not fenced")
	}
	r.revoke(g.ID)
}

// testSessions: a session is opened once, lets only its own in, and ends for good.
func testSessions(t *testing.T, o Options) {
	r := newRig(t, o, 1<<16, nil)
	p, s := r.dial()
	p2, s2 := r.dial()
	if err := r.target.OpenSession(s); !errors.Is(err, transfer.ErrSession) {
		t.Errorf("second open of a live session: %v, want %v", err, transfer.ErrSession)
	}
	g, g2 := r.allow(s, r.whole()), r.allow(s2, r.whole())
	r.must(p, "write", write(g, "a", transfer.Segment{Off: 0, Src: r.random(100)}))

	r.within("CloseSession", func() { r.target.CloseSession(s) })
	r.awaitDown(p)
	if p.Err() == nil {
		t.Error("Err of a peer that is down is nil")
	}
	r.within("Peer.Close", func() { _ = p.Close() })
	r.awaitFenced(s)
	before := r.snapshot()
	if err := r.post(p, "write after the session", write(g, "b", transfer.Segment{Off: 0, Src: r.random(100)})).wait(t); err == nil {
		t.Error("a write after the session's end completed")
	}
	r.same("write after the session", before)
	if err := r.target.Allow(transfer.Grant{ID: g.ID + 1000, Session: s}); !errors.Is(err, transfer.ErrSession) {
		t.Errorf("grant for a closed session: %v, want %v", err, transfer.ErrSession)
	}
	if !r.target.Revoke(g.ID) {
		t.Error("a grant of a fenced session is not fenced")
	}
	r.target.CloseSession(s) // once more changes nothing; the rig counts Fenced
	r.target.CloseSession(s + 1000)

	r.must(p2, "write of another session", write(g2, "c", transfer.Segment{Off: 0, Src: r.random(100)}))
	r.refuseDial("a closed session", s)
	r.refuseDial("a session that never was", s+1000)
}

func (r *rig) awaitDown(p transfer.Peer) {
	r.t.Helper()
	r.within("waiting for Down", func() { <-p.Down() })
}

// testCloseSessionWhileWriting: Fenced comes once, and from then on nothing moves.
func testCloseSessionWhileWriting(t *testing.T, o Options) {
	const writes, size = 3, 2 << 20
	r := newRig(t, o, writes*size, nil)
	for range 6 {
		p, s := r.dial()
		g := r.allow(s, r.whole())
		outs, srcs := r.flood(p, g, writes, size)
		for range r.rng.IntN(100) {
			runtime.Gosched()
		}
		r.within("CloseSession", func() { r.target.CloseSession(s) })
		r.awaitFenced(s)
		after := r.snapshot()
		r.settle(outs, srcs)
		r.awaitDown(p)
		r.same("after Fenced", after)
	}
}
