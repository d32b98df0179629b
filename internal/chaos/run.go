package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/baton-pd/baton/internal/chaos/wire"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/stack"
)

// Config of a [Run].
type Config struct {
	Binary string // path of baton
	// Args of all workers: engine, model and limits. Transport, network, log and trace flags are added.
	Args                                []string
	PrefillArgs, DecodeArgs, RouterArgs []string
	World                               World
	Work                                Work
	Seed                                uint64
	// Requests is how many are sent at least; they are spread over the schedule, and go on until it is over.
	Requests int
	Faults   []Fault
	// Clients send at a time. Default 24.
	Clients int
	// Pace of the clients. Default 5 s, and 600 ms in a hurry.
	Pace Pace
	// Proxies: do not try to make network namespaces.
	Proxies bool
	Dir     string    // for sockets, traces and rules; short, because sockets are in it
	Log     io.Writer // progress for people; nil: none
}

func (c Config) withDefaults() Config {
	if c.Clients == 0 {
		c.Clients = 24
	}
	if c.Pace.Deadline == 0 {
		c.Pace.Deadline = 5 * time.Second
	}
	if c.Pace.Hurry == 0 {
		c.Pace.Hurry = 600 * time.Millisecond
	}
	if c.Log == nil {
		c.Log = io.Discard
	}
	return c
}

// Report is what a run has shown.
type Report struct {
	Seed     uint64         `json:"seed"`
	Network  string         `json:"network"`
	Requests int            `json:"requests"`
	Ends     map[string]int `json:"ends"`     // requests by how they ended
	Faults   map[Kind]int   `json:"faults"`   // done
	Packets  wire.Counts    `json:"packets"`  // what the network did to them
	Restarts int            `json:"restarts"` // of processes
	Rooms    int            `json:"failed_rooms"`
	Starved  time.Duration  `json:"starved_ns"` // for which router and clients had no core; see History
	Trace    string         `json:"trace"`      // what the check of the room events saw
	Slowest  time.Duration  `json:"slowest_ns"`
	// Latest is how long after its deadline the latest request ended; negative: before.
	Latest     time.Duration `json:"latest_after_deadline_ns"`
	Took       time.Duration `json:"took_ns"`
	Violations []Violation   `json:"violations"`
	// Output is the last that each process printed, for failures.
	Output map[string]string `json:"-"`
}

// TempDir makes a directory for a run, short enough for sockets, and removes those of runs that were
// killed before they could. The caller removes it.
func TempDir() (string, error) {
	old, _ := filepath.Glob(filepath.Join(os.TempDir(), "chaos-*-*")) // the pattern is ours and good
	for _, dir := range old {
		pid, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(dir), "chaos-"), "-")
		if n, err := strconv.Atoi(pid); err == nil && errors.Is(syscall.Kill(n, 0), syscall.ESRCH) {
			_ = os.RemoveAll(dir) // another run may be faster
		}
	}
	return os.MkdirTemp("", fmt.Sprintf("chaos-%d-", os.Getpid()))
}

// run is one run under way.
type run struct {
	cfg  Config
	net  *network
	s    *stack.Stack
	c    *clients
	log  *collector
	dist *disturber
	base map[string]idleState

	next    atomic.Int64   // number of the latest request of the load
	calm    atomic.Int64   // and of those before and after it
	pending sync.WaitGroup // requests in the background

	mu   sync.Mutex
	hist History
}

// Run starts a stack, disturbs it while requests are sent, waits until everything is over, ends the stack and judges.
// An error means that nothing could be shown; violations are in the report.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	began := time.Now()
	r := &run{cfg: cfg.withDefaults()}
	r.hist.Ends = map[int]*End{}
	err := r.setUp(ctx)
	if err == nil {
		err = r.load(ctx)
	}
	if err == nil {
		err = r.settle(ctx)
	}
	output := r.tearDown()
	if err != nil {
		for name, text := range output {
			if len(text) > 2000 {
				text = "..." + text[len(text)-2000:]
			}
			err = fmt.Errorf("%w\n--- %s\n%s", err, name, text)
		}
		return nil, err
	}
	rep := r.report()
	rep.Took, rep.Output = time.Since(began), output
	return rep, nil
}

func (r *run) say(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintf(r.cfg.Log, format+"\n", args...)
}

