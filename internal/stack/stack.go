// Package stack starts real baton processes for tests and benchmarks: a router and
// any number of prefill and decode workers, unsupervised, on free ports, so that each can
// be killed, stopped, continued and restarted on purpose. `baton up` uses package
// supervise instead.
package stack

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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
	Monolithic      bool // decode workers only, computing prompts themselves; no router
	// TraceDir: every worker with rooms records them in a file of its own there, over its
	// restarts (--room-trace); see Traces.
	TraceDir string
	Log      io.Writer // all processes' output, prefixed; nil: kept in memory only
	// Lines, if set, is told every whole line of every process, in order for each of them.
	Lines func(process, line string)
	// Host says where a process runs; nil, or a nil Host, is this machine.
	Host func(name string) Host
	// Extra are more flags for one process, asked for at every start; the last one wins.
	Extra func(name string) []string
	// Via, if set, gives the address by which other processes are to reach a port, which may be that
	// of a proxy. what is "http", "bootstrap" or "data".
	Via func(name, what, addr string) (string, error)
	// WorkerTLS: workers serve TLS, as their flags say; this is how to speak to them. nil: plain. WorkerKey is the API key that they want, "": none.
	WorkerTLS *tls.Config
	WorkerKey string
}

// Host is a machine of its own for a process, such as a network namespace.
type Host interface {
	// Addr is the IP address by which other processes reach the host.
	Addr() string
	// Do runs f inside: sockets that f opens and processes that it starts belong to the host.
	Do(f func() error) error
}

// Process is one running role.
type Process struct {
	Name      string
	HTTP      string // host:port
	Bootstrap string // host:port, prefill only
	Data      string // host:port of the tcp transport, decode only, and only with Config.Host or Via
	Trace     string // file of --room-trace, "" without Config.TraceDir

	args   []string
	s      *Stack
	host   Host         // nil: this machine
	client *http.Client // dials from inside the host
	tls    bool         // HTTP is over TLS

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
	alive             [2]*os.File // a pipe that breaks when this process is gone, however it went; then the others end too
	proxied           []string    // addresses from Config.Via before the workers' HTTP sides
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
	var err error
	if s.alive[0], s.alive[1], err = os.Pipe(); err != nil {
		return nil, err
	}
	fail := func(err error) (*Stack, error) {
		s.Close()
		return nil, err
	}
	var starts []*Process
	add := func(list *[]*Process, name string, args ...string) (*Process, error) {
		addr, err := s.port(name)
		if err != nil {
			return nil, err
		}
		p := &Process{Name: name, HTTP: addr, args: append(args, "--listen", addr), s: s, out: &tail{}, host: s.hostOf(name)}
		tr := &http.Transport{DialContext: p.Dial, MaxIdleConnsPerHost: 64}
		p.client = &http.Client{Transport: tr}
		if list != nil {
			tr.TLSClientConfig, p.tls = c.WorkerTLS, c.WorkerTLS != nil
			if c.WorkerKey != "" {
				p.client.Transport = signed{tr, c.WorkerKey}
			}
		}
		if list != nil && c.TraceDir != "" && !c.Monolithic {
			p.Trace = filepath.Join(c.TraceDir, name+".rooms.jsonl")
			p.args = append(p.args, "--room-trace", p.Trace)
		}
		if list != nil {
			*list = append(*list, p)
			starts = append(starts, p)
		}
		return p, nil
	}
	for i := range c.Prefill {
		name := fmt.Sprintf("prefill-%d", i)
		boot, err := s.port(name)
		if err != nil {
			return fail(err)
		}
		args := append([]string{"prefill", "--bootstrap-listen", boot}, c.Args...)
		p, err := add(&s.Prefills, name, append(args, c.PrefillArgs...)...)
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
		name := fmt.Sprintf("decode-%d", i)
		data, more, err := s.data(name)
		if err != nil {
			return fail(err)
		}
		p, err := add(&s.Decodes, name, slices.Concat(args, c.DecodeArgs, more)...)
		if err != nil {
			return fail(err)
		}
		p.Data = data
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
	workers, err := s.backends()
	if err != nil {
		return fail(err)
	}
	args = append(args, workers...)
	r, err := add(nil, "router", args...)
	if err != nil {
		return fail(err)
	}
	s.Router = r
	if err := r.Start(ctx); err != nil {
		return fail(err)
	}
	if err := r.WaitHealthy(ctx); err != nil {
		return fail(err)
	}
	return s, nil
}

func (s *Stack) hostOf(name string) Host {
	if s.cfg.Host == nil {
		return nil
	}
	return s.cfg.Host(name)
}

// port is an address for a listener of a process on its host. A port that is free here is free on
// a host that runs nothing else.
func (s *Stack) port(name string) (string, error) {
	addr, err := FreePort()
	if h := s.hostOf(name); h != nil && err == nil {
		_, port, _ := net.SplitHostPort(addr)
		addr = net.JoinHostPort(h.Addr(), port)
	}
	return addr, err
}

// data fixes a decode worker's data port where somebody stands before it.
func (s *Stack) data(name string) (addr string, args []string, err error) {
	if s.cfg.Via == nil && s.hostOf(name) == nil || s.cfg.Monolithic {
		return "", nil, nil
	}
	if addr, err = s.port(name); err != nil {
		return "", nil, err
	}
	to, err := s.via(name, "data", addr)
	return addr, []string{"--data-listen", addr, "--data-advertise", to}, err
}

func (s *Stack) via(name, what, addr string) (string, error) {
	if s.cfg.Via == nil {
		return addr, nil
	}
	return s.cfg.Via(name, what, addr)
}

// backends are the router's flags for the workers.
func (s *Stack) backends() ([]string, error) {
	var args []string
	for _, p := range append(append([]*Process(nil), s.Prefills...), s.Decodes...) {
		addr, err := s.via(p.Name, "http", p.HTTP)
		if err != nil {
			return nil, err
		}
		s.proxied = append(s.proxied, addr)
		if p.Bootstrap == "" {
			args = append(args, "--decode", p.scheme()+addr)
			continue
		}
		boot, err := s.via(p.Name, "bootstrap", p.Bootstrap)
		if err != nil {
			return nil, err
		}
		args = append(args, "--prefill", p.scheme()+addr+","+boot)
	}
	return args, nil
}

// URL is the endpoint of a process.
func (p *Process) URL() string { return p.scheme() + p.HTTP }

func (p *Process) scheme() string {
	if p.tls {
		return "https://"
	}
	return "http://"
}

// signed adds an API key to every request.
type signed struct {
	*http.Transport
	key string
}

// RoundTrip implements http.RoundTripper.
func (s signed) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Set("Authorization", "Bearer "+s.key)
	return s.Transport.RoundTrip(req)
}

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

