package nixl

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
)

// maxEntries is how many writes of one connection may have entered and not been answered.
const maxEntries = 1 << 16

var (
	errTooMany = errors.New("nixl: too many writes at once")
	errNote    = errors.New("nixl: notification of no write under way")
	errStalled = errors.New("nixl: a writer has not left a revoked grant in time (stopped or cut off); the session was ended")
)

// conn is one source's connection at the target, with the helper that owns the memory for it.
type conn struct {
	t     *target
	tc    *net.TCPConn
	sess  *session // set by join, then constant
	nonce uint64   // first word of its notifications
	out   *outbox
	wg    sync.WaitGroup // of the sending and the delivering goroutine

	// mu is held for moments and is the innermost lock. It also guards the session's entries and their lists.
	mu      sync.Mutex
	child   *child            // nil until started
	entries map[uint64]*entry // that have entered and not been answered

	once  sync.Once
	ended chan struct{} // closed by stop
	cause error         // set before

	// What has happened to entries, for the delivering goroutine.
	fateMu sync.Mutex
	fates  []fate
	more   chan struct{} // cap 1

	activeMu sync.Mutex // orders the commands to the helper; before mu
	active   uint64     // what it was last told
}

// entry is a write that has been let into a grant.
type entry struct {
	seq    uint64
	grant  *grant
	notify []byte // nil: none
	landed bool
	left   bool
}

// fate of an entry.
type fate struct {
	seq  uint64
	left bool // not finished; otherwise landed
}

// serve greets tc and, if its session lets it in, listens until it has ended.
func (t *target) serve(tc *net.TCPConn) {
	defer tc.Close()
	c := &conn{t: t, tc: tc, nonce: randomWord(), out: newOutbox(), entries: make(map[uint64]*entry), ended: make(chan struct{}), more: make(chan struct{}, 1)}
	f := &frames{r: tc}
	id, err := c.hello(f)
	if err != nil {
		if t.door.Pass(tc) {
			t.tr.stats.badHandshakes.Add(1)
		}
		return
	}
	if st := t.join(c, id); st != statusOK {
		t.tr.stats.unknownSessions.Add(1)
		_ = c.welcome(&welcome{Status: st})
		return
	}
	c.wg.Go(func() {
		if err := c.out.run(tc); err != nil {
			c.stop(fmt.Errorf("nixl: send: %w", err))
		}
	})
	c.wg.Go(c.deliver)
	c.stop(c.run(f))
	gone := c.finish()
	_ = tc.Close()
	t.Leave(c, c.sess, gone)
}

// hello reads the first frame.
func (c *conn) hello(f *frames) (transfer.SessionID, error) {
	_ = tune(c.tc)
	_ = c.tc.SetDeadline(time.Now().Add(c.t.tr.cfg.Handshake))
	k, body, err := f.next(8)
	if err != nil {
		return 0, err
	}
	var id uint64
	if k != ctlHello {
		return 0, errOrder
	}
	return transfer.SessionID(id), words(body, (*uint64)(&id))
}

// welcome sends the answer to a hello.
func (c *conn) welcome(w *welcome) error {
	b, err := json.Marshal(w)
	if err != nil {
		return err
	}
	_ = c.tc.SetWriteDeadline(time.Now().Add(answerTimeout))
	_, err = c.tc.Write(append(appendFrame(nil, ctlWelcome, len(b)), b...))
	return err
}

// run starts the helper, lets the source in and handles its frames until the connection
// or the helper has ended.
func (c *conn) run(f *frames) error {
	info, err := c.open()
	if err != nil {
		return err
	}
	w := &welcome{Nonce: c.nonce, Metadata: info.Metadata, Base: info.Base, Size: c.t.size, Block: c.t.tr.block()}
	if err := c.welcome(w); err != nil {
		return fmt.Errorf("nixl: send welcome: %w", err)
	}
	_ = c.tc.SetReadDeadline(time.Time{})
	select {
	case <-c.ended: // the deadline was the signal, and is gone
		return c.cause
	default:
	}
	for {
		k, body, err := f.next(maxBody)
		if err == nil {
			err = c.handle(k, body)
		}
		if err != nil {
			if errors.Is(err, errFrame) || errors.Is(err, errOrder) || errors.Is(err, errTooMany) {
				c.t.tr.stats.protocolErrors.Add(1)
			}
			return err
		}
	}
}

