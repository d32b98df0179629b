package openai

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/baton-pd/baton/internal/engine"
)

// byteTokenizer has a token a byte and one for each special text (1000 and up).
type byteTokenizer struct {
	specials []string
	addBOS   bool // the model wants BOS, which is specials[0]
}

func (b byteTokenizer) Tokenize(text string, addBOS, special bool) ([]engine.Token, error) {
	if strings.Contains(text, "\x00") || !utf8.ValidString(text) {
		return nil, errors.New("text holds NUL or invalid UTF-8")
	}
	var out []engine.Token
	if addBOS && b.addBOS {
		out = append(out, 1000)
	}
next:
	for i := 0; i < len(text); {
		if special {
			for k, s := range b.specials {
				if strings.HasPrefix(text[i:], s) {
					out, i = append(out, engine.Token(1000+k)), i+len(s)
					continue next
				}
			}
		}
		out, i = append(out, engine.Token(text[i])), i+1
	}
	return out, nil
}

func (b byteTokenizer) Piece(t engine.Token) []byte {
	if t >= 1000 {
		return nil
	}
	return []byte{byte(t)}
}
func (b byteTokenizer) IsEOG(t engine.Token) bool { return t == 1001 }
func (b byteTokenizer) SpecialTexts() []string    { return b.specials }

var noon = time.Date(2026, 3, 4, 15, 6, 7, 0, time.UTC)

func newTestTemplate(t *testing.T, source string, specials ...string) *Template {
	t.Helper()
	if specials == nil {
		specials = []string{"<BOS>", "<EOS>"}
	}
	tpl, err := NewTemplate(engine.Info{ChatTemplate: source, BOS: 1000, EOS: 1001}, byteTokenizer{specials: specials})
	if err != nil {
		t.Fatalf("NewTemplate: %v", err)
	}
	return tpl
}

// expected.json was written by Python's jinja2 with the settings of Hugging Face's renderer.
func TestTemplatesEqualPythonJinja(t *testing.T) {
	var want struct {
		Messages map[string][]Message
		Cases    []struct {
			Template, Messages, Error string
			Text                      *string
		}
	}
	raw, err := os.ReadFile("testdata/templates/expected.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, &want); err != nil {
		t.Fatal(err)
	}
	for _, c := range want.Cases {
		t.Run(c.Template+"/"+c.Messages, func(t *testing.T) {
			source, err := os.ReadFile("testdata/templates/" + c.Template + ".jinja")
			if err != nil {
				t.Fatal(err)
			}
			got, err := newTestTemplate(t, string(source)).Render(want.Messages[c.Messages], noon)
			if c.Text == nil {
				var e *Error
				if !errors.As(err, &e) || e.Status != 400 || !strings.Contains(e.Cause.Detail, c.Error) {
					t.Fatalf("error %v, want a 400 with %q", err, c.Error)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got != *c.Text {
				t.Errorf("got  %q\nwant %q", got, *c.Text)
			}
		})
	}
}

var _ = fmt.Sprint
var _ = slices.Equal[[]int]
var _ sync.Mutex
