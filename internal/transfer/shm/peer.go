package shm

import (
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/postq"
)

const (
	// maxSlice and minSlice bound the bytes that are copied inside a grant in one go. That is how long
	// Revoke finds a running writer inside, and how long another room waits: some 60 to 120 µs. Go copies
	// 1 MiB and more past the caches, nearly twice as fast as less.
	maxSlice, minSlice = 1 << 20, 64 << 10
	// sliceTime is what a slice should not outlast: where pages fault on their first touch, 1 MiB can take
	// a millisecond, so the next slice is half as long.
	sliceTime = 400 * time.Microsecond
	// maxSegments of a write; nothing here depends on it, but a bound makes ErrTooLarge
	// the same answer on every transport.
	maxSegments = 16384
	// politeSlices of a long write (some milliseconds) after the last short one leave the core to threads that wait for
	// it, see [postq.Courtesy].
	politeSlices = 32
	// inlineBytes is the longest write that Post stores itself: some microseconds, less than to
	// wake another goroutine.
	inlineBytes = 64 << 10
)

var (
	errFault  = errors.New("shm: memory fault while storing")
	errAnswer = errors.New("shm: answer to no outstanding write")
	errFull   = errors.New("shm: the target has answered completions that it has not taken")
)

// peer is the source's end. Two goroutines: copyLoop owns the mappings and the segments of
// queued writes, unmaps, closes the socket and settles everything at the end; receive
// reads the answers. A poster whose small write is the first of its grant does copyLoop's work for it, also while
// copyLoop is inside a slice of another: a thread of a long write that has lost its core delays nobody then. The
// queue says the end to copyLoop when no poster is at work, so nobody stores into what it unmaps.
type peer struct {
	tr *Transport
	uc *net.UnixConn
	q  *postq.Queue
	wg sync.WaitGroup

	once sync.Once
	err  error         // set before down is closed; what left-over writes get
	down chan struct{} // closed by fail

	maps   mappings
	shorts atomic.Uint64 // short writes stored
	raw    syscall.RawConn
	wake   func(fd uintptr) bool

	// Owned by copyLoop.
	places map[*postq.Item]place // of writes that are begun and not finished
	budget int                   // bytes of the next slice
	out    []byte

	mu        sync.Mutex         // held for moments
	put       uint64             // completions put into the ring
	owed      []transfer.GrantID // left after their revoke; the target waits to hear of it
	reporting bool               // copyLoop writes to the socket, which may be full
	late      bool               // the target is to be woken after that
}

func newPeer(tr *Transport, uc *net.UnixConn, maps mappings) *peer {
	limit := min(tr.cfg.Queue, ringSlots)
	p := &peer{
		tr: tr, uc: uc, maps: maps, budget: maxSlice,
		q:      postq.New(postq.Config{Limit: limit, Open: limit, Segments: maxSegments, Beside: true}),
		down:   make(chan struct{}),
		places: make(map[*postq.Item]place),
	}
	p.raw, _ = uc.SyscallConn() // fails for a nil conn only
	wake := (&message{kind: kindWake}).append(nil)
	p.wake = func(fd uintptr) bool {
		// If the socket is full, the target has something to wake up for.
		_, _ = unix.Write(int(fd), wake)
		return true
	}
	p.wg.Go(p.copyLoop)
	p.wg.Go(p.receive)
	return p
}

// Kind implements [transfer.Peer].
func (p *peer) Kind() string { return p.tr.Kind() }

// Post implements [transfer.Peer]. A small write is stored at once if no other of its grant is before it.
func (p *peer) Post(w transfer.Write) error {
	it, err := p.q.PostNow(w, inlineBytes)
	if it != nil {
		old := debug.SetPanicOnFault(true)
		p.storeNow(it, p.short)
		debug.SetPanicOnFault(old)
	}
	return err
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
	var courtesy postq.Courtesy
	for {
		it, ok := p.q.Next()
		if !ok {
			break
		}
		short := it.Total <= inlineBytes // asked before: after the step it is no longer ours
		p.step(it)
		if courtesy.See(p.shorts.Load(), politeSlices); !short {
			courtesy.Give()
		}
	}
	<-p.down
	p.maps.unmap()
	_ = p.uc.Close()
	p.q.Drain(p.err)
}

// storeNow does all of a short write for its poster and gives it back to the queue. It does not wait for the socket: if the
// target is to be told that a writer has left a revoked grant, copyLoop does that, and all of this write again.
func (p *peer) storeNow(it *postq.Item, short func(*postq.Item) (verdict error)) {
	verdict, err := p.guarded(it, short)
	if err != nil || !p.owes() {
		p.settle(it, verdict, err)
		return
	}
	it.Seg, it.Off, it.Sent = 0, 0, 0
	if err := p.q.Return(it, false); err != nil {
		p.fail(fmt.Errorf("shm: %w", err))
	}
}

// step does the next piece of it, tells the target what it waits for and gives the item back to the queue.
func (p *peer) step(it *postq.Item) {
	verdict, err := p.guarded(it, p.slice)
	p.settle(it, verdict, errors.Join(err, p.report()))
}

// settle gives an item back after a piece that ended so.
func (p *peer) settle(it *postq.Item, verdict, err error) {
	finished := err == nil && verdict == nil && it.Sent == it.Total
	if finished {
		if it.Total <= inlineBytes {
			p.shorts.Add(1)
		}
		err = p.complete(it)
	}
	if err != nil {
		p.fail(err)
	}
	if verdict != nil {
		p.count(verdict)
		p.q.Refuse(it, verdict)
		return
	}
	if err := p.q.Return(it, finished); err != nil {
		p.fail(fmt.Errorf("shm: %w", err))
	}
}

