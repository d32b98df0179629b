package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/pflag"

	"github.com/baton-pd/baton/internal/trace"
)

// traceFlags are those of `baton race` that check recorded room traces instead of exploring.
type traceFlags struct {
	files []string
	slack time.Duration
	whole bool
	show  int
}

func init() { raceModes = append(raceModes, func() raceMode { return new(traceFlags) }) }

func (t *traceFlags) add(f *pflag.FlagSet) {
	f.StringArrayVar(&t.files, "check-trace", nil, "check a file that a worker wrote with --room-trace (repeat for more workers: their sides are compared)")
	f.DurationVar(&t.slack, "trace-slack", time.Second, "with --check-trace: how late after its deadline a room may end")
	f.BoolVar(&t.whole, "trace-whole", false, "with --check-trace: the files are of all workers, so every decode room that succeeded has its prefill room in them")
	f.IntVar(&t.show, "trace-findings", 20, "with --check-trace: findings to print at most")
}

// asked reports whether traces are to be checked.
func (t *traceFlags) asked() bool { return len(t.files) > 0 }

// run checks the files and prints the report, as one JSON object if asJSON. The error is nil
// only if the traces are whole and valid.
func (t *traceFlags) run(out io.Writer, asJSON bool) error {
	if t.slack <= 0 || t.show < 0 {
		return usagef("--trace-slack must be above 0 and --trace-findings not negative")
	}
	sources := make([]trace.Source, 0, len(t.files))
	for _, name := range t.files {
		f, err := os.Open(name)
		if err != nil {
			return usageError{fmt.Errorf("--check-trace: %w", err)}
		}
		defer f.Close()
		sources = append(sources, trace.Source{Name: name, Reader: f})
	}
	rep, err := trace.Check(trace.Options{Slack: t.slack, Whole: t.whole}, sources...)
	if err != nil {
		return err
	}
	if asJSON {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		err = e.Encode(rep)
	} else {
		err = rep.Print(out, t.show)
	}
	if err != nil {
		return err
	}
	if !rep.OK() {
		return fmt.Errorf("the room trace is %s", rep.Verdict)
	}
	return nil
}
