package sched

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/baton-pd/baton/internal/engine"
)

// runOutput pushes pieces and gathers the whole answer, checking each event.
func runOutput(t testing.TB, stops []string, limit int, pieces [][]byte, eogAt int) (text string, toks []TokenEvent, last Event) {
	t.Helper()
	o := newOutput(stops, limit, false)
	var sb strings.Builder
	for i, p := range pieces {
		ev, ok := o.push(TokenEvent{ID: engine.Token(i), Bytes: p}, i == eogAt)
		if !ok {
			if ev.Finish != "" || ev.Text != "" {
				t.Fatalf("an event with content is not ok: %+v", ev)
			}
			continue
		}
		if !utf8.ValidString(ev.Text) {
			t.Fatalf("invalid UTF-8 %q", ev.Text)
		}
		sb.WriteString(ev.Text)
		toks = append(toks, ev.Tokens...)
		if last = ev; ev.Finish != "" {
			break
		}
	}
	return sb.String(), toks, last
}

// naive is the definition of the text, on all bytes at once.
func naive(stops []string, b []byte) (text, stop string) {
	end, found := len(b), ""
search:
	for e := 1; e <= len(b); e++ {
		for _, s := range stops {
			if s != "" && strings.HasSuffix(string(b[:e]), s) && len(s) > len(found) {
				found, end = s, e-len(s)
			}
		}
		if found != "" {
			break search
		}
	}
	var sb strings.Builder
	for b = b[:end]; len(b) > 0; {
		r, n := utf8.DecodeRune(b)
		sb.WriteRune(r)
		b = b[n:]
	}
	return sb.String(), found
}

func split(b []byte, at uint64) [][]byte {
	var out [][]byte
	for len(b) > 0 {
		n := min(int(at%4), len(b))
		at = at>>2 | at<<62
		out = append(out, b[:n:n])
		b = b[n:]
		if at == 0 {
			at = 1
		}
	}
	return out
}

func FuzzOutput(f *testing.F) {
	f.Add([]byte("hello world stop here"), "stop", "wor", uint64(0x1b2d))
	f.Add([]byte("Grüße \xff\xe4\xb8 世界 ab"), "界", "a", uint64(0x55))
	f.Add([]byte("aaaab"), "aab", "ab", uint64(0x9))
	f.Add([]byte("\xe2\x82END"), "END", "", uint64(1))
	f.Fuzz(func(t *testing.T, b []byte, s1, s2 string, at uint64) {
		if !utf8.ValidString(s1) || !utf8.ValidString(s2) || len(b) > 200 {
			return
		}
		pieces := split(b, at|1)
		want, stop := naive([]string{s1, s2}, b)
		text, toks, last := runOutput(t, []string{s1, s2}, len(pieces)+1, append(pieces, nil), len(pieces))
		if text != want || last.MatchedStop != stop || last.Finish != FinishStop {
			t.Fatalf("%q stops %q %q: got %q (%+v), want %q stop %q", pieces, s1, s2, text, last, want, stop)
		}
		// The tokens' bytes are the text's bytes, in order, none twice.
		var raw []byte
		for i, tk := range toks {
			if i > 0 && toks[i-1].ID >= tk.ID {
				t.Fatalf("tokens out of order: %v", toks)
			}
			raw = append(raw, tk.Bytes...)
		}
		if got, _ := naive(nil, raw); got != want {
			t.Fatalf("tokens say %q, text is %q", got, want)
		}
	})
}

// K12: every way to finish, at token 1 and later, ends with exactly one Finish.
func TestFinishCauses(t *testing.T) {
	p := func(s ...string) (out [][]byte) {
		for _, x := range s {
			out = append(out, []byte(x))
		}
		return out
	}
	for _, c := range []struct {
		name   string
		pieces [][]byte
		stops  []string
		limit  int
		eog    int
		text   string
		tokens int
		finish FinishReason
		stop   string
	}{
		{"eog first", p("x"), nil, 9, 0, "", 0, FinishStop, ""},
		{"eog later", p("a", "b", "x"), nil, 9, 2, "ab", 2, FinishStop, ""},
		{"length first", p("a", "b"), nil, 1, -1, "a", 1, FinishLength, ""},
		{"length later", p("a", "b", "c"), nil, 2, -1, "ab", 2, FinishLength, ""},
		{"stop first", p("STOP"), []string{"STOP"}, 9, -1, "", 0, FinishStop, "STOP"},
		{"stop inside the first", p("aSTOPb"), []string{"STOP"}, 9, -1, "a", 1, FinishStop, "STOP"},
		{"stop over three", p("aS", "TO", "Pb"), []string{"STOP"}, 9, -1, "a", 1, FinishStop, "STOP"},
		{"stop at the limit", p("a", "S"), []string{"S"}, 2, -1, "a", 1, FinishStop, "S"},
		{"eog at the limit", p("a", "x"), nil, 2, 1, "a", 1, FinishStop, ""},
		{"held start of a stop is flushed at length", p("ST", "O"), []string{"STOP"}, 2, -1, "STO", 2, FinishLength, ""},
		{"held start of a stop is flushed at eog", p("STO", "x"), []string{"STOP"}, 9, 1, "STO", 1, FinishStop, ""},
		{"half a character at length", p("a", "\xe4\xb8"), nil, 2, -1, "a\ufffd\ufffd", 2, FinishLength, ""},
	} {
		text, toks, last := runOutput(t, c.stops, c.limit, c.pieces, c.eog)
		if text != c.text || len(toks) != c.tokens || last.Finish != c.finish || last.MatchedStop != c.stop {
			t.Errorf("%s: %q, %d tokens, %+v", c.name, text, len(toks), last)
		}
	}
}

func TestHeldBackNoLongerThanNeeded(t *testing.T) {
	o := newOutput([]string{"ab", "xyz"}, 100, false)
	var got []string
	for _, s := range []string{"1", "a", "c", "x", "y", "x", "y", "q", "\xc3", "\xbc"} {
		ev, _ := o.push(TokenEvent{Bytes: []byte(s)}, false)
		got = append(got, fmt.Sprintf("%s/%d", ev.Text, len(ev.Tokens)))
	}
	want := []string{"1/1", "/0", "ac/2", "/0", "/0", "xy/2", "/0", "xyq/3", "/0", "ü/2"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}
