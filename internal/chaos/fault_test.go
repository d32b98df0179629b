package chaos

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

var testWorld = World{Prefills: 2, Decodes: 2, Transport: "tcp"}

func TestScheduleReadsBack(t *testing.T) {
	for seed := range uint64(50) {
		want := Draw(seed, 60, testWorld)
		got, err := ParseSchedule("# a comment\n\n" + FormatSchedule(want))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("seed %d: read back\n%s\nof\n%s", seed, FormatSchedule(got), FormatSchedule(want))
		}
	}
}

func TestDrawnSchedules(t *testing.T) {
	for seed := range uint64(100) {
		faults := Draw(seed, 3*len(Kinds()), testWorld)
		if !slices.Equal(faults, Draw(seed, 3*len(Kinds()), testWorld)) {
			t.Fatal("the same seed draws another schedule")
		}
		count, free := map[Kind]int{}, map[string]time.Duration{}
		last := time.Duration(0)
		for _, f := range faults {
			count[f.Kind]++
			if f.At < last {
				t.Fatalf("seed %d: not in order: %v", seed, f)
			}
			last = f.At
			if f.Target != Clients && f.At < free[f.Target] {
				t.Fatalf("seed %d: something happens to %s already: %v", seed, f.Target, f)
			}
			free[f.Target] = f.At + f.For
		}
		for _, k := range Kinds() {
			if count[k] != 3 {
				t.Fatalf("seed %d: %d of %s, want 3", seed, count[k], k)
			}
		}
	}
}

func TestDrawOnly(t *testing.T) {
	w := testWorld
	w.Only, w.Transport = []Kind{Corrupt, Kill}, "shm"
	for _, f := range Draw(1, 40, w) {
		if f.Kind != Kill && f.Kind != Corrupt || f.Port == "data" {
			t.Errorf("drawn for %v on shm: %v", w.Only, f)
		}
	}
}

func TestParseFaultRefuses(t *testing.T) {
	for line, want := range map[string]string{
		"1s kill":                                   "want TIME KIND TARGET",
		"soon kill prefill-0":                       "not a time",
		"1s melt prefill-0":                         "unknown kind",
		"1s kill prefill-0 for=x":                   "for=x",
		"1s kill prefill-0 hard=1":                  "unknown",
		"1s kill prefill-0~decode-0":                "does not happen to a link",
		"1s drop prefill-0 p=0.1":                   "happens to a link",
		"1s drop router~prefill-0":                  "parameter p",
		"1s drop router~prefill-0 p=2":              "out of range",
		"1s kill prefill-0 p=0.5":                   "parameter p",
		"1s fill prefill-0 n=2":                     "happens to clients",
		"1s kill clients":                           "happens to processes",
		"1s transfer decode-0 rule=\"post drop\"":   "prefill workers",
		"1s transfer prefill-0 rule=\"post":         "quotes do not end",
		"1s corrupt router~decode-0 p=.1 port=http": "want data or session",
	} {
		if _, err := ParseSchedule(line); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", line, err, want)
		}
	}
}

func FuzzParseSchedule(f *testing.F) {
	f.Add(FormatSchedule(Draw(1, 30, testWorld)))
	f.Fuzz(func(t *testing.T, text string) {
		faults, err := ParseSchedule(text)
		if err != nil {
			return
		}
		again, err := ParseSchedule(FormatSchedule(faults))
		if err != nil || !slices.Equal(faults, again) {
			t.Errorf("%v: %v reads back as %v", err, faults, again)
		}
	})
}

// TestReduce: whatever set of faults is needed is found, and nothing more.
func TestReduce(t *testing.T) {
	all := Draw(1, 60, testWorld)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		need := map[int]bool{}
		for range 1 + rng.IntN(4) {
			need[rng.IntN(len(all))] = true
		}
		calls := 0
		got := Reduce(all, func(part []Fault) bool {
			calls++
			n := 0
			for i, f := range all {
				if need[i] && slices.Contains(part, f) {
					n++
				}
			}
			return n == len(need)
		})
		if len(got) != len(need) {
			t.Fatalf("%d faults are needed, %d are left", len(need), len(got))
		}
		if calls > 30+30*len(need) {
			t.Errorf("%d runs for %d of %d faults", calls, len(need), len(all))
		}
	}
	if got := Reduce(all, func([]Fault) bool { return true }); len(got) != 0 {
		t.Errorf("fails without faults; left: %v", got)
	}
	if got := Reduce(all[:1], func(p []Fault) bool { return len(p) == 1 }); len(got) != 1 {
		t.Errorf("the only fault is lost: %v", got)
	}
}
