package tcp

import (
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/postq"
)

// stream is the source's end of one connection. Two goroutines: send owns the
// segments of queued writes and settles everything at the end; receive reads
// the answers. A poster whose small write is the only one sends it itself, as far as the
// socket takes it at once.
type stream struct {
	p   *peer
	tcp *net.TCPConn
	raw syscall.RawConn
	q   *postq.Queue
	// local: the target is on this machine.
	local bool

	// Owned by who has the queue's turn: send or, in post, a poster.
	head       []byte // header, table and notification of the frame being sent
	iov        []unix.Iovec
	rest       []unix.Iovec // of iov, not yet written
	errno      syscall.Errno
	writeReady func(fd uintptr) bool
	writeOnce  func(fd uintptr) bool // does not wait
	writeHere  func(fd uintptr)      // waits on this thread; see line
}

func newStream(p *peer, tcp *net.TCPConn) (*stream, error) {
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &stream{
		p: p, tcp: tcp, raw: raw, local: sameHost(tcp),
		q:   postq.New(postq.Config{Limit: p.tr.cfg.Queue, Open: maxOpen, Segments: maxSegments}),
		iov: make([]unix.Iovec, 0, maxIovecs),
	}
	s.writeReady = s.tryWrite
	s.writeOnce = func(fd uintptr) bool { s.tryWrite(fd); return true }
	s.writeHere = func(fd uintptr) {
		for !s.tryWrite(fd) {
			if err := waitFor(int(fd), unix.POLLOUT, -1); err != 0 {
				s.errno = err
				return
			}
		}
	}
	return s, nil
}

// sendNow sends all of it, or hands it and what is left of the frame to send.
func (s *stream) sendNow(it *postq.Item) {
	s.build(it, s.p.tr.cfg.FrameBytes)
	if it.Sent == it.Total && s.raw.Write(s.writeOnce) == nil && s.errno == 0 && len(s.rest) == 0 {
		clear(s.iov)
		_ = s.q.Return(it, true) // an error is only of a part
		return
	}
	s.q.Hand(it)
}

// send writes frames until the queue fails.
func (s *stream) send() {
	var courtesy postq.Courtesy // to short writes of the peer
	if s == s.p.bulk && s.p.own {
		defer s.p.tr.writers.give()
	}
	for {
		it, ok := s.q.Next()
		if !ok {
			<-s.p.down
			s.q.Drain(s.p.err)
			return
		}
		if len(s.rest) == 0 { // else a poster has begun a frame
			if err := s.q.Answered(it); err != nil {
				s.abandon(it, err)
				continue
			}
			s.build(it, s.turn(courtesy.Left > 0))
		}
		if err := s.write(); err != nil {
			s.p.fail(fmt.Errorf("tcp: send: %w", err))
		}
		if err := s.q.Return(it, it.Sent == it.Total); err != nil {
			s.p.fail(fmt.Errorf("tcp: %w", err))
		}
		if s == s.p.bulk {
			courtesy.See(s.p.shorts.Load(), politeFrames)
			courtesy.Give()
		}
	}
}

// abandon ends an item that was refused with verdict while its payload was still going out.
func (s *stream) abandon(it *postq.Item, verdict error) {
	if it.Sent < it.Total {
		s.frame(it, kindAbandon, 0)
	}
	err := s.write()
	s.q.Refuse(it, verdict)
	if err != nil {
		s.p.fail(err)
	}
}

// turn is how many bytes the next frame may have. Within this machine, where a few MiB take less than a
// millisecond, it is more while nobody waits for a turn and there were no short writes lately: between two frames
// the socket has nothing to do for some 20 µs, a tenth of the time that 1 MiB takes.
func (s *stream) turn(shorts bool) int {
	n := s.p.tr.cfg.FrameBytes
	if s.local && !shorts && s.q.Alone() {
		n = max(n, min(n*lonelyTurns, maxFrame))
	}
	return n
}

