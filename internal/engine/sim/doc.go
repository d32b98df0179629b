// Package sim is a deterministic engine with real KV bytes. It computes no
// language, but everything around the computation is real: a KV memory of cells
// with one K and one V array a layer, sequences that share cells, chunks that are
// exported and imported byte by byte, limits that are enforced, and time that
// passes (or not) as a cost model says.
//
// # What makes it a judge
//
// The KV bytes of a position follow from the model's seed, the KV bytes of all
// positions before it and the position's token. The next token follows from the
// KV bytes of the whole sequence. Both are read back from the memory: what was
// imported counts as it was imported. So one wrong byte, at any position, layer or
// head, changes every later token, and [Expected], which needs no engine, tells
// what the right ones are.
//
// # Cost of a step
//
// A sequence keeps a running digest of its bytes, folded in when a position is
// computed or imported, so a step costs the same at any length. Config.Recheck
// digests the whole sequence again at every step instead, to catch bytes that
// change under a live sequence.
//
// # Ownership
//
// As package engine says: one goroutine owns an [Engine]. Two calls at the same
// time panic, so a scheduler that breaks the rule is found. The tokenizer and
// Info are free to use.
package sim
