package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/baton-pd/baton/internal/model/legacy"
)

// raceMode is something else that `baton race` does when its own flags ask for it.
type raceMode interface {
	add(*pflag.FlagSet)
	// asked: run takes the place of replay and exploration.
	asked() bool
	// run writes its result to out, as JSON if --json was given.
	run(out io.Writer, asJSON bool) error
}

// raceModes make a mode for each command; other files' init functions append to it.
var raceModes []func() raceMode

type raceFlags struct {
	policy, variant string
	explore         bool
	unlocked        bool
	examples        bool
	json, html      string
	list            bool
}

const raceLong = `Replays the fault that Baton was born from, step by step: a prefill worker's transfer
worker, its bootstrap thread and its scheduler, on the rules of another system (--policy legacy)
or on a repair of it, or on Baton's own room.Sender (--policy baton).

With --explore every interleaving is walked, for every policy (or the one of --policy), and
the executions are counted that are pinned (a request never ends), written after ack (bytes go
into pages that were given back), a wrong success, or a lost cause. --variant chooses the small
world, or all of them; --list tells what there is. docs/race.md explains it.

--json writes an array with one object a policy: policy, executions, pinned, written_after_ack,
wrong_success, lost_cause (numbers of executions), counterexample (an array, empty if there is
none, with one object for each fault that occurs: fault, steps).`

func newRace() *cobra.Command {
	var f raceFlags
	var modes []raceMode
	c := &cobra.Command{
		Use:   "race",
		Short: "See the fault that Baton excludes: replay it, and count it over every interleaving",
		Long:  raceLong,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd.Context(), cmd.OutOrStdout(), modes)
		},
	}
	fl := c.Flags()
	fl.StringVar(&f.policy, "policy", "", "legacy, fix-a, fix-b, fix-ab, mooncake or baton (default: legacy; with --explore: all)")
	fl.StringVar(&f.variant, "variant", "late-abort", "the small world; with --explore also \"all\"")
	fl.BoolVar(&f.explore, "explore", false, "walk every interleaving and count")
	fl.BoolVar(&f.unlocked, "unlocked", false, "update_status as a read and a write with room between them")
	fl.BoolVar(&f.examples, "counterexamples", true, "with --explore: print the shortest counterexample of each kind that occurs")
	fl.StringVar(&f.json, "json", "", "explore, and write the counts as JSON to this file, or to standard output for -")
	fl.StringVar(&f.html, "html", "", "write the timeline as a page of its own to this file, or to standard output for -")
	fl.BoolVar(&f.list, "list", false, "list policies and variants")
	for _, mode := range raceModes {
		m := mode()
		m.add(fl)
		modes = append(modes, m)
	}
	return c
}

func (f *raceFlags) run(ctx context.Context, out io.Writer, modes []raceMode) error {
	for _, m := range modes {
		if m.asked() {
			if f.json == "" {
				return m.run(out, false)
			}
			return fileOr(f.json, out, func(w io.Writer) error { return m.run(w, true) })
		}
	}
	if f.list {
		return f.lists(out)
	}
	policies, variants, err := f.chosen()
	if err != nil {
		return err
	}
	switch {
	case f.html != "":
		t, err := legacy.Replay(ctx, policies[0], variants[0], f.unlocked)
		if err != nil {
			return err
		}
		return fileOr(f.html, out, func(w io.Writer) error { return writeTimelineHTML(w, t, policies[0], variants[0]) })
	case f.json != "":
		reports, err := f.reports(ctx, policies, variants[0])
		if err != nil {
			return err
		}
		return fileOr(f.json, out, func(w io.Writer) error { return writeRaceJSON(w, reports) })
	case f.explore:
		return f.exploreAll(ctx, out, policies, variants)
	}
	t, err := legacy.Replay(ctx, policies[0], variants[0], f.unlocked)
	if err != nil {
		return err
	}
	printTimeline(out, t, policies[0], variants[0], colours(out))
	return nil
}

