package nixl

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
)

// quick is a configuration whose watchdogs do not let a test wait.
func quick() Config {
	c := testConfig()
	c.Watch, c.Misses, c.Stall = 20*time.Millisecond, 25, 1<<30
	return c
}

// TestHelperLost: a helper that dies or stops, on either side, ends its session with a cause on both sides,
// every write is done, the session is fenced, and the next session gets a new helper.
func TestHelperLost(t *testing.T) {
	needLibrary(t)
	for _, side := range []string{"target", "source"} {
		for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP, syscall.SIGABRT} {
			t.Run(side+" "+sig.String(), func(t *testing.T) {
				target, source := New(quick()), New(quick())
				r := newRig(t, target, source, 64<<20)
				r.allow(t, 1, transfer.Span{Len: 64 << 20})
				if err := recv(t, r.post(t, transfer.Write{Grant: 1, Notify: []byte("first"), Segments: []transfer.Segment{{Src: make([]byte, 100)}}}), "Done of the first write"); err != nil {
					t.Fatal(err)
				}
				hurt, other := r.helpers()
				tr := target
				if side == "source" {
					hurt, other, tr = other, hurt, source
				}
				if err := hurt.cmd.Process.Signal(sig); err != nil {
					t.Fatal(err)
				}
				done := r.post(t, transfer.Write{Grant: 1, Notify: []byte("second"), Segments: []transfer.Segment{{Src: make([]byte, 32<<20)}}})
				err := recv(t, done, "Done of a write on a lost helper")
				if !errors.Is(err, transfer.ErrPeerLost) {
					t.Errorf("write: %v, want %v", err, transfer.ErrPeerLost)
				}
				recv(t, r.peer.Down(), "Down")
				t.Logf("the source's cause: %v", r.peer.Err())
				recv(t, r.sink.fenced, "Fenced")
				recv(t, hurt.dead, "death of the lost helper")
				recv(t, other.dead, "death of the other helper")
				if sig == syscall.SIGSTOP && side == "source" && !errors.Is(r.peer.Err(), errHung) {
					t.Errorf("cause of a stopped helper: %v", r.peer.Err())
				}
				// Who hears first of a death, its worker or the other side, is chance.
				if n := tr.Stats().HelpersLost; n == 0 && sig == syscall.SIGSTOP {
					t.Errorf("no lost helper was counted at the %s", side)
				}
				again(t, r, source)
			})
		}
	}
}

// again shows that a new session works.
func again(t *testing.T, r *rig, source *Transport) {
	t.Helper()
	if err := r.tgt.OpenSession(2); err != nil {
		t.Fatal(err)
	}
	p, err := source.Dial(context.Background(), r.tgt.Descriptor(), 2)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := r.tgt.Allow(transfer.Grant{ID: 2, Key: testKey, Session: 2, Spans: []transfer.Span{{Len: 8}}}); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	if err := p.Post(transfer.Write{Grant: 2, Key: testKey, Segments: []transfer.Segment{{Src: []byte("new life")}}, Done: func(err error) { done <- err }}); err != nil {
		t.Fatal(err)
	}
	if err := recv(t, done, "Done on the new session"); err != nil || string(r.mem[:8]) != "new life" {
		t.Errorf("write on the new session: %v, memory %q", err, r.mem[:8])
	}
}

// TestStalled: a stopped peer is never reported by the library, so the transport counts. Here the watchdogs of the
// helpers themselves are out of the way.
func TestStalled(t *testing.T) {
	needLibrary(t)
	cfg := testConfig()
	cfg.Watch, cfg.Misses, cfg.Stall = 20*time.Millisecond, 1<<30, 30
	t.Run("source notices", func(t *testing.T) {
		deaf := testConfig()
		deaf.Watch = time.Hour
		source := New(cfg)
		r := newRig(t, New(deaf), source, 64<<20)
		r.allow(t, 1, transfer.Span{Len: 64 << 20})
		th, _ := r.helpers()
		if err := th.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		done := r.post(t, transfer.Write{Grant: 1, Segments: []transfer.Segment{{Src: make([]byte, 64<<20)}}})
		if err := recv(t, done, "Done of a write to a stopped target"); !errors.Is(err, errNoGo) {
			t.Errorf("write: %v, want %v", err, errNoGo)
		}
		if n := source.Stats().Stalled; n != 1 {
			t.Errorf("%d stalls counted", n)
		}
	})
	t.Run("target notices", func(t *testing.T) {
		deaf := testConfig()
		deaf.Watch = time.Hour
		target := New(cfg)
		r := newRig(t, target, New(deaf), 64<<20)
		r.allow(t, 1, transfer.Span{Len: 64 << 20})
		_, sh := r.helpers()
		if err := sh.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		done := r.post(t, transfer.Write{Grant: 1, Segments: []transfer.Segment{{Src: make([]byte, 64<<20)}}})
		for storing := false; !storing; runtime.Gosched() { // else it would just leave
			r.peer.mu.Lock()
			storing = len(r.peer.pieces) > 0
			r.peer.mu.Unlock()
		}
		if r.tgt.Revoke(1) {
			t.Fatal("a grant with a writer inside is fenced at once")
		}
		recv(t, r.sink.fenced, "Fenced of a session whose writer does not leave")
		if n := target.Stats().Stalled; n != 1 {
			t.Errorf("%d stalls counted", n)
		}
		stable := bytes.Clone(r.mem)
		_ = sh.cmd.Process.Signal(syscall.SIGCONT)
		if err := recv(t, done, "Done of the writer that ran on"); err == nil {
			t.Error("its write completed")
		}
		if !bytes.Equal(stable, r.mem) {
			t.Error("bytes were stored after Fenced")
		}
	})
}

// TestNoLibrary: what is not the library is refused by name when a session is made, and costs nothing else.
func TestNoLibrary(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "libnixl_capi.so")
	if err := os.WriteFile(bad, []byte("this is no library"), 0o644); err != nil {
		t.Fatal(err)
	}
	cfg := testConfig()
	cfg.Library = bad
	tr := New(cfg)
	mem, f := shared(t, 4096)
	tgt, err := tr.Listen(transfer.Memory{Bytes: mem, FD: int(f.Fd())}, &testSink{fenced: make(chan transfer.SessionID, 8)})
	if err != nil {
		t.Fatal(err)
	}
	defer tgt.Close()
	if err := tgt.OpenSession(1); err != nil {
		t.Fatal(err)
	}
	if p, err := tr.Dial(context.Background(), tgt.Descriptor(), 1); err == nil {
		_ = p.Close()
		t.Error("dialled without a library")
	} else if !strings.Contains(err.Error(), bad) {
		t.Errorf("the error does not name the library: %v", err)
	}
	cfg.Helper = []string{filepath.Join(t.TempDir(), "no such program")}
	if err := tgt.OpenSession(2); err != nil {
		t.Fatal(err)
	}
	if _, err := New(cfg).Dial(context.Background(), tgt.Descriptor(), 2); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("dial without a helper program: %v", err)
	}
}

// TestProbe: what sessions would be refused for is found without one, and nothing is left of the helper.
func TestProbe(t *testing.T) {
	needLibrary(t)
	if err := New(testConfig()).Probe(t.Context()); err != nil {
		t.Errorf("probe of what works: %v", err)
	}
	bad := filepath.Join(t.TempDir(), "libnixl_capi.so")
	if err := os.WriteFile(bad, []byte("this is no library"), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"no library": {func(c *Config) { c.Library = bad }, bad},
		"no backend": {func(c *Config) { c.Backend = "NOPE" }, "backend NOPE"},
		"transports": {func(c *Config) { c.TLS = "nonsense" }, "backend UCX"},
		"no number":  {func(c *Config) { c.Memory = "VRAM:x" }, "VRAM:x"},
	} {
		cfg := testConfig()
		c.change(&cfg)
		if err := New(cfg).Probe(t.Context()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error that names %q", name, err, c.want)
		}
	}
}

