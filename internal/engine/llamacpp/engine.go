package llamacpp

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/llamacpp/gguf"
	"github.com/hybridgroup/yzma/pkg/llama"
)

// Engine is a model with one context. It implements [engine.Compute].
type Engine struct {
	cfg  Config // complete
	info engine.Info
	lib  *library
	tok  *tokenizer

	model llama.Model
	ctx   llama.Context
	mem   llama.Memory
	batch llama.Batch
	cells batchCells
	intr  *interrupt

	place   *placer // by the scheduler's sequence numbers
	grant   grant   // reused
	holes   []int32 // reused
	layout  *layout
	seen    []uint64 // by sequence: the last step that had it, to find doubles
	step    uint64
	rowSeqs []engine.Seq // reused: the sequences of Step
	rowAt   []int32      // reused: where in the batch a row of Step is
	joint   []byte       // reused: a chunk in one piece
	filling []byte       // reused: filler tokens
	spare   []byte       // reused: rows while they are put in order
	closed  bool
	broken  error // the library refused a filler; told by the next call
}

var _ engine.Compute = (*Engine)(nil)

// batchCells are the arrays of the library's batch as slices.
type batchCells struct {
	token  []llama.Token
	pos    []llama.Pos
	seqs   []int32
	seq    []*llama.SeqId
	logits []int8
}

// The library's sequences: the scheduler's come after the engine's own.
const (
	scratch llama.SeqId = 0 // chunks travel through it
	fillers llama.SeqId = 1 // keeps cells occupied (place.go)
	ownSeqs             = 2
)

func libSeq(s engine.Seq) llama.SeqId { return llama.SeqId(s) + ownSeqs }

// Open checks the model file, loads the library and the model, and makes a context.
// A file that cannot be right gives a [*gguf.Error]; one that cannot be served gives
// [ErrModel]; a library that does not fit gives [ErrLibrary].
func Open(cfg Config) (_ *Engine, err error) {
	head, err := gguf.Open(cfg.Model)
	if err != nil {
		return nil, err
	}
	if err := checkHead(head, cfg.Model); err != nil {
		return nil, err
	}
	arch := head.Str("general.architecture")
	trained, _ := head.Uint(arch + ".context_length")
	if cfg, err = cfg.complete(int(min(trained, maxCells))); err != nil {
		return nil, err
	}
	lib, err := load(cfg.LibDir)
	if err != nil {
		return nil, err
	}
	if cfg.Log != nil {
		logSink.Store(cfg.Log)
	}
	e := &Engine{cfg: cfg, lib: lib, place: newPlacer(cfg.MaxSeqs, cfg.cells()), seen: make([]uint64, cfg.MaxSeqs)}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close())
		}
	}()
	if e.model, err = llama.ModelLoadFromFile(cfg.Model, llama.ModelDefaultParams()); err != nil {
		return nil, fmt.Errorf("%w: %s: the library cannot load it: %w", ErrModel, cfg.Model, err)
	}
	if err := checkModel(e.model, arch); err != nil {
		return nil, err
	}
	e.tok = newTokenizer(lib, llama.ModelGetVocab(e.model), cfg.ContextLen)
	if err := e.makeContext(); err != nil {
		return nil, err
	}
	if err := e.probe(); err != nil {
		return nil, err
	}
	return e, e.describe(head)
}

func (e *Engine) makeContext() (err error) {
	if e.intr, err = newInterrupt(); err != nil {
		return err
	}
	rows := max(e.cfg.ChunkTokens, e.cfg.BatchRows, probeTokens)
	p := llama.ContextDefaultParams()
	p.NCtx = uint32(e.cfg.cells())
	p.NBatch, p.NUbatch = uint32(rows), uint32(rows) // a batch is computed in one piece
	p.NSeqMax = uint32(e.cfg.MaxSeqs) + ownSeqs
	p.NOutputsMax = p.NSeqMax // the library aborts on less; BatchRows <= MaxSeqs
	p.NThreads, p.NThreadsBatch = int32(e.cfg.Threads), int32(e.cfg.Threads)
	p.FlashAttentionType = llama.FlashAttentionTypeEnabled
	p.TypeK, p.TypeV = cacheTypes[e.cfg.CacheTypeK], cacheTypes[e.cfg.CacheTypeV]
	p.KVUnified = 1
	p.Embeddings = 0
	p.NoPerf = 1
	p.AbortCallback, p.AbortCallbackData = e.lib.strlen, e.intr.address()
	if e.ctx, err = llama.InitFromModel(e.model, p); err != nil {
		return fmt.Errorf("llamacpp: make a context of %d cells for %s (is there enough memory?): %w", e.cfg.cells(), e.cfg.Model, err)
	}
	if got := int(llama.NCtx(e.ctx)); got != e.cfg.cells() {
		return fmt.Errorf("llamacpp: the library made a context of %d cells, not %d", got, e.cfg.cells())
	}
	if e.mem, err = llama.GetMemory(e.ctx); err != nil || e.mem == 0 {
		return fmt.Errorf("%w: %s has no KV memory", ErrModel, e.cfg.Model)
	}
	e.batch = llama.BatchInit(int32(rows), 0, 1)
	e.cells = batchCells{
		token:  unsafe.Slice(e.batch.Token, rows),
		pos:    unsafe.Slice(e.batch.Pos, rows),
		seqs:   unsafe.Slice(e.batch.NSeqId, rows),
		seq:    unsafe.Slice(e.batch.SeqId, rows),
		logits: unsafe.Slice(e.batch.Logits, rows),
	}
	return nil
}

