package nixl

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// errHung is the cause of an end that the watchdog has made.
var errHung = errors.New("nixl: the helper process did not answer (stopped, or stuck inside the library); it was killed")

// HelperError is the end of a helper process that nobody wanted.
type HelperError struct {
	Reason error  // what it said, or how it ended
	Tail   string // last lines of its standard error
}

// Error names the reason, and the library's own last words if it left any.
func (e *HelperError) Error() string {
	if e.Tail == "" {
		return fmt.Sprintf("nixl: helper process: %v", e.Reason)
	}
	return fmt.Sprintf("nixl: helper process: %v (its last words: %s)", e.Reason, e.Tail)
}

// Unwrap gives the reason.
func (e *HelperError) Unwrap() error { return e.Reason }

// child is a helper process seen from its worker. Three goroutines: one, locked to its
// thread, is the process's parent for the kernel and reaps it; one reads what it says; one
// pings it. The last event is always end, after the process is dead and reaped: from
// then on nothing of it can touch memory.
type child struct {
	cmd  *exec.Cmd
	uc   *net.UnixConn
	tail lastLines

	started chan error    // cap 1; result of starting the process
	ready   chan struct{} // closed when the library is there and the memory registered
	dead    chan struct{} // closed when it is reaped
	wg      sync.WaitGroup

	// on is called by the reading goroutine for every frame, in order; the body is valid
	// during the call. end is called once, last; lost: the owner has not asked for it before.
	on  func(k kind, body []byte) error
	end func(cause error, lost bool)
	// tick is called by the watchdog, once each watch interval.
	tick func()

	sendMu sync.Mutex // one frame at a time

	mu    sync.Mutex
	cause error  // why it ended; the first stays
	asked bool   // that was the owner's wish
	ping  uint64 // last one sent
	pong  uint64 // last one answered
}

// newChild makes a helper that is not started.
func newChild(on func(kind, []byte) error, end func(error, bool), tick func()) *child {
	return &child{on: on, end: end, tick: tick, started: make(chan error, 1), ready: make(chan struct{}), dead: make(chan struct{})}
}

// start starts the process and gives it its start command. files become its descriptors from
// firstRegionFD on; they stay the caller's and may be closed when start returns. After an
// error no method may be called and no event comes.
func (h *child) start(c *Config, j startJob, files []*os.File) error {
	ours, theirs, err := socketPair()
	if err != nil {
		return err
	}
	h.uc = ours
	h.cmd = exec.Command(c.Helper[0], c.Helper[1:]...)
	h.cmd.Env = append(os.Environ(), c.env()...)
	h.cmd.ExtraFiles = append([]*os.File{theirs}, files...)
	h.cmd.Stderr = &h.tail
	h.cmd.WaitDelay = time.Second // what the library may have started can hold standard error open for longer
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	h.wg.Go(h.parent)
	err = <-h.started
	_ = theirs.Close()
	if err != nil {
		h.wg.Wait()
		_ = ours.Close()
		return fmt.Errorf("nixl: start helper process %s: %w", c.Helper[0], err)
	}
	h.wg.Go(h.read)
	h.wg.Go(func() { h.watch(c.Watch, c.Misses) })
	if err := h.sendJSON(cmdStart, j); err != nil {
		h.kill(err, false)
	}
	return nil
}

// parent is the thread that the kernel takes for the helper's parent: a helper is killed
// when it ends, so it is kept until the helper is dead. It is given back then, not ended: it may
// be the parent of somebody else's process.
func (h *child) parent() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := h.cmd.Start()
	h.started <- err
	if err != nil {
		return
	}
	_ = h.cmd.Wait() // how it ended is in ProcessState
	close(h.dead)
}

// read hands over what the helper says, until it is dead.
func (h *child) read() {
	f := frames{r: h.uc}
	var err error
	for err == nil {
		var k kind
		var body []byte
		if k, body, err = f.next(maxBody); err != nil {
			break
		}
		switch k {
		case evReady:
			select {
			case <-h.ready:
				err = errOrder
			default:
				close(h.ready)
				err = h.on(k, body)
			}
		case evPong:
			h.mu.Lock()
			err = words(body, &h.pong)
			h.mu.Unlock()
		case evFailed:
			err = &HelperError{Reason: errors.New(string(body)), Tail: h.tail.String()}
		default:
			err = h.on(k, body)
		}
	}
	h.kill(err, false)
	<-h.dead
	_ = h.uc.Close()
	h.end(h.reason())
}