// chosen are the policies and variants that are meant; errors are the caller's.
func (f *raceFlags) chosen() ([]legacy.Policy, []legacy.Variant, error) {
	many := f.explore || f.json != ""
	if f.html != "" && many {
		return nil, nil, usagef("--html is the picture of a replay; --explore and --json count: use one of them")
	}
	policies, variants := legacy.Policies(), legacy.Variants()
	if f.policy != "" || !many {
		name := f.policy
		if name == "" {
			name = policies[0].Name
		}
		p, err := legacy.PolicyNamed(name)
		if err != nil {
			return nil, nil, usagef("--policy: %v", err)
		}
		policies = []legacy.Policy{p}
	}
	if f.variant != "all" {
		v, err := legacy.VariantNamed(f.variant)
		if err != nil {
			return nil, nil, usagef("--variant: %v; or all, with --explore", err)
		}
		variants = []legacy.Variant{v}
	} else if !f.explore || f.json != "" {
		return nil, nil, usagef("--variant all goes with --explore alone; choose one variant (--list)")
	}
	return policies, variants, nil
}

func (f *raceFlags) reports(ctx context.Context, policies []legacy.Policy, v legacy.Variant) ([]*legacy.Report, error) {
	var out []*legacy.Report
	for _, p := range policies {
		r, err := legacy.Explore(ctx, p, v, f.unlocked)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

func (f *raceFlags) exploreAll(ctx context.Context, out io.Writer, policies []legacy.Policy, variants []legacy.Variant) error {
	var all [][]*legacy.Report
	for i, v := range variants {
		reports, err := f.reports(ctx, policies, v)
		if err != nil {
			return err
		}
		all = append(all, reports)
		if i > 0 {
			fmt.Fprintln(out)
		}
		printReports(out, v, f.unlocked, reports)
		if f.examples {
			printExamples(out, reports)
		}
	}
	if len(all) > 1 {
		printSummary(out, all)
	}
	return nil
}

func (f *raceFlags) lists(out io.Writer) error {
	fmt.Fprintln(out, "policies:")
	for _, p := range legacy.Policies() {
		fmt.Fprintf(out, "  %-18s %s\n", p.Name, p.Does)
	}
	fmt.Fprintln(out, "variants:")
	for _, v := range legacy.Variants() {
		fmt.Fprintf(out, "  %-18s %s\n", v.Name, v.Tells)
	}
	return nil
}

// raceResult is one policy in JSON.
type raceResult struct {
	Policy          string        `json:"policy"`
	Executions      legacy.Count  `json:"executions"`
	Pinned          legacy.Count  `json:"pinned"`
	WrittenAfterAck legacy.Count  `json:"written_after_ack"`
	WrongSuccess    legacy.Count  `json:"wrong_success"`
	LostCause       legacy.Count  `json:"lost_cause"`
	Counterexample  []raceExample `json:"counterexample"`
}

type raceExample struct {
	Fault string   `json:"fault"`
	Steps []string `json:"steps"`
}

func writeRaceJSON(w io.Writer, reports []*legacy.Report) error {
	results := []raceResult{}
	for _, r := range reports {
		res := raceResult{
			Policy: r.Policy, Executions: r.Executions,
			Pinned: r.Count(legacy.Pinned), WrittenAfterAck: r.Count(legacy.WrittenAfterAck),
			WrongSuccess: r.Count(legacy.WrongSuccess), LostCause: r.Count(legacy.LostCause),
			Counterexample: []raceExample{},
		}
		for _, e := range r.Examples {
			ex := raceExample{Fault: e.Fault.String()}
			for _, l := range e.Lines {
				ex.Steps = append(ex.Steps, l.Thread+": "+l.Step)
			}
			res.Counterexample = append(res.Counterexample, ex)
		}
		results = append(results, res)
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(results)
}

// fileOr lets write fill the file name, or out for "-".
func fileOr(name string, out io.Writer, write func(io.Writer) error) error {
	if name == "-" {
		return write(out)
	}
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	if err := errors.Join(write(file), file.Close()); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// faultWords is a set of faults for people.
func faultWords(f legacy.Fault) string {
	return strings.ReplaceAll(strings.Join(f.Names(), ", "), "_", " ")
}
