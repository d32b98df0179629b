package nixl

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Polling of the library. It offers nothing to wait on, and a Go sleep of 20 µs takes
// about a millisecond; so a helper that has something under way looks without a pause for
// spinTime, then with naps, which the kernel keeps.
const (
	spinTime = 60 * time.Microsecond
	nap      = 30 * time.Microsecond
	// afterwards is how long after the last work a helper still looks every shortWait, so that the
	// steps by which the library makes a connection do not wait for idleWait each.
	afterwards = time.Second
	shortWait  = 500 * time.Microsecond
	// idleWait is how long a helper with nothing under way waits for a command before it
	// lets the library do its housekeeping.
	idleWait = 20 * time.Millisecond
	// timerSlack is how late the kernel may end a nap, in ns; it takes 50 µs unless told.
	timerSlack = 1000
	// clockEvery is how many looks share one reading of the clock.
	clockEvery = 16
	// maxPrepared bounds the prepared blocks of a side: beyond it a list costs more memory
	// (some 100 bytes a block) than it saves time.
	maxPrepared = 1 << 18
)

// Main is a helper process: it owns an agent, does what the worker at descriptor 3 says
// and ends with it. Its result is the exit status.
func Main() int { return newHelper().main() }

func newHelper() *helper {
	return &helper{out: make([]byte, 0, 4096), in: make([]byte, 2*(headerLen+maxBody))}
}

func (h *helper) main() int {
	runtime.LockOSThread()
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, timerSlack, 0, 0, 0) // of this thread; refused, naps are longer
	if err := h.run(); err != nil {
		text := err.Error()
		if h.send(append(appendFrame(nil, evFailed, len(text)), text...)) != nil { // the worker is gone, or was never there
			fmt.Fprintln(os.Stderr, "nixl helper:", text)
		}
		return 1
	}
	return 0
}

// helper is the state of the process. One goroutine, locked to its thread.
type helper struct {
	a       *agent
	regions []region
	block   uint64  // of prepared blocks, 0 if there are none
	own     uintptr // prepared blocks of the first region, or 0

	peer       *byte // name of the agent to write to, or nil
	base, size uint64
	theirs     uintptr // its prepared blocks, or 0

	flying []flying
	active bool

	in         []byte // in[r:w] is read and not used
	r, w       int
	out        []byte
	job        job
	copies     []copyOf
	from, to   []int32
	disconnect bool // the worker has closed its end

	// extra takes commands that the transport does not have; experiments in tests set it.
	extra func(k kind, body []byte) error
}

// flying is a posted request.
type flying struct {
	id  uint64
	req uintptr
}

var errWorkerGone = errors.New("the worker is gone")

// run works until the worker goes or the library fails.
func (h *helper) run() error {
	var st unix.Stat_t // of a file that the runtime has there, if nobody gave us a socket
	err := unix.Fstat(helperFD, &st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		err = unix.ENOTSOCK
	}
	if err == nil {
		err = unix.SetNonblock(helperFD, true)
	}
	if err != nil {
		return fmt.Errorf("no socket at descriptor %d; this command is for Baton's own use: %w", helperFD, err)
	}
	for !h.disconnect {
		busy, err := h.commands()
		if err != nil {
			return err
		}
		for !busy {
			if busy, err = h.poll(); err != nil {
				return err
			}
		}
	}
	return nil
}

// commands handles what has come. busy: look again at once.
func (h *helper) commands() (busy bool, err error) {
	n, err := unix.Read(helperFD, h.in[h.w:])
	switch {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("read command: %w", err)
	case n == 0:
		h.disconnect = true
		return true, nil
	}
	h.w += n
	for h.w-h.r >= headerLen {
		k, size, err := parseHeader(h.in[h.r:h.w], maxBody)
		if err != nil {
			return false, err
		}
		if h.w-h.r < headerLen+size {
			break
		}
		body := h.in[h.r+headerLen : h.r+headerLen+size]
		h.r += headerLen + size
		if err := h.command(k, body); err != nil {
			return false, err
		}
	}
	h.w = copy(h.in, h.in[h.r:h.w])
	h.r = 0
	return true, nil
}

