package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/baton-pd/baton/internal/bench"
	"github.com/baton-pd/baton/internal/stack"
)

func newBench(g *globals) *cobra.Command {
	c := &cobra.Command{Use: "bench", Short: "Measure: serve, lifecycle, transfer, pipeline, router"}
	c.AddCommand(newBenchServe(g), newBenchLifecycle(), newBenchTransfer(), newBenchTransferTarget(), newBenchPipeline(), newBenchRouter(), newBenchRouterFakes())
	return c
}

func newBenchLifecycle() *cobra.Command {
	var rooms, aborts int
	var out string
	c := &cobra.Command{
		Use:   "lifecycle",
		Short: "The room core alone: ns a step, bytes a live room, aborts",
		RunE: func(cmd *cobra.Command, _ []string) error {
			rows, err := bench.Lifecycle(rooms, aborts)
			if err != nil {
				return err
			}
			return printRows(cmd.OutOrStdout(), rows, out)
		},
	}
	c.Flags().IntVar(&rooms, "rooms", 1_000_000, "live rooms")
	c.Flags().IntVar(&aborts, "aborts", 100_000, "rooms to abort")
	c.Flags().StringVar(&out, "json", "", "also write the rows to this file")
	return c
}

func printRows(w io.Writer, rows []bench.Row, file string) error {
	if err := bench.Table(w, rows); err != nil || file == "" {
		return err
	}
	b, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(b, '\n'), 0o644)
}

// serveBench are the flags of `bench serve`.
type serveBench struct {
	e       engineFlags
	only    []string
	rounds  int
	tokens  int
	long    int
	lengths []int
	json    string
	verbose bool
}

func newBenchServe(g *globals) *cobra.Command {
	var b serveBench
	c := &cobra.Command{
		Use:   "serve",
		Short: "Whole requests: time to first token, tokens/s, gaps while long prompts arrive",
		Long: `Starts Baton with prefill and decode on separate workers and, beside it, the same binary
as a single process (and llama-server, if it is on PATH), and runs the same work on each, in
turn. Threads: ttft and decode compare one thread with one; the last work gives the
single process both threads that the two workers have.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return b.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	b.e.add(c.Flags())
	f := c.Flags()
	f.StringSliceVar(&b.only, "only", []string{"ttft", "decode", "interference"}, "which works to run")
	f.IntVar(&b.rounds, "rounds", 5, "repetitions; medians are reported")
	f.IntVar(&b.tokens, "tokens", 96, "tokens a stream in the decode work")
	f.IntVar(&b.long, "long", 2100, "tokens of the long prompts in the interference work")
	f.IntSliceVar(&b.lengths, "lengths", []int{128, 512, 1024, 2048}, "prompt lengths of the ttft work")
	f.StringVar(&b.json, "json", "", "also write the rows to this file")
	f.BoolVar(&b.verbose, "verbose", false, "show the processes' output")
	return c
}

func (b *serveBench) runs(work string) bool {
	for _, o := range b.only {
		if o == work {
			return true
		}
	}
	return false
}

func (b *serveBench) run(ctx context.Context, out io.Writer) error {
	if err := b.e.locate(); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var rows []bench.Row
	if b.runs("ttft") || b.runs("decode") {
		r, err := b.sideBySide(ctx, self, out)
		if err != nil {
			return err
		}
		rows = append(rows, r...)
	}
	if b.runs("interference") {
		r, err := b.interference(ctx, self, out)
		if err != nil {
			return err
		}
		rows = append(rows, r...)
	}
	if err := printRows(out, rows, b.json); err != nil {
		return err
	}
	fmt.Fprintln(out)
	return bench.Ratios(out, rows, "pd", "single")
}

// start runs a stack with its router (PD) or a single process.
func (b *serveBench) start(ctx context.Context, self string, single bool, threads int) (*stack.Stack, error) {
	c := stack.Config{Binary: self, Prefill: 1, Decode: 1, Args: append(b.e.args(), "--threads", strconv.Itoa(threads), "--log-level", "warn")}
	if single {
		c.Prefill, c.Monolithic = 0, true
	}
	if b.verbose {
		c.Log = os.Stderr
	}
	return stack.Start(ctx, c)
}

// sideBySide runs ttft and decode with one thread a worker, both stacks up, in turn.
func (b *serveBench) sideBySide(ctx context.Context, self string, out io.Writer) ([]bench.Row, error) {
	pd, err := b.start(ctx, self, false, 1)
	if err != nil {
		return nil, err
	}
	defer pd.Close()
	single, err := b.start(ctx, self, true, 1)
	if err != nil {
		return nil, err
	}
	defer single.Close()
	a, err := bench.NewTarget(ctx, "pd", pd.URL())
	if err != nil {
		return nil, err
	}
	s, err := bench.NewTarget(ctx, "single", single.URL())
	if err != nil {
		return nil, err
	}
	targets := []*bench.Target{a, s}
	a.Bytes, s.Bytes = b.e.kind == "sim", b.e.kind == "sim"
	if _, err := bench.TTFT(ctx, targets, []int{64}, 1); err != nil { // warm up
		return nil, err
	}
	var rows []bench.Row
	if b.runs("ttft") {
		fmt.Fprintln(out, "ttft: 1 prefill thread each ...")
		r, err := bench.TTFT(ctx, targets, b.lengths, b.rounds)
		if err != nil {
			return nil, err
		}
		rows = append(rows, r...)
	}
	if b.runs("decode") {
		fmt.Fprintln(out, "decode: 1 decode thread each ...")
		r, err := bench.Decode(ctx, targets, []int{1, 4, 8}, b.tokens, b.rounds)
		if err != nil {
			return nil, err
		}
		rows = append(rows, r...)
	}
	return rows, nil
}

// interference runs each target alone: together they would share the cores.
func (b *serveBench) interference(ctx context.Context, self string, out io.Writer) ([]bench.Row, error) {
	var rows []bench.Row
	measure := func(name, url string) error {
		fmt.Fprintf(out, "interference: %s ...\n", name)
		t, err := bench.NewTarget(ctx, name, url)
		if err != nil {
			return err
		}
		t.Bytes = b.e.kind == "sim"
		r, err := bench.Interference(ctx, t, b.long, 2*time.Second)
		rows = append(rows, r...)
		return err
	}
	for _, c := range []struct {
		name    string
		single  bool
		threads int
	}{{"pd", false, 1}, {"single", true, 2}} {
		s, err := b.start(ctx, self, c.single, c.threads)
		if err != nil {
			return nil, err
		}
		err = measure(c.name, s.URL())
		s.Close()
		if err != nil {
			return nil, err
		}
	}
	if path, err := exec.LookPath("llama-server"); err == nil {
		if err := b.llamaServer(ctx, path, measure); err != nil {
			return nil, err
		}
	} else {
		fmt.Fprintln(out, "interference: llama-server is not on PATH, skipped")
	}
	return rows, nil
}

// llamaServer measures the peer with its defaults and the same two threads.
func (b *serveBench) llamaServer(ctx context.Context, path string, measure func(name, url string) error) error {
	addr, err := stack.FreePort()
	if err != nil {
		return err
	}
	port := addr[len("127.0.0.1:"):]
	cmd := exec.CommandContext(ctx, path, "-m", b.e.model, "--port", port, "-t", "2", "-c", "16384", "-np", "8", "--no-webui")
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start llama-server: %w", err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	if err := stack.WaitHealthy(ctx, "http://"+addr); err != nil {
		return err
	}
	return measure("llama-server", "http://"+addr)
}
