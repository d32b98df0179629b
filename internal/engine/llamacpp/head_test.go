package llamacpp

import (
	"bytes"
	"errors"
	"testing"

	"github.com/baton-pd/baton/internal/engine/llamacpp/gguf"
	"github.com/baton-pd/baton/internal/engine/llamacpp/gguftest"
)

// FuzzHead: whatever the file, its head is refused with the file named, or is one on which the
// library does not assert: an architecture, weights, and a vocabulary that holds together.
func FuzzHead(f *testing.F) {
	good := func() *gguftest.File {
		return gguftest.New(1).KV("general.architecture", "llama").KV("tokenizer.ggml.model", "gpt2").
			KV("tokenizer.ggml.tokens", []string{"a", "b", "c"}).KV("tokenizer.ggml.scores", []float32{1, 2, 3}).
			KV("tokenizer.ggml.token_type", []int32{1, 1, 3}).KV("tokenizer.ggml.bos_token_id", uint32(2)).Tensor("t", 0, 1, 8)
	}
	for _, file := range []*gguftest.File{
		good(), good().KV("split.count", uint32(2)), good().KV("llama.attention.causal", false), good().KV("llama.pooling_type", uint32(1)),
		good().KV("tokenizer.ggml.eos_token_id", uint32(3)), good().KV("general.type", "adapter"), gguftest.New(1).KV("general.architecture", "x"),
		gguftest.New(1).KV("general.architecture", "llama").KV("tokenizer.ggml.model", "gpt2").KV("tokenizer.ggml.tokens", []string{"a", "a"}).Tensor("t", 0, 1, 8),
	} {
		f.Add(file.Bytes())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := gguf.Read(bytes.NewReader(b), int64(len(b)))
		if err != nil {
			var e *gguf.Error
			if !errors.As(err, &e) || e.Reason == "" {
				t.Fatalf("refused with %v", err)
			}
			return
		}
		if err := checkHead(h, "m.gguf"); err != nil {
			if !errors.Is(err, ErrModel) {
				t.Fatalf("refused with %v", err)
			}
			return
		}
		tokens := h.KV[gguf.VocabKey]
		if h.Str("general.architecture") == "" || len(h.Tensors) == 0 || tokens.Elem != gguf.String || tokens.Len < 1 || tokens.Len > len(b) {
			t.Fatalf("accepted %+v", h)
		}
		if id, ok := h.Uint("tokenizer.ggml.bos_token_id"); ok && id >= uint64(tokens.Len) {
			t.Fatalf("bos %d of %d tokens", id, tokens.Len)
		}
	})
}