// open starts the helper and waits until it is ready.
func (c *conn) open() (readyInfo, error) {
	cfg := &c.t.tr.cfg
	ready := make(chan readyInfo, 1)
	on := func(k kind, body []byte) error {
		switch k {
		case evReady:
			var r readyInfo
			err := json.Unmarshal(body, &r)
			if err == nil {
				ready <- r
			}
			return err
		case evNote:
			return c.note(body)
		default:
			return errOrder
		}
	}
	child := newChild(on, c.childEnd, c.tick)
	j := cfg.job(agentName("target"), c.t.size)
	if err := child.start(cfg, j, []*os.File{c.t.memory}); err != nil {
		return readyInfo{}, err
	}
	c.t.tr.stats.started.Add(1)
	c.mu.Lock()
	c.child = child
	c.mu.Unlock()
	late := time.NewTimer(cfg.Handshake)
	defer late.Stop()
	select {
	case r := <-ready:
		return r, nil
	case <-c.ended:
		return readyInfo{}, c.cause
	case <-late.C:
		return readyInfo{}, fmt.Errorf("nixl: the helper process was not ready within %v", cfg.Handshake)
	}
}

// childEnd hears that the helper is dead.
func (c *conn) childEnd(err error, lost bool) {
	if lost {
		c.t.tr.lostHelper("target", c.sess.ID, err)
	}
	c.stop(err)
}

// stop ends the connection with its first cause. Any goroutine; never blocks.
func (c *conn) stop(cause error) {
	c.once.Do(func() {
		c.cause = cause
		close(c.ended)
		// Before the end of the helper is seen over there and taken for the cause.
		text := cause.Error()
		c.out.last(c.tc, append(appendFrame(nil, ctlBye, len(text)), text...))
		if child := c.helper(); child != nil {
			child.kill(cause, true)
		}
		_ = c.tc.SetReadDeadline(time.Unix(1, 0)) // wakes run
	})
}

func (c *conn) helper() *child {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.child
}

// finish makes sure that nothing of this connection can store any more: true, or says that
// only the writer's own end would be a proof and it has not come.
func (c *conn) finish() (gone bool) {
	child := c.helper()
	if child != nil {
		child.kill(c.cause, true) // stop may have come before the helper was known
		child.wait()
	}
	c.wg.Wait() // the source has been told
	// Without a helper nobody ever learned how to reach the memory.
	if c.t.fences || child == nil {
		return true
	}
	// The source closes its socket after its helper has died, and the helper holds the
	// socket open too: its end proves that both are gone.
	if errors.Is(c.cause, io.EOF) {
		return true
	}
	_ = c.tc.SetReadDeadline(time.Time{})
	_ = c.tc.CloseWrite()
	_, err := io.Copy(io.Discard, c.tc)
	return err == nil || errors.Is(err, unix.ECONNRESET)
}

// say queues a frame for the source.
func (c *conn) say(frame []byte) { c.out.add(frame) }

// handle does what the source says.
func (c *conn) handle(k kind, body []byte) error {
	switch k {
	case ctlEnter:
		var e enter
		if err := e.parse(body); err != nil {
			return err
		}
		return c.enter(&e)
	case ctlLeft:
		var seq uint64
		if err := words(body, &seq); err != nil {
			return err
		}
		return c.happened(fate{seq: seq, left: true})
	default:
		return errOrder
	}
}

// enter decides whether a write may store, and counts it in.
func (c *conn) enter(e *enter) error {
	c.mu.Lock()
	twice, many := c.entries[e.seq] != nil, len(c.entries) >= maxEntries
	c.mu.Unlock()
	switch {
	case twice:
		return errOrder
	case many:
		return errTooMany
	}
	g := c.t.Live(c.sess, e.grant)
	switch {
	case g == nil || g.Key != e.key:
		c.t.tr.stats.grantRefused.Add(1)
		c.answer(e.seq, verdictGrant)
	case !e.inside(g.Spans):
		c.t.tr.stats.boundsRefused.Add(1)
		c.answer(e.seq, verdictBounds)
	case !c.t.Enter(c, g): // revoked meanwhile
		c.t.tr.stats.grantRefused.Add(1)
		c.answer(e.seq, verdictGrant)
	default:
		c.let(e, g)
		c.activate()
		c.answer(e.seq, verdictEnter)
	}
	return nil
}

