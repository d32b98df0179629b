package sglang

import (
	"encoding/binary"
	"fmt"
)

// number is what the packed arrays hold: Q, I and i of Python's struct, little-endian.
type number interface{ ~uint64 | ~uint32 | ~int32 }

func width[T number]() int {
	var v T
	return binary.Size(v)
}

// pack joins the numbers without any header.
func pack[T number](list []T) []byte {
	if len(list) == 0 {
		return []byte{}
	}
	b := make([]byte, 0, len(list)*width[T]())
	for _, v := range list {
		b, _ = binary.Append(b, binary.LittleEndian, v) // fixed size: no error
	}
	return b
}

// unpack is the inverse of pack; the size must fit.
func unpack[T number](b []byte) ([]T, error) {
	w := width[T]()
	if len(b)%w != 0 {
		return nil, fmt.Errorf("array of %d bytes, not a multiple of %d", len(b), w)
	}
	out := make([]T, len(b)/w)
	if _, err := binary.Decode(b, binary.LittleEndian, out); err != nil {
		return nil, err
	}
	return out, nil
}

// packLists: no lists are an empty frame, otherwise u32 n, n u32 byte lengths, n packed arrays.
func packLists[T number](lists [][]T) []byte {
	if len(lists) == 0 {
		return []byte{}
	}
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(lists)))
	for _, l := range lists {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(l)*width[T]()))
	}
	for _, l := range lists {
		b = append(b, pack(l)...)
	}
	return b
}

// maxLists bounds a list of lists: one list a state component.
const maxLists = 1 << 12

// unpackLists is the inverse of packLists.
func unpackLists[T number](b []byte) ([][]T, error) {
	if len(b) == 0 {
		return nil, nil
	}
	if len(b) < 4 {
		return nil, fmt.Errorf("list of lists of %d bytes", len(b))
	}
	n := binary.LittleEndian.Uint32(b)
	if n > maxLists || len(b) < 4+4*int(n) {
		return nil, fmt.Errorf("%d lists in %d bytes", n, len(b))
	}
	out := make([][]T, n)
	rest := b[4+4*n:]
	for i := range out {
		size := binary.LittleEndian.Uint32(b[4+4*i:])
		if uint64(size) > uint64(len(rest)) {
			return nil, fmt.Errorf("list %d of %d bytes, %d are left", i, size, len(rest))
		}
		var err error
		if out[i], err = unpack[T](rest[:size]); err != nil {
			return nil, fmt.Errorf("list %d: %w", i, err)
		}
		rest = rest[size:]
	}
	if len(rest) > 0 {
		return nil, fmt.Errorf("%d bytes after the last list", len(rest))
	}
	return out, nil
}
