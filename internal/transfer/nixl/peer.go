package nixl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
)

const (
	// slotBytes and slots are the buffer for segments that lie outside the registered source
	// memory. It is only touched when it is needed.
	slotBytes = 1 << 20
	slots     = 4
	// directBytes is the longest piece of registered memory posted at a time. It bounds how long
	// a revoked writer stays inside (some ms on one machine) and how long another room waits.
	directBytes = 8 << 20
	// maxPieces are with the helper at a time.
	maxPieces = 4
	// pieceBlocks bounds a command to the helper.
	pieceBlocks = 4096
	// maxInside writes of a peer may have entered, and laneInside of one grant.
	maxInside  = 64
	laneInside = 4
)

var (
	errAnswer = errors.New("nixl: answer to no outstanding write")
	errNoGo   = errors.New("nixl: a write has made no progress for too long (the target, its helper or the network between is stopped)")
	errGone   = errors.New("the target has closed the session or is gone")
)

// peer is the source's end. The pumping goroutine owns the helper and the segments of
// queued writes, and settles everything at the end, after the helper is dead.
type peer struct {
	tr    *Transport
	tc    *net.TCPConn
	child *child
	out   *outbox
	nonce uint64
	wg    sync.WaitGroup

	session transfer.SessionID

	size   uint64 // of the target's memory
	block  uint64 // of prepared blocks on both sides, or 0
	source []byte // registered memory, or nil
	buffer []byte // slots*slotBytes

	once  sync.Once
	err   error         // set before down is closed; what left-over writes get
	cause error         // set before, too: the first error as it was
	down  chan struct{} // closed by fail

	mu sync.Mutex
	lines
	wake     sync.Cond
	stopped  bool
	pieces   map[uint64]piece // with the helper
	pieceSeq uint64
	free     []int // slots
	moved    bool  // something has happened since the last tick
	still    int   // ticks without
}

// piece is a job that the helper has.
type piece struct {
	f    *flight
	slot int // of the buffer, or -1
}

// newPeer shakes hands over tc and starts the helper, both at the same time. tc is closed if it
// fails.
func newPeer(ctx context.Context, tr *Transport, tc *net.TCPConn, d transfer.Descriptor, s transfer.SessionID) (*peer, error) {
	p := &peer{tr: tr, tc: tc, out: newOutbox(), down: make(chan struct{}), pieces: make(map[uint64]piece), size: d.Size, session: s}
	p.wake.L = &p.mu
	p.lines.init()
	for i := range slots {
		p.free = append(p.free, i)
	}
	stop := context.AfterFunc(ctx, func() { _ = tc.SetDeadline(time.Unix(1, 0)) })
	err := p.open(ctx, s)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w (%v)", context.Cause(ctx), err)
		}
		if p.child != nil {
			p.child.kill(err, true)
			p.child.wait()
		}
		_ = tc.Close() // after the helper's death, see conn.finish
		p.unmap()
		return nil, err
	}
	p.wg.Go(p.pump)
	p.wg.Go(p.control)
	p.wg.Go(func() {
		if err := p.out.run(tc); err != nil {
			p.fail(fmt.Errorf("nixl: send: %w", err))
		}
	})
	return p, nil
}

// open does the handshake.
func (p *peer) open(ctx context.Context, s transfer.SessionID) error {
	_ = tune(p.tc)
	if _, err := p.tc.Write(hello(s)); err != nil {
		return fmt.Errorf("send hello: %w", err)
	}
	ready, connected := make(chan struct{}, 1), make(chan struct{}, 1)
	on := func(k kind, body []byte) error {
		switch k {
		case evReady:
			ready <- struct{}{}
			return nil
		case evConnected:
			connected <- struct{}{}
			return nil
		case evDone:
			return p.done(body)
		default:
			return errOrder
		}
	}
	if err := p.start(on); err != nil {
		return err
	}
	w, err := readWelcome(&frames{r: p.tc})
	if why := p.why(); why != nil {
		return why // and not that its end woke the reader
	}
	if err != nil {
		return err
	}
	if w.Size != p.size {
		return fmt.Errorf("the target's memory has %d bytes, its descriptor says %d", w.Size, p.size)
	}
	p.nonce = w.Nonce
	if w.Block == p.tr.block() && p.source != nil {
		p.block = w.Block
	}
	if err := p.await(ctx, ready, "is not ready"); err != nil {
		return err
	}
	if err := p.child.sendJSON(cmdConnect, connectJob{Metadata: w.Metadata, Base: w.Base, Size: w.Size, Block: w.Block}); err != nil {
		return err
	}
	return p.await(ctx, connected, "has not connected")
}

// await waits for an event of the helper.
func (p *peer) await(ctx context.Context, event <-chan struct{}, not string) error {
	select {
	case <-event:
		return nil
	case <-p.down:
		return p.why()
	case <-ctx.Done():
		return errors.New("the helper process " + not)
	}
}

// why is the first error as it was.
func (p *peer) why() error {
	select {
	case <-p.down:
		return p.cause
	default:
		return nil
	}
}

