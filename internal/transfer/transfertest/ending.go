package transfertest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
)

// wantSettled checks that Done of each was called by now.
func (r *rig) wantSettled(when string, outs []*outcome) {
	r.t.Helper()
	for _, out := range outs {
		if n := out.calls.Load(); n != 1 {
			r.t.Errorf("%s: Done of %s called %d times", when, out.name, n)
		}
	}
}

// testPeerClose: when Close returns, every accepted write is done, the segments are the
// caller's again, and the session's writer counts as gone.
func testPeerClose(t *testing.T, o Options) {
	const writes, size = 6, 1 << 20
	r := newRig(t, o, writes*size, nil)
	p, s := r.dial()
	g := r.allow(s, r.whole())
	outs, srcs := r.flood(p, g, writes, size)
	r.within("Peer.Close", func() { _ = p.Close() })
	r.wantSettled("after Peer.Close", outs)
	for _, src := range srcs {
		clear(src) // ours again: the race detector sees who still reads
	}
	for _, out := range outs {
		if out.err != nil && !errors.Is(out.err, transfer.ErrClosed) {
			t.Errorf("%s: %v, want nil or %v", out.name, out.err, transfer.ErrClosed)
		}
	}
	r.awaitDown(p)
	if _, err := r.offer(p, "post after close", write(g, "x")); !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("post after close: %v, want %v", err, transfer.ErrClosed)
	}
	r.within("second Peer.Close", func() { _ = p.Close() })
	r.awaitFenced(s)
	after := r.snapshot()
	p2, s2 := r.dial()
	r.must(p2, "write of another session", write(r.allow(s2, r.whole()), "y"))
	r.same("after Fenced", after)
}

// testPeerCloseWhilePosting closes under the hands of four posting goroutines.
func testPeerCloseWhilePosting(t *testing.T, o Options) {
	r := newRig(t, o, 1<<20, nil)
	p, s := r.dial()
	g := r.allow(s, r.whole())
	var wg sync.WaitGroup
	var mu sync.Mutex
	var accepted []*outcome
	for k := range 4 {
		src := r.random(30_000)
		wg.Go(func() {
			for i := 0; ; i++ {
				tick := r.ticker()
				out, err := r.offer(p, fmt.Sprintf("poster %d write %d", k, i), write(g, "x", transfer.Segment{Off: uint64(k) * 100_000, Src: src}))
				switch {
				case err == nil:
					mu.Lock()
					accepted = append(accepted, out)
					mu.Unlock()
				case errors.Is(err, transfer.ErrBusy):
					<-tick
				default:
					return
				}
			}
		})
	}
	r.sink.await(t, "20 landings", func() bool { return r.sink.landedOf(g.ID) >= 20 })
	r.within("Peer.Close", func() { _ = p.Close() })
	r.within("the posters", wg.Wait)
	r.wantSettled("after Peer.Close", accepted)
}

// testPeerCloseStalled: a destination that does not answer cannot hold Close.
func testPeerCloseStalled(t *testing.T, o Options) {
	gate, entered := make(chan struct{}), make(chan struct{}, 100)
	r := newRig(t, o, 8<<20, func(transfer.GrantID, []byte) {
		entered <- struct{}{}
		<-gate
	})
	t.Cleanup(sync.OnceFunc(func() { close(gate) })) // runs before the rig's
	p, s := r.dial()
	g := r.allow(s, r.whole())
	var outs []*outcome
	for i := range 4 {
		out, err := r.offer(p, fmt.Sprintf("write %d", i), write(g, "x", transfer.Segment{Off: uint64(i) << 20, Src: r.random(1 << 20)}))
		if errors.Is(err, transfer.ErrBusy) {
			break // a short queue is full, nothing will settle to make room
		}
		if err != nil {
			t.Fatalf("write %d: %v", i, err)
		}
		outs = append(outs, out)
	}
	r.within("waiting for the first landing", func() { <-entered })
	r.within("Peer.Close", func() { _ = p.Close() })
	r.wantSettled("after Peer.Close", outs)
	for _, out := range outs {
		if out.err == nil {
			t.Errorf("%s: complete while Landed has not returned", out.name)
		}
	}
}

