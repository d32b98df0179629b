package llamacpp

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/setup"
	"go.uber.org/goleak"
)

var (
	paths  setup.Paths
	absent error
)

func TestMain(m *testing.M) {
	paths, absent = setup.Locate("")
	goleak.VerifyTestMain(m)
}

// needModel skips where the library and the model were not set up.
func needModel(t testing.TB) {
	t.Helper()
	if absent != nil {
		if os.Getenv("BATON_NEED_MODEL") != "" {
			t.Fatalf("BATON_NEED_MODEL is set, but: %v", absent)
		}
		t.Skipf("no model to test with: %v", absent)
	}
}

// open makes an engine for one test.
func open(t testing.TB, change func(*Config)) *Engine {
	t.Helper()
	needModel(t)
	cfg := Config{LibDir: paths.LibDir, Model: paths.Model, ContextLen: 1024, KVCells: 2048, MaxSeqs: 8, Threads: 1}
	if change != nil {
		change(&cfg)
	}
	e, err := Open(cfg)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return e
}

// prompt makes n tokens of ordinary text.
func prompt(t testing.TB, e *Engine, n int) []engine.Token {
	t.Helper()
	var text strings.Builder
	for i := 0; text.Len() < 12*n+64; i++ {
		fmt.Fprintf(&text, "Item %d: the quick brown fox jumps over %d lazy dogs near the river bank. ", i*7919%1000, i)
	}
	tokens, err := e.Tokenizer().Tokenize(text.String(), false, false)
	if err != nil {
		t.Fatal(err)
	}
	if len(tokens) < n {
		t.Fatalf("only %d tokens", len(tokens))
	}
	return tokens[:n]
}

// prefill computes tokens from position 0 on in chunks.
func prefill(t testing.TB, e *Engine, seq engine.Seq, tokens []engine.Token) {
	t.Helper()
	for pos := 0; pos < len(tokens); {
		n := min(e.Info().ChunkTokens, len(tokens)-pos)
		if err := e.Prefill(t.Context(), seq, tokens[pos:pos+n], pos); err != nil {
			t.Fatal(err)
		}
		pos += n
	}
}

func greedy(t testing.TB, e *Engine) engine.Sampler {
	t.Helper()
	s, err := e.NewSampler(engine.Sampling{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// decode generates n tokens greedily after a prompt whose last token is not computed yet.
func decode(t testing.TB, e *Engine, seq engine.Seq, last engine.Token, pos, n int) []engine.Token {
	t.Helper()
	s := greedy(t, e)
	var out []engine.Token
	for range n {
		got, err := e.Step(t.Context(), []engine.Row{{Seq: seq, Token: last, Pos: pos, Sampler: s}})
		if err != nil {
			t.Fatal(err)
		}
		last = got[0].Token
		out = append(out, last)
		pos++
	}
	return out
}
