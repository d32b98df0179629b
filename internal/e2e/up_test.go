package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/stack"
)

// upStack is a `baton up` under test.
type upStack struct {
	cmd   *exec.Cmd
	url   string
	model simModel
	out   *bytes.Buffer // read it only after done
	done  chan error
}

// startUp runs `baton up` on the sim engine until it serves.
func startUp(t *testing.T, args ...string) *upStack {
	t.Helper()
	addr, err := stack.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	u := &upStack{url: "http://" + addr, model: simModel(sim.Config{ChunkTokens: simChunk}), out: &bytes.Buffer{}, done: make(chan error, 1)}
	u.cmd = exec.Command(binaryRace, append([]string{"up", "--listen", addr, "--engine", "sim", "--chunk", strconv.Itoa(simChunk), "--shutdown-grace", "1s",
		"--worker-flag=--pool-mib=4", "--worker-flag=--keepalive-time=1s", "--worker-flag=--keepalive-timeout=1500ms"}, args...)...)
	u.cmd.Stdout, u.cmd.Stderr = u.out, u.out
	// Children that outlive it would keep the output's pipe open: that must not hang the test.
	u.cmd.WaitDelay = settleTime
	if err := u.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { u.done <- u.cmd.Wait() }()
	t.Cleanup(func() {
		_ = u.cmd.Process.Signal(syscall.SIGTERM)
		u.wait(t)
		if t.Failed() {
			t.Logf("baton up said:\n%s", u.out)
		}
		if bytes.Contains(u.out.Bytes(), []byte("DATA RACE")) {
			t.Errorf("data race\n%s", u.out)
		}
	})
	ctx, stop := context.WithTimeout(t.Context(), 60*time.Second)
	defer stop()
	if err := stack.WaitHealthy(ctx, u.url); err != nil {
		t.Fatal(err)
	}
	return u
}

// wait returns how it ended.
func (u *upStack) wait(t *testing.T) error {
	t.Helper()
	select {
	case err := <-u.done:
		u.done <- err
		return err
	case <-time.After(2 * settleTime):
		_ = u.cmd.Process.Kill()
		t.Error("baton up does not end")
		err := <-u.done
		u.done <- err
		return err
	}
}

// children maps the role of each child process to its pid.
func (u *upStack) children(t *testing.T) map[string]int {
	t.Helper()
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", u.cmd.Process.Pid))
	if err != nil || len(lists) == 0 {
		t.Fatalf("children of baton up: %v", err)
	}
	found := map[string]int{}
	for _, l := range lists {
		text, err := os.ReadFile(l)
		if err != nil {
			continue // a thread that has ended
		}
		for _, field := range strings.Fields(string(text)) {
			pid, _ := strconv.Atoi(field)
			line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			if err != nil || !alive(pid) {
				continue
			}
			if args := strings.Split(string(line), "\x00"); len(args) > 1 {
				found[args[1]] = pid
			}
		}
	}
	return found
}

// alive: the process exists and has not ended. Nobody may have reaped it.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return rest != "" && rest[0] != 'Z' && rest[0] != 'X'
}

// family checks that there is one child of each role.
func (u *upStack) family(t *testing.T) map[string]int {
	t.Helper()
	c := u.children(t)
	if len(c) != 3 || c["prefill"] == 0 || c["decode"] == 0 || c["router"] == 0 {
		t.Fatalf("children of baton up: %v, want a prefill worker, a decode worker and a router", c)
	}
	return c
}

// answers waits until a request is answered rightly; the ones before it must say why not.
func (u *upStack) answers(t *testing.T, seed int) {
	t.Helper()
	p := prompt(seed, 3*simChunk)
	eventually(t, 2*settleTime, func(ctx context.Context) error {
		a := complete(ctx, u.url, p, 8, nil, timeoutHeader(5*time.Second)...)
		if !a.ok() {
			return fmt.Errorf("not answered: %v", a)
		}
		if want := u.model.text(p, 8); a.Text != want {
			t.Fatalf("answer %q, want %q", a.Text, want)
		}
		return nil
	})
}

