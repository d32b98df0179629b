package supervise

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience bounds a wait for something that must happen; it is never waited out in a test that passes.
const patience = 30 * time.Second

// running is a supervisor under test.
type running struct {
	t      *testing.T
	events chan Event
	cancel context.CancelFunc
	done   chan error
	out    *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// play makes a Spec of this test binary.
func roleSpec(t *testing.T, name, role string) Spec {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return Spec{Name: name, Path: self, Env: []string{childRole + "=" + role}}
}

func start(t *testing.T, c Config) *running {
	t.Helper()
	r := &running{t: t, events: make(chan Event, 1000), done: make(chan error, 1), out: &lockedBuffer{}}
	c.Out = r.out
	c.OnEvent = func(e Event) { r.events <- e }
	s, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r.cancel = cancel
	go func() { r.done <- s.Run(ctx) }()
	t.Cleanup(func() { cancel(); r.wait() })
	return r
}

// next returns the next event of a kind, skipping others.
func (r *running) next(k Kind) Event {
	r.t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case e := <-r.events:
			if e.Kind == k {
				return e
			}
		case <-timeout:
			r.t.Fatalf("no %v event within %v; output:\n%s", k, patience, r.out)
		}
	}
}

// wait returns what Run returned.
func (r *running) wait() error {
	r.t.Helper()
	select {
	case err := <-r.done:
		r.done <- err
		return err
	case <-time.After(patience):
		r.t.Fatal("Run does not return")
		return nil
	}
}

func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// served is a child with a ready report and a health address.
func served(t *testing.T, role string) Spec {
	addr := freeAddr(t)
	s := roleSpec(t, "worker", role)
	s.Env = append(s.Env, "LISTEN="+addr)
	s.ReportsReady, s.HealthURL = true, "http://"+addr+"/health"
	return s
}

func dead(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("process %d is still there: %v", pid, err)
	}
}

