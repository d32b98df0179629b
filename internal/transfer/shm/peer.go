package shm

import (
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/debug"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/postq"
)

const (
	// sliceBytes is the longest copy inside a grant: it bounds the time that Revoke finds
	// a running writer inside, and how long another room waits. Some 60 µs.
	sliceBytes = 512 << 10
	// maxSegments of a write; nothing here depends on it, but a bound makes ErrTooLarge
	// the same answer on every transport.
	maxSegments = 16384
)

var (
	errFault  = errors.New("shm: memory fault while storing")
	errAnswer = errors.New("shm: answer to no outstanding write")
)

// peer is the source's end. Two goroutines: copyLoop owns the mappings and the segments of
// queued writes, unmaps, closes the socket and settles everything at the end; receive
// reads the answers.
type peer struct {
	tr *Transport
	uc *net.UnixConn
	q  *postq.Queue
	wg sync.WaitGroup

	once sync.Once
	err  error         // set before down is closed; what left-over writes get
	down chan struct{} // closed by fail

	// Owned by copyLoop.
	maps   mappings
	places map[*postq.Item]place // of writes that are begun and not finished
	out    []byte
}

func newPeer(tr *Transport, uc *net.UnixConn, maps mappings) *peer {
	p := &peer{
		tr: tr, uc: uc, maps: maps,
		q:      postq.New(postq.Config{Limit: tr.cfg.Queue, Open: tr.cfg.Queue, Segments: maxSegments}),
		down:   make(chan struct{}),
		places: make(map[*postq.Item]place),
	}
	p.wg.Go(p.copyLoop)
	p.wg.Go(p.receive)
	return p
}

// Kind implements [transfer.Peer].
func (p *peer) Kind() string { return p.tr.Kind() }

// Post implements [transfer.Peer].
func (p *peer) Post(w transfer.Write) error { return p.q.Post(w) }

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

// fail ends the connection with its first error. It does not close the socket: that tells
// the target that the mapping is gone, so copyLoop does it, after unmapping.
func (p *peer) fail(err error) {
	p.once.Do(func() {
		p.err = transfer.ErrClosed
		if !errors.Is(err, transfer.ErrClosed) {
			p.err = fmt.Errorf("%w: %w", transfer.ErrPeerLost, err)
		}
		p.q.Fail(p.err)
		_ = p.uc.SetDeadline(time.Unix(1, 0)) // wakes both goroutines from the socket
		close(p.down)
	})
}

// copyLoop copies slices until the queue fails.
func (p *peer) copyLoop() {
	debug.SetPanicOnFault(true) // of this goroutine only; see guarded
	for {
		it, ok := p.q.Next()
		if !ok {
			break
		}
		verdict, err := p.guarded(it)
		if err != nil {
			p.fail(err)
		}
		switch {
		case verdict != nil:
			p.count(verdict)
			p.q.Refuse(it, verdict)
		default:
			if err := p.q.Return(it, it.Slot == finished); err != nil {
				p.fail(fmt.Errorf("shm: %w", err))
			}
		}
	}
	<-p.down
	p.maps.unmap()
	_ = p.uc.Close()
	p.q.Drain(p.err)
}

// finished in Item.Slot: every byte is stored and the target has been told.
const finished = 1

// guarded is slice, with a fault in either mapping or in the caller's memory turned into an
// error. The writer then never leaves the grant: only the end of the connection, which
// follows, frees its pages.
func (p *peer) guarded(it *postq.Item) (verdict, err error) {
	defer func() {
		if r := recover(); r != nil {
			fault, ok := r.(interface{ Addr() uintptr })
			if !ok {
				panic(r)
			}
			verdict, err = nil, fmt.Errorf("%w at %#x", errFault, fault.Addr())
		}
	}()
	return p.slice(it)
}

