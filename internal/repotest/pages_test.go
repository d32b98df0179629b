package repotest

import (
	"go/ast"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// pages are the documents, by path.
func pages(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, name := range all(t) {
		if path.Ext(name) == ".md" {
			out[name] = string(read(t, name))
		}
	}
	for _, must := range []string{"README.md", "AGENTS.md", "docs/architecture.md", "docs/protocol.md", "docs/faults.md", "docs/metrics.md"} {
		if out[must] == "" {
			t.Errorf("%s is missing", must)
		}
	}
	return out
}

// withoutFences drops blocks of code, whose brackets and dashes are not the page's.
func withoutFences(text string) string {
	var out []string
	fenced := false
	for line := range strings.SplitSeq(text, "\n") {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			fenced = !fenced
			continue
		}
		if !fenced {
			out = append(out, line)
		}
	}
	return strings.Join(out, "\n")
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#{1,6} +(.+)$`)
	notSlug = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// anchors are the names by which a page's headings are linked to.
func anchors(text string) map[string]bool {
	out := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(withoutFences(text), -1) {
		out[strings.ReplaceAll(notSlug.ReplaceAllString(strings.ToLower(strings.TrimSpace(m[1])), ""), " ", "-")] = true
	}
	return out
}

// The page on the architecture tells what each folder is for.
func TestArchitectureNamesEveryFolder(t *testing.T) {
	_, list, _ := strings.Cut(pages(t)["docs/architecture.md"], "\n## Folders\n")
	seen := map[string]bool{}
	for _, s := range sources(t) {
		if seen[s.dir] || !strings.HasPrefix(s.dir, "internal/") {
			continue
		}
		seen[s.dir] = true
		top := strings.Join(strings.Split(s.dir, "/")[:2], "/")
		word := regexp.MustCompile(`\b` + regexp.QuoteMeta(path.Base(s.dir)) + `\b`)
		if !strings.Contains(list, top+"/") || !word.MatchString(list) {
			t.Errorf("docs/architecture.md, Folders, does not name %s", s.dir)
		}
	}
	if len(seen) < 40 {
		t.Errorf("only %d folders looked for", len(seen))
	}
}

func TestLinksResolve(t *testing.T) {
	docs, files := pages(t), all(t)
	exists := func(p string) bool {
		return slices.ContainsFunc(files, func(f string) bool { return f == p || strings.HasPrefix(f, strings.TrimSuffix(p, "/")+"/") })
	}
	for name, text := range docs {
		for _, m := range link.FindAllStringSubmatch(withoutFences(text), -1) {
			target, anchor, _ := strings.Cut(m[1], "#")
			if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			p := name
			if target != "" {
				p = path.Join(path.Dir(name), target)
			}
			switch page, is := docs[p]; {
			case !exists(p):
				t.Errorf("%s links to %s, which does not exist", name, m[1])
			case anchor != "" && is && !anchors(page)[anchor]:
				t.Errorf("%s links to %s: %s has no such heading", name, m[1], p)
			}
		}
	}
}

// TestNamedTestsExist: what a page shows by a test is shown by a test. A name may stand behind its
// package or file, as in hub:TestTwelveSteps or internal/e2e/faults_test.go:TestProcessFaults, and before a
// case, as in e2e:TestReportedK4OneSidedEnd/one_sided_ends; then it must be there.
func TestNamedTestsExist(t *testing.T) {
	where := map[string][]*source{} // test name -> files
	for _, s := range sources(t) {
		for _, d := range s.file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && s.test && f.Recv == nil {
				where[f.Name.Name] = append(where[f.Name.Name], s)
			}
		}
	}
	name := regexp.MustCompile(`(?:([a-z0-9_./]+):)?\b((?:Test|Fuzz|Benchmark)[A-Z][A-Za-z0-9_]*)(?:/([A-Za-z0-9_=-]+))?`)
	for page, text := range pages(t) {
		found := 0
		for _, m := range name.FindAllStringSubmatch(text, -1) {
			found++
			is := func(s *source) bool {
				return (m[1] == "" || s.name == m[1] || s.dir == m[1] || strings.HasSuffix(s.dir, "/"+m[1])) && (m[3] == "" || hasCase(s, m[3]))
			}
			if !slices.ContainsFunc(where[m[2]], is) {
				t.Errorf("%s names %s, which does not exist", page, m[0])
			}
		}
		if page == "docs/faults.md" && found < 30 {
			t.Errorf("%s names only %d tests", page, found)
		}
	}
}

