package accesslog

import (
	"bytes"
	"encoding/json"
	"strconv"
	"time"

	"github.com/baton-pd/baton/internal/router/record"
)

// line is one request. What is not known, or was not reached, is left out. Times are milliseconds; the moments (first_byte,
// first_token, total) count from the request's arrival.
type line struct {
	Time    string `json:"time"` // of the arrival, RFC 3339, UTC
	ID      uint64 `json:"id"`   // number in this router's life
	Request string `json:"request_id,omitempty"`
	RID     string `json:"rid,omitempty"`
	Key     string `json:"key,omitempty"`
	Client  string `json:"client,omitempty"`
	Path    string `json:"path"`
	Model   string `json:"model,omitempty"`
	Stream  bool   `json:"stream"`
	Prompts int    `json:"prompts,omitempty"` // if several
	Choices int    `json:"choices,omitempty"` // if several
	Status  int    `json:"status"`            // 0: the client left before
	Outcome string `json:"outcome"`
	*cause
	// Of the last attempt.
	Room    string `json:"room,omitempty"`
	Kind    string `json:"kind,omitempty"`
	Prefill string `json:"prefill,omitempty"`
	Decode  string `json:"decode,omitempty"`

	Attempts int       `json:"attempts"`
	Failed   []attempt `json:"failed_attempts,omitempty"` // those that another followed

	Queue      float64  `json:"queue_ms"`
	PrefillMS  *float64 `json:"prefill_ms,omitempty"` // from sending to the end of the prefill leg
	FirstByte  *float64 `json:"first_byte_ms,omitempty"`
	FirstToken *float64 `json:"first_token_ms,omitempty"`
	DecodeMS   *float64 `json:"decode_ms,omitempty"` // from the first token to the end
	Total      float64  `json:"total_ms"`

	PromptTokens int `json:"prompt_tokens,omitempty"`
	Tokens       int `json:"completion_tokens,omitempty"`
	Events       int `json:"events,omitempty"` // of the stream
}

type cause struct {
	Cause  string `json:"cause"`
	Side   string `json:"side,omitempty"`
	Phase  string `json:"phase,omitempty"`
	Worker string `json:"worker,omitempty"`
	Detail string `json:"detail,omitempty"`
}

type attempt struct {
	Room    string  `json:"room"`
	Prefill string  `json:"prefill,omitempty"`
	Decode  string  `json:"decode,omitempty"`
	MS      float64 `json:"ms"`
	*cause
}

// maxDetail is how much of a cause's words is kept, in bytes.
const maxDetail = 1024

func causeOf(c *record.Cause) *cause {
	if c == nil {
		return nil
	}
	out := &cause{Cause: c.Code, Side: c.Side, Phase: c.Phase, Worker: c.Worker, Detail: c.Detail}
	if len(out.Detail) > maxDetail {
		out.Detail = out.Detail[:maxDetail] + "..."
	}
	return out
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// moment is nil for one that did not come.
func moment(d time.Duration) *float64 {
	if d == record.Never {
		return nil
	}
	v := ms(d)
	return &v
}

func lineOf(r *record.Record) line {
	l := line{
		Time: r.Start.UTC().Format("2006-01-02T15:04:05.000Z07:00"), ID: r.ID, Request: r.RequestID, RID: r.RID, Key: r.Key, Client: r.Client, Path: r.Path, Model: r.Model,
		Stream: r.Stream, Status: r.Status, Outcome: r.Outcome, cause: causeOf(r.Cause), Attempts: len(r.Attempts),
		Queue: ms(r.Queue), FirstByte: moment(r.FirstByte), FirstToken: moment(r.FirstToken()), Total: ms(r.End),
		PromptTokens: r.PromptTokens, Tokens: r.Tokens, Events: r.Events,
	}
	if r.Prompts > 1 {
		l.Prompts = r.Prompts
	}
	if r.Choices > 1 {
		l.Choices = r.Choices
	}
	a := r.Last()
	if a == nil {
		return l
	}
	l.Room, l.Kind, l.Prefill, l.Decode = strconv.FormatUint(a.Room, 10), a.Kind, a.Prefill, a.Decode
	if a.PrefillEnd != record.Never {
		l.PrefillMS = moment(a.PrefillEnd - a.Start)
	}
	if a.FirstToken != record.Never {
		l.DecodeMS = moment(r.End - a.FirstToken)
	}
	for i := range r.Attempts[:len(r.Attempts)-1] {
		f := &r.Attempts[i]
		l.Failed = append(l.Failed, attempt{
			Room: strconv.FormatUint(f.Room, 10), Prefill: f.Prefill, Decode: f.Decode, MS: ms(f.End - f.Start), cause: causeOf(f.Cause),
		})
	}
	return l
}

// appendLine writes r as one line to b.
func appendLine(b *bytes.Buffer, r *record.Record) {
	e := json.NewEncoder(b)
	e.SetEscapeHTML(false)
	_ = e.Encode(lineOf(r)) // strings and numbers always marshal, into memory
}
