package routerbench

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Target is something that requests are sent to.
type Target struct {
	Name string
	Addr string // host:port
	pid  int    // 0: no process of its own
	end  func() error
}

// proc is a child process; it is killed with its parent.
type proc struct {
	cmd *exec.Cmd
	in  io.Closer
}

func start(cmd *exec.Cmd) (*proc, error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	return &proc{cmd: cmd, in: in}, cmd.Start()
}

// stop ends the process; it has nothing to lose.
func (p *proc) stop() {
	_ = p.in.Close()
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait() // says that it was killed
}

// Fakes are the workers' process.
type Fakes struct {
	FakesReady
	p *proc
}

// StartFakes runs binary with args, which calls [ServeFakes].
func StartFakes(binary string, log io.Writer, args ...string) (*Fakes, error) {
	cmd := exec.Command(binary, args...)
	cmd.Stderr = log
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p, err := start(cmd)
	if err != nil {
		return nil, fmt.Errorf("routerbench: start the fakes: %w", err)
	}
	f := &Fakes{p: p}
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &f.FakesReady)
	}
	if err != nil {
		p.stop()
		return nil, fmt.Errorf("routerbench: the fakes have not started: %q, %w", line, err)
	}
	return f, nil
}

// Stop ends them.
func (f *Fakes) Stop() { f.p.stop() }

// set tells the fakes how many tokens to answer with, and the pause between two.
func (f *Fakes) set(ctx context.Context, pace time.Duration, tokens int) error {
	_, err := get(ctx, fmt.Sprintf("http://%s/set?pace=%d&tokens=%d", f.Control, int64(pace), tokens))
	return err
}

func get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	body, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	_ = res.Body.Close()
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: status %d: %.200s", url, res.StatusCode, body)
	}
	return body, err
}

// StartBaton runs `binary router` before the fakes, with more flags.
func StartBaton(ctx context.Context, binary, name string, f *Fakes, log io.Writer, more ...string) (*Target, error) {
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	args := []string{"router", "--listen", addr, "--log-level", "warn", "--policy", "round-robin", "--max-inflight", "16384"}
	for i, p := range f.Prefills {
		args = append(args, "--prefill", "http://"+p+","+strconv.Itoa(8998+i))
	}
	for _, d := range f.Decodes {
		args = append(args, "--decode", "http://"+d)
	}
	return startRouter(ctx, name, addr, exec.Command(binary, append(args, more...)...), log, func(body []byte) bool { return true }, "/health")
}

//go:embed peers/router.py
var peerScript []byte

// Peers are the Python packages of other routers that StartPeer knows.
var Peers = []string{"sglang_router", "smg"}

// StartPeer runs the router of a package that is installed for the interpreter python.
func StartPeer(ctx context.Context, python, pkg string, f *Fakes, log io.Writer) (*Target, error) {
	dir, err := os.MkdirTemp("", "baton-router-peer-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	script := filepath.Join(dir, "router.py")
	if err := os.WriteFile(script, peerScript, 0o600); err != nil {
		return nil, err
	}
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	metrics, err := freeAddr()
	if err != nil {
		return nil, err
	}
	_, port, _ := net.SplitHostPort(addr)
	_, metricsPort, _ := net.SplitHostPort(metrics)
	args := []string{script, pkg, "--pd-disaggregation", "--host", "127.0.0.1", "--port", port, "--prometheus-host", "127.0.0.1", "--prometheus-port", metricsPort,
		"--policy", "round_robin", "--log-level", "warn", "--worker-startup-check-interval", "1", "--max-concurrent-requests", "16384"}
	for i, p := range f.Prefills {
		args = append(args, "--prefill", "http://"+p, strconv.Itoa(8998+i))
	}
	for _, d := range f.Decodes {
		args = append(args, "--decode", "http://"+d)
	}
	return startRouter(ctx, strings.ReplaceAll(pkg, "_", "-"), addr, exec.Command(python, args...), log, func(body []byte) bool {
		var ready struct {
			Status  string
			Healthy int `json:"healthy_workers"`
		}
		return json.Unmarshal(body, &ready) == nil && ready.Status == "ready" && ready.Healthy == 4
	}, "/readiness")
}

// startRouter runs cmd and waits until path says that it would use all workers.
func startRouter(ctx context.Context, name, addr string, cmd *exec.Cmd, log io.Writer, ready func(body []byte) bool, path string) (*Target, error) {
	cmd.Stdout, cmd.Stderr = log, log
	p, err := start(cmd)
	if err != nil {
		return nil, fmt.Errorf("routerbench: start %s: %w", name, err)
	}
	t := &Target{Name: name, Addr: addr, pid: cmd.Process.Pid, end: func() error { p.stop(); return nil }}
	wait, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		body, err := get(wait, "http://"+addr+path)
		if err == nil && ready(body) {
			return t, nil
		}
		select {
		case <-wait.Done():
			_ = t.end()
			return nil, fmt.Errorf("routerbench: %s does not become ready: %q, %w", name, body, errors.Join(err, wait.Err()))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Stop ends the target's process, if it has one.
func (t *Target) Stop() {
	if t.end != nil {
		_ = t.end()
	}
}

func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// usage of a process.
type usage struct {
	cpu float64 // seconds, user and system
	rss int64   // bytes
}

// clockTick is the unit of times in /proc/PID/stat, in seconds: USER_HZ, which Linux fixes.
const clockTick = 0.01

// usageOf reads /proc/PID/stat; pid 0 is this process.
func usageOf(pid int) (usage, error) {
	name := "self"
	if pid != 0 {
		name = strconv.Itoa(pid)
	}
	b, err := os.ReadFile("/proc/" + name + "/stat")
	if err != nil {
		return usage{}, err
	}
	// The command's name is in brackets and may contain anything.
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(fields) < 22 {
		return usage{}, fmt.Errorf("/proc/%s/stat: %q", name, b)
	}
	var n [3]int64
	for i, at := range [3]int{11, 12, 21} { // utime, stime, rss: fields 14, 15, 24 of proc_pid_stat(5)
		if n[i], err = strconv.ParseInt(fields[at], 10, 64); err != nil {
			return usage{}, fmt.Errorf("/proc/%s/stat: %w", name, err)
		}
	}
	return usage{cpu: clockTick * float64(n[0]+n[1]), rss: n[2] * int64(unix.Getpagesize())}, nil
}
