package fault_test

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/fault"
	"github.com/baton-pd/baton/internal/transfer/mem"
	"github.com/baton-pd/baton/internal/transfer/transfertest"
)

const patience = 30 * time.Second

func TestMain(m *testing.M) {
	transfertest.Main(m, func() transfer.Transport { return mem.New(nil) })
}

func TestConformanceWithoutRules(t *testing.T) {
	transfertest.Run(t, transfertest.Options{
		New: func(*testing.T) (transfer.Transport, transfer.Transport) {
			r := mem.NewRegistry()
			rules := fault.MustParse("post kind=other drop") // matches nothing
			return fault.Wrap(mem.New(r), rules), fault.Wrap(mem.New(r), rules)
		},
		Caps: transfer.Caps{Fences: true},
	})
}

func TestWrapWithoutRules(t *testing.T) {
	inner := mem.New(nil)
	if fault.Wrap(inner, nil) != transfer.Transport(inner) {
		t.Error("nil rules made a wrapper")
	}
}

// sink sends what it hears to channels that are large enough for every test.
type sink struct {
	landed  chan string
	fenced  chan transfer.SessionID
	revoked chan transfer.GrantID
}

func (s *sink) Revoked(g transfer.GrantID) { s.revoked <- g }

func (s *sink) Landed(_ transfer.GrantID, b []byte) { s.landed <- string(b) }
func (s *sink) Fenced(id transfer.SessionID)        { s.fenced <- id }

// pair is one target over 64 bytes and one peer, with grant 1 for room 7 over all of it
// and grant 2 for room 8.
type pair struct {
	t      *testing.T
	rules  *fault.Rules
	tr     transfer.Transport
	mem    []byte
	sink   *sink
	target transfer.Target
	peer   transfer.Peer
	once   sync.Once
}

const session = 11

func open(t *testing.T, text string, opts ...mem.Option) *pair {
	t.Helper()
	return openOver(t, text, mem.New(mem.NewRegistry(), opts...))
}

func openOver(t *testing.T, text string, inner transfer.Transport) *pair {
	t.Helper()
	rules, err := fault.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	p := &pair{t: t, rules: rules, mem: make([]byte, 64), sink: &sink{make(chan string, 64), make(chan transfer.SessionID, 64), make(chan transfer.GrantID, 64)}}
	p.tr = fault.Wrap(inner, rules)
	if p.target, err = p.tr.Listen(transfer.Memory{Bytes: p.mem, FD: -1}, p.sink); err != nil {
		t.Fatal(err)
	}
	if err := p.target.OpenSession(session); err != nil {
		t.Fatal(err)
	}
	for id := range transfer.GrantID(2) {
		g := transfer.Grant{ID: id + 1, Key: room.Key{Room: uint64(id) + 7}, Session: session, Spans: []transfer.Span{{Off: 0, Len: 64}}}
		if err := p.target.Allow(g); err != nil {
			t.Fatal(err)
		}
	}
	if p.peer, err = p.tr.Dial(t.Context(), p.target.Descriptor(), session); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	return p
}

func (p *pair) close() {
	p.once.Do(func() {
		if err := p.peer.Close(); err != nil {
			p.t.Error(err)
		}
		if err := p.target.Close(); err != nil {
			p.t.Error(err)
		}
	})
}

// post writes four bytes v at offset at for a room, 7 or 8.
func (p *pair) post(roomID uint64, at int, v byte) (<-chan error, error) {
	done := make(chan error, 2)
	err := p.peer.Post(transfer.Write{
		Grant: transfer.GrantID(roomID - 6), Key: room.Key{Room: roomID}, Notify: []byte{'n', v},
		Segments: []transfer.Segment{{Off: uint64(at), Src: []byte{v, v, v, v}}},
		Done:     func(err error) { done <- err },
	})
	return done, err
}

// must posts and returns the completion channel.
func (p *pair) must(roomID uint64, at int, v byte) <-chan error {
	p.t.Helper()
	done, err := p.post(roomID, at, v)
	if err != nil {
		p.t.Fatalf("post: %v", err)
	}
	return done
}

func get[T any](t *testing.T, what string, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(patience):
		t.Fatalf("never came: %s", what)
	}
	return v
}

func ok(t *testing.T, done <-chan error) {
	t.Helper()
	if err := get(t, "completion", done); err != nil {
		t.Fatalf("write: %v", err)
	}
}

// idle fails if c has something.
func idle[T any](t *testing.T, what string, c <-chan T) {
	t.Helper()
	select {
	case v := <-c:
		t.Fatalf("%s: %v", what, v)
	default:
	}
}

