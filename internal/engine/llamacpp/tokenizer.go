package llamacpp

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"unicode/utf8"
	"unsafe"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/hybridgroup/yzma/pkg/llama"
)

var (
	// ErrText: the text holds a NUL byte or is not UTF-8.
	ErrText = errors.New("llamacpp: text is not valid")
	// ErrTextTooLong: so long that it cannot fit the context whatever its tokens are.
	ErrTextTooLong = errors.New("llamacpp: text is longer than any prompt that fits the context")
	// ErrClosed: the engine was closed.
	ErrClosed = errors.New("llamacpp: engine closed")
)

// tokenizer is the vocabulary. Everything but Tokenize answers from tables made at
// Open; Tokenize calls the library, which does not change the vocabulary.
type tokenizer struct {
	lib   *library
	vocab llama.Vocab

	bos, eos llama.Token
	addBOS   bool // the model wants BOS in front
	maxText  int  // bytes
	special  []string

	pieces []byte   // all pieces after one another
	start  []uint32 // piece t is pieces[start[t]:start[t+1]]
	eog    []bool

	// mu orders Tokenize against close: a tokenizing goroutine holds it shared.
	mu     sync.RWMutex
	closed bool
}

// newTokenizer reads the whole vocabulary. contextLen bounds sensible texts.
func newTokenizer(lib *library, vocab llama.Vocab, contextLen int) *tokenizer {
	n := int(llama.VocabNTokens(vocab))
	t := &tokenizer{lib: lib, vocab: vocab, bos: llama.VocabBOS(vocab), eos: llama.VocabEOS(vocab),
		addBOS: llama.VocabGetAddBOS(vocab), start: make([]uint32, 1, n+1), eog: make([]bool, n)}
	longest := 1
	buf := make([]byte, 256)
	for i := range n {
		id := llama.Token(i)
		size := llama.TokenToPiece(vocab, id, buf, 0, false)
		if size < 0 {
			buf = make([]byte, -size)
			size = llama.TokenToPiece(vocab, id, buf, 0, false)
		}
		t.pieces = append(t.pieces, buf[:max(size, 0)]...)
		t.start = append(t.start, uint32(len(t.pieces)))
		t.eog[i] = llama.VocabIsEOG(vocab, id)
		text := llama.VocabGetText(vocab, id)
		longest = max(longest, len(text), int(size))
		if isMarker(llama.VocabGetAttr(vocab, id), text) {
			t.special = append(t.special, text)
		}
	}
	t.maxText = (contextLen + 1) * longest
	return t
}

// isMarker tells whether a vocabulary entry can act as a control sign when it appears
// in text. Entries of the class "user defined" are mostly ordinary text (runs of
// blanks, HTML tags); they count only in the form of a chat marker.
func isMarker(attr llama.TokenAttr, text string) bool {
	if text == "" {
		return false
	}
	if attr&(llama.TokenAttrControl|llama.TokenAttrUnknown) != 0 {
		return true
	}
	return attr&llama.TokenAttrUserDef != 0 && (strings.HasPrefix(text, "<|") || strings.HasPrefix(text, "[") && strings.HasSuffix(text, "]"))
}

// Tokenize implements [engine.Tokenizer].
func (t *tokenizer) Tokenize(text string, addBOS, special bool) ([]engine.Token, error) {
	if i := strings.IndexByte(text, 0); i >= 0 {
		return nil, fmt.Errorf("%w: NUL at byte %d", ErrText, i)
	}
	if !utf8.ValidString(text) {
		return nil, fmt.Errorf("%w: invalid UTF-8", ErrText)
	}
	if len(text) > t.maxText {
		return nil, fmt.Errorf("%w: %d bytes, at most %d", ErrTextTooLong, len(text), t.maxText)
	}
	out := make([]engine.Token, 0, len(text)/3+2)
	if addBOS && t.addBOS && t.bos >= 0 {
		out = append(out, engine.Token(t.bos))
	}
	if text == "" {
		return out, nil
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.closed {
		return nil, ErrClosed
	}
	raw := []byte(text)
	// Estimate first; the library answers minus the number needed if it is too small.
	for have := len(text)/2 + 16; ; {
		out = append(out, make([]engine.Token, have)...)
		room := out[len(out)-have:]
		n := int(t.lib.tokenize(uintptr(t.vocab), unsafe.SliceData(raw), int32(len(raw)),
			(*int32)(unsafe.SliceData(room)), int32(have), false, special))
		out = out[:len(out)-have]
		switch {
		case n >= 0:
			return out[:len(out)+n], nil
		case -n <= have || -n > 4*len(text)+64:
			return nil, fmt.Errorf("llamacpp: tokenize %d bytes: the library answered %d", len(text), n)
		}
		have = -n
	}
}

// Piece implements [engine.Tokenizer]. The caller must not change the bytes.
func (t *tokenizer) Piece(id engine.Token) []byte {
	if id < 0 || int(id) >= len(t.eog) {
		return nil
	}
	from, to := t.start[id], t.start[id+1]
	return t.pieces[from:to:to]
}

// IsEOG implements [engine.Tokenizer].
func (t *tokenizer) IsEOG(id engine.Token) bool {
	return id >= 0 && int(id) < len(t.eog) && t.eog[id]
}

// SpecialTexts implements [engine.Tokenizer]. The slice is the caller's.
func (t *tokenizer) SpecialTexts() []string { return append([]string(nil), t.special...) }

// close waits for running calls; later ones get ErrClosed.
func (t *tokenizer) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
}
