package tcp

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/postq"
)

// peer is the source's end of one connection. Two goroutines: send owns the
// segments of queued writes and settles everything at the end; receive reads
// the answers. A poster whose small write is the only one sends it itself, as far as the
// socket takes it at once.
type peer struct {
	tr  *Transport
	tcp *net.TCPConn
	raw syscall.RawConn
	q   *postq.Queue
	wg  sync.WaitGroup

	once sync.Once
	err  error         // set before down is closed; what left-over writes get
	down chan struct{} // closed by fail

	// Owned by who has the queue's turn: send or, in Post, a poster.
	head       []byte // header, table and notification of the frame being sent
	iov        []unix.Iovec
	rest       []unix.Iovec // of iov, not yet written
	errno      syscall.Errno
	writeReady func(fd uintptr) bool
	writeOnce  func(fd uintptr) bool // does not wait
}

func newPeer(tr *Transport, tcp *net.TCPConn) (*peer, error) {
	if err := tune(tcp, tr.cfg.UserTimeout, option{unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, unsentBytes}); err != nil {
		return nil, err
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil, err
	}
	p := &peer{
		tr: tr, tcp: tcp, raw: raw,
		q:    postq.New(postq.Config{Limit: tr.cfg.Queue, Open: maxOpen, Segments: maxSegments}),
		down: make(chan struct{}),
		iov:  make([]unix.Iovec, 0, maxIovecs),
	}
	p.writeReady = p.tryWrite
	p.writeOnce = func(fd uintptr) bool { p.tryWrite(fd); return true }
	p.wg.Go(p.send)
	p.wg.Go(p.receive)
	return p, nil
}

// Kind implements [transfer.Peer].
func (p *peer) Kind() string { return p.tr.Kind() }

// Post implements [transfer.Peer].
func (p *peer) Post(w transfer.Write) error {
	it, err := p.q.PostNow(w, uint64(min(inlineBytes, p.tr.cfg.FrameBytes)))
	if it != nil {
		p.sendNow(it)
	}
	return err
}

// sendNow sends all of it, or hands it and what is left of the frame to send.
func (p *peer) sendNow(it *postq.Item) {
	p.build(it)
	if it.Sent == it.Total && p.raw.Write(p.writeOnce) == nil && p.errno == 0 && len(p.rest) == 0 {
		clear(p.iov)
		_ = p.q.Return(it, true) // an error is only of a part
		return
	}
	p.q.Hand(it)
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

// fail ends the connection with its first error. The send goroutine settles what is left.
func (p *peer) fail(err error) {
	p.once.Do(func() {
		p.err = verdict(err)
		p.q.Fail(p.err)
		abort(p.tcp)
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

// send writes frames until the queue fails.
func (p *peer) send() {
	for {
		it, ok := p.q.Next()
		if !ok {
			<-p.down
			p.q.Drain(p.err)
			return
		}
		if len(p.rest) == 0 { // else a poster has begun a frame
			if err := p.q.Answered(it); err != nil {
				p.abandon(it, err)
				continue
			}
			p.build(it)
		}
		if err := p.write(); err != nil {
			p.fail(fmt.Errorf("tcp: send: %w", err))
		}
		if err := p.q.Return(it, it.Sent == it.Total); err != nil {
			p.fail(fmt.Errorf("tcp: %w", err))
		}
	}
}

// abandon ends an item that was refused with verdict while its payload was still going out.
func (p *peer) abandon(it *postq.Item, verdict error) {
	if it.Sent < it.Total {
		p.frame(it, kindAbandon, 0)
	}
	err := p.write()
	p.q.Refuse(it, verdict)
	if err != nil {
		p.fail(err)
	}
}

// build makes the next frame of it, up to FrameBytes of payload and maxIovecs pieces,
// and moves the item's cursor.
func (p *peer) build(it *postq.Item) {
	k := kindData
	if it.Sent == 0 {
		k = kindOpen
	}
	p.iov = append(p.iov[:0], unix.Iovec{}) // of the head, filled in by frame
	budget := p.tr.cfg.FrameBytes
	var n uint64
	var run []byte // the last piece: segments that follow each other are one
	for it.Seg < len(it.Segments) && budget > 0 && len(p.iov) < maxIovecs {
		src := it.Segments[it.Seg].Src[it.Off:]
		if len(src) > budget {
			src = src[:budget]
			it.Off += budget
		} else {
			it.Seg, it.Off = it.Seg+1, 0
		}
		if follows(run, src) {
			run = run[:len(run)+len(src)]
			p.iov[len(p.iov)-1] = vec(run)
		} else if len(src) > 0 {
			run = src
			p.iov = append(p.iov, vec(run))
		}
		budget -= len(src)
		n += uint64(len(src))
	}
	it.Sent += n
	p.frame(it, k, n)
}

// frame encodes the head of a frame of kind k with n bytes of payload, which are in
// p.iov already, and prepares the vector for write.
func (p *peer) frame(it *postq.Item, k kind, n uint64) {
	h := header{kind: k, seq: it.Seq, payload: n}
	if k == kindOpen {
		h.notify, h.notifyN = it.Notify != nil, len(it.Notify)
		h.grant, h.key = it.Grant, it.Key
		h.segments, h.total = len(it.Segments), it.Total
	}
	size := headerLen + h.segments*entryLen + h.notifyN
	if cap(p.head) < size {
		p.head = make([]byte, size)
	}
	b := p.head[:size]
	h.encode(b)
	at := headerLen
	if k == kindOpen {
		for i := range it.Segments {
			putEntry(b[at:], it.Segments[i].Off, uint64(len(it.Segments[i].Src)))
			at += entryLen
		}
		copy(b[at:], it.Notify)
	}
	if k == kindAbandon {
		p.iov = append(p.iov[:0], unix.Iovec{})
	}
	p.iov[0] = vec(b)
	p.rest = p.iov
}

// write sends p.rest. When it returns the kernel does not read the segments any more.
func (p *peer) write() error {
	if len(p.rest) == 0 {
		return nil
	}
	err := p.raw.Write(p.writeReady)
	clear(p.iov)
	p.rest = nil
	if err == nil && p.errno != 0 {
		err = p.errno
	}
	return err
}

// tryWrite is called by the runtime when the socket may be writable. False: wait.
func (p *peer) tryWrite(fd uintptr) bool {
	for len(p.rest) > 0 {
		var n int
		n, p.errno = writev(fd, p.rest)
		if p.errno == syscall.EAGAIN {
			return false
		}
		if p.errno != 0 {
			return true
		}
		p.rest = advance(p.rest, n)
	}
	return true
}

// receive reads answers until the connection ends.
func (p *peer) receive() {
	buf := make([]byte, 256*answerLen)
	have := 0
	for {
		n, err := p.tcp.Read(buf[have:])
		have += n
		used := 0
		for ; have-used >= answerLen; used += answerLen {
			if aerr := p.answer(buf[used:]); aerr != nil {
				p.fail(aerr)
				return
			}
		}
		have = copy(buf, buf[used:have])
		if err != nil {
			p.fail(fmt.Errorf("tcp: receive: %w", err))
			return
		}
	}
}

// answer settles one write.
func (p *peer) answer(b []byte) error {
	a, err := decodeAnswer(b)
	if err != nil {
		return err
	}
	verdict, known := a.code.err()
	if known && p.q.Settle(a.seq, verdict) {
		return nil
	}
	if p.Err() == nil { // after the end nothing is outstanding
		p.tr.stats.protocolErrors.Add(1)
	}
	return errAnswer
}