func (p *pair) bytes(at, n int, v byte) {
	p.t.Helper()
	if got := p.mem[at : at+n]; !bytes.Equal(got, bytes.Repeat([]byte{v}, n)) {
		p.t.Errorf("memory at %d is %v, want all %d", at, got, v)
	}
}

func TestStall(t *testing.T) {
	p := open(t, "post room=7 nth=2 stall until=go")
	ok(t, p.must(7, 0, 1))
	held := p.must(7, 4, 2)
	get(t, "the hold", p.rules.Waiting("go"))
	ok(t, p.must(7, 8, 3)) // others pass
	ok(t, p.must(8, 12, 4))
	idle(t, "completed while held", held)
	p.bytes(4, 4, 0)
	p.rules.Release("go")
	ok(t, held)
	p.bytes(4, 4, 2)
}

func TestReleaseBeforeHold(t *testing.T) {
	p := open(t, "post stall until=go")
	p.rules.Release("go")
	p.rules.Release("go")
	ok(t, p.must(7, 0, 1))
}

func TestDelayPasses(t *testing.T) {
	p := open(t, "post nth=1 delay=1ms\ndone nth=2 delay=1ms\nlanded nth=3 delay=1ms\ndial delay=1ms")
	for i := range 3 {
		ok(t, p.must(7, i*4, byte(i+1)))
		p.bytes(i*4, 4, byte(i+1))
	}
}

// TestRate: a slow line carries one write after the other, also those of other rooms, and what it has not carried ends with it.
func TestRate(t *testing.T) {
	p := open(t, "post nth=1-3 rate=400\npost rate=1")
	began := time.Now()
	for i, done := range []<-chan error{p.must(7, 0, 1), p.must(8, 20, 2), p.must(7, 4, 3)} {
		ok(t, done)
		if took, least := time.Since(began), time.Duration(i+1)*10*time.Millisecond; took < least {
			t.Errorf("write %d was through after %v, its line needs %v", i, took, least)
		}
	}
	slow := p.must(7, 8, 4) // four seconds
	behind := p.must(7, 12, 5)
	p.close()
	for _, done := range []<-chan error{slow, behind} {
		if err := get(t, "end of a slow write", done); !errors.Is(err, transfer.ErrClosed) {
			t.Error(err)
		}
	}
}

func TestStallEndsWithClose(t *testing.T) {
	p := open(t, "post nth=1 stall\npost nth=2 drop\ndone nth=3 hold\ndone nth=4 drop\npost nth=5 halfway until=never")
	var held []<-chan error
	for i := range 5 {
		held = append(held, p.must(7, i*4, byte(i+1)))
	}
	get(t, "landing of the third", p.sink.landed)
	get(t, "landing of the fourth", p.sink.landed)
	get(t, "the hold", p.rules.Waiting("never"))
	for _, h := range held {
		idle(t, "completed early", h)
	}
	p.close()
	for i, h := range held {
		if err := get(t, "completion", h); !errors.Is(err, transfer.ErrClosed) {
			t.Errorf("write %d: %v, want %v", i+1, err, transfer.ErrClosed)
		}
		idle(t, "second completion", h)
	}
	p.bytes(0, 8, 0) // never happened
	p.bytes(8, 4, 3)
	p.bytes(12, 4, 4)
	p.bytes(16, 2, 5) // the half
	p.bytes(18, 46, 0)
	if _, err := p.post(7, 0, 1); !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("post after close: %v", err)
	}
}

func TestStallEndsWithConnection(t *testing.T) {
	p := open(t, "post nth=1 stall\ndone nth=2 hold")
	a, b := p.must(7, 0, 1), p.must(7, 4, 2)
	get(t, "landing", p.sink.landed)
	p.target.CloseSession(session)
	for _, h := range []<-chan error{a, b} {
		if err := get(t, "completion", h); !errors.Is(err, transfer.ErrPeerLost) {
			t.Errorf("%v, want %v", err, transfer.ErrPeerLost)
		}
	}
	get(t, "Down", p.peer.Down())
	if _, err := p.post(7, 0, 1); err == nil {
		t.Error("a connection that is down took a write")
	}
}

func TestError(t *testing.T) {
	p := open(t, `post nth=1 error="link down"`+"\n"+`done nth=2 error`)
	err := get(t, "completion", p.must(7, 0, 1))
	if !errors.Is(err, fault.ErrInjected) || !errors.Is(err, transfer.ErrPeerLost) || err.Error() != "fault: injected: link down" {
		t.Errorf("post error: %v", err)
	}
	p.bytes(0, 4, 0)
	if err := get(t, "completion", p.must(7, 4, 2)); !errors.Is(err, fault.ErrInjected) {
		t.Errorf("done error: %v", err)
	}
	p.bytes(4, 4, 2) // applied all the same
	ok(t, p.must(7, 8, 3))
}

