package model

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/baton-pd/baton/internal/model/explore"
	"github.com/baton-pd/baton/internal/room"
)

var (
	mutationSeed = flag.Uint64("mutation-seed", 1, "which sample of the mutants a short run takes")
	mutationPart = flag.String("mutation-part", "0/1", "K/N: the long form takes only each Nth mutant, from the Kth")
)

// mutationWorlds, in the order in which they are asked; the cheap ones find most.
var mutationWorlds = []string{"smallest", "two_chunks", "three_chunks", "told_without_clock", "session_ends_wild", "session_ends_drain", "crashes_drain"}

// TestMutation: a wrong transition table is found by the explorer, or at least contradicts the
// expectations of room's own tests. Mutants that neither can tell from the right table are in
// testdata/equivalent.txt, each with the reason why there is no difference to be seen.
func TestMutation(t *testing.T) {
	if raceBuild {
		t.Skip("-race: see raceBuild")
	}
	all := mutants()
	var sample []*mutant
	if prove {
		var k, n int
		if _, err := fmt.Sscanf(*mutationPart, "%d/%d", &k, &n); err != nil || k < 0 || k >= n {
			t.Fatalf("-mutation-part %s is not K/N with 0 <= K < N", *mutationPart)
		}
		for i := k; i < len(all); i += n {
			sample = append(sample, all[i])
		}
	} else {
		rng := rand.New(rand.NewPCG(*mutationSeed, 0))
		for _, i := range rng.Perm(len(all))[:60] {
			sample = append(sample, all[i])
		}
	}
	equivalent := readEquivalent(t)
	for name := range equivalent {
		if !slices.ContainsFunc(all, func(m *mutant) bool { return m.name == name }) {
			t.Errorf("testdata/equivalent.txt explains %q, which is no mutant", name)
		}
	}
	verdicts := judgeAll(t, sample)
	var byExplorer, byTests, explained int
	for i, m := range sample {
		_, known := equivalent[m.name]
		switch verdicts[i] {
		case killedByExplorer:
			byExplorer++
		case killedByTests:
			byTests++
			t.Logf("killed by tests only: %s", m.name)
		case survived:
			if known {
				explained++
			} else {
				t.Errorf("survived, and not explained in testdata/equivalent.txt: %s", m.name)
			}
			continue
		}
		if known {
			t.Errorf("%s is called equivalent, and was told apart", m.name)
		}
	}
	t.Logf("%d mutants of %d: %d killed by the explorer, %d by tests only, %d survive and are explained as equivalent", len(sample), len(all), byExplorer, byTests, explained)
	if min := len(sample) * 8 / 10; byExplorer < min {
		t.Errorf("the explorer killed only %d of %d", byExplorer, len(sample))
	}
}

type verdict uint8

const (
	survived verdict = iota
	killedByTests
	killedByExplorer
)

// judgeAll judges each mutant, on every core.
func judgeAll(t *testing.T, ms []*mutant) []verdict {
	expect := expectations(t)
	for _, x := range expect { // the production tables must agree, or the verdicts mean nothing
		rows := room.SenderTable()
		if x.side == room.SideReceiver {
			rows = room.ReceiverTable()
		}
		if x.contradicts(room.NewTable(x.side, rows)) {
			t.Fatalf("the production table of %v contradicts room/testdata/expect", x.side)
		}
	}
	var worlds []*Scenario
	for _, name := range mutationWorlds {
		worlds = append(worlds, scenario(t, name))
	}
	out := make([]verdict, len(ms))
	next := make(chan int)
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for i := range next {
				out[i] = judge(ms[i], worlds, expect)
			}
		})
	}
	for i := range ms {
		next <- i
	}
	close(next)
	wg.Wait()
	return out
}

func judge(m *mutant, worlds []*Scenario, expect []*expectation) verdict {
	for _, sc := range worlds {
		if m.idle {
			break // no world can tell
		}
		w := NewWorld(sc)
		if m.side == room.SideSender {
			w.SetTables(m.table(), nil)
		} else {
			w.SetTables(nil, m.table())
		}
		if r := explore.Run[State](context.Background(), w, explore.Limits{States: 400_000}); r.Violation != nil {
			return killedByExplorer
		}
	}
	for _, x := range expect {
		if x.side == m.side && x.contradicts(m.table()) {
			return killedByTests
		}
	}
	if m.invalid() {
		return killedByTests
	}
	return survived
}

// readEquivalent reads testdata/equivalent.txt: "mutant  # reason" a line.
func readEquivalent(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("testdata/equivalent.txt")
	if err != nil {
		t.Fatal(err)
	}
	out := make(map[string]string)
	for n, line := range strings.Split(string(text), "\n") {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		name, reason, ok := strings.Cut(line, "#")
		if name = strings.TrimSpace(name); !ok || len(strings.TrimSpace(reason)) < 20 {
			t.Errorf("testdata/equivalent.txt, line %d: no reason", n+1)
		}
		out[name] = reason
	}
	return out
}