// poll lets the library work until a command can be read.
func (h *helper) poll() (command bool, err error) {
	fds := []unix.PollFd{{Fd: helperFD, Events: unix.POLLIN}}
	since := time.Now()
	for looks := 1; ; looks++ {
		moved := false
		if h.a != nil {
			if moved, err = h.progress(); err != nil {
				return false, err
			}
		}
		if moved {
			since = time.Now()
		}
		busy := len(h.flying) > 0 || h.active
		if busy && looks%clockEvery != 0 {
			continue
		}
		var wait time.Duration // a command ends each of them
		switch quiet := time.Since(since); {
		case h.a == nil:
			wait = time.Hour
		case busy && quiet > spinTime:
			wait = nap
		case busy:
		case quiet < afterwards:
			wait = shortWait
		default:
			wait = idleWait
		}
		ts := unix.NsecToTimespec(int64(wait))
		n, err := unix.Ppoll(fds, &ts, nil)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return false, fmt.Errorf("wait for a command: %w", err)
		}
		if n > 0 {
			return true, nil
		}
	}
}

// progress looks at every request and at the inbox. moved: something has happened.
func (h *helper) progress() (moved bool, err error) {
	left := h.flying[:0]
	for _, f := range h.flying {
		done, err := h.a.status(f.req)
		if err != nil {
			return false, fmt.Errorf("write: %w", err)
		}
		if !done {
			left = append(left, f)
			continue
		}
		moved = true
		if err := h.finish(f); err != nil {
			return false, err
		}
	}
	h.flying = left
	if h.peer != nil && len(h.flying) > 0 {
		return moved, nil // the status calls have done the library's work
	}
	err = h.a.receive(func(note []byte) {
		moved = true
		h.out = append(appendFrame(h.out, evNote, len(note)), note...)
	})
	if err != nil {
		return false, err
	}
	return moved, h.flush()
}

// finish gives a complete request up and says so.
func (h *helper) finish(f flying) error {
	if err := h.a.release(f.req); err != nil {
		return err
	}
	h.out = appendWords(h.out, evDone, f.id)
	return h.flush()
}

func (h *helper) flush() error {
	if len(h.out) == 0 {
		return nil
	}
	err := h.send(h.out)
	h.out = h.out[:0]
	return err
}

// send writes all of b, waiting for a worker that does not read.
func (h *helper) send(b []byte) error {
	for len(b) > 0 {
		n, err := unix.Write(helperFD, b)
		switch {
		case err == nil:
			b = b[n:]
		case errors.Is(err, unix.EAGAIN):
			_, _ = unix.Poll([]unix.PollFd{{Fd: helperFD, Events: unix.POLLOUT}}, -1)
		case errors.Is(err, unix.EINTR):
		default:
			return fmt.Errorf("%w: %w", errWorkerGone, err)
		}
	}
	return nil
}

// command does what the worker says.
func (h *helper) command(k kind, body []byte) error {
	if (h.a == nil) != (k == cmdStart) && k != cmdPing {
		return errOrder
	}
	switch k {
	case cmdStart:
		return h.start(body)
	case cmdConnect:
		return h.connect(body)
	case cmdWrite:
		if err := h.job.parse(body); err != nil {
			return err
		}
		return h.write(&h.job)
	case cmdActive:
		var on uint64
		err := words(body, &on)
		h.active = on != 0
		return err
	case cmdPing:
		var n uint64
		if err := words(body, &n); err != nil {
			return err
		}
		return h.send(appendWords(nil, evPong, n))
	default:
		if h.extra != nil {
			return h.extra(k, body)
		}
		return errOrder
	}
}

