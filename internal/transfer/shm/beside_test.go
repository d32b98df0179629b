package shm

import (
	"bytes"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/postq"
)

// standIn takes the turn of copyLoop with a long write of grant 1, like a copier that has lost its core in a slice.
func standIn(t *testing.T, p *peer, done chan<- error) *postq.Item {
	t.Helper()
	src := bytes.Repeat([]byte{1}, 2*inlineBytes)
	it, err := p.q.PostNow(transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{{Src: src}}, Done: func(err error) { done <- err }}, 1<<30)
	if err != nil || it == nil {
		t.Fatalf("no turn: %v", err)
	}
	return it
}

// A short write does not wait for a copier that stands still inside a slice of another grant, and the end of the connection
// waits for both.
func TestShortWriteBesideAStuckCopier(t *testing.T) {
	p := listen(t, Config{}, 1<<20)
	p.allow(t, 1, transfer.Span{Off: 0, Len: 2 * inlineBytes})
	p.allow(t, 2, transfer.Span{Off: 1 << 19, Len: inlineBytes})
	peer, done := p.dial(t).(*peer), make(chan error, 1)
	it := standIn(t, peer, done)
	short := transfer.Write{Grant: 2, Key: testKey, Segments: []transfer.Segment{{Off: 1 << 19, Src: bytes.Repeat([]byte{2}, inlineBytes)}}, Notify: []byte("short")}
	for range 3 {
		if err := recv(t, post(t, peer, short), "verdict of a short write"); err != nil {
			t.Fatal(err)
		}
		recv(t, p.sink.landed, "notification")
	}
	if !bytes.Equal(p.mem[1<<19:1<<19+inlineBytes], short.Segments[0].Src) {
		t.Fatal("the short write's bytes are not there")
	}
	if err := recv(t, post(t, peer, transfer.Write{Grant: 2, Key: testKey, Segments: []transfer.Segment{{Off: 0, Src: []byte{3}}}}), "verdict"); !errors.Is(err, transfer.ErrBounds) {
		t.Fatalf("beside, out of bounds: %v", err)
	}
	peer.fail(errors.New("test"))
	none(t, p.sink.fenced, "fenced while the copier is inside")
	peer.settle(it, transfer.ErrGrant, nil)
	if err := recv(t, done, "the long write's verdict"); !errors.Is(err, transfer.ErrGrant) {
		t.Fatal(err)
	}
	if s := recv(t, p.sink.fenced, "Fenced"); s != 1 {
		t.Fatalf("fenced %d", s)
	}
}

// A poster that is inside when its grant is revoked tells the target through the copier, with the turn and without it.
func TestPosterLeavesARevokedGrant(t *testing.T) {
	for _, beside := range []bool{false, true} {
		p := listen(t, Config{}, 1<<20)
		p.allow(t, 1, transfer.Span{Off: 0, Len: 2 * inlineBytes})
		p.allow(t, 2, transfer.Span{Off: 0, Len: 64})
		peer, long, done := p.dial(t).(*peer), make(chan error, 1), make(chan error, 1)
		var turn *postq.Item
		if beside {
			turn = standIn(t, peer, long)
		}
		it, err := peer.q.PostNow(transfer.Write{Grant: 2, Key: testKey, Segments: []transfer.Segment{{Src: make([]byte, 64)}}, Done: func(err error) { done <- err }}, inlineBytes)
		if err != nil || it == nil {
			t.Fatalf("beside %v: not handed out: %v", beside, err)
		}
		peer.storeNow(it, func(it *postq.Item) error {
			at, err := peer.find(it)
			if err != nil || p.tgt.Revoke(2) {
				t.Errorf("beside %v: revoked with a writer inside (%v)", beside, err)
			}
			peer.store(it, inlineBytes)
			peer.leave(at, it.Grant)
			return nil
		})
		if beside {
			none(t, p.sink.revoked, "told by the poster, which must not wait for the socket")
			peer.settle(turn, nil, nil)
		}
		if g := recv(t, p.sink.revoked, "Revoked"); g != 2 {
			t.Fatalf("revoked %d", g)
		}
		if err := recv(t, done, "verdict"); !errors.Is(err, transfer.ErrGrant) {
			t.Fatalf("beside %v: %v", beside, err)
		}
	}
}

// Short writes beside a long one while the connection ends: nobody stores into what is unmapped, each write is settled once.
func TestPostersAtTheEndOfAConnection(t *testing.T) {
	for range 20 {
		p := listen(t, Config{}, 8<<20)
		const posters, each = 4, 200
		p.allow(t, 1, transfer.Span{Off: 0, Len: 4 << 20})
		for g := range transfer.GrantID(posters) {
			p.allow(t, g+2, transfer.Span{Off: 4<<20 + uint64(g)<<16, Len: inlineBytes})
		}
		peer := p.dial(t)
		begun, landed := make(chan struct{}), make(chan struct{}, posters*each)
		var wg sync.WaitGroup
		long := post(t, peer, transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{{Src: make([]byte, 4<<20)}}})
		for g := range posters {
			wg.Go(func() {
				src := make([]byte, 4096)
				for i := range each {
					w := transfer.Write{Grant: transfer.GrantID(g + 2), Key: testKey, Segments: []transfer.Segment{{Off: 4<<20 + uint64(g)<<16, Src: src}}, Done: func(error) { landed <- struct{}{} }}
					if peer.Post(w) != nil {
						landed <- struct{}{}
					}
					if g == 0 && i == each/4 {
						close(begun)
					}
				}
			})
		}
		recv(t, begun, "first posts")
		if err := peer.Close(); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		for range posters * each {
			recv(t, landed, "settled")
		}
		recv(t, long, "the long write's verdict")
		none(t, landed, "settled twice")
	}
}

// Post does not wait for the copier that waits for a full socket; the wake that it could not send follows.
func TestPostWhileTheSocketIsTaken(t *testing.T) {
	p := listen(t, Config{}, 1<<20)
	p.allow(t, 2, transfer.Span{Off: 0, Len: 64})
	peer := p.dial(t).(*peer)
	taken, free, freed := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	peer.mu.Lock()
	peer.reporting = true
	peer.mu.Unlock()
	go func() {
		freed <- peer.raw.Write(func(uintptr) bool { close(taken); <-free; return true })
	}()
	recv(t, taken, "the socket")
	for end := time.Now().Add(patience); peer.maps.ctl.asleep().Load() == 0; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatal("the target does not sleep")
		}
	}
	posted, v := make(chan error, 1), make(chan error, 1)
	go func() {
		posted <- peer.Post(transfer.Write{Grant: 2, Key: testKey, Segments: []transfer.Segment{{Src: make([]byte, 64)}}, Done: func(err error) { v <- err }})
	}()
	err := recv(t, posted, "Post")
	none(t, v, "settled by a target that nobody has woken")
	close(free)
	if err := errors.Join(err, recv(t, freed, "the socket"), peer.reported(), recv(t, v, "verdict")); err != nil {
		t.Fatal(err)
	}
}
