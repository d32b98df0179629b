package repotest

import (
	"go/ast"
	"go/doc"
	"go/doc/comment"
	"regexp"
	"testing"
)

// looksLinked is text in brackets that reads like a link to something exported. Where the
// link resolves, the parser has taken it out of the plain text.
var looksLinked = regexp.MustCompile(`\[[*]?(?:[a-z]+\.)?[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*(?:\.[A-Z][A-Za-z0-9]+)?\]`)

// TestDocLinksResolve: [Name] in a comment is a link that works.
func TestDocLinksResolve(t *testing.T) {
	files, fset := map[string][]*ast.File{}, sources(t)[0].fset
	for _, s := range sources(t) {
		if !s.test && !s.generated {
			files[s.dir] = append(files[s.dir], s.file)
		}
	}
	checked := 0
	for dir, list := range files {
		p, err := doc.NewFromFiles(fset, list, module+"/"+dir, doc.AllDecls|doc.AllMethods|doc.PreserveAST)
		if err != nil {
			t.Fatal(err)
		}
		texts := []string{p.Doc}
		values := func(vs []*doc.Value) {
			for _, v := range vs {
				texts = append(texts, v.Doc)
			}
		}
		funcs := func(fs []*doc.Func) {
			for _, f := range fs {
				texts = append(texts, f.Doc)
			}
		}
		values(append(p.Consts, p.Vars...))
		funcs(p.Funcs)
		for _, ty := range p.Types {
			texts = append(texts, ty.Doc)
			values(append(ty.Consts, ty.Vars...))
			funcs(append(ty.Funcs, ty.Methods...))
		}
		for _, text := range texts {
			checked++
			for _, plain := range plainTexts(p.Parser().Parse(text)) {
				if m := looksLinked.FindString(plain); m != "" {
					t.Errorf("%s: a comment links to %s, which is not there: %q", dir, m, plain)
				}
			}
		}
	}
	if checked < 1000 {
		t.Errorf("only %d comments checked", checked)
	}
}

// plainTexts are the parts of a comment that are no link and no code.
func plainTexts(d *comment.Doc) (out []string) {
	inline := func(ts []comment.Text) {
		for _, t := range ts {
			switch t := t.(type) {
			case comment.Plain:
				out = append(out, string(t))
			case comment.Italic:
				out = append(out, string(t))
			}
		}
	}
	var blocks func([]comment.Block)
	blocks = func(bs []comment.Block) {
		for _, b := range bs {
			switch b := b.(type) {
			case *comment.Paragraph:
				inline(b.Text)
			case *comment.Heading:
				inline(b.Text)
			case *comment.List:
				for _, item := range b.Items {
					blocks(item.Content)
				}
			}
		}
	}
	blocks(d.Content)
	return out
}
