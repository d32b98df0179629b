package supervise

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"
	"time"
)

// FuzzOutput: whatever a child prints, nothing of it is lost or doubled, every line has its prefix
// and its bound, and the tail stays small; whatever it writes as its report, readReady ends
// and takes only one whole line of JSON.
func FuzzOutput(f *testing.F) {
	f.Add([]byte("a\nb\n\nc"), 1)
	f.Add([]byte("x"), maxLine+1)
	f.Add([]byte(`{"role":"prefill","http":"h:1"}`+"\n"), 1)
	f.Add([]byte(`{"role":"prefill"}`), 1)
	f.Add([]byte("\n\x00\xff{"), 3)
	f.Fuzz(func(t *testing.T, b []byte, times int) {
		if times < 1 || times*len(b) > 1<<18 {
			return
		}
		b = bytes.Repeat(b, times)
		var out bytes.Buffer
		last := new(tail)
		copyLines(&lineWriter{out: &out}, "p| ", bytes.NewReader(b), last)
		var whole []byte
		for line := range bytes.Lines(out.Bytes()) {
			text, ok := bytes.CutPrefix(line, []byte("p| "))
			if !ok || len(text) > maxLine+1 || text[len(text)-1] != '\n' {
				t.Fatalf("line %.40q of %d bytes", line, len(line))
			}
			whole = append(whole, text[:len(text)-1]...)
		}
		if want := bytes.ReplaceAll(b, []byte("\n"), nil); !bytes.Equal(whole, want) {
			t.Fatalf("%d bytes without line ends became %d", len(want), len(whole))
		}
		if l := last.last(); len(l) > tailLines {
			t.Fatalf("%d lines kept", len(l))
		}
		report(t, b)
	})
}

// report gives b to readReady as a child would.
func report(t *testing.T, b []byte) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	b = b[:min(len(b), 32<<10)] // a pipe holds as much without a reader
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	info, err := readReady(t.Context(), r, time.Minute)
	line, _, whole := bytes.Cut(b, []byte("\n"))
	if ok := whole && json.Unmarshal(line, new(ReadyInfo)) == nil; ok != (err == nil) {
		t.Fatalf("%.80q: %+v, %v", b, info, err)
	}
}
