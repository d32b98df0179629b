package nixl

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

func TestFrames(t *testing.T) {
	var b []byte
	b = appendWords(b, cmdPing, 7)
	b = append(appendFrame(b, evFailed, 3), "abc"...)
	b = appendFrame(b, evConnected, 0)
	f := frames{r: bytes.NewReader(b)}
	var n uint64
	if k, body, err := f.next(8); err != nil || k != cmdPing || words(body, &n) != nil || n != 7 {
		t.Errorf("ping: kind %d, %x, %v", k, body, err)
	}
	if k, body, err := f.next(8); err != nil || k != evFailed || string(body) != "abc" {
		t.Errorf("text: kind %d, %q, %v", k, body, err)
	}
	if k, body, err := f.next(8); err != nil || k != evConnected || len(body) != 0 {
		t.Errorf("empty: kind %d, %q, %v", k, body, err)
	}
	if _, _, err := f.next(8); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
	if words([]byte("short"), &n) == nil || words(make([]byte, 16), &n) == nil {
		t.Error("a body of another length was read as one number")
	}
}

func TestBadHeaders(t *testing.T) {
	good := appendFrame(nil, cmdPing, 8)
	for name, c := range map[string]struct {
		change func(h []byte)
		limit  int
		want   error
	}{
		"magic":   {func(h []byte) { h[0]++ }, 8, errFrame},
		"version": {func(h []byte) { h[4]++ }, 8, errVersion},
		"zeros":   {func(h []byte) { h[7] = 1 }, 8, errFrame},
		"long":    {func([]byte) {}, 7, errFrame},
		"huge":    {func(h []byte) { h[11] = 0xff }, maxBody, errFrame},
	} {
		h := bytes.Clone(good)
		c.change(h)
		if _, _, err := parseHeader(h, c.limit); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

func TestJobRoundTrip(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var got job
	for range 200 {
		j := job{ID: rnd.Uint64(), Region: rnd.Uint32(), Index: rnd.IntN(2) == 0, Blocks: make([]block, rnd.IntN(50))}
		if rnd.IntN(2) == 0 {
			j.Note = make([]byte, rnd.IntN(maxNote+1))
		}
		for i := range j.Blocks {
			j.Blocks[i] = block{rnd.Uint64(), rnd.Uint64(), rnd.Uint64()}
		}
		b := appendWrite(nil, &j)
		k, n, err := parseHeader(b, maxBody)
		if err != nil || k != cmdWrite || n != len(b)-headerLen {
			t.Fatalf("header: %d, %d, %v", k, n, err)
		}
		if err := got.parse(b[headerLen:]); err != nil || !reflect.DeepEqual(got, j) {
			t.Fatalf("%+v came back as %+v, %v", j, got, err)
		}
	}
}

func TestEnterRoundTrip(t *testing.T) {
	w := transfer.Write{Grant: 9, Key: room.Key{Room: 1 << 60, Gen: 5}, Notify: []byte("note"), Segments: []transfer.Segment{{Off: 4096, Src: make([]byte, 100)}, {Off: 1 << 40}}}
	b := appendEnter(nil, 77, &w)
	var e enter
	if err := e.parse(b[headerLen:]); err != nil || e.seq != 77 || e.grant != 9 || e.key != w.Key || string(e.notify) != "note" || len(e.spans) != 32 {
		t.Errorf("%+v, %v", e, err)
	}
	w.Notify = nil
	if err := e.parse(appendEnter(nil, 78, &w)[headerLen:]); err != nil || e.notify != nil {
		t.Errorf("without a notification: %+v, %v", e, err)
	}
}

// TestInside compares with the definition, byte by byte.
func TestInside(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		var spans []transfer.Span
		for at := uint64(rnd.IntN(4)); at < 60; at += uint64(1 + rnd.IntN(9)) {
			n := uint64(1 + rnd.IntN(12))
			spans = append(spans, transfer.Span{Off: at, Len: n})
			at += n
		}
		off, n := uint64(rnd.IntN(90)), rnd.IntN(20)
		want := false
		for _, s := range spans {
			want = want || off >= s.Off && off+uint64(n) <= s.Off+s.Len
		}
		w := transfer.Write{Segments: []transfer.Segment{{Off: off, Src: make([]byte, n)}}}
		var e enter
		if err := e.parse(appendEnter(nil, 1, &w)[headerLen:]); err != nil {
			t.Fatal(err)
		}
		if got := e.inside(spans); got != want {
			t.Fatalf("%d bytes at %d in %v: %v, want %v", n, off, spans, got, want)
		}
	}
}

func FuzzFrames(f *testing.F) {
	w := transfer.Write{Grant: 1, Notify: []byte("x"), Segments: []transfer.Segment{{Off: 1, Src: []byte{1}}}}
	f.Add(appendEnter(nil, 1, &w)[headerLen:])
	f.Add(appendWrite(nil, &job{Note: []byte("n"), Blocks: []block{{1, 2, 3}}})[headerLen:])
	f.Add(appendFrame(nil, ctlHello, 8))
	f.Fuzz(func(t *testing.T, b []byte) {
		var e enter
		if e.parse(b) == nil {
			if len(e.notify) > transfer.MaxNotify || len(e.spans)%16 != 0 || len(e.spans)/16 > maxSegments {
				t.Errorf("accepted %+v", e)
			}
			e.inside([]transfer.Span{{Off: 10, Len: 1 << 62}})
		}
		var j job
		if j.parse(b) == nil {
			if again := appendWrite(nil, &j)[headerLen:]; !bytes.Equal(again, b) {
				t.Errorf("%x was read as %+v, which is %x", b, j, again)
			}
		}
		if len(b) >= headerLen {
			if k, n, err := parseHeader(b, maxBody); err == nil && !bytes.Equal(appendFrame(nil, k, n), b[:headerLen]) {
				t.Errorf("header %x was read as %d, %d", b[:headerLen], k, n)
			}
		}
	})
}
