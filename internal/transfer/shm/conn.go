package shm

import (
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
)

// answerTimeout bounds the sending of answers to a peer that does not read them.
const answerTimeout = 30 * time.Second

const (
	// spinFor is how long a target whose completions follow each other closely looks for the
	// next one before it sleeps.
	spinFor = 50 * time.Microsecond
	// maxAnswers are collected before they are sent.
	maxAnswers = 64
)

// conn is one connection at the target.
type conn struct {
	t    *target
	uc   *net.UnixConn
	sess *session // set by join, then constant

	table *table // its fields under the book's lock

	ctl   control // mapped while serve runs
	ctlFD int     // -1 once passed on

	// Owned by serve.
	buf     []byte // buf[r:w] is read and not yet used
	r, w    int
	answers []byte
	taken   uint64 // completions taken from the ring
	letters uint64 // messages read from the socket, except wakes
	near    bool   // the last completion came soon after the one before it
	entry   [ringSlotLen]byte
}

// serve greets uc and, if its session lets it in, listens until the source has gone.
func (t *target) serve(uc *net.UnixConn) {
	defer uc.Close()
	c := &conn{t: t, uc: uc, ctlFD: -1, buf: make([]byte, 64*messageLen)}
	defer c.free()
	err := c.welcome()
	open := t.door.Pass(uc)
	if c.sess == nil {
		// Without a byte, somebody has looked whether the socket is stale.
		if err != nil && err != io.EOF && open {
			t.tr.stats.badHandshakes.Add(1)
		}
		return
	}
	if err == nil {
		err = c.run()
	}
	gone := err == nil
	if !gone {
		c.dismiss()
		gone = c.drain()
	}
	t.Leave(c, c.sess, gone)
}

// free undoes what welcome has made.
func (c *conn) free() {
	if c.ctlFD >= 0 {
		_ = unix.Close(c.ctlFD)
	}
	if c.ctl.b != nil {
		_ = unix.Munmap(c.ctl.b[:cap(c.ctl.b)])
	}
}

// welcome does the target's half of the handshake. c.sess is set if the source may have
// got the descriptors; otherwise an error means that it was garbage or silence.
func (c *conn) welcome() error {
	_ = c.uc.SetDeadline(time.Now().Add(c.t.tr.cfg.Handshake))
	var b [messageLen]byte
	if _, err := io.ReadFull(c.uc, b[:]); err != nil {
		return err
	}
	var m message
	if err := m.decode(b[:]); err != nil {
		return err
	}
	if m.kind != kindHello {
		return errOrder
	}
	st, why := c.letIn(&m)
	answer := message{kind: kindWelcome, code: uint32(st)}
	var oob []byte
	switch st {
	case statusOK:
		answer.value = c.t.size
		oob = unix.UnixRights(c.t.fd, c.ctlFD)
	case statusVersion, statusUser:
		c.t.tr.stats.badHandshakes.Add(1)
	case statusFailed:
		var errno syscall.Errno
		_ = errors.As(why, &errno) // system calls make no other errors
		answer.value = uint64(errno)
	default:
		c.t.tr.stats.unknownSessions.Add(1)
	}
	if _, _, err := c.uc.WriteMsgUnix(answer.append(nil), oob, nil); err != nil {
		if st != statusOK {
			return nil // it does not want to know
		}
		return fmt.Errorf("send welcome: %w", err)
	}
	if c.ctlFD >= 0 {
		_ = unix.Close(c.ctlFD)
		c.ctlFD = -1
	}
	if st != statusOK {
		return nil
	}
	return c.uc.SetDeadline(time.Time{})
}

// letIn decides about a hello, and joins the session if it is right. why is that of statusFailed.
func (c *conn) letIn(m *message) (st status, why error) {
	if m.code != version {
		return statusVersion, nil
	}
	ours, err := sameUser(c.uc)
	switch {
	case err != nil:
		return statusFailed, err
	case !ours:
		return statusUser, nil
	}
	if c.ctl, c.ctlFD, err = newControl(); err != nil {
		return statusFailed, err
	}
	c.table = newTable(c.ctl)
	return c.t.join(c, transfer.SessionID(m.value)), nil
}

// run handles messages until the source has closed its socket: nil. An error means that
// the source is still there, and broke the protocol or does not take answers.
func (c *conn) run() error {
	for {
		err := c.next()
		switch {
		case err == nil:
			continue
		case ended(err):
			c.last()
			return nil
		case errors.Is(err, errMessage), errors.Is(err, errOrder):
			c.t.tr.stats.protocolErrors.Add(1)
		}
		return err
	}
}

