package httpapi

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/sched"
)

// story is an answer in events of whole tokens. Asked to go on, it goes on.
func story(r *sched.Request) ([]step, error) {
	all := []step{text(0, "He"), text(0, "é"), text(0, "l"), text(0, "lo "), text(0, "you")}
	have := r.Prompt[len(r.Prompt)-r.Emitted:]
	for len(have) > 0 {
		var ids []engine.Token
		for _, t := range all[0].ev.Tokens {
			ids = append(ids, t.ID)
		}
		if len(ids) > len(have) || !slices.Equal(ids, have[:len(ids)]) {
			return nil, fmt.Errorf("cannot go on after %v", have)
		}
		have, all = have[len(ids):], all[1:]
	}
	last := text(0, "!")
	last.ev.Finish = sched.FinishLength
	if r.MaxTokens > 0 && r.MaxTokens+r.Emitted != 50 {
		return nil, fmt.Errorf("max tokens %d after %d", r.MaxTokens, r.Emitted)
	}
	return append(all, last), nil
}

// told is one event and the tokens it tells.
type told struct {
	data   string
	tokens []engine.Token
	end    bool
}

// tells splits a stream with comments.
func tells(t *testing.T, stream string) (out []told) {
	t.Helper()
	for ev := range strings.SplitSeq(strings.TrimSuffix(stream, "\n\n"), "\n\n") {
		var e told
		rest := []byte(ev)
		e.tokens, e.end, rest, _ = openai.CutTokens[engine.Token](nil, rest)
		data, ok := strings.CutPrefix(string(rest), "data: ")
		if !ok {
			t.Fatalf("event %q", ev)
		}
		e.data = clocks.ReplaceAllStringFunc(data, func(s string) string {
			if strings.HasPrefix(s, `"created"`) {
				return s // the same over a resumption
			}
			return `"clock":0`
		})
		out = append(out, e)
	}
	return out
}

// A stream that is cut between any two events and goes on elsewhere has the events of the whole one, on every endpoint.
func TestStreamGoesOn(t *testing.T) {
	for name, c := range map[string]struct{ path, body string }{
		"chat":              {"/v1/chat/completions", chatBody + `,"stream":true,"max_tokens":50,"stream_options":{"include_usage":true}`},
		"chat logprobs":     {"/v1/chat/completions", chatBody + `,"stream":true,"logprobs":true,"top_logprobs":2`},
		"text":              {"/v1/completions", completionBody + `,"stream":true,"max_tokens":50,"echo":true,"stream_options":{"include_usage":true}`},
		"text logprobs":     {"/v1/completions", completionBody + `,"stream":true,"max_tokens":50,"logprobs":1`},
		"generate":          {"/generate", generateBody + `,"stream":true,"sampling_params":{"max_new_tokens":50}`},
		"generate logprobs": {"/generate", generateBody + `,"stream":true,"sampling_params":{"max_new_tokens":50},"return_logprob":true,"top_logprobs_num":1,"return_text_in_logprobs":true`},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, story)
			status, body, hdr, err := h.post(c.path, c.body+`}`, openai.HeaderTokens, "1")
			if err != nil || status != 200 || hdr.Get(openai.HeaderTokens) != "1" || hdr.Get(openai.HeaderResumed) != "" {
				t.Fatalf("%d %s %v", status, body, err)
			}
			whole := tells(t, body)
			var first struct {
				ID      string
				Created int64
				Meta    struct{ ID string } `json:"meta_info"`
			}
			if err := json.Unmarshal([]byte(whole[0].data), &first); err != nil {
				t.Fatal(err)
			}
			r := openai.Resume{ID: first.ID + first.Meta.ID, Created: first.Created}
			cuts := 0
			for i, e := range whole {
				if e.end {
					if len(whole) <= i+1 || cuts != 5 {
						t.Errorf("the end is told with event %d of %d, after %d others", i, len(whole), cuts)
					}
					break
				}
				if r.Tokens = append(r.Tokens, e.tokens...); len(e.tokens) == 0 {
					continue
				}
				cuts++
				var meta struct {
					Meta struct {
						Logprobs []openai.GenerateLogprob `json:"output_token_logprobs"`
						Top      []openai.GenerateTop     `json:"output_top_logprobs"`
					} `json:"meta_info"`
				}
				if err := json.Unmarshal([]byte(e.data), &meta); err != nil {
					t.Fatal(err)
				}
				r.Logprobs, r.Top = meta.Meta.Logprobs, meta.Meta.Top
				field, err := openai.Marshal(&r)
				if err != nil {
					t.Fatal(err)
				}
				status, body, hdr, err := h.post(c.path, c.body+`,"baton_resume":`+string(field)+`}`, openai.HeaderTokens, "1")
				if err != nil || status != 200 || hdr.Get(openai.HeaderResumed) != fmt.Sprint(len(r.Tokens)) {
					t.Fatalf("after event %d: %d %v %s", i, status, err, body)
				}
				if rest := tells(t, body); fmt.Sprint(rest) != fmt.Sprint(whole[i+1:]) {
					t.Errorf("after event %d:\n%v\nwant\n%v", i, rest, whole[i+1:])
				}
			}
		})
	}
}

// Without being asked, and where a stream has several choices, nothing is told; and who never began cannot go on.
func TestResumeIsAskedFor(t *testing.T) {
	h := newHarness(t, story)
	for _, c := range []struct{ body, header string }{
		{chatBody + `,"stream":true}`, ""}, {chatBody + `,"stream":true,"n":2}`, "1"}, {chatBody + `}`, "1"},
	} {
		if _, body, hdr, _ := h.post("/v1/chat/completions", c.body, openai.HeaderTokens, c.header); strings.Contains(body, "baton-tokens") || hdr.Get(openai.HeaderTokens) != "" {
			t.Errorf("%+v: told: %s", c, body)
		}
	}
	for _, bad := range []string{
		`"stream":true,"baton_resume":{}`, `"stream":true,"baton_resume":{"tokens":null}`, `"stream":true,"baton_resume":[1]`, `"stream":true,"baton_resume":{"tokens":["a"]}`,
		`"baton_resume":{"tokens":[72]}`, `"stream":true,"n":2,"baton_resume":{"tokens":[72]}`, `"stream":true,"max_tokens":2,"baton_resume":{"tokens":[72,101]}`,
		`"stream":true,"baton_resume":{"tokens":[72],"created":-1}`, `"stream":true,"baton_resume":{"tokens":[72,101],"logprobs":[[-1,72,null]]}`,
		`"stream":true,"baton_resume":{"tokens":[72],"logprobs":[[-1,72]]}`, `"stream":true,"baton_resume":{"tokens":[72],"id":"` + strings.Repeat("x", 300) + `"}`,
		`"stream":true,"baton_resume":{"tokens":[72],"elapsed_ms":9223372036854775807}`,
	} {
		status, body, _, _ := h.post("/v1/chat/completions", chatBody+`,`+bad+`}`)
		if status != 400 || !strings.Contains(body, "baton_resume") {
			t.Errorf("%s: %d %s", bad, status, body)
		}
	}
}
