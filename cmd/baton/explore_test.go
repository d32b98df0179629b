package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// explored runs `baton explore` with args.
func explored(t *testing.T, args ...string) (string, int) {
	t.Helper()
	var out, errs strings.Builder
	c := newRoot()
	c.SetArgs(append([]string{"explore"}, args...))
	c.SetOut(&out)
	c.SetErr(&errs)
	status := report(&errs, c.ExecuteContext(t.Context()))
	return out.String() + errs.String(), status
}

// TestExploreCommand: a world that holds, one that is broken on purpose, and its counterexample
// taken again.
func TestExploreCommand(t *testing.T) {
	dir := t.TempDir()
	result := filepath.Join(dir, "result.json")
	out, status := explored(t, "--scenario", "smallest", "--json", result)
	if status != 0 || !strings.Contains(out, "holds") {
		t.Fatalf("status %d\n%s", status, out)
	}
	var got []worldResult
	b, err := os.ReadFile(result)
	if err == nil {
		err = json.Unmarshal(b, &got)
	}
	if err != nil || len(got) != 1 || got[0].States < 1000 || got[0].Verdict != "holds" || !got[0].Complete {
		t.Errorf("%v, %+v", err, got)
	}

	out, status = explored(t, "--scenario", "smallest", "--fault", "no-revoke")
	if status != 1 || !strings.Contains(out, "invariant 4 memory") {
		t.Fatalf("status %d\n%s", status, out)
	}
	trace := filepath.Join(dir, "trace.txt")
	if err := os.WriteFile(trace, []byte(out), 0o600); err != nil {
		t.Fatal(err)
	}
	again, status := explored(t, "--trace", trace)
	if status != 1 || !strings.Contains(again, "invariant 4 memory") || strings.Count(again, "\n") < 8 {
		t.Errorf("status %d\n%s", status, again)
	}

	world := filepath.Join(dir, "own.world")
	if err := os.WriteFile(world, []byte("for = mine\nsize = small\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, status = explored(t, "--scenario", world, "--json", "-"); status != 0 || !strings.Contains(out, `"scenario": "own"`) || strings.Contains(out, "transitions,") {
		t.Errorf("status %d\n%s", status, out)
	}
	if out, status = explored(t, "--list"); status != 0 || !strings.Contains(out, "everything_fence") || !strings.Contains(out, "early-ack") {
		t.Errorf("status %d\n%s", status, out)
	}
}

func TestExploreUsage(t *testing.T) {
	for _, args := range [][]string{{"--scenario", "no-such"}, {"--fault", "no-such"}, {"--trace", "no-such"}, {"world"}} {
		if out, status := explored(t, args...); status != 2 {
			t.Errorf("%v: status %d\n%s", args, status, out)
		}
	}
}