func TestKilledChildRestarts(t *testing.T) {
	r := start(t, Config{Specs: []Spec{served(t, "serve")}, BackoffMin: time.Millisecond})
	first := r.next(EventReady)
	if first.Ready.Role != "test" || first.Ready.HTTP == "" || first.Life != 1 {
		t.Fatalf("ready event %+v", first)
	}
	if err := syscall.Kill(first.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if e := r.next(EventExited); e.PID != first.PID || e.Expected || e.Reason != "signal: killed" {
		t.Fatalf("exit event %+v", e)
	}
	second := r.next(EventReady)
	if second.PID == first.PID || second.Life != 2 || second.Ready.HTTP != first.Ready.HTTP {
		t.Fatalf("second life %+v after %+v", second, first)
	}
	r.cancel()
	if e := r.next(EventExited); !e.Expected || e.Reason != "exit status 0" {
		t.Fatalf("last exit event %+v", e)
	}
	if err := r.wait(); err != nil {
		t.Fatal(err)
	}
	dead(t, second.PID)
}

func TestStoppedChildIsKilledAndRestarts(t *testing.T) {
	r := start(t, Config{
		Specs: []Spec{served(t, "serve")}, BackoffMin: time.Millisecond,
		ProbeEvery: 20 * time.Millisecond, ProbeTimeout: 100 * time.Millisecond, StuckAfter: 300 * time.Millisecond,
	})
	first := r.next(EventReady)
	if err := syscall.Kill(first.PID, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if e := r.next(EventStuck); e.PID != first.PID || !strings.Contains(e.Reason, "no good answer from http://") {
		t.Fatalf("stuck event %+v", e)
	}
	exit := r.next(EventExited)
	dead(t, first.PID)
	if exit.Expected || !strings.Contains(exit.Reason, "no good answer") {
		t.Fatalf("exit event %+v", exit)
	}
	if e := r.next(EventReady); e.Life < 2 {
		t.Fatalf("ready event %+v", e)
	}
}

func TestSickChild(t *testing.T) {
	spec := served(t, "sick")
	spec.NeedOK = true
	r := start(t, Config{Specs: []Spec{spec}, ProbeEvery: 10 * time.Millisecond, StuckAfter: 50 * time.Millisecond, BackoffMin: time.Millisecond})
	r.next(EventReady)
	if e := r.next(EventStuck); !strings.Contains(e.Reason, "503") {
		t.Fatalf("stuck event %+v", e)
	}
}

// A child that serves but answers 503 is alive unless a good answer was asked for.
func TestSickChildMayLive(t *testing.T) {
	spec := served(t, "sick")
	spec.ReportsReady = false // then the first answer makes it ready
	r := start(t, Config{Specs: []Spec{spec}, ProbeEvery: 10 * time.Millisecond})
	if e := r.next(EventReady); e.Life != 1 {
		t.Fatalf("ready event %+v", e)
	}
}

func TestNeverReady(t *testing.T) {
	spec := roleSpec(t, "mute", "mute")
	spec.ReportsReady = true
	r := start(t, Config{Specs: []Spec{spec}, ReadyTimeout: 50 * time.Millisecond, GiveUp: 2, BackoffMin: time.Millisecond})
	if e := r.next(EventStuck); !strings.Contains(e.Reason, "not ready within 50ms") {
		t.Fatalf("stuck event %+v", e)
	}
	var gaveUp *ExitError
	if err := r.wait(); !errors.As(err, &gaveUp) || gaveUp.Tries != 2 || gaveUp.Name != "mute" {
		t.Fatalf("Run ended with %v", err)
	}
}

func TestCrashLoopBacksOffAndGivesUp(t *testing.T) {
	spec := roleSpec(t, "broken", "crash model.gguf")
	spec.ReportsReady = true
	r := start(t, Config{Specs: []Spec{spec, served(t, "serve")}, BackoffMin: time.Millisecond, BackoffMax: 3 * time.Millisecond, GiveUp: 4})
	err := r.wait()
	var gaveUp *ExitError
	if !errors.As(err, &gaveUp) || gaveUp.Name != "broken" || gaveUp.Tries != 4 {
		t.Fatalf("Run ended with %v", err)
	}
	if !strings.Contains(err.Error(), "exit status 7") || !strings.Contains(err.Error(), "cannot load model.gguf") {
		t.Fatalf("the error does not say what happened: %v", err)
	}
	var waits []time.Duration
	var pids []int
	for len(r.events) > 0 {
		switch e := <-r.events; e.Kind {
		case EventRestarting:
			waits = append(waits, e.Backoff)
		case EventStarted:
			pids = append(pids, e.PID)
		}
	}
	if want := []time.Duration{time.Millisecond, 2 * time.Millisecond, 3 * time.Millisecond}; !slices.Equal(waits, want) {
		t.Errorf("waits %v; want %v", waits, want)
	}
	for _, pid := range pids {
		dead(t, pid)
	}
}

func TestMissingProgram(t *testing.T) {
	r := start(t, Config{Specs: []Spec{{Name: "x", Path: "/nonexistent/program"}}, BackoffMin: time.Millisecond, GiveUp: 2})
	if err := r.wait(); err == nil || !strings.Contains(err.Error(), "/nonexistent/program") {
		t.Fatalf("Run ended with %v", err)
	}
}

// A child that is deaf to SIGTERM, even a stopped one, does not hold up the end.
func TestGraceThenKill(t *testing.T) {
	spec := roleSpec(t, "deaf", "deaf")
	spec.ReportsReady = true
	r := start(t, Config{Specs: []Spec{spec}, Grace: 50 * time.Millisecond})
	pid := r.next(EventReady).PID
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	r.cancel()
	if e := r.next(EventExited); !e.Expected || !strings.Contains(e.Reason, "was killed") {
		t.Fatalf("exit event %+v", e)
	}
	if err := r.wait(); err != nil {
		t.Fatal(err)
	}
	dead(t, pid)
}

func TestOutputIsPrefixedByLines(t *testing.T) {
	r := start(t, Config{Specs: []Spec{roleSpec(t, "p0", "lines")}})
	r.next(EventExited)
	r.cancel()
	if err := r.wait(); err != nil {
		t.Fatal(err)
	}
	if want := "[p0] one\n[p0] \n[p0] three\n"; !strings.HasPrefix(r.out.String(), want) {
		t.Fatalf("output %q; want %q first", r.out.String(), want)
	}
}

// fifo returns the path of a FIFO and a function that reads it to its end, which
// comes when the last process that holds it is gone.
func fifo(t *testing.T) (path string, open func() *bufio.Reader) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "held")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	return path, func() *bufio.Reader {
		f, err := os.OpenFile(path, os.O_RDONLY, 0) // waits for the first writer
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		if err := f.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Logf("no deadline on the FIFO, the test's own limit counts: %v", err)
		}
		return bufio.NewReader(f)
	}
}

