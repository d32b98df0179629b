package llamacpp

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/baton-pd/baton/internal/engine"
)

// parts cuts a chunk's memory into pieces as pages of a pool would.
func parts(size, page int) [][]byte {
	var out [][]byte
	for size > 0 {
		n := min(size, page)
		out = append(out, make([]byte, n))
		size -= n
	}
	return out
}

// handOver sends the KV of positions [0,n) of a sequence from one engine to another.
func handOver(t testing.TB, from, to *Engine, src, dst engine.Seq, n, page int) {
	t.Helper()
	for p0 := 0; p0 < n; {
		p1 := min(p0+from.Info().ChunkTokens, n)
		mem := parts(from.ChunkBytes(p1-p0), page)
		if err := from.Export(src, p0, p1, mem); err != nil {
			t.Fatal(err)
		}
		if err := to.Import(dst, p0, p1, mem); err != nil {
			t.Fatal(err)
		}
		p0 = p1
	}
}

// trace generates greedily and keeps each step's logits.
func trace(t testing.TB, e *Engine, seq engine.Seq, last engine.Token, pos, n int) ([]engine.Token, [][]float32) {
	t.Helper()
	var tokens []engine.Token
	var logits [][]float32
	for range n {
		tokens = append(tokens, decode(t, e, seq, last, pos, 1)...)
		row, err := e.logits(0)
		if err != nil {
			t.Fatal(err)
		}
		logits = append(logits, slices.Clone(row))
		last = tokens[len(tokens)-1]
		pos++
	}
	return tokens, logits
}

func sameBits(a, b []float32) bool {
	return slices.EqualFunc(a, b, func(x, y float32) bool { return math.Float32bits(x) == math.Float32bits(y) })
}

// TestHandOver: an answer from handed-over KV equals the answer of one context, in every
// bit of every logit, whatever the prompt's length is relative to a chunk.
func TestHandOver(t *testing.T) {
	prefiller, decoder := open(t, nil), open(t, nil)
	text := prompt(t, prefiller, 600)
	for i, n := range []int{1, 2, 127, 128, 129, 257, 600} {
		for seq := range engine.Seq(2) {
			prefiller.FreeSeq(seq)
			decoder.FreeSeq(seq)
		}
		head, last := text[:n-1], text[n-1]
		prefill(t, prefiller, 0, head)
		handOver(t, prefiller, decoder, 0, 1, n-1, []int{1 << 30, 1 << 16, 4096}[i%3])
		want, wantRows := trace(t, prefiller, 0, last, n-1, 12) // goes on in its own context
		got, gotRows := trace(t, decoder, 1, last, n-1, 12)
		if !slices.Equal(got, want) {
			t.Errorf("%d tokens: %v, in one context %v", n, got, want)
		}
		for j := range wantRows {
			if !sameBits(gotRows[j], wantRows[j]) {
				t.Errorf("%d tokens: logits of step %d differ", n, j)
				break
			}
		}
		if used := decoder.UsedCells(); used != n-1+12 {
			t.Errorf("%d cells used after %d tokens", used, n-1+12)
		}
	}
}

