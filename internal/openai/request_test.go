package openai

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/room"
)

// minimal is the smallest good body of each kind, without its closing brace.
var minimal = map[Kind]string{
	KindChat:       `{"messages":[{"role":"user","content":"hi"}]`,
	KindCompletion: `{"prompt":"hi"`,
	KindGenerate:   `{"text":"hi"`,
}

func with(kind Kind, fields string) []byte {
	if fields != "" {
		fields = "," + fields
	}
	return []byte(minimal[kind] + fields + "}")
}

// public is r without the fields that only parsing uses.
func public(r *Request) Request {
	c := *r
	c.chatLogprobs, c.topLogprobs, c.maxTokensLegacy, c.bestOf = 0, 0, 0, 0
	c.bootHosts, c.bootPorts, c.bootRooms, c.bootGen, c.streamOptions = nil, nil, nil, 0, false
	return c
}

func TestParseDefaults(t *testing.T) {
	greedy := engine.Sampling{Temperature: 1}
	for kind, want := range map[Kind]Request{
		KindChat:       {Kind: KindChat, Messages: []Message{{"user", "hi"}}, N: 1, Sampling: greedy},
		KindCompletion: {Kind: KindCompletion, Prompts: []Prompt{{Text: "hi"}}, N: 1, MaxTokens: 16, Sampling: greedy},
		KindGenerate:   {Kind: KindGenerate, Prompts: []Prompt{{Text: "hi"}}, N: 1, MaxTokens: 128, Sampling: greedy},
	} {
		got, err := Parse(kind, with(kind, ""))
		if err != nil {
			t.Fatalf("kind %d: %v", kind, err)
		}
		if !reflect.DeepEqual(public(got), want) {
			t.Errorf("kind %d:\ngot  %+v\nwant %+v", kind, public(got), want)
		}
	}
}

func TestParseEveryField(t *testing.T) {
	got, err := ParseChat([]byte(`{
		"model":"m","messages":[
			{"role":"system","content":"be brief"},
			{"role":"developer","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
			{"role":"assistant","content":"","refusal":null,"tool_calls":[],"annotations":[]},
			{"role":"user","content":"é\ud83c\udf89"}],
		"stream":true,"stream_options":{"include_usage":true},"n":3,"max_tokens":7,"max_completion_tokens":7,
		"stop":["x","yz"],"temperature":0.5,"top_p":0.9,"top_k":40,"min_p":0.1,"seed":-1,
		"frequency_penalty":-2,"presence_penalty":2,"repetition_penalty":1.5,"logit_bias":{"12":-100,"0":3.5},
		"logprobs":true,"top_logprobs":4,"ignore_eos":true,"user":"u","metadata":{"a":"b"},"store":false,"rid":"r-1",
		"bootstrap_host":"h","bootstrap_port":8998,"bootstrap_room":9223372036854775807,"bootstrap_generation":4294967295,
		"disagg_prefill_dp_rank":0,"response_format":{ "type": "text" },"tools":[],"tool_choice":"none","service_tier":"auto",
		"parallel_tool_calls":false,"modalities":["text"],"skip_special_tokens":true,"separate_reasoning":true,"unknown_but_null":null}`))
	if err != nil {
		t.Fatal(err)
	}
	want := Request{
		Kind: KindChat, Model: "m", Messages: []Message{{"system", "be brief"}, {"developer", "a\nb"}, {"assistant", ""}, {"user", "é🎉"}},
		Stream: true, IncludeUsage: true, N: 3, MaxTokens: 7, Stop: []string{"x", "yz"}, HasSeed: true, IgnoreEOS: true, Logprobs: 5,
		Sampling: engine.Sampling{
			Temperature: 0.5, TopP: 0.9, TopK: 40, MinP: 0.1, Seed: 0, FrequencyPenalty: -2, PresencePenalty: 2,
			RepetitionPenalty: 1.5, LogitBias: map[engine.Token]float32{12: -100, 0: 3.5}, IgnoreEOS: true,
		},
		RID:       []string{"r-1"},
		Bootstrap: []Bootstrap{{Host: "h", Port: 8998, Key: room.Key{Room: 1<<63 - 1, Gen: 1<<32 - 1}}},
	}
	if !reflect.DeepEqual(public(got), want) {
		t.Errorf("\ngot  %+v\nwant %+v", public(got), want)
	}
}

