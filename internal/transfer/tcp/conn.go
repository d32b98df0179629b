package tcp

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/postq"
)

const (
	// bufBytes is the read buffer of a connection: headers and tables are parsed in
	// it. Payload comes through it only where it arrived together with a header.
	bufBytes = 64 << 10
	// Behind more than smallRead bytes of payload only tailBytes are read into the buffer: enough for
	// the next header and a short table, little of the next payload, which would be copied twice.
	smallRead, tailBytes = 32 << 10, 1 << 10
	// maxStore bounds one store under a grant's lock in bytes, and so the time that
	// Revoke waits: well below a millisecond.
	maxStore = 1 << 20
	// Where many bytes are to come, a part of them wakes the reader, not each packet: to read little at a time, and to
	// be in the sender's way at the socket's lock, costs a fifth of the rate. The part is a quarter of what is
	// left of the write, within these bounds: then the copying begins early, and little is left to copy behind the last byte.
	leastWake, mostWake = 64 << 10, 1 << 20
	// localWindow is how many bytes may be on their way from a source on the same machine. There the kernel lets them grow to 32 MiB,
	// though a few suffice to keep both ends busy; what does not fit into the processor's cache is written and read at the pace of memory.
	localWindow = 3 << 20
	// owedBytes of payload bring the answers on their way although more bytes are there, since the
	// source may have a bounded number of writes under way.
	owedBytes = 256 << 10
	// answerTimeout bounds the sending of answers to a peer that does not read them.
	answerTimeout = 30 * time.Second
)

// conn is one established connection at the target. Everything but tcp belongs to
// the goroutine in run.
type conn struct {
	t    *target
	raw  syscall.RawConn // of tcp or line
	sess *session

	// The owner replaces tcp by line with the first long write; abort comes from any goroutine.
	mu   sync.Mutex // guards tcp, line and cut against abort; the owner reads tcp and line without
	tcp  *net.TCPConn
	line *line // nil: there is none
	cut  bool  // abort was called

	buf  []byte // buf[r:w] is read and not yet used
	r, w int

	lastSeq uint64
	open    map[uint64]*inWrite // at most maxOpen; refused ones stay until their bytes have passed
	free    []*inWrite
	answers []byte // not yet sent
	owed    uint64 // payload bytes since answers were sent last

	// Arguments and results of readReady, the only function that reads the socket.
	readReady func(fd uintptr) bool
	iov       []unix.Iovec
	guard     *guard // nil: the vector holds no granted memory
	wait      bool   // wait for the socket; otherwise give up with EAGAIN
	n         int
	errno     syscall.Errno
	fenced    bool // guard was revoked, nothing was read

	look     *lookout
	courtesy postq.Courtesy // to the target's short writes
	// A goroutine that does nothing is on its way, so that the thread that has run it then waits in the poller.
	looking atomic.Bool
	looked  func() // is that goroutine
	low     int    // bytes that wake the reader (SO_RCVLOWAT)
	setLow  func(fd uintptr)
}

// inWrite is a write under way.
type inWrite struct {
	seq    uint64
	grant  *grant // nil once refused
	id     transfer.GrantID
	table  []transfer.Span
	seg    int    // table[seg] is being filled,
	off    uint64 // from this byte on
	left   uint64 // payload bytes of the write still to come
	notify []byte // nil: none
	note   [transfer.MaxNotify]byte
}

func newConn(t *target, tcp *net.TCPConn) (*conn, error) {
	var more []option
	if n := t.tr.cfg.ReceiveBuffer; n > 0 {
		more = append(more, option{unix.SOL_SOCKET, unix.SO_RCVBUF, n})
	} else if sameHost(tcp) {
		more = append(more, option{unix.IPPROTO_TCP, unix.TCP_WINDOW_CLAMP, localWindow})
	}
	if err := tune(tcp, t.tr.cfg.UserTimeout, more...); err != nil {
		return nil, err
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil, err
	}
	c := &conn{
		t: t, tcp: tcp, raw: raw,
		low:  1,
		buf:  make([]byte, bufBytes),
		open: make(map[uint64]*inWrite),
		iov:  make([]unix.Iovec, 0, maxIovecs),
	}
	c.readReady = c.tryRead
	c.look = newLookout(raw)
	// Bytes that came before it was set are not missed, since the kernel then looks again. An error costs speed only.
	c.setLow = func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVLOWAT, c.low) }
	return c, nil
}