// ended: the other end of the socket is closed. A reset is a close with unread bytes.
func ended(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.ECONNRESET)
}

// next handles one message, from the socket if there is one, otherwise from the ring.
func (c *conn) next() error {
	if c.w-c.r >= messageLen || c.posted() {
		return c.letter()
	}
	if c.ctl.take(c.taken, c.entry[:]) {
		return c.completion()
	}
	if err := c.flush(); err != nil {
		return err
	}
	began := time.Now()
	if c.near && c.spin(began) {
		return nil
	}
	c.ctl.asleep().Store(1)
	var err error
	if !c.pending() {
		err = c.letter()
	}
	c.ctl.asleep().Store(0)
	c.near = time.Since(began) < spinFor
	return err
}

// pending reports whether there is something that needs no waiting.
func (c *conn) pending() bool {
	return c.ctl.ringPut().Load() != c.taken || c.posted()
}

// posted reports whether a message that is not a wake is on the socket, or about to be.
func (c *conn) posted() bool { return int64(c.ctl.letters().Load()-c.letters) > 0 }

// spin looks for a message for up to spinFor; to sleep and be woken takes as long. It is only
// called while messages come that close together, so the last message of a row costs at most
// one spin, and a lonely one none.
func (c *conn) spin(began time.Time) bool {
	for {
		for range 32 {
			if c.pending() {
				return true
			}
		}
		if time.Since(began) > spinFor {
			return false
		}
	}
}

// letter reads and handles one message of the socket.
func (c *conn) letter() error {
	if err := c.fill(messageLen); err != nil {
		return err
	}
	var m message
	if err := m.decode(c.buf[c.r:]); err != nil {
		return err
	}
	c.r += messageLen
	switch m.kind {
	case kindWake:
		return nil
	case kindLeft:
		c.letters++
		return c.t.left(c, m.grant)
	default:
		return errOrder
	}
}

// completion handles what has been taken from the ring.
func (c *conn) completion() error {
	c.taken++
	var m message
	if err := m.decode(c.entry[:]); err != nil {
		return err
	}
	if m.kind != kindDone {
		return errOrder
	}
	c.done(&m, c.entry[messageLen:messageLen+m.notifyN])
	if len(c.answers) >= maxAnswers*messageLen {
		return c.flush()
	}
	return nil
}

// last handles what a source that has gone had left in the ring.
func (c *conn) last() {
	for range ringSlots {
		if !c.ctl.take(c.taken, c.entry[:]) || c.completion() != nil {
			return
		}
		c.answers = c.answers[:0]
	}
}

// done hands a complete write's notification over and answers, unless the grant has been
// revoked meanwhile.
func (c *conn) done(m *message, notify []byte) {
	answer := message{kind: kindAnswer, value: m.value, code: verdictGrant}
	if c.t.Live(c.sess, m.grant) != nil {
		if m.notify {
			c.t.sink.Landed(m.grant, notify)
		}
		answer.code = verdictOK
	} else {
		c.t.tr.stats.grantRefused.Add(1)
	}
	c.answers = answer.append(c.answers)
}

// fill makes at least n bytes available in the buffer, and sends the answers before it
// waits.
func (c *conn) fill(n int) error {
	if c.w-c.r >= n {
		return nil
	}
	c.w = copy(c.buf, c.buf[c.r:c.w])
	c.r = 0
	for c.w < n {
		if err := c.flush(); err != nil {
			return err
		}
		k, err := c.uc.Read(c.buf[c.w:])
		c.w += k
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *conn) flush() error {
	if len(c.answers) == 0 {
		return nil
	}
	_ = c.uc.SetWriteDeadline(time.Now().Add(answerTimeout))
	_, err := c.uc.Write(c.answers)
	c.answers = c.answers[:0]
	return err
}

// dismiss tells the source to go. Any goroutine.
func (c *conn) dismiss() { _ = c.uc.CloseWrite() }

// drain reads until the source has closed its socket: true. False: Close gave it up, or the
// socket is broken in a way that proves nothing.
func (c *conn) drain() bool {
	_ = c.uc.SetDeadline(time.Time{})
	_, err := io.Copy(io.Discard, c.uc)
	return err == nil || ended(err)
}