func TestParsePrompts(t *testing.T) {
	for _, c := range []struct {
		kind  Kind
		body  string
		want  []Prompt
		batch bool
	}{
		{KindCompletion, `{"prompt":""}`, []Prompt{{}}, false},
		{KindCompletion, `{"prompt":["a","b"]}`, []Prompt{{Text: "a"}, {Text: "b"}}, true},
		{KindCompletion, `{"prompt":[1, 2]}`, []Prompt{{Tokens: []engine.Token{1, 2}, IsTokens: true}}, false},
		{KindCompletion, `{"prompt":[[1],[2,3]]}`, []Prompt{{Tokens: []engine.Token{1}, IsTokens: true}, {Tokens: []engine.Token{2, 3}, IsTokens: true}}, true},
		{KindGenerate, `{"text":["a"]}`, []Prompt{{Text: "a"}}, true},
		{KindGenerate, `{"input_ids":[5]}`, []Prompt{{Tokens: []engine.Token{5}, IsTokens: true}}, false},
		{KindGenerate, `{"input_ids":[[5]],"text":null}`, []Prompt{{Tokens: []engine.Token{5}, IsTokens: true}}, true},
	} {
		got, err := Parse(c.kind, []byte(c.body))
		if err != nil {
			t.Errorf("%s: %v", c.body, err)
			continue
		}
		if !reflect.DeepEqual(got.Prompts, c.want) || got.Batch != c.batch {
			t.Errorf("%s: got %+v batch %v", c.body, got.Prompts, got.Batch)
		}
	}
}

func TestParseGenerateParams(t *testing.T) {
	got, err := ParseGenerate([]byte(`{"text":["a","b"],"sampling_params":{"max_new_tokens":5,"temperature":0,"top_k":-1,"stop":"x","n":2,
		"sampling_seed":4294967296,"ignore_eos":true,"stop_token_ids":[],"spaces_between_special_tokens":true,"min_new_tokens":0},
		"stream":true,"rid":["p","q"],"return_logprob":true,"top_logprobs_num":2,"logprob_start_len":-1,"return_text_in_logprobs":true,
		"bootstrap_host":["h1","h2"],"bootstrap_port":[null,2],"bootstrap_room":[0,8],"log_metrics":true,"no_logs":false,"return_bytes":false,"return_entropy":false}`))
	if err != nil {
		t.Fatal(err)
	}
	want := Request{
		Kind: KindGenerate, Prompts: []Prompt{{Text: "a"}, {Text: "b"}}, Batch: true, Stream: true, N: 2, MaxTokens: 5, Stop: []string{"x"},
		Sampling: engine.Sampling{TopK: -1, Seed: 1, IgnoreEOS: true}, HasSeed: true, IgnoreEOS: true, Logprobs: 3, TextInLogprobs: true,
		RID:       []string{"p", "q"},
		Bootstrap: []Bootstrap{{Host: "h1", Key: room.Key{Room: 0}}, {Host: "h2", Port: 2, Key: room.Key{Room: 8}}},
	}
	if !reflect.DeepEqual(public(got), want) {
		t.Errorf("\ngot  %+v\nwant %+v", public(got), want)
	}
}