// setUp starts network and stack and takes the idle baseline.
func (r *run) setUp(ctx context.Context) (err error) {
	c := &r.cfg
	if r.net, err = openNetwork(c.Seed, c.World, c.Proxies); err != nil {
		return err
	}
	r.say("network: %s", r.net.about)
	traces, shm := filepath.Join(c.Dir, "trace"), filepath.Join(c.Dir, "shm")
	if err := errors.Join(os.MkdirAll(traces, 0o700), os.MkdirAll(shm, 0o700)); err != nil {
		return err
	}
	r.log = newCollector()
	r.dist = &disturber{net: r.net, log: r.log, dir: c.Dir, shmDir: shm, say: r.say, process: map[string]*sync.Mutex{}, rules: map[string]string{}, fill: r.fill}
	args := append(append([]string(nil), c.Args...), "--transport", c.World.Transport, "--log-format", "json", "--log-level", "info")
	r.s, err = stack.Start(ctx, stack.Config{
		Binary: c.Binary, Prefill: c.World.Prefills, Decode: c.World.Decodes, Args: args, PrefillArgs: c.PrefillArgs,
		DecodeArgs: append(append([]string(nil), c.DecodeArgs...), "--shm-dir", shm), RouterArgs: append(append([]string(nil), c.RouterArgs...), "--log-format", "json"),
		Lines: r.log.line, Host: r.net.host, Via: r.net.via, Extra: r.dist.extra, TraceDir: traces,
	})
	if err != nil {
		return err
	}
	r.dist.s = r.s
	for _, p := range r.s.All() {
		r.dist.process[p.Name] = &sync.Mutex{}
		r.log.named(p.HTTP, p.Name)
	}
	for addr, name := range r.net.reached {
		r.log.named(addr, name)
	}
	if err := r.dist.check(c.Faults); err != nil {
		return err
	}
	r.c = newClients(r.s.Router.URL(), r.s.Router.Dial)
	r.dist.c = r.c
	return r.warmUp(ctx)
}

// calm numbers the requests before and after the load.
const calm = 1 << 30

// quietly asks one request that nothing may happen to; it is on record like all others.
func (r *run) quietly(ctx context.Context, a Ask) (*End, error) {
	id := calm + int(r.calm.Add(1))
	req := &Request{ID: id, RID: fmt.Sprintf("calm-%d-%d", r.cfg.Seed, id), Ask: a, Stream: true, Deadline: 30 * time.Second, Manner: Patient}
	e := r.c.ask(ctx, req)
	if req.Ask.Want == "" { // it is being learned
		req.Ask.Want = e.Text
	}
	r.record(req, e)
	if !e.OK() {
		return e, fmt.Errorf("chaos: a request that nothing happened to failed: %v: %v %s", req, e, e.Raw)
	}
	return e, nil
}

func (r *run) record(req *Request, e *End) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hist.Requests = append(r.hist.Requests, req)
	r.hist.Ends[req.ID] = e
}

// warmUp brings every session up, learns answers and takes the baseline.
func (r *run) warmUp(ctx context.Context) error {
	if err := r.allUp(ctx); err != nil {
		return err
	}
	err := r.cfg.Work.Learn(ctx, func(ctx context.Context, a Ask) (string, error) {
		e, err := r.quietly(ctx, a)
		if err != nil {
			return "", err
		}
		return e.Text, nil
	})
	if err != nil {
		return err
	}
	if err := r.everyPair(ctx); err != nil {
		return err
	}
	r.base, err = r.baseline(ctx)
	return err
}

