package llamacpp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// Block format of a sequence state, little endian, as llama.cpp v0.5.0 writes it:
//
//	u32 magic, u32 sequence, u32 streams (1), u32 cells
//	cells times: i32 position, u32 sequences (1), i32 sequence
//	u32 v_trans (0), u32 layers
//	layers times: i32 type, u64 bytes a row, cells rows of K
//	layers times: i32 type, u64 bytes a row, cells rows of V (absent if the model has none)
const (
	blobHead  = 16 // bytes before the cells
	cellBytes = 12
	rowsHead  = 12 // type and row size before each layer's rows
)

// rows describes K or V of one layer.
type rows struct {
	typ   int32  // ggml type
	bytes uint64 // a row: one token
}

// layout is what all blocks of one context have in common. It is read from a probe
// when the context is made.
type layout struct {
	magic uint32
	seq   uint32 // the scratch sequence
	k, v  []rows // by layer; v empty if the model keeps no V
	token int    // bytes of all rows of one token
}

var errLayout = errors.New("llamacpp: the library writes KV blocks of an unknown layout")

// parseLayout learns the layout from a block of n cells whose content is trusted.
func parseLayout(b []byte, n int) (*layout, error) {
	if len(b) < blobHead+n*cellBytes+8 {
		return nil, fmt.Errorf("%w: %d bytes for %d cells", errLayout, len(b), n)
	}
	le := binary.LittleEndian
	l := &layout{magic: le.Uint32(b), seq: le.Uint32(b[4:])}
	if le.Uint32(b[8:]) != 1 || le.Uint32(b[12:]) != uint32(n) {
		return nil, fmt.Errorf("%w: %d streams, %d cells", errLayout, le.Uint32(b[8:]), le.Uint32(b[12:]))
	}
	b = b[blobHead+n*cellBytes:]
	trans, layers := le.Uint32(b), int(le.Uint32(b[4:]))
	if trans != 0 || layers == 0 || layers > 1<<16 {
		return nil, fmt.Errorf("%w: v_trans %d, %d layers", errLayout, trans, layers)
	}
	b = b[8:]
	for range layers {
		var err error
		if b, err = l.parseRows(&l.k, b, n); err != nil {
			return nil, err
		}
	}
	for len(b) > 0 && len(l.v) < layers {
		var err error
		if b, err = l.parseRows(&l.v, b, n); err != nil {
			return nil, err
		}
	}
	if len(b) != 0 || len(l.v) != 0 && len(l.v) != layers {
		return nil, fmt.Errorf("%w: %d bytes left after %d K and %d V layers", errLayout, len(b), len(l.k), len(l.v))
	}
	return l, nil
}

func (l *layout) parseRows(to *[]rows, b []byte, n int) ([]byte, error) {
	if len(b) < rowsHead {
		return nil, fmt.Errorf("%w: ends in a layer", errLayout)
	}
	r := rows{typ: int32(binary.LittleEndian.Uint32(b)), bytes: binary.LittleEndian.Uint64(b[4:])}
	b = b[rowsHead:]
	if r.bytes > uint64(len(b)/n) {
		return nil, fmt.Errorf("%w: rows of %d bytes", errLayout, r.bytes)
	}
	*to = append(*to, r)
	l.token += int(r.bytes)
	return b[n*int(r.bytes):], nil
}

// size is the exact length of a block of n cells.
func (l *layout) size(n int) int {
	return blobHead + n*cellBytes + 8 + (len(l.k)+len(l.v))*rowsHead + n*l.token
}

// verify tells whether b is a block of exactly the positions p0..p0+n-1 in order.
// Every byte outside the rows is compared.
func (l *layout) verify(b []byte, p0, n int) error {
	if len(b) != l.size(n) {
		return fmt.Errorf("%d bytes, not the %d of %d tokens", len(b), l.size(n), n)
	}
	if err := l.verifyHead(b, n); err != nil {
		return err
	}
	le := binary.LittleEndian
	for i := range n {
		c := b[blobHead+i*cellBytes:]
		if pos := le.Uint32(c); pos != uint32(p0+i) {
			return fmt.Errorf("cell %d has position %d, not %d", i, int32(pos), p0+i)
		}
		if le.Uint32(c[4:]) != 1 || le.Uint32(c[8:]) != l.seq {
			return fmt.Errorf("cell %d has %d sequences, the first %d", i, le.Uint32(c[4:]), int32(le.Uint32(c[8:])))
		}
	}
	b = b[blobHead+n*cellBytes:]
	if le.Uint32(b) != 0 || le.Uint32(b[4:]) != uint32(len(l.k)) {
		return fmt.Errorf("v_trans %d and %d layers, not 0 and %d", le.Uint32(b), le.Uint32(b[4:]), len(l.k))
	}
	b = b[8:]
	for i, part := range [][]rows{l.k, l.v} {
		for il, r := range part {
			typ, size := int32(le.Uint32(b)), le.Uint64(b[4:])
			if typ != r.typ || size != r.bytes {
				return fmt.Errorf("layer %d %c: type %d with rows of %d bytes, not %d with %d", il, "KV"[i], typ, size, r.typ, r.bytes)
			}
			b = b[rowsHead+n*int(r.bytes):]
		}
	}
	return nil
}