// run receives until the connection ends or the peer breaks the protocol.
func (c *conn) run() {
	for {
		err := c.frame()
		if err == nil {
			continue
		}
		for _, broken := range []error{errMagic, errHeader, errTable, errSequence} {
			if errors.Is(err, broken) {
				c.t.tr.stats.protocolErrors.Add(1)
				_ = c.flush() // the answers to what was right before
			}
		}
		return
	}
}

// frame receives one frame.
func (c *conn) frame() error {
	if err := c.fill(headerLen); err != nil {
		return err
	}
	var h header
	if err := h.decode(c.buf[c.r:]); err != nil {
		return err
	}
	c.r += headerLen
	if h.kind == kindOpen {
		return c.openFrame(&h)
	}
	w := c.open[h.seq]
	if w == nil || h.payload > w.left {
		return errSequence
	}
	if h.kind == kindAbandon {
		if w.grant != nil {
			return errSequence // only a refused write may be abandoned
		}
		c.forget(w)
		return nil
	}
	return c.payload(w, h.payload)
}

// openFrame receives a write's description, checks all of it, and then its first bytes.
func (c *conn) openFrame(h *header) error {
	if h.seq != c.lastSeq+1 || len(c.open) >= maxOpen {
		return errSequence
	}
	c.lastSeq = h.seq
	w := c.newWrite()
	w.seq, w.id, w.left = h.seq, h.grant, h.total
	if err := c.table(w, h); err != nil {
		return err
	}
	if h.notify {
		if err := c.fill(h.notifyN); err != nil {
			return err
		}
		w.notify = w.note[:copy(w.note[:h.notifyN], c.buf[c.r:])]
		c.r += h.notifyN
	}
	c.open[w.seq] = w
	w.grant = c.t.lookup(c.sess, h)
	if w.grant == nil {
		c.refuse(w, codeGrant)
	} else if !inside(w.grant.Spans, w.table) {
		c.refuse(w, codeBounds)
	} else {
		c.serves(h.total)
	}
	return c.payload(w, h.payload)
}

// table receives the segment table.
func (c *conn) table(w *inWrite, h *header) error {
	var sum uint64
	for left := h.segments * entryLen; left > 0; {
		if err := c.fillTo(min(left, entryLen), min(left+h.notifyN, bufBytes)); err != nil {
			return err
		}
		n := min(left, c.w-c.r) / entryLen * entryLen
		var ok bool
		if w.table, sum, ok = decodeEntries(w.table, sum, c.buf[c.r:c.r+n]); !ok {
			return errTable
		}
		c.r += n
		left -= n
	}
	if sum != h.total {
		return errTable
	}
	return nil
}

func inside(spans, table []transfer.Span) bool {
	for _, s := range table {
		if !transfer.Within(spans, s) {
			return false
		}
	}
	return true
}

// payload receives n bytes of w, stores them or throws them away, and ends the write
// with its last byte.
func (c *conn) payload(w *inWrite, n uint64) error {
	for n > 0 {
		var got uint64
		var err error
		switch {
		case w.grant == nil:
			got, err = c.discard(n)
		case c.r < c.w:
			got = c.storeBuffered(w, n)
		default:
			got, err = c.storeDirect(w, n)
		}
		if err != nil {
			return err
		}
		n -= got
		w.left -= got
		c.owed += got
	}
	if w.left > 0 {
		return nil
	}
	if w.grant != nil {
		c.complete(w)
	}
	c.forget(w)
	return c.maybeFlush()
}

// complete hands the notification over and answers. All bytes are applied.
func (c *conn) complete(w *inWrite) {
	if !w.grant.Own.live() {
		c.refuse(w, codeGrant)
		return
	}
	if w.notify != nil {
		c.t.sink.Landed(w.id, w.notify)
	}
	c.answers = appendAnswer(c.answers, answer{seq: w.seq, code: codeOK})
}