func TestBusy(t *testing.T) {
	p := open(t, "post room=* nth=1 busy")
	for _, id := range []uint64{7, 8} {
		if _, err := p.post(id, 0, 1); !errors.Is(err, transfer.ErrBusy) {
			t.Errorf("room %d: %v, want %v", id, err, transfer.ErrBusy)
		}
		ok(t, p.must(id, 0, 1))
	}
}

// TestRealBusyIsNotCounted: a write that the real queue refused counts when it is taken.
func TestRealBusyIsNotCounted(t *testing.T) {
	p := open(t, "landed nth=1 stall until=go\npost nth=4 error\ndone nth=3 error", mem.Queue(2))
	a := p.must(7, 0, 1)
	get(t, "the hold", p.rules.Waiting("go"))
	b := p.must(7, 4, 2)
	for range 5 {
		if _, err := p.post(7, 8, 3); !errors.Is(err, transfer.ErrBusy) {
			t.Fatalf("queue of two: %v", err)
		}
	}
	p.rules.Release("go")
	ok(t, a)
	ok(t, b)
	if err := get(t, "completion", p.must(7, 8, 3)); err == nil || err.Error() != "fault: injected: done failed" {
		t.Errorf("third write: %v", err)
	}
	if err := get(t, "completion", p.must(7, 12, 4)); err == nil || err.Error() != "fault: injected: post failed" {
		t.Errorf("fourth write: %v", err)
	}
}

// TestStalledWriteMeetsFullQueue: a held write waits for room when it is let go.
func TestStalledWriteMeetsFullQueue(t *testing.T) {
	p := open(t, "post nth=1 stall until=go\nlanded nth=1 stall until=room", mem.Queue(1))
	held := p.must(7, 0, 1)
	get(t, "the hold", p.rules.Waiting("go"))
	full := p.must(7, 4, 2)
	get(t, "the full queue", p.rules.Waiting("room"))
	p.rules.Release("go")
	p.rules.Release("room")
	ok(t, full)
	ok(t, held)
	p.bytes(0, 4, 1)
}

func TestHoldApplied(t *testing.T) {
	for _, text := range []string{"post nth=1 hold-applied until=go", "done nth=1 hold until=go"} {
		p := open(t, text)
		held := p.must(7, 0, 1)
		get(t, "the hold", p.rules.Waiting("go"))
		if got := get(t, "landing", p.sink.landed); got != "n\x01" {
			t.Errorf("landed %q", got)
		}
		p.bytes(0, 4, 1)
		idle(t, "completed while held", held)
		p.rules.Release("go")
		ok(t, held)
	}
}

