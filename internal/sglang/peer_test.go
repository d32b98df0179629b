package sglang

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/setup"
)

// patience bounds every wait for something that must come, on a machine that others use too.
const patience = 60 * time.Second

// peerFiles finds the real SGLang code: the driver scripts in the shared folder beside the repository, or
// $BATON_SHARED, and the Python that make testdeps has prepared. Tests that need it say why they are skipped.
func peerFiles(t testing.TB) (python, script string) {
	t.Helper()
	skip := absent(t)
	shared := os.Getenv("BATON_SHARED")
	if shared == "" {
		shared = filepath.Join("..", "..", "..", "shared")
	}
	script, err := filepath.Abs(filepath.Join(shared, "peers", "sglang", "sgl_peer.py"))
	if err == nil {
		_, err = os.Stat(script)
	}
	if err != nil {
		skip("needs the driver of the real SGLang code (set BATON_SHARED): %v", err)
	}
	cache, err := setup.DefaultDir()
	if err == nil {
		python = filepath.Join(cache, "sglang-peer-0.5.23", "bin", "python")
		_, err = os.Stat(python)
	}
	if err != nil {
		skip("needs the real SGLang code from PyPI (make testdeps): %v", err)
	}
	needNIXL(t)
	return python, script
}

// peer is a process with SGLang's own manager of one side, driven by JSON lines.
type peer struct {
	t     testing.TB
	role  string
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   chan reply
	hello reply
	log   *tail
	wg    sync.WaitGroup

	mu sync.Mutex // one command at a time
	n  int
}

// reply is one line of a peer.
type reply struct {
	ID       int        `json:"id"`
	OK       bool       `json:"ok"`
	Err      string     `json:"err"`
	Poll     string     `json:"poll"`
	RankPort int        `json:"rank_port"`
	Agent    string     `json:"agent"`
	CRC      [][]uint32 `json:"crc"`
	Aux      []uint32   `json:"aux"`
	First    [][]int    `json:"first"`
	Safe     bool       `json:"safe"`
	Msg      string     `json:"msg"`
	Failure  string     `json:"failure"`
	Status   string     `json:"status"`
	Infos    bool       `json:"infos"`
	Peers    []string   `json:"peers"`
	Deferred bool       `json:"deferred"`
	Bytes    float64    `json:"bytes"`
}

// tail keeps the end of what a peer logs.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

func (l *tail) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf = append(l.buf, p...)
	if n := len(l.buf) - 16<<10; n > 0 {
		l.buf = l.buf[n:]
	}
	return len(p), nil
}

func (l *tail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.buf)
}

func (l *tail) has(s string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Contains(l.buf, []byte(s))
}

// freePort is one that nobody listens on at the moment.
func freePort(t testing.TB) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// startPeer starts a peer and waits until it is ready.
func startPeer(t testing.TB, role string, bootstrap int, args ...string) *peer {
	t.Helper()
	python, script := peerFiles(t)
	p := &peer{t: t, role: role, out: make(chan reply, 16), log: &tail{}}
	p.cmd = exec.Command(python, append([]string{script, role, "--slim", "--bootstrap-port", strconv.Itoa(bootstrap)}, args...)...)
	p.cmd.Stderr = p.log
	p.cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "UCX_TLS=tcp,self", "UCX_NET_DEVICES=lo")
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.wg.Go(func() {
		defer close(p.out)
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 16<<20)
		for lines.Scan() {
			var r reply
			if json.Unmarshal(lines.Bytes(), &r) == nil {
				p.out <- r
			}
		}
	})
	t.Cleanup(p.kill)
	if p.hello = p.next(); !p.hello.OK {
		t.Fatalf("the peer said %+v", p.hello)
	}
	return p
}

func (p *peer) next() reply {
	p.t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	select {
	case r, ok := <-p.out:
		if !ok {
			p.t.Fatalf("the SGLang %s has ended; its log ends with\n%s", p.role, p.log)
		}
		return r
	case <-late.C:
		p.t.Fatalf("the SGLang %s did not answer; its log ends with\n%s", p.role, p.log)
	}
	panic("unreachable")
}

// under makes t the test that fails when the peer does not do what it must, until the result is called.
func (p *peer) under(t testing.TB) func() {
	was := p.t
	p.t = t
	return func() { p.t = was }
}

// kw are the arguments of a command.
type kw map[string]any

// try gives a command and returns the answer, whatever it is.
func (p *peer) try(op string, args kw) reply {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.n++
	m := map[string]any{"id": p.n, "op": op}
	for k, v := range args {
		m[k] = v
	}
	b, err := json.Marshal(m)
	if err != nil {
		p.t.Fatal(err)
	}
	if _, err := p.in.Write(append(b, '\n')); err != nil {
		p.t.Fatalf("SGLang %s: %v; its log ends with\n%s", p.role, err, p.log)
	}
	return p.next()
}

// do gives a command that must succeed.
func (p *peer) do(op string, args kw) reply {
	p.t.Helper()
	r := p.try(op, args)
	if !r.OK {
		p.t.Fatalf("SGLang %s: %s %v: %+v; its log ends with\n%s", p.role, op, args, r, p.log)
	}
	return r
}

// wait waits until the peer's room polls as one of want.
func (p *peer) wait(room uint64, want ...string) string {
	p.t.Helper()
	r := p.try("wait", kw{"room": room, "want": want, "secs": patience.Seconds() / 2})
	if !r.OK {
		p.t.Fatalf("SGLang %s: room %d is %s, want one of %v; its log ends with\n%s", p.role, room, r.Poll, want, p.log)
	}
	return r.Poll
}

func (p *peer) signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		p.t.Fatal(err)
	}
}

// stop stops the process and waits until it does not run any more.
func (p *peer) stop() {
	p.t.Helper()
	p.signal(syscall.SIGSTOP)
	tasks := fmt.Sprintf("/proc/%d/task/*/stat", p.cmd.Process.Pid)
	eventually(p.t, "the peer is stopped", func() bool {
		names, _ := filepath.Glob(tasks)
		for _, name := range names {
			b, err := os.ReadFile(name)
			if err != nil {
				continue // a thread that has ended
			}
			if at := bytes.LastIndexByte(b, ')'); at < 0 || !bytes.HasPrefix(b[at:], []byte(") T")) {
				return false
			}
		}
		return len(names) > 0
	})
}

// kill ends the process and waits for it.
func (p *peer) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.in.Close()
	p.wg.Wait()
	_ = p.cmd.Wait()
}

// eventually waits until ok.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	ctx, stop := context.WithTimeout(context.Background(), patience)
	defer stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("did not come: %s", what)
		}
	}
}

func loopback(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }
