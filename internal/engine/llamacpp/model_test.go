package llamacpp

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/dynlib"
	"github.com/baton-pd/baton/internal/engine/llamacpp/gguf"
	"github.com/baton-pd/baton/internal/engine/llamacpp/gguftest"
	"github.com/hybridgroup/yzma/pkg/llama"
)

// TestOpenRefuses: what is wrong with a file is told before the library sees it.
func TestOpenRefuses(t *testing.T) {
	small := func() *gguftest.File {
		return gguftest.New(1).KV("general.architecture", "llama").Tensor("x", 0, 1, 8)
	}
	whole := gguftest.Llama(1).Bytes()
	put := func(name string, b []byte) string {
		path := filepath.Join(t.TempDir(), name+".gguf")
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	called := bytes.Clone(whole) // its token "a" is called a byte
	called[bytes.Index(whole, []byte(gguf.TypesKey))+len(gguf.TypesKey)+4+4+8+4*260] = 6
	for name, path := range map[string]string{
		"no architecture":    gguftest.New(1).Vocab().Tensor("x", 0, 1, 8).Write(t, "m"),
		"not a model":        small().KV("general.type", "adapter").Vocab().Write(t, "m"),
		"one of 3 parts":     small().KV("split.count", uint32(3)).Vocab().Write(t, "m"),
		"an encoder":         small().KV("llama.attention.causal", false).Vocab().Write(t, "m"),
		"an embedding model": small().KV("llama.pooling_type", uint32(3)).Vocab().Write(t, "m"),
		"no weights":         gguftest.New(1).KV("general.architecture", "llama").Vocab().Write(t, "m"),
		"no vocabulary":      small().Write(t, "m"),
		"scores does not fit": small().KV("tokenizer.ggml.model", "llama").KV("tokenizer.ggml.tokens", []string{"a", "b"}).
			KV("tokenizer.ggml.scores", []float32{1}).Write(t, "m"),
		"eos_token_id is outside": small().KV("tokenizer.ggml.model", "llama").KV("tokenizer.ggml.tokens", []string{"a", "b"}).
			KV("tokenizer.ggml.eos_token_id", uint32(2)).Write(t, "m"),
		"no token for byte 0xE2": put("byte", bytes.Replace(whole, []byte("<0xE2>"), []byte("<0xe2>"), 1)),
		"no token for byte 0x01": small().KV("tokenizer.ggml.model", "llama").KV("tokenizer.ggml.tokens", []string{"a", "b"}).Write(t, "m"),
		"token 260 is called":    put("type", called),
		`"b" is there twice`:     small().KV("tokenizer.ggml.model", "llama").KV("tokenizer.ggml.tokens", []string{"a", "", "b", "", "b\x00c"}).Write(t, "m"),
	} {
		_, err := Open(Config{LibDir: "/nonexistent", Model: path})
		if !errors.Is(err, ErrModel) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, path := range map[string]string{
		"truncated": put("cut", whole[:len(whole)/2]), "empty": put("empty", nil), "text": put("text", []byte(strings.Repeat("text ", 100))),
		"directory": t.TempDir(), "missing": filepath.Join(t.TempDir(), "none.gguf"),
	} {
		_, err := Open(Config{LibDir: "/nonexistent", Model: path})
		var ge *gguf.Error
		if !errors.As(err, &ge) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestOpenSurvivesWhatTheLibraryRefuses: a file whose head is right and whose content is not
// is the library's to refuse, which it does with an error.
func TestOpenSurvivesWhatTheLibraryRefuses(t *testing.T) {
	needModel(t)
	for name, f := range map[string]*gguftest.File{
		"unknown architecture": gguftest.New(1).KV("general.architecture", "nosuch").Vocab().Tensor("x", 0, 1, 8),
		"missing tensors": gguftest.New(1).KV("general.architecture", "llama").KV("llama.context_length", uint32(64)).
			KV("llama.embedding_length", uint32(64)).KV("llama.block_count", uint32(2)).KV("llama.feed_forward_length", uint32(128)).
			KV("llama.attention.head_count", uint32(2)).KV("llama.attention.layer_norm_rms_epsilon", float32(1e-5)).Vocab().Tensor("x", 0, 1, 8),
	} {
		e, err := Open(Config{LibDir: paths.LibDir, Model: f.Write(t, "m.gguf")})
		if !errors.Is(err, ErrModel) || e != nil {
			t.Errorf("%s: %v, %v", name, e, err)
		}
	}
}

func TestLibraryErrors(t *testing.T) {
	needModel(t)
	path := gguftest.Llama(1).Write(t, "m.gguf")
	_, err := Open(Config{LibDir: t.TempDir(), Model: path})
	// Depending on which test came first the library is loaded or not; both are refused.
	if !errors.Is(err, ErrLibrary) {
		t.Errorf("another directory: %v", err)
	}
	_, _, err = loadOnce(t.TempDir())
	if !errors.Is(err, ErrLibrary) || !errors.Is(err, dynlib.ErrNotFound) {
		t.Errorf("an empty directory: %v", err)
	}
	// A library of another kind lacks the functions.
	dir := t.TempDir()
	for _, name := range []string{"libllama.so", "libggml.so", "libggml-base.so"} {
		if err := os.Symlink(filepath.Join(paths.LibDir, "libggml-base.so"), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	_, final, err := loadOnce(dir)
	var missing *dynlib.MissingSymbolsError
	if !errors.As(err, &missing) || final || len(missing.Names) < 5 {
		t.Errorf("a library of another kind: %v", err)
	}
}

func TestSaneRefusesShiftedStructs(t *testing.T) {
	open(t, nil) // loads the library
	right := llama.ContextDefaultParams()
	if err := sane(right); err != nil {
		t.Fatal(err)
	}
	for i, shift := range []func(*llama.ContextParams){
		func(p *llama.ContextParams) { p.TypeK = 0 }, func(p *llama.ContextParams) { p.AbortCallback = 1 },
		func(p *llama.ContextParams) { p.Offload_kqv = 0 }, func(p *llama.ContextParams) { p.NSeqMax = 512 },
		func(p *llama.ContextParams) { p.NUbatch = p.NBatch + 1 }, func(p *llama.ContextParams) { p.KVUnified = 7 },
	} {
		p := right
		shift(&p)
		if err := sane(p); !errors.Is(err, ErrLibrary) {
			t.Errorf("case %d: %v", i, err)
		}
	}
}

func TestEveryTypeIsKnown(t *testing.T) {
	open(t, nil)
	for typ := range uint32(llama.GGMLTypeCOUNT) {
		elems, size, ok := gguf.TypeBlock(typ)
		e, s := llama.GGMLBlockSize(llama.GGMLType(typ)), llama.GGMLTypeSize(llama.GGMLType(typ))
		if ok != (s != 0) || int64(elems) != e || size != s {
			t.Errorf("type %d %s: %d elements in %d bytes, the library says %d in %d", typ,
				llama.GGMLTypeName(llama.GGMLType(typ)), elems, size, e, s)
		}
	}
}

func TestLogIsForwarded(t *testing.T) {
	var buf bytes.Buffer
	e := openTiny(t, func(c *Config) {
		c.Log = slog.New(slog.NewTextHandler(&buf, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	logSink.Store(nil)
	n := buf.Len()
	if !strings.Contains(buf.String(), "source=llama.cpp") {
		t.Errorf("the log is %q", buf.String())
	}
	prefill(t, e, 0, prompt(t, e, 20))
	if buf.Len() != n {
		t.Error("lines came after the log was taken away")
	}
}

func TestDigest(t *testing.T) {
	dir := t.TempDir()
	b := make([]byte, 9<<20)
	for i := range b {
		b[i] = byte(i * 7)
	}
	seen := map[string]string{}
	sum := func(name string, b []byte) {
		path := filepath.Join(dir, "f")
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
		d, err := digest(path)
		if err != nil {
			t.Fatal(err)
		}
		if other, ok := seen[d]; ok {
			t.Errorf("%s has the digest of %s", name, other)
		}
		seen[d] = name
		if again, err := digest(path); err != nil || again != d {
			t.Errorf("%s: %s, then %s (%v)", name, d, again, err)
		}
	}
	sum("whole", b)
	sum("shorter", b[:len(b)-1])
	sum("tiny", b[:10])
	sum("empty", nil)
	for _, at := range []int{0, digestHead - 1, len(b) - 1} {
		b[at]++
		sum("changed", b)
	}
	if _, err := digest(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
}

func TestConfig(t *testing.T) {
	c, err := Config{}.complete(8192)
	if err != nil || c.ContextLen != 4096 || c.KVCells != 4096 || c.MaxSeqs != 8 || c.BatchRows != 8 || c.ChunkTokens != 128 || c.Threads != 1 {
		t.Errorf("defaults: %+v (%v)", c, err)
	}
	if c, err := (Config{}).complete(512); err != nil || c.ContextLen != 512 {
		t.Errorf("a small model: %+v (%v)", c, err)
	}
	if got := (Config{KVCells: 1000, MaxSeqs: 3}).cells(); got != 1280 {
		t.Errorf("%d cells", got)
	}
	for i, c := range []Config{
		{ContextLen: 9000}, {ContextLen: 1}, {ContextLen: 100, KVCells: 99}, {KVCells: -1}, {MaxSeqs: 255}, {MaxSeqs: -1},
		{Threads: 100000}, {ChunkTokens: 10000}, {BatchRows: 9}, {CacheTypeK: "q9"}, {CacheTypeV: "f64"},
	} {
		if _, err := c.complete(8192); err == nil {
			t.Errorf("case %d was accepted: %+v", i, c)
		}
	}
}

// TestNoBacktrace: the library itself sees the variable, not only Go's copy of the environment.
func TestNoBacktrace(t *testing.T) {
	openTiny(t, nil)
	libc, err := dynlib.Open("libc.so.6", "getenv")
	if err != nil {
		t.Skip(err)
	}
	var getenv func(string) string
	if err := libc.Func(&getenv, "getenv"); err != nil {
		t.Fatal(err)
	}
	if v := getenv("GGML_NO_BACKTRACE"); v != "1" {
		t.Errorf("GGML_NO_BACKTRACE is %q in C", v)
	}
}