// slice does the next piece of it: enter the grant, store up to sliceBytes, leave, say so
// where needed. A verdict ends the write; an error ends the connection.
func (p *peer) slice(it *postq.Item) (verdict, err error) {
	at, begun := p.places[it]
	if begun {
		if !p.maps.ctl.enter(at) {
			delete(p.places, it)
			return transfer.ErrGrant, nil
		}
	} else {
		var ok bool
		if at, ok = p.maps.ctl.find(it.Grant, it.Key); !ok {
			return transfer.ErrGrant, nil
		}
		if !p.inside(at, it) {
			return transfer.ErrBounds, p.leave(at, it.Grant)
		}
	}
	p.store(it)
	if err := p.leave(at, it.Grant); err != nil {
		return nil, err
	}
	if it.Sent < it.Total {
		if !begun {
			p.places[it] = at
		}
		return nil, nil
	}
	if begun {
		delete(p.places, it)
	}
	it.Slot = finished
	m := message{kind: kindDone, notify: it.Notify != nil, notifyN: len(it.Notify), value: it.Seq, grant: it.Grant}
	p.out = append(m.append(p.out[:0]), it.Notify...)
	return nil, p.send()
}

// inside checks every segment before a byte is stored.
func (p *peer) inside(at place, it *postq.Item) bool {
	size := uint64(len(p.maps.mem))
	for i := range it.Segments {
		if !p.maps.ctl.allowed(at, it.Segments[i].Off, uint64(len(it.Segments[i].Src)), size) {
			return false
		}
	}
	return true
}

// store copies the next sliceBytes and moves the item's cursor. The writer is inside.
func (p *peer) store(it *postq.Item) {
	budget := sliceBytes
	for it.Seg < len(it.Segments) && budget > 0 {
		s := &it.Segments[it.Seg]
		src := s.Src[it.Off:]
		src = src[:min(len(src), budget)]
		copy(p.maps.mem[s.Off+uint64(it.Off):], src)
		budget -= len(src)
		it.Sent += uint64(len(src))
		if it.Off += len(src); it.Off == len(s.Src) {
			it.Seg, it.Off = it.Seg+1, 0
		}
	}
}

// leave counts the writer out and tells the target if it waits for that.
func (p *peer) leave(at place, g transfer.GrantID) error {
	if !p.maps.ctl.leave(at) {
		return nil
	}
	m := message{kind: kindLeft, grant: g}
	p.out = m.append(p.out[:0])
	return p.send()
}

func (p *peer) send() error {
	if _, err := p.uc.Write(p.out); err != nil {
		return fmt.Errorf("shm: send: %w", err)
	}
	return nil
}

func (p *peer) count(verdict error) {
	if errors.Is(verdict, transfer.ErrBounds) {
		p.tr.stats.boundsRefused.Add(1)
	} else {
		p.tr.stats.grantRefused.Add(1)
	}
}

// receive reads answers until the connection ends.
func (p *peer) receive() {
	buf := make([]byte, 128*messageLen)
	have := 0
	for {
		n, err := p.uc.Read(buf[have:])
		have += n
		used := 0
		for ; have-used >= messageLen; used += messageLen {
			if aerr := p.answer(buf[used:]); aerr != nil {
				p.fail(aerr)
				return
			}
		}
		have = copy(buf, buf[used:have])
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = errors.New("the target has closed the session or is gone")
			}
			p.fail(fmt.Errorf("shm: receive: %w", err))
			return
		}
	}
}

// answer settles one write.
func (p *peer) answer(b []byte) error {
	var m message
	err := m.decode(b)
	if err == nil && (m.kind != kindAnswer || m.code > verdictGrant) {
		err = errOrder
	}
	if err == nil {
		var verdict error
		if m.code == verdictGrant {
			verdict = transfer.ErrGrant
		}
		if p.q.Settle(m.value, verdict) {
			return nil
		}
		err = errAnswer
	}
	if p.Err() == nil { // after the end nothing is outstanding
		p.tr.stats.protocolErrors.Add(1)
	}
	return err
}
