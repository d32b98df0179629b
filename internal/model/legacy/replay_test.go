package legacy

import (
	"strings"
	"testing"
)

func replay(t *testing.T, policy, variant string, unlocked bool) *Timeline {
	t.Helper()
	p, err := PolicyNamed(policy)
	if err != nil {
		t.Fatal(err)
	}
	v, err := VariantNamed(variant)
	if err != nil {
		t.Fatal(err)
	}
	tl, err := Replay(t.Context(), p, v, unlocked)
	if err != nil {
		t.Fatal(err)
	}
	return tl
}

// TestTheTwelveSteps: the replay is the interleaving of the original fault, number by number.
func TestTheTwelveSteps(t *testing.T) {
	want := []struct{ thread, step, room string }{
		{"worker", "takes c0, guard passes", "WaitingForInput 2, info"},
		{"worker", "writes Transferring: max(2,3)=3", "Transferring 3, info"},
		{"worker", "snapshots the destinations", "Transferring 3, info"},
		{"worker", "starts the long write of c0", "Transferring 3, info"},
		{"bootstrap", "ABORT arrives", "Transferring 3, info"},
		{"bootstrap", "room known, not Success", "Transferring 3, info"},
		{"bootstrap", "status := Failed", "Failed 0, info"},
		{"bootstrap", "transfer information dropped", "Failed 0, no info"},
		{"worker", "write of c0 completes AFTER THE ACK", "Failed 0, no info, acked"},
		{"worker", "writes Transferring: max(0,3)=3", "Transferring 3, no info, acked"},
		{"worker", "takes c1 (last), no transfer information: skipped", "Transferring 3, no info, acked"},
		{"scheduler", "polls for ever: neither Success nor Failed is ever written again", "Transferring 3, no info, acked"},
	}
	tl := replay(t, "legacy", "late-abort", false)
	n := 0
	for _, r := range tl.Rows {
		if r.Number == 0 {
			if r.Step != "sends ABORT_ACK" {
				t.Errorf("a step without a number: %s", r.Step)
			}
			continue
		}
		n++
		if r.Number != n || n > len(want) {
			t.Fatalf("step %d comes at place %d", r.Number, n)
		}
		if w := want[n-1]; r.Thread != w.thread || r.Step != w.step || r.Room != w.room {
			t.Errorf("step %d: %s: %s | %s\nwant    %s: %s | %s", n, r.Thread, r.Step, r.Room, w.thread, w.step, w.room)
		}
	}
	if n != len(want) || tl.Faults != Pinned|WrittenAfterAck {
		t.Errorf("%d steps, faults %v", n, tl.Faults.Names())
	}
	if last := tl.Rows[len(tl.Rows)-1].Client; last != "hangs; gauge 1" {
		t.Errorf("in the end the client %s", last)
	}
}

// TestTheSameInterleavingUnderRepairs: what becomes of the twelve steps.
func TestTheSameInterleavingUnderRepairs(t *testing.T) {
	for policy, want := range map[string]struct {
		faults Fault
		client string
	}{
		"fix-a":    {WrittenAfterAck, "error: aborted by the decode side; gauge 0"},
		"fix-b":    {WrittenAfterAck | LostCause, "error: chunk dropped; gauge 0"},
		"fix-ab":   {WrittenAfterAck, "error: aborted by the decode side; gauge 0"},
		"mooncake": {WrittenAfterAck | LostCause, "error: no cause; gauge 0"},
		"baton":    {0, "error: aborted by the decode side; gauge 0"},
	} {
		tl := replay(t, policy, "late-abort", false)
		if last := tl.Rows[len(tl.Rows)-1].Client; tl.Faults != want.faults || last != want.client {
			t.Errorf("%s: %v, the client sees %q; want %v, %q", policy, tl.Faults.Names(), last, want.faults.Names(), want.client)
		}
	}
}

// TestReplayShowsWhatExploreFinds: elsewhere a replay is a whole execution that shows the first fault that occurs,
// and one without a fault ends every request.
func TestReplayShowsWhatExploreFinds(t *testing.T) {
	for _, v := range Variants() {
		for _, p := range Policies() {
			for _, unlocked := range []bool{false, true} {
				if v.Name == variants[0].Name && !unlocked || p.mooncake && len(v.requests) == maxRequests && unlocked {
					continue // the first is scripted; the other is large, and locked it is here
				}
				tl := replay(t, p.Name, v.Name, unlocked)
				r := explored(t, p, v, unlocked)
				if len(r.Examples) > 0 && tl.Faults&r.Examples[0].Fault == 0 || len(r.Examples) == 0 && tl.Faults != 0 {
					t.Errorf("%s, %s, unlocked %v: the replay shows %v", v.Name, p.Name, unlocked, tl.Faults.Names())
				}
				for _, row := range tl.Rows {
					if strings.Contains(row.Step, "point ") || strings.Contains(row.Room+row.Client, "(") {
						t.Errorf("%s, %s: a step without words: %+v", v.Name, p.Name, row.Line)
					}
				}
			}
		}
	}
}