func (l *layout) verifyHead(b []byte, n int) error {
	le := binary.LittleEndian
	switch {
	case le.Uint32(b) != l.magic:
		return fmt.Errorf("magic %08x, not %08x", le.Uint32(b), l.magic)
	case le.Uint32(b[4:]) != l.seq:
		return fmt.Errorf("sequence %d, not %d", le.Uint32(b[4:]), l.seq)
	case le.Uint32(b[8:]) != 1:
		return fmt.Errorf("%d streams, not 1", le.Uint32(b[8:]))
	case le.Uint32(b[12:]) != uint32(n):
		return fmt.Errorf("%d cells, not %d", le.Uint32(b[12:]), n)
	}
	return nil
}

// ggml types that KV is kept in.
const (
	typeF32  = 0
	typeF16  = 1
	typeQ8_0 = 8 // blocks of an f16 scale and 32 bytes
	typeBF16 = 30
)

// finite tells whether the rows of a verified block are all numbers. A single NaN would
// not only spoil its own sequence: it would stay in the cells after they were freed.
func (l *layout) finite(b []byte, n int) error {
	b = b[blobHead+n*cellBytes+8:]
	for i, part := range [][]rows{l.k, l.v} {
		for il, r := range part {
			if !finiteRows(r.typ, b[rowsHead:rowsHead+n*int(r.bytes)]) {
				return fmt.Errorf("layer %d %c holds a value that is not a number", il, "KV"[i])
			}
			b = b[rowsHead+n*int(r.bytes):]
		}
	}
	return nil
}

func finiteRows(typ int32, b []byte) bool {
	switch typ {
	case typeF16:
		return finiteLanes(b, 0x7c00_7c00_7c00_7c00, 0x0001_0001_0001_0001, 15)
	case typeBF16:
		return finiteLanes(b, 0x7f80_7f80_7f80_7f80, 0x0001_0001_0001_0001, 15)
	case typeF32:
		return finiteLanes(b, 0x7f80_0000_7f80_0000, 0x0000_0001_0000_0001, 31)
	case typeQ8_0:
		for ; len(b) >= 34; b = b[34:] {
			if b[1]&0x7c == 0x7c {
				return false
			}
		}
	}
	return true
}

// finiteLanes looks at eight bytes at a time: exponent is the exponent bits of each lane,
// low the lowest bit of each, top the number of its highest bit. A lane whose exponent bits are all set is infinite or NaN.
func finiteLanes(b []byte, exponent, low uint64, top int) bool {
	var bad uint64
	for ; len(b) >= 8; b = b[8:] {
		x := ^binary.LittleEndian.Uint64(b) & exponent // 0 in a lane that is no number
		bad |= (x - low) &^ x & (low << top)
	}
	if len(b) > 0 {
		var tail [8]byte
		copy(tail[:], b)
		x := ^binary.LittleEndian.Uint64(tail[:]) & exponent
		bad |= (x - low) &^ x & (low << top)
	}
	return bad == 0
}

// writeHead writes everything but the positions and the rows of a block of n cells.
func (l *layout) writeHead(b []byte, n int) {
	le := binary.LittleEndian
	le.PutUint32(b, l.magic)
	le.PutUint32(b[4:], l.seq)
	le.PutUint32(b[8:], 1)
	le.PutUint32(b[12:], uint32(n))
	for i := range n {
		le.PutUint32(b[blobHead+i*cellBytes+4:], 1)
		le.PutUint32(b[blobHead+i*cellBytes+8:], l.seq)
	}
	b = b[blobHead+n*cellBytes:]
	le.PutUint32(b, 0)
	le.PutUint32(b[4:], uint32(len(l.k)))
	b = b[8:]
	for _, part := range [][]rows{l.k, l.v} {
		for _, r := range part {
			le.PutUint32(b, uint32(r.typ))
			le.PutUint64(b[4:], r.bytes)
			b = b[rowsHead+n*int(r.bytes):]
		}
	}
}

// sort puts the cells of a block that the library wrote into the order of their
// positions. The library writes them in the order of their place in memory, which
// differs once freed cells have been filled again. spare is scratch memory, given
// back possibly larger.
func (l *layout) sort(b []byte, n int, spare []byte) []byte {
	le := binary.LittleEndian
	pos := func(i int) uint32 { return le.Uint32(b[blobHead+i*cellBytes:]) }
	sorted := true
	for i := 1; i < n && sorted; i++ {
		sorted = pos(i-1) < pos(i)
	}
	if sorted {
		return spare
	}
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(x, y int) int { return int(pos(x)) - int(pos(y)) })
	permute := func(part []byte, row int) {
		spare = append(spare[:0], part...)
		for to, from := range order {
			copy(part[to*row:(to+1)*row], spare[from*row:])
		}
	}
	permute(b[blobHead:blobHead+n*cellBytes], cellBytes)
	b = b[blobHead+n*cellBytes+8:]
	for _, part := range [][]rows{l.k, l.v} {
		for _, r := range part {
			permute(b[rowsHead:rowsHead+n*int(r.bytes)], int(r.bytes))
			b = b[rowsHead+n*int(r.bytes):]
		}
	}
	return spare
}

// tokens is the number of tokens of a block of size bytes, 0 if there is none.
func (l *layout) tokens(size int) int {
	if per := size - l.size(0); per > 0 && per%(cellBytes+l.token) == 0 {
		return per / (cellBytes + l.token)
	}
	return 0
}
