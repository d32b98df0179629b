package nixl

import (
	"encoding/json"
	"os"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Commands of experiments, on top of a helper's; each is answered by evActed.
const (
	cmdRelease    kind = 100 // give up every request in flight
	cmdDeregister kind = 101 // the first region
	cmdInvalidate kind = 102 // the metadata of the agent written to
	cmdDestroy    kind = 103 // the agent
	cmdEcho       kind = 104 // nothing
	evActed       kind = 110 // text: the error, or nothing
)

// experimentMain is a helper process that also knows the commands of experiments.
func experimentMain() int {
	h := newHelper()
	h.extra = func(k kind, _ []byte) error {
		var err error
		switch k {
		case cmdRelease:
			for _, f := range h.flying {
				if err = h.a.release(f.req); err != nil {
					break
				}
			}
			h.flying = nil
		case cmdDeregister:
			err = h.a.deregister(h.regions[0])
		case cmdInvalidate:
			err = h.a.invalidate(h.peer)
		case cmdDestroy:
			err = h.a.destroy()
			h.a, h.flying = nil, nil
		case cmdEcho:
		default:
			return errOrder
		}
		text := ""
		if err != nil {
			text = err.Error()
		}
		return h.send(append(appendFrame(nil, evActed, len(text)), text...))
	}
	return h.main()
}

// invalidate forgets another agent's metadata and closes the way to it.
func (a *agent) invalidate(owner *byte) error {
	return a.l.must(fnInvalidateRemoteMD, a.h, uintptr(unsafe.Pointer(owner)))
}

// destroy ends the agent in an orderly way.
func (a *agent) destroy() error { return a.l.must(fnDestroyAgent, a.h) }

// event is what a helper has said.
type event struct {
	kind kind
	body []byte
}

// raw is a helper process driven step by step.
type raw struct {
	*child
	events chan event
	ended  chan error
}

// lab is two helpers, one with memory to write to and one that writes a pattern into all of it.
type lab struct {
	t           *testing.T
	tls         string
	mem, src    []byte
	target, own raw // own is the source's
}

const labBytes = 64 << 20

// shared is mapped memory of n bytes with its descriptor.
func shared(t testing.TB, n int) ([]byte, *os.File) {
	t.Helper()
	fd, err := unix.MemfdCreate("nixl-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "memory")
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(int64(n)); err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b, f
}

// startRaw starts a helper over memory f of n bytes. wrap, if set, is a command line to run it under.
func startRaw(t *testing.T, tls string, f *os.File, n int, wrap ...string) (raw, readyInfo) {
	t.Helper()
	cfg := testConfig()
	cfg.TLS, cfg.Watch = tls, time.Hour // nobody is killed for being slow
	cfg, err := cfg.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	cfg.Helper = append(wrap, cfg.Helper...)
	r := raw{events: make(chan event, 1<<12), ended: make(chan error, 1)}
	r.child = newChild(func(k kind, body []byte) error {
		r.events <- event{k, append([]byte(nil), body...)}
		return nil
	}, func(err error, _ bool) { r.ended <- err }, nil)
	if err := r.start(&cfg, cfg.job(agentName("lab"), uint64(n)), []*os.File{f}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.finish() })
	var info readyInfo
	if err := json.Unmarshal(r.await(t, evReady).body, &info); err != nil {
		t.Fatal(err)
	}
	return r, info
}

// finish kills the helper and returns when it is reaped.
func (r raw) finish() {
	r.kill(errSessionClosed, true)
	r.wait()
}

// await returns the next event of kind k and drops what comes before.
func (r raw) await(t *testing.T, k kind) event {
	t.Helper()
	late := time.After(30 * time.Second)
	for {
		select {
		case e := <-r.events:
			if e.kind == k {
				return e
			}
		case err := <-r.ended:
			r.ended <- err
			t.Fatalf("helper ended while waiting for event %d: %v", k, err)
		case <-late:
			t.Fatalf("event %d of a helper did not come", k)
		}
	}
}

// act gives a command of experiments and returns what it came to.
func (r raw) act(t *testing.T, k kind) string {
	t.Helper()
	if err := r.send(appendFrame(nil, k, 0)); err != nil {
		t.Fatal(err)
	}
	return string(r.await(t, evActed).body)
}

func (r raw) signal(t *testing.T, sig syscall.Signal) {
	t.Helper()
	if err := r.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// newLab starts both and connects them.
func newLab(t *testing.T, tls string, wrapTarget, wrapSource []string) *lab {
	t.Helper()
	l := &lab{t: t, tls: tls}
	mem, memFile := shared(t, labBytes)
	src, srcFile := shared(t, labBytes)
	for i := 0; i < len(src); i += 8 {
		src[i] = 0xa5
	}
	l.mem, l.src = mem, src
	var info readyInfo
	l.target, info = startRaw(t, tls, memFile, labBytes, wrapTarget...)
	l.own, _ = startRaw(t, tls, srcFile, labBytes, wrapSource...)
	if err := l.target.send(appendWords(nil, cmdActive, 1)); err != nil {
		t.Fatal(err)
	}
	if err := l.own.sendJSON(cmdConnect, connectJob{Metadata: info.Metadata, Base: info.Base, Size: labBytes}); err != nil {
		t.Fatal(err)
	}
	l.own.await(t, evConnected)
	l.write(1<<20, 1) // the first one makes the connection
	l.own.await(t, evDone)
	return l
}

// write posts a write of the first n bytes.
func (l *lab) write(n int, id uint64) {
	l.t.Helper()
	j := job{ID: id, Note: noteOf(1, id), Blocks: []block{{0, 0, uint64(n)}}}
	if err := l.own.send(appendWrite(nil, &j)); err != nil {
		l.t.Fatal(err)
	}
}

// stored counts the pages that the pattern has reached, leaving out the first MiB.
func (l *lab) stored() (n int) {
	for at := 1 << 20; at < len(l.mem); at += 4096 {
		if l.mem[at] != 0 {
			n++
		}
	}
	return n
}

// posted posts a write of everything and returns when the source's library has taken it.
func (l *lab) posted() {
	l.t.Helper()
	l.write(labBytes, 2)
	if err := l.own.send(appendWords(nil, cmdEcho, 0)); err != nil {
		l.t.Fatal(err)
	}
	l.own.await(l.t, evActed)
}

// midway posts many writes of everything and returns when they have begun to be stored.
func (l *lab) midway() {
	l.t.Helper()
	for id := range uint64(writesMidway) {
		l.write(labBytes, 2+id)
	}
	late := time.Now().Add(30 * time.Second)
	for l.stored() == 0 {
		if time.Now().After(late) {
			l.t.Fatal("the writes have not begun")
		}
	}
}

// writesMidway take a second or so.
const writesMidway = 30

// late clears the memory and returns how many pages are stored from then on.
func (l *lab) late() int {
	l.t.Helper()
	clear(l.mem)
	return l.settled(quiet)
}

// underWay fails the test if the writes were all done before the act, which then shows nothing.
func (l *lab) underWay() {
	l.t.Helper()
	done := 0
	for {
		select {
		case e := <-l.own.events:
			if e.kind == evDone {
				done++
			}
			continue
		default:
		}
		if done == writesMidway {
			l.t.Error("every write was complete before the act: this shows nothing")
		}
		l.t.Logf("%d of %d writes were complete", done, writesMidway)
		return
	}
}

// settled waits until no page more has been stored for d, and returns how many are.
func (l *lab) settled(d time.Duration) int {
	l.t.Helper()
	for last, n := -1, l.stored(); ; last, n = n, l.stored() {
		if n == last {
			return n
		}
		<-time.After(d)
	}
}

const pages = (labBytes - 1<<20) / 4096
