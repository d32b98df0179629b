package trace

import (
	"bytes"
	"testing"
)

// TestRandomWorldsAreValid: what the production registries do over a network that delays
// everything is valid, whatever ends the rooms.
func TestRandomWorldsAreValid(t *testing.T) {
	for seed := range uint64(20) {
		w := randomWorld(t, seed, 12)
		rep := check(t, w.p.bytes(), w.d.bytes())
		if !rep.OK() || rep.Pairs != 12 || rep.Rooms["prefill"] != 12 || rep.Rooms["decode"] != 12 {
			t.Errorf("seed %d:\n%s", seed, rep.text())
		}
	}
}

// TestCutAnywhere: a process may be killed at any byte of its trace; what is left is valid,
// and with the other side's whole trace as well.
func TestCutAnywhere(t *testing.T) {
	w := newWorld(t)
	w.whole(1, 2)
	w.aborted(2)
	w.p.end()
	w.d.end()
	p, d := w.p.bytes(), w.d.bytes()
	for _, c := range []struct {
		name string
		cut  func(n int) *Report
		size int
	}{
		{"prefill", func(n int) *Report { return check(t, p[:n], d) }, len(p)},
		{"decode", func(n int) *Report { return check(t, p, d[:n]) }, len(d)},
	} {
		for n := 0; n < c.size-1; n += 1 + n%29 { // odd steps: line ends, beginnings and middles
			if rep := c.cut(n); !rep.OK() || rep.Torn > 1 {
				t.Fatalf("%s cut at byte %d:\n%s", c.name, n, rep.text())
			}
		}
	}
	if rep := check(t, nil, nil); rep.Verdict != VerdictEmpty || rep.OK() {
		t.Error(rep.text())
	}
	if _, err := Check(Options{}, Source{"x", broken{}}); err == nil {
		t.Error("a disk that fails was not told")
	}
}

// TestRestart: a file holds one process after another; the torn end of the first is counted.
func TestRestart(t *testing.T) {
	a, b := newWorld(t), newWorld(t)
	a.whole(1, 2)
	b.whole(1, 3)
	b.p.end()
	first := a.p.bytes()
	first = append(first[:len(first)-40], '\n') // as the next process finds and leaves it
	rep := check(t, append(first, b.p.bytes()...), nil)
	if !rep.OK() || rep.Torn != 1 || rep.Incarnations != 2 || rep.Cut != 1 || rep.Rooms["prefill"] != 2 {
		t.Error(rep.text())
	}
	bad := bytes.Replace(first, []byte(`"e":"begin"`), []byte(`"e":"begun"`), 1)
	rep = check(t, append(bad, b.p.bytes()...), nil)
	if rep.OK() || rep.Findings[0].Rule != RuleFormat {
		t.Error(rep.text())
	}
}