// testTargetClose closes the destination under a writer.
func testTargetClose(t *testing.T, o Options) {
	const writes, size = 6, 1 << 20
	r := newRig(t, o, writes*size, nil)
	p, s := r.dial()
	p2, s2 := r.dial()
	g := r.allow(s, r.whole())
	d := r.target.Descriptor()
	outs, srcs := r.flood(p, g, writes, size)
	r.closeTarget()
	r.targetGone = true
	after := r.snapshot()
	r.settle(outs, srcs)
	r.awaitDown(p)
	r.awaitDown(p2)
	if o.Caps.Fences {
		r.same("after Target.Close", after)
		for _, id := range []transfer.SessionID{s, s2} {
			if n := r.sink.fencedOf(id); n != 1 {
				t.Errorf("session %d: Fenced called %d times by the end of Close", id, n)
			}
		}
	}
	if err := r.target.OpenSession(s + 1000); err == nil {
		t.Error("a session was opened on a closed target")
	}
	if err := r.post(p, "write after Target.Close", write(g, "x", transfer.Segment{Src: r.random(10)})).wait(t); err == nil {
		t.Error("a write to a closed target completed")
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if peer, err := r.source.Dial(ctx, d, s); err == nil {
		_ = peer.Close()
		t.Error("dialled a closed target")
	}
	r.closeTarget() // twice is allowed
}

// refuseDial wants the dial of session s refused.
func (r *rig) refuseDial(what string, s transfer.SessionID) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	p, err := r.source.Dial(ctx, r.target.Descriptor(), s)
	if err == nil {
		_ = p.Close()
		r.t.Errorf("dialled %s", what)
	}
}

// testDialDead: an address where nobody listens any more, and a context that has ended.
func testDialDead(t *testing.T, o Options) {
	r := newRig(t, o, 1<<16, nil)
	s := r.open()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	r.within("Dial with an ended context", func() {
		if p, err := r.source.Dial(ended, r.target.Descriptor(), s); err == nil {
			_ = p.Close()
			t.Error("dialled with an ended context")
		}
	})
	dead := r.target.Descriptor()
	r.closeTarget()
	r.targetGone = true
	ctx, cancel := context.WithTimeout(t.Context(), patience/3)
	defer cancel()
	r.within("Dial of a dead address", func() {
		if p, err := r.source.Dial(ctx, dead, s); err == nil {
			_ = p.Close()
			t.Error("dialled a dead address")
		}
	})
}

// testDialSilent: somebody takes the connection and never says a word.
func testDialSilent(t *testing.T, o Options) {
	r := newRig(t, o, 1<<16, nil)
	s := r.open()
	d := o.Silent(t, r.target.Descriptor())
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	r.within("Dial of a silent address", func() {
		if p, err := r.source.Dial(ctx, d, s); err == nil {
			_ = p.Close()
			t.Error("dialled a silent address")
		}
	})
}

// testGarbage: malformed bytes cost the one who sends them, nobody else.
func testGarbage(t *testing.T, o Options) {
	r := newRig(t, o, 1<<20, nil)
	p, s := r.dial()
	g := r.allow(s, r.whole())
	before := r.snapshot()
	r.within("Garbage", func() { o.Garbage(t, r.target.Descriptor()) })
	r.same("after garbage", before)
	src := r.random(200_000)
	r.must(p, "write of a peer that was there before", write(g, "old", transfer.Segment{Off: 5, Src: src}))
	p2, s2 := r.dial()
	r.must(p2, "write of a new peer", write(r.allow(s2, r.whole()), "new", transfer.Segment{Off: 300_000, Src: src}))
	copy(before[5:], src)
	copy(before[300_000:], src)
	r.same("after the writes", before)
}
