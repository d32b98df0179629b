package fault_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/mem"
)

// posters tells which goroutine posts each write to the real peer, and holds it until somebody has heard, or free is closed.
type posters struct {
	transfer.Transport
	by    chan string
	free  chan struct{}
	posts atomic.Int64
}

func (p *posters) Dial(ctx context.Context, d transfer.Descriptor, s transfer.SessionID) (transfer.Peer, error) {
	real, err := p.Transport.Dial(ctx, d, s)
	return &postersPeer{real, p}, err
}

type postersPeer struct {
	transfer.Peer
	tr *posters
}

func (p *postersPeer) Post(w transfer.Write) error {
	stack := make([]byte, 64) // begins with "goroutine N "
	p.tr.posts.Add(1)
	select {
	case p.tr.by <- strings.Fields(string(stack[:runtime.Stack(stack, false)]))[1]:
	case <-p.tr.free:
	}
	return p.Peer.Post(w)
}

// TestRateCarriesNotificationAlong: on a slow line a write of no bytes leaves with the bytes ahead of it, not when another goroutine
// has woken; where nothing is ahead, or another peer's, it leaves by itself; and it ends with its peer.
func TestRateCarriesNotificationAlong(t *testing.T) {
	inner := &posters{Transport: mem.New(nil), by: make(chan string), free: make(chan struct{})}
	p := openOver(t, "post nth=1-6 rate=400\npost rate=1", inner)
	note := func(peer transfer.Peer, v byte) <-chan error {
		done := make(chan error, 2)
		err := peer.Post(transfer.Write{Grant: 1, Key: room.Key{Room: 7}, Notify: []byte{'n', v}, Done: func(err error) { done <- err }})
		if err != nil {
			t.Fatal(err)
		}
		return done
	}
	other, err := p.tr.Dial(t.Context(), p.target.Descriptor(), session)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	first := []<-chan error{p.must(7, 0, 1), note(p.peer, 2), note(p.peer, 3), p.must(7, 4, 4), note(other, 5)} // none has left: nobody has heard
	var ids []string
	for range first {
		ids = append(ids, get(t, "post", inner.by))
	}
	for _, done := range first {
		ok(t, done)
	}
	alone := note(p.peer, 6) // nothing is ahead
	get(t, "post", inner.by)
	ok(t, alone)
	landed := ""
	for range 6 {
		if got := get(t, "landing", p.sink.landed); got != "n\x05" { // another connection's
			landed += got
		}
	}
	if landed != "n\x01n\x02n\x03n\x04n\x06" {
		t.Errorf("landed in the order %q", landed)
	}
	if ids[1] != ids[0] || ids[2] != ids[0] || ids[3] == ids[0] || ids[4] == ids[3] {
		t.Errorf("posted by goroutines %v, want the first three by one, the next two by others", ids)
	}
	close(inner.free)
	slow := p.must(7, 8, 7) // four seconds
	behind := note(p.peer, 8)
	p.close()
	for _, done := range []<-chan error{slow, behind} {
		if err := get(t, "end of a slow write", done); !errors.Is(err, transfer.ErrClosed) {
			t.Error(err)
		}
		idle(t, "second completion", done)
	}
	if n := inner.posts.Load(); n != 6 {
		t.Errorf("%d writes were posted, want those 6 that were through", n)
	}
}
