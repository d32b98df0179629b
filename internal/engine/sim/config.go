package sim

import (
	"errors"
	"fmt"
	"time"

	"github.com/baton-pd/baton/internal/engine"
)

// Config is a simulated model and its context. The zero value is usable:
// unset sizes get the defaults named at each field, unset times cost nothing.
type Config struct {
	Seed    uint64 // of the "weights": other seeds give other KV and other answers
	Layers  int    // default 2
	KVHeads int    // default 2
	HeadDim int    // bytes of one head's K or V at one position; default 8

	// Any of the next five makes the worker one of TP*PP ranks whose chunks are pages that a worker with
	// other ranks or pages can take over (kv.Shards). The answers stay the same.
	TP         int  // tensor-parallel ranks; default 1
	PP         int  // pipeline ranks; default 1
	PageTokens int  // positions a page; default 16
	HeadsFirst bool // pages are [head][position][dim], not [position][head][dim]
	Latent     bool // MLA: one vector of HeadDim bytes a position and layer, no K, V or heads

	// LayerGroup is how many layers are exported together while the later ones are computed; 0: a
	// chunk is exported whole. Costs of a chunk are shared by its layers evenly.
	LayerGroup int

	ModelName   string // default "sim"
	ChunkTokens int    // default 64
	ContextLen  int    // default 4096
	KVCells     int    // default 16384
	MaxSeqs     int    // default 32

	// EOSEvery: a generated token is EOS with a chance of 1/EOSEvery, decided by
	// the KV hash. 0: never.
	EOSEvery int
	// EOSAt: the token of the step at this position (the length of the text before
	// it, less one) is EOS. 0: none.
	EOSAt int

	// The cost model. A wait ends early when the call's ctx ends.
	PrefillChunkTime time.Duration // a Prefill call
	PrefillTokenTime time.Duration // each of its tokens, in addition
	StepTime         time.Duration // a Step call
	StepRowTime      time.Duration // each of its rows, in addition
	ExportTime       time.Duration // an Export call
	ImportTime       time.Duration // an Import call
	SwapTime         time.Duration // a SwapOut or SwapIn call

	// Recheck digests all bytes of a sequence again at every step.
	Recheck bool
	// Hook, if set, is called at the start of every call that may fail, on the
	// calling goroutine. A non-nil error is the call's result and the call does
	// nothing else. For tests.
	Hook func(Call) error
}

// Op names a method of the engine, for Config.Hook.
type Op string

// The calls a hook sees.
const (
	OpPrefill    Op = "prefill" // also PrefillLayers
	OpExport     Op = "export"  // also ExportLayers
	OpImport     Op = "import"
	OpStep       Op = "step"
	OpNewSampler Op = "sampler"
	OpCopySeq    Op = "copy"
	OpFreeSeq    Op = "free" // cannot fail: only a panic of the hook has an effect
	OpSwapOut    Op = "swap_out"
	OpSwapIn     Op = "swap_in"
)

// Call is one engine call as a hook sees it.
type Call struct {
	Op   Op
	Seq  engine.Seq // of the first row for OpStep; the source for OpCopySeq
	Pos  int        // first position
	Rows int        // tokens or rows
}

// WithDefaults returns a copy of c in which every unset size has its default.
func (c Config) WithDefaults() Config {
	set := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	set(&c.Layers, 2)
	if c.paged() {
		set(&c.TP, 1)
		set(&c.PP, 1)
		set(&c.PageTokens, 16)
	}
	if c.Latent {
		set(&c.KVHeads, 1)
	}
	set(&c.KVHeads, 2)
	set(&c.HeadDim, 8)
	set(&c.ChunkTokens, 64)
	set(&c.ContextLen, 4096)
	set(&c.KVCells, 16384)
	set(&c.MaxSeqs, 32)
	if c.ModelName == "" {
		c.ModelName = "sim"
	}
	return c
}

// Validate says what is wrong with a configuration that has its defaults.
func (c Config) Validate() error {
	for _, f := range []struct {
		name     string
		v, limit int
	}{
		{"Layers", c.Layers, 1 << 10}, {"KVHeads", c.KVHeads, 1 << 10}, {"HeadDim", c.HeadDim, 1 << 14},
		{"ChunkTokens", c.ChunkTokens, 1 << 20}, {"ContextLen", c.ContextLen, 1 << 24},
		{"KVCells", c.KVCells, 1 << 26}, {"MaxSeqs", c.MaxSeqs, 1 << 20},
	} {
		if f.v < 1 || f.v > f.limit {
			return fmt.Errorf("sim: %s is %d, want 1 to %d", f.name, f.v, f.limit)
		}
	}
	if c.EOSEvery < 0 || c.EOSAt < 0 || c.LayerGroup < 0 {
		return errors.New("sim: EOSEvery, EOSAt and LayerGroup must not be negative")
	}
	if c.paged() {
		if err := c.shards().Validate(); err != nil {
			return fmt.Errorf("sim: %w", err)
		}
	}
	for _, d := range []time.Duration{c.PrefillChunkTime, c.PrefillTokenTime, c.StepTime, c.StepRowTime, c.ExportTime, c.ImportTime, c.SwapTime} {
		if d < 0 {
			return errors.New("sim: a cost must not be negative")
		}
	}
	return nil
}

// paged: the worker has ranks, and its chunks are their pages.
func (c Config) paged() bool {
	return c.TP != 0 || c.PP != 0 || c.PageTokens != 0 || c.HeadsFirst || c.Latent
}

// cellBytes is the KV of one position: K and V of every head of every layer.
func (c Config) cellBytes() int {
	if c.Latent {
		return c.Layers * c.rowBytes()
	}
	return 2 * c.Layers * c.rowBytes()
}

// rowBytes is one position's K (or V) in one layer.
func (c Config) rowBytes() int { return c.KVHeads * c.HeadDim }
