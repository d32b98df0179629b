package httpapi

import (
	"fmt"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sched"
)

const (
	chatBody       = `{"model":"tiny","messages":[{"role":"user","content":"hi"}]`
	completionBody = `{"model":"tiny","prompt":"ab"`
	generateBody   = `{"text":"ab","rid":"r1"`
)

// hello answers each choice with "Hé" in two events and a stop.
func hello(r *sched.Request) ([]step, error) {
	var out []step
	for c := range r.N {
		out = append(out, text(c, "H"))
	}
	for c := range r.N {
		// é arrives as two tokens; the text only with the second.
		half := step{ev: sched.Event{Choice: c, Tokens: []sched.TokenEvent{{ID: 0xc3, Bytes: []byte{0xc3}, Logprob: -1}}}}
		rest := step{ev: sched.Event{Choice: c, Text: "é", Tokens: []sched.TokenEvent{{ID: 0xa9, Bytes: []byte{0xa9}, Logprob: -2}}}}
		out = append(out, half, rest, endEOS(c))
	}
	return out, nil
}

func TestAnswersGolden(t *testing.T) {
	for name, c := range map[string]struct{ path, body string }{
		"chat":              {"/v1/chat/completions", chatBody + `}`},
		"chat_n":            {"/v1/chat/completions", chatBody + `,"n":2}`},
		"chat_logprobs":     {"/v1/chat/completions", chatBody + `,"logprobs":true,"top_logprobs":2}`},
		"chat_stream":       {"/v1/chat/completions", chatBody + `,"stream":true}`},
		"chat_stream_usage": {"/v1/chat/completions", chatBody + `,"stream":true,"n":2,"stream_options":{"include_usage":true}}`},
		"chat_stream_lp":    {"/v1/chat/completions", chatBody + `,"stream":true,"logprobs":true}`},
		"text":              {"/v1/completions", completionBody + `}`},
		"text_echo":         {"/v1/completions", completionBody + `,"echo":true}`},
		"text_tokens_echo":  {"/v1/completions", `{"prompt":[104,105],"echo":true,"stream":true}`},
		"text_logprobs":     {"/v1/completions", completionBody + `,"logprobs":2}`},
		"text_stream":       {"/v1/completions", completionBody + `,"stream":true,"stream_options":{"include_usage":true},"echo":true}`},
		"text_stream_lp":    {"/v1/completions", completionBody + `,"stream":true,"logprobs":0}`},
		"text_batch":        {"/v1/completions", `{"prompt":["ab","c"],"n":2}`},
		"generate":          {"/generate", generateBody + `}`},
		"generate_batch":    {"/generate", `{"text":["ab","c"]}`},
		"generate_n":        {"/generate", generateBody + `,"sampling_params":{"n":2}}`},
		"generate_stream":   {"/generate", generateBody + `,"stream":true}`},
		"generate_logprobs": {"/generate", generateBody + `,"return_logprob":true,"top_logprobs_num":1,"return_text_in_logprobs":true}`},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, hello)
			status, body, hdr, err := h.post(c.path, c.body)
			if err != nil || status != 200 {
				t.Fatalf("%d %s %v", status, body, err)
			}
			if strings.Contains(c.body, `"stream":true`) {
				ev := events(t, body)
				if ev[len(ev)-1] != "[DONE]" || strings.Count(body, "[DONE]") != 1 {
					t.Errorf("the stream does not end in one [DONE]: %q", ev[len(ev)-1])
				}
				if ct := hdr.Get("Content-Type"); !strings.HasPrefix(ct, "text/event-stream") {
					t.Errorf("content type %q", ct)
				}
			} else if ct := hdr.Get("Content-Type"); ct != "application/json" {
				t.Errorf("content type %q", ct)
			}
			golden(t, name, body)
		})
	}
}

// Every way a choice can end at its first token, on every endpoint, streamed or not.
func TestEveryFinishAtTheFirstToken(t *testing.T) {
	stopString := step{ev: sched.Event{Finish: sched.FinishStop, MatchedStop: "x", Tokens: []sched.TokenEvent{{ID: 'x', Bytes: []byte("x")}}}}
	length := text(0, "Q")
	length.ev.Finish = sched.FinishLength
	var b strings.Builder
	for _, f := range []struct {
		name string
		step step
	}{{"eos", endEOS(0)}, {"stop string", stopString}, {"length", length}} {
		for _, ep := range []struct{ path, body string }{
			{"/v1/chat/completions", chatBody}, {"/v1/completions", completionBody}, {"/generate", generateBody},
		} {
			for _, stream := range []bool{false, true} {
				h := newHarness(t, always(f.step))
				status, body, _, err := h.post(ep.path, fmt.Sprintf(`%s,"stream":%v}`, ep.body, stream))
				if status != 200 || err != nil {
					t.Fatalf("%d %s %v", status, body, err)
				}
				// /generate repeats the whole state; the others say the reason exactly once.
				if n := strings.Count(body, `"finish_reason":"`) + strings.Count(body, `"finish_reason":{`); n != 1 {
					t.Errorf("%s %s stream=%v: %d finish reasons in %s", f.name, ep.path, stream, n, body)
				}
				fmt.Fprintf(&b, "## %s %s stream=%v\n%s\n", f.name, ep.path, stream, strings.TrimSpace(body))
			}
		}
	}
	golden(t, "first_token", b.String())
}

