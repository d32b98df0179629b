// Package gguf reads the head of a GGUF model file (metadata and tensor table)
// and checks it against the file, without trusting a byte of it.
//
// The C library aborts the process or reads out of bounds on some damaged files.
// Baton therefore reads the head itself first: every length is bounded by what is
// left of the file, every tensor must lie inside it, and what cannot be right is
// refused with an [Error]. Weights are not read.
package gguf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
)

// Error says why a file is refused.
type Error struct {
	Path   string
	Reason string
	Err    error // cause from the file system, or nil
}

// Error names the file and the reason.
func (e *Error) Error() string {
	msg := fmt.Sprintf("model file %s: %s", e.Path, e.Reason)
	if e.Err != nil {
		msg += ": " + e.Err.Error()
	}
	return msg
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// Bounds on what a file may claim. The largest published models have about 50
// metadata entries, 2,000 tensors and 300,000 vocabulary entries.
const (
	maxKV       = 1 << 16
	maxTensors  = 1 << 20
	maxKey      = 1 << 16 // bytes
	maxString   = 1 << 26 // bytes
	maxArray    = 1 << 24 // elements
	maxName     = 63      // bytes; the library's tensor names hold 64 with the NUL
	maxHead     = 1 << 30 // bytes of metadata and tensor table together
	maxDims     = 4
	maxNesting  = 2
	magic       = 0x46554747 // "GGUF", little endian
	defaultPad  = 32
	minFileSize = 24
)

// Type of a metadata value, as numbered by the format.
type Type uint32

// The value types of the format.
const (
	Uint8 Type = iota
	Int8
	Uint16
	Int16
	Uint32
	Int32
	Float32
	Bool
	String
	Array
	Uint64
	Int64
	Float64
)

// size of a value of fixed size; 0 for strings and arrays.
func (t Type) size() int64 {
	switch t {
	case Uint8, Int8, Bool:
		return 1
	case Uint16, Int16:
		return 2
	case Uint32, Int32, Float32:
		return 4
	case Uint64, Int64, Float64:
		return 8
	}
	return 0
}

// Value is one metadata entry.
type Value struct {
	Type Type
	Elem Type   // of an array
	Len  int    // of an array
	num  uint64 // bits of a number or bool
	str  string
	// Twice is an element that is there twice; only of the array VocabKey, "" if there is none.
	Twice string
	// Bytes are those that have a text of their own: "<0x0A>", or the byte itself; only of the array VocabKey.
	Bytes *[256]bool
	// Sixes are the places of the value 6, which says that a token is a byte; only of the array TypesKey.
	Sixes []int
	// Short are the places of texts of less than three bytes; only of the array VocabKey.
	Short map[int]bool
}

// VocabKey is the array of the vocabulary's texts, each of which must be there once; TypesKey that of what they are.
const (
	VocabKey = "tokenizer.ggml.tokens"
	TypesKey = "tokenizer.ggml.token_type"
)

// Tensor is one entry of the tensor table.
type Tensor struct {
	Name   string
	Dims   []uint64
	Type   uint32 // ggml type
	Offset uint64 // from the start of the data section
	Bytes  uint64
}

// Head is the verified head of a file.
type Head struct {
	Version   uint32
	KV        map[string]Value
	Tensors   []Tensor
	DataStart int64 // offset of the data section in the file
	FileSize  int64
}

// Open reads and verifies the head of the file at path.
func Open(path string) (*Head, error) {
	st, err := os.Stat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, &Error{path, "does not exist", err}
	case err != nil:
		return nil, &Error{path, "cannot be examined", err}
	case st.IsDir():
		return nil, &Error{path, "is a directory", nil}
	case !st.Mode().IsRegular():
		return nil, &Error{path, "is not a regular file", nil}
	case st.Size() == 0:
		return nil, &Error{path, "is empty", nil}
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, &Error{path, "cannot be opened", err}
	}
	defer f.Close()
	h, err := Read(f, st.Size())
	if err != nil {
		var ge *Error
		if errors.As(err, &ge) {
			ge.Path = path
		}
		return nil, err
	}
	return h, nil
}

// Read verifies the head of a file of the given size.
func Read(r io.ReaderAt, size int64) (*Head, error) {
	d := &decoder{r: r, left: size}
	h := &Head{FileSize: size}
	d.head(h)
	if d.err != nil {
		return nil, d.err
	}
	return h, nil
}

// Str gives the string under key, or "".
func (h *Head) Str(key string) string {
	if v := h.KV[key]; v.Type == String {
		return v.str
	}
	return ""
}

// Uint gives the non-negative whole number under key.
func (h *Head) Uint(key string) (uint64, bool) {
	v, ok := h.KV[key]
	if !ok {
		return 0, false
	}
	switch v.Type {
	case Uint8, Uint16, Uint32, Uint64:
		return v.num, true
	case Int8, Int16, Int32, Int64:
		return v.num, int64(v.num) >= 0
	}
	return 0, false
}

