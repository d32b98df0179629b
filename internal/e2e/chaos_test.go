package e2e

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/chaos"
)

// chaosRun is one run of TestChaos: its short form, and the long one of BATON_PROVE=1.
type chaosRun struct {
	engine, transport  string
	requests, faults   int
	requests1, faults1 int
}

// The long forms together send 10,000 requests and do 200 faults.
var chaosRuns = []chaosRun{
	{"sim", "tcp", 400, 20, 5200, 95},
	{"sim", "shm", 400, 20, 4400, 80},
	{"llamacpp", "tcp", 30, 6, 400, 25},
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
				requests, faults = c.requests1, c.faults1
			}
			cfg.Requests, cfg.Faults, cfg.Log = requests, chaos.Draw(seed, faults, cfg.World), t.Output()
			judged(t, c, cfg)
		})
	}
}

// judged runs cfg; every violation fails the test, and so does a run that shows nothing.
func judged(t *testing.T, c chaosRun, cfg chaos.Config) {
	t.Helper()
	dir, err := os.MkdirTemp("", "chaos-") // short: sockets are in it
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
	t.Logf("again with BATON_SEED=%d, or: %s\nreduce: %s --reduce\nthe schedule:\n%s", cfg.Seed, again, again, chaos.FormatSchedule(cfg.Faults))
	for _, name := range slices.Sorted(maps.Keys(rep.Output)) {
		file := filepath.Join(os.TempDir(), fmt.Sprintf("chaos-%d-%s.log", cfg.Seed, name))
		if err := os.WriteFile(file, []byte(rep.Output[name]), 0o600); err != nil {
			t.Error(err)
		}
		t.Logf("the end of what %s printed is in %s", name, file)
	}
}
