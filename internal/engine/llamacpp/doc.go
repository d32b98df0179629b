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
// Sequence 0 of the library is the scratch sequence through which chunks travel, so a
// block does not depend on how many sequences its maker had.
//
// # Placement and equal bits
//
// Floating-point sums depend on their order, and llama.cpp's on where tokens lie in the
// cache: left to itself, a prompt computed beside another one gets other bits and, where
// two tokens are nearly equal, another answer (about one token in 200 on the default
// model). The engine therefore chooses the cells itself (place.go). What holds then, with
// the same model, chunk size and library on the same kind of processor:
//
//   - Prefill of a prompt gives the same bytes whatever else is in the context, with any
//     one number of threads.
//   - With one thread, Step gives the same logits whatever the other rows and sequences
//     are, up to 63 rows, on weights like the default model's (Q4_1; its kernels treat each
//     row alone, those of f32 and f16 do not). With more threads a single row is split over
//     them by the extent of the cache, and bits depend on other sequences again.
//   - Prefill of at most 32 tokens gives the bits of as many steps, on the same conditions; longer ones do not. So an
//     answer can go on in another context as if it had never left the first.
//   - All hold while sequences find free blocks above those they have, which a cache
//     that is nearly full cannot promise. The answers stay correct then, their last bits may differ.
//
// The library cannot tell how many cells are in use, and removes or accepts positions
// without complaint. The placer knows the length of each sequence and which cells are
// shared; every method checks its positions against it first, and it is exact because
// nothing else touches the context.
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
// One goroutine owns an [Engine]. Its tokenizer may be used by any number of goroutines,
// also after Close (it then gives errors). The library itself is loaded once a process.
package llamacpp