// let notes a write that has entered.
func (c *conn) let(e *enter, g *grant) {
	w := &entry{seq: e.seq, grant: g}
	if e.notify != nil {
		w.notify = append([]byte{}, e.notify...)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.entries[e.seq] = w
	g.Own.entered = append(g.Own.entered, w)
}

func (c *conn) answer(seq, verdict uint64) {
	c.out.with(func(b []byte) []byte { return appendWords(b, ctlAnswer, seq, verdict) })
}

// activate tells the helper whether the source may be writing, so that it looks often or not.
func (c *conn) activate() {
	c.activeMu.Lock()
	defer c.activeMu.Unlock()
	c.mu.Lock()
	want := uint64(0)
	if len(c.entries) > 0 {
		want = 1
	}
	c.mu.Unlock()
	if want == c.active {
		return
	}
	c.active = want
	if err := c.child.send(appendWords(nil, cmdActive, want)); err != nil {
		c.child.kill(err, false) // its end stops the connection and says why
	}
}

// note takes a notification of the source's agent: that write is applied.
func (c *conn) note(b []byte) error {
	if len(b) != 16 || binary.LittleEndian.Uint64(b) != c.nonce {
		c.t.tr.stats.protocolErrors.Add(1)
		return errNote
	}
	return c.happened(fate{seq: binary.LittleEndian.Uint64(b[8:])})
}

// happened counts an entry out of its grant and leaves the rest to the delivering goroutine:
// Landed may take a while, and the helper's answers must be read meanwhile.
func (c *conn) happened(f fate) error {
	c.mu.Lock()
	e := c.entries[f.seq]
	if e == nil || e.landed || e.left {
		c.mu.Unlock()
		c.t.tr.stats.protocolErrors.Add(1)
		return errNote
	}
	e.landed, e.left = !f.left, f.left
	c.mu.Unlock()
	c.t.Exit(c, e.grant)
	c.fateMu.Lock()
	c.fates = append(c.fates, f)
	c.fateMu.Unlock()
	select {
	case c.more <- struct{}{}:
	default:
	}
	return nil
}

// deliver hands landed writes to the Sink, those of one grant in the order in which they
// entered, and answers them.
func (c *conn) deliver() {
	for {
		select {
		case <-c.ended:
			return
		case <-c.more:
		}
		c.fateMu.Lock()
		list := c.fates
		c.fates = nil
		c.fateMu.Unlock()
		for _, f := range list {
			c.settle(f.seq)
		}
	}
}

// settle delivers the first writes of the grant of entry seq whose fate is known.
func (c *conn) settle(seq uint64) {
	t := c.t
	c.mu.Lock()
	e := c.entries[seq]
	c.mu.Unlock()
	for e != nil { // else delivered with an earlier one
		c.mu.Lock()
		g := e.grant
		in := g.Own.entered
		if len(in) == 0 || !in[0].landed && !in[0].left {
			c.mu.Unlock()
			return
		}
		head := in[0]
		g.Own.entered = in[1:]
		delete(c.entries, head.seq)
		c.mu.Unlock()
		c.activate()
		if head.left {
			continue
		}
		verdict := verdictGrant
		if t.Live(c.sess, g.ID) == g {
			if head.notify != nil {
				t.sink.Landed(g.ID, head.notify)
			}
			verdict = verdictDone
		} else {
			t.tr.stats.grantRefused.Add(1)
		}
		c.answer(head.seq, verdict)
	}
}

// tick is called by the helper's watchdog: a revoked grant whose writer does not leave ends
// the session.
func (c *conn) tick() {
	select {
	case <-c.ended:
		return
	default:
	}
	late := false
	for _, g := range c.t.Draining(c.sess) {
		g.Own.age++
		late = late || g.Own.age > c.t.tr.cfg.Stall
	}
	if late {
		c.t.tr.stats.stalled.Add(1)
		c.t.tr.cfg.Log.Warn("a revoked writer did not leave: its session is ended", "transport", "nixl", "session", uint64(c.sess.ID))
		c.stop(errStalled)
	}
}
