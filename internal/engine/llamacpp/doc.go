// Package llamacpp runs any GGUF model with plain attention on llama.cpp, called
// through its shared library (no cgo).
//
// # Chunks
//
// A prompt is computed in chunks ([Engine.Prefill]). [Engine.Export] gives the KV of
// a chunk as one block of bytes and [Engine.Import] appends such a block to a sequence
// of another context. The bytes are llama.cpp's own sequence state, which carries no
// version and is believed blindly by the library: a wrong position changes answers
// silently, a wrong count hangs it. Every byte of such a block that is not a K or V
// row is a function of the model, the number of tokens and the first position, so
// Import compares all of them before the library sees the block (blob.go).
//
// Sequence 0 of the library is the scratch sequence through which chunks travel; the
// scheduler's sequence s is s+1 there. So a block does not depend on how many
// sequences its maker had.
//
// # Bookkeeping
//
// The library cannot tell how many cells are in use, and removes or accepts positions
// without complaint. The books (books.go) know the length of each sequence and which
// cells are shared; every method checks its positions against them first, and they
// are exact because nothing else touches the context.
//
// # Interruption
//
// llama.cpp asks an abort callback between the nodes of a graph. The callback is C's
// strlen and its argument a page of memory of our own: the empty string means go on. No
// call from C into Go is needed in the middle of a computation, which would cost about
// a thousand crossings a token. A cancelled context writes one byte.
//
// # Concurrency
//
// One goroutine owns an [Engine]. Its [Tokenizer] may be used by any number of goroutines,
// also after Close (it then gives errors). The library itself is loaded once a process.
package llamacpp
