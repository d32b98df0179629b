package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/baton-pd/baton/internal/chaos"
)

// chaosFlags of `baton chaos`.
type chaosFlags struct {
	e                engineFlags
	binary           string
	seed             uint64
	requests, faults int
	clients          int
	transports       []string
	only             []string
	schedule, json   string
	gap              time.Duration
	reduce, proxies  bool
	verbose          bool
}

func newChaos() *cobra.Command {
	var f chaosFlags
	c := &cobra.Command{
		Use:   "chaos",
		Short: "Let everything happen to a stack under load, and judge the end of every request",
		Long: `Starts router and workers, sends requests, and meanwhile kills, stops and restarts processes, partitions and
spoils their network, fills pools, hurries, cuts and aborts clients, on a schedule drawn from a seed. Then
it judges every request: one end, in time, with the right tokens or a true cause; and that nothing is held
afterwards. See docs/chaos.md.

As root each process runs in a network namespace of its own; otherwise proxies stand between them.

Exit status: 0 no violation, 1 violations or failure, 2 wrong usage.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	fs := c.Flags()
	f.e.add(fs)
	fs.Lookup("engine").DefValue = "sim"
	f.e.kind = "sim"
	fs.StringVar(&f.binary, "binary", "", "baton that is tested (default: this one; one built with -race sees more)")
	fs.Uint64Var(&f.seed, "seed", 0, "draws requests and faults (0: a random one, which is printed)")
	fs.IntVar(&f.requests, "requests", 600, "requests at least, spread over the schedule")
	fs.IntVar(&f.faults, "faults", 40, "faults; every kind comes up before any comes up again (0: none)")
	fs.IntVar(&f.clients, "clients", 0, "requests at a time (default: 24, with llamacpp 4)")
	fs.StringSliceVar(&f.transports, "transport", []string{"tcp", "shm"}, "transports, one run each")
	fs.StringSliceVar(&f.only, "only", nil, fmt.Sprintf("kinds of faults: %v", chaos.Kinds()))
	fs.StringVar(&f.schedule, "schedule", "", "file with a schedule, instead of drawing one")
	fs.StringVar(&f.json, "json", "", "write a report a run to this file, one object a line")
	fs.DurationVar(&f.gap, "gap", 0, "mean time between faults (default: 700ms, with llamacpp 1.5s)")
	fs.BoolVar(&f.reduce, "reduce", false, "if a run has violations, look for the smallest part of its schedule that has them too")
	fs.BoolVar(&f.proxies, "proxies", false, "no network namespaces, even as root")
	fs.BoolVar(&f.verbose, "verbose", false, "with violations, print the end of each process's output")
	return c
}

// config is one run, without its directory.
func (f *chaosFlags) config(transport string) (c chaos.Config, err error) {
	switch f.e.kind {
	case "sim":
		c, err = chaos.SimConfig(f.seed, transport)
	case "llamacpp":
		if err = f.e.locate(); err == nil {
			c = chaos.ModelConfig(f.seed, transport, []string{"--engine", "llamacpp", "--model", f.e.model, "--lib-dir", f.e.libDir})
		}
	default:
		err = usagef("--engine %q: use sim or llamacpp", f.e.kind)
	}
	if err != nil {
		return c, err
	}
	c.Binary, c.Requests, c.Proxies = f.binary, f.requests, f.proxies
	if f.clients > 0 {
		c.Clients = f.clients
	}
	if f.gap > 0 {
		c.World.Gap = f.gap
	}
	for _, k := range f.only {
		if !slices.Contains(chaos.Kinds(), chaos.Kind(k)) {
			return c, usagef("--only %q: the kinds are %v", k, chaos.Kinds())
		}
		c.World.Only = append(c.World.Only, chaos.Kind(k))
	}
	if f.schedule == "" {
		c.Faults = chaos.Draw(f.seed, f.faults, c.World)
		return c, nil
	}
	text, err := os.ReadFile(f.schedule)
	if err != nil {
		return c, usageError{fmt.Errorf("--schedule: %w", err)}
	}
	if c.Faults, err = chaos.ParseSchedule(string(text)); err != nil {
		return c, usageError{fmt.Errorf("--schedule %s: %w", f.schedule, err)}
	}
	return c, nil
}

func (f *chaosFlags) run(ctx context.Context, out io.Writer) (err error) {
	if f.requests < 1 || f.faults < 0 || f.clients < 0 {
		return usagef("--requests must be at least 1; --faults and --clients not negative")
	}
	if f.binary == "" {
		if f.binary, err = os.Executable(); err != nil {
			return err
		}
	}
	if f.seed == 0 {
		f.seed = rand.Uint64()
	}
	bad := 0
	for _, transport := range f.transports {
		c, err := f.config(transport)
		if err != nil {
			return err
		}
		c.Log = out
		fmt.Fprintf(out, "== %s engine, %s, seed %d: %d requests, %d faults\n", f.e.kind, transport, f.seed, c.Requests, len(c.Faults))
		rep, err := runChaos(ctx, c)
		if err != nil {
			return err
		}
		printChaos(out, rep, f.verbose)
		if err := f.save(transport, rep); err != nil {
			return err
		}
		if len(rep.Violations) == 0 {
			continue
		}
		bad += len(rep.Violations)
		if err := f.explain(ctx, out, c); err != nil {
			return err
		}
	}
	if bad > 0 {
		return fmt.Errorf("%d violations", bad)
	}
	return nil
}

// runChaos does one run in a directory of its own.
func runChaos(ctx context.Context, c chaos.Config) (*chaos.Report, error) {
	dir, err := chaos.TempDir()
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	c.Dir = dir
	return chaos.Run(ctx, c)
}

func (f *chaosFlags) save(transport string, rep *chaos.Report) error {
	if f.json == "" {
		return nil
	}
	b, err := json.Marshal(struct {
		Engine    string `json:"engine"`
		Transport string `json:"transport"`
		*chaos.Report
	}{f.e.kind, transport, rep})
	if err != nil {
		return err
	}
	file, err := os.OpenFile(f.json, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	if _, err := file.Write(append(b, '\n')); err != nil {
		return err
	}
	return file.Close()
}

// printChaos prints a report for people.
func printChaos(out io.Writer, rep *chaos.Report, output bool) {
	list := func(m map[string]int) string {
		var s []string
		for _, k := range slices.Sorted(maps.Keys(m)) {
			s = append(s, fmt.Sprintf("%s %d", k, m[k]))
		}
		return strings.Join(s, ", ")
	}
	kinds, faults := map[string]int{}, 0
	for k, n := range rep.Faults {
		kinds[string(k)] = n
		faults += n
	}
	fmt.Fprintf(out, "%d requests: %s\n", rep.Requests, list(rep.Ends))
	fmt.Fprintf(out, "%d faults: %s\n", faults, list(kinds))
	fmt.Fprintf(out, "packets: %+v\n", rep.Packets)
	fmt.Fprintf(out, "%d restarts of processes, %d failed rooms logged; the slowest request took %v, the latest ended %v after its deadline\n",
		rep.Restarts, rep.Rooms, rep.Slowest.Round(time.Millisecond), rep.Latest.Round(time.Millisecond))
	fmt.Fprintf(out, "trace %s\n", rep.Trace)
	fmt.Fprintf(out, "router and clients waited %v for a core; deadlines are judged with as much more time\n", rep.Starved.Round(time.Millisecond))
	fmt.Fprintf(out, "%d violations in %v\n", len(rep.Violations), rep.Took.Round(time.Second))
	for _, v := range rep.Violations {
		fmt.Fprintf(out, "  VIOLATION %v\n", v)
	}
	if output && len(rep.Violations) > 0 {
		for _, name := range slices.Sorted(maps.Keys(rep.Output)) {
			fmt.Fprintf(out, "--- %s\n%s\n", name, rep.Output[name])
		}
	}
}

// explain says how to repeat a run, and reduces it if asked to.
func (f *chaosFlags) explain(ctx context.Context, out io.Writer, c chaos.Config) error {
	again := []string{"baton", "chaos", "--seed", strconv.FormatUint(f.seed, 10), "--engine", f.e.kind, "--transport", c.World.Transport,
		"--requests", strconv.Itoa(f.requests), "--faults", strconv.Itoa(f.faults)}
	if f.schedule != "" {
		again = append(again, "--schedule", f.schedule)
	}
	if len(f.only) > 0 {
		again = append(again, "--only", strings.Join(f.only, ","))
	}
	if f.gap > 0 {
		again = append(again, "--gap", f.gap.String())
	}
	if f.proxies {
		again = append(again, "--proxies")
	}
	command := strings.Join(again, " ")
	fmt.Fprintf(out, "repeat:  %s\nreduce:  %s --reduce\n", command, command)
	if !f.reduce {
		return nil
	}
	return f.smallest(ctx, out, c)
}

// smallest looks for the smallest schedule that still has violations. Each part is tried twice.
func (f *chaosFlags) smallest(ctx context.Context, out io.Writer, c chaos.Config) error {
	c.Log = nil
	runs := 0
	var broken error
	left := chaos.Reduce(c.Faults, func(part []chaos.Fault) bool {
		for range 2 {
			if broken != nil || ctx.Err() != nil {
				return false
			}
			try := c
			try.Faults, try.Requests = chaos.Rebase(part, c.Faults, c.Requests)
			rep, err := runChaos(ctx, try)
			if err != nil {
				broken = err
				return false
			}
			runs++
			fmt.Fprintf(out, "run %d: %d of %d faults, %d violations\n", runs, len(part), len(c.Faults), len(rep.Violations))
			if len(rep.Violations) > 0 {
				return true
			}
		}
		return false
	})
	if broken != nil {
		return broken
	}
	left, requests := chaos.Rebase(left, c.Faults, c.Requests)
	file := filepath.Join(os.TempDir(), fmt.Sprintf("chaos-%d.schedule", f.seed))
	text := fmt.Sprintf("# seed %d, %s, %s: the smallest part that still has violations\n%s", f.seed, f.e.kind, c.World.Transport, chaos.FormatSchedule(left))
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s\nbaton chaos --seed %d --engine %s --transport %s --requests %d --schedule %s\n", text, f.seed, f.e.kind, c.World.Transport, requests, file)
	return nil
}