// watch pings the helper and kills it after misses intervals without an answer. It
// counts its own ticks, not time, so that a worker that was stopped itself does not blame
// the helper.
// It begins when the helper is ready: how long a start may take is for who waits for it.
func (h *child) watch(every time.Duration, misses int) {
	select {
	case <-h.ready:
	case <-h.dead:
		return
	}
	t := time.NewTicker(every)
	defer t.Stop()
	missed, unsent := 0, false
	for {
		select {
		case <-h.dead:
			return
		case <-t.C:
		}
		h.mu.Lock()
		if h.ping == h.pong {
			h.ping++
			missed, unsent = 0, true
		} else {
			missed++
		}
		n := h.ping
		h.mu.Unlock()
		if missed >= misses {
			h.kill(errHung, false)
			return
		}
		if unsent {
			unsent = !h.trySend(appendWords(nil, cmdPing, n), every)
		}
		if h.tick != nil {
			h.tick()
		}
	}
}

// kill ends the helper; the first cause is kept, and whether it was the owner's wish. Never blocks.
func (h *child) kill(cause error, asked bool) {
	h.mu.Lock()
	if h.cause == nil {
		h.cause, h.asked = cause, asked
	}
	h.mu.Unlock()
	_ = h.cmd.Process.Kill() // closes its end of the socket; one that is reaped already is left alone
}

// reason is why the helper has ended, after its death, and whether nobody had asked for it.
func (h *child) reason() (cause error, lost bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.asked && ended(h.cause) {
		return &HelperError{Reason: fmt.Errorf("it ended by itself: %v", h.cmd.ProcessState), Tail: h.tail.String()}, true
	}
	return h.cause, !h.asked
}

// ended: the other end of a stream is closed, or ours was to wake a reader.
func ended(err error) bool {
	for _, e := range []error{io.EOF, io.ErrUnexpectedEOF, unix.ECONNRESET, unix.EPIPE, net.ErrClosed, os.ErrDeadlineExceeded} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// wait returns when the helper is dead and its goroutines have ended.
func (h *child) wait() { h.wg.Wait() }

// send writes one or more whole frames. A helper that takes nothing is the watchdog's business.
func (h *child) send(b []byte) error {
	h.sendMu.Lock()
	defer h.sendMu.Unlock()
	_, err := h.uc.Write(b)
	return err
}

// trySend sends unless somebody else is sending or the helper takes nothing for a while.
// The helper's end of the socket closes with it, so a deadline that is lost here harms nobody.
func (h *child) trySend(b []byte, wait time.Duration) bool {
	if !h.sendMu.TryLock() {
		return false
	}
	defer h.sendMu.Unlock()
	_ = h.uc.SetWriteDeadline(time.Now().Add(wait))
	_, err := h.uc.Write(b)
	_ = h.uc.SetWriteDeadline(time.Time{})
	return err == nil
}

func (h *child) sendJSON(k kind, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return h.send(append(appendFrame(nil, k, len(b)), b...))
}

// socketPair makes the connection to a helper: our end as a connection, its end as a file.
func socketPair() (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("nixl: make socket pair: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "helper")
	mine := os.NewFile(uintptr(fds[0]), "worker")
	defer mine.Close() // FileConn duplicates
	c, err := net.FileConn(mine)
	if err != nil {
		_ = theirs.Close()
		return nil, nil, fmt.Errorf("nixl: make socket pair: %w", err)
	}
	return c.(*net.UnixConn), theirs, nil
}

// lastLines keeps the end of what a helper writes.
type lastLines struct {
	mu  sync.Mutex
	buf []byte
}

// tailMax bounds the memory that a talkative library takes, in bytes.
const tailMax = 8 << 10

// Write implements io.Writer.
func (l *lastLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf = append(l.buf, p...)
	if over := len(l.buf) - tailMax; over > 0 {
		l.buf = append(l.buf[:0], l.buf[over:]...)
	}
	return len(p), nil
}

// crashes begin the lines that tell more than what follows them.
var crashes = []string{"SIG", "fatal error:", "panic:", "terminate called"}

// String is the first line of a crash with the one after it, or else the last three lines, in one.
func (l *lastLines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := strings.Split(string(bytes.TrimSpace(l.buf)), "\n")
	show := lines[max(0, len(lines)-3):]
	for i, line := range lines {
		if slices.ContainsFunc(crashes, func(c string) bool { return strings.HasPrefix(line, c) }) {
			show = lines[i:min(i+2, len(lines))]
			break
		}
	}
	return strings.Join(show, " | ")
}
