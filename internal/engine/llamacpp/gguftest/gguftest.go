// Package gguftest builds small GGUF files for tests: the format piece by piece, and
// whole models of a few kilobytes with random weights, which compute nonsense but
// compute it exactly as a real model does.
package gguftest

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
)

// Value types of the format that tests use.
const (
	U32  = 4
	I32  = 5
	F32  = 6
	Bool = 7
	Str  = 8
	Arr  = 9
)

// File is a GGUF file under construction.
type File struct {
	kvs, infos, data []byte
	nKV, nTensors    uint64
	rnd              *rand.Rand
}

// New starts an empty file; seed chooses its random weights.
func New(seed uint64) *File { return &File{rnd: rand.New(rand.NewPCG(seed, 1))} }

var le = binary.LittleEndian

func str(b []byte, s string) []byte { return append(le.AppendUint64(b, uint64(len(s))), s...) }

// KV adds a metadata entry; v is a uint32, int32, float32, bool, string, or a slice of
// string, float32 or int32.
func (f *File) KV(key string, v any) *File {
	f.nKV++
	f.kvs = str(f.kvs, key)
	switch v := v.(type) {
	case uint32:
		f.kvs = le.AppendUint32(le.AppendUint32(f.kvs, U32), v)
	case int32:
		f.kvs = le.AppendUint32(le.AppendUint32(f.kvs, I32), uint32(v))
	case float32:
		f.kvs = le.AppendUint32(le.AppendUint32(f.kvs, F32), math.Float32bits(v))
	case bool:
		f.kvs = append(le.AppendUint32(f.kvs, Bool), map[bool]byte{true: 1}[v])
	case string:
		f.kvs = str(le.AppendUint32(f.kvs, Str), v)
	case []string:
		f.array(Str, len(v))
		for _, s := range v {
			f.kvs = str(f.kvs, s)
		}
	case []float32:
		f.array(F32, len(v))
		for _, x := range v {
			f.kvs = le.AppendUint32(f.kvs, math.Float32bits(x))
		}
	case []int32:
		f.array(I32, len(v))
		for _, x := range v {
			f.kvs = le.AppendUint32(f.kvs, uint32(x))
		}
	default:
		panic(fmt.Sprintf("gguftest: value of type %T", v))
	}
	return f
}

func (f *File) array(elem uint32, n int) {
	f.kvs = le.AppendUint64(le.AppendUint32(le.AppendUint32(f.kvs, Arr), elem), uint64(n))
}

// Raw appends bytes to the metadata as one entry.
func (f *File) Raw(b []byte) *File {
	f.nKV++
	f.kvs = append(f.kvs, b...)
	return f
}

// Tensor adds an f32 tensor of random values: mean m, spread s.
func (f *File) Tensor(name string, m, s float64, dims ...uint64) *File {
	f.Info(name, 0, uint64(len(f.data)), dims...)
	n := uint64(1)
	for _, d := range dims {
		n *= d
	}
	for range n {
		f.data = le.AppendUint32(f.data, math.Float32bits(float32(m+s*f.rnd.NormFloat64())))
	}
	for len(f.data)%32 != 0 {
		f.data = append(f.data, 0)
	}
	return f
}

// Matrix adds a Q4_1 tensor, the weight type of Baton's default model, of random values
// around 0 with spread s.
func (f *File) Matrix(name string, s float64, dims ...uint64) *File {
	f.Info(name, 3, uint64(len(f.data)), dims...)
	n := uint64(1)
	for _, d := range dims {
		n *= d
	}
	for range n / 32 {
		step := s * (0.8 + 0.4*f.rnd.Float64()) / 4.6 // 16 even steps have a spread of 4.6 steps
		f.data = le.AppendUint16(le.AppendUint16(f.data, half(step)), half(-7.5*step))
		for range 16 {
			f.data = append(f.data, byte(f.rnd.Uint32()))
		}
	}
	for len(f.data)%32 != 0 {
		f.data = append(f.data, 0)
	}
	return f
}

// half rounds a small normal number to half precision, towards zero.
func half(v float64) uint16 {
	b := math.Float32bits(float32(v))
	return uint16(b>>16&0x8000) | uint16(b>>13-(127-15)<<10)&0x7fff
}

// Info adds an entry of the tensor table without data.
func (f *File) Info(name string, ggmlType uint32, offset uint64, dims ...uint64) *File {
	f.nTensors++
	f.infos = le.AppendUint32(str(f.infos, name), uint32(len(dims)))
	for _, d := range dims {
		f.infos = le.AppendUint64(f.infos, d)
	}
	f.infos = le.AppendUint64(le.AppendUint32(f.infos, ggmlType), offset)
	return f
}

// Bytes is the finished file.
func (f *File) Bytes() []byte {
	b := []byte("GGUF")
	b = le.AppendUint32(b, 3)
	b = le.AppendUint64(b, f.nTensors)
	b = le.AppendUint64(b, f.nKV)
	b = append(append(b, f.kvs...), f.infos...)
	for len(b)%32 != 0 {
		b = append(b, 0)
	}
	return append(b, f.data...)
}