func TestHalfway(t *testing.T) {
	p := open(t, "post nth=1 halfway until=go")
	done := make(chan error, 1)
	err := p.peer.Post(transfer.Write{
		Grant: 1, Key: room.Key{Room: 7}, Notify: []byte("end"), Done: func(err error) { done <- err },
		Segments: []transfer.Segment{{Off: 0, Src: []byte{1, 1}}, {Off: 10, Src: []byte{1, 1, 1, 1, 1}}, {Off: 20, Src: []byte{1}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	get(t, "the hold", p.rules.Waiting("go"))
	want := make([]byte, 64)
	for _, at := range []int{0, 1, 10, 11} {
		want[at] = 1
	}
	if !bytes.Equal(p.mem, want) {
		t.Errorf("half way: %v", p.mem)
	}
	idle(t, "landed half way", p.sink.landed)
	p.rules.Release("go")
	ok(t, done)
	for _, at := range []int{12, 13, 14, 20} {
		want[at] = 1
	}
	if !bytes.Equal(p.mem, want) {
		t.Errorf("at the end: %v", p.mem)
	}
	if got := get(t, "landing", p.sink.landed); got != "end" {
		t.Errorf("landed %q", got)
	}
}

// TestCorrupt: one byte arrives changed, the source keeps its own.
func TestCorrupt(t *testing.T) {
	p := open(t, "post nth=1 corrupt")
	done := make(chan error, 1)
	src := []byte{1, 1, 1, 1}
	err := p.peer.Post(transfer.Write{
		Grant: 1, Key: room.Key{Room: 7}, Notify: []byte("end"), Done: func(err error) { done <- err },
		Segments: []transfer.Segment{{Off: 0}, {Off: 8, Src: src}, {Off: 20, Src: src}},
	})
	if err != nil {
		t.Fatal(err)
	}
	ok(t, done)
	if want := []byte{1, 1, 0x11, 1}; !bytes.Equal(p.mem[8:12], want) || !bytes.Equal(p.mem[20:24], src) {
		t.Errorf("arrived %v and %v, want %v and %v", p.mem[8:12], p.mem[20:24], want, src)
	}
	if !bytes.Equal(src, []byte{1, 1, 1, 1}) {
		t.Errorf("the source's own bytes are %v", src)
	}
	ok(t, p.must(7, 0, 1))
	p.bytes(0, 4, 1)
}

// TestHalfwayAfterRevoke: the second half of a revoked grant is refused.
func TestHalfwayAfterRevoke(t *testing.T) {
	p := open(t, "post nth=1 halfway until=go")
	held := p.must(7, 0, 1)
	get(t, "the hold", p.rules.Waiting("go"))
	if !p.target.Revoke(1) {
		t.Fatal("not fenced")
	}
	p.rules.Release("go")
	if err := get(t, "completion", held); !errors.Is(err, transfer.ErrGrant) {
		t.Errorf("%v, want %v", err, transfer.ErrGrant)
	}
	p.bytes(2, 62, 0)
}

func TestLanded(t *testing.T) {
	p := open(t, "landed room=7 nth=1 drop\nlanded room=8 nth=1 stall until=go")
	ok(t, p.must(7, 0, 1))
	idle(t, "landed", p.sink.landed)
	held := p.must(8, 4, 2)
	get(t, "the hold", p.rules.Waiting("go"))
	idle(t, "landed while held", p.sink.landed)
	idle(t, "completed before Landed", held)
	p.rules.Release("go")
	ok(t, held)
	if got := get(t, "landing", p.sink.landed); got != "n\x02" {
		t.Errorf("landed %q", got)
	}
}

func TestLandedHoldEndsWithTarget(t *testing.T) {
	p := open(t, "landed stall until=never")
	held := p.must(7, 0, 1)
	get(t, "the hold", p.rules.Waiting("never"))
	p.close()
	if err := get(t, "completion", held); err == nil {
		t.Error("complete although Landed was held until the end")
	}
}

func TestFenced(t *testing.T) {
	p := open(t, "fenced nth=1 stall until=go")
	p.target.CloseSession(session)
	get(t, "the hold", p.rules.Waiting("go"))
	idle(t, "fenced while held", p.sink.fenced)
	p.rules.Release("go")
	if got := get(t, "Fenced", p.sink.fenced); got != session {
		t.Errorf("fenced %d", got)
	}
	p.close()
	idle(t, "fenced twice", p.sink.fenced)

	p = open(t, "fenced stall until=never")
	p.target.CloseSession(session)
	p.close()
	if got := get(t, "Fenced at Close", p.sink.fenced); got != session {
		t.Errorf("fenced %d", got)
	}
}

func TestRevoke(t *testing.T) {
	p := open(t, "revoke room=7 unfenced")
	if p.target.Revoke(1) {
		t.Error("room 7 is fenced")
	}
	if !p.target.Revoke(2) {
		t.Error("room 8 is not fenced")
	}
	if err := get(t, "completion", p.must(7, 0, 1)); !errors.Is(err, transfer.ErrGrant) {
		t.Errorf("write after the revoke: %v", err)
	}
	p.close()
	idle(t, "revoked without a time", p.sink.revoked)
}

// TestRevokedLater plays a draining transport: first not fenced, then told.
func TestRevokedLater(t *testing.T) {
	p := open(t, "revoke room=7 unfenced until=drained\nrevoke room=8 unfenced until=late")
	if p.target.Revoke(1) || p.target.Revoke(2) {
		t.Error("fenced at once")
	}
	get(t, "the hold", p.rules.Waiting("drained"))
	idle(t, "revoked while held", p.sink.revoked)
	p.rules.Release("drained")
	if g := get(t, "Revoked", p.sink.revoked); g != 1 {
		t.Errorf("revoked grant %d", g)
	}
	get(t, "the other hold", p.rules.Waiting("late"))
	p.target.CloseSession(session)
	get(t, "Fenced", p.sink.fenced)
	p.rules.Release("late")
	p.close() // waits for what was held
	idle(t, "revoked after Fenced", p.sink.revoked)
}

func TestDial(t *testing.T) {
	p := open(t, "dial nth=2 error=\"no route\"\ndial nth=3 stall until=go\ndial nth=4 stall until=go")
	dial := func(ctx context.Context) error {
		peer, err := p.tr.Dial(ctx, p.target.Descriptor(), session)
		if err == nil {
			err = peer.Close()
		}
		return err
	}
	if err := dial(t.Context()); !errors.Is(err, fault.ErrInjected) {
		t.Errorf("second dial: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- dial(ctx) }()
	get(t, "the hold", p.rules.Waiting("go"))
	cancel()
	if err := get(t, "the dial", ended); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled dial: %v", err)
	}
	p.rules.Release("go")
	if err := dial(t.Context()); err != nil {
		t.Errorf("released dial: %v", err)
	}
}
