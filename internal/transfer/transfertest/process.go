package transfertest

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
)

// writer is the test binary run again as a writing process. Signals go to this process
// only, which the test started and waits for.
type writer struct {
	t     *testing.T
	cmd   *exec.Cmd
	lines chan string // stdout
	end   func()      // kills and waits; idempotent
}

// startWriter starts a process that writes the first n bytes over and over on a fresh
// session, and waits until several writes have landed: from then on it is nearly
// always in the middle of one.
func (r *rig) startWriter(n int) (*writer, transfer.Grant) {
	r.t.Helper()
	s := r.open()
	g := r.allow(s, transfer.Span{Off: 0, Len: uint64(n)})
	job, err := json.Marshal(writerJob{
		Descriptor: r.target.Descriptor(), Session: s, Grant: g.ID, Key: g.Key, Bytes: n, Outstanding: 3,
	})
	if err != nil {
		r.t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	w := &writer{t: r.t, lines: make(chan string, 16)}
	w.cmd = exec.Command(exe)
	w.cmd.Env = append(os.Environ(), jobEnv+"="+string(job))
	w.cmd.Stderr = os.Stderr
	setDeathSignal(w.cmd)
	stdin, err := w.cmd.StdinPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	stdout, err := w.cmd.StdoutPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	if err := w.cmd.Start(); err != nil {
		r.t.Fatalf("start writer: %v", err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(w.lines)
		for sc := bufio.NewScanner(stdout); sc.Scan(); {
			w.lines <- sc.Text()
		}
	})
	w.end = sync.OnceFunc(func() {
		_ = w.cmd.Process.Kill() // works on a stopped process too
		wg.Wait()
		_ = w.cmd.Wait()
		_ = stdin.Close()
	})
	r.t.Cleanup(w.end)
	if line := w.line(); line != "ready" {
		r.t.Fatalf("writer: %s", line)
	}
	r.sink.await(r.t, "landings of the writer process", func() bool { return r.sink.landedOf(g.ID) >= 5 })
	return w, g
}

// line is the writer's next line.
func (w *writer) line() string {
	w.t.Helper()
	select {
	case l, ok := <-w.lines:
		if !ok {
			w.t.Fatal("the writer has ended")
		}
		return l
	case <-time.After(patience):
		w.t.Fatal("never came: a line of the writer")
		return ""
	}
}

// stop stops the process and waits until the kernel says that it is stopped.
func (w *writer) stop() {
	w.t.Helper()
	pid := w.cmd.Process.Pid
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		w.t.Fatalf("stop writer: %v", err)
	}
	for {
		var st syscall.WaitStatus
		_, err := syscall.Wait4(pid, &st, syscall.WUNTRACED, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			w.t.Fatalf("wait for the writer to stop: %v", err)
		case st.Stopped():
			return
		default:
			w.t.Fatalf("the writer ended: %v", st)
		}
	}
}

func (w *writer) cont() {
	w.t.Helper()
	if err := syscall.Kill(w.cmd.Process.Pid, syscall.SIGCONT); err != nil {
		w.t.Fatalf("continue writer: %v", err)
	}
}

// stillWorks shows with a round trip that the target serves others; as a side effect
// whatever was in its hands has been dealt with.
func (r *rig) stillWorks() {
	r.t.Helper()
	p, s := r.dial()
	r.must(p, "write of another session", write(r.allow(s, transfer.Span{}), "alive"))
}

const processBytes = 4 << 20

// testWriterKilled: kill -9 in mid-write is noticed and fences.
func testWriterKilled(t *testing.T, o Options) {
	r := newRig(t, o, processBytes+4096, nil)
	w, g := r.startWriter(processBytes)
	w.end()
	r.awaitFenced(g.Session)
	after := r.snapshot()
	r.stillWorks()
	r.same("after Fenced", after)
	if !r.target.Revoke(g.ID) {
		t.Error("a grant of a dead writer is not fenced")
	}
	if err := r.target.Allow(transfer.Grant{ID: g.ID + 1000, Session: g.Session}); err == nil {
		t.Error("a dead session got a grant")
	}
	r.refuseDial("the session of a dead writer", g.Session)
	r.same("at the end", after)
}

// testWriterStoppedRevoke: a stopped writer cannot hold Revoke, and when it runs on its
// write goes nowhere, or Revoke has said that it is not fenced and Revoked comes first.
func testWriterStoppedRevoke(t *testing.T, o Options) {
	r := newRig(t, o, processBytes+4096, nil)
	w, g := r.startWriter(processBytes)
	w.stop()
	fenced := r.revoke(g.ID)
	after := r.snapshot()
	r.stillWorks()
	r.sink.mu.Lock()
	if n := r.sink.revoked[g.ID]; n != 0 && !o.GoesOn {
		t.Errorf("Revoked called %d times while the writer is inside", n)
	}
	r.sink.mu.Unlock()
	if n := r.sink.fencedOf(g.Session); n != 0 {
		t.Errorf("Fenced called %d times for a session that is open", n)
	}
	w.cont()
	if l := w.line(); !strings.HasPrefix(l, "refused:") {
		t.Errorf("writer: %s, want its writes refused", l)
	}
	if !fenced {
		r.awaitRevoked(g.ID)
		after = r.snapshot()
		r.stillWorks()
	}
	r.same("after the stopped writer ran on", after)
	w.end()
	r.awaitFenced(g.Session)
}

// testWriterStoppedClose: a stopped writer cannot hold CloseSession; if the transport
// fences, nor Fenced, nor Target.Close.
func testWriterStoppedClose(t *testing.T, o Options) {
	r := newRig(t, o, processBytes+4096, nil)
	w, g := r.startWriter(processBytes)
	w.stop()
	r.within("CloseSession with a stopped writer", func() { r.target.CloseSession(g.Session) })
	r.stillWorks()
	if !o.Caps.Fences && !o.FencesSessions {
		if n := r.sink.fencedOf(g.Session); n != 0 {
			t.Errorf("Fenced called %d times while the writer can still store", n)
		}
		w.end()
		r.awaitFenced(g.Session)
		return
	}
	r.awaitFenced(g.Session)
	after := r.snapshot()
	r.closeTarget()
	r.targetGone = true
	w.cont()
	if l := w.line(); !strings.HasPrefix(l, "refused:") {
		t.Errorf("writer: %s, want its writes refused", l)
	}
	r.same("after the stopped writer ran on", after)
}
