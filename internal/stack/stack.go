// Package stack starts real baton processes for tests and benchmarks: a router and
// any number of prefill and decode workers, unsupervised, on free ports, so that each can
// be killed, stopped, continued and restarted on purpose. `baton up` uses package
// supervise instead.
package stack

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Config of a stack.
type Config struct {
	Binary          string // path of baton
	Prefill, Decode int
	Args            []string // for every worker
	PrefillArgs     []string // for prefill workers only
	DecodeArgs      []string // for decode workers only
	RouterArgs      []string
	Env             []string // added to the environment
	NoRouter        bool
	Monolithic      bool      // decode workers only, computing prompts themselves; no router
	Log             io.Writer // all processes' output, prefixed; nil: kept in memory only
}

// Process is one running role.
type Process struct {
	Name      string
	HTTP      string // host:port
	Bootstrap string // host:port, prefill only

	args []string
	s    *Stack
	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{} // closed when cmd has been waited for
	err  error
	out  *tail
}

// Stack is a set of processes. Close ends them all.
type Stack struct {
	Prefills, Decodes []*Process
	Router            *Process // nil with NoRouter
	cfg               Config
}

// FreePort is a loopback port that was free a moment ago.
func FreePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

// Start starts everything and waits until each process reports readiness; workers
// start side by side.
func Start(ctx context.Context, c Config) (*Stack, error) {
	s := &Stack{cfg: c}
	fail := func(err error) (*Stack, error) {
		s.Close()
		return nil, err
	}
	var starts []*Process
	add := func(list *[]*Process, name string, args ...string) (*Process, error) {
		addr, err := FreePort()
		if err != nil {
			return nil, err
		}
		p := &Process{Name: name, HTTP: addr, args: append(args, "--listen", addr), s: s, out: &tail{}}
		if list != nil {
			*list = append(*list, p)
			starts = append(starts, p)
		}
		return p, nil
	}
	for i := range c.Prefill {
		boot, err := FreePort()
		if err != nil {
			return fail(err)
		}
		args := append([]string{"prefill", "--bootstrap-listen", boot}, c.Args...)
		p, err := add(&s.Prefills, fmt.Sprintf("prefill-%d", i), append(args, c.PrefillArgs...)...)
		if err != nil {
			return fail(err)
		}
		p.Bootstrap = boot
	}
	for i := range c.Decode {
		args := append([]string{"decode"}, c.Args...)
		if c.Monolithic {
			args = append(args, "--monolithic")
		}
		if _, err := add(&s.Decodes, fmt.Sprintf("decode-%d", i), append(args, c.DecodeArgs...)...); err != nil {
			return fail(err)
		}
	}
	errs := make(chan error, len(starts))
	for _, p := range starts {
		go func() { errs <- p.Start(ctx) }()
	}
	var all []error
	for range starts {
		all = append(all, <-errs)
	}
	if err := errors.Join(all...); err != nil {
		return fail(err)
	}
	if c.NoRouter || c.Monolithic {
		return s, nil
	}
	args := append([]string{"router"}, c.RouterArgs...)
	for _, p := range s.Prefills {
		_, port, _ := net.SplitHostPort(p.Bootstrap)
		args = append(args, "--prefill", "http://"+p.HTTP+","+port)
	}
	for _, p := range s.Decodes {
		args = append(args, "--decode", "http://"+p.HTTP)
	}
	r, err := add(nil, "router", args...)
	if err != nil {
		return fail(err)
	}
	s.Router = r
	if err := r.Start(ctx); err != nil {
		return fail(err)
	}
	if err := WaitHealthy(ctx, r.URL()); err != nil {
		return fail(err)
	}
	return s, nil
}

// URL is the endpoint of a process.
func (p *Process) URL() string { return "http://" + p.HTTP }

// URL is where requests go: the router, or the first decode worker without one.
func (s *Stack) URL() string {
	if s.Router != nil {
		return s.Router.URL()
	}
	return s.Decodes[0].URL()
}

// All lists the processes.
func (s *Stack) All() []*Process {
	all := append(append([]*Process(nil), s.Prefills...), s.Decodes...)
	if s.Router != nil {
		all = append(all, s.Router)
	}
	return all
}

