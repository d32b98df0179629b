package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/baton-pd/baton/internal/config"
	"github.com/baton-pd/baton/internal/supervise"
)

// upFlags of `baton up`: a whole stack on this machine.
type upFlags struct {
	engineFlags
	listen    string
	prefills  int
	decodes   int
	transport string
	threads   int
	extra     []string    // worker flags passed through
	extraOf   [2][]string // the same for prefill and for decode workers only
	ofRouter  []string    // the same for the router
	oversub   bool
	stuck     time.Duration
	grace     time.Duration
	otlp      otlpFlags
}

// up is the planned stack: one spec a process, and where each will be.
type up struct {
	specs    []supervise.Spec
	router   string   // host:port
	prefills []string // host:port of the HTTP side
	decodes  []string
	note     string // how the cores were divided
}

func newUp(g *globals) *cobra.Command {
	var u upFlags
	c := &cobra.Command{
		Use:   "up",
		Short: "Serve on this machine: router, prefill and decode workers as supervised processes",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return u.run(cmd.Context(), g, cmd.OutOrStdout())
		},
	}
	u.add(c)
	return c
}

func (u *upFlags) add(c *cobra.Command) {
	u.engineFlags.add(c.Flags())
	u.otlp.add(c.Flags())
	f := c.Flags()
	f.StringVar(&u.listen, "listen", "127.0.0.1:8080", "address of the router")
	f.IntVar(&u.prefills, "prefill", 1, "number of prefill workers")
	f.IntVar(&u.decodes, "decode", 1, "number of decode workers")
	f.StringVar(&u.transport, "transport", "auto", "auto, shm, tcp or nixl")
	f.IntVar(&u.threads, "threads", 0, "compute threads of each worker (default: the cores are divided)")
	f.BoolVar(&u.oversub, "oversubscribe", false, "allow more compute threads than cores (slow: they spin at barriers)")
	f.StringArrayVar(&u.extra, "worker-flag", nil, "flag for every worker, for example --worker-flag=--max-queue=64 (repeat for more)")
	f.StringArrayVar(&u.extraOf[0], "prefill-flag", nil, "flag for every prefill worker; wins over the common ones (repeat for more)")
	f.StringArrayVar(&u.extraOf[1], "decode-flag", nil, "flag for every decode worker; wins over the common ones (repeat for more)")
	f.StringArrayVar(&u.ofRouter, "router-flag", nil, "flag for the router, for example --router-flag=--access-log=FILE (repeat for more)")
	f.DurationVar(&u.stuck, "stuck-after", 15*time.Second, "a process that does not answer for so long is killed and restarted")
	f.DurationVar(&u.grace, "shutdown-grace", 10*time.Second, "time for running streams at the end (0: none)")
}

// validate rejects what can not work before anything is started.
func (u *upFlags) validate() error {
	switch {
	case u.prefills < 1 || u.decodes < 1:
		return usagef("--prefill and --decode must be at least 1")
	case u.prefills+u.decodes > 64:
		return usagef("%d workers on one machine are too many (64 at most)", u.prefills+u.decodes)
	case !slices.Contains([]string{"auto", "shm", "tcp", "nixl"}, u.transport):
		return usagef("--transport %q: use auto, shm, tcp or nixl", u.transport)
	case u.threads < 0:
		return usagef("--threads must not be negative")
	}
	for _, flag := range slices.Concat(u.extra, u.extraOf[0], u.extraOf[1]) {
		if strings.HasPrefix(flag, "--tls-") || strings.HasPrefix(flag, "--peer-") {
			return usagef("%s: the workers of baton up are on loopback and are spoken to without TLS; for TLS start router and workers one by one (docs/router.md)", flag)
		}
	}
	_, _, err := net.SplitHostPort(u.listen)
	if err != nil {
		return usageError{fmt.Errorf("--listen: %w", err)}
	}
	return nil
}

// divide gives each worker its threads; refuses to oversubscribe unless told to.
func (u *upFlags) divide() ([]int, string, error) {
	cores := runtime.NumCPU()
	if u.engineFlags.kind == "sim" {
		return make([]int, u.prefills+u.decodes), "sim engine, no compute threads", nil
	}
	threads, note, over := config.DivideCores(cores, u.prefills, u.decodes)
	if u.threads > 0 {
		for i := range threads {
			threads[i] = u.threads
		}
		over = u.threads*(u.prefills+u.decodes) > cores
		note = fmt.Sprintf("%d threads for each of %d workers on %d cores", u.threads, u.prefills+u.decodes, cores)
	}
	if over && !u.oversub {
		return nil, "", usagef("%s: more compute threads than cores makes every token slow (threads spin at barriers); use fewer workers or threads, or --oversubscribe", note)
	}
	return threads, note, nil
}

