package openai

import (
	"encoding/json"
	"errors"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/room"
)

// FuzzParse: what must hold of any body: no panic; a refusal is a 400 whose body is valid JSON; an
// accepted one is JSON to encoding/json too and within every bound.
func FuzzParse(f *testing.F) {
	for kind, fields := range map[Kind][]string{
		KindChat:       {minimal[KindChat] + "}", `{"messages":[{"role":"user","content":[{"type":"text","text":"\ud83c\udf89"}]}],"n":2,"logit_bias":{"1":2}}`},
		KindCompletion: {minimal[KindCompletion] + "}", `{"prompt":[[1,2],[3]],"bootstrap_room":[1,2],"stop":["a"]}`, `{"prompt":["a"],"logprobs":3}`, `{"prompt":"a","stream":true,"baton_resume":{"tokens":[1,2],"id":"x","created":3}}`},
		KindGenerate:   {minimal[KindGenerate] + "}", `{"input_ids":[1],"sampling_params":{"temperature":0.1e1,"stop":"x"},"bootstrap_port":[null],"bootstrap_room":7}`},
	} {
		for _, s := range fields {
			f.Add(byte(kind), []byte(s))
		}
	}
	f.Fuzz(func(t *testing.T, k byte, body []byte) {
		r, err := Parse(Kind(1+(k+2)%3), body) // 1, 2 and 3 stay
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
		if r.Resume != nil && (r.Choices() != 1 || !r.Stream || r.MaxTokens > 0 && len(r.Resume.Tokens) >= r.MaxTokens) {
			t.Fatalf("cannot go on: %+v", r)
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

// FuzzMembers holds the scanner against encoding/json: what it accepts has the same members, and
// what it refuses is refused there too, or is one of the things that are stricter here.
func FuzzMembers(f *testing.F) {
	for _, s := range []string{
		`{"a":1,"b":[{}, null, true, -0.5e+3],"c":{"d":"\u00e9\ud83c\udf89\n"}}`, ` {"":""} `, `{"a":1,"a":2}`, `{"\u0061":1,"a":2}`,
		`{"a":"\u0000"}`, `{"a":"\ud83c"}`, `{"a":01}`, `{"a":1}x`, `{"a":` + strings.Repeat("[", 40) + strings.Repeat("]", 40) + `}`, "{\"a\":\"\xff\"}", "{\"a\":\"\x1f\"}", `[]`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		got, err := Members(body)
		var want map[string]json.RawMessage
		werr := json.Unmarshal(body, &want)
		switch {
		case err == nil && (werr != nil || len(got) != len(want)):
			t.Fatalf("%q: %d members, encoding/json says %d, %v", body, len(got), len(want), werr)
		case err == nil:
			for k, v := range got {
				if string(v) != string(want[k]) {
					t.Fatalf("%q: member %q is %s, encoding/json says %s", body, k, v, want[k])
				}
				if elems, ok := Elements(v, 3); ok && len(elems) > 4 {
					t.Fatalf("%d elements", len(elems))
				}
			}
			again, err := Rewrite(body, Field{Name: "rid", Value: "x"})
			if err != nil || !json.Valid(again) {
				t.Fatalf("rewritten as %q: %v", again, err)
			}
		case werr == nil && want != nil && !stricter(err.Error()):
			t.Fatalf("%q is refused: %v", body, err)
		}
	})
}

// stricter reports whether a refusal is one of those that encoding/json does not know.
func stricter(why string) bool {
	for _, s := range []string{"duplicate name", "nested deeper", "NUL character", "lone surrogate", "not valid UTF-8", "with more than"} {
		if strings.Contains(why, s) {
			return true
		}
	}
	return false
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

var longNumber = regexp.MustCompile(`[0-9_]{5}`)

// FuzzTemplate: a model's chat template, whatever it is, compiles or not, and renders or not, without a
// panic, within its bounds, and with errors that are answers. What multiplies text is left out: its
// memory is not bounded.
func FuzzTemplate(f *testing.F) {
	for _, s := range []string{
		"{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
		"{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ loop.index }}{% endfor %}{{ ns.n }}",
		"{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}", "{{ messages | tojson }}", "{% macro a(x) %}{{ x }}{% endmacro %}{{ a('b') }}",
		"{% for i in range(1000) %}{% for j in range(1000) %}x{% endfor %}{% endfor %}", "{{ messages[-1].content[1:] }}", "{% include 'x' %}", "{{",
	} {
		f.Add(s, "hi <EOS>")
	}
	f.Fuzz(func(t *testing.T, source, content string) {
		if !utf8.ValidString(content) || strings.Contains(content, "\x00") || strings.ContainsAny(source, "*~") || longNumber.MatchString(source) {
			return
		}
		tpl, err := NewTemplate(engine.Info{ChatTemplate: source, BOS: 1000, EOS: 1001}, byteTokenizer{specials: []string{"<BOS>", "<EOS>"}})
		if err != nil {
			return
		}
		text, err := tpl.Render([]Message{{"user", content}}, noon)
		if err == nil && len(text) > bytesBase+bytesFactor*len(content) {
			t.Fatalf("%d bytes", len(text))
		}
		if _, err = tpl.Prompt([]Message{{"user", content}}, noon); err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Status != 400 || !json.Valid(e.Body()) {
				t.Fatalf("refused with %v", err)
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