// TestAnswerDoesNotDependOnOthers: on the real model, logits are the same bits with other
// sequences before and after in the cache and in the batch.
func TestAnswerDoesNotDependOnOthers(t *testing.T) {
	e := open(t, nil)
	text := prompt(t, e, 170)
	const steps, mine = 24, engine.Seq(3)
	var want [][]float32
	var follow []engine.Token
	for _, rows := range []int{1, 4, 8} {
		for s := range engine.Seq(8) {
			e.FreeSeq(s)
		}
		s := greedy(t, e)
		var batch []engine.Row
		add := func(seq engine.Seq, from, n int) {
			prefill(t, e, seq, text[from:from+n])
			batch = append(batch, engine.Row{Seq: seq, Token: text[from+n], Pos: n, Sampler: s})
		}
		if rows > 1 {
			add(0, 1, 20)
			add(1, 5, 33)
		}
		add(mine, 0, 150)
		for i := len(batch); i < rows; i++ {
			add([]engine.Seq{4, 5, 6, 7, 2}[i-3], 2*i, 9+i)
		}
		at := slices.IndexFunc(batch, func(r engine.Row) bool { return r.Seq == mine })
		same := 0
		for j := range steps {
			out, err := e.Step(t.Context(), batch)
			if err != nil {
				t.Fatal(err)
			}
			row, err := e.logits(e.rowAt[at])
			if err != nil {
				t.Fatal(err)
			}
			if rows == 1 {
				want, follow = append(want, slices.Clone(row)), append(follow, out[at].Token)
			}
			if sameBits(row, want[j]) {
				same++
			}
			for i := range batch {
				batch[i].Token, batch[i].Pos = out[i].Token, batch[i].Pos+1
			}
			batch[at].Token = follow[j]
		}
		t.Logf("%d rows: %d of %d steps with equal bits", rows, same, steps)
		if same != steps {
			t.Errorf("%d rows: only %d of %d steps gave the same bits", rows, same, steps)
		}
	}
}

