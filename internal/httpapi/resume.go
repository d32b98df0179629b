package httpapi

import (
	"net/http"
	"strconv"
	"unicode/utf8"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/sched"
)

// goOn makes c what it was where another worker told the last of r's tokens.
func (c *choice) goOn(r *openai.Resume, tok engine.Tokenizer) {
	c.started, c.count, c.before = true, len(r.Tokens), len(r.Tokens)
	var text []byte
	for i, t := range r.Tokens {
		ev := sched.TokenEvent{ID: t, Bytes: tok.Piece(t)}
		if i < len(r.Logprobs) {
			ev.Logprob = float32(r.Logprobs[i].Logprob)
		}
		if i < len(r.Top) {
			for _, a := range r.Top[i] {
				ev.Top = append(ev.Top, engine.TokenLogprob{Token: engine.Token(a.ID), Logprob: float32(a.Logprob)})
			}
		}
		c.tokens, c.last = append(c.tokens, ev), t
		text = append(text, ev.Bytes...)
		for _, b := range ev.Bytes {
			if utf8.RuneStart(b) {
				c.chars++
			}
		}
	}
	for len(text) > 0 { // as the scheduler's output: a byte that is no character is one U+FFFD
		r, n := utf8.DecodeRune(text)
		c.text.WriteRune(r)
		text = text[n:]
	}
}

// name sets what the answer's events are called by: an answer that goes on keeps its name and time.
func (f *frame) name(id string) {
	f.id = id
	if r := f.req.Resume; r != nil {
		if r.ID != "" {
			f.id = r.ID
		}
		if r.Created != 0 {
			f.created = r.Created
		}
	}
}

// appendTokens appends the comment that tells the tokens of ev, whose text the next event shows.
func (j *job) appendTokens(buf []byte, ev sched.Event) []byte {
	if ev.Finish != "" { // the last token may be cut by a stop string
		return openai.AppendTokens[engine.Token](buf, nil, true)
	}
	ids := make([]engine.Token, len(ev.Tokens))
	for i, t := range ev.Tokens {
		ids[i] = t.ID
	}
	return openai.AppendTokens(buf, ids, false)
}

// setResumeHeaders says what the stream has for a router.
func (j *job) setResumeHeaders(h http.Header) {
	if j.tellTokens {
		h.Set(openai.HeaderTokens, "1")
	}
	if r := j.req.Resume; r != nil {
		h.Set(openai.HeaderResumed, strconv.Itoa(len(r.Tokens)))
	}
}