// Start runs the process (again) and waits for its ready line.
func (p *Process) Start(ctx context.Context) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	// Without a deadline in ctx the process is given 60 s to load its model.
	ctx, stop := context.WithTimeout(ctx, 60*time.Second)
	defer stop()
	cmd := exec.Command(p.s.cfg.Binary, p.args...)
	cmd.Env = append(append(os.Environ(), "BATON_READY_FD=3"), p.s.cfg.Env...)
	cmd.ExtraFiles = []*os.File{w}
	cmd.Stdout, cmd.Stderr = p.out, p.out
	p.out.set(p.Name, p.s.cfg.Log)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = cmd.Start()
	w.Close()
	if err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	done := make(chan struct{})
	p.mu.Lock()
	p.cmd, p.done = cmd, done
	p.mu.Unlock()
	go func() {
		err := cmd.Wait()
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		close(done)
	}()
	ready := make(chan error, 1)
	go func() {
		line := make([]byte, 4096)
		n, err := r.Read(line)
		if n > 0 {
			err = nil
		}
		ready <- err
	}()
	select {
	case err := <-ready:
		if err != nil {
			<-done
			return fmt.Errorf("%s ended before it was ready: %w\n%s", p.Name, p.Err(), p.Output())
		}
		return nil
	case <-ctx.Done():
		_ = p.Signal(syscall.SIGKILL)
		<-done
		return fmt.Errorf("%s is not ready: %w\n%s", p.Name, ctx.Err(), p.Output())
	}
}

// Signal sends sig to the process.
func (p *Process) Signal(sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil || p.cmd.Process == nil {
		return errors.New("not started")
	}
	return p.cmd.Process.Signal(sig)
}

// Kill is kill -9 and waits for the end.
func (p *Process) Kill() {
	_ = p.Signal(syscall.SIGKILL)
	p.Wait()
}

// Wait waits for the process's end.
func (p *Process) Wait() {
	p.mu.Lock()
	done := p.done
	p.mu.Unlock()
	if done != nil {
		<-done
	}
}

// Err is how the process ended.
func (p *Process) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// PID of the running process, 0 if none.
func (p *Process) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil || p.cmd.Process == nil {
		return 0
	}
	return p.cmd.Process.Pid
}

// Output is the last of what the process printed.
func (p *Process) Output() string { return p.out.String() }

// Close ends every process: SIGTERM, then SIGKILL after 15 s.
func (s *Stack) Close() {
	var wg sync.WaitGroup
	for _, p := range s.All() {
		wg.Go(func() {
			if p.PID() == 0 {
				return
			}
			_ = p.Signal(syscall.SIGCONT)
			_ = p.Signal(syscall.SIGTERM)
			timer := time.AfterFunc(15*time.Second, func() { _ = p.Signal(syscall.SIGKILL) })
			defer timer.Stop()
			p.Wait()
		})
	}
	wg.Wait()
}

// WaitHealthy waits until GET url/health answers 200.
func WaitHealthy(ctx context.Context, url string) error {
	ctx, stop := context.WithTimeout(ctx, 60*time.Second)
	defer stop()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		last = getJSON(ctx, url+"/health", nil)
		if last == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%s is not healthy: %w", url, last)
		}
	}
}

// Info fetches a process's /server_info.
func (p *Process) Info(ctx context.Context, into any) error {
	return getJSON(ctx, p.URL()+"/server_info", into)
}

func getJSON(ctx context.Context, url string, into any) error {
	ctx, stop := context.WithTimeout(ctx, 5*time.Second)
	defer stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, 8<<20))
	if err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s: %s", url, res.Status, bytes.TrimSpace(body))
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(body, into)
}

// tail keeps the last 256 KiB that a process printed and passes lines on.
type tail struct {
	mu   sync.Mutex
	buf  []byte
	name string
	to   io.Writer
}

func (t *tail) set(name string, to io.Writer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.name, t.to = name, to
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b...)
	if len(t.buf) > 256<<10 {
		t.buf = append([]byte(nil), t.buf[len(t.buf)-128<<10:]...)
	}
	if t.to != nil {
		for line := range strings.Lines(string(b)) {
			fmt.Fprintf(t.to, "[%s] %s\n", t.name, strings.TrimRight(line, "\n"))
		}
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.buf)
}