// TestBadChunksAreRefused: what does not verify changes nothing.
func TestBadChunksAreRefused(t *testing.T) {
	e := open(t, nil)
	const n = 40
	text := prompt(t, e, 2*n+1)
	prefill(t, e, 0, text[:n])
	if err := e.Prefill(t.Context(), 0, text[n:2*n], n); err != nil {
		t.Fatal(err)
	}
	first, second := make([]byte, e.ChunkBytes(n)), make([]byte, e.ChunkBytes(n))
	for i, b := range [][]byte{first, second} {
		if err := e.Export(0, i*n, (i+1)*n, [][]byte{b}); err != nil {
			t.Fatal(err)
		}
	}
	want, wantRows := trace(t, e, 0, text[2*n], 2*n, 3)
	if err := e.Import(1, 0, n, [][]byte{first}); err != nil {
		t.Fatal(err)
	}
	rowsAt := blobHead + n*cellBytes + 8 + rowsHead
	u32 := func(at int, v uint32) func([]byte) []byte {
		return func(b []byte) []byte { le.PutUint32(b[at:], v); return b }
	}
	for name, change := range map[string]func([]byte) []byte{
		"empty":                func([]byte) []byte { return nil },
		"truncated":            func(b []byte) []byte { return b[:len(b)-1] },
		"trailing byte":        func(b []byte) []byte { return append(b, 0) },
		"magic":                u32(0, 1),
		"sequence":             u32(4, 7),
		"streams":              u32(8, 2),
		"no cells":             u32(12, 0),
		"one cell less":        u32(12, n-1),
		"huge cell count":      u32(12, 0xffffffff),
		"position":             u32(blobHead, 3),
		"positions exchanged":  func(b []byte) []byte { return u32(blobHead, n+1)(u32(blobHead+cellBytes, n)(b)) },
		"negative position":    u32(blobHead, 0xffffffff),
		"cell of two":          u32(blobHead+4, 2),
		"v_trans":              u32(rowsAt-rowsHead-8, 1),
		"layers":               u32(rowsAt-rowsHead-4, 29),
		"row type":             u32(rowsAt-rowsHead, typeF32),
		"row size":             u32(rowsAt-8, 768),
		"NaN":                  func(b []byte) []byte { le.PutUint16(b[rowsAt+100:], 0x7e01); return b },
		"infinity in last row": func(b []byte) []byte { le.PutUint16(b[len(b)-2:], 0xfc00); return b },
		"the first chunk":      func([]byte) []byte { return bytes.Clone(first) },
	} {
		for _, cut := range []int{1 << 30, 1 << 20} {
			bad := change(bytes.Clone(second))
			var src [][]byte
			for rest := bad; len(rest) > 0; rest = rest[min(cut, len(rest)):] {
				src = append(src, rest[:min(cut, len(rest))])
			}
			if err := e.Import(1, n, 2*n, src); !errors.Is(err, engine.ErrBadChunk) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if err := e.Import(1, n, 2*n, [][]byte{second}); err != nil {
		t.Fatal(err)
	}
	got, gotRows := trace(t, e, 1, text[2*n], 2*n, 3)
	if !slices.Equal(got, want) || !sameBits(gotRows[2], wantRows[2]) {
		t.Errorf("after refused chunks: %v, want %v", got, want)
	}
}

func TestSwapAndShare(t *testing.T) {
	e := open(t, nil)
	text := prompt(t, e, 151)
	prefill(t, e, 0, text[:150])
	for _, s := range []engine.Seq{1, 2} {
		if err := e.CopySeq(0, s); err != nil {
			t.Fatal(err)
		}
	}
	if e.UsedCells() != 150 {
		t.Errorf("%d cells for three sequences that share 150", e.UsedCells())
	}
	want, wantRows := trace(t, e, 0, text[150], 150, 4)
	e.FreeSeq(0)
	if e.UsedCells() != 150 {
		t.Errorf("%d cells after one of three sharers was freed", e.UsedCells())
	}
	got, gotRows := trace(t, e, 1, text[150], 150, 4)
	if !slices.Equal(got, want) || !sameBits(gotRows[3], wantRows[3]) {
		t.Errorf("shared: %v, want %v", got, want)
	}
	saved, err := e.SwapOut(2)
	if err != nil {
		t.Fatal(err)
	}
	e.FreeSeq(1)
	e.FreeSeq(2)
	if e.UsedCells() != 0 {
		t.Errorf("%d cells when nothing is left", e.UsedCells())
	}
	if err := e.SwapIn(5, saved); err != nil {
		t.Fatal(err)
	}
	got, gotRows = trace(t, e, 5, text[150], 150, 4)
	if !slices.Equal(got, want) || !sameBits(gotRows[3], wantRows[3]) {
		t.Errorf("swapped in: %v, want %v", got, want)
	}
	if again, err := e.SwapOut(5); err != nil || !bytes.Equal(again[blobHead+154*cellBytes+8+rowsHead:][:100], saved[blobHead+150*cellBytes+8+rowsHead:][:100]) {
		t.Errorf("swapped out again: other bytes (%v)", err)
	}
	for name, bad := range map[string][]byte{
		"nothing": nil, "cut": saved[:len(saved)-7], "a token less": saved[:len(saved)-e.layout.token-cellBytes],
	} {
		if err := e.SwapIn(6, bad); !errors.Is(err, engine.ErrBadChunk) {
			t.Errorf("swap in of %s: %v", name, err)
		}
	}
	if err := e.SwapIn(5, saved); !errors.Is(err, ErrUsage) {
		t.Errorf("swap in to a sequence in use: %v", err)
	}
}

func TestNoCells(t *testing.T) {
	e := openTiny(t, func(c *Config) { c.KVCells, c.ContextLen, c.MaxSeqs = 300, 256, 3 })
	tok := make([]engine.Token, 128)
	for i := range tok {
		tok[i] = engine.Token(4 + i)
	}
	for _, s := range []engine.Seq{0, 1} {
		if err := e.Prefill(t.Context(), s, tok, 0); err != nil {
			t.Fatal(err)
		}
	}
	saved, err := e.SwapOut(1)
	if err != nil {
		t.Fatal(err)
	}
	for name, do := range map[string]func() error{
		"prefill": func() error { return e.Prefill(t.Context(), 2, tok, 0) },
		"swap in": func() error { return e.SwapIn(2, saved) },
		"import":  func() error { return e.Import(2, 0, 128, [][]byte{saved}) },
	} {
		if err := do(); !errors.Is(err, engine.ErrNoCells) {
			t.Errorf("%s into a full context: %v", name, err)
		}
	}
	if err := e.Prefill(t.Context(), 2, tok[:44], 0); err != nil {
		t.Errorf("the last 44 cells: %v", err)
	}
	rows := []engine.Row{{Seq: 0, Token: 5, Pos: 128, Sampler: greedy(t, e)}}
	if _, err := e.Step(t.Context(), rows); !errors.Is(err, engine.ErrNoCells) {
		t.Errorf("step in a full context: %v", err)
	}
	e.FreeSeq(2)
	if _, err := e.Step(t.Context(), rows); err != nil {
		t.Errorf("step after one was freed: %v", err)
	}
	if e.UsedCells() != 257 {
		t.Errorf("%d cells", e.UsedCells())
	}
}

// TestDamagedKVFailsOnlyItsSequence: logits that are no numbers are told with the sequence,
// and the step can be repeated without it.
func TestDamagedKVFailsOnlyItsSequence(t *testing.T) {
	e := openTiny(t, nil)
	tok := []engine.Token{10, 20, 30, 40, 50, 60, 70, 80}
	for _, s := range []engine.Seq{0, 1} {
		if err := e.Prefill(t.Context(), s, tok, 0); err != nil {
			t.Fatal(err)
		}
	}
	sm := greedy(t, e)
	good := engine.Row{Seq: 0, Token: 11, Pos: 8, Sampler: sm}
	bad := engine.Row{Seq: 1, Token: 11, Pos: 8, Sampler: sm}
	saved, err := e.SwapOut(1)
	if err != nil {
		t.Fatal(err)
	}
	e.FreeSeq(1)
	at := blobHead + 8*cellBytes + 8 + rowsHead
	for i := range 8 * 32 {
		le.PutUint16(saved[at+2*i:], 0x7e00)
	}
	if err := e.SwapIn(1, saved); !errors.Is(err, engine.ErrBadChunk) {
		t.Fatalf("a block of NaN: %v", err)
	}
	// Past the check, as damage in this machine's memory would be.
	g, err := e.reserve(8, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.setState(libSeq(1), saved); err != nil {
		t.Fatal(err)
	}
	if err := e.take(g); err != nil {
		t.Fatal(err)
	}
	var broken *BadLogitsError
	if _, err := e.Step(t.Context(), []engine.Row{good, bad}); !errors.As(err, &broken) || broken.Seq != 1 {
		t.Fatalf("step with a damaged sequence: %v", err)
	}
	t.Log(broken)
	e.FreeSeq(1)
	got, err := e.Step(t.Context(), []engine.Row{good})
	if err != nil {
		t.Fatal(err)
	}
	e.FreeSeq(0)
	if err := e.Prefill(t.Context(), 0, tok, 0); err != nil {
		t.Fatal(err)
	}
	want, err := e.Step(t.Context(), []engine.Row{good})
	if err != nil || got[0].Token != want[0].Token {
		t.Errorf("token %v after the damage, %v without (%v)", got, want, err)
	}
}

// TestWrongUse: mistakes that would end the process inside the library are errors.
func TestWrongUse(t *testing.T) {
	e := openTiny(t, func(c *Config) { c.ContextLen, c.MaxSeqs, c.BatchRows = 200, 4, 2 })
	tok := make([]engine.Token, 129)
	if err := e.Prefill(t.Context(), 0, tok[:128], 0); err != nil {
		t.Fatal(err)
	}
	sm := greedy(t, e)
	closed, err := e.NewSampler(engine.Sampling{Temperature: 1})
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	closed.Close()
	closed.Accept(3)
	row := func(s engine.Seq, tok engine.Token, pos int, sm engine.Sampler, lp int) engine.Row {
		return engine.Row{Seq: s, Token: tok, Pos: pos, Sampler: sm, Logprobs: lp}
	}
	step := func(rows ...engine.Row) error { _, err := e.Step(t.Context(), rows); return err }
	for i, err := range []error{
		e.Prefill(t.Context(), 1, nil, 0),
		e.Prefill(t.Context(), 1, tok, 0),
		e.Prefill(t.Context(), -1, tok[:1], 0),
		e.Prefill(t.Context(), 4, tok[:1], 0),
		e.Prefill(t.Context(), 1, tok[:1], 1),
		e.Prefill(t.Context(), 0, tok[:1], 127),
		e.Prefill(t.Context(), 0, tok[:73], 128),
		e.Prefill(t.Context(), 1, []engine.Token{286}, 0),
		e.Prefill(t.Context(), 1, []engine.Token{-1}, 0),
		step(), step(row(0, 1, 128, sm, 0), row(0, 1, 128, sm, 0)),
		step(row(0, 1, 128, sm, 0), row(1, 1, 0, sm, 0), row(2, 1, 0, sm, 0)),
		step(row(0, 286, 128, sm, 0)), step(row(0, 1, 128, nil, 0)), step(row(0, 1, 128, closed, 0)),
		step(row(0, 1, 128, sm, -1)), step(row(0, 1, 5, sm, 0)), step(row(9, 1, 0, sm, 0)),
		e.Export(0, 0, 129, parts(e.ChunkBytes(129), 1000)), e.Export(0, 5, 5, nil), e.Export(0, -1, 5, nil),
		e.Export(0, 0, 5, parts(e.ChunkBytes(5)-1, 1000)), e.Export(7, 0, 5, nil), e.Export(0, 0, 5, nil),
		e.Import(0, 0, 5, parts(e.ChunkBytes(5), 1000)), e.Import(0, 128, 128, nil), e.Import(1, 0, 201, nil),
		e.CopySeq(0, 0), e.CopySeq(9, 1), e.CopySeq(0, -3), e.CopySeq(1, 0),
		e.SwapIn(0, nil), func() error { _, err := e.SwapOut(1); return err }(),
	} {
		if !errors.Is(err, ErrUsage) {
			t.Errorf("case %d: %v", i, err)
		}
	}
	e.FreeSeq(-1)
	e.FreeSeq(99)
	e.FreeSeq(1)
	if e.UsedCells() != 128 {
		t.Errorf("%d cells", e.UsedCells())
	}
	if err := step(row(0, 1, 128, sm, 0)); err != nil {
		t.Errorf("the right use: %v", err)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	for i, err := range []error{
		e.Close(), e.Prefill(t.Context(), 0, tok[:1], 0), step(row(0, 1, 129, sm, 0)), e.SwapIn(1, nil),
		func() error { _, err := e.Tokenizer().Tokenize("a", false, false); return err }(),
	} {
		if i > 0 && !errors.Is(err, ErrClosed) || i == 0 && err != nil {
			t.Errorf("after close, case %d: %v", i, err)
		}
	}
	e.FreeSeq(0)
}

func TestCacheTypes(t *testing.T) {
	for _, typ := range []string{"f32", "bf16", "q8_0"} {
		a := openTiny(t, func(c *Config) { c.CacheTypeK, c.CacheTypeV = typ, typ })
		b := openTiny(t, func(c *Config) { c.CacheTypeK, c.CacheTypeV, c.MaxSeqs = typ, typ, 2 })
		if want := fmt.Sprintf("layers=2 k=%sx32 v=%sx32 vtrans=0", typ, typ); a.Info().KVLayout != want {
			t.Errorf("%s: layout %s", typ, a.Info().KVLayout)
		}
		tok := make([]engine.Token, 150)
		for i := range tok {
			tok[i] = engine.Token(4 + i)
		}
		prefill(t, a, 5, tok[:149])
		handOver(t, a, b, 5, 1, 149, 5000)
		want, wantRows := trace(t, a, 5, tok[149], 149, 8)
		got, gotRows := trace(t, b, 1, tok[149], 149, 8)
		if !slices.Equal(got, want) || !sameBits(gotRows[7], wantRows[7]) {
			t.Errorf("%s: %v, want %v", typ, got, want)
		}
	}
}
