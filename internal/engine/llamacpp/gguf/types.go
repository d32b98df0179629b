package gguf

import "math/bits"

// block is the storage of one ggml type: bytes for each block of elements.
type block struct{ elems, bytes uint64 }

// blocks holds the tensor types of llama.cpp v0.5.0 by their number. Missing
// numbers were removed from the format.
var blocks = map[uint32]block{
	0: {1, 4}, 1: {1, 2}, // F32 F16
	2: {32, 18}, 3: {32, 20}, 6: {32, 22}, 7: {32, 24}, 8: {32, 34}, 9: {32, 36}, // Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q8_1
	10: {256, 84}, 11: {256, 110}, 12: {256, 144}, 13: {256, 176}, 14: {256, 210}, 15: {256, 292}, // Q2_K ... Q8_K
	16: {256, 66}, 17: {256, 74}, 18: {256, 98}, 19: {256, 50}, 20: {32, 18}, // IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL
	21: {256, 110}, 22: {256, 82}, 23: {256, 136}, // IQ3_S IQ2_S IQ4_XS
	24: {1, 1}, 25: {1, 2}, 26: {1, 4}, 27: {1, 8}, 28: {1, 8}, // I8 I16 I32 I64 F64
	29: {256, 56}, 30: {1, 2}, 34: {256, 54}, 35: {256, 66}, // IQ1_M BF16 TQ1_0 TQ2_0
	39: {32, 17}, 40: {64, 36}, 41: {128, 18}, 42: {64, 18}, // MXFP4 NVFP4 Q1_0 Q2_0
}

// TypeBlock tells the elements and bytes of one block of a ggml type.
func TypeBlock(ggmlType uint32) (elems, bytes uint64, ok bool) {
	b, ok := blocks[ggmlType]
	return b.elems, b.bytes, ok
}

// tensorBytes is the storage of a tensor. False: unknown type, an empty or
// overflowing shape, or rows that are no whole number of blocks.
func tensorBytes(ggmlType uint32, dims []uint64) (uint64, bool) {
	b, ok := blocks[ggmlType]
	if !ok || len(dims) == 0 || dims[0]%b.elems != 0 {
		return 0, false
	}
	n := uint64(1)
	for _, d := range dims {
		hi, lo := bits.Mul64(n, d)
		if d == 0 || hi != 0 || lo > 1<<62 {
			return 0, false
		}
		n = lo
	}
	hi, lo := bits.Mul64(n/b.elems, b.bytes)
	return lo, hi == 0 && lo <= 1<<62
}