// TestParseRoutersBodies: what sglang-router 0.3.2 and smg 1.13.0 write, which is theirs and not OpenAI's.
func TestParseRoutersBodies(t *testing.T) {
	boot := `,"bootstrap_host":["p","p"],"bootstrap_port":[8998,null],"bootstrap_room":[7,9]}`
	msgs := `{"messages":[{"role":"user","content":"x"}],"model":"unknown"`
	one := []Bootstrap{{Host: "p", Port: 8998, Key: room.Key{Room: 7}}}
	for _, c := range []struct {
		name, body string
		kind       Kind
		model      string
		want       []Bootstrap
	}{
		{"a room for each choice of a chat", msgs + `,"n":2` + boot, KindChat, "", one},
		{"the same of one prompt", `{"prompt":"x","model":"m","n":2` + boot, KindCompletion, "m", one},
		{"a room for each prompt, n=2", `{"prompt":["x","y"],"model":"m","n":2` + boot, KindCompletion, "m",
			[]Bootstrap{one[0], {Host: "p", Key: room.Key{Room: 9}}}},
		{"no model", `{"text":"x","model":"unknown","bootstrap_host":"p","bootstrap_port":8998,"bootstrap_room":7}`, KindGenerate, "", one},
		{"a client's model of that name", msgs + `}`, KindChat, "unknown", nil},
	} {
		got, err := Parse(c.kind, []byte(c.body))
		if err != nil || !reflect.DeepEqual(got.Bootstrap, c.want) || got.Model != c.model {
			t.Errorf("%s: %+v, %v; want %+v", c.name, got, err, c.want)
		}
	}
	for n, says := range map[string]string{`,"n":3`: "2 rooms for 1 prompts", "": "2 rooms for 1 prompts"} {
		if _, err := ParseChat([]byte(msgs + n + boot)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("n%s: %v, want %q", n, err, says)
		}
	}
}

func TestCompletionLogprobs(t *testing.T) {
	for value, want := range map[string]int{"null": 0, "0": 1, "3": 4} {
		r, err := ParseCompletion(with(KindCompletion, `"logprobs":`+value))
		if err != nil || r.Logprobs != want {
			t.Errorf("logprobs %s: got %v, %v; want %d", value, r, err, want)
		}
	}
}

// refusal is a body and the 400 it must give.
type refusal struct {
	kind        Kind
	fields      string
	code, param string
	says        string // part of the message
}

func TestParseRefuses(t *testing.T) {
	const unsupported, value = CodeUnsupportedField, CodeInvalidValue
	for _, c := range []refusal{
		{KindChat, `"frobnicate":1`, unsupported, "frobnicate", "frobnicate"},
		{KindChat, `"zeta":1,"alpha":2,"n":0`, unsupported, "alpha", "alpha, zeta"},
		{KindChat, `"Model":"m"`, unsupported, "Model", "Model"},
		{KindChat, `"tools":[{"type":"function"}]`, unsupported, "tools", "tools"},
		{KindChat, `"tool_choice":"required"`, unsupported, "tool_choice", "tool_choice"},
		{KindChat, `"response_format":{"type":"json_object"}`, unsupported, "response_format", "response_format"},
		{KindChat, `"store":true`, unsupported, "store", "store"},
		{KindChat, `"service_tier":"flex"`, unsupported, "service_tier", "service_tier"},
		{KindChat, `"stop_token_ids":[2]`, unsupported, "stop_token_ids", "stop_token_ids"},
		{KindChat, `"min_tokens":1`, unsupported, "min_tokens", "min_tokens"},
		{KindChat, `"disagg_prefill_dp_rank":1`, unsupported, "disagg_prefill_dp_rank", "disagg"},
		{KindChat, `"stream":true,"stream_options":{"include_usage":true,"x":1}`, unsupported, "stream_options.x", "stream_options.x"},
		{KindChat, `"stream_options":{"include_usage":true}`, value, "stream_options", "stream=true"},
		{KindChat, `"stream":"yes"`, value, "stream", "true or false"},
		{KindChat, `"n":0`, value, "n", "[1, 128]"},
		{KindChat, `"n":129`, value, "n", "[1, 128]"},
		{KindChat, `"n":1.5`, value, "n", "whole number"},
		{KindChat, `"n":"1"`, value, "n", "whole number"},
		{KindChat, `"temperature":-0.1`, value, "temperature", "[0, 2]"},
		{KindChat, `"temperature":2.1`, value, "temperature", "[0, 2]"},
		{KindChat, `"temperature":1e999`, value, "temperature", "[0, 2]"},
		{KindChat, `"top_p":0`, value, "top_p", "(0, 1]"},
		{KindChat, `"top_p":1.1`, value, "top_p", "(0, 1]"},
		{KindChat, `"min_p":1.1`, value, "min_p", "[0, 1]"},
		{KindChat, `"top_k":-2`, value, "top_k", "[-1,"},
		{KindChat, `"frequency_penalty":2.5`, value, "frequency_penalty", "[-2, 2]"},
		{KindChat, `"presence_penalty":-2.5`, value, "presence_penalty", "[-2, 2]"},
		{KindChat, `"repetition_penalty":0`, value, "repetition_penalty", "(0, 2]"},
		{KindChat, `"seed":9223372036854775808`, value, "seed", "whole number"},
		{KindChat, `"max_tokens":0`, value, "max_tokens", "[1,"},
		{KindChat, `"max_tokens":3,"max_completion_tokens":4`, value, "max_tokens", "differ"},
		{KindChat, `"logit_bias":{"5":101}`, value, "logit_bias", "[-100, 100]"},
		{KindChat, `"logit_bias":{"05":1}`, value, "logit_bias", "not a token id"},
		{KindChat, `"logit_bias":{"-1":1}`, value, "logit_bias", "not a token id"},
		{KindChat, `"logit_bias":{"1":null}`, value, "logit_bias", "[-100, 100]"},
		{KindChat, `"logit_bias":[1]`, value, "logit_bias", "object"},
		{KindChat, `"top_logprobs":2`, value, "top_logprobs", "logprobs=true"},
		{KindChat, `"logprobs":true,"top_logprobs":21`, value, "top_logprobs", "[0, 20]"},
		{KindChat, `"stop":""`, value, "stop", "empty"},
		{KindChat, `"stop":[1]`, value, "stop", "string"},
		{KindChat, `"stop":["a",null]`, value, "stop", "string"},
		{KindChat, `"stop":[` + strings.Repeat(`"a",`, 16) + `"b"]`, value, "stop", "more than 16"},
		{KindChat, `"stop":"` + strings.Repeat("a", 1025) + `"`, value, "stop", "1024"},
		{KindChat, `"rid":""`, value, "rid", "visible"},
		{KindChat, `"rid":"a b"`, value, "rid", "visible"},
		{KindChat, `"rid":"é"`, value, "rid", "visible"},
		{KindChat, `"rid":["a","b"]`, value, "rid", "2 entries for 1"},
		{KindChat, `"metadata":{"a":1}`, value, "metadata.a", "string"},
		{KindChat, `"bootstrap_room":-1`, value, "bootstrap_room", "[0,"},
		{KindChat, `"bootstrap_room":9223372036854775808`, value, "bootstrap_room", "[0,"},
		{KindChat, `"bootstrap_room":[null]`, value, "bootstrap_room", "whole number"},
		{KindChat, `"bootstrap_room":[1,2]`, value, "bootstrap_room", "2 rooms for 1"},
		{KindChat, `"bootstrap_host":"h"`, value, "bootstrap_room", "required"},
		{KindChat, `"bootstrap_generation":1`, value, "bootstrap_room", "required"},
		{KindChat, `"bootstrap_room":1,"bootstrap_port":0`, value, "bootstrap_port", "[1, 65535]"},
		{KindChat, `"bootstrap_room":1,"bootstrap_host":""`, value, "bootstrap_host", "empty"},
		{KindChat, `"prompt":"x"`, unsupported, "prompt", "prompt"},
		{KindCompletion, `"messages":[]`, unsupported, "messages", "messages"},
		{KindCompletion, `"suffix":"x"`, unsupported, "suffix", "suffix"},
		{KindCompletion, `"best_of":2`, unsupported, "best_of", "equal to n"},
		{KindCompletion, `"echo":true,"logprobs":0`, unsupported, "echo", "logprobs"},
		{KindCompletion, `"logprobs":21`, value, "logprobs", "[0, 20]"},
		{KindCompletion, `"logprobs":true`, value, "logprobs", "whole number"},
		{KindGenerate, `"input_ids":[1]`, value, "input_ids", "both"},
		{KindGenerate, `"temperature":1`, unsupported, "temperature", "temperature"},
		{KindGenerate, `"sampling_params":{"x":1}`, unsupported, "sampling_params.x", "sampling_params.x"},
		{KindGenerate, `"sampling_params":{"top_p":2}`, value, "sampling_params.top_p", "(0, 1]"},
		{KindGenerate, `"sampling_params":[]`, value, "sampling_params", "object"},
		{KindGenerate, `"sampling_params":{"json_schema":"{}"}`, unsupported, "sampling_params.json_schema", "json_schema"},
		{KindGenerate, `"image_data":"x"`, unsupported, "image_data", "image_data"},
		{KindGenerate, `"logprob_start_len":0`, unsupported, "logprob_start_len", "-1"},
		{KindGenerate, `"top_logprobs_num":1`, value, "top_logprobs_num", "return_logprob=true"},
	} {
		checkRefusal(t, c.kind, with(c.kind, c.fields), c.code, c.param, c.says)
	}
}

