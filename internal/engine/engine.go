// Package engine is what Baton asks of a model runtime. Two implementations:
// llamacpp (any GGUF, on the CPU or whatever its shared library drives) and sim
// (deterministic, with real KV bytes, for tests and scale).
//
// An engine context is owned by one goroutine: every method of [Compute] must
// be called from it (the scheduler's loop). [Tokenizer] and Info may be used
// from any goroutine at any time.
package engine

import (
	"context"
	"errors"

	"github.com/baton-pd/baton/internal/kv"
)

// Token is a vocabulary index.
type Token int32

// Seq is a sequence slot of one engine context, 0 <= Seq < Info.MaxSeqs.
type Seq int32

// Info describes a loaded model and context. It is constant after Open.
type Info struct {
	// Fingerprint fields. Two workers may exchange KV only if all are equal.
	Engine      string // "llamacpp v0.5.0 (ggml ...)" or "sim 1": kind and build
	ModelDigest string // hex digest that identifies the weights
	KVLayout    string // e.g. "layers=30 k=f16x192 v=f16x192 vtrans=0"
	Attention   string // e.g. "flash=1 unified=1"
	ChunkTokens int    // prompt tokens a chunk; the last chunk of a prompt may be shorter
	// Shards is zero where an exported chunk is an opaque block that only an equal worker can read. Otherwise
	// a chunk is the pages of all ranks (kv.Shards.ChunkBytes tells their number and order), each part of
	// Export and Import is one page, and a worker with other ranks or pages can read it once it is laid anew.
	Shards kv.Shards

	ModelName  string // as shown in /v1/models
	ModelPath  string
	VocabSize  int
	ContextLen int // tokens one sequence may hold (prompt + answer)
	// StepTokens: a Prefill of at most so many tokens gives the bits of as many steps, which longer ones need not.
	// 0: a Prefill of any length does.
	StepTokens   int
	KVCells      int // tokens all sequences together may hold
	MaxSeqs      int // sequence slots usable by the scheduler
	Threads      int
	ChatTemplate string // Jinja source from the model file; "" if it has none
	BOS, EOS     Token  // -1 if none
}

// Tokenizer turns text into tokens and back. Safe for concurrent use.
type Tokenizer interface {
	// Tokenize converts text. special: text of special tokens ("<|im_end|>") becomes
	// those tokens; only for trusted text (chat templates). addBOS: put BOS in
	// front if the model wants it. A NUL byte or invalid UTF-8 is an error.
	Tokenize(text string, addBOS, special bool) ([]Token, error)
	// Piece is the bytes of one token; may be part of a UTF-8 character. Special
	// (control) tokens give no bytes.
	Piece(t Token) []byte
	// IsEOG reports whether t ends the generation (EOS, EOT, ...).
	IsEOG(t Token) bool
	// SpecialTexts lists the texts that Tokenize(special=true) would turn into
	// control tokens, so that they can be neutralised in user text.
	SpecialTexts() []string
}

// Sampling is how the next token is chosen. The zero value is greedy.
type Sampling struct {
	Temperature       float32 // <= 0: greedy
	TopP              float32 // 0 or 1: off
	TopK              int     // <= 0: off
	MinP              float32 // 0: off
	Seed              uint32  // used when Temperature > 0
	RepetitionPenalty float32 // 0 or 1: off
	FrequencyPenalty  float32
	PresencePenalty   float32
	LogitBias         map[Token]float32
	IgnoreEOS         bool // EOG tokens are never chosen
}

// Sampler is the state of one running choice (random state, penalty window).
// It belongs to the goroutine that owns the context. Close frees it.
type Sampler interface {
	// Accept records a token that was not sampled here: what is sampled next is as if it had been. An answer that goes
	// on in another engine replays the tokens it has.
	Accept(t Token)
	Close()
}

// Row asks for one more token of one sequence.
type Row struct {
	Seq     Seq
	Token   Token // the last token, whose KV is computed by this step
	Pos     int   // its position
	Sampler Sampler
	// Logprobs: 0 none; k > 0: the chosen token's logprob and the k-1 most likely.
	Logprobs int
}