// refuse answers w and lets the rest of its bytes go by.
func (c *conn) refuse(w *inWrite, why code) {
	w.grant = nil
	if why == codeBounds {
		c.t.tr.stats.boundsRefused.Add(1)
	} else {
		c.t.tr.stats.grantRefused.Add(1)
	}
	c.answers = appendAnswer(c.answers, answer{seq: w.seq, code: why})
}

// discard drops up to n payload bytes.
func (c *conn) discard(n uint64) (uint64, error) {
	if err := c.fill(1); err != nil {
		return 0, err
	}
	got := min(n, uint64(c.w-c.r))
	c.r += int(got)
	return got, nil
}

// fill makes at least n bytes (n <= bufBytes) available in the buffer.
func (c *conn) fill(n int) error { return c.fillTo(n, bufBytes) }

// fillTo is fill that leaves what is behind the first most bytes in the socket.
func (c *conn) fillTo(n, most int) error {
	if c.w-c.r >= n {
		return nil
	}
	c.w = copy(c.buf, c.buf[c.r:c.w])
	c.r = 0
	for c.w < n {
		c.iov = addVec(c.iov[:0], c.buf[c.w:most])
		if err := c.read(nil, 1); err != nil {
			return err
		}
		c.w += c.n
	}
	return nil
}

// read does one readv of c.iov, under g's lock if there is one. Answers are sent before
// it waits for the socket, until there are low bytes, the end or no room for more.
func (c *conn) read(g *guard, low int) error {
	c.guard, c.wait = g, false
	err := c.raw.Read(c.readReady)
	if err == nil && c.errno == syscall.EAGAIN {
		err = c.await(low)
	}
	clear(c.iov)
	c.guard = nil
	if c.line != nil {
		c.giveWay()
	}
	switch {
	case err != nil:
		return err
	case c.fenced:
		return nil
	case c.errno != 0:
		return c.errno
	case c.n == 0:
		return io.EOF
	}
	return nil
}

// await sends the answers and waits for what read wants.
func (c *conn) await(low int) error {
	if err := c.flush(); err != nil {
		return err
	}
	if low != c.low {
		c.low = low
		if err := c.raw.Control(c.setLow); err != nil {
			return err
		}
	}
	spin := spinFor
	if low > 1 {
		spin = spinLong
	}
	c.look.begin(spin, c.alone)
	c.t.awake.Add(-1)
	c.wait = true
	err := c.raw.Read(c.readReady)
	c.t.awake.Add(1)
	c.look.end()
	return err
}

// alone reports whether no other connection has something to do, which may want this core.
func (c *conn) alone() bool { return c.t.awake.Load() == 1 }

// tryRead is called by the runtime when the socket may be readable. True: done, results
// are in c; false: wait for more.
func (c *conn) tryRead(fd uintptr) bool {
	c.fenced = false
	if g := c.guard; g != nil {
		g.mu.Lock()
		if g.revoked {
			g.mu.Unlock()
			c.fenced, c.n, c.errno = true, 0, 0
			return true
		}
		c.n, c.errno = readv(fd, c.iov)
		g.mu.Unlock()
	} else {
		c.n, c.errno = readv(fd, c.iov)
	}
	return c.errno != syscall.EAGAIN || !c.wait
}

// maybeFlush sends the answers if they have become many or are of many bytes.
func (c *conn) maybeFlush() error {
	if len(c.answers) < 64*answerLen && c.owed < owedBytes {
		return nil
	}
	return c.flush()
}

// flush sends the answers. A peer that does not read them loses its connection.
func (c *conn) flush() error {
	if len(c.answers) == 0 {
		return nil
	}
	var err error
	if c.line != nil {
		err = c.line.send(c.answers, answerTimeout)
	} else {
		_ = c.tcp.SetWriteDeadline(time.Now().Add(answerTimeout))
		_, err = c.tcp.Write(c.answers)
	}
	c.answers, c.owed = c.answers[:0], 0
	return err
}

func (c *conn) newWrite() *inWrite {
	if n := len(c.free); n > 0 {
		w := c.free[n-1]
		c.free = c.free[:n-1]
		return w
	}
	return &inWrite{}
}

// forget ends w at this side.
func (c *conn) forget(w *inWrite) {
	delete(c.open, w.seq)
	w.grant, w.notify, w.table, w.seg, w.off = nil, nil, w.table[:0], 0, 0
	c.free = append(c.free, w)
}
