package model

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/model/explore"
	"github.com/baton-pd/baton/internal/room"
)

// prove is the long form.
var prove = os.Getenv("BATON_PROVE") != ""

// TestWorlds explores every small world completely; with BATON_PROVE=1 the large ones as well.
func TestWorlds(t *testing.T) {
	for _, sc := range Scenarios() {
		t.Run(sc.Name, func(t *testing.T) {
			if sc.Large && !prove {
				t.Skip("large: BATON_PROVE=1 explores it")
			}
			r := Explore(context.Background(), sc, limits())
			t.Logf("%v", r)
			if raceBuild && r.Violation == nil {
				t.Skip("-race: cut off; scripts/test.sh explores it whole without -race")
			}
			if r.Violation != nil {
				t.Fatalf("%v", r.Violation)
			}
			if !r.Complete || r.Done == 0 {
				t.Errorf("not explored: %v, %d ends", r, r.Done)
			}
			if !sc.Large && r.States > 200_000 {
				t.Errorf("%d states are not small: every test run pays for them", r.States)
			}
		})
	}
}

// limits of a search in tests.
func limits() explore.Limits {
	if raceBuild {
		return explore.Limits{States: 5_000}
	}
	return explore.Limits{}
}

// invariantOf a violation; "" if there is none, the first invariant for the explorer's own kinds:
// a room that does not end.
func invariantOf(v *explore.Violation) Invariant {
	var b *BrokenError
	switch {
	case v == nil:
		return ""
	case errors.As(v.Err, &b):
		return b.Invariant
	case v.Kind == explore.KindLivelock:
		return Progress
	default:
		return Ends
	}
}

// TestFaults: each fault that is seeded into the shells breaks the invariant that it should, in a
// world that holds without it (TestWorlds), and the counterexample can be replayed.
func TestFaults(t *testing.T) {
	for _, c := range []struct {
		name  string
		fault Fault
		world string
		want  Invariant
	}{
		{"an abort is acked at once though writes are outstanding", FaultEarlyAck, "session_ends_drain", Memory},
		{"an abort before its room leaves no tombstone", FaultNoTombstone, "told_without_clock", Ends},
		{"a deadline frees pages", FaultFreeOnDeadline, "session_ends_drain", Memory},
		{"a lost peer frees pages", FaultFreeOnLost, "session_ends_wild", Memory},
		{"generations are not compared", FaultNoGeneration, "reuse_generation", Identity},
		{"sessions are not compared", FaultAnySession, "datagram_reuse", Identity},
		{"the last chunk is skipped in silence", FaultSkipLast, "told_without_clock", Ends},
		{"no deadline comes", FaultNoDeadline, "crashes_fence", Ends},
		{"an aborted grant stays parked", FaultKeepParked, "smallest", Returns},
		{"a grant for another prompt is taken", FaultNoDigest, "reuse_key", Truth},
		{"checksums are not compared", FaultNoChecksum, "told_without_clock", Truth},
		{"a grant is not revoked", FaultNoRevoke, "smallest", Memory},
		{"a transport calls a revoked grant fenced that is not", FaultLyingFence, "session_ends_wild", Memory},
		{"a grant is refused in silence", FaultSilentRefusal, "told_without_clock", Ends},
		{"an index keeps a forgotten room", FaultKeepIndex, "smallest", Returns},
	} {
		t.Run(c.name, func(t *testing.T) {
			sc := scenario(t, c.world)
			if raceBuild {
				t.Skip("-race: see raceBuild")
			}
			w := NewWorld(sc)
			w.SetFault(c.fault)
			r := explore.Run[State](context.Background(), w, explore.Limits{})
			if got := invariantOf(r.Violation); got != c.want {
				t.Fatalf("broke %q, want %q\n%v", got, c.want, r.Violation)
			}
			t.Logf("%d states; %v", r.States, r.Violation.Err)
			replays(t, w, r.Violation)
		})
	}
}

func scenario(t *testing.T, nameOrText string) *Scenario {
	t.Helper()
	if sc, ok := Find(nameOrText); ok {
		return sc
	}
	sc, err := ParseScenario("inline", nameOrText)
	if err != nil {
		t.Fatal(err)
	}
	return sc
}

// replays takes the steps of a counterexample again and sees what it saw.
func replays(t *testing.T, w *World, v *explore.Violation) {
	t.Helper()
	var indices []int
	for _, l := range v.Lines {
		indices = append(indices, l.Index)
	}
	s, err := explore.Replay[State](w, v.Init, indices)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(v.Lines); n > 0 && w.Show(s) != v.Lines[n-1].State {
		t.Errorf("replayed to\n%s, want\n%s", w.Show(s), v.Lines[n-1].State)
	}
}

