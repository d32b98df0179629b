package kvbench

import (
	"bufio"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
)

//go:embed peers/*.py
var scripts embed.FS

var peers = []struct {
	script string
	env    []string
}{
	{"nixl_peer.py", []string{"UCX_TLS=tcp", "NIXL_POLL=spin"}},
	{"nixl_peer.py", []string{"UCX_TLS=tcp", "NIXL_POLL=sleep"}},
	{"nixl_peer.py", []string{"NIXL_POLL=spin"}}, // UCX chooses: on one machine cma
	{"mooncake_peer.py", nil},
}

// peer is another system's own API, run by Python: a process that is told what to do on its input, one JSON object a
// line, and answers so; what else it prints goes to log. Its target is a child of it, in the same process group.
type peer struct {
	name  string
	cmd   *exec.Cmd
	in    io.WriteCloser
	enc   *json.Encoder
	lines *bufio.Scanner
	log   io.Writer
}

type order struct {
	Op    string `json:"op"` // "round", "singles"
	Block int    `json:"block"`
	Seed  uint64 `json:"seed,omitempty"`
	N     int    `json:"n,omitempty"`
}

// Peers starts NIXL's and Mooncake's Python APIs, which must be installed for the interpreter python (packages
// nixl-cu12, mooncake-transfer-engine-non-cuda and numpy). Those that do not start are in the error; the others
// are returned all the same.
func Peers(ctx context.Context, python string, w Work, log io.Writer) ([]System, error) {
	dir, err := os.MkdirTemp("", "baton-peers-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }() // each has read its scripts when it says its name
	if err := os.CopyFS(dir, scripts); err != nil {
		return nil, err
	}
	var all []System
	var failed error
	for _, p := range peers {
		cmd := exec.CommandContext(ctx, python, filepath.Join(dir, "peers", p.script), fmt.Sprint(w.Size))
		cmd.Env = append(os.Environ(), p.env...)
		s, err := startPeer(cmd, log)
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("kvbench: peer %s %v: %w", p.script, p.env, err))
			continue
		}
		all = append(all, s)
	}
	return all, failed
}

// startPeer starts cmd and waits for its name.
func startPeer(cmd *exec.Cmd, log io.Writer) (*peer, error) {
	p := &peer{cmd: cmd, log: &lockedWriter{w: log}}
	cmd.Stderr = p.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	var err error
	if p.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.enc, p.lines = json.NewEncoder(p.in), bufio.NewScanner(out)
	p.lines.Buffer(nil, 64<<20)
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	var hello struct {
		Name string `json:"name"`
	}
	if err := p.read(&hello); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	p.name = hello.Name
	return p, nil
}

// lockedWriter takes what a peer says on its two outputs.
type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lockedWriter) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}

// read fills v from the next JSON object.
func (p *peer) read(v any) error {
	for p.lines.Scan() {
		if strings.HasPrefix(p.lines.Text(), "{") {
			return json.Unmarshal(p.lines.Bytes(), v)
		}
		fmt.Fprintln(p.log, p.lines.Text())
	}
	return errors.Join(errors.New("the peer's process ended; --verbose shows what it says"), p.lines.Err())
}

func (p *peer) Name() string { return p.name }

func (p *peer) Round(_ context.Context, block int, seed uint64) (Round, error) {
	var r Round
	if err := p.enc.Encode(order{Op: "round", Block: block, Seed: seed}); err != nil {
		return r, err
	}
	err := p.read(&r)
	return r, err
}

func (p *peer) Singles(_ context.Context, block, n int) ([]int64, error) {
	var a struct {
		NS []int64 `json:"ns"`
	}
	if err := p.enc.Encode(order{Op: "singles", Block: block, N: n}); err != nil {
		return nil, err
	}
	err := p.read(&a)
	return a.NS, err
}

// Close ends the process with its input, and what it may have left of its group.
func (p *peer) Close() error {
	_ = p.in.Close()
	for p.lines.Scan() {
		fmt.Fprintln(p.log, p.lines.Text())
	}
	err := p.cmd.Wait()
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	return err
}