// guarded is piece, with a fault in either mapping or in the caller's memory turned into an
// error. The writer then never leaves the grant: only the end of the connection, which
// follows, frees its pages.
func (p *peer) guarded(it *postq.Item, piece func(*postq.Item) (verdict error)) (verdict, err error) {
	defer func() {
		if r := recover(); r != nil {
			fault, ok := r.(interface{ Addr() uintptr })
			if !ok {
				panic(r)
			}
			verdict, err = nil, fmt.Errorf("%w at %#x", errFault, fault.Addr())
		}
	}()
	return piece(it), nil
}

// short stores all of a short write: one slice.
func (p *peer) short(it *postq.Item) (verdict error) {
	at, verdict := p.find(it)
	if verdict != nil {
		return verdict
	}
	p.store(it, inlineBytes)
	p.leave(at, it.Grant)
	return nil
}

// slice does the next piece of it: enter the grant, store up to budget bytes, leave. A verdict
// ends the write.
func (p *peer) slice(it *postq.Item) (verdict error) {
	at, begun := p.places[it]
	if begun {
		if !p.maps.ctl.enter(at) {
			delete(p.places, it)
			return transfer.ErrGrant
		}
	} else if at, verdict = p.find(it); verdict != nil {
		return verdict
	}
	began := time.Now()
	p.store(it, p.budget)
	p.leave(at, it.Grant)
	p.budget = nextBudget(p.budget, time.Since(began))
	switch {
	case it.Sent < it.Total && !begun:
		p.places[it] = at
	case it.Sent == it.Total && begun:
		delete(p.places, it)
	}
	return nil
}

// find enters the grant of a write whose segments are all inside it.
func (p *peer) find(it *postq.Item) (at place, verdict error) {
	at, ok := p.maps.ctl.find(it.Grant, it.Key)
	if !ok {
		return at, transfer.ErrGrant
	}
	if !p.inside(at, it) {
		p.leave(at, it.Grant)
		return at, transfer.ErrBounds
	}
	return at, nil
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

// nextBudget follows a slice of budget bytes, or fewer, that took took.
func nextBudget(budget int, took time.Duration) int {
	switch {
	case took > sliceTime:
		return max(budget/2, minSlice)
	case took < sliceTime/2:
		return min(budget*2, maxSlice)
	}
	return budget
}

// store copies the next budget bytes and moves the item's cursor; segments that follow each other on
// both sides are one copy. The writer is inside.
func (p *peer) store(it *postq.Item, budget int) {
	for it.Seg < len(it.Segments) && budget > 0 {
		s := &it.Segments[it.Seg]
		at := s.Off + uint64(it.Off)
		run := s.Src[it.Off:]
		if len(run) > budget {
			run = run[:budget]
			it.Off += budget
		} else {
			it.Seg, it.Off = it.Seg+1, 0
			for it.Seg < len(it.Segments) {
				next := &it.Segments[it.Seg]
				if len(next.Src) > budget-len(run) || next.Off != at+uint64(len(run)) || !transfer.Follows(run, next.Src) {
					break
				}
				run = run[:len(run)+len(next.Src)]
				it.Seg++
			}
		}
		copy(p.maps.mem[at:], run)
		budget -= len(run)
		it.Sent += uint64(len(run))
	}
}

// leave counts the writer out and notes if the target waits for that.
func (p *peer) leave(at place, g transfer.GrantID) {
	if p.maps.ctl.leave(at) {
		p.mu.Lock()
		p.owed = append(p.owed, g)
		p.mu.Unlock()
	}
}

// owes reports whether there is something to report.
func (p *peer) owes() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.owed) > 0
}

// report tells the target what it waits for; it may wait for the socket.
func (p *peer) report() error {
	p.mu.Lock()
	p.out = p.out[:0]
	for _, g := range p.owed {
		m := message{kind: kindLeft, grant: g}
		p.out = m.append(p.out)
	}
	p.owed = p.owed[:0]
	p.reporting = len(p.out) > 0
	p.mu.Unlock()
	if len(p.out) == 0 {
		return nil
	}
	p.maps.ctl.letters().Add(uint64(len(p.out) / messageLen))
	_, err := p.uc.Write(p.out)
	if err = errors.Join(err, p.reported()); err != nil {
		return fmt.Errorf("shm: send: %w", err)
	}
	return nil
}

// reported is the end of a report: wakes were left to it.
func (p *peer) reported() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reporting = false
	if !p.late {
		return nil
	}
	p.late = false
	return p.raw.Write(p.wake)
}

// complete tells the target that all of it is stored.
func (p *peer) complete(it *postq.Item) error {
	m := message{kind: kindDone, notify: it.Notify != nil, notifyN: len(it.Notify), value: it.Seq, grant: it.Grant}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.maps.ctl.put(p.put, &m, it.Notify) {
		return errFull
	}
	p.put++
	switch {
	case !p.maps.ctl.sleeper():
	case p.reporting: // to write now would be to wait for that
		p.late = true
	default:
		if err := p.raw.Write(p.wake); err != nil {
			return fmt.Errorf("shm: wake: %w", err)
		}
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
