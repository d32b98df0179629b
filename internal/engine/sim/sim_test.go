package sim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/engine"
)

func open(t testing.TB, cfg Config) *Engine {
	t.Helper()
	e, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() })
	return e
}

func prompt(t testing.TB, text string) []engine.Token {
	t.Helper()
	p, err := tokenizer{}.Tokenize(text, true, true)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// prefill computes p[:len-1] in chunks.
func prefill(t testing.TB, e *Engine, s engine.Seq, p []engine.Token) {
	t.Helper()
	for pos := 0; pos < len(p)-1; {
		n := min(e.cfg.ChunkTokens, len(p)-1-pos)
		must(t, e.Prefill(context.Background(), s, p[pos:pos+n], pos))
		pos += n
	}
}

// generate runs up to n steps, p[:len-1] being in s.
func generate(t testing.TB, e *Engine, s engine.Seq, p []engine.Token, n int, sampling engine.Sampling) []engine.Token {
	t.Helper()
	smp, err := e.NewSampler(sampling)
	must(t, err)
	var out []engine.Token
	last, pos := p[len(p)-1], len(p)-1
	for len(out) < n {
		got, err := e.Step(context.Background(), []engine.Row{{Seq: s, Token: last, Pos: pos, Sampler: smp}})
		must(t, err)
		last, pos = got[0].Token, pos+1
		if out = append(out, last); isEOG(last) {
			break
		}
	}
	return out
}

// export copies all of s out in chunks of random parts.
func export(t testing.TB, e *Engine, s engine.Seq, n int) [][][]byte {
	t.Helper()
	var out [][][]byte
	for p0 := 0; p0 < n; p0 += e.cfg.ChunkTokens {
		p1 := min(p0+e.cfg.ChunkTokens, n)
		var dst [][]byte
		for left := e.ChunkBytes(p1 - p0); left > 0; {
			k := min(left, rand.IntN(100)) // also empty parts
			dst, left = append(dst, make([]byte, k)), left-k
		}
		must(t, e.Export(s, p0, p1, dst))
		out = append(out, dst)
	}
	return out
}

func TestAnswersMatchExpected(t *testing.T) {
	for _, cfg := range []Config{{}, {Seed: 7, EOSEvery: 9}, {Layers: 3, KVHeads: 1, HeadDim: 5, ChunkTokens: 7}, {EOSAt: 40}} {
		cfg.Recheck = true
		e := open(t, cfg)
		for i, sampling := range []engine.Sampling{{}, {Temperature: 1, Seed: 3}, {Temperature: 0.7, TopP: 0.9, TopK: 4, MinP: 0.05, Seed: 4},
			{RepetitionPenalty: 1.3, FrequencyPenalty: 0.4, PresencePenalty: 0.1}, {LogitBias: map[engine.Token]float32{byteToken('Q'): 5, byteToken('e'): -3}}} {
			p := prompt(t, strings.Repeat("a prompt of some length ", 1+i))
			prefill(t, e, 0, p)
			got, want := generate(t, e, 0, p, 60, sampling), Expected(cfg, p, 60, sampling)
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%+v %+v: got %v want %v", cfg, sampling, got, want)
			}
			e.FreeSeq(0)
		}
		if e.UsedCells() != 0 {
			t.Errorf("%d cells still used", e.UsedCells())
		}
	}
}

func TestPromptsDiffer(t *testing.T) {
	seen := map[string]bool{}
	for i := range 200 {
		p := prompt(t, fmt.Sprintf("prompt %d", i))
		seen[fmt.Sprint(Expected(Config{}, p, 12))] = true
	}
	if len(seen) != 200 {
		t.Errorf("200 prompts gave %d answers", len(seen))
	}
	if reflect.DeepEqual(Expected(Config{Seed: 1}, prompt(t, "x"), 12), Expected(Config{Seed: 2}, prompt(t, "x"), 12)) {
		t.Error("the seed makes no difference")
	}
}

