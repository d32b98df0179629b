package openai

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/room"
)

// fuzzParse checks what must hold of any body: no panic; a refusal is a 4xx whose body is
// valid JSON; an accepted one is JSON to encoding/json too and within every bound.
func fuzzParse(f *testing.F, kind Kind, seeds ...string) {
	for _, s := range append(seeds, minimal[kind]+"}") {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := Parse(kind, body)
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Status != 400 || !json.Valid(e.Body()) || !utf8.Valid(e.Body()) {
				t.Fatalf("refused with %v", err)
			}
			return
		}
		if !json.Valid(body) {
			t.Fatal("accepted what encoding/json refuses")
		}
		if r.N < 1 || r.Choices() > MaxChoices || len(r.Stop) > MaxStops || r.Logprobs > MaxTopLogprobs+1 || r.MaxTokens < 0 {
			t.Fatalf("out of bounds: %+v", r)
		}
		if n := len(r.Bootstrap); n != 0 && n != max(1, len(r.Prompts)) {
			t.Fatalf("%d rooms for %d prompts", n, len(r.Prompts))
		}
		texts := r.Stop
		for _, m := range r.Messages {
			texts = append(texts, m.Content)
		}
		for _, p := range r.Prompts {
			texts = append(texts, p.Text)
		}
		for _, s := range texts {
			if !utf8.ValidString(s) || strings.Contains(s, "\x00") {
				t.Fatalf("text %q got through", s)
			}
		}
	})
}

func FuzzParseChat(f *testing.F) {
	fuzzParse(f, KindChat, `{"messages":[{"role":"user","content":[{"type":"text","text":"\ud83c\udf89"}]}],"n":2,"logit_bias":{"1":2}}`)
}

func FuzzParseCompletion(f *testing.F) {
	fuzzParse(f, KindCompletion, `{"prompt":[[1,2],[3]],"bootstrap_room":[1,2],"stop":["a"]}`, `{"prompt":["a"],"logprobs":3}`)
}

func FuzzParseGenerate(f *testing.F) {
	fuzzParse(f, KindGenerate, `{"input_ids":[1],"sampling_params":{"temperature":0.1e1,"stop":"x"},"bootstrap_port":[null],"bootstrap_room":7}`)
}

func FuzzParseAbort(f *testing.F) {
	f.Add([]byte(`{"rid":"a"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		if a, err := ParseAbort(body); err == nil && !a.All && !ValidRID(a.RID) {
			t.Fatalf("accepted %+v", a)
		}
	})
}

func FuzzParseError(f *testing.F) {
	f.Add(400, FromCause(&room.Cause{Code: room.CodeDeadline, Side: room.SideSender, Key: room.Key{Room: 5, Gen: 2}}).Body())
	f.Add(500, []byte(`{"error":{"message":"x","code":400}}`))
	f.Add(200, []byte(`plain`))
	f.Fuzz(func(t *testing.T, status int, body []byte) {
		e := ParseError(status, body, room.SideReceiver, "decoding")
		if e == nil || e.Cause == nil || e.Cause.Code == "" || !json.Valid(e.Body()) {
			t.Fatalf("%d %q gave %v", status, body, e)
		}
		if ev := ParseErrorEvent(body, room.SideReceiver, "decoding"); ev != nil && !json.Valid(ev.Body()) {
			t.Fatalf("event %q gave %v", body, ev)
		}
	})
}

func FuzzEventReader(f *testing.F) {
	f.Add("data: a\n\ndata: b\r\n\r\n: c\n\n")
	f.Fuzz(func(t *testing.T, in string) {
		r := NewEventReader(strings.NewReader(in), 64)
		for {
			data, err := r.Next()
			if err != nil {
				return
			}
			if len(data) > 64 {
				t.Fatalf("event of %d bytes", len(data))
			}
		}
	})
}

// FuzzGuard: no user text makes a special token, and none is lost.
func FuzzGuard(f *testing.F) {
	specials := []string{"<BOS>", "<EOS>", "<|a|>", "<|a|>b", "<|im_end|>"}
	f.Add("x <|im_<|im_end|>end|> <|a|>b \uE0B1\uE0B3\uE0B2")
	tpl, err := NewTemplate(engine.Info{ChatTemplate: "<BOS>{% for m in messages %}{{ m.content }}<EOS>{% endfor %}", BOS: 1000, EOS: 1001}, byteTokenizer{specials: specials})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, content string) {
		if !utf8.ValidString(content) || strings.Contains(content, "\x00") {
			return
		}
		toks, err := tpl.Prompt([]Message{{"user", content}}, noon)
		if err != nil {
			t.Fatal(err)
		}
		want := []engine.Token{1000}
		for i := range len(content) {
			want = append(want, engine.Token(content[i]))
		}
		want = append(want, 1001)
		if len(toks) != len(want) {
			t.Fatalf("%q gave %v", content, toks)
		}
		for i := range want {
			if toks[i] != want[i] {
				t.Fatalf("%q gave %v", content, toks)
			}
		}
	})
}
