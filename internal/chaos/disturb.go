package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/baton-pd/baton/internal/chaos/wire"
	"github.com/baton-pd/baton/internal/stack"
)

// disturber does what the schedule says.
type disturber struct {
	s       *stack.Stack
	net     *network
	c       *clients
	log     *collector
	dir     string
	skewed  atomic.Int64                     // Skew faults that are on
	fill    func(ctx context.Context, n int) // sends requests that fill the pools, in the background
	shmDir  string
	say     func(format string, args ...any)
	process map[string]*sync.Mutex // one fault at a time

	mu    sync.Mutex
	rules map[string]string // process -> file of transfer rules
	done  []Done
}

// extra are the flags of a process's next start.
func (d *disturber) extra(name string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if file := d.rules[name]; file != "" {
		return []string{"--fault", file}
	}
	return nil
}

func (d *disturber) find(name string) *stack.Process {
	for _, p := range d.s.All() {
		if p.Name == name {
			return p
		}
	}
	return nil
}

// check says what the schedule names and the stack has not.
func (d *disturber) check(faults []Fault) error {
	for _, f := range faults {
		names := []string{f.Target}
		if a, b, link := f.Ends(); link {
			names = []string{a, b}
		}
		for _, n := range names {
			if n != Clients && d.find(n) == nil {
				return fmt.Errorf("chaos: fault %q: there is no process %s", f, n)
			}
		}
	}
	return nil
}

// run does the faults at their times and returns when all are undone, or soon after ctx has ended.
func (d *disturber) run(ctx context.Context, faults []Fault) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, f := range faults {
		if !pause(ctx, f.At-d.c.now()) {
			return
		}
		wg.Go(func() {
			if m := d.process[f.Target]; m != nil {
				m.Lock()
				defer m.Unlock()
			}
			span := Span{From: d.c.now()}
			err := d.one(ctx, f)
			span.To = d.c.now()
			d.say("%8.2fs  %v", span.From.Seconds(), f)
			if err != nil && ctx.Err() == nil {
				d.log.remark(fmt.Sprintf("the fault %q could not be done or undone: %v", f, err))
			}
			d.mu.Lock()
			d.done = append(d.done, Done{f, span})
			d.mu.Unlock()
		})
	}
}

// pause lets d pass; false: ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// one does one fault and undoes it.
func (d *disturber) one(ctx context.Context, f Fault) error {
	switch kinds[f.Kind].where {
	case onLink:
		d.link(ctx, f)
		return nil
	case onClients:
		d.load(ctx, f)
		return nil
	}
	p := d.find(f.Target)
	switch f.Kind {
	case Kill:
		p.Kill()
		pause(ctx, f.For)
		return d.start(ctx, p)
	case Stop:
		if err := p.Signal(syscall.SIGSTOP); err != nil {
			return err
		}
		pause(ctx, f.For)
		return p.Signal(syscall.SIGCONT)
	case StopKill:
		if err := p.Signal(syscall.SIGSTOP); err != nil {
			return err
		}
		pause(ctx, f.For)
		p.Kill()
		return d.start(ctx, p)
	case Restart:
		return d.restart(ctx, p, "")
	case Transfer:
		file := filepath.Join(d.dir, f.Target+".faults")
		if err := os.WriteFile(file, []byte(f.Rule+"\n"), 0o600); err != nil {
			return err
		}
		if err := d.restart(ctx, p, file); err != nil {
			return err
		}
		pause(ctx, f.For)
		return d.restart(ctx, p, "")
	default:
		return d.garbage(ctx, f, p)
	}
}

// start runs a process that has ended, whether or not ctx has.
func (d *disturber) start(ctx context.Context, p *stack.Process) error {
	d.log.starts(p.Name)
	ctx = context.WithoutCancel(ctx)
	if err := p.Start(ctx); err != nil || p.Name == router { // whose health is that of its workers too
		return err
	}
	return p.WaitHealthy(ctx)
}

// restart asks a process to end and starts it with other transfer rules.
func (d *disturber) restart(ctx context.Context, p *stack.Process, rules string) error {
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	const patience = 20 * time.Second
	late := time.AfterFunc(patience, func() {
		d.log.remark(fmt.Sprintf("%s did not end within %v of SIGTERM", p.Name, patience))
		_ = p.Signal(syscall.SIGKILL)
	})
	p.Wait()
	late.Stop()
	d.mu.Lock()
	d.rules[p.Name] = rules
	d.mu.Unlock()
	return d.start(ctx, p)
}

// link changes the weather for a while.
func (d *disturber) link(ctx context.Context, f Fault) {
	a, b, _ := f.Ends()
	ports := map[string][]uint16{}
	for _, name := range []string{a, b} {
		p := d.find(name)
		ports["session"] = append(ports["session"], portsOf(p.Bootstrap)...)
		ports["data"] = append(ports["data"], portsOf(p.Data)...)
	}
	onward, back := weather(f, ports)
	d.net.set(a, b, onward)
	d.net.set(b, a, back)
	pause(ctx, f.For)
	d.net.set(a, b, wire.Weather{})
	d.net.set(b, a, wire.Weather{})
}

func portsOf(addr string) []uint16 {
	_, port, err := net.SplitHostPort(addr)
	n, bad := strconv.ParseUint(port, 10, 16)
	if err != nil || bad != nil {
		return nil
	}
	return []uint16{uint16(n)}
}

// load does something to clients.
func (d *disturber) load(ctx context.Context, f Fault) {
	switch f.Kind {
	case Fill:
		d.fill(ctx, f.N)
	case Skew:
		d.skewed.Add(1)
		pause(ctx, f.For)
		d.skewed.Add(-1)
	case Cut:
		n := 0
		d.c.each(func(a *asking) { n++; a.breakOff(n%2 == 0) })
	case Abort:
		// Whatever is under way until the answer comes may be hit.
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for tick := time.NewTicker(time.Millisecond); ; {
				d.c.each(func(a *asking) { a.aborted.Store(true) })
				select {
				case <-tick.C:
				case <-stop:
					tick.Stop()
					return
				}
			}
		})
		_ = d.c.post(ctx, "/abort_request", map[string]any{"abort_all": true}) // the router may be gone: then nothing comes of it
		close(stop)
		wg.Wait()
	}
}

// garbage sends bytes that mean nothing to every port of a process. Nobody may notice.
func (d *disturber) garbage(ctx context.Context, f Fault, p *stack.Process) error {
	rng := rand.New(rand.NewPCG(uint64(f.At), 5))
	starts := [][]byte{nil, []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), []byte("BATONTCP"), []byte("BSHM"), []byte("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n")}
	type place struct{ network, addr string }
	var places []place
	for _, addr := range []string{p.HTTP, p.Bootstrap, p.Data} {
		if addr != "" {
			places = append(places, place{"tcp", addr})
		}
	}
	sockets, _ := filepath.Glob(filepath.Join(d.shmDir, fmt.Sprintf("kv-%d-*", p.PID()))) // the pattern is ours and good
	for _, s := range sockets {
		places = append(places, place{"unix", s})
	}
	for _, at := range places {
		for _, s := range starts {
			conn, err := p.Dial(ctx, at.network, at.addr)
			if err != nil {
				continue // it may be down: then there is nobody to send garbage to
			}
			noise := make([]byte, rng.IntN(4096))
			for i := range noise {
				noise[i] = byte(rng.Uint32())
			}
			_ = conn.SetDeadline(time.Now().Add(time.Second))
			_, _ = conn.Write(slices.Concat(s, noise)) // it may hang up
			_ = conn.Close()
		}
	}
	return nil
}
