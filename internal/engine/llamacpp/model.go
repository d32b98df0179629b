package llamacpp

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/baton-pd/baton/internal/engine/llamacpp/gguf"
	"github.com/hybridgroup/yzma/pkg/llama"
)

// ErrModel: the model cannot be served by this engine. The text says why.
var ErrModel = errors.New("llamacpp: unsuitable model")

// checkHead refuses from the file's head alone what this engine cannot serve.
func checkHead(h *gguf.Head, path string) error {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s %s", ErrModel, path, fmt.Sprintf(format, args...))
	}
	arch := h.Str("general.architecture")
	if arch == "" {
		return refuse("names no architecture")
	}
	if t := h.Str("general.type"); t != "" && t != "model" {
		return refuse("holds what it calls %q, not a model", t)
	}
	if n, ok := h.Uint("split.count"); ok && n > 1 {
		return refuse("is one of %d parts; merge them into one file (llama-gguf-split --merge)", n)
	}
	if causal, ok := h.Bool(arch + ".attention.causal"); ok && !causal {
		return refuse("is an encoder (%s): it makes embeddings, not text", arch)
	}
	if pool, ok := h.Uint(arch + ".pooling_type"); ok && pool != 0 {
		return refuse("is an embedding model (%s): it makes no text", arch)
	}
	if len(h.Tensors) == 0 {
		return refuse("holds no weights")
	}
	return checkVocab(h, refuse)
}

// checkVocab catches vocabularies on which the library asserts instead of failing.
func checkVocab(h *gguf.Head, refuse func(string, ...any) error) error {
	tokens := h.KV[gguf.VocabKey]
	if h.Str("tokenizer.ggml.model") == "" || tokens.Type != gguf.Array || tokens.Elem != gguf.String || tokens.Len == 0 {
		return refuse("has no vocabulary")
	}
	if tokens.Twice != "" {
		return refuse("has a corrupt vocabulary: token %.64q is there twice", tokens.Twice)
	}
	for key, elem := range map[string]gguf.Type{
		"tokenizer.ggml.scores": gguf.Float32, "tokenizer.ggml.token_type": gguf.Int32,
	} {
		if v, ok := h.KV[key]; ok && (v.Type != gguf.Array || v.Elem != elem || v.Len != tokens.Len) {
			return refuse("has a corrupt vocabulary: %s does not fit its %d tokens", key, tokens.Len)
		}
	}
	for key := range h.KV {
		if strings.HasPrefix(key, "tokenizer.ggml.") && strings.HasSuffix(key, "_token_id") {
			if id, ok := h.Uint(key); !ok || id >= uint64(tokens.Len) {
				return refuse("has a corrupt vocabulary: %s is outside its %d tokens", key, tokens.Len)
			}
		}
	}
	return checkBytes(h, refuse)
}

// checkBytes catches what the library throws on, which ends the process: in a vocabulary of SentencePiece's kind a
// character without a token is put together from those of its bytes, and a token that is called a byte must say which.
func checkBytes(h *gguf.Head, refuse func(string, ...any) error) error {
	tokens := h.KV[gguf.VocabKey]
	for _, i := range h.KV[gguf.TypesKey].Sixes {
		if tokens.Short[i] {
			return refuse("has a corrupt vocabulary: token %d is called a byte, and does not say which", i)
		}
	}
	if h.Str("tokenizer.ggml.model") != "llama" {
		return nil
	}
	for c, there := range tokens.Bytes {
		if inText := c > 0 && c < 0xc0 || c > 0xc1 && c < 0xf5; inText && !there { // of valid UTF-8 without NUL
			return refuse("has no token for byte 0x%02X: the library would end on a text with such a character", c)
		}
	}
	return nil
}

// checkModel refuses what only the loaded library knows.
func checkModel(m llama.Model, arch string) error {
	switch {
	case llama.ModelIsRecurrent(m), llama.ModelIsHybrid(m):
		return fmt.Errorf("%w: architecture %s keeps a recurrent state, which cannot be handed over in chunks", ErrModel, arch)
	case llama.ModelIsDiffusion(m):
		return fmt.Errorf("%w: architecture %s generates by diffusion, not token by token", ErrModel, arch)
	case llama.ModelHasEncoder(m) || !llama.ModelHasDecoder(m):
		return fmt.Errorf("%w: architecture %s has an encoder, which is not supported", ErrModel, arch)
	case llama.ModelNSWA(m) > 0:
		return fmt.Errorf("%w: architecture %s has sliding-window attention, whose cells the library drops; chunks could not be handed over", ErrModel, arch)
	}
	return nil
}

// Sampling of the model digest.
const (
	digestHead    = 1 << 20
	digestBlock   = 64 << 10
	digestSamples = 64
)

// digest identifies a model file: SHA-256 over its size (8 bytes, little endian), its
// first MiB and 64 blocks of 64 KiB spread evenly from start to end. It tells models,
// quantisations and vocabularies apart in milliseconds; it does not find single flipped
// bits, for which the whole file would have to be read.
func digest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("digest model: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return "", fmt.Errorf("digest model: %w", err)
	}
	h := sha256.New()
	size := st.Size()
	var n [8]byte
	binary.LittleEndian.PutUint64(n[:], uint64(size))
	h.Write(n[:])
	if _, err := io.Copy(h, io.NewSectionReader(f, 0, min(size, digestHead))); err != nil {
		return "", fmt.Errorf("digest model: %w", err)
	}
	last := max(0, size-digestBlock)
	for i := range int64(digestSamples) {
		at := last / (digestSamples - 1) * i
		if i == digestSamples-1 {
			at = last
		}
		if _, err := io.Copy(h, io.NewSectionReader(f, at, digestBlock)); err != nil {
			return "", fmt.Errorf("digest model: %w", err)
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// modelName is what /v1/models shows: the file's own name without the extension.
func modelName(path string) string {
	return strings.TrimSuffix(filepath.Base(path), ".gguf")
}

// kvLayout describes the KV of the context for the fingerprint.
func kvLayout(l *layout) string {
	return fmt.Sprintf("layers=%d k=%s v=%s vtrans=0", len(l.k), describeRows(l.k), describeRows(l.v))
}

// describeRows is "f16x192" if all layers are alike, else the list run by run.
func describeRows(rs []rows) string {
	if len(rs) == 0 {
		return "none"
	}
	var parts []string
	for i := 0; i < len(rs); {
		j := i
		for j < len(rs) && rs[j] == rs[i] {
			j++
		}
		elems := rs[i].bytes
		if per, size, ok := gguf.TypeBlock(uint32(rs[i].typ)); ok {
			elems = elems / size * per
		}
		one := fmt.Sprintf("%sx%d", llama.GGMLTypeName(llama.GGMLType(rs[i].typ)), elems)
		if j-i != len(rs) {
			one += fmt.Sprintf("*%d", j-i)
		}
		parts = append(parts, one)
		i = j
	}
	return strings.Join(parts, "+")
}