// TestUpEndsItsChildren: no child outlives `baton up`, however it ends, with a request in flight and
// also when a child is stopped and cannot hear anything.
func TestUpEndsItsChildren(t *testing.T) {
	for _, c := range []struct {
		name string
		sig  syscall.Signal
		stop string // the child that is stopped before
	}{
		{"kill", syscall.SIGKILL, ""},
		{"kill with a stopped child", syscall.SIGKILL, "decode"},
		{"term", syscall.SIGTERM, ""},
		{"term with a stopped child", syscall.SIGTERM, "prefill"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			u := startUp(t, "--sim", "step=50ms")
			u.answers(t, 1)
			family := u.family(t)
			began := make(chan struct{})
			ended := make(chan answer, 1)
			go func() {
				ended <- complete(t.Context(), u.url, prompt(2, 2*simChunk), 2000, func() { close(began) }, timeoutHeader(time.Minute)...)
			}()
			select {
			case <-began:
			case a := <-ended:
				t.Fatalf("ended before it began: %v", a)
			}
			if pid := family[c.stop]; pid != 0 {
				if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
					t.Fatal(err)
				}
			}
			if err := u.cmd.Process.Signal(c.sig); err != nil {
				t.Fatal(err)
			}
			asked := time.Now()
			err := u.wait(t)
			if c.sig == syscall.SIGTERM {
				// A stream gets the grace of 1 s, a child that does not listen 5 s more.
				if took := time.Since(asked); c.stop == "" && took > 5*time.Second {
					t.Errorf("it took %v to end with a grace of 1 s", took)
				}
				if err != nil {
					t.Errorf("baton up ended with %v", err)
				}
				for role, pid := range family { // it has waited for them
					if alive(pid) {
						t.Errorf("%s (pid %d) lives although baton up has ended", role, pid)
					}
				}
			}
			eventually(t, settleTime, func(context.Context) error {
				for role, pid := range family {
					if alive(pid) {
						return fmt.Errorf("%s (pid %d) outlives baton up", role, pid)
					}
				}
				return nil
			})
			switch a := <-ended; {
			case a.ok():
				t.Errorf("an answer of 2000 tokens at 50 ms each is complete: %v", a)
			case c.sig == syscall.SIGTERM && (a.Cause == nil || a.Cause.Code != room.CodeShutdown && c.stop == ""):
				t.Errorf("the client was not told why: %v", a)
			}
		})
	}
}

// TestUpRestartsItsChildren: a child that is killed, or stopped and so silent for --stuck-after, is replaced, and
// requests are answered again. The short form takes each role once; BATON_PROVE=1 each role both ways.
func TestUpRestartsItsChildren(t *testing.T) {
	u := startUp(t, "--stuck-after", "2s")
	u.answers(t, 1)
	for i, c := range []struct {
		role string
		sig  syscall.Signal
		long bool
	}{
		{"prefill", syscall.SIGKILL, false},
		{"decode", syscall.SIGSTOP, false},
		{"router", syscall.SIGKILL, false},
		{"decode", syscall.SIGKILL, true},
		{"prefill", syscall.SIGSTOP, true},
		{"router", syscall.SIGSTOP, true},
	} {
		if c.long && !prove {
			continue
		}
		t.Run(fmt.Sprintf("%s %v", c.role, c.sig), func(t *testing.T) {
			before := u.family(t)
			if err := syscall.Kill(before[c.role], c.sig); err != nil {
				t.Fatal(err)
			}
			hit := time.Now()
			eventually(t, 2*settleTime, func(context.Context) error {
				if now := u.children(t)[c.role]; now == 0 || now == before[c.role] {
					return fmt.Errorf("%s has not been replaced (pid %d, now %d)", c.role, before[c.role], now)
				}
				return nil
			})
			if alive(before[c.role]) {
				t.Errorf("pid %d lives beside its successor", before[c.role])
			}
			u.answers(t, 10+i)
			t.Logf("answered again %v after the fault", time.Since(hit).Round(10*time.Millisecond))
			for role, pid := range u.family(t) {
				if role != c.role && pid != before[role] {
					t.Errorf("%s was replaced, too", role)
				}
			}
		})
	}
}