// plan lays out the stack on free ports.
func (u *upFlags) plan(g *globals) (*up, error) {
	if err := u.validate(); err != nil {
		return nil, err
	}
	if err := u.locate(); err != nil {
		return nil, err
	}
	threads, note, err := u.divide()
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the own binary: %w", err)
	}
	ports, err := config.FreePorts(2*u.prefills + u.decodes)
	if err != nil {
		return nil, fmt.Errorf("find free ports: %w", err)
	}
	local := func() string {
		p := ports[0]
		ports = ports[1:]
		return net.JoinHostPort("127.0.0.1", strconv.Itoa(p))
	}
	p := &up{router: u.listen, note: note}
	common := append([]string{"--log-level", g.logLevel, "--log-format", g.logFormat, "--shutdown-grace", u.grace.String()}, u.otlp.args()...)
	routerArgs := append([]string{"router", "--listen", u.listen}, common...)
	add := func(name, addr string, args []string) {
		p.specs = append(p.specs, supervise.Spec{Name: name, Path: self, Args: args, ReportsReady: true,
			HealthURL: "http://" + addr + "/health", NeedOK: name != "router"})
	}
	for i := range u.prefills + u.decodes {
		role, name, addr := "decode", fmt.Sprintf("decode-%d", i-u.prefills), local()
		var boot string
		if i < u.prefills {
			role, name, boot = "prefill", fmt.Sprintf("prefill-%d", i), local()
		}
		args := append([]string{role, "--listen", addr, "--id", name + "@" + addr, "--transport", u.transport, "--threads", strconv.Itoa(threads[i])}, common...)
		args = append(args, u.engineFlags.args()...)
		args = append(args, u.extra...)
		if boot != "" {
			args = append(args, u.extraOf[0]...)
			_, port, _ := net.SplitHostPort(boot)
			args = append(args, "--bootstrap-listen", boot)
			routerArgs = append(routerArgs, "--prefill", "http://"+addr+","+port)
			p.prefills = append(p.prefills, addr)
		} else {
			args = append(args, u.extraOf[1]...)
			routerArgs = append(routerArgs, "--decode", "http://"+addr)
			p.decodes = append(p.decodes, addr)
		}
		add(name, addr, args)
	}
	probe := u.listen
	if host := hostOf(u.listen); host == "0.0.0.0" || host == "::" {
		_, port, _ := net.SplitHostPort(u.listen)
		probe = net.JoinHostPort("127.0.0.1", port)
	}
	p.router = probe
	add("router", probe, append(routerArgs, u.ofRouter...))
	return p, nil
}

// progress prints what happens to the processes and tells when all are ready.
type progress struct {
	out   io.Writer
	began time.Time
	wait  map[string]bool // not ready so far
	ready chan struct{}   // closed when wait is empty for the first time
	hear  func(supervise.Event)
}

func newProgress(out io.Writer, p *up) *progress {
	pr := &progress{out: out, began: time.Now(), wait: make(map[string]bool), ready: make(chan struct{})}
	for _, s := range p.specs {
		pr.wait[s.Name] = true
	}
	return pr
}

// event is supervise.Config.OnEvent: one call at a time.
func (pr *progress) event(e supervise.Event) {
	if !e.Expected {
		fmt.Fprintf(pr.out, "%7.1fs  %s\n", time.Since(pr.began).Seconds(), e)
		if e.Kind == supervise.EventExited {
			for _, line := range e.Tail {
				fmt.Fprintf(pr.out, "          | %s\n", line)
			}
		}
	}
	if e.Kind == supervise.EventReady && pr.wait[e.Name] {
		delete(pr.wait, e.Name)
		if len(pr.wait) == 0 {
			close(pr.ready)
		}
	}
	if pr.hear != nil {
		pr.hear(e)
	}
}

// run serves until ctx ends.
func (u *upFlags) run(ctx context.Context, g *globals, out io.Writer) error {
	log, err := g.logger(os.Stderr)
	if err != nil {
		return err
	}
	if l, err := net.Listen("tcp", u.listen); err != nil { // a taken port is known at once
		return usageError{fmt.Errorf("--listen: %w", err)}
	} else if err := l.Close(); err != nil {
		return err
	}
	p, err := u.plan(g)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "baton %s: starting %d processes (%s)\n", version, len(p.specs), p.note)
	pr := newProgress(out, p)
	return u.supervise(ctx, p, pr, log, os.Stderr, func(ctx context.Context) error {
		if err := waitUsable(ctx, p.router); err != nil {
			return err
		}
		p.describe(out, u)
		<-ctx.Done()
		fmt.Fprintln(out, "shutting down ...")
		return nil
	})
}

// supervise runs the stack, and body once every process is ready; it ends all when body or
// a supervisor's failure does.
func (u *upFlags) supervise(ctx context.Context, p *up, pr *progress, log *slog.Logger, childOut io.Writer, body func(context.Context) error) error {
	sup, err := supervise.New(supervise.Config{
		Specs: p.specs, StuckAfter: u.stuck, Grace: u.grace + 5*time.Second, GiveUp: 3, Out: childOut, Log: log, OnEvent: pr.event,
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		err := sup.Run(ctx)
		cancel()
		ended <- err
	}()
	var bodyErr error
	select {
	case <-pr.ready:
		bodyErr = body(ctx)
	case <-ctx.Done():
	}
	cancel()
	if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return bodyErr
}

// describe prints where everything is and a line to try.
func (p *up) describe(out io.Writer, u *upFlags) {
	fmt.Fprintf(out, "\nBaton is serving at http://%s\n\n", p.router)
	fmt.Fprintf(out, "  router     http://%s   (page: http://%s/ui)\n", p.router, p.router)
	for _, a := range p.prefills {
		fmt.Fprintf(out, "  prefill    http://%s\n", a)
	}
	for _, a := range p.decodes {
		fmt.Fprintf(out, "  decode     http://%s\n", a)
	}
	fmt.Fprintf(out, "  transport  %s\n  cores      %s\n", u.transport, p.note)
	if u.model != "" {
		fmt.Fprintf(out, "  model      %s\n", u.model)
	}
	fmt.Fprintf(out, `
Try:
  curl -N http://%s/v1/chat/completions -H 'content-type: application/json' \
    -d '{"messages":[{"role":"user","content":"Say hello in three words."}],"max_tokens":32,"stream":true}'
  baton chat --url http://%s

Ctrl-C ends everything.
`, p.router, p.router)
}
