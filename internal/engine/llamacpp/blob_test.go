package llamacpp

import (
	"bytes"
	"encoding/binary"
	"math"
	"testing"
)

var le = binary.LittleEndian

// testLayout is a made-up model: 2 layers, K rows of 16 bytes f16, V rows of 8.
func testLayout() *layout {
	return &layout{magic: 0xabcd1234, seq: 0,
		k: []rows{{typeF16, 16}, {typeF16, 16}}, v: []rows{{typeF16, 8}, {typeF16, 8}}, token: 48}
}

// testBlock has every row's bytes say which token they belong to.
func testBlock(l *layout, p0, n int) []byte {
	b := make([]byte, l.size(n))
	l.writeHead(b, n)
	for i := range n {
		le.PutUint32(b[blobHead+i*cellBytes:], uint32(p0+i))
	}
	rest := b[blobHead+n*cellBytes+8:]
	for _, part := range [][]rows{l.k, l.v} {
		for _, r := range part {
			for i := range n {
				for j := range int(r.bytes) {
					rest[rowsHead+i*int(r.bytes)+j] = byte(p0 + i)
				}
			}
			rest = rest[rowsHead+n*int(r.bytes):]
		}
	}
	return b
}

func TestLayoutRoundTrip(t *testing.T) {
	for _, v := range [][]rows{{{typeF16, 8}, {typeF16, 8}}, nil} {
		l := testLayout()
		l.v, l.token = v, 32+16*len(v)/2
		b := testBlock(l, 5, 3)
		got, err := parseLayout(b, 3)
		if err != nil {
			t.Fatal(err)
		}
		if got.size(7) != l.size(7) || got.token != l.token || len(got.v) != len(l.v) {
			t.Errorf("%+v, want %+v", got, l)
		}
		if err := got.verify(b, 5, 3); err != nil {
			t.Error(err)
		}
		if n := got.tokens(len(b)); n != 3 {
			t.Errorf("tokens %d", n)
		}
		for _, size := range []int{0, l.size(0), len(b) - 1, len(b) + 1} {
			if n := got.tokens(size); n != 0 {
				t.Errorf("%d bytes hold %d tokens", size, n)
			}
		}
	}
}

// TestVerifyFindsEveryBit flips each bit that is not in a row.
func TestVerifyFindsEveryBit(t *testing.T) {
	l := testLayout()
	const p0, n = 128, 3
	b := testBlock(l, p0, n)
	inRow := make([]bool, len(b))
	at := blobHead + n*cellBytes + 8
	for _, part := range [][]rows{l.k, l.v} {
		for _, r := range part {
			at += rowsHead
			for range n * int(r.bytes) {
				inRow[at] = true
				at++
			}
		}
	}
	if err := l.verify(b, p0, n); err != nil {
		t.Fatal(err)
	}
	for i := range b {
		for bit := range 8 {
			b[i] ^= 1 << bit
			if err := l.verify(b, p0, n); (err == nil) != inRow[i] {
				t.Errorf("byte %d bit %d (in a row: %v): %v", i, bit, inRow[i], err)
			}
			b[i] ^= 1 << bit
		}
	}
	for _, other := range [][]byte{nil, b[:len(b)-1], append(bytes.Clone(b), 0)} {
		if l.verify(other, p0, n) == nil {
			t.Errorf("%d bytes accepted", len(other))
		}
	}
	if l.verify(b, p0+1, n) == nil || l.verify(b, p0, n-1) == nil {
		t.Error("other positions accepted")
	}
}