// start starts the helper over the registered source memory, if there is one, and the buffer.
func (p *peer) start(on func(kind, []byte) error) error {
	fd, err := unix.MemfdCreate("baton-nixl-buffer", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("nixl: create buffer: %w", err)
	}
	buffer := os.NewFile(uintptr(fd), "buffer")
	defer buffer.Close()
	if err := buffer.Truncate(slots * slotBytes); err != nil {
		return fmt.Errorf("nixl: create buffer: %w", err)
	}
	if p.buffer, err = unix.Mmap(fd, 0, slots*slotBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("nixl: map buffer: %w", err)
	}
	sizes, files := []uint64{slots * slotBytes}, []*os.File{buffer}
	if m := p.tr.pool.Load(); m != nil && checkMemory(m.Memory) == nil {
		own, err := unix.FcntlInt(uintptr(m.FD), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("nixl: duplicate memory descriptor: %w", err)
		}
		f := os.NewFile(uintptr(own), "source")
		defer f.Close()
		p.source = m.Bytes
		sizes, files = []uint64{uint64(len(m.Bytes)), sizes[0]}, []*os.File{f, buffer}
	}
	// The helper holds the connection open too, so that its end proves both are gone.
	held, err := p.tc.File()
	if err != nil {
		return fmt.Errorf("nixl: duplicate connection: %w", err)
	}
	defer held.Close()
	defer p.nonblocking()
	cfg := &p.tr.cfg
	j := cfg.job(agentName("source"), sizes...)
	if p.source != nil {
		j.Block = p.tr.block()
	}
	p.child = newChild(on, p.childEnd, p.tick)
	if err := p.child.start(cfg, j, append(files, held)); err != nil {
		p.child = nil
		return err
	}
	p.tr.stats.started.Add(1)
	return nil
}

// nonblocking undoes what File and the start of a process do to the connection, of which the
// duplicate is only another name: without it no deadline would end a read.
func (p *peer) nonblocking() {
	rc, err := p.tc.SyscallConn()
	if err == nil {
		err = rc.Control(func(fd uintptr) { err = unix.SetNonblock(int(fd), true) })
	}
	if err != nil {
		_ = p.tc.Close() // then no read can hang
	}
}

// Kind implements [transfer.Peer].
func (p *peer) Kind() string { return p.tr.Kind() }

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

// fail ends the connection with its first error. The socket is closed by pump, after the helper's
// death.
func (p *peer) fail(err error) {
	p.once.Do(func() {
		p.err, p.cause = transfer.ErrClosed, err
		if !errors.Is(err, transfer.ErrClosed) {
			p.err = fmt.Errorf("%w: %w", transfer.ErrPeerLost, err)
		}
		close(p.down) // before anybody is woken, who then finds the cause
		p.mu.Lock()
		p.stopped = true
		p.mu.Unlock()
		p.wake.Broadcast()
		p.child.kill(p.err, true)
		_ = p.tc.SetDeadline(time.Unix(1, 0)) // wakes who reads or writes
		p.out.close()
	})
}

// childEnd hears that the helper is dead.
func (p *peer) childEnd(err error, lost bool) {
	if lost {
		p.tr.lostHelper("source", p.session, err)
	}
	p.fail(err)
}

// tick is called by the helper's watchdog: a helper that lives is ended all the same when writes do not move, be
// it that the library does not finish a piece or that the target does not answer.
func (p *peer) tick() {
	p.mu.Lock()
	if p.moved || len(p.flights) == 0 {
		p.still = 0
	} else {
		p.still++
	}
	p.moved = false
	late := p.still >= p.tr.cfg.Stall && !p.stopped
	p.mu.Unlock()
	if late {
		p.tr.stats.stalled.Add(1)
		p.tr.cfg.Log.Warn("a write makes no progress: its session is ended", "transport", "nixl", "session", uint64(p.session))
		p.fail(errNoGo)
	}
}

// unmap lets the buffer go; the helper has no part in it any more.
func (p *peer) unmap() {
	if p.buffer != nil {
		_ = unix.Munmap(p.buffer)
	}
}

// control reads the target's frames until the connection ends.
func (p *peer) control() {
	f := frames{r: p.tc}
	for {
		k, body, err := f.next(maxWelcome)
		if err != nil {
			if ended(err) {
				err = errGone
			}
			p.fail(fmt.Errorf("nixl: receive: %w", err))
			return
		}
		var seq, verdict uint64
		switch k {
		case ctlAnswer:
			if err = words(body, &seq, &verdict); err == nil {
				err = p.answered(seq, verdict)
			}
		case ctlRevoke:
			if err = words(body, &seq); err == nil {
				p.revoked(transfer.GrantID(seq))
			}
		case ctlBye:
			p.fail(byeError(body))
			return
		default:
			err = errOrder
		}
		if err != nil {
			if p.Err() == nil {
				p.tr.stats.protocolErrors.Add(1)
			}
			p.fail(err)
			return
		}
	}
}