// hasCase reports whether a text of s reads like this once a test has made it a case's name.
func hasCase(s *source, name string) (has bool) {
	ast.Inspect(s.file, func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && !has {
			v, err := strconv.Unquote(lit.Value)
			has = err == nil && strings.ReplaceAll(v, " ", "_") == name
		}
		return !has
	})
	return has
}

// TestNamedFlagsExist: every --flag in the pages is one of baton's.
func TestNamedFlagsExist(t *testing.T) {
	flags := map[string]bool{"help": true, "version": true}
	for _, s := range sources(t) {
		if s.dir != "cmd/baton" || s.test {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			sel, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || !strings.Contains(sel.Sel.Name, "Var") {
				return true
			}
			for _, a := range call.Args {
				if lit, ok := a.(*ast.BasicLit); ok {
					if v, err := strconv.Unquote(lit.Value); err == nil {
						flags[v] = true // the name, and other texts that are no names of flags
					}
				}
			}
			return true
		})
	}
	foreign := map[string]bool{"no-deps": true, "force": true, "cached": true, "lease": true, // etcdctl's
		"pd-disaggregation": true, "disable-retries": true, "retry-max-retries": true, "disable-load-monitoring": true, "mini-lb": true} // docs/behind-routers.md
	named := regexp.MustCompile("(?:^|[\\s`(=])--([a-z][a-z0-9-]*)")
	for page, text := range pages(t) {
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			if !flags[m[1]] && !foreign[m[1]] {
				t.Errorf("%s names --%s, which baton does not have", page, m[1])
			}
		}
	}
}

// TestNamedFilesExist: paths of this repository in the pages' code spans are there.
func TestNamedFilesExist(t *testing.T) {
	span := regexp.MustCompile("`((?:internal|cmd|docs|proto|scripts)/[A-Za-z0-9_./-]*[A-Za-z0-9_])/?`")
	files := all(t)
	for page, text := range pages(t) {
		for _, m := range span.FindAllStringSubmatch(text, -1) {
			if !slices.ContainsFunc(files, func(f string) bool { return f == m[1] || strings.HasPrefix(f, m[1]+"/") }) {
				t.Errorf("%s names %s, which does not exist", page, m[1])
			}
		}
	}
}

func TestDecisionsHaveTheirParts(t *testing.T) {
	form := regexp.MustCompile(`^docs/decisions/(\d{4})-[a-z0-9-]+\.md$`)
	numbers := map[string]string{}
	for name, text := range pages(t) {
		if path.Dir(name) != "docs/decisions" || path.Base(name) == "README.md" {
			continue
		}
		m := form.FindStringSubmatch(name)
		if m == nil {
			t.Errorf("%s: decisions are named NNNN-title.md", name)
			continue
		}
		if old := numbers[m[1]]; old != "" {
			t.Errorf("%s and %s have the same number", old, name)
		}
		numbers[m[1]] = name
		if !strings.HasPrefix(text, "# "+m[1]+" ") {
			t.Errorf("%s does not begin with \"# %s \"", name, m[1])
		}
		for _, part := range []string{"Status: ", "Date: ", "## Context", "## Decision", "## Alternatives", "## Consequences"} {
			if !strings.Contains(text, "\n"+part) {
				t.Errorf("%s has no %q", name, part)
			}
		}
		if n := strings.Count(text, "\n"); n > 80 {
			t.Errorf("%s has %d lines; a decision fits on a page", name, n)
		}
	}
	if len(numbers) < 9 {
		t.Errorf("only %d decisions", len(numbers))
	}
	for i := range len(numbers) {
		if n := pad(i + 1); numbers[n] == "" {
			t.Errorf("there is no decision %s", n)
		}
	}
}

func pad(n int) string {
	s := strconv.Itoa(n)
	return strings.Repeat("0", 4-len(s)) + s
}
