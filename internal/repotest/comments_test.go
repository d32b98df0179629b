package repotest

import (
	"go/ast"
	"go/token"
	"strconv"
	"strings"
	"testing"
)

func TestPackageComments(t *testing.T) {
	said, packages := map[string]bool{}, map[string]string{}
	for _, s := range sources(t) {
		name := s.file.Name.Name
		if s.test && (strings.HasSuffix(name, "_test") || s.dir != "internal/e2e") {
			continue // tests belong to a package that says what it is; e2e has nothing but tests
		}
		packages[s.dir] = name
		want := "Package " + name + " "
		if name == "main" {
			want = "Command "
		}
		if s.file.Doc != nil && (strings.HasPrefix(s.file.Doc.Text(), want) || s.generated) {
			said[s.dir] = true
		}
	}
	for dir, name := range packages {
		if !said[dir] {
			t.Errorf("%s: no file begins with the comment \"Package %s ...\" (commands: \"Command ...\")", dir, name)
		}
	}
}

// TestExportedIsExplained: every exported name has a comment. Methods of
// unexported types count too where their own name is exported, unless they implement an interface
// of Go's library whose meaning nobody needs to be told.
func TestExportedIsExplained(t *testing.T) {
	for _, s := range sources(t) {
		if s.test || s.generated {
			continue
		}
		for _, d := range s.file.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Name.IsExported() && d.Doc == nil && receiverExported(d) {
					t.Errorf("%s: func %s has no comment", s.at(d.Pos()), d.Name.Name)
				}
			case *ast.GenDecl:
				group := d.Doc != nil && d.Lparen.IsValid()
				for _, spec := range d.Specs {
					for _, name := range undocumented(spec, d, group) {
						t.Errorf("%s: %s %s has no comment", s.at(spec.Pos()), d.Tok, name)
					}
				}
			}
		}
	}
}

// receiverExported is true for functions and for methods of exported types.
func receiverExported(d *ast.FuncDecl) bool {
	if d.Recv == nil {
		return true
	}
	t := d.Recv.List[0].Type
	for {
		switch x := t.(type) {
		case *ast.StarExpr:
			t = x.X
		case *ast.IndexExpr:
			t = x.X
		case *ast.Ident:
			return x.IsExported()
		default:
			return false
		}
	}
}

// undocumented are the exported names of spec without a comment of their own, of their line,
// or of their group.
func undocumented(spec ast.Spec, d *ast.GenDecl, group bool) []string {
	switch s := spec.(type) {
	case *ast.TypeSpec:
		if s.Name.IsExported() && s.Doc == nil && s.Comment == nil && d.Doc == nil {
			return []string{s.Name.Name}
		}
	case *ast.ValueSpec:
		if s.Doc != nil || s.Comment != nil || group || d.Doc != nil {
			return nil
		}
		var out []string
		for _, n := range s.Names {
			if n.IsExported() {
				out = append(out, n.Name)
			}
		}
		return out
	}
	return nil
}

// TestNoSleeping: a test that sleeps is slow where it passes and wrong where it fails. Waits are
// on channels, or on conditions with a bound.
func TestNoSleeping(t *testing.T) {
	for _, s := range sources(t) {
		if !s.test && !strings.HasSuffix(s.dir, "test") {
			continue
		}
		timeName := ""
		for _, im := range s.file.Imports {
			if p, _ := strconv.Unquote(im.Path.Value); p == "time" {
				timeName = "time"
				if im.Name != nil {
					timeName = im.Name.Name
				}
			}
		}
		if timeName == "" {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok && sel.Sel.Name == "Sleep" {
				if x, ok := sel.X.(*ast.Ident); ok && x.Name == timeName {
					t.Errorf("%s: time.Sleep in a test", s.at(sel.Pos()))
				}
			}
			return true
		})
	}
}

// TestErrorTexts: an error begins in lower case and ends without a full stop, so that it can stand in
// another one.
func TestErrorTexts(t *testing.T) {
	for _, s := range sources(t) {
		if s.test || s.generated {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) == 0 {
				return true
			}
			sel, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || sel.Sel.Name != "Errorf" && sel.Sel.Name != "New" {
				return true
			}
			if x, ok := sel.X.(*ast.Ident); !ok || x.Name != "errors" && x.Name != "fmt" {
				return true
			}
			lit, ok := call.Args[0].(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				return true
			}
			text, _ := strconv.Unquote(lit.Value) // parsed: it is a string
			if text == "" {
				t.Errorf("%s: an empty error", s.at(lit.Pos()))
				return true
			}
			first, _, _ := strings.Cut(text, " ")
			word := strings.ToUpper(first) == first || strings.ContainsAny(first[1:], "ABCDEFGHIJKLMNOPQRSTUVWXYZ") // a name: GGUF, SwapIn, NUL
			if text[0] >= 'A' && text[0] <= 'Z' && !word || strings.HasSuffix(text, ".") || strings.HasSuffix(text, "\n") {
				t.Errorf("%s: error text %q", s.at(lit.Pos()), text)
			}
			return true
		})
	}
}
