package repotest

import (
	"strings"
	"testing"
)

// required are the modules of go.mod: path -> marked indirect.
func required(t *testing.T) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	for line := range strings.SplitSeq(string(read(t, "go.mod")), "\n") {
		f := strings.Fields(strings.TrimPrefix(strings.TrimSpace(line), "require "))
		if len(f) >= 2 && strings.Contains(f[0], ".") && strings.HasPrefix(f[1], "v") {
			out[f[0]] = strings.Contains(line, "// indirect")
		}
	}
	if len(out) == 0 {
		t.Fatal("go.mod requires nothing; this test does not see it")
	}
	return out
}

// imported are the modules that our code imports, and one file that does.
func imported(t *testing.T, mods map[string]bool) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, s := range sources(t) {
		for _, p := range importsOf(s) {
			if standard(p) || within(p, module) {
				continue
			}
			best := ""
			for m := range mods {
				if within(p, m) && len(m) > len(best) {
					best = m
				}
			}
			if best == "" {
				t.Errorf("%s imports %s, which go.mod does not require", s.name, p)
				continue
			}
			out[best] = s.name
		}
	}
	return out
}

// TestDependenciesAreExplained: whatever we import has its reason in the first decision.
func TestDependenciesAreExplained(t *testing.T) {
	text := string(read(t, "docs/decisions/0001-libraries.md"))
	for m, file := range imported(t, required(t)) {
		if !strings.Contains(text, "`"+m+"`") {
			t.Errorf("%s imports %s; docs/decisions/0001-libraries.md does not say why", file, m)
		}
	}
}

// TestModulesAreTidy: go.mod tells direct requirements from others. `go mod tidy` mends it.
func TestModulesAreTidy(t *testing.T) {
	mods := required(t)
	use := imported(t, mods)
	for m, indirect := range mods {
		file, direct := use[m]
		switch {
		case direct && indirect:
			t.Errorf("go.mod marks %s indirect; %s imports it", m, file)
		case !direct && !indirect:
			t.Errorf("go.mod requires %s directly; nothing imports it", m)
		}
	}
}
