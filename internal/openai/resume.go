package openai

import (
	"encoding/json"
	"math"
	"time"

	"github.com/baton-pd/baton/internal/engine"
)

// FieldResume is the body's field by which a router has an answer go on that another worker began, see [Resume]. Routers
// take it out of what clients send.
const FieldResume = "baton_resume"

// HeaderTokens, with value 1, asks a decode worker for the token ids of a stream with one choice. Its answer has the same header
// then, and each event with text begins with a comment line, as [AppendTokens] writes it.
const HeaderTokens = "X-Baton-Token-Ids"

// HeaderResumed is in the answer to a request with [FieldResume]: the number of tokens after which it goes on.
const HeaderResumed = "X-Baton-Resumed"

// Resume is the beginning of an answer that its client has. The request is the one that began it; the events go on after these
// tokens, and count them.
type Resume struct {
	Tokens  []engine.Token // none: the answer had begun, but had no text yet
	ID      string         // of the answer, as its events show it; "": a new one
	Created int64          // as its events show it, in seconds; 0: now
	Elapsed time.Duration  // since the client's request
	// Logprobs and Top are what /generate repeats in each event: one entry a token, or none. Entries of Top have the shape of
	// GenerateTop.
	Logprobs []GenerateLogprob
	Top      []GenerateTop
}

// wireResume is Resume as JSON.
type wireResume struct {
	Tokens   []engine.Token    `json:"tokens"` // null is missing
	ID       string            `json:"id,omitempty"`
	Created  int64             `json:"created,omitempty"`
	Elapsed  int64             `json:"elapsed_ms,omitempty"`
	Logprobs []GenerateLogprob `json:"logprobs,omitempty"`
	Top      []GenerateTop     `json:"top,omitempty"`
}

// MarshalJSON writes the field's value.
func (r *Resume) MarshalJSON() ([]byte, error) {
	return Marshal(wireResume{r.Tokens, r.ID, r.Created, r.Elapsed.Milliseconds(), r.Logprobs, r.Top})
}

// resume takes the field.
func resume(r *Request, name string, raw []byte) *Error {
	var w wireResume
	if len(raw) == 0 || raw[0] != '{' || json.Unmarshal(raw, &w) != nil {
		return invalid(name, "%s must be an object with the tokens of an answer", name)
	}
	switch {
	case w.Tokens == nil:
		return invalid(name, "%s.tokens must be a list of tokens", name)
	case len(w.ID) > 2*MaxRIDBytes:
		return invalid(name, "%s.id has %d bytes; at most %d", name, len(w.ID), 2*MaxRIDBytes)
	case w.Created < 0 || w.Elapsed < 0 || w.Elapsed > math.MaxInt64/int64(time.Millisecond):
		return invalid(name, "%s: created and elapsed_ms must not be negative, or too large", name)
	case len(w.Logprobs) != 0 && len(w.Logprobs) != len(w.Tokens), len(w.Top) != 0 && len(w.Top) != len(w.Logprobs):
		return invalid(name, "%s: logprobs and top must have an entry for each token", name)
	}
	r.Resume = &Resume{w.Tokens, w.ID, w.Created, time.Duration(w.Elapsed) * time.Millisecond, w.Logprobs, w.Top}
	return nil
}

func (r *Request) finishResume() *Error {
	if r.Resume == nil {
		return nil
	}
	switch n := len(r.Resume.Tokens); {
	case !r.Stream || r.Choices() != 1:
		return invalid(FieldResume, "%s is for streams with one choice", FieldResume)
	case r.MaxTokens > 0 && n >= r.MaxTokens:
		return invalid(FieldResume, "%s has %d tokens; max_tokens is %d", FieldResume, n, r.MaxTokens)
	case r.Kind == KindGenerate && r.Logprobs > 0 && (len(r.Resume.Logprobs) != n || r.Logprobs > 1 && len(r.Resume.Top) != n):
		return invalid(FieldResume, "%s lacks the logprobs of its tokens", FieldResume)
	}
	return nil
}
