package fault

import (
	"errors"
	"fmt"
	"sync"

	"github.com/baton-pd/baton/internal/transfer"
)

// peer holds writes on both sides of the real peer. Each held write or completion
// has a goroutine, which Close waits for.
type peer struct {
	transfer.Peer
	rules *Rules
	stop  chan struct{} // closed by Close

	mu     sync.Mutex
	closed bool
	wg     sync.WaitGroup // Add under mu and only while not closed
	tick   chan struct{}  // closed and replaced at every Done of the real peer
}

func newPeer(p transfer.Peer, r *Rules) *peer {
	return &peer{Peer: p, rules: r, stop: make(chan struct{}), tick: make(chan struct{})}
}

// Post applies the rules for the write and, ahead of time, for its completion: so the
// number of a completion does not depend on which write is faster.
func (p *peer) Post(w transfer.Write) error {
	if len(w.Notify) > transfer.MaxNotify {
		return transfer.ErrTooLarge
	}
	post := p.rules.decide(opPost, p.Kind(), w.Key)
	done := p.rules.decide(opDone, p.Kind(), w.Key)
	w.Done = p.completion(done, w.Done)
	var run func()
	leave := func() {}
	switch post.action() {
	case "", actCorrupt:
		if post.action() == actCorrupt {
			w.Segments = damaged(w.Segments)
		}
		err := p.Peer.Post(w)
		if err != nil {
			p.rules.undo(post, done)
		}
		return err
	case actBusy:
		p.rules.undo(done) // the post counts, or the rule would refuse the retry too
		return transfer.ErrBusy
	case actError:
		run = func() { w.Done(post.err()) }
	case actDrop:
		run = func() {
			<-p.ended()
			w.Done(p.endErr())
		}
	case actStall:
		run = func() {
			if !p.rules.wait(post.rule, p.stop, p.Down()) {
				w.Done(p.endErr())
				return
			}
			p.forward(w)
		}
	case actHalfway:
		run = func() { p.halfway(post.rule, w) }
	case actRate:
		bytes := payload(w.Segments)
		carry := func(through bool) {
			if through {
				p.forward(w)
			} else {
				w.Done(p.endErr())
			}
		}
		if bytes == 0 && p.rules.joinAlong(post.rule, p, carry) {
			return nil
		}
		place := p.rules.join(post.rule, p, bytes)
		leave = func() { p.rules.leave(place, false) }
		run = func() {
			through := place.wait(p.stop, p.Down())
			carry(through)
			p.rules.leave(place, through)
		}
	}
	if err := p.start(run); err != nil {
		leave()
		p.rules.undo(post, done)
		return err
	}
	return nil
}

// start runs f in a goroutine that Close waits for.
func (p *peer) start(f func()) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return transfer.ErrClosed
	}
	select {
	case <-p.Down():
		return p.Err()
	default:
	}
	p.wg.Go(f)
	return nil
}

// ended is closed when held writes have no future.
func (p *peer) ended() <-chan struct{} {
	select {
	case <-p.stop:
		return p.stop
	case <-p.Down(): // Close takes the real peer down as well
		return p.Down()
	}
}

// endErr is what a write gets that was still held at the end.
func (p *peer) endErr() error {
	select {
	case <-p.stop:
		return fmt.Errorf("held by a fault: %w", transfer.ErrClosed)
	default:
		return fmt.Errorf("held by a fault: %w", p.Err())
	}
}

// forward posts a write that was held. The real queue may be full by now.
func (p *peer) forward(w transfer.Write) {
	for {
		p.mu.Lock()
		tick := p.tick
		p.mu.Unlock()
		err := p.Peer.Post(w)
		if !errors.Is(err, transfer.ErrBusy) {
			if err != nil {
				w.Done(err)
			}
			return
		}
		select {
		case <-tick:
		case <-p.Down():
		case <-p.stop:
		}
	}
}

// halfway applies the first half of the bytes, holds, and then the rest.
func (p *peer) halfway(u *rule, w transfer.Write) {
	first, rest := cut(w.Segments)
	half := make(chan error, 1)
	p.forward(transfer.Write{Grant: w.Grant, Key: w.Key, Segments: first, Done: p.completion(verdict{}, func(err error) { half <- err })})
	if err := <-half; err != nil { // settled at the latest when the real peer closes
		w.Done(err)
		return
	}
	if !p.rules.wait(u, p.stop, p.Down()) {
		w.Done(p.endErr())
		return
	}
	w.Segments = rest
	p.forward(w)
}

func payload(segs []transfer.Segment) (n int) {
	for _, s := range segs {
		n += len(s.Src)
	}
	return n
}

// damaged is segs with one byte changed, the middle one of the first that has any. The source's
// own memory stays as it is.
func damaged(segs []transfer.Segment) []transfer.Segment {
	out := append([]transfer.Segment(nil), segs...)
	for i, s := range out {
		if len(s.Src) > 0 {
			out[i].Src = append([]byte(nil), s.Src...)
			out[i].Src[len(s.Src)/2] ^= 0x10
			break
		}
	}
	return out
}

// cut splits segments at the middle of their bytes.
func cut(segs []transfer.Segment) (first, rest []transfer.Segment) {
	left := payload(segs) / 2
	for _, s := range segs {
		n := min(left, len(s.Src))
		left -= n
		if n > 0 {
			first = append(first, transfer.Segment{Off: s.Off, Src: s.Src[:n]})
		}
		if n < len(s.Src) {
			rest = append(rest, transfer.Segment{Off: s.Off + uint64(n), Src: s.Src[n:]})
		}
	}
	return first, rest
}

// completion wraps Done: it applies the verdict and tells those that wait for room.
func (p *peer) completion(v verdict, done func(error)) func(error) {
	return func(err error) {
		p.deliver(v, err, done)
		p.mu.Lock()
		defer p.mu.Unlock()
		close(p.tick)
		p.tick = make(chan struct{})
	}
}

// deliver reports a completion as the rule says. Only a success can be held or lost.
func (p *peer) deliver(v verdict, err error, done func(error)) {
	if err != nil || v.rule == nil {
		done(err)
		return
	}
	if v.rule.act == actError {
		done(v.err())
		return
	}
	if ended := p.start(func() {
		if v.rule.act == actHold && p.rules.wait(v.rule, p.stop, p.Down()) {
			done(nil)
			return
		}
		<-p.ended()
		done(p.endErr())
	}); ended != nil {
		done(ended)
	}
}

// Close settles what is held and closes the real peer.
func (p *peer) Close() error {
	p.mu.Lock()
	if !p.closed {
		p.closed = true
		close(p.stop)
	}
	p.mu.Unlock()
	err := p.Peer.Close()
	p.wg.Wait()
	return err
}