// Bool gives the truth value under key.
func (h *Head) Bool(key string) (value, ok bool) {
	v, ok := h.KV[key]
	return v.num == 1, ok && v.Type == Bool
}

// decoder reads forwards with one sticky error.
type decoder struct {
	r    io.ReaderAt
	off  int64 // of the next byte that is not in buf
	left int64 // bytes of the file after off
	buf  []byte
	pos  int
	err  *Error
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = &Error{Reason: fmt.Sprintf(format, args...)}
	}
}

// take gives the next n bytes, valid until the next call; nil after a failure.
func (d *decoder) take(n int64) []byte {
	if d.err != nil {
		return nil
	}
	have := int64(len(d.buf) - d.pos)
	if n > have+d.left {
		d.fail("is truncated: the head wants %d bytes more than the file has", n-have-d.left)
		return nil
	}
	if n > have {
		d.fill(n)
		if d.err != nil {
			return nil
		}
	}
	b := d.buf[d.pos : d.pos+int(n)]
	d.pos += int(n)
	return b
}

// fill reads on until at least n bytes are buffered; n fits into the file.
func (d *decoder) fill(n int64) {
	const block = 256 << 10
	rest := len(d.buf) - d.pos
	want := min(max(n, block), int64(rest)+d.left)
	next := make([]byte, want)
	copy(next, d.buf[d.pos:])
	m, err := d.r.ReadAt(next[rest:], d.off)
	if m < int(want)-rest {
		d.fail("cannot be read")
		d.err.Err = err
		return
	}
	d.buf, d.pos = next, 0
	d.off += int64(m)
	d.left -= int64(m)
	if d.off > maxHead+block {
		d.fail("has a head of more than %d bytes", maxHead)
	}
}

// at is the file offset of the next byte.
func (d *decoder) at() int64 { return d.off - int64(len(d.buf)-d.pos) }