// Write puts the file into a directory of the test and gives its path.
func (f *File) Write(t testing.TB, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, f.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// Vocab adds a vocabulary: <unk>, <s>, </s>, <|mark|>, the 256 bytes and the letters a to z.
func (f *File) Vocab() *File {
	tokens := []string{"<unk>", "<s>", "</s>", "<|mark|>"}
	types := []int32{2, 3, 3, 3}
	for i := range 256 {
		tokens, types = append(tokens, fmt.Sprintf("<0x%02X>", i)), append(types, 6)
	}
	for c := 'a'; c <= 'z'; c++ {
		tokens, types = append(tokens, string(c)), append(types, 1)
	}
	return f.KV("tokenizer.ggml.model", "llama").KV("tokenizer.ggml.tokens", tokens).
		KV("tokenizer.ggml.scores", make([]float32, len(tokens))).KV("tokenizer.ggml.token_type", types).
		KV("tokenizer.ggml.bos_token_id", uint32(1)).KV("tokenizer.ggml.eos_token_id", uint32(2)).
		KV("tokenizer.ggml.unknown_token_id", uint32(0))
}

// VocabSize is the number of tokens of [File.Vocab].
const VocabSize = 4 + 256 + 26

// Llama is a whole model of the llama family: 2 layers, 2 heads of 32, one KV head.
func Llama(seed uint64) *File {
	f := New(seed).KV("general.architecture", "llama").KV("general.name", "tiny").
		KV("llama.context_length", uint32(2048)).KV("llama.embedding_length", uint32(64)).
		KV("llama.block_count", uint32(2)).KV("llama.feed_forward_length", uint32(128)).
		KV("llama.attention.head_count", uint32(2)).KV("llama.attention.head_count_kv", uint32(1)).
		KV("llama.attention.layer_norm_rms_epsilon", float32(1e-5)).KV("llama.rope.dimension_count", uint32(32)).
		KV("tokenizer.chat_template", "{{ messages }}").Vocab()
	f.Matrix("token_embd.weight", 1, 64, VocabSize).Tensor("output_norm.weight", 1, 0.1, 64).
		Matrix("output.weight", 0.5, 64, VocabSize)
	for i := range 2 {
		f.block(i, false)
	}
	return f
}

// Gemma2 is a model with sliding-window attention in every other layer.
func Gemma2(seed uint64) *File {
	f := New(seed).KV("general.architecture", "gemma2").KV("gemma2.context_length", uint32(2048)).
		KV("gemma2.embedding_length", uint32(64)).KV("gemma2.block_count", uint32(2)).
		KV("gemma2.feed_forward_length", uint32(128)).KV("gemma2.attention.head_count", uint32(2)).
		KV("gemma2.attention.head_count_kv", uint32(1)).KV("gemma2.attention.layer_norm_rms_epsilon", float32(1e-5)).
		KV("gemma2.attention.key_length", uint32(32)).KV("gemma2.attention.value_length", uint32(32)).
		KV("gemma2.attention.sliding_window", uint32(64)).Vocab()
	f.Tensor("token_embd.weight", 0, 1, 64, VocabSize).Tensor("output_norm.weight", 0, 0.1, 64)
	for i := range 2 {
		f.block(i, true)
	}
	return f
}

func (f *File) block(i int, post bool) {
	b := fmt.Sprintf("blk.%d.", i)
	f.Tensor(b+"attn_norm.weight", 1, 0.1, 64).Tensor(b+"ffn_norm.weight", 1, 0.1, 64).
		Matrix(b+"attn_q.weight", 0.2, 64, 64).Matrix(b+"attn_k.weight", 0.2, 64, 32).
		Matrix(b+"attn_v.weight", 0.2, 64, 32).Matrix(b+"attn_output.weight", 0.2, 64, 64).
		Matrix(b+"ffn_gate.weight", 0.2, 64, 128).Matrix(b+"ffn_up.weight", 0.2, 64, 128).
		Matrix(b+"ffn_down.weight", 0.2, 128, 64)
	if post {
		f.Tensor(b+"post_attention_norm.weight", 1, 0.1, 64).Tensor(b+"post_ffw_norm.weight", 1, 0.1, 64)
	}
}

// Mamba is a recurrent model.
func Mamba(seed uint64) *File {
	f := New(seed).KV("general.architecture", "mamba").KV("mamba.context_length", uint32(2048)).
		KV("mamba.embedding_length", uint32(64)).KV("mamba.block_count", uint32(1)).
		KV("mamba.feed_forward_length", uint32(0)).KV("mamba.attention.head_count", uint32(0)).
		KV("mamba.ssm.conv_kernel", uint32(4)).KV("mamba.ssm.inner_size", uint32(128)).
		KV("mamba.ssm.state_size", uint32(16)).KV("mamba.ssm.time_step_rank", uint32(4)).
		KV("mamba.attention.layer_norm_rms_epsilon", float32(1e-5)).Vocab()
	f.Tensor("token_embd.weight", 0, 1, 64, VocabSize).Tensor("output_norm.weight", 1, 0.1, 64).
		Tensor("blk.0.attn_norm.weight", 1, 0.1, 64).Tensor("blk.0.ssm_in.weight", 0, 0.2, 64, 256).
		Tensor("blk.0.ssm_conv1d.weight", 0, 0.2, 4, 128).Tensor("blk.0.ssm_conv1d.bias", 0, 0.2, 128).
		Tensor("blk.0.ssm_x.weight", 0, 0.2, 128, 36).Tensor("blk.0.ssm_dt.weight", 0, 0.2, 4, 128).
		Tensor("blk.0.ssm_dt.bias", 0, 0.2, 128).Tensor("blk.0.ssm_a", -1, 0.1, 16, 128).
		Tensor("blk.0.ssm_d", 0, 0.2, 128).Tensor("blk.0.ssm_out.weight", 0, 0.2, 128, 64)
	return f
}
