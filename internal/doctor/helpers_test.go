package doctor

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// began is when every synthetic window begins.
var began = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

// Labels as SGLang's scheduler sets them (metrics_collector.py, SchedulerMetricsCollector).
const (
	sgP = `model_name="m",engine_type="prefill",tp_rank="0",pp_rank="0",moe_ep_rank="0"`
	sgD = `model_name="m",engine_type="decode",tp_rank="0",pp_rank="0",moe_ep_rank="0"`
)

// synth makes a target's scrapes of rows "metric{labels} v v v", one value a scrape; _ is no sample, and a row
// that is short repeats its last value. A row "down . x ." makes the scrapes marked x fail. P and D in braces
// stand for SGLang's labels.
func synth(t *testing.T, name string, every time.Duration, n int, rows string) []Scrape {
	t.Helper()
	texts := make([]strings.Builder, n)
	failed := make([]bool, n)
	for row := range strings.SplitSeq(rows, "\n") {
		f := strings.Fields(strings.NewReplacer("{P", "{"+sgP, "{D", "{"+sgD).Replace(row))
		if len(f) == 0 {
			continue
		}
		for i := range n {
			v := f[min(i+1, len(f)-1)]
			switch {
			case f[0] == "down":
				failed[i] = v == "x"
			case v != "_":
				fmt.Fprintf(&texts[i], "%s %s\n", f[0], v)
			}
		}
	}
	out := make([]Scrape, n)
	for i := range out {
		out[i] = Scrape{Target: name, Time: began.Add(time.Duration(i) * every)}
		if failed[i] {
			out[i].Err = "connection refused"
			continue
		}
		samples, err := ParseText(strings.NewReader(texts[i].String()))
		if err != nil {
			t.Fatalf("%s, scrape %d: %v", name, i, err)
		}
		out[i].Samples = samples
	}
	return out
}

// build is Build for tests.
func build(t *testing.T, scrapes []Scrape, about map[string]About) []*Target {
	t.Helper()
	fleet, err := Build(scrapes, about)
	if err != nil {
		t.Fatal(err)
	}
	return fleet
}

// found lists a report's findings as "rule@target", sorted; a warning has a ~ before it.
func found(r *Report) []string {
	out := []string{}
	for _, f := range r.Findings {
		s := f.Rule + "@" + f.Target
		if f.Severity == Warning {
			s = "~" + s
		}
		out = append(out, s)
	}
	slices.Sort(out)
	return out
}

// complete fails for a finding that does not say all it must.
func complete(t *testing.T, r *Report) {
	t.Helper()
	for _, f := range r.Findings {
		if f.Title == "" || len(f.Evidence) == 0 || f.Cause == "" || f.Action == "" || f.Target == "" {
			t.Errorf("finding %s lacks title, evidence, cause, action or target: %+v", f.Rule, f)
		}
	}
}

// recorded reads a file of testdata.
func recorded(t *testing.T, name string) Saved {
	t.Helper()
	f, err := os.Open("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s, err := ParseFile(name, f)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