func (d *decoder) u32() uint32 {
	if b := d.take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (d *decoder) u64() uint64 {
	if b := d.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

func (d *decoder) str(limit uint64, what string) string {
	n := d.u64()
	if n > limit {
		d.fail("is corrupt: a %s of %d bytes", what, n)
		return ""
	}
	return string(d.take(int64(n)))
}

func (d *decoder) head(h *Head) {
	if h.FileSize < minFileSize {
		d.fail("is too short for a GGUF file (%d bytes)", h.FileSize)
		return
	}
	if m := d.u32(); m != magic {
		d.fail("is not a GGUF file: it starts with bytes %08x", fileOrder(m))
		return
	}
	h.Version = d.u32()
	if h.Version&0xffff == 0 {
		d.fail("is a GGUF file of the other byte order")
		return
	}
	if h.Version < 2 || h.Version > 3 {
		d.fail("is of GGUF version %d; 2 and 3 are known", h.Version)
		return
	}
	tensors, kvs := d.u64(), d.u64()
	if tensors > maxTensors || kvs > maxKV {
		d.fail("is corrupt: %d tensors and %d metadata entries", tensors, kvs)
		return
	}
	h.KV = make(map[string]Value)
	for range kvs {
		d.kv(h)
		if d.err != nil {
			return
		}
	}
	d.tensors(h, tensors)
}

// fileOrder shows a magic number in file order.
func fileOrder(m uint32) uint32 {
	return binary.BigEndian.Uint32(binary.LittleEndian.AppendUint32(nil, m))
}

func (d *decoder) kv(h *Head) {
	key := d.str(maxKey, "metadata key")
	t := Type(d.u32())
	if d.err != nil {
		return
	}
	if _, twice := h.KV[key]; twice || key == "" {
		d.fail("is corrupt: metadata key %.64q is empty or there twice", key)
		return
	}
	v := Value{Type: t}
	switch t {
	case String:
		v.str = d.str(maxString, "metadata string")
	case Array:
		d.array(key, 0, &v)
	default:
		v.num = d.number(key, t)
	}
	h.KV[key] = v
}

// number reads a value of fixed size; signed ones are extended to 64 bits.
func (d *decoder) number(key string, t Type) uint64 {
	if t.size() == 0 {
		d.fail("is corrupt: metadata key %.64q has unknown type %d", key, t)
		return 0
	}
	b := d.take(t.size())
	if b == nil {
		return 0
	}
	var wide [8]byte
	copy(wide[:], b)
	n := binary.LittleEndian.Uint64(wide[:])
	switch t {
	case Int8:
		return uint64(int64(int8(n)))
	case Int16:
		return uint64(int64(int16(n)))
	case Int32:
		return uint64(int64(int32(n)))
	case Bool:
		if n > 1 {
			d.fail("is corrupt: metadata key %.64q is neither true nor false", key)
		}
	}
	return n
}

// array skips an array, checking that all of it is there, and notes in v what [Value] keeps of one.
func (d *decoder) array(key string, depth int, v *Value) {
	elem, n := Type(d.u32()), d.u64()
	if d.err != nil {
		return
	}
	if n > maxArray || depth >= maxNesting {
		d.fail("is corrupt: metadata array %.64q of %d elements, nesting %d", key, n, depth)
		return
	}
	v.Elem, v.Len = elem, int(n)
	switch {
	case elem == String && key == VocabKey && depth == 0:
		d.vocab(n, v)
	case elem == String:
		for range n {
			if d.text(); d.err != nil {
				return
			}
		}
	case elem == Array:
		for range n {
			if d.array(key, depth+1, &Value{}); d.err != nil {
				return
			}
		}
	case elem.size() > 0:
		b := d.take(int64(n) * elem.size())
		for i := 0; key == TypesKey && elem == Int32 && i+4 <= len(b); i += 4 {
			if binary.LittleEndian.Uint32(b[i:]) == 6 {
				v.Sixes = append(v.Sixes, i/4)
			}
		}
	default:
		d.fail("is corrupt: metadata array %.64q has unknown element type %d", key, elem)
	}
}

// text gives the next string, valid until the next call.
func (d *decoder) text() []byte { return d.take(int64(min(d.u64(), math.MaxInt64/2))) }

// vocab reads the texts of the vocabulary. As the library does, it takes a text to end at a NUL byte, and empty ones for different.
func (d *decoder) vocab(n uint64, v *Value) {
	seen := map[string]bool{}
	v.Bytes, v.Short = new([256]bool), map[int]bool{}
	for i := range int(n) {
		b, _, _ := bytes.Cut(d.text(), []byte{0})
		if d.err != nil {
			return
		}
		if len(b) < 3 {
			v.Short[i] = true
		}
		if len(b) == 0 {
			continue
		}
		if seen[string(b)] && v.Twice == "" {
			v.Twice = string(b)
		}
		seen[string(b)] = true
	}
	for c := range v.Bytes {
		v.Bytes[c] = seen[fmt.Sprintf("<0x%02X>", c)] || seen[string([]byte{byte(c)})]
	}
}

func (d *decoder) tensors(h *Head, n uint64) {
	align := uint64(defaultPad)
	if v, ok := h.KV["general.alignment"]; ok {
		if v.Type != Uint32 || v.num == 0 || v.num&(v.num-1) != 0 || v.num > 1<<20 {
			d.fail("is corrupt: general.alignment is not a power of two")
			return
		}
		align = v.num
	}
	names := make(map[string]bool)
	for range n {
		t := d.tensor()
		if d.err != nil {
			return
		}
		if names[t.Name] || t.Offset%align != 0 {
			d.fail("is corrupt: tensor %.64q is there twice or not aligned", t.Name)
			return
		}
		names[t.Name] = true
		h.Tensors = append(h.Tensors, t)
	}
	h.DataStart = d.at() + (int64(align)-d.at()%int64(align))%int64(align)
	d.place(h)
}

func (d *decoder) tensor() Tensor {
	t := Tensor{Name: d.str(maxName, "tensor name")}
	dims := d.u32()
	if d.err == nil && (dims == 0 || dims > maxDims) {
		d.fail("is corrupt: tensor %.64q has %d dimensions", t.Name, dims)
	}
	if d.err != nil {
		return t
	}
	for range dims {
		t.Dims = append(t.Dims, d.u64())
	}
	t.Type, t.Offset = d.u32(), d.u64()
	if d.err != nil {
		return t
	}
	n, ok := tensorBytes(t.Type, t.Dims)
	if !ok {
		d.fail("is corrupt or newer than this library: tensor %.64q has type %d and shape %v", t.Name, t.Type, t.Dims)
	}
	t.Bytes = n
	return t
}

// place checks that every tensor lies in the file and that none overlap.
func (d *decoder) place(h *Head) {
	order := slices.Clone(h.Tensors)
	slices.SortFunc(order, func(a, b Tensor) int {
		switch {
		case a.Offset < b.Offset:
			return -1
		case a.Offset > b.Offset:
			return 1
		}
		return 0
	})
	room := h.FileSize - h.DataStart
	var end uint64
	for _, t := range order {
		if t.Offset < end {
			d.fail("is corrupt: tensor %.64q overlaps another", t.Name)
			return
		}
		end = t.Offset + t.Bytes
		if end < t.Offset || room < 0 || end > uint64(room) {
			d.fail("is truncated: tensor %.64q ends at byte %d of the data, the file has %d", t.Name, end, max(room, 0))
			return
		}
	}
}