// Every byte of a chunk's KV counts: flip each in turn, the answer must change.
func TestOneWrongByteChangesTheAnswer(t *testing.T) {
	cfg := Config{ChunkTokens: 4, HeadDim: 3}
	a, b := open(t, cfg), open(t, cfg)
	p := prompt(t, "12345678")
	prefill(t, a, 0, p)
	want := Expected(cfg, p, 16)
	try := func() []engine.Token {
		chunks := export(t, a, 0, len(p)-1)
		return importAll(t, b, chunks, len(p)-1, p)
	}
	if got := try(); !reflect.DeepEqual(got, want) {
		t.Fatalf("handed over unharmed: got %v want %v", got, want)
	}
	for ci := range export(t, a, 0, len(p)-1) {
		size := a.ChunkBytes(4)
		for off := headerBytes; off < size; off++ {
			chunks := export(t, a, 0, len(p)-1)
			flip(chunks[ci], off)
			if got := importAll(t, b, chunks, len(p)-1, p); reflect.DeepEqual(got, want) {
				t.Fatalf("byte %d of chunk %d is wrong and the answer is the same", off, ci)
			}
		}
	}
}

func flip(parts [][]byte, off int) {
	for _, p := range parts {
		if off < len(p) {
			p[off] ^= 1
			return
		}
		off -= len(p)
	}
}

func importAll(t *testing.T, e *Engine, chunks [][][]byte, n int, p []engine.Token) []engine.Token {
	t.Helper()
	for i, c := range chunks {
		must(t, e.Import(0, i*e.cfg.ChunkTokens, min((i+1)*e.cfg.ChunkTokens, n), c))
	}
	got := generate(t, e, 0, p, 16, engine.Sampling{})
	e.FreeSeq(0)
	return got
}

func TestBytesChangedUnderALiveSequenceAreSeenWithRecheck(t *testing.T) {
	cfg := Config{Recheck: true}
	e := open(t, cfg)
	p := prompt(t, "hello world")
	prefill(t, e, 0, p)
	e.mem.ranks[0].cell(3, e.seqs[0].cells[2])[0] ^= 0x80 // V of layer 1
	if got := generate(t, e, 0, p, 8, engine.Sampling{}); reflect.DeepEqual(got, Expected(cfg, p, 8)) {
		t.Error("a byte changed in the memory and the answer is the same")
	}
}

func TestImportRefusesWhatDoesNotVerify(t *testing.T) {
	cfg := Config{ChunkTokens: 8}
	a, b := open(t, cfg), open(t, cfg)
	p := prompt(t, "0123456789abcdef")
	prefill(t, a, 0, p)
	chunk := func() []byte {
		return bytes.Join(export(t, a, 0, 8)[0], nil)
	}
	cases := map[string][]byte{"empty": nil, "short": chunk()[:100], "long": append(chunk(), 0)}
	for off := range headerBytes {
		c := chunk()
		c[off] ^= 4
		cases[fmt.Sprintf("header byte %d", off)] = c
	}
	other := bytes.Join(export(t, a, 0, 16)[1], nil) // right length, positions 8..15
	cases["other chunk"] = other
	for name, c := range cases {
		if err := b.Import(0, 0, 8, [][]byte{c}); !errors.Is(err, engine.ErrBadChunk) {
			t.Errorf("%s: %v", name, err)
		}
		if b.UsedCells() != 0 {
			t.Fatalf("%s: %d cells used after a refusal", name, b.UsedCells())
		}
	}
	if err := b.Import(0, 8, 16, [][]byte{other}); err == nil {
		t.Error("a chunk that does not continue the sequence was taken")
	}
}