// everyPair asks until each decode worker has a session to each prefill worker.
func (r *run) everyPair(ctx context.Context) error {
	want := r.cfg.World.Prefills * r.cfg.World.Decodes
	for round := range 50 {
		var wg sync.WaitGroup
		errs := make([]error, 3*want)
		for i := range errs {
			wg.Go(func() {
				for k := range 3 { // they get out of step, and so do the router's turns of both sides
					if errs[i] == nil {
						_, errs[i] = r.quietly(ctx, r.drawCalm((round*len(errs)+i)*3+k))
					}
				}
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			return err
		}
		up := 0.0
		for _, p := range r.s.Decodes {
			n, err := p.Metric(ctx, "baton_session_up")
			if err != nil {
				return err
			}
			up += n
		}
		if int(up) == want {
			return nil
		}
	}
	return errors.New("chaos: not every decode worker got a session to every prefill worker")
}

// load sends requests while the schedule is done.
func (r *run) load(outer context.Context) error {
	ctx, stop := context.WithCancel(outer)
	defer stop()
	r.mu.Lock()
	for _, e := range r.hist.Ends { // what was before the load was long before it
		e.Sent, e.Over = -time.Hour, -time.Hour
	}
	r.mu.Unlock()
	r.c.began = time.Now() // nothing is under way
	length := time.Second
	for _, f := range r.cfg.Faults {
		length = max(length, f.At+f.For)
	}
	every := length / time.Duration(max(r.cfg.Requests, 1))
	disturbed := make(chan struct{})
	var others, senders sync.WaitGroup
	others.Go(func() { r.watchCores(ctx) })
	others.Go(func() { r.progress(ctx) })
	senders.Go(func() { defer close(disturbed); r.dist.run(ctx, r.cfg.Faults) })
	for range r.cfg.Clients {
		senders.Go(func() { r.send(ctx, every, disturbed) })
	}
	senders.Wait()
	r.pending.Wait()
	stop()
	others.Wait()
	return outer.Err()
}

// send is one client: a request after the other, each not before its time.
func (r *run) send(ctx context.Context, every time.Duration, disturbed <-chan struct{}) {
	for {
		id := int(r.next.Add(1))
		if id > r.cfg.Requests {
			select {
			case <-disturbed:
				return
			default:
			}
		}
		// Where all are late nobody waits, but what is refused at once must not be all there is.
		if !pause(ctx, max(time.Duration(id-1)*every-r.c.now(), 5*time.Millisecond)) {
			return
		}
		switch e := r.one(ctx, id, false); {
		case e.Status == 0 && e.Broken != "":
			r.reachable(ctx)
		case e.Cause != nil && e.Cause.Code == room.CodeUnavailable: // it says Retry-After
			pause(ctx, 300*time.Millisecond)
		}
	}
}

// reachable waits until somebody listens at the router's address: to be refused again and again shows nothing.
func (r *run) reachable(ctx context.Context) {
	for pause(ctx, 50*time.Millisecond) {
		conn, err := r.s.Router.Dial(ctx, "tcp", r.s.Router.HTTP)
		if err == nil {
			_ = conn.Close()
			return
		}
	}
}

func (r *run) one(ctx context.Context, id int, fill bool) *End {
	req := DrawRequest(r.cfg.Seed, id, r.cfg.Work, r.cfg.Pace, r.dist.skewed.Load() > 0, fill)
	e := r.c.ask(ctx, req)
	if ctx.Err() == nil {
		r.record(req, e)
	}
	return e
}

// fill sends n requests at once that want most of the pools.
func (r *run) fill(ctx context.Context, n int) {
	for range n {
		id := int(r.next.Add(1))
		r.pending.Go(func() { r.one(ctx, id, true) })
	}
}

// watchCores notes when the router or this process waited for a core.
func (r *run) watchCores(ctx context.Context) {
	const window = 100 * time.Millisecond
	last, waited := r.c.now(), waits{}
	waited.step(os.Getpid())
	for pause(ctx, window) {
		now := r.c.now()
		lost := max(waited.step(r.s.Router.PID()), waited.step(os.Getpid()), now-last-window)
		if lost = min(lost, now-last); lost > time.Millisecond {
			r.mu.Lock()
			r.hist.Starved = append(r.hist.Starved, Span{now - lost, now})
			r.mu.Unlock()
		}
		last = now
	}
}

// progress says every 10 s how far it is.
func (r *run) progress(ctx context.Context) {
	for pause(ctx, 10*time.Second) {
		r.mu.Lock()
		n := len(r.hist.Requests)
		r.mu.Unlock()
		r.dist.mu.Lock()
		faults := len(r.dist.done)
		r.dist.mu.Unlock()
		r.say("%8.2fs  %d requests have ended, %d of %d faults are done", r.c.now().Seconds(), n, faults, len(r.cfg.Faults))
	}
}

// tearDown ends everything that runs and returns what it printed.
func (r *run) tearDown() map[string]string {
	out := map[string]string{}
	if r.s != nil {
		r.s.Close()
		for _, p := range r.s.All() {
			out[p.Name] = p.Output()
		}
	}
	if r.c != nil {
		r.c.http.CloseIdleConnections()
	}
	if r.net != nil {
		if err := r.net.close(); err != nil {
			r.log.remark("close the network: " + err.Error())
		}
	}
	return out
}
