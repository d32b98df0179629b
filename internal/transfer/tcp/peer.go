package tcp

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
)

// peer is the source's end: two connections of one session. Long writes go over bulk, whose
// kernels may hold much, for that makes it fast; short ones over quick, so that what they
// wait for is never a long write that is already in a kernel. Both end together.
type peer struct {
	tr          *Transport
	bulk, quick *stream
	wg          sync.WaitGroup

	mu sync.Mutex // held from the choice of a stream until the write is in its queue; before Queue's lock

	shorts atomic.Uint64 // writes posted on quick
	own    bool          // bulk waits for the socket on a thread of its own

	once sync.Once
	err  error         // set before down is closed; what left-over writes get
	down chan struct{} // closed by fail
}

// newPeer takes both connections over; if it fails they are still the caller's.
func newPeer(tr *Transport, bulk, quick *net.TCPConn) (p *peer, err error) {
	p = &peer{tr: tr, down: make(chan struct{})}
	if err = tune(bulk, tr.cfg.UserTimeout); err == nil {
		err = tune(quick, tr.cfg.UserTimeout, option{unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, unsentBytes})
	}
	if err == nil {
		p.bulk, err = newStream(p, bulk)
	}
	if err == nil {
		p.quick, err = newStream(p, quick)
	}
	if err != nil {
		return nil, err
	}
	p.own = tr.writers.take()
	for _, s := range []*stream{p.bulk, p.quick} {
		p.wg.Go(s.send)
		p.wg.Go(s.receive)
	}
	return p, nil
}

// Kind implements [transfer.Peer].
func (p *peer) Kind() string { return p.tr.Kind() }

// Post implements [transfer.Peer].
func (p *peer) Post(w transfer.Write) error {
	p.mu.Lock()
	s := p.choose(&w)
	if s == p.quick {
		p.shorts.Add(1)
	}
	it, err := s.q.PostNow(w, uint64(min(inlineBytes, p.tr.cfg.FrameBytes)))
	p.mu.Unlock()
	if it != nil {
		s.sendNow(it)
	}
	return err
}

// choose is the stream for w. Writes of a grant are applied in their order, so a grant changes
// its stream only when none of its writes is unsettled. Under mu.
func (p *peer) choose(w *transfer.Write) *stream {
	switch {
	case p.bulk.q.Holds(w.Grant):
		return p.bulk
	case p.quick.q.Holds(w.Grant) || short(w):
		return p.quick
	}
	return p.bulk
}

// short reports whether w has at most quickBytes of payload.
func short(w *transfer.Write) bool {
	left := quickBytes
	for i := range w.Segments {
		if left -= len(w.Segments[i].Src); left < 0 {
			return false
		}
	}
	return true
}

// Down implements [transfer.Peer].
func (p *peer) Down() <-chan struct{} { return p.down }

// Err implements [transfer.Peer].
func (p *peer) Err() error {
	select {
	case <-p.down:
		return p.err
	default:
		return nil
	}
}

// Close implements [transfer.Peer]. It must not be called from a Done.
func (p *peer) Close() error {
	p.fail(transfer.ErrClosed)
	p.wg.Wait()
	return nil
}

// fail ends both connections with the first error. The send goroutines settle what is left.
func (p *peer) fail(err error) {
	p.once.Do(func() {
		p.err = verdict(err)
		for _, s := range []*stream{p.bulk, p.quick} {
			s.q.Fail(p.err)
			_ = s.tcp.CloseWrite() // ends send's wait, which Close would wait for
			abort(s.tcp)
		}
		close(p.down)
	})
}

// verdict is what writes get when the connection ended with err.
func verdict(err error) error {
	if errors.Is(err, transfer.ErrClosed) {
		return transfer.ErrClosed
	}
	return fmt.Errorf("%w: %w", transfer.ErrPeerLost, err)
}