func TestParseRefusesInput(t *testing.T) {
	chat := func(msgs string) []byte { return []byte(`{"messages":` + msgs + `}`) }
	for _, c := range []struct {
		kind              Kind
		body              []byte
		code, param, says string
	}{
		{KindChat, []byte(`{}`), CodeInvalidValue, "messages", "required"},
		{KindChat, chat(`null`), CodeInvalidValue, "messages", "required"},
		{KindChat, chat(`[]`), CodeInvalidValue, "messages", "empty"},
		{KindChat, chat(`"hi"`), CodeInvalidValue, "messages", "list"},
		{KindChat, chat(`["hi"]`), CodeInvalidValue, "messages[0]", "object"},
		{KindChat, chat(`[null]`), CodeInvalidValue, "messages[0]", "object"},
		{KindChat, chat(`[{"content":"x"}]`), CodeInvalidValue, "messages[0].role", "required"},
		{KindChat, chat(`[{"role":"user"}]`), CodeInvalidValue, "messages[0].content", "required"},
		{KindChat, chat(`[{"role":"assistant","content":null}]`), CodeInvalidValue, "messages[0].content", "required"},
		{KindChat, chat(`[{"role":"king","content":"x"}]`), CodeInvalidValue, "messages[0].role", "king"},
		{KindChat, chat(`[{"role":"tool","content":"x"}]`), CodeUnsupportedField, "messages[0].role", "tool"},
		{KindChat, chat(`[{"role":"user","content":"x","name":"bob"}]`), CodeUnsupportedField, "messages[0].name", "name"},
		{KindChat, chat(`[{"role":"user","content":5}]`), CodeInvalidValue, "messages[0].content", "string"},
		{KindChat, chat(`[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]`), CodeUnsupportedField, "messages[0].content[0].type", "image_url"},
		{KindChat, chat(`[{"role":"user","content":[{"type":"text"}]}]`), CodeInvalidValue, "messages[0].content[0].text", "required"},
		{KindChat, chat(`[{"role":"user","content":["x"]}]`), CodeInvalidValue, "messages[0].content[0]", "object"},
		{KindCompletion, []byte(`{}`), CodeInvalidValue, "prompt", "required"},
		{KindCompletion, []byte(`{"prompt":[]}`), CodeInvalidValue, "prompt", "empty"},
		{KindCompletion, []byte(`{"prompt":[[]]}`), CodeInvalidValue, "prompt[0]", "empty"},
		{KindCompletion, []byte(`{"prompt":[1,null]}`), CodeInvalidValue, "prompt", "token ids"},
		{KindCompletion, []byte(`{"prompt":[1,"a"]}`), CodeInvalidValue, "prompt", "token ids"},
		{KindCompletion, []byte(`{"prompt":["a",[1]]}`), CodeInvalidValue, "prompt[1]", "string"},
		{KindCompletion, []byte(`{"prompt":[1,-5]}`), CodeInvalidValue, "prompt", "-5"},
		{KindCompletion, []byte(`{"prompt":{"a":1}}`), CodeInvalidValue, "prompt", "string"},
		{KindCompletion, []byte(`{"prompt":["a","b","c"],"n":100}`), CodeInvalidValue, "n", "300 choices"},
		{KindCompletion, []byte(`{"prompt":["a","b"],"bootstrap_room":1}`), CodeInvalidValue, "bootstrap_room", "1 rooms for 2"},
		{KindCompletion, []byte(`{"prompt":["a","b"],"bootstrap_room":[1,1]}`), CodeInvalidValue, "bootstrap_room", "two prompts"},
		{KindCompletion, []byte(`{"prompt":["a","b","c"],"bootstrap_room":[1,2,3],"bootstrap_host":["x","y"]}`), CodeInvalidValue, "bootstrap_host", "2 entries"},
		{KindGenerate, []byte(`{}`), CodeInvalidValue, "text", "required"},
		{KindGenerate, []byte(`{"input_ids":"x"}`), CodeInvalidValue, "input_ids", "list of token ids"},
		{KindGenerate, []byte(`{"text":[1]}`), CodeInvalidValue, "text[0]", "string"},
	} {
		checkRefusal(t, c.kind, c.body, c.code, c.param, c.says)
	}
}

