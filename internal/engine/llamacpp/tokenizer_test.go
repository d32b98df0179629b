package llamacpp

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/baton-pd/baton/internal/engine"
)

func join(tok engine.Tokenizer, ids []engine.Token) []byte {
	var b []byte
	for _, id := range ids {
		b = append(b, tok.Piece(id)...)
	}
	return b
}

var texts = []string{
	"", " ", "Hello, world!", "a\nb\r\n\tc   d", "naïve café — “quotes”", "日本語のテキスト", "🙂👩‍👩‍👧‍👦 family", "\u0301combining",
	"<|im_start|>user\nhi<|im_end|>", strings.Repeat("ab ", 500), strings.Repeat("x", 3000), "\U0010FFFF\u0001\u007f",
}

func TestTokenizerRoundTrip(t *testing.T) {
	tok := open(t, nil).Tokenizer()
	split := false
	for _, text := range texts {
		ids, err := tok.Tokenize(text, false, false)
		if err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		if got := string(join(tok, ids)); got != text {
			t.Errorf("%q came back as %q", text, got)
		}
		for _, id := range ids {
			split = split || bytes.ContainsFunc(tok.Piece(id), func(r rune) bool { return r == '\uFFFD' })
		}
	}
	if !split {
		t.Error("no piece was part of a character: the texts test too little")
	}
}

func TestSpecialTokens(t *testing.T) {
	e := open(t, nil)
	tok := e.Tokenizer()
	marker := "<|im_start|>"
	if !slices.Contains(tok.SpecialTexts(), marker) {
		t.Errorf("%q is not among %q", marker, tok.SpecialTexts())
	}
	for _, text := range tok.SpecialTexts() {
		trusted, err := tok.Tokenize(text, false, true)
		if err != nil || len(trusted) != 1 || len(tok.Piece(trusted[0])) != 0 {
			t.Errorf("%q as a sign: %v with piece %q (%v)", text, trusted, join(tok, trusted), err)
		}
		user, err := tok.Tokenize(text, false, false)
		if err != nil || string(join(tok, user)) != text || slices.Contains(user, trusted[0]) {
			t.Errorf("%q as text: %v, %q (%v)", text, user, join(tok, user), err)
		}
	}
	if !tok.IsEOG(e.Info().EOS) || tok.IsEOG(500) || tok.IsEOG(-1) || tok.IsEOG(1<<30) {
		t.Error("wrong end tokens")
	}
	if tok.Piece(-1) != nil || tok.Piece(engine.Token(e.Info().VocabSize)) != nil {
		t.Error("pieces outside of the vocabulary")
	}
}

func TestAddBOS(t *testing.T) {
	tok := openTiny(t, nil).Tokenizer()
	with, err := tok.Tokenize("abc", true, false)
	if err != nil {
		t.Fatal(err)
	}
	without, err := tok.Tokenize("abc", false, false)
	if err != nil {
		t.Fatal(err)
	}
	if with[0] != 1 || !slices.Equal(with[1:], without) {
		t.Errorf("with BOS %v, without %v", with, without)
	}
	if only, err := tok.Tokenize("", true, false); err != nil || !slices.Equal(only, []engine.Token{1}) {
		t.Errorf("empty text with BOS: %v (%v)", only, err)
	}
}

func TestBadText(t *testing.T) {
	tok := open(t, nil).Tokenizer()
	for _, text := range []string{"a\x00b", "\x00", "\xff", "abc\xc3", "\xed\xa0\x80"} {
		if _, err := tok.Tokenize(text, false, true); !errors.Is(err, ErrText) {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := tok.Tokenize(strings.Repeat("a ", 1<<20), false, false); !errors.Is(err, ErrTextTooLong) {
		t.Errorf("2 MiB for a context of 1,024 tokens: %v", err)
	}
}

// TestTokenizerConcurrently is for the race detector, and compares all answers.
func TestTokenizerConcurrently(t *testing.T) {
	e := open(t, nil)
	tok := e.Tokenizer()
	var want [][]engine.Token
	for _, text := range texts {
		ids, err := tok.Tokenize(text, true, true)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, ids)
	}
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 120 {
				n := (g + i) % len(texts)
				ids, err := tok.Tokenize(texts[n], true, true)
				if err != nil || !slices.Equal(ids, want[n]) {
					t.Errorf("%q: %v (%v)", texts[n], ids, err)
					return
				}
				_ = join(tok, ids)
				_ = tok.SpecialTexts()
			}
		})
	}
	// The owner computes meanwhile.
	prefill(t, e, 0, prompt(t, e, 30))
	wg.Wait()
}

// TestCloseWaitsForTokenizers: a tokenizing goroutine never meets a freed vocabulary.
func TestCloseWaitsForTokenizers(t *testing.T) {
	e := openTiny(t, nil)
	tok := e.Tokenizer()
	var started, wg sync.WaitGroup
	started.Add(4)
	for range 4 {
		wg.Go(func() {
			for i := 0; ; i++ {
				_, err := tok.Tokenize("the quick brown fox", false, false)
				if i == 0 {
					started.Done()
				}
				if errors.Is(err, ErrClosed) {
					return
				} else if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	started.Wait()
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	if string(tok.Piece(4+256)) != "a" {
		t.Errorf("piece after close: %q", tok.Piece(4+256))
	}
}