// TestRevokedWaits: a writer with a piece at its helper is inside until the helper says that it is complete.
func TestRevokedWaits(t *testing.T) {
	needLibrary(t)
	deaf := testConfig()
	deaf.Watch = time.Hour
	r := newRig(t, New(deaf), New(deaf), 64<<20)
	r.allow(t, 1, transfer.Span{Len: 64 << 20})
	_, sh := r.helpers()
	if err := sh.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	done := r.post(t, transfer.Write{Grant: 1, Segments: []transfer.Segment{{Src: make([]byte, 64<<20)}}})
	for full := false; !full; runtime.Gosched() {
		r.peer.mu.Lock()
		full = len(r.peer.pieces) == maxPieces
		r.peer.mu.Unlock()
	}
	if r.tgt.Revoke(1) {
		t.Fatal("a grant with a writer inside is fenced at once")
	}
	// The answer to a write without a grant comes after the revoke on the same connection.
	if err := recv(t, r.post(t, transfer.Write{Grant: 99}), "the refusal"); !errors.Is(err, transfer.ErrGrant) {
		t.Fatalf("write without a grant: %v", err)
	}
	if len(r.sink.revoked)+len(done) > 0 {
		t.Fatalf("%d Revoked and %d Done while pieces are with a stopped helper", len(r.sink.revoked), len(done))
	}
	if err := sh.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if id := recv(t, r.sink.revoked, "Revoked"); id != 1 {
		t.Errorf("Revoked of grant %d", id)
	}
	stable := bytes.Clone(r.mem)
	if err := recv(t, done, "Done"); !errors.Is(err, transfer.ErrGrant) {
		t.Errorf("the cut write: %v, want %v", err, transfer.ErrGrant)
	}
	again(t, r, r.tr)
	copy(stable[:8], r.mem)
	if !bytes.Equal(stable, r.mem) {
		t.Error("bytes were stored after Revoked")
	}
}

// silenced stands between a source and the control port at addr. Once silent is closed nothing that the target says
// reaches the source, as when the target's worker, not its helper, is stopped.
func silenced(t *testing.T, addr string) (proxy string, silent chan struct{}) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	silent = make(chan struct{})
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	t.Cleanup(func() { _ = ln.Close() })
	wg.Go(func() {
		source, err := ln.Accept()
		if err != nil {
			return
		}
		defer source.Close()
		target, err := net.Dial("tcp", addr)
		if err != nil {
			return
		}
		wg.Go(func() {
			_, _ = io.Copy(target, source)
			_ = target.Close()
		})
		b := make([]byte, 4096)
		for {
			n, err := target.Read(b)
			if err != nil {
				return
			}
			select {
			case <-silent:
			default:
				_, _ = source.Write(b[:n])
			}
		}
	})
	return ln.Addr().String(), silent
}

// TestSilentTarget: a target that does not answer, though both helpers do, ends the session too.
func TestSilentTarget(t *testing.T) {
	needLibrary(t)
	cfg := testConfig()
	cfg.Watch, cfg.Misses, cfg.Stall = 20*time.Millisecond, 1<<30, 30
	mem, f := shared(t, 4096)
	tgt, err := New(testConfig()).Listen(transfer.Memory{Bytes: mem, FD: int(f.Fd())}, &testSink{fenced: make(chan transfer.SessionID, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer tgt.Close()
	if err := tgt.OpenSession(1); err != nil {
		t.Fatal(err)
	}
	d := tgt.Descriptor()
	var silent chan struct{}
	d.Addr, silent = silenced(t, d.Addr)
	source := New(cfg)
	p, err := source.Dial(context.Background(), d, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	close(silent)
	done := make(chan error, 1)
	if err := p.Post(transfer.Write{Grant: 1, Key: testKey, Done: func(err error) { done <- err }}); err != nil {
		t.Fatal(err)
	}
	if err := recv(t, done, "Done of a write that nobody answers"); !errors.Is(err, errNoGo) {
		t.Errorf("write: %v, want %v", err, errNoGo)
	}
	if n := source.Stats().Stalled; n != 1 {
		t.Errorf("%d stalls counted", n)
	}
}

// TestByeComesFirst: a source that sees the end of the target's helper before it hears why would take that
// for the cause, so the reason is on its way before the helper is killed.
func TestByeComesFirst(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	tc, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer tc.Close()
	c := &conn{tc: tc.(*net.TCPConn), out: newOutbox(), ended: make(chan struct{})}
	c.stop(errSessionClosed)
	f := frames{r: bytes.NewReader(c.out.buf)}
	if k, body, err := f.next(maxWelcome); err != nil || k != ctlBye || string(body) != errSessionClosed.Error() {
		t.Errorf("queued when stop has returned: kind %d, %q, %v; want the reason", k, body, err)
	}
	c.answer(1, verdictDone)
	if k, _, err := f.next(maxWelcome); err != io.EOF {
		t.Errorf("behind the last frame: kind %d, %v", k, err)
	}
}

// TestByeInsteadOfWelcome: the reason reaches a source whose session ends before it is let in.
func TestByeInsteadOfWelcome(t *testing.T) {
	text := errSessionClosed.Error()
	_, err := readWelcome(&frames{r: bytes.NewReader(append(appendFrame(nil, ctlBye, len(text)), text...))})
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("error %v, want one that says %q", err, text)
	}
}