// TestSymmetryKeepsVerdicts: with two interchangeable rooms the reduction halves the states
// and changes nothing else.
func TestSymmetryKeepsVerdicts(t *testing.T) {
	const text = "for = symmetry\nsize = small\ntransport = drain\nrooms = 2\npages = 1\ndeadlines = no\n"
	if raceBuild {
		t.Skip("-race: see raceBuild")
	}
	sc := scenario(t, text)
	with := Explore(context.Background(), sc, explore.Limits{})
	w := NewWorld(sc)
	w.symmetric = false
	without := explore.Run[State](context.Background(), w, explore.Limits{})
	if with.Violation != nil || without.Violation != nil || with.Depth != without.Depth {
		t.Fatalf("%v, %v", with, without)
	}
	if 2*with.States < without.States || 2*with.States > without.States+without.States/5 {
		t.Errorf("%d states with, %d without", with.States, without.States)
	}
	for _, f := range []Fault{FaultSkipLast, FaultNoRevoke, FaultKeepIndex} {
		w, v := NewWorld(sc), NewWorld(sc)
		w.SetFault(f)
		v.SetFault(f)
		v.symmetric = false
		a, b := explore.Run[State](context.Background(), w, explore.Limits{}), explore.Run[State](context.Background(), v, explore.Limits{})
		if invariantOf(a.Violation) != invariantOf(b.Violation) || a.Violation != nil && len(a.Violation.Lines) != len(b.Violation.Lines) {
			t.Errorf("fault %d: %v and %v", f, a.Violation, b.Violation)
		}
	}
}

// TestReached: the worlds go where they must, or they prove little: every node of both machines.
func TestReached(t *testing.T) {
	reached := make(map[room.Side]map[room.Node]bool)
	for side, rows := range map[room.Side][]room.Row{room.SideSender: room.SenderTable(), room.SideReceiver: room.ReceiverTable()} {
		reached[side] = make(map[room.Node]bool)
		for _, r := range rows {
			reached[side][r.From] = false
		}
	}
	if raceBuild {
		t.Skip("-race: see raceBuild")
	}
	for _, name := range []string{"smallest", "session_ends_drain", "told_without_clock"} {
		w := NewWorld(scenario(t, name))
		explore.Run[State](context.Background(), w, explore.Limits{})
		for m := range w.probedS {
			reached[room.SideSender][m.Node()] = true
		}
		for m := range w.probedR {
			reached[room.SideReceiver][m.Node()] = true
		}
	}
	for side, nodes := range reached {
		for n, ok := range nodes {
			if !ok {
				t.Errorf("%v: no world reaches %v", side, n)
			}
		}
	}
}

// TestParseScenario: files are read strictly.
func TestParseScenario(t *testing.T) {
	good := "for = x\nsize = small\n"
	for _, c := range []struct{ text, want string }{
		{good, ""},
		{"# comment\n\n for = a # why\nsize=large\nrooms = 2\nchunks = 3\n", ""},
		{"size = small", `no "for"`},
		{"for = x", `no "size"`},
		{good + "for = y", "line 3: for is set twice"},
		{good + "chunks", `line 3: "chunks" is not "key = value"`},
		{good + "chunks =", "is not"},
		{good + "chunks = 4", `line 3: chunks: "4" is not a number from 1 to 3`},
		{good + "chunks = one", "is not a number"},
		{good + "transport = ib", "none of fence, drain, wild"},
		{good + "net = tcp", "neither session nor datagram"},
		{good + "abort = 1", "no such key; budgets are aborts"},
		{good + "losses = 1", "use net = datagram"},
		{good + "chunks = 3\npages = 2", "2 pages are too few"},
		{good + "rooms = 2\nreuse = 2", "at most 3 together"},
		{good + "session_ends = 5", "make 6 sessions"},
		{good + "transport = drain\ndata_ends = 1", "data_ends needs"},
	} {
		sc, err := ParseScenario("t", c.text)
		if c.want == "" && (err != nil || sc.Pages != sc.Rooms*sc.Chunks) || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%q: %v, want %q", c.text, err, c.want)
		}
	}
	if len(Scenarios()) < 10 {
		t.Errorf("only %d scenarios are embedded", len(Scenarios()))
	}
}

// FuzzParseScenario: no text makes it panic, and what it takes is safe as far as it is explored.
func FuzzParseScenario(f *testing.F) {
	for _, sc := range []string{"for = x\nsize = small\nchunks = 2\n", "net = datagram\nlosses = 9", "=\n#\n= ="} {
		f.Add(sc)
	}
	f.Fuzz(func(t *testing.T, text string) {
		sc, err := ParseScenario("fuzz", text)
		if err != nil {
			return
		}
		r := Explore(context.Background(), sc, explore.Limits{States: 300})
		// A world without deadlines need not end; but nothing unsafe may happen in any.
		if v := r.Violation; v != nil && v.Kind == explore.KindSafety && !sc.EarlyReuse {
			t.Errorf("%v", v)
		}
	})
}