func checkRefusal(t *testing.T, kind Kind, body []byte, code, param, says string) {
	t.Helper()
	r, err := Parse(kind, body)
	var e *Error
	if !errors.As(err, &e) {
		t.Errorf("%.200s: got %+v, %v; want a refusal", body, r, err)
		return
	}
	if e.Status != 400 || e.Code != code || e.Param != param || !strings.Contains(e.Cause.Detail, says) {
		t.Errorf("%.200s: got %d %s param %q %q; want %s param %q with %q", body, e.Status, e.Code, e.Param, e.Cause.Detail, code, param, says)
	}
}

func TestMalformedBodies(t *testing.T) {
	for name, c := range map[string]struct{ body, says string }{
		"empty":             {"", "empty"},
		"space":             {" \n", "empty"},
		"not an object":     {`[1]`, "not a JSON object"},
		"truncated":         {`{"prompt":"a`, "unterminated"},
		"no value":          {`{"prompt":}`, "value is expected"},
		"trailing comma":    {`{"prompt":"a",}`, "quoted name"},
		"trailing bytes":    {`{"prompt":"a"} x`, "after the JSON object"},
		"two objects":       {`{"prompt":"a"}{}`, "after the JSON object"},
		"duplicate":         {`{"prompt":"a","prompt":"b"}`, `duplicate name "prompt"`},
		"escaped duplicate": {`{"prompt":"a","pr\u006fmpt":"b"}`, `duplicate name "prompt"`},
		"nested duplicate":  {`{"prompt":"a","metadata":{"k":"1","k":"2"}}`, `duplicate name "k"`},
		"invalid UTF-8":     {"{\"prompt\":\"a\xff\"}", "UTF-8 at byte 12"},
		"overlong UTF-8":    {"{\"prompt\":\"\xc0\x80\"}", "UTF-8"},
		"raw NUL":           {"{\"prompt\":\"a\x00\"}", "control character"},
		"escaped NUL":       {`{"prompt":"a\u0000"}`, "NUL"},
		"lone high":         {`{"prompt":"\ud800"}`, "surrogate"},
		"lone high, char":   {`{"prompt":"\ud800\u0041"}`, "surrogate"},
		"lone low":          {`{"prompt":"\udc00"}`, "surrogate"},
		"bad escape":        {`{"prompt":"\x41"}`, "escape"},
		"short \\u":         {`{"prompt":"\u00"}`, "escape"},
		"raw newline":       {"{\"prompt\":\"a\nb\"}", "control character"},
		"leading zero":      {`{"prompt":"a","n":01}`, "',' or '}'"},
		"plus":              {`{"prompt":"a","n":+1}`, "value is expected"},
		"bare dot":          {`{"prompt":"a","n":1.}`, "digit"},
		"NaN":               {`{"prompt":"a","temperature":NaN}`, "value is expected"},
		"single quotes":     {`{'prompt':'a'}`, "quoted name"},
		"BOM":               {"\ufeff{}", "not a JSON object"},
		"depth":             {`{"prompt":` + strings.Repeat("[", 100_000), "deeper than 32"},
		"object depth":      {strings.Repeat(`{"a":`, 100_000), "deeper than 32"},
		"many names":        {manyNames(), "more than 4096"},
	} {
		t.Run(name, func(t *testing.T) {
			checkRefusal(t, KindCompletion, []byte(c.body), CodeInvalidBody, "", c.says)
		})
	}
}