func TestKilledSupervisorLeavesNoChild(t *testing.T) {
	path, open := fifo(t)
	spec := roleSpec(t, "", "supervisor "+path)
	cmd := exec.Command(spec.Path)
	cmd.Env = append(os.Environ(), spec.Env...)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	in := open()
	var pids [2]int
	for i := range pids {
		if _, err := fmt.Fscanln(in, &pids[i]); err != nil {
			t.Fatalf("child %d does not report: %v", i, err)
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Fatal("the supervisor ended well although it was killed")
	}
	if rest, err := io.ReadAll(in); err != nil || len(rest) > 0 {
		t.Fatalf("children %v outlive their supervisor: %q, %v", pids, rest, err)
	}
}

// The lifeline alone, without the kernel's death signal: the pipe ends, the child ends.
func TestLifeline(t *testing.T) {
	path, open := fifo(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	spec := roleSpec(t, "", "lifeline "+path)
	cmd := exec.Command(spec.Path)
	cmd.Env = append(append(os.Environ(), spec.Env...), EnvLifeline+"=3")
	cmd.ExtraFiles = []*os.File{r}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	in := open()
	if _, err := in.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := in.ReadByte(); err != io.EOF {
		t.Fatalf("the child lives on: %v", err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("the child ended by another cause: %v", err)
	}
}

func TestWithoutSupervisor(t *testing.T) {
	if err := Ready(ReadyInfo{Role: "test"}); err != nil {
		t.Fatal(err)
	}
	ctx, stop := WatchParent(t.Context())
	if ctx.Err() != nil {
		t.Fatal(context.Cause(ctx))
	}
	stop()
	if ctx.Err() == nil {
		t.Error("the context lives on after stop")
	}
	t.Setenv(EnvLifeline, "one")
	ctx, stop = WatchParent(t.Context())
	if cause := context.Cause(ctx); cause == nil || !strings.Contains(cause.Error(), EnvLifeline) {
		t.Errorf("a broken descriptor number is not reported: %v", cause)
	}
	stop()
	t.Setenv(EnvReady, "one")
	if err := Ready(ReadyInfo{}); err == nil {
		t.Error("a broken descriptor number is accepted")
	}
}

func TestBackoff(t *testing.T) {
	b := backoff{min: 2, max: 9}
	var got []time.Duration
	for _, healthy := range []bool{false, false, false, false, true, false} {
		got = append(got, b.after(healthy))
	}
	if want := []time.Duration{2, 4, 8, 9, 2, 4}; !slices.Equal(got, want) {
		t.Errorf("waits %v; want %v", got, want)
	}
}

func TestValidate(t *testing.T) {
	ok := Spec{Name: "a", Path: "/bin/true"}
	for name, c := range map[string]Config{
		"nothing":     {},
		"no path":     {Specs: []Spec{{Name: "a"}}},
		"same name":   {Specs: []Spec{ok, ok}},
		"no address":  {Specs: []Spec{{Name: "a", Path: "x", NeedOK: true}}},
		"negative":    {Specs: []Spec{ok}, Grace: -1},
		"minus tries": {Specs: []Spec{ok}, GiveUp: -1},
	} {
		if _, err := New(c); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestNamesSurvive(t *testing.T) {
	if s := Kind(99).String(); s != "event(99)" {
		t.Error(s)
	}
	e := Event{Name: "p0", Kind: EventRestarting, PID: 7, Reason: "exit status 1", Backoff: time.Second}
	if s := e.String(); s != "p0 restarting (pid 7): exit status 1 in 1s" {
		t.Error(s)
	}
}

func TestLongLinesAreSplit(t *testing.T) {
	var out bytes.Buffer
	var last tail
	w := &lineWriter{out: &out}
	copyLines(w, "> ", strings.NewReader(strings.Repeat("x", maxLine+10)+"\n"+strings.Repeat("y\n", 20)), &last)
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	if len(lines) != 22 || len(lines[0]) != maxLine+2 || lines[1] != "> "+strings.Repeat("x", 10) {
		t.Errorf("%d lines; the first have %d and %d bytes", len(lines), len(lines[0]), len(lines[1]))
	}
	if got := last.last(); len(got) != tailLines || got[0] != "y" {
		t.Errorf("tail %q", got)
	}
}
