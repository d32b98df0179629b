package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var rewriteDocs = flag.Bool("rewrite", false, "record the output of the commands in docs/race.md; review the diff")

// raceDoc is the page whose figures are the command's.
const raceDoc = "../../docs/race.md"

// race runs `baton` with args and gives what it prints.
func race(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	c := newRoot()
	c.SetArgs(args)
	c.SetOut(&out)
	c.SetErr(io.Discard)
	err := c.ExecuteContext(t.Context())
	return out.String(), err
}

func mustRace(t *testing.T, args ...string) string {
	t.Helper()
	out, err := race(t, args...)
	if err != nil {
		t.Fatalf("baton %s: %v", strings.Join(args, " "), err)
	}
	return out
}

// recorded is a block of the page: a command and what it printed.
var recorded = regexp.MustCompile("(?ms)^```\n\\$ baton (race[^\n]*)\n(.*?)^```\n")

// TestFiguresOfTheRacePage: every block of docs/race.md that begins with a command is what the command prints now.
func TestFiguresOfTheRacePage(t *testing.T) {
	page, err := os.ReadFile(raceDoc)
	if err != nil {
		t.Fatal(err)
	}
	blocks := 0
	fresh := recorded.ReplaceAllFunc(page, func(b []byte) []byte {
		blocks++
		m := recorded.FindSubmatch(b)
		out := mustRace(t, strings.Fields(string(m[1]))...)
		if got := string(m[2]); got != out && !*rewriteDocs {
			t.Errorf("`baton %s` prints other things than docs/race.md says; read the difference, then go test ./cmd/baton -run RacePage -rewrite\npage:\n%s\nnow:\n%s", m[1], got, out)
		}
		return []byte("```\n$ baton " + string(m[1]) + "\n" + out + "```\n")
	})
	if blocks < 4 {
		t.Errorf("only %d blocks with a command found", blocks)
	}
	if *rewriteDocs {
		if err := os.WriteFile(raceDoc, fresh, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRaceJSON(t *testing.T) {
	name := filepath.Join(t.TempDir(), "race.json")
	if out := mustRace(t, "race", "--json", name); out != "" {
		t.Errorf("with a file, standard output got %q", out)
	}
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if out := mustRace(t, "race", "--json", "-"); out != string(text) {
		t.Error("- and a file get different things")
	}
	var results []map[string]json.RawMessage
	if err := json.Unmarshal(text, &results); err != nil {
		t.Fatal(err)
	}
	keys := []string{"policy", "executions", "pinned", "written_after_ack", "wrong_success", "lost_cause", "counterexample"}
	policies := []string{"legacy", "fix-a", "fix-b", "fix-ab", "mooncake", "baton"}
	if len(results) != len(policies) {
		t.Fatalf("%d objects, want %d", len(results), len(policies))
	}
	for i, r := range results {
		if string(r["policy"]) != `"`+policies[i]+`"` || len(r) != len(keys) {
			t.Errorf("object %d: %v", i, r)
		}
		faults := 0
		for _, k := range keys[1:6] {
			if !regexp.MustCompile(`^(0|[1-9][0-9]*)$`).Match(r[k]) {
				t.Errorf("%s: %s is %s, not a number of executions", policies[i], k, r[k])
			}
			if k != "executions" && string(r[k]) != "0" {
				faults++
			}
		}
		var examples []struct {
			Fault string
			Steps []string
		}
		if err := json.Unmarshal(r["counterexample"], &examples); err != nil || len(examples) != faults {
			t.Errorf("%s: %d faults, counterexample %s (%v)", policies[i], faults, r["counterexample"], err)
		}
		for _, e := range examples {
			if string(r[e.Fault]) == "0" || len(e.Steps) == 0 {
				t.Errorf("%s: a counterexample for %q: %v", policies[i], e.Fault, e.Steps)
			}
		}
	}
	if got := string(results[5]["counterexample"]); got != "[]" {
		t.Errorf("baton's counterexample is %s", got)
	}
	if out := mustRace(t, "race", "--policy", "baton", "--json", "-", "--variant", "room-reuse"); strings.Count(out, `"policy"`) != 1 {
		t.Errorf("one policy asked for, got %s", out)
	}
}

// TestRaceHTML: the page stands alone, is well formed, and holds all of the timeline.
func TestRaceHTML(t *testing.T) {
	for _, args := range [][]string{{}, {"--policy", "baton"}, {"--policy", "fix-ab", "--variant", "room-reuse", "--unlocked"}} {
		page := mustRace(t, append([]string{"race", "--html", "-"}, args...)...)
		for _, outside := range []string{"http:", "https:", "src=", "url(", "@import", "<script", "<link", "//"} {
			if strings.Contains(page, outside) {
				t.Errorf("%v: the page reaches outside: it has %q", args, outside)
			}
		}
		for _, want := range []string{"prefers-color-scheme: dark", "worker", "bootstrap", "scheduler", "room after it", "client"} {
			if !strings.Contains(page, want) {
				t.Errorf("%v: the page has no %q", args, want)
			}
		}
		svg := page[strings.Index(page, "<svg"):strings.Index(page, "</svg>")] + "</svg>"
		steps := 0
		d := xml.NewDecoder(strings.NewReader(svg))
		for {
			tok, err := d.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%v: the picture is not well formed: %v", args, err)
			}
			if e, ok := tok.(xml.StartElement); ok && e.Name.Local == "text" {
				for _, a := range e.Attr {
					if a.Name.Local == "class" && strings.HasPrefix(a.Value, "step") {
						steps++
					}
				}
			}
		}
		if steps < 12 {
			t.Errorf("%v: %d steps drawn", args, steps)
		}
	}
}

func TestRaceOutputIsPlainWithoutTerminal(t *testing.T) {
	for _, args := range [][]string{{"race"}, {"race", "--explore"}, {"race", "--list"}} {
		if out := mustRace(t, args...); strings.Contains(out, "\x1b") || out == "" {
			t.Errorf("baton %v: escapes in it, or nothing", args)
		}
	}
}

func TestRaceUsage(t *testing.T) {
	for _, args := range [][]string{
		{"--policy", "fix-c"}, {"--variant", "x"}, {"--variant", "all"}, {"--variant", "all", "--explore", "--json", "-"},
		{"--html", "-", "--explore"}, {"legacy"},
	} {
		_, err := race(t, append([]string{"race"}, args...)...)
		var usage usageError
		if !errors.As(err, &usage) {
			t.Errorf("baton race %v: %v, want a usage error", args, err)
		}
	}
	if _, err := race(t, "race", "--html", filepath.Join(t.TempDir(), "no", "such", "dir.html")); err == nil {
		t.Error("a file that cannot be made is no error")
	}
}

func TestWrap(t *testing.T) {
	for _, c := range []struct {
		in   string
		want string
	}{{"", ""}, {"a b c", "a b|c"}, {"abcdef g", "abcdef|g"}, {"max(0,3)=3 é", "max(0,3)=3|é"}} {
		if got := strings.Join(wrap(c.in, 3), "|"); got != c.want {
			t.Errorf("%q: %q, want %q", c.in, got, c.want)
		}
	}
}
