package kvbench

import (
	"bytes"
	"context"
	"errors"
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// scripted is a system of known speed that fails in round fail.
type scripted struct {
	name  string
	fail  int // 0: never
	bad   bool
	seeds []uint64
	order *[]string
}

func (s *scripted) Name() string { return s.name }

func (s *scripted) Round(_ context.Context, block int, seed uint64) (Round, error) {
	s.seeds = append(s.seeds, seed)
	*s.order = append(*s.order, s.name)
	if len(s.seeds) == s.fail {
		return Round{}, errors.New("it broke")
	}
	return Round{Rooms: 1, Bytes: 1e9, Seconds: 0.5, CPU: 0.25, Verified: !s.bad}, nil
}

func (s *scripted) Singles(_ context.Context, _, n int) ([]int64, error) {
	return make([]int64, n), nil
}

func (s *scripted) Close() error { return nil }

// run does all rounds of w in one go.
func run(t *testing.T, w Work, systems ...System) ([]Row, error) {
	b := NewBench(w)
	err := b.Run(t.Context(), systems, w.Rounds)
	return b.Rows(), err
}

// TestStartedAnew: what systems of a name do in several runs is one row; one that fails or is not there in a later run has none.
func TestStartedAnew(t *testing.T) {
	var order []string
	b := NewBench(Work{Blocks: []int{4096}, Rooms: 1, Rounds: 3, Latencies: 7})
	for i, systems := range [][]System{
		{&scripted{name: "a", order: &order}, &scripted{name: "b", order: &order}, &scripted{name: "c", order: &order}},
		{&scripted{name: "b", order: &order, fail: 2}, &scripted{name: "a", order: &order}},
	} {
		if err := b.Run(t.Context(), systems, 2-i); (err != nil) != (i == 1) {
			t.Errorf("run %d: %v", i, err)
		}
	}
	rows := b.Rows()
	if len(rows) != 1 || rows[0].Transport != "a" || rows[0].Rounds != 3 || len(b.records["a"][0].rates) != 3 || len(b.records["a"][0].times) != 7 {
		t.Errorf("%+v, %+v", rows, b.records)
	}
	if got := strings.Join(order, ""); got != "abc"+"bca"+"cab"+"ba"+"ab" {
		t.Errorf("the turns were %s", got)
	}
	if NewBench(Work{Blocks: []int{1}}).Rows() != nil {
		t.Error("rows of nothing")
	}
}

func TestRunTakesTurns(t *testing.T) {
	var order []string
	a, b, c := &scripted{name: "a", order: &order}, &scripted{name: "b", order: &order, fail: 5}, &scripted{name: "c", order: &order, bad: true}
	rows, err := run(t, Work{Blocks: []int{4096, 8192}, Rooms: 1, Rounds: 2, Latencies: 5}, a, b, c)
	if err == nil || !strings.Contains(err.Error(), "b, blocks of 8192 bytes: it broke") {
		t.Errorf("the error is %v", err)
	}
	if got := strings.Join(order, ""); got != "abc"+"bca"+"cab"+"abc"+"bca"+"ca" {
		t.Errorf("the turns were %s", got)
	}
	var names []string
	for _, r := range rows {
		names = append(names, r.Transport)
		if r.GBPerS != 2 || r.CPUPerGB != 0.25 || r.Verified != (r.Transport != "c") || r.Repeated != 0 {
			t.Errorf("%+v", r)
		}
	}
	if got := strings.Join(names, ""); got != "aabcc" { // b's second is not whole
		t.Errorf("rows of %s", got)
	}
	seen := map[uint64]bool{}
	for _, s := range a.seeds {
		if seen[s] {
			t.Error("two rounds have the same bytes, so that the second proves nothing")
		}
		seen[s] = true
	}
}

// TestRoundsOfPartedCoresAreRepeated: a round is repeated while the cores part, and counts when patience is at its end.
func TestRoundsOfPartedCoresAreRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var order []string
		s := &scripted{name: "a", order: &order}
		script := []float64{40, 40, 170, 170, 30, 30} // before, after, at the third round parted twice
		c := &cores{patience: time.Second, distance: func() (float64, bool) {
			<-time.After(time.Millisecond) // of the bubble's clock
			d := script[0]
			script = script[1:]
			return d, true
		}}
		var r record
		seed := uint64(0)
		for round := 1; round <= 2; round++ {
			if err := r.round(t.Context(), s, Work{Rounds: 2}, 4096, round, &seed, c); err != nil {
				t.Fatal(err)
			}
			if round == 1 {
				script = []float64{40, 170, 170, 30, 30}
			}
		}
		if len(order) != 3 || r.repeated != 1 || len(r.rates) != 2 || r.coreNS != 40 {
			t.Errorf("%d rounds, %+v", len(order), r)
		}
		c.distance = func() (float64, bool) { <-time.After(time.Millisecond); return 170, true }
		if err := r.round(t.Context(), s, Work{Rounds: 2}, 4096, 2, &seed, c); err != nil || c.patience > 0 {
			t.Errorf("%v, patience left %v", err, c.patience)
		}
		if len(r.rates) != 3 || r.coreNS != 170 {
			t.Errorf("%+v", r)
		}
	})
}

func TestCoreDistance(t *testing.T) {
	d, ok := coreDistance()
	if ok != (d > 0) || d > 1e9 {
		t.Errorf("%v ns, %v", d, ok)
	}
	t.Logf("%.0f ns, two cores: %v", d, ok)
}

// TestPeerTalk runs a shell in place of another system.
func TestPeerTalk(t *testing.T) {
	talk := `echo noise; echo '{"name":"other"}'; read q; echo more noise
echo '{"rooms":1,"bytes":1000000000,"seconds":0.25,"cpu":0.5,"verified":true}'; read q; echo '{"ns":[3,1,2]}'; read q`
	var log bytes.Buffer
	p, err := startPeer(exec.CommandContext(t.Context(), "sh", "-c", talk), &log)
	if err != nil {
		t.Fatal(err)
	}
	r, err := p.Round(t.Context(), 4096, 7)
	if want := (Round{Rooms: 1, Bytes: 1e9, Seconds: 0.25, CPU: 0.5, Verified: true}); err != nil || r != want || p.Name() != "other" {
		t.Errorf("%q: %+v, %v", p.Name(), r, err)
	}
	if ns, err := p.Singles(t.Context(), 4096, 3); err != nil || len(ns) != 3 {
		t.Error(ns, err)
	}
	_ = p.Close() // the shell's last read finds the end, which is its status
	if _, err := p.Round(t.Context(), 4096, 8); err == nil {
		t.Error("a peer that has ended answers")
	}
	if log.String() != "noise\nmore noise\n" {
		t.Errorf("the log is %q", log.String())
	}
	if _, err := startPeer(exec.CommandContext(t.Context(), "sh", "-c", "exit 3"), &log); err == nil || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("a peer that does not start: %v", err)
	}
}
