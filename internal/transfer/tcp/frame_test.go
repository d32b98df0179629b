package tcp

import (
	"bytes"
	"errors"
	"math"
	"testing"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

var goodHeaders = map[string]header{
	"open": {kind: kindOpen, notify: true, notifyN: 9, seq: 7, payload: 100, grant: math.MaxUint64,
		key: room.Key{Room: 1<<63 - 1, Gen: math.MaxUint32}, segments: maxSegments, total: 1 << 40},
	"notification only":    {kind: kindOpen, notify: true, notifyN: transfer.MaxNotify, seq: 1, grant: 2},
	"empty notification":   {kind: kindOpen, notify: true, seq: 1, grant: 2},
	"nothing at all":       {kind: kindOpen, seq: 1, grant: 2},
	"data":                 {kind: kindData, seq: math.MaxUint64, payload: maxFrame},
	"abandon":              {kind: kindAbandon, seq: 3},
	"open, largest frame":  {kind: kindOpen, seq: 1, grant: 1, payload: maxFrame, total: maxFrame, segments: 1},
	"open, a byte of many": {kind: kindOpen, seq: 1, grant: 1, payload: 1, total: math.MaxUint64, segments: 2},
}

func TestHeaderRoundTrip(t *testing.T) {
	for name, h := range goodHeaders {
		var b [headerLen]byte
		h.encode(b[:])
		var got header
		if err := got.decode(b[:]); err != nil || got != h {
			t.Errorf("%s: decoded %+v, %v; want %+v", name, got, err, h)
		}
	}
}

func TestHeaderRefusesWhatIsMalformed(t *testing.T) {
	for name, tc := range map[string]struct {
		h    header
		edit func([]byte)
	}{
		"magic":                           {h: goodHeaders["open"], edit: func(b []byte) { b[0]++ }},
		"kind 0":                          {h: header{seq: 1}},
		"kind 4":                          {h: header{kind: 4, seq: 1}},
		"unknown flag":                    {h: goodHeaders["open"], edit: func(b []byte) { b[5] |= 2 }},
		"last bytes not zero":             {h: goodHeaders["data"], edit: func(b []byte) { b[63] = 1 }},
		"notification too long":           {h: header{kind: kindOpen, notify: true, notifyN: transfer.MaxNotify + 1}},
		"length of an absent notify":      {h: header{kind: kindOpen, notifyN: 1}},
		"frame too large":                 {h: header{kind: kindData, payload: maxFrame + 1}},
		"too many segments":               {h: header{kind: kindOpen, segments: maxSegments + 1, total: 1, payload: 1}},
		"negative segments":               {h: header{kind: kindOpen, segments: -1, total: 1, payload: 1}},
		"payload beyond the write":        {h: header{kind: kindOpen, segments: 1, total: 1, payload: 2}},
		"open frame without progress":     {h: header{kind: kindOpen, segments: 1, total: 1}},
		"data frame without progress":     {h: header{kind: kindData, seq: 1}},
		"data frame with a grant":         {h: header{kind: kindData, seq: 1, payload: 1, grant: 1}},
		"data frame with a notification":  {h: header{kind: kindData, seq: 1, payload: 1, notify: true}},
		"abandon frame with payload":      {h: header{kind: kindAbandon, seq: 1, payload: 1}},
		"abandon frame with total":        {h: header{kind: kindAbandon, seq: 1, total: 1}},
		"abandon frame with a generation": {h: header{kind: kindAbandon, seq: 1, key: room.Key{Gen: 1}}},
	} {
		var b [headerLen]byte
		tc.h.encode(b[:])
		if tc.edit != nil {
			tc.edit(b[:])
		}
		var got header
		if err := got.decode(b[:]); err == nil {
			t.Errorf("%s: accepted as %+v", name, got)
		}
	}
}

func TestHandshakeMessages(t *testing.T) {
	var b [helloLen]byte
	hello{session: 42}.encode(&b)
	if h, err := decodeHello(&b); err != nil || h.session != 42 {
		t.Fatalf("hello: %+v, %v", h, err)
	}
	for at, want := range map[int]error{0: errMagic, 8: errVersion, 12: errHeader, 31: errHeader} {
		bad := b
		bad[at] ^= 0x40
		if _, err := decodeHello(&bad); !errors.Is(err, want) {
			t.Errorf("hello with byte %d changed: %v, want %v", at, err, want)
		}
	}
	for s, want := range map[status]error{statusOK: nil, statusVersion: errVersion, statusSession: transfer.ErrSession, statusBusy: transfer.ErrSession} {
		var w [welcomeLen]byte
		s.encode(&w)
		got, err := decodeWelcome(&w)
		if err != nil || got != s || !errors.Is(got.err(), want) {
			t.Errorf("status %d: decoded %d, %v, means %v", s, got, err, got.err())
		}
		w[0]++
		if _, err := decodeWelcome(&w); !errors.Is(err, errMagic) {
			t.Errorf("welcome with a wrong magic: %v", err)
		}
	}
	if status(99).err() == nil {
		t.Error("unknown status means success")
	}
}

func TestEntriesOverflowIsNoticed(t *testing.T) {
	b := make([]byte, 2*entryLen)
	putEntry(b, 1, math.MaxUint64)
	putEntry(b[entryLen:], 2, 1)
	if _, _, ok := decodeEntries(nil, 0, b); ok {
		t.Fatal("sum of lengths wrapped around")
	}
}

// FuzzMessages: what a decoder of one of the messages of fixed size accepts keeps its limits
// and encodes to the same bytes again.
func FuzzMessages(f *testing.F) {
	for _, h := range goodHeaders {
		var b [headerLen]byte
		h.encode(b[:])
		f.Add(b[:])
	}
	f.Add(appendAnswer(nil, answer{seq: 1, code: codeBounds}))
	var hi [helloLen]byte
	hello{session: 1<<63 + 5}.encode(&hi)
	f.Add(hi[:])
	for _, s := range []status{statusOK, statusBusy, 77} {
		var b [welcomeLen]byte
		s.encode(&b)
		f.Add(b[:])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var in [headerLen]byte
		copy(in[:], b)
		same := func(out []byte, v any) {
			if !bytes.Equal(out, in[:len(out)]) {
				t.Fatalf("%x decodes to %+v, which encodes as %x", in[:len(out)], v, out)
			}
		}
		var h header
		if h.decode(in[:]) == nil {
			if h.payload > maxFrame || h.segments < 0 || h.segments > maxSegments || h.notifyN > transfer.MaxNotify {
				t.Fatalf("limits not kept: %+v", h)
			}
			var again [headerLen]byte
			h.encode(again[:])
			same(again[:], h)
		}
		if a, err := decodeAnswer(in[:]); err == nil {
			same(appendAnswer(nil, a), a)
		}
		if hi, err := decodeHello((*[helloLen]byte)(in[:])); err == nil {
			var again [helloLen]byte
			hi.encode(&again)
			same(again[:], hi)
		}
		if st, err := decodeWelcome((*[welcomeLen]byte)(in[:])); err == nil && (st == statusOK) != (st.err() == nil) {
			t.Fatalf("status %d means %v", st, st.err())
		}
	})
}

func FuzzTable(f *testing.F) {
	f.Add([]byte{1, 2, 3}, uint64(0))
	b := make([]byte, 3*entryLen)
	putEntry(b, 8, 8)
	putEntry(b[entryLen:], 16, 0)
	putEntry(b[2*entryLen:], 1<<63, 1<<63)
	f.Add(b, uint64(1<<63))
	f.Fuzz(func(t *testing.T, b []byte, sum uint64) {
		table, got, ok := decodeEntries(nil, sum, b)
		if !ok {
			return
		}
		if len(table) != len(b)/entryLen {
			t.Fatalf("%d entries of %d bytes", len(table), len(b))
		}
		spans := []transfer.Span{{Off: 0, Len: 8}, {Off: 8, Len: 24}}
		for _, s := range table {
			if got < s.Len {
				t.Fatalf("sum %d is less than one length %d", got, s.Len)
			}
			if transfer.Within(spans, s) && (s.Off > 32 || s.Len > 32 || s.Off+s.Len > 32) {
				t.Fatalf("%v is not inside %v", s, spans)
			}
		}
	})
}
