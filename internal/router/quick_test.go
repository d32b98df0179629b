package router

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// commonSeeds is how many of quickSeeds, from the first, must not need encoding/json.
const commonSeeds = 7

// quickSeeds are answers and events of the servers that the router knows, and what is nearly such.
var quickSeeds = []string{
	`{"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":"h\u00e9 \n"},"finish_reason":null}]}`,
	`{"choices":[{"index":1,"delta":{"tool_calls":[{"id":"a","function":{"arguments":"{}"}}],"reasoning_content":"r"},"finish_reason":"stop"}],"usage":null}`,
	`{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":8,"total_tokens":12}}`,
	`{"text":"abc","output_ids":[1,2,3,null],"meta_info":{"finish_reason":{"type":"abort","message":"no","status_code":503},"prompt_tokens":1,"completion_tokens":2},"index":1}`,
	`{"object":"error","message":"no"}`, `{"error":{"message":"x","code":500}}`, `{"error":null,"choices":[null,{}],"meta_info":null}`,
	` { "choices" : [ { "finish_reason" : "length" , "text" : "" } ] } `,
	// What encoding/json reads in its own way.
	`{"Choices":[{"INDEX":3}]}`, `{"choices":[{"index":0}],"choices":[{"text":"a"}]}`, "{\"choice\u017f\":[{\"index\":7}]}", `{"\u0063hoices":[{"index":7}]}`,
	`{"index":1.0}`, `{"index":1e2}`, `{"index":"1"}`, `{"index":-0}`, `{"index":99999999999999999999}`, `{"text":7}`, `{"text":"\ud800"}`, "{\"text\":\"\xff\"}",
	`{"output_ids":[1.5]}`, `{"usage":{"prompt_tokens":1.0}}`,
	// What is no JSON.
	``, `{`, `{}x`, `{"a":01}`, `{"a":1.}`, `{"a":-}`, `{"a":1e}`, `{"a":"\x"}`, `{"a":"\u12"}`, "{\"a\":\"\t\"}", `{"a":tru}`, `{"a" 1}`, `{"a":1,}`, `{"a":[1,]}`, `[1 2]`,
	`null`, `[]`, `"x"`, `1`, strings.Repeat("[", 70) + strings.Repeat("]", 70), strings.Repeat(`{"a":`, 70) + "1" + strings.Repeat("}", 70),
}

// sameAsJSON compares quick with encoding/json, which it must equal in what it accepts and what it finds.
func sameAsJSON(t *testing.T, data []byte) (quickly bool) {
	t.Helper()
	if got, want := validJSON(data), json.Valid(data); got != want {
		t.Fatalf("valid %v, want %v: %.300q", got, want, data)
	}
	var got, want answer
	gerr, werr := decodeAnswer(data, &got), json.Unmarshal(data, &want)
	if (gerr == nil) != (werr == nil) {
		t.Fatalf("%v, want %v: %.300q", gerr, werr, data)
	}
	if werr == nil {
		if len(want.Choices) == 0 && len(got.Choices) == 0 {
			got.Choices, want.Choices = nil, nil // nil and empty are the same to everybody
		}
		if len(want.OutputIDs) == 0 && len(got.OutputIDs) == 0 {
			got.OutputIDs, want.OutputIDs = nil, nil
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%+v, want %+v: %.300q", got, want, data)
		}
	}
	var gu, wu usage
	gerr, werr = decodeUsage(data, &gu), json.Unmarshal(data, &wu)
	if (gerr == nil) != (werr == nil) || werr == nil && gu != wu {
		t.Fatalf("usage %+v, %v, want %+v, %v: %.300q", gu, gerr, wu, werr, data)
	}
	f, ferr := parseFinish(1, data)
	var reason string
	if json.Unmarshal(data, &reason) == nil && string(data) != "null" && len(data) > 0 && (ferr != nil || f.reason != reason) {
		t.Fatalf("finish %+v, %v, want %q: %.300q", f, ferr, reason, data)
	}
	q := quick{b: data}
	return q.answer(&answer{})
}

func TestQuick(t *testing.T) {
	for i, seed := range quickSeeds {
		if quickly := sameAsJSON(t, []byte(seed)); i < commonSeeds && !quickly {
			t.Errorf("left to encoding/json: %s", seed)
		}
		for n := range len(seed) { // cut anywhere, and one byte wrong
			sameAsJSON(t, []byte(seed[:n]))
			for _, c := range []byte("\"{}[],:\\x0 ") {
				b := []byte(seed)
				b[n] = c
				sameAsJSON(t, b)
			}
		}
	}
}

func FuzzQuick(f *testing.F) {
	for _, s := range quickSeeds {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		kept := bytes.Clone(data)
		sameAsJSON(t, data)
		if !bytes.Equal(data, kept) {
			t.Fatal("the input was changed")
		}
	})
}

func BenchmarkDecode(b *testing.B) {
	data := []byte(quickSeeds[0])
	for name, decode := range map[string]func([]byte, *answer) error{
		"quick": decodeAnswer, "json": func(d []byte, a *answer) error { return json.Unmarshal(d, a) },
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			for b.Loop() {
				if err := decode(data, &answer{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