// start opens the library, maps and registers the memory.
func (h *helper) start(body []byte) error {
	var j startJob
	if err := json.Unmarshal(body, &j); err != nil {
		return fmt.Errorf("read start command: %w", err)
	}
	l, err := openLibrary(j.Library)
	if err != nil {
		return err
	}
	kind, ok := memoryKinds[j.Kind]
	if !ok {
		return fmt.Errorf("unknown kind of memory %q", j.Kind)
	}
	a, err := newAgent(l, j.Name, j.Backend, j.Params, kind, j.Device)
	if err != nil {
		return err
	}
	for i, size := range j.Regions {
		addr, err := mapRegion(firstRegionFD+i, size)
		if err != nil {
			return err
		}
		r, err := a.register(addr, size)
		if err != nil {
			return err
		}
		h.regions = append(h.regions, r)
	}
	if n := prepared(j.Regions[0], j.Block); n > 0 {
		h.block = j.Block
		if h.own, err = a.prepare("", h.regions[0].addr, j.Block, n); err != nil {
			return fmt.Errorf("prepare %d blocks: %w", n, err)
		}
	}
	md, err := a.metadata()
	if err != nil {
		return err
	}
	h.a = a
	return h.say(evReady, readyInfo{Metadata: md, Base: uint64(h.regions[0].addr)})
}

// prepared is how many blocks of a memory are worth preparing.
func prepared(size, block uint64) int {
	if block == 0 || size/block > maxPrepared {
		return 0
	}
	return int(size / block)
}

func (h *helper) say(k kind, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return h.send(append(appendFrame(nil, k, len(b)), b...))
}

// mapRegion maps shared memory that the worker has handed over, and closes its descriptor.
func mapRegion(fd int, size uint64) (uintptr, error) {
	b, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return 0, fmt.Errorf("map %d bytes of descriptor %d: %w", size, fd, err)
	}
	return uintptr(unsafe.Pointer(&b[0])), unix.Close(fd)
}

// connect opens the way to another agent.
func (h *helper) connect(body []byte) error {
	var j connectJob
	if err := json.Unmarshal(body, &j); err != nil {
		return fmt.Errorf("read connect command: %w", err)
	}
	name, err := h.a.connect(j.Metadata)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	h.peer, h.base, h.size = cstring(name), j.Base, j.Size
	if n := prepared(j.Size, j.Block); n > 0 && h.own != 0 && j.Block == h.block {
		if h.theirs, err = h.a.prepare(name, uintptr(j.Base), j.Block, n); err != nil {
			return fmt.Errorf("prepare %d blocks of %s: %w", n, name, err)
		}
	}
	return h.send(appendFrame(nil, evConnected, 0))
}

// write posts a job. Every offset is checked here too: a fault of the worker must not
// become a store at a wild address.
func (h *helper) write(j *job) error {
	if h.peer == nil || int(j.Region) >= len(h.regions) {
		return errOrder
	}
	local := h.regions[j.Region]
	for _, b := range j.Blocks {
		if b.Len > local.size || b.From > local.size-b.Len || b.Len > h.size || b.To > h.size-b.Len {
			return fmt.Errorf("block of %d bytes from %d to %d is outside the memory", b.Len, b.From, b.To)
		}
	}
	if len(j.Blocks) == 0 {
		if err := h.a.notify(h.peer, j.Note); err != nil {
			return err
		}
		return h.send(appendWords(nil, evDone, j.ID))
	}
	req, err := h.request(local, j)
	if err != nil {
		return err
	}
	f := flying{id: j.ID, req: req}
	done, err := h.a.post(req)
	switch {
	case err != nil:
		return fmt.Errorf("write: %w", err)
	case done:
		return h.finish(f)
	}
	h.flying = append(h.flying, f)
	return nil
}

// request makes the library's request of a job: by index where it can.
func (h *helper) request(local region, j *job) (uintptr, error) {
	if j.Index && h.theirs != 0 && j.Region == 0 {
		h.from, h.to = h.from[:0], h.to[:0]
		for _, b := range j.Blocks {
			h.from = append(h.from, int32(b.From/h.block))
			h.to = append(h.to, int32(b.To/h.block))
		}
		return h.a.byIndex(h.own, h.from, h.theirs, h.to, j.Note)
	}
	h.copies = h.copies[:0]
	for _, b := range j.Blocks {
		h.copies = append(h.copies, copyOf{from: local.addr + uintptr(b.From), to: uintptr(h.base + b.To), n: b.Len})
	}
	return h.a.byAddress(h.peer, h.copies, j.Note)
}

// noteOf is the notification of write seq on the connection nonce.
func noteOf(nonce, seq uint64) []byte {
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, 16), nonce)
	return binary.LittleEndian.AppendUint64(b, seq)
}