// Traces are the room traces of all workers that have written one. They are whole when
// Close has returned.
func (s *Stack) Traces() (files []string) {
	for _, p := range s.All() {
		if _, err := os.Stat(p.Trace); p.Trace != "" && err == nil {
			files = append(files, p.Trace)
		}
	}
	return files
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
	args := p.args
	if extra := p.s.cfg.Extra; extra != nil {
		args = slices.Concat(args, extra(p.Name))
	}
	cmd := exec.Command(p.s.cfg.Binary, args...)
	cmd.Env = append(append(os.Environ(), "BATON_READY_FD=3", "BATON_LIFELINE_FD=4"), p.s.cfg.Env...)
	cmd.ExtraFiles = []*os.File{w, p.s.alive[0]}
	cmd.Stdout, cmd.Stderr = p.out, p.out
	p.out.set(p.Name, p.s.cfg.Log, p.s.cfg.Lines)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = p.inside(cmd.Start)
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

// inside runs f on the process's host.
func (p *Process) inside(f func() error) error {
	if p.host == nil {
		return f()
	}
	return p.host.Do(f)
}

// Dial opens a connection from the process's own host, so that no fault of the network between hosts
// is in the way. addr must have an IP address, not a name.
func (p *Process) Dial(ctx context.Context, network, addr string) (conn net.Conn, err error) {
	err = p.inside(func() error {
		var d net.Dialer
		conn, err = d.DialContext(ctx, network, addr)
		return err
	})
	return conn, err
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
	for _, p := range s.All() {
		p.client.CloseIdleConnections()
	}
	_ = s.alive[0].Close() // both are only ever closed
	_ = s.alive[1].Close()
}

// WaitHealthy waits until GET url/health answers 200.
func WaitHealthy(ctx context.Context, url string) error {
	return waitHealthy(ctx, http.DefaultClient, url)
}

// WaitHealthy waits until the process's /health answers 200.
func (p *Process) WaitHealthy(ctx context.Context) error { return waitHealthy(ctx, p.client, p.URL()) }

func waitHealthy(ctx context.Context, client *http.Client, url string) error {
	ctx, stop := context.WithTimeout(ctx, 60*time.Second)
	defer stop()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		_, last = get(ctx, client, url+"/health")
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
	body, err := p.Get(ctx, "/server_info")
	if err != nil {
		return err
	}
	return json.Unmarshal(body, into)
}

// Get is the body of GET path, which must be answered with 200 within 5 s.
func (p *Process) Get(ctx context.Context, path string) ([]byte, error) {
	return get(ctx, p.client, p.URL()+path)
}

func get(ctx context.Context, client *http.Client, url string) ([]byte, error) {
	ctx, stop := context.WithTimeout(ctx, 5*time.Second)
	defer stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	res, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, 8<<20))
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s: %s", url, res.Status, bytes.TrimSpace(body))
	}
	return body, err
}

// tail keeps the last 256 KiB that a process printed and passes whole lines on.
type tail struct {
	mu    sync.Mutex
	buf   []byte
	part  []byte // of a line whose end has not come
	name  string
	to    io.Writer
	lines func(process, line string)
}

func (t *tail) set(name string, to io.Writer, lines func(process, line string)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.name, t.to, t.lines, t.part = name, to, lines, nil
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b...)
	if len(t.buf) > 256<<10 {
		t.buf = append([]byte(nil), t.buf[len(t.buf)-128<<10:]...)
	}
	if t.to == nil && t.lines == nil {
		return len(b), nil
	}
	t.part = append(t.part, b...)
	for {
		line, rest, whole := bytes.Cut(t.part, []byte("\n"))
		if !whole {
			return len(b), nil
		}
		if t.to != nil {
			fmt.Fprintf(t.to, "[%s] %s\n", t.name, line)
		}
		if t.lines != nil {
			t.lines(t.name, string(line))
		}
		t.part = append([]byte(nil), rest...)
	}
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.buf)
}
