package router

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
)

// errMalformed marks an answer that is not what the protocol says.
var errMalformed = errors.New("malformed answer")

// finish is how one choice ended.
type finish struct {
	index  int
	reason string
	// message and status come with SGLang's reasons, which are objects.
	message string
	status  int
}

// failed: the worker gave up, although it says 200.
func (f finish) failed() bool { return f.reason == "abort" || f.reason == "error" }

// cause of a failed finish, as an error for the client. An abort that somebody asked
// for must not be tried again; one that the worker calls its own fault may be.
func (f finish) err(side room.Side, phase string) *openai.Error {
	code, retry := room.CodeAborted, false
	switch {
	case f.status >= 500, f.status == 0 && f.reason == "error": // nobody asks for an error
		code, retry = room.CodeEngine, true
	case f.status >= 400:
		code = room.CodeInvalid
	}
	msg := f.message
	if msg == "" {
		msg = "no reason given"
	}
	e := openai.FromCause(&room.Cause{
		Code: code, Side: side, Phase: phase, Retryable: retry,
		Detail: fmt.Sprintf("the worker ended choice %d with finish reason %q: %s", f.index, f.reason, msg),
	})
	if f.status >= 400 && f.status < 600 {
		e.Status = f.status
	}
	return e
}

// answer is the part of an answer or of one event of it that tells how far it is.
type answer struct {
	Object  string          `json:"object"`
	Error   json.RawMessage `json:"error"`
	Choices []choiceOf      `json:"choices"`
	// /generate
	Index     int             `json:"index"`
	Text      string          `json:"text"`
	OutputIDs []int           `json:"output_ids"`
	Meta      *metaOf         `json:"meta_info"`
	Usage     json.RawMessage `json:"usage"`
}

// choiceOf is one choice of an answer, metaOf what /generate says beside the text. quick knows their fields, too.
type choiceOf struct {
	Index  int             `json:"index"`
	Finish json.RawMessage `json:"finish_reason"`
	Text   string          `json:"text"`
	Delta  struct {
		Content   string          `json:"content"`
		Reasoning string          `json:"reasoning_content"`
		Tools     json.RawMessage `json:"tool_calls"`
	} `json:"delta"`
}

type metaOf struct {
	Finish     json.RawMessage `json:"finish_reason"`
	Prompt     json.RawMessage `json:"prompt_tokens"`
	Completion json.RawMessage `json:"completion_tokens"`
}

// finishes lists the choices that ended.
func (a *answer) finishes() ([]finish, error) {
	var out []finish
	add := func(index int, raw json.RawMessage) error {
		f, err := parseFinish(index, raw)
		if err == nil && f.reason != "" {
			out = append(out, f)
		}
		return err
	}
	for _, c := range a.Choices {
		if err := add(c.Index, c.Finish); err != nil {
			return nil, err
		}
	}
	if a.Meta != nil {
		if err := add(a.Index, a.Meta.Finish); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// about tells whether the event goes on with choices that have ended (old), by text or by another finish, and with ones that have not (fresh).
func (a *answer) about(ended map[int]bool) (old, fresh bool) {
	add := func(index int, text bool, reason json.RawMessage) {
		if text || len(reason) > 0 && !isNull(reason) {
			old, fresh = old || ended[index], fresh || !ended[index]
		}
	}
	for i := range a.Choices {
		add(a.Choices[i].Index, a.choiceContent(i), a.Choices[i].Finish)
	}
	var reason json.RawMessage
	if a.Meta != nil {
		reason = a.Meta.Finish
	}
	add(a.Index, a.Text != "" || len(a.OutputIDs) > 0, reason)
	return old, fresh
}

func (a *answer) choiceContent(i int) bool {
	c := &a.Choices[i]
	return c.Text != "" || c.Delta.Content != "" || c.Delta.Reasoning != "" || len(c.Delta.Tools) > 0 && !isNull(c.Delta.Tools)
}

// content reports whether the event carries some of the answer itself.
func (a *answer) content() bool {
	for i := range a.Choices {
		if a.choiceContent(i) {
			return true
		}
	}
	return a.Text != "" || len(a.OutputIDs) > 0
}

// parseFinish reads a finish reason: null, OpenAI's string, or SGLang's object. No reason gives "".
func parseFinish(index int, raw json.RawMessage) (finish, error) {
	f := finish{index: index}
	if len(raw) == 0 || isNull(raw) {
		return f, nil
	}
	if q := (quick{b: raw}); q.text(&f.reason) && q.end() {
		return f, nil
	}
	if json.Unmarshal(raw, &f.reason) == nil {
		return f, nil
	}
	var o struct {
		Type    string `json:"type"`
		Message string `json:"message"`
		Status  int    `json:"status_code"`
	}
	if err := json.Unmarshal(raw, &o); err != nil || o.Type == "" {
		return f, fmt.Errorf("%w: finish reason %.64q", errMalformed, raw)
	}
	f.reason, f.message, f.status = o.Type, o.Message, o.Status
	return f, nil
}

// judge looks at a whole answer that came with status 200. e is a failure it tells
// of; err wraps errMalformed if it is not a complete answer. side and phase say
// where it came from.
func judge(kind openai.Kind, body []byte, side room.Side, phase string) (e *openai.Error, err error) {
	_, e, err = judgeUsage(kind, 0, body, side, phase)
	return e, err
}

// judgeUsage is judge, and the tokens that the answer says it has. It wants so many finished choices at least.
func judgeUsage(kind openai.Kind, choices int, body []byte, side room.Side, phase string) (u usage, e *openai.Error, err error) {
	var list []answer
	body = bytes.TrimSpace(body)
	if len(body) > 0 && body[0] == '[' && kind == openai.KindGenerate {
		err = json.Unmarshal(body, &list)
	} else {
		list = make([]answer, 1)
		err = decodeAnswer(body, &list[0])
	}
	if err != nil {
		return u, nil, fmt.Errorf("%w: %w", errMalformed, err)
	}
	ended := 0
	for i := range list {
		if e := list[i].failure(body, side, phase); e != nil {
			return u, e, nil
		}
		one := list[i].usage()
		u.Prompt, u.Completion = u.Prompt+one.Prompt, u.Completion+one.Completion
		ends, err := list[i].finishes()
		if err != nil {
			return u, nil, err
		}
		for _, f := range ends {
			if f.failed() {
				return u, f.err(side, phase), nil
			}
		}
		if kind != openai.KindGenerate && (len(list[i].Choices) == 0 || len(ends) < len(list[i].Choices)) {
			return u, nil, fmt.Errorf("%w: %d choices, %d of them finished", errMalformed, len(list[i].Choices), len(ends))
		}
		ended += len(ends)
	}
	if ended < choices {
		return u, nil, fmt.Errorf("%w: only %d of %d choices are there and finished", errMalformed, ended, choices)
	}
	return u, nil, nil
}

// failure is the error object of an answer or event, nil if it has none.
func (a *answer) failure(body []byte, side room.Side, phase string) *openai.Error {
	if len(a.Error) > 0 && !isNull(a.Error) {
		e := openai.ParseErrorEvent(body, side, phase)
		if e != nil && e.Cause.Code == room.CodeEngine && !ownError(body) {
			e.Cause.Retryable = true // another worker may not share it; after the first byte nothing is retried anyway
		}
		return e
	}
	if a.Object == "error" { // an older form of vLLM's
		return openai.ParseError(http.StatusInternalServerError, body, side, phase)
	}
	return nil
}