// Sampled is a Row's answer.
type Sampled struct {
	Token   Token
	Logprob float32        // natural log, of the raw distribution (before temperature and filters)
	Top     []TokenLogprob // k-1 entries, most likely first
}

// TokenLogprob is one alternative.
type TokenLogprob struct {
	Token   Token
	Logprob float32
}

// Compute is an engine context. One goroutine owns it. A cancelled ctx
// interrupts a running computation within 50 ms; the method then returns an
// error for which errors.Is(err, ErrInterrupted) and the KV of the sequences is as
// before the call (positions of the interrupted batch removed).
type Compute interface {
	Info() Info
	Tokenizer() Tokenizer

	// Prefill computes the KV of tokens at positions pos.. of seq, as one batch
	// without output. len(tokens) <= Info.ChunkTokens.
	Prefill(ctx context.Context, seq Seq, tokens []Token, pos int) error

	// ChunkBytes is the exact size of the exported KV of n tokens.
	ChunkBytes(n int) int
	// Export copies the KV of positions [p0,p1) of seq into dst, whose parts'
	// lengths add up to ChunkBytes(p1-p0).
	Export(seq Seq, p0, p1 int, dst [][]byte) error
	// Import verifies a chunk made by Export (length, cell count, positions)
	// and appends it to seq. A chunk that does not verify is refused with
	// ErrBadChunk and seq is unchanged.
	Import(seq Seq, p0, p1 int, src [][]byte) error

	// Step computes one batch with one token for each row and samples. rows have
	// distinct Seqs. The result is in the order of rows.
	Step(ctx context.Context, rows []Row) ([]Sampled, error)
	NewSampler(s Sampling) (Sampler, error)

	// CopySeq makes dst share (or copy) all cells of src. dst must be empty.
	CopySeq(src, dst Seq) error
	// FreeSeq drops everything seq holds. Idempotent.
	FreeSeq(seq Seq)
	// SwapOut copies the whole KV of seq to host memory; SwapIn brings it back to an
	// empty seq. For preemption; bytes are exact.
	SwapOut(seq Seq) ([]byte, error)
	SwapIn(seq Seq, saved []byte) error
	// UsedCells is the number of occupied KV cells, for the idle baseline.
	UsedCells() int

	// Close frees the context and the model. No method may be running.
	Close() error
}

// LayerCompute is a [Compute] whose KV of a chunk can be exported in groups of layers, each as soon as it
// is computed, so that it travels while the later ones are computed.
type LayerCompute interface {
	Compute
	// LayerGroups is in how many groups a chunk comes; constant, 1: only whole.
	LayerGroups() int
	// PrefillLayers is Prefill that calls computed(g) on the calling goroutine as soon as the KV of
	// group g is final: g = 0, 1, ... LayerGroups-1, each once. Of this engine's methods only ExportLayers
	// may be called from there. When the call ends with an error, of ctx or of computed, the KV is as before it,
	// and what was exported is worth nothing.
	PrefillLayers(ctx context.Context, seq Seq, tokens []Token, pos int, computed func(g int) error) error
	// ExportLayers is Export for one group: it stores into dst, which is as for Export, only the
	// group's bytes, and says which these are: ranges of dst's parts laid end to end, ascending. The
	// groups share no byte, and together they make what Export makes. A group that is not computed yet is refused.
	ExportLayers(seq Seq, p0, p1, g int, dst [][]byte) ([]kv.Range, error)
}

var (
	// ErrInterrupted: ctx ended during a computation.
	ErrInterrupted = errors.New("engine: computation interrupted")
	// ErrBadChunk: imported bytes failed verification.
	ErrBadChunk = errors.New("engine: KV chunk does not verify")
	// ErrNoCells: the KV memory is full; free or swap out a sequence.
	ErrNoCells = errors.New("engine: no free KV cells")
)