func TestPrefillAnswers(t *testing.T) {
	var b strings.Builder
	for _, ep := range []struct{ path, body string }{
		{"/v1/chat/completions", chatBody}, {"/v1/completions", completionBody}, {"/generate", generateBody},
	} {
		for _, stream := range []bool{false, true} {
			h := newHarness(t, always(), func(c *Config) { c.Role = RolePrefill })
			status, body, hdr, err := h.post(ep.path, fmt.Sprintf(`%s,"stream":%v,"bootstrap_room":77,"bootstrap_generation":2}`, ep.body, stream))
			if status != 200 || err != nil {
				t.Fatalf("%d %s %v", status, body, err)
			}
			if got := hdr.Get("X-Baton-Room"); got != "77#2" {
				t.Errorf("X-Baton-Room %q", got)
			}
			fmt.Fprintf(&b, "## %s stream=%v\n%s\n", ep.path, stream, strings.TrimSpace(body))
			if r := h.sched.requests[0]; r.Bootstrap == nil || r.Bootstrap.Key != (room.Key{Room: 77, Gen: 2}) {
				t.Errorf("request %+v", r)
			}
		}
	}
	golden(t, "prefill", b.String())
}

func TestBatchOfPrompts(t *testing.T) {
	script := func(r *sched.Request) ([]step, error) {
		p := string(rune(r.Prompt[0]))
		return []step{text(1, p+"1"), text(0, p+"0"), end(0, sched.FinishStop), end(1, sched.FinishLength)}, nil
	}
	h := newHarness(t, script)
	status, body, hdr, err := h.post("/v1/completions", `{"prompt":["a","b"],"n":2,"rid":["x","y"],
		"bootstrap_host":"p","bootstrap_port":9,"bootstrap_room":[3,4]}`)
	if status != 200 || err != nil {
		t.Fatalf("%d %s %v", status, body, err)
	}
	for i, want := range []string{"a0", "a1", "b0", "b1"} {
		if !strings.Contains(body, fmt.Sprintf(`"index":%d,"text":%q`, i, want)) {
			t.Errorf("choice %d is not %q in %s", i, want, body)
		}
	}
	if !strings.Contains(body, `"usage":{"prompt_tokens":2,"completion_tokens":8,"total_tokens":10}`) {
		t.Errorf("usage in %s", body)
	}
	if got := hdr.Get("X-Baton-Room"); got != "3,4" {
		t.Errorf("X-Baton-Room %q", got)
	}
	for i, r := range h.sched.requests {
		if r.Bootstrap.Key.Room != uint64(3+i) || r.Bootstrap.Host != "p" || r.Bootstrap.Port != 9 || !strings.HasPrefix(r.ID, []string{"x/", "y/"}[i]) {
			t.Errorf("request %d: %+v room %+v", i, r, r.Bootstrap)
		}
	}
}

func TestRequestReachesTheScheduler(t *testing.T) {
	h := newHarness(t, hello)
	_, body, _, _ := h.post("/v1/completions", `{"prompt":"ab","n":2,"max_tokens":9,"stop":["s"],"temperature":0.5,"top_p":0.9,"seed":7,"logprobs":2,
		"ignore_eos":true,"logit_bias":{"5":1}}`, HeaderTimeout, "5000")
	if len(h.sched.requests) != 1 {
		t.Fatal(body)
	}
	r := h.sched.requests[0]
	if string([]rune{rune(r.Prompt[0]), rune(r.Prompt[1])}) != "ab" || r.N != 2 || r.MaxTokens != 9 || r.Stop[0] != "s" || r.Logprobs != 3 ||
		!r.IgnoreEOS || !r.Sampling.IgnoreEOS || r.Sampling.Temperature != 0.5 || r.Sampling.TopP != 0.9 || r.Sampling.Seed != 7 ||
		r.Sampling.LogitBias[5] != 1 || r.Bootstrap != nil || !strings.HasPrefix(r.ID, "id1/") {
		t.Errorf("request %+v", r)
	}
	if r.Deadline.IsZero() {
		t.Error("no deadline")
	}
	h.post("/v1/completions", `{"prompt":"<EOS>"}`)
	if p := h.sched.requests[1].Prompt; len(p) != 5 {
		t.Errorf("special text in a prompt became %v", p)
	}
	if a, b := h.sched.requests[0].ID, h.sched.requests[1].ID; a == b {
		t.Errorf("two live requests may both be called %s", a)
	}
}
