package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/chaos"
)

// chaosRun is one run of TestChaos: its short form, and the long one of BATON_PROVE=1.
type chaosRun struct {
	engine, transport  string
	requests, faults   int
	requests1, faults1 int
	gap                time.Duration // between faults in the long form, so that they last as long as the requests
}

// The long forms together send 10,000 requests and do 200 faults.
var chaosRuns = []chaosRun{
	{"sim", "tcp", 400, 20, 5200, 95, 2 * time.Second},
	{"sim", "shm", 400, 20, 4400, 80, 2 * time.Second},
	{"llamacpp", "tcp", 30, 6, 400, 25, 8 * time.Second},
}

// TestChaos: clients without a pause on a stack to which everything happens that package chaos knows, with both
// engines and both transports, race detector and poisoned pages (sim), recorded room events, and a
// judge of every request's end. The short form has every kind of fault on each transport.
// `baton chaos` runs the same.
func TestChaos(t *testing.T) {
	for _, c := range chaosRuns {
		t.Run(c.engine+"/"+c.transport, func(t *testing.T) {
			t.Parallel()
			seed := stormSeed(t)
			cfg, err := chaos.SimConfig(seed, c.transport)
			if err != nil {
				t.Fatal(err)
			}
			cfg.Binary = binaryRace
			if c.engine != "sim" {
				p := needModel(t)
				cfg = chaos.ModelConfig(seed, c.transport, []string{"--engine", c.engine, "--model", p.Model, "--lib-dir", p.LibDir})
				cfg.Binary = binary
			}
			requests, faults := c.requests, c.faults
			if prove {
				requests, faults, cfg.World.Gap = c.requests1, c.faults1, c.gap
			}
			cfg.Requests, cfg.Faults, cfg.Log = requests, chaos.Draw(seed, faults, cfg.World), t.Output()
			judged(t, c, cfg)
		})
	}
}

// judged runs cfg; every violation fails the test, and so does a run that shows nothing.
func judged(t *testing.T, c chaosRun, cfg chaos.Config) {
	t.Helper()
	dir, err := chaos.TempDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	cfg.Dir = dir
	rep, err := chaos.Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("seed %d on %s: %d requests %v, %d faults %v, %+v, trace %s, %v", rep.Seed, rep.Network, rep.Requests, rep.Ends, len(cfg.Faults), rep.Faults,
		rep.Packets, rep.Trace, rep.Took.Round(time.Second))
	for _, v := range rep.Violations {
		t.Error(v)
	}
	done := 0
	for _, n := range rep.Faults {
		done += n
	}
	if rep.Requests < cfg.Requests || done != len(cfg.Faults) || rep.Ends["answered"] < rep.Requests/5 {
		t.Errorf("%d of %d requests, %d of %d faults, %d answered: too little was shown", rep.Requests, cfg.Requests, done, len(cfg.Faults), rep.Ends["answered"])
	}
	if c.engine == "sim" && len(rep.Faults) != len(chaos.Kinds()) {
		t.Errorf("kinds of faults: %v, want each of %v", slices.Sorted(maps.Keys(rep.Faults)), chaos.Kinds())
	}
	if !t.Failed() {
		return
	}
	again := fmt.Sprintf("baton chaos --seed %d --engine %s --transport %s --requests %d --faults %d", cfg.Seed, c.engine, c.transport, cfg.Requests, len(cfg.Faults))
	if prove {
		again += " --gap " + c.gap.String()
	}
	t.Logf("again with BATON_SEED=%d, or: %s\nreduce: %s --reduce\nthe schedule:\n%s", cfg.Seed, again, again, chaos.FormatSchedule(cfg.Faults))
	for _, name := range slices.Sorted(maps.Keys(rep.Output)) {
		file := filepath.Join(os.TempDir(), fmt.Sprintf("chaos-%d-%s.log", cfg.Seed, name))
		if err := os.WriteFile(file, []byte(rep.Output[name]), 0o600); err != nil {
			t.Error(err)
		}
		t.Logf("the end of what %s printed is in %s", name, file)
	}
}

// TestChaosCommand: `baton chaos` runs a schedule from a file, reports, and refuses what it does not know.
func TestChaosCommand(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := file("good", "500ms garbage decode-0\n1s stop prefill-1 for=300ms\n1.2s delay router~decode-1 for=500ms delay=5ms\n")
	report := filepath.Join(dir, "report")
	for _, c := range []struct {
		args []string
		exit int
		says string
	}{
		{[]string{"--transport", "shm", "--requests", "20", "--seed", "5", "--schedule", good, "--json", report}, 0, "0 violations"},
		{[]string{"--transport", "tcp", "--schedule", file("foreign", "1s kill prefill-9\n")}, 1, "no process prefill-9"},
		{[]string{"--schedule", file("bad", "1s melt prefill-0\n")}, 2, "unknown kind"},
		{[]string{"--only", "melt"}, 2, "the kinds are"},
		{[]string{"--engine", "abacus"}, 2, "use sim or llamacpp"},
	} {
		out, err := exec.CommandContext(t.Context(), binary, append([]string{"chaos"}, c.args...)...).CombinedOutput()
		exit := 0
		var ended *exec.ExitError
		if errors.As(err, &ended) {
			exit = ended.ExitCode()
		} else if err != nil {
			t.Fatal(err)
		}
		if exit != c.exit || !strings.Contains(string(out), c.says) {
			t.Errorf("chaos %v: exit status %d, want %d and %q:\n%s", c.args, exit, c.exit, c.says, out)
		}
	}
	raw, err := os.ReadFile(report)
	if err != nil {
		t.Fatal(err)
	}
	var rep struct {
		Seed     uint64
		Requests int
		Faults   map[chaos.Kind]int
	}
	if err := json.Unmarshal(raw, &rep); err != nil || rep.Seed != 5 || rep.Requests < 20 || rep.Faults[chaos.Stop] != 1 || len(rep.Faults) != 3 {
		t.Errorf("%v: report %+v", err, rep)
	}
}
