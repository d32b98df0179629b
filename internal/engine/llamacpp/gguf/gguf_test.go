package gguf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/baton-pd/baton/internal/engine/llamacpp/gguftest"
)

var le = binary.LittleEndian

func read(b []byte) (*Head, error) { return Read(bytes.NewReader(b), int64(len(b))) }

func TestReadWholeModel(t *testing.T) {
	h, err := read(gguftest.Llama(1).Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if h.Str("general.architecture") != "llama" || h.Version != 3 || len(h.Tensors) != 21 {
		t.Errorf("%q, version %d, %d tensors", h.Str("general.architecture"), h.Version, len(h.Tensors))
	}
	if n, ok := h.Uint("llama.context_length"); !ok || n != 2048 {
		t.Errorf("context length %d %v", n, ok)
	}
	if v := h.KV["tokenizer.ggml.tokens"]; v.Type != Array || v.Elem != String || v.Len != gguftest.VocabSize {
		t.Errorf("tokens: %+v", v)
	}
	if _, ok := h.Uint("general.architecture"); ok || h.Str("llama.context_length") != "" || h.Str("none") != "" {
		t.Error("a value was read as another type")
	}
	if _, ok := h.Bool("llama.context_length"); ok {
		t.Error("a number was read as a truth value")
	}
}

func TestSignedNumbers(t *testing.T) {
	h, err := read(gguftest.New(1).KV("a", int32(-5)).KV("b", int32(7)).KV("c", true).KV("d", false).KV("e", float32(1)).Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := h.Uint("a"); ok {
		t.Error("-5 was read as unsigned")
	}
	if n, ok := h.Uint("b"); !ok || n != 7 {
		t.Errorf("7 was read as %d %v", n, ok)
	}
	c, okC := h.Bool("c")
	d, okD := h.Bool("d")
	if !c || d || !okC || !okD {
		t.Error("truth values")
	}
}

// TestEveryTruncation: no prefix of a model is accepted.
func TestEveryTruncation(t *testing.T) {
	b := gguftest.Llama(1).Bytes()
	h, err := read(b)
	if err != nil {
		t.Fatal(err)
	}
	step := 1
	for n := 0; n < len(b); n += step {
		var e *Error
		if _, err := read(b[:n]); !errors.As(err, &e) {
			t.Fatalf("%d of %d bytes were accepted: %v", n, len(b), err)
		}
		if int64(n) > h.DataStart {
			step = 997
		}
	}
}

func str(s string) []byte { return append(le.AppendUint64(nil, uint64(len(s))), s...) }

func TestCorruptHeads(t *testing.T) {
	base := func() *gguftest.File { return gguftest.New(1).KV("general.architecture", "llama") }
	set := func(at int, v uint32) []byte {
		b := base().Tensor("x", 0, 1, 8).Bytes()
		le.PutUint32(b[at:], v)
		return b
	}
	entry := func(key string, typ uint32, rest ...byte) []byte {
		return base().Raw(append(le.AppendUint32(str(key), typ), rest...)).Bytes()
	}
	u64 := func(v uint64) []byte { return le.AppendUint64(nil, v) }
	array := func(elem uint32, n uint64, rest ...byte) []byte {
		return entry("k", 9, append(append(le.AppendUint32(nil, elem), u64(n)...), rest...)...)
	}
	for name, c := range map[string]struct {
		b    []byte
		says string
	}{
		"no magic":          {set(0, 0x12345678), "not a GGUF file"},
		"old version":       {set(4, 1), "version 1"},
		"future version":    {set(4, 99), "version 99"},
		"other byte order":  {set(4, 3<<24), "byte order"},
		"many tensors":      {set(12, 1), "corrupt"},
		"many entries":      {set(20, 1), "corrupt"},
		"one entry more":    {set(16, 2), ""},
		"huge key":          {set(28, 1), "metadata key of"},
		"empty key":         {entry("", 4, 0, 0, 0, 0), "empty"},
		"key twice":         {base().KV("general.architecture", "llama").Bytes(), "twice"},
		"unknown type":      {entry("k", 77, 0, 0, 0, 0), "unknown type"},
		"strange truth":     {entry("k", 7, 2), "neither"},
		"huge string":       {entry("k", 8, u64(1<<40)...), "metadata string"},
		"long string":       {entry("k", 8, u64(1<<20)...), "truncated"},
		"huge array":        {array(4, 1<<40), "array"},
		"long array":        {array(4, 1<<20), "truncated"},
		"huge text array":   {array(8, 1, u64(1<<63)...), "truncated"},
		"array of unknown":  {array(50, 1), "unknown element"},
		"deep array":        {array(9, 1, append(le.AppendUint32(nil, 9), append(u64(1), append(le.AppendUint32(nil, 9), u64(1)...)...)...)...), "nesting"},
		"alignment 0":       {base().KV("general.alignment", uint32(0)).Bytes(), "alignment"},
		"alignment 24":      {base().KV("general.alignment", uint32(24)).Bytes(), "alignment"},
		"alignment as text": {base().KV("general.alignment", "32").Bytes(), "alignment"},
		"tensor twice":      {base().Tensor("x", 0, 1, 8).Tensor("x", 0, 1, 8).Bytes(), "twice"},
		"long name":         {base().Tensor(strings.Repeat("n", 64), 0, 1, 8).Bytes(), "tensor name"},
		"no dimension":      {base().Tensor("x", 0, 1).Bytes(), "0 dimensions"},
		"five dimensions":   {base().Tensor("x", 0, 1, 1, 1, 1, 1, 8).Bytes(), "5 dimensions"},
		"empty dimension":   {base().Info("x", 0, 0, 8, 0).Bytes(), "shape"},
		"overflow":          {base().Info("x", 0, 0, 1<<40, 1<<40).Bytes(), "shape"},
		"overflow by bytes": {base().Info("x", 0, 0, 1<<62).Bytes(), "shape"},
		"unknown tensor":    {base().Info("x", 5, 0, 32).Bytes(), "type 5"},
		"part of a block":   {base().Info("x", 2, 0, 33).Bytes(), "shape"},
		"not aligned":       {base().Tensor("y", 0, 1, 64).Info("x", 0, 4, 8).Bytes(), "aligned"},
		"overlap":           {base().Tensor("y", 0, 1, 64).Info("x", 0, 32, 8).Bytes(), "overlaps"},
		"outside":           {base().Tensor("y", 0, 1, 64).Info("x", 0, 256, 8).Bytes(), "truncated"},
		"offset overflow":   {base().Tensor("y", 0, 1, 64).Info("x", 0, 1<<64-32, 8).Bytes(), "truncated"},
	} {
		_, err := read(c.b)
		var e *Error
		if !errors.As(err, &e) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := read(base().KV("general.alignment", uint32(64)).Bytes()); err != nil {
		t.Errorf("alignment 64: %v", err)
	}
}

func TestOpenBadPaths(t *testing.T) {
	dir := t.TempDir()
	empty, fifo := filepath.Join(dir, "empty"), filepath.Join(dir, "fifo")
	if err := os.WriteFile(empty, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(fifo, 0o644); err != nil {
		t.Fatal(err)
	}
	text := filepath.Join(dir, "text")
	if err := os.WriteFile(text, []byte("This is not a model, but long enough."), 0o644); err != nil {
		t.Fatal(err)
	}
	for path, says := range map[string]string{
		filepath.Join(dir, "none"): "does not exist", dir: "is a directory", empty: "is empty",
		fifo: "not a regular file", text: "not a GGUF file", filepath.Join(text, "x"): "cannot be examined",
	} {
		_, err := Open(path)
		var e *Error
		if !errors.As(err, &e) || e.Path != path || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, err := Open(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
}

// FuzzRead: no bytes make the reader panic, hang or take much memory, and what it
// accepts lies inside the file.
func FuzzRead(f *testing.F) {
	f.Add(gguftest.New(1).KV("general.architecture", "llama").KV("a", []string{"x", "yz"}).KV("b", []float32{1}).Tensor("t", 0, 1, 8, 2).Bytes())
	f.Add(gguftest.Mamba(1).Bytes()[:2000])
	f.Add([]byte("GGUF"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := read(b)
		if err != nil {
			return
		}
		for _, x := range h.Tensors {
			if end := h.DataStart + int64(x.Offset) + int64(x.Bytes); end > int64(len(b)) || end < 0 {
				t.Errorf("tensor %q ends at %d of %d", x.Name, end, len(b))
			}
		}
	})
}
