package repotest

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

const (
	module = "github.com/baton-pd/baton"
	// maxLines is the aim for a Go file; a longer one wants to be two.
	maxLines = 800
	// maxBytes is above every source file, and below every binary worth the name.
	maxBytes = 1 << 20
)

// root is the repository's directory.
const root = "../.."

// tracked lists the repository's files by slash-separated path: those that git knows, or,
// in an unpacked archive, all that are there.
var tracked = sync.OnceValues(func() ([]string, error) {
	out, err := exec.Command("git", "-C", root, "ls-files", "-z", "--cached").Output()
	if err == nil && len(out) > 0 {
		var files []string
		for name := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
			if _, err := os.Lstat(filepath.Join(root, name)); err == nil { // else deleted, not yet committed
				files = append(files, name)
			}
		}
		return files, nil
	}
	var files []string
	err = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && slices.Contains([]string{".git", ".cache", "bin", "dist", "node_modules"}, d.Name()):
			return fs.SkipDir
		case !d.IsDir():
			rel, err := filepath.Rel(root, p)
			files = append(files, filepath.ToSlash(rel))
			return err
		}
		return nil
	})
	return files, err
})

// all is tracked for tests.
func all(t *testing.T) []string {
	t.Helper()
	files, err := tracked()
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 100 {
		t.Fatalf("only %d files found; this test does not see the repository", len(files))
	}
	return files
}

func read(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// source is one parsed Go file.
type source struct {
	name      string // slash-separated, from the root
	dir       string
	test      bool
	generated bool
	text      []byte
	file      *ast.File
	fset      *token.FileSet
}

// at is where p is, for messages.
func (s *source) at(p token.Pos) string {
	return s.name + ":" + strings.TrimPrefix(s.fset.Position(p).String(), s.name+":")
}

var parsed = sync.OnceValues(func() ([]*source, error) {
	files, err := tracked()
	if err != nil {
		return nil, err
	}
	fset := token.NewFileSet()
	var out []*source
	for _, name := range files {
		if path.Ext(name) != ".go" {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			return nil, err
		}
		f, err := parser.ParseFile(fset, name, text, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		out = append(out, &source{name: name, dir: path.Dir(name), test: strings.HasSuffix(name, "_test.go"),
			generated: ast.IsGenerated(f), text: text, file: f, fset: fset})
	}
	return out, nil
})

// sources are all Go files.
func sources(t *testing.T) []*source {
	t.Helper()
	s, err := parsed()
	if err != nil {
		t.Fatal(err)
	}
	if len(s) < 100 {
		t.Fatalf("only %d Go files found; this test does not see the repository", len(s))
	}
	return s
}

func TestFileSizes(t *testing.T) {
	for _, s := range sources(t) {
		if n := bytes.Count(s.text, []byte("\n")); n > maxLines && !s.generated {
			t.Errorf("%s has %d lines, more than %d: split it by topic", s.name, n, maxLines)
		}
	}
}

func TestNoBinaries(t *testing.T) {
	for _, name := range all(t) {
		b := read(t, name)
		switch {
		case len(b) > maxBytes:
			t.Errorf("%s has %d bytes: what is fetched or built does not belong here", name, len(b))
		case bytes.IndexByte(b, 0) >= 0:
			t.Errorf("%s holds a NUL byte: it is binary", name)
		}
	}
}

// TestNothingOfThisMachine: a path or a host of the machine that a file was written on
// works nowhere else. The words are put together here so that this file has none.
func TestNothingOfThisMachine(t *testing.T) {
	words := []string{
		"/" + "root/", "/" + "work/", "/" + "home/",
		"registry." + "npmjs", "pypi" + ".org", "pythonhosted" + ".org", "proxy." + "golang", "sum." + "golang", "artifact" + "ory",
	}
	for _, name := range all(t) {
		if path.Base(name) == "go.sum" {
			continue
		}
		for i, line := range strings.Split(string(read(t, name)), "\n") {
			for _, w := range words {
				if strings.Contains(line, w) {
					t.Errorf("%s:%d: %q belongs to one machine: %s", name, i+1, w, strings.TrimSpace(line))
				}
			}
		}
	}
}
