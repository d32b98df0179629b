package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/baton-pd/baton/internal/bench/routerbench"
)

// routerBench are the flags of `bench router`.
type routerBench struct {
	c       routerbench.Config
	peers   bool
	python  string
	against string
	flags   []string
	json    string
	verbose bool
}

func newBenchRouter() *cobra.Command {
	var b routerBench
	c := &cobra.Command{
		Use:   "router",
		Short: "The router alone, between fakes: requests/s, latency, CPU a request, memory, added gaps",
		Long: `Starts two prefill and two decode fakes in a process of their own, which answer with eight tokens at once, and the router, and
sends requests over a number of connections. whole: answers that are not streamed; stream: streamed ones; gaps: what
the router adds to the gaps between tokens that are sent at a fixed pace; open: memory with many open streams. With
--peers sglang-router and smg run the same, in turn with Baton's router.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return b.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	f := c.Flags()
	f.StringSliceVar(&b.c.Works, "works", []string{routerbench.WorkWhole, routerbench.WorkStream, routerbench.WorkGaps, routerbench.WorkOpen}, "what to measure, in turn")
	f.IntSliceVar(&b.c.Conns, "c", []int{1, 16, 64, 256}, "connections of whole and stream")
	f.IntVar(&b.c.Rounds, "rounds", 3, "repetitions; medians are reported")
	f.DurationVar(&b.c.Duration, "duration", 1500*time.Millisecond, "length of a measurement")
	f.DurationVar(&b.c.Warmup, "warmup", 300*time.Millisecond, "before each measurement (0: none)")
	f.IntVar(&b.c.Tokens, "tokens", 8, "tokens of an answer, in whole and stream")
	f.IntSliceVar(&b.c.GapConns, "gap-streams", []int{16, 64}, "streams of gaps")
	f.DurationVar(&b.c.Pace, "pace", 20*time.Millisecond, "pause between two tokens, in gaps")
	f.IntVar(&b.c.Open, "open", 5000, "streams of open")
	f.BoolVar(&b.peers, "peers", false, "also measure sglang-router and smg")
	f.StringVar(&b.python, "python", "python3", "interpreter that has sglang-router and smg, see scripts/router-requirements.txt")
	f.StringVar(&b.against, "against", "", "another baton binary, measured as \"before\"")
	f.StringArrayVar(&b.flags, "router-flag", nil, "more flags for Baton's router (repeat for more)")
	f.StringVar(&b.json, "json", "", "also write the rows to this file")
	f.BoolVar(&b.verbose, "verbose", false, "show what the processes print")
	return c
}

func (b *routerBench) run(ctx context.Context, out io.Writer) error {
	known := []string{routerbench.WorkWhole, routerbench.WorkStream, routerbench.WorkGaps, routerbench.WorkOpen}
	for _, w := range b.c.Works {
		if !slices.Contains(known, w) {
			return usagef("--works %q: use %v", w, known)
		}
	}
	if b.c.Rounds < 1 || b.c.Tokens < 1 || b.c.Open < 1 || b.c.Duration <= 0 || b.c.Pace <= 0 || slices.ContainsFunc(slices.Concat(b.c.Conns, b.c.GapConns), func(n int) bool { return n < 1 }) {
		return usagef("--rounds, --tokens, --gap-streams, --open, --c, --duration and --pace must be positive")
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	log := io.Discard
	if b.verbose {
		log = os.Stderr
	}
	fakes, err := routerbench.StartFakes(self, os.Stderr, "bench", "router-fakes")
	if err != nil {
		return err
	}
	defer fakes.Stop()
	targets, err := b.start(ctx, self, fakes, log)
	defer func() {
		for _, t := range targets {
			t.Stop()
		}
	}()
	if err != nil {
		return err
	}
	b.c.Log, b.c.OpenPace = os.Stderr, 2*time.Second
	rows, err := routerbench.Measure(ctx, b.c, fakes, targets)
	return errors.Join(err, b.print(out, rows))
}

// start runs every router that is to be measured, on all the same workers.
func (b *routerBench) start(ctx context.Context, self string, fakes *routerbench.Fakes, log io.Writer) (all []*routerbench.Target, err error) {
	add := func(t *routerbench.Target, err error) error {
		if err == nil {
			all = append(all, t)
		}
		return err
	}
	err = add(routerbench.StartBaton(ctx, self, "baton", fakes, os.Stderr, b.flags...))
	if err == nil && b.against != "" {
		err = add(routerbench.StartBaton(ctx, b.against, "before", fakes, os.Stderr))
	}
	if !b.peers {
		return all, err
	}
	for _, pkg := range routerbench.Peers {
		if err == nil {
			err = add(routerbench.StartPeer(ctx, b.python, pkg, fakes, log))
		}
	}
	return all, err
}

func (b *routerBench) print(out io.Writer, rows []routerbench.Row) error {
	if err := routerbench.Table(out, rows); err != nil {
		return err
	}
	fmt.Fprintln(out)
	routerbench.Added(out, rows)
	if err := routerbench.AddedGaps(out, rows); err != nil {
		return err
	}
	if b.peers || b.against != "" {
		fmt.Fprintln(out)
		if err := routerbench.Ratios(out, rows, "baton"); err != nil {
			return err
		}
	}
	return toFile(b.json, func(w io.Writer) error { return routerbench.JSON(w, rows) })
}

// newBenchRouterFakes is the workers' process of `bench router`.
func newBenchRouterFakes() *cobra.Command {
	return &cobra.Command{
		Use: "router-fakes", Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return routerbench.ServeFakes(cmd.Context(), os.Stdin, cmd.OutOrStdout())
		},
	}
}
