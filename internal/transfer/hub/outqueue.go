package hub

import (
	"errors"
	"sync"

	"github.com/baton-pd/baton/internal/transfer"
)

// queued is a chunk's write that its room has begun.
type queued struct {
	s     *sending
	write transfer.Write

	late bool // add came after close; set by add, read by send
}

// outQueue hands the writes of one session to its data peer in order and keeps
// those that did not fit into the transport's own queue. Every write pushed is
// settled exactly once: by the transport, or here with an error.
type outQueue struct {
	peer transfer.Peer

	mu       sync.Mutex
	q        []*queued
	closed   bool
	draining bool // one goroutine is posting, without the lock
	again    bool // a wake came while it did
}

func newOutQueue(p transfer.Peer) *outQueue { return &outQueue{peer: p} }

// push hands w over. Never blocks.
func (o *outQueue) push(w *queued) {
	o.add(w)
	o.send(w)
}

// add is the first half of push: w has its place behind what was added before. It calls nobody, so the caller may hold
// a lock.
func (o *outQueue) add(w *queued) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if w.late = o.closed; !w.late {
		o.q = append(o.q, w)
	}
}

// send is the other half, for which the caller holds no lock. w may have left before.
func (o *outQueue) send(w *queued) {
	if w.late {
		w.write.Done(transfer.ErrPeerLost)
		return
	}
	o.wake()
}

// wake posts what fits. Called after a push and after every completion, perhaps
// from inside Post.
func (o *outQueue) wake() {
	o.mu.Lock()
	if o.draining {
		o.again = true
		o.mu.Unlock()
		return
	}
	o.draining = true
	for len(o.q) > 0 {
		w := o.q[0]
		o.q = o.q[1:]
		o.again = false
		o.mu.Unlock()
		err := o.peer.Post(w.write)
		busy := errors.Is(err, transfer.ErrBusy)
		if err != nil && !busy {
			w.write.Done(err)
		}
		o.mu.Lock()
		if !busy {
			continue
		}
		if o.closed {
			o.mu.Unlock()
			w.write.Done(transfer.ErrPeerLost)
			o.mu.Lock()
			continue
		}
		o.q = append([]*queued{w}, o.q...)
		if !o.again {
			break
		}
	}
	o.draining = false
	o.mu.Unlock()
}

// purge settles the waiting writes of s, whose room has ended.
func (o *outQueue) purge(s *sending) {
	o.mu.Lock()
	var gone []*queued
	keep := o.q[:0:0]
	for _, w := range o.q {
		if w.s == s {
			gone = append(gone, w)
		} else {
			keep = append(keep, w)
		}
	}
	o.q = keep
	o.mu.Unlock()
	for _, w := range gone {
		w.write.Done(transfer.ErrClosed)
	}
}

// close settles all waiting writes and refuses new ones.
func (o *outQueue) close() {
	o.mu.Lock()
	gone := o.q
	o.q, o.closed = nil, true
	o.mu.Unlock()
	for _, w := range gone {
		w.write.Done(transfer.ErrPeerLost)
	}
}
