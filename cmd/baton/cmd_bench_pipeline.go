package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/baton-pd/baton/internal/bench"
	"github.com/baton-pd/baton/internal/stack"
)

// pipelineBench are the flags of `bench pipeline`.
type pipelineBench struct {
	e       engineFlags
	rounds  int
	chunks  int
	group   int
	rate    float64
	json    string
	verbose bool
}

// pipelineSim costs what a prefill worker of a fleet costs: a chunk takes longer to compute than to send.
const (
	pipelineLayers = 16
	pipelineSim    = "layers=16,heads=4,dim=128,prefill-chunk=400ms"
)

func newBenchPipeline() *cobra.Command {
	var b pipelineBench
	c := &cobra.Command{
		Use:   "pipeline",
		Short: "What a request waits for its KV beyond compute, by chunks and by layers",
		Long: `Starts a prefill and a decode worker, sends one prompt at a time and reports, from the workers' own metrics: the time of
the prompt's computation, of all exports and writes, and how much of these the request waited for ("exposed").
With --engine sim it does so for a worker whose chunks leave whole and for one whose layers leave as they
are computed, beside a process that computes the same prompts without a transfer.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return b.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	b.e.add(c.Flags())
	f := c.Flags()
	f.IntVar(&b.rounds, "rounds", 5, "repetitions; medians are reported")
	f.IntVar(&b.chunks, "chunks", 4, "chunks of a prompt")
	f.IntVar(&b.group, "layer-group", 2, "sim: layers that leave together, of 16")
	f.Float64Var(&b.rate, "rate", 0, "bytes a second that the data plane carries (0: what it can; sim: 10e6)")
	f.StringVar(&b.json, "json", "", "also write the rows to this file")
	f.BoolVar(&b.verbose, "verbose", false, "show the processes' output")
	return c
}

func (b *pipelineBench) run(ctx context.Context, out io.Writer) error {
	if b.rounds < 1 || b.chunks < 1 || b.group < 1 || b.rate < 0 {
		return usagef("--rounds, --chunks and --layer-group must be at least 1, --rate not negative")
	}
	if err := b.e.locate(); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "baton-pipeline-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	modes := []mode{{"chunks", "", 1}}
	if b.e.kind == "sim" {
		if b.e.simSpec == "" {
			b.e.simSpec = pipelineSim
		}
		if b.rate == 0 {
			b.rate = 10e6
		}
		modes = append(modes, mode{"layers", fmt.Sprintf(",layer-group=%d", b.group), (pipelineLayers + b.group - 1) / b.group})
	}
	var list []*bench.Pipeline
	for _, m := range modes {
		p, end, err := b.start(ctx, self, dir, m)
		if err != nil {
			return err
		}
		defer end()
		list = append(list, p)
	}
	var single *bench.Target
	if b.e.kind == "sim" { // its workers wait, they do not compute: all can run at once
		s, err := stack.Start(ctx, b.config(self, stack.Config{Decode: 1, Monolithic: true}, b.e.args()))
		if err != nil {
			return err
		}
		defer s.Close()
		if single, err = bench.NewTarget(ctx, "single", s.URL()); err != nil {
			return err
		}
		single.Bytes = true
	}
	rows, err := bench.Pipelines(ctx, list, single, b.rounds)
	if err != nil {
		return err
	}
	return printRows(out, rows, b.json)
}

// mode is one way for chunks to leave.
type mode struct {
	name, setting string
	parts         int // of a chunk
}

func (b *pipelineBench) config(self string, c stack.Config, args []string) stack.Config {
	c.Binary, c.Args = self, append(args, "--threads", "1", "--log-level", "error")
	if b.verbose {
		c.Log = os.Stderr
	}
	return c
}

// start runs a pair of workers with a router.
func (b *pipelineBench) start(ctx context.Context, self, dir string, m mode) (*bench.Pipeline, func(), error) {
	e := b.e
	if m.setting != "" {
		e.simSpec += m.setting
	}
	c := stack.Config{Prefill: 1, Decode: 1}
	if b.rate > 0 {
		rules := filepath.Join(dir, "line")
		if err := os.WriteFile(rules, fmt.Appendf(nil, "post rate=%s\n", strconv.FormatFloat(b.rate, 'g', -1, 64)), 0o600); err != nil {
			return nil, nil, err
		}
		c.PrefillArgs = []string{"--fault", rules}
	}
	s, err := stack.Start(ctx, b.config(self, c, e.args()))
	if err != nil {
		return nil, nil, err
	}
	t, err := bench.NewTarget(ctx, m.name, s.URL())
	if err != nil {
		s.Close()
		return nil, nil, err
	}
	t.Bytes = true // prompts of token ids, so that they are whole chunks
	return &bench.Pipeline{Target: t, Prefill: s.Prefills[0].Metric, Decode: s.Decodes[0].Metric, Chunks: b.chunks, Tokens: e.chunk, Parts: m.parts}, s.Close, nil
}