// probeTokens is the length of the chunk that the layout is learned from.
const probeTokens = 3

// probe computes a short chunk, learns the layout of KV blocks from it and checks
// that it predicts other blocks. It also touches the weights, so that the first
// request does not wait for the disk.
func (e *Engine) probe() error {
	for i := range probeTokens {
		e.put(i, 0, i, scratch, false)
	}
	e.batch.NTokens = probeTokens
	if rc, err := llama.Decode(e.ctx, e.batch); err != nil || rc != 0 {
		return fmt.Errorf("%w: %s: a first batch failed with %d (%v)", ErrModel, e.cfg.Model, rc, err)
	}
	if err := llama.Synchronize(e.ctx); err != nil {
		return err
	}
	block, err := e.stateOf(scratch)
	if err != nil {
		return err
	}
	if e.layout, err = parseLayout(block, probeTokens); err != nil {
		return err
	}
	if err := e.layout.verify(block, 0, probeTokens); err != nil {
		return fmt.Errorf("%w: %w", errLayout, err)
	}
	e.drop(scratch, probeTokens-1)
	if block, err = e.stateOf(scratch); err != nil {
		return err
	}
	if err := e.layout.verify(block, 0, probeTokens-1); err != nil {
		return fmt.Errorf("%w: %w", errLayout, err)
	}
	e.drop(scratch, 0)
	return nil
}

// stateOf copies a library sequence out, for the probe.
func (e *Engine) stateOf(s llama.SeqId) ([]byte, error) {
	block := make([]byte, llama.StateSeqGetSizeExt(e.ctx, s, 0))
	if n := llama.StateSeqGetDataExt(e.ctx, block, s, 0); n != uint64(len(block)) {
		return nil, fmt.Errorf("%w: %d bytes of %d written", errLayout, n, len(block))
	}
	return block, nil
}

func (e *Engine) describe(head *gguf.Head) error {
	sum, err := digest(e.cfg.Model)
	if err != nil {
		return err
	}
	e.info = engine.Info{
		Engine: e.lib.name, ModelDigest: sum, KVLayout: kvLayout(e.layout), Attention: "flash=1 unified=1",
		ChunkTokens: e.cfg.ChunkTokens,
		ModelName:   modelName(e.cfg.Model), ModelPath: e.cfg.Model,
		VocabSize: len(e.tok.eog), ContextLen: e.cfg.ContextLen, StepTokens: stepTokens, KVCells: e.cfg.KVCells,
		MaxSeqs: e.cfg.MaxSeqs, Threads: e.cfg.Threads,
		ChatTemplate: head.Str("tokenizer.chat_template"),
		BOS:          engine.Token(e.tok.bos), EOS: engine.Token(e.tok.eos),
	}
	return nil
}

// Info implements [engine.Compute].
func (e *Engine) Info() engine.Info { return e.info }

// Tokenizer implements [engine.Compute].
func (e *Engine) Tokenizer() engine.Tokenizer { return e.tok }

// UsedCells implements [engine.Compute].
func (e *Engine) UsedCells() int { return e.place.used }

// Close implements [engine.Compute]. Idempotent.
func (e *Engine) Close() error {
	if e.closed {
		return nil
	}
	e.closed = true
	var errs []error
	if e.tok != nil {
		e.tok.close()
	}
	if e.cells.token != nil {
		errs = append(errs, llama.BatchFree(e.batch))
		e.cells = batchCells{}
	}
	if e.ctx != 0 {
		errs = append(errs, llama.Free(e.ctx))
		e.ctx = 0
	}
	if e.model != 0 {
		errs = append(errs, llama.ModelFree(e.model))
		e.model = 0
	}
	if e.intr != nil {
		errs = append(errs, e.intr.free())
		e.intr = nil
	}
	return errors.Join(errs...)
}
