package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/baton-pd/baton/internal/model"
	"github.com/baton-pd/baton/internal/model/explore"
)

type exploreFlags struct {
	scenario, trace, fault, json string
	list, large                  bool
}

const exploreLong = `Searches every state that small worlds of one prefill and one decode worker can be in,
with the production transition tables, and checks the nine invariants: every room ends, ends
stick, failures are told, memory is safe, everything returns, messages of other lives change
nothing, success is true, nothing waits in a circle, no event is a surprise.

Prints states, transitions, depth, time and memory for each world. A violation is printed as
a shortest counterexample, which --trace takes again, step by step. --scenario takes the name of
a world (--list) or a .world file; --large adds the worlds that take minutes; --fault breaks the
model of the shells on purpose, to see what is found. docs/explorer.md explains it.

Exit status: 0 every world holds; 1 a violation; 2 wrong usage.`

func newExplore() *cobra.Command {
	var f exploreFlags
	c := &cobra.Command{
		Use:   "explore",
		Short: "Check every reachable state of small worlds of two workers",
		Long:  exploreLong,
		RunE:  func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	c.Flags().StringVar(&f.scenario, "scenario", "", "only this world: a name or a .world file")
	c.Flags().BoolVar(&f.list, "list", false, "list the worlds and faults, explore nothing")
	c.Flags().BoolVar(&f.large, "large", false, "the large worlds as well")
	c.Flags().StringVar(&f.trace, "trace", "", "replay the counterexample in this file, as this command printed it (- for standard input)")
	c.Flags().StringVar(&f.fault, "fault", "none", "break the model of the shells in one place: "+strings.Join(model.FaultNames(), ", "))
	c.Flags().StringVar(&f.json, "json", "", "also write the results to this file (- for standard output, instead of text)")
	return c
}

func (f *exploreFlags) run(ctx context.Context, out io.Writer) error {
	fault, err := model.ParseFault(f.fault)
	if err != nil {
		return usageError{err}
	}
	if f.trace != "" {
		return f.replay(out)
	}
	worlds, err := f.worlds()
	if err != nil {
		return err
	}
	if f.list {
		for _, sc := range worlds {
			fmt.Fprintf(out, "%-22s %-6s %s\n", sc.Name, size(sc), sc.For)
		}
		fmt.Fprintf(out, "\nfaults: %s\n", strings.Join(model.FaultNames(), ", "))
		return nil
	}
	text := out
	if f.json == "-" {
		text = io.Discard
	}
	results, broken, err := exploreAll(ctx, text, worlds, fault)
	if err != nil {
		return err
	}
	if f.json != "" {
		if err := writeJSON(out, f.json, results); err != nil {
			return err
		}
	}
	if broken > 0 {
		return fmt.Errorf("%d of %d worlds break an invariant", broken, len(worlds))
	}
	return nil
}

// worlds that the flags ask for.
func (f *exploreFlags) worlds() ([]*model.Scenario, error) {
	if f.scenario != "" {
		sc, err := loadScenario(f.scenario)
		return []*model.Scenario{sc}, err
	}
	var out []*model.Scenario
	for _, sc := range model.Scenarios() {
		if f.large || f.list || !sc.Large {
			out = append(out, sc)
		}
	}
	return out, nil
}

// loadScenario takes a name first, then a file.
func loadScenario(nameOrFile string) (*model.Scenario, error) {
	if sc, ok := model.Find(nameOrFile); ok {
		return sc, nil
	}
	text, err := os.ReadFile(nameOrFile)
	if err != nil {
		return nil, usagef("--scenario %q is neither a world (see `baton explore --list`) nor a readable file: %w", nameOrFile, err)
	}
	return model.ParseScenario(model.ScenarioName(nameOrFile), string(text))
}

func size(sc *model.Scenario) string {
	if sc.Large {
		return "large"
	}
	return "small"
}

// worldResult is one world's result as JSON.
type worldResult struct {
	Scenario    string  `json:"scenario"`
	For         string  `json:"for"`
	Size        string  `json:"size"`
	States      int     `json:"states"`
	Transitions int     `json:"transitions"`
	Depth       int     `json:"depth"`
	Seconds     float64 `json:"seconds"`
	HeapMiB     uint64  `json:"heap_mib"`
	Complete    bool    `json:"complete"`
	// Verdict is "holds" or "violation".
	Verdict        string   `json:"verdict"`
	Violation      string   `json:"violation"`
	Counterexample []string `json:"counterexample"`
}

// exploreAll prints a line for each world and the counterexamples; broken counts the violations.
func exploreAll(ctx context.Context, out io.Writer, worlds []*model.Scenario, fault model.Fault) (results []worldResult, broken int, err error) {
	fmt.Fprintf(out, "%-22s %10s %12s %6s %9s %8s  verdict\n", "world", "states", "transitions", "depth", "time", "memory")
	for _, sc := range worlds {
		w := model.NewWorld(sc)
		w.SetFault(fault)
		r := explore.Run[model.State](ctx, w, explore.Limits{})
		if ctx.Err() != nil {
			return nil, 0, context.Cause(ctx)
		}
		res := worldResult{
			Scenario: sc.Name, For: sc.For, Size: size(sc), States: r.States, Transitions: r.Transitions, Depth: r.Depth,
			Seconds: r.Took.Seconds(), HeapMiB: r.HeapBytes >> 20, Complete: r.Complete, Verdict: "holds", Counterexample: []string{},
		}
		if r.Violation != nil {
			res.Violation = fmt.Sprintf("%s: %v", r.Violation.Kind, r.Violation.Err)
			for _, l := range r.Violation.Lines {
				res.Counterexample = append(res.Counterexample, l.Step)
			}
			res.Verdict = "violation"
		}
		fmt.Fprintf(out, "%-22s %10d %12d %6d %9s %5d MiB  %s\n", sc.Name, r.States, r.Transitions, r.Depth,
			r.Took.Round(time.Millisecond), res.HeapMiB, strings.TrimSuffix(res.Verdict+": "+res.Violation, ": "))
		if res.Verdict == "violation" {
			broken++
			fmt.Fprintln(out)
			model.WriteTrace(out, sc, fault, r.Violation)
			fmt.Fprintln(out)
		}
		results = append(results, res)
	}
	return results, broken, nil
}

// replay takes a printed counterexample again; a broken invariant at its end is what is
// expected, and an error all the same, so that scripts see it.
func (f *exploreFlags) replay(out io.Writer) error {
	text, err := readFileOrStdin(f.trace)
	if err != nil {
		return usagef("--trace: %w", err)
	}
	t, err := model.ParseTrace(string(text))
	if err != nil {
		return err
	}
	from := t.Scenario
	if f.scenario != "" {
		from = f.scenario
	}
	sc, err := loadScenario(from)
	if err != nil {
		return err
	}
	err = model.Replay(out, sc, t)
	if err == nil {
		fmt.Fprintf(out, "no step of the trace breaks an invariant of a state or a step; if it was printed for a room that is stuck, this is where\n")
	}
	return err
}

func readFileOrStdin(name string) ([]byte, error) {
	if name == "-" {
		return io.ReadAll(os.Stdin)
	}
	return os.ReadFile(name)
}

func writeJSON(out io.Writer, file string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	b = append(b, '\n')
	if file == "-" {
		_, err = out.Write(b)
		return err
	}
	return os.WriteFile(file, b, 0o644)
}
