package llamacpp

import (
	"fmt"
	"log/slog"
	"runtime"

	"github.com/hybridgroup/yzma/pkg/llama"
)

// Config of an engine. Zero values get the defaults named below.
type Config struct {
	LibDir string // directory of libllama.so and its companions
	Model  string // GGUF file

	ContextLen  int // tokens one sequence may hold; 0: the smaller of the model's and 4,096
	KVCells     int // tokens all sequences together may hold; 0: ContextLen
	MaxSeqs     int // sequences; 0: 8
	Threads     int // compute threads; 0: 1. More than the free cores slows everything down
	ChunkTokens int // largest Prefill; 0: 128
	BatchRows   int // largest Step; 0: MaxSeqs

	CacheTypeK, CacheTypeV string // storage of K and V: "f16" (default), "f32", "bf16", "q8_0"

	// Log receives the library's lines at debug level; nil drops them. The library
	// has one log a process: the last engine opened with a logger gets all lines.
	Log *slog.Logger
}

// cells is what the context gets: sequences hold whole blocks, so each may waste
// part of one.
func (c Config) cells() int {
	n := c.KVCells + c.MaxSeqs*blockCells
	return (n + cellPad - 1) / cellPad * cellPad
}

const (
	defaultContext = 4096
	cellPad        = 256     // the library rounds its cells up to this
	maxCells       = 1 << 26 // far above any machine; keeps the arithmetic in range
	maxChunk       = 8192
	maxThreads     = 512
	librarySeqs    = 256 // sequences a context of the library can have, the engine's own included
)

var cacheTypes = map[string]llama.GGMLType{
	"": llama.GGMLTypeF16, "f16": llama.GGMLTypeF16, "f32": llama.GGMLTypeF32,
	"bf16": llama.GGMLTypeBF16, "q8_0": llama.GGMLTypeQ8_0,
}

// complete gives a copy with the defaults filled in, for a model that was trained
// with trained tokens (0: unknown), or tells what is wrong.
func (c Config) complete(trained int) (Config, error) {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.ContextLen, defaultContext)
	if trained > 0 && c.ContextLen > trained {
		if c.ContextLen != defaultContext {
			return c, fmt.Errorf("llamacpp: context of %d tokens, but the model was trained for %d", c.ContextLen, trained)
		}
		c.ContextLen = trained
	}
	def(&c.KVCells, c.ContextLen)
	def(&c.MaxSeqs, 8)
	def(&c.Threads, 1)
	def(&c.ChunkTokens, 128)
	def(&c.BatchRows, c.MaxSeqs)
	check := []struct {
		name        string
		v, min, max int
	}{
		{"ContextLen", c.ContextLen, 2, maxCells},
		{"KVCells", c.KVCells, 2, maxCells},
		{"MaxSeqs", c.MaxSeqs, 1, librarySeqs - ownSeqs},
		{"Threads", c.Threads, 1, min(maxThreads, 4*runtime.NumCPU())},
		{"ChunkTokens", c.ChunkTokens, 1, maxChunk},
		{"BatchRows", c.BatchRows, 1, c.MaxSeqs},
	}
	for _, k := range check {
		if k.v < k.min || k.v > k.max {
			return c, fmt.Errorf("llamacpp: %s is %d, not %d to %d", k.name, k.v, k.min, k.max)
		}
	}
	for _, t := range []string{c.CacheTypeK, c.CacheTypeV} {
		if _, ok := cacheTypes[t]; !ok {
			return c, fmt.Errorf("llamacpp: cache type %q is not f16, f32, bf16 or q8_0", t)
		}
	}
	if c.ContextLen > c.KVCells {
		return c, fmt.Errorf("llamacpp: ContextLen %d is more than KVCells %d", c.ContextLen, c.KVCells)
	}
	return c, nil
}