func manyNames() string {
	var b strings.Builder
	b.WriteString(`{"metadata":{`)
	for i := range 5000 {
		fmt.Fprintf(&b, `"k%d":"",`, i)
	}
	return b.String() + `"z":""}}`
}

func TestRewrite(t *testing.T) {
	got, err := Rewrite([]byte(`{ "a" : [1, 2] , "bootstrap_room":5,"b":"<\u0041>" }`),
		Field{"bootstrap_room", uint64(1<<63 - 1)}, Field{"rid", "x<y"}, Field{"gone", nil})
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"a":[1, 2],"b":"<\u0041>","bootstrap_room":9223372036854775807,"rid":"x<y"}`; string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got, err = Rewrite([]byte(`{"a":1}`), Field{"a", nil}); err != nil || string(got) != `{}` {
		t.Errorf("removing the only field: %s, %v", got, err)
	}
	if _, err = Rewrite([]byte(`{"a":1,"a":2}`)); err == nil {
		t.Error("a duplicate name was accepted")
	}
}

func TestParseAbort(t *testing.T) {
	for body, want := range map[string]Abort{
		`{"rid":"a"}`:                      {RID: "a"},
		`{"abort_all":true}`:               {All: true},
		`{"abort_all":true,"rid":""}`:      {All: true},
		`{"rid":"a","abort_message":null}`: {RID: "a"},
		`{"rid":"a","bootstrap_room":0}`:   {RID: "a", OfRoom: true},
		`{"rid":"a","bootstrap_room":7}`:   {RID: "a", Room: 7, OfRoom: true},
	} {
		if got, err := ParseAbort([]byte(body)); err != nil || got != want {
			t.Errorf("%s: %+v, %v", body, got, err)
		}
	}
	for _, body := range []string{``, `{}`, `{"rid":""}`, `{"rid":"a","abort_all":true}`, `{"rid":1}`, `{"id":"a"}`, `{"abort_all":false}`,
		`{"abort_all":true,"bootstrap_room":1}`, `{"bootstrap_room":1}`, `{"rid":"a","bootstrap_room":-1}`, `{"rid":"a","bootstrap_room":[1]}`} {
		var e *Error
		if _, err := ParseAbort([]byte(body)); !errors.As(err, &e) || e.Status != 400 {
			t.Errorf("%s: %v, want a 400", body, err)
		}
	}
}