func TestSortPutsPositionsInOrder(t *testing.T) {
	l := testLayout()
	want := testBlock(l, 10, 4)
	mixed := bytes.Clone(want)
	swap := func(i, j int) {
		at := blobHead
		exchange := func(row int) {
			a, b := mixed[at+i*row:at+(i+1)*row], mixed[at+j*row:at+(j+1)*row]
			tmp := bytes.Clone(a)
			copy(a, b)
			copy(b, tmp)
		}
		exchange(cellBytes)
		at += 4*cellBytes + 8
		for _, part := range [][]rows{l.k, l.v} {
			for _, r := range part {
				at += rowsHead
				exchange(int(r.bytes))
				at += 4 * int(r.bytes)
			}
		}
	}
	swap(0, 3)
	swap(1, 3)
	if bytes.Equal(mixed, want) {
		t.Fatal("nothing was mixed")
	}
	l.sort(mixed, 4, nil)
	if !bytes.Equal(mixed, want) {
		t.Error("not in order")
	}
}

func TestFinite(t *testing.T) {
	fill := func(pattern []byte, n int) []byte { return bytes.Repeat(pattern, n) }
	f32 := func(v float32) []byte { return le.AppendUint32(nil, math.Float32bits(v)) }
	q8 := func(scale uint16) []byte { return append(le.AppendUint16(nil, scale), make([]byte, 32)...) }
	for _, c := range []struct {
		name string
		typ  int32
		b    []byte
		want bool
	}{
		{"f16 numbers", typeF16, fill([]byte{0xff, 0x7b, 0xff, 0xfb}, 9), true}, // ±65504
		{"f16 inf", typeF16, append(make([]byte, 6), 0x00, 0x7c), false},
		{"f16 nan in the tail", typeF16, append(make([]byte, 10), 0x01, 0xfe), false},
		{"bf16 numbers", typeBF16, fill([]byte{0x7f, 0x7f}, 9), true},
		{"bf16 nan", typeBF16, append(make([]byte, 8), 0xc0, 0x7f), false},
		{"f32 numbers", typeF32, fill(f32(-math.MaxFloat32), 5), true},
		{"f32 small", typeF32, fill(f32(1e-38), 5), true},
		{"f32 nan", typeF32, append(make([]byte, 12), f32(float32(math.NaN()))...), false},
		{"f32 inf", typeF32, append(make([]byte, 8), f32(float32(math.Inf(-1)))...), false},
		{"q8_0 numbers", typeQ8_0, fill(q8(0x3c00), 3), true},
		{"q8_0 inf scale", typeQ8_0, append(q8(0x3c00), q8(0x7c00)...), false},
		{"unknown type", 99, fill([]byte{0xff}, 64), true},
	} {
		if got := finiteRows(c.typ, c.b); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
	// Every half-precision value, against its definition.
	for v := range 1 << 16 {
		b := make([]byte, 8)
		le.PutUint16(b[2*(v%4):], uint16(v))
		if got, want := finiteRows(typeF16, b), v&0x7c00 != 0x7c00; got != want {
			t.Fatalf("f16 %04x: %v", v, got)
		}
	}
}

// FuzzVerify: no bytes make verify read out of bounds, and it accepts only what its
// own writer makes.
func FuzzVerify(f *testing.F) {
	l := testLayout()
	f.Add(testBlock(l, 0, 2), 0, 2)
	f.Add([]byte{}, 0, 1)
	f.Fuzz(func(t *testing.T, b []byte, p0, n int) {
		if n < 1 || n > 64 || p0 < 0 || p0 > 1<<20 {
			return
		}
		if l.verify(b, p0, n) != nil {
			return
		}
		own := bytes.Clone(b)
		l.writeHead(own, n)
		for i := range n {
			le.PutUint32(own[blobHead+i*cellBytes:], uint32(p0+i))
		}
		if !bytes.Equal(own, b) {
			t.Error("accepted a block that nobody would write")
		}
		_ = l.finite(b, n)
	})
}

// FuzzParseLayout: no bytes make the parser read out of bounds.
func FuzzParseLayout(f *testing.F) {
	f.Add(testBlock(testLayout(), 0, 2), 2)
	f.Fuzz(func(t *testing.T, b []byte, n int) {
		if n < 1 || n > 64 {
			return
		}
		if l, err := parseLayout(b, n); err == nil && l.size(n) != len(b) {
			t.Errorf("layout says %d bytes of %d", l.size(n), len(b))
		}
	})
}