// build makes the next frame of it, up to budget bytes of payload and maxIovecs pieces,
// and moves the item's cursor.
func (s *stream) build(it *postq.Item, budget int) {
	k := kindData
	if it.Sent == 0 {
		k = kindOpen
	}
	s.iov = append(s.iov[:0], unix.Iovec{}) // of the head, filled in by frame
	var n uint64
	var run []byte // the last piece: segments that follow each other are one
	for it.Seg < len(it.Segments) && budget > 0 && len(s.iov) < maxIovecs {
		src := it.Segments[it.Seg].Src[it.Off:]
		if len(src) > budget {
			src = src[:budget]
			it.Off += budget
		} else {
			it.Seg, it.Off = it.Seg+1, 0
		}
		if transfer.Follows(run, src) {
			run = run[:len(run)+len(src)]
			s.iov[len(s.iov)-1] = vec(run)
		} else if len(src) > 0 {
			run = src
			s.iov = append(s.iov, vec(run))
		}
		budget -= len(src)
		n += uint64(len(src))
	}
	it.Sent += n
	s.frame(it, k, n)
}

// frame encodes the head of a frame of kind k with n bytes of payload, which are in
// s.iov already, and prepares the vector for write.
func (s *stream) frame(it *postq.Item, k kind, n uint64) {
	h := header{kind: k, seq: it.Seq, payload: n}
	if k == kindOpen {
		h.notify, h.notifyN = it.Notify != nil, len(it.Notify)
		h.grant, h.key = it.Grant, it.Key
		h.segments, h.total = len(it.Segments), it.Total
	}
	size := headerLen + h.segments*entryLen + h.notifyN
	if cap(s.head) < size {
		s.head = make([]byte, size)
	}
	b := s.head[:size]
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
		s.iov = append(s.iov[:0], unix.Iovec{})
	}
	s.iov[0] = vec(b)
	s.rest = s.iov
}

// write sends s.rest. When it returns the kernel does not read the segments any more.
func (s *stream) write() error {
	if len(s.rest) == 0 {
		return nil
	}
	var err error
	if s == s.p.bulk && s.p.own {
		err = s.raw.Control(s.writeHere) // abort wakes it
	} else {
		err = s.raw.Write(s.writeReady)
	}
	clear(s.iov)
	s.rest = nil
	if err == nil && s.errno != 0 {
		err = s.errno
	}
	return err
}

// tryWrite is called by the runtime when the socket may be writable. False: wait.
func (s *stream) tryWrite(fd uintptr) bool {
	for len(s.rest) > 0 {
		var n int
		n, s.errno = writev(fd, s.rest)
		if s.errno == syscall.EAGAIN {
			return false
		}
		if s.errno != 0 {
			return true
		}
		s.rest = advance(s.rest, n)
	}
	return true
}

// receive reads answers until the connection ends.
func (s *stream) receive() {
	buf := make([]byte, 256*answerLen)
	have := 0
	look := newLookout(s.raw)
	for {
		look.begin(spinFor, s.q.Waits)
		n, err := s.tcp.Read(buf[have:])
		look.end()
		have += n
		used := 0
		for ; have-used >= answerLen; used += answerLen {
			if aerr := s.answer(buf[used:]); aerr != nil {
				s.p.fail(aerr)
				return
			}
		}
		have = copy(buf, buf[used:have])
		if err != nil {
			s.p.fail(fmt.Errorf("tcp: receive: %w", err))
			return
		}
	}
}

// answer settles one write.
func (s *stream) answer(b []byte) error {
	a, err := decodeAnswer(b)
	if err != nil {
		return err
	}
	verdict, known := a.code.err()
	if known && s.q.Settle(a.seq, verdict) {
		return nil
	}
	if s.p.Err() == nil { // after the end nothing is outstanding
		s.p.tr.stats.protocolErrors.Add(1)
	}
	return errAnswer
}