func TestSwapAndCopyAreExact(t *testing.T) {
	cfg := Config{KVCells: 64, Recheck: true}
	e := open(t, cfg)
	p := prompt(t, "some text to keep")
	prefill(t, e, 0, p)
	must(t, e.CopySeq(0, 1))
	if e.UsedCells() != len(p)-1 {
		t.Errorf("a copy took cells: %d used", e.UsedCells())
	}
	want := Expected(cfg, p, 20)
	if got := generate(t, e, 1, p, 20, engine.Sampling{}); !reflect.DeepEqual(got, want) {
		t.Errorf("copy: %v want %v", got, want)
	}
	e.FreeSeq(1)
	saved, err := e.SwapOut(0)
	must(t, err)
	e.FreeSeq(0)
	if e.UsedCells() != 0 {
		t.Errorf("%d cells used", e.UsedCells())
	}
	must(t, e.SwapIn(2, saved))
	if got := generate(t, e, 2, p, 20, engine.Sampling{}); !reflect.DeepEqual(got, want) {
		t.Errorf("swapped: %v want %v", got, want)
	}
}

func TestLimits(t *testing.T) {
	e := open(t, Config{KVCells: 10, ChunkTokens: 8, ContextLen: 12, MaxSeqs: 2})
	p := prompt(t, "0123456789")
	must(t, e.Prefill(context.Background(), 0, p[:8], 0))
	if err := e.Prefill(context.Background(), 1, p[:3], 0); !errors.Is(err, engine.ErrNoCells) {
		t.Errorf("third chunk: %v", err)
	}
	for name, err := range map[string]error{
		"gap":          e.Prefill(context.Background(), 0, p[8:9], 9),
		"too long":     e.Prefill(context.Background(), 1, p[:9], 0),
		"nothing":      e.Prefill(context.Background(), 1, nil, 0),
		"unknown slot": e.Prefill(context.Background(), 2, p[:1], 0),
		"copy onto":    e.CopySeq(0, 0),
	} {
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if e.UsedCells() != 8 {
		t.Errorf("%d cells used, want 8", e.UsedCells())
	}
}

func TestInterruptLeavesNoTraceAndCostsAreCharged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := Config{PrefillChunkTime: 10 * time.Millisecond, PrefillTokenTime: time.Millisecond, StepTime: 5 * time.Millisecond, StepRowTime: time.Millisecond}
		e := open(t, cfg)
		p := prompt(t, "twenty characters...")
		ctx, cancel := context.WithTimeout(context.Background(), 15*time.Millisecond)
		defer cancel()
		began := time.Now()
		err := e.Prefill(ctx, 0, p[:20], 0)
		if !errors.Is(err, engine.ErrInterrupted) || time.Since(began) != 15*time.Millisecond || e.UsedCells() != 0 {
			t.Errorf("interrupted prefill: %v after %v, %d cells", err, time.Since(began), e.UsedCells())
		}
		began = time.Now()
		must(t, e.Prefill(context.Background(), 0, p[:20], 0))
		if d := time.Since(began); d != 30*time.Millisecond {
			t.Errorf("prefill of 20 took %v", d)
		}
		began = time.Now()
		if got := generate(t, e, 0, p, 3, engine.Sampling{}); !reflect.DeepEqual(got, Expected(cfg, p, 3)) {
			t.Error("wrong answer after an interrupt")
		}
		if d := time.Since(began); d != 18*time.Millisecond {
			t.Errorf("3 steps took %v", d)
		}
	})
}

func TestSamplingParametersMatter(t *testing.T) {
	p := prompt(t, "abc")
	greedy := Expected(Config{}, p, 40)
	if !reflect.DeepEqual(greedy, Expected(Config{}, p, 40, engine.Sampling{Temperature: 1, TopK: 1})) {
		t.Error("top_k 1 is not greedy")
	}
	a := Expected(Config{}, p, 40, engine.Sampling{Temperature: 1, Seed: 1})
	if reflect.DeepEqual(a, Expected(Config{}, p, 40, engine.Sampling{Temperature: 1, Seed: 2})) {
		t.Error("the seed makes no difference")
	}
	if !reflect.DeepEqual(a, Expected(Config{}, p, 40, engine.Sampling{Temperature: 1, Seed: 1})) {
		t.Error("the same seed gives another answer")
	}
	biased := Expected(Config{}, p, 5, engine.Sampling{LogitBias: map[engine.Token]float32{byteToken('Z'): 100}})
	for _, tok := range biased {
		if tok != byteToken('Z') {
			t.Errorf("bias 100 ignored: %v", biased)
		}
	}
	cfg := Config{EOSAt: 5}
	if got := Expected(cfg, p, 40); got[len(got)-1] != tokEOS || len(got) != 3 {
		t.Errorf("EOSAt 5 after a prompt of 4: %v", got)
	}
	if got := Expected(cfg, p, 40, engine.Sampling{IgnoreEOS: true}); len(got) != 40 {
		t.Errorf("ignore_eos: %d tokens", len(got))
	}
}

func TestTokenizerRoundTrip(t *testing.T) {
	tk := tokenizer{}
	text := "<|im_start|>user\nGrüße, 世界 <|im_end|>"
	for _, special := range []bool{false, true} {
		toks, err := tk.Tokenize(text, true, special)
		must(t, err)
		var back []byte
		for _, x := range toks {
			back = append(back, tk.Piece(x)...)
		}
		want := text
		if special {
			want = "user\nGrüße, 世界 "
		}
		if string(back) != want || toks[0] != tokBOS {
			t.Errorf("special=%v: %q", special, back)
		}
	}
	for _, bad := range []string{"a\x00b", "\xff"} {
		if _, err := tk.Tokenize(bad, false, false); err == nil {
			t.Errorf("%q accepted", bad)
		}
	}
}

func TestTwoOwnersPanic(t *testing.T) {
	var e *Engine
	e = open(t, Config{Hook: func(c Call) error {
		if c.Op == OpExport {
			e.FreeSeq(0) // a second call while one runs
		}
		return nil
	}})
	must(t, e.Prefill(context.Background(), 0, prompt(t, "x"), 0))
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
		e.busy.Store(false)
	}()
	_ = e.Export(0, 0, 1, [][]byte{make([]byte, e.ChunkBytes(1))})
}

func TestLogprobs(t *testing.T) {
	e := open(t, Config{})
	smp, _ := e.NewSampler(engine.Sampling{})
	got, err := e.Step(context.Background(), []engine.Row{{Seq: 0, Token: tokBOS, Sampler: smp, Logprobs: 4}})
	must(t, err)
	if len(got[0].Top) != 3 || got[0].Top[0].Token != got[0].Token || got[0].Top[0].Logprob != got[0].Logprob || got[0].Logprob >= 0 {
		t.Errorf("%+v", got[0])
	}
}

func BenchmarkStep(b *testing.B) {
	e := open(b, Config{ContextLen: 1 << 20, KVCells: 1 << 20})
	smp, _ := e.NewSampler(engine.Sampling{})
	for i := 0; b.Loop() && i < 1<<20; i++ {
		if _, err := e.Step(context.Background(), []engine.Row{{Token: 5, Pos: i, Sampler: smp}}); err != nil {
			b.Fatal(err)
		}
	}
}

func FuzzImport(f *testing.F) {
	e := open(f, Config{ChunkTokens: 4})
	p := prompt(f, "abcdef")
	prefill(f, e, 1, p)
	good := make([]byte, e.ChunkBytes(4))
	must(f, e.Export(1, 0, 4, [][]byte{good}))
	f.Add(good)
	f.Add(good[:20])
	f.Fuzz(func(t *testing.T, b []byte) {
		err := e.Import(0, 0, 4, [][]byte{b})
		if wellFormed := len(b) == len(good) && bytes.Equal(b[:headerBytes], good[:headerBytes]); wellFormed != (err == nil) {
			t.Errorf("well formed %v, error %v", wellFormed, err)
		}
		e.FreeSeq(0)
	})
}
