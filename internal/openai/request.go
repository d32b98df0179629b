package openai

import (
	"encoding/json"
	"fmt"
	"math"
	"sort"
	"strings"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/room"
)

// Kind is the endpoint a request was made for.
type Kind uint8

const (
	KindChat       Kind = 1 // /v1/chat/completions
	KindCompletion Kind = 2 // /v1/completions
	KindGenerate   Kind = 3 // SGLang's /generate
)

// Bounds of a request. A value outside is refused with 400, naming field and range.
const (
	MaxN           = 128  // choices a prompt
	MaxPrompts     = 128  // prompts a request
	MaxChoices     = 256  // prompts times n
	MaxStops       = 16   // stop strings
	MaxStopBytes   = 1024 // bytes a stop string
	MaxMessages    = 4096 // messages of a chat
	MaxLogitBias   = 1024 // entries of logit_bias
	MaxTopLogprobs = 20   // alternatives a token
	MaxRIDBytes    = 128  // bytes of a request id
	MaxTokensLimit = 1 << 24
)

// Defaults where a request says nothing: those of OpenAI and SGLang.
const (
	DefaultCompletionTokens = 16
	DefaultGenerateTokens   = 128
)

// Request is a checked request of any of the three endpoints. It says what the
// client wants; whether it fits the model is the worker's to find out.
type Request struct {
	Kind     Kind
	Model    string // "" if absent
	Messages []Message
	Prompts  []Prompt // completions and generate: at least one
	// Batch: the prompt came as a list, so /generate answers with a list.
	Batch bool

	Stream       bool
	IncludeUsage bool // stream_options.include_usage
	N            int  // choices a prompt, >= 1
	// MaxTokens a choice; 0: until the context is full.
	MaxTokens int
	Stop      []string
	Sampling  engine.Sampling // Seed is meaningful only if HasSeed
	HasSeed   bool
	IgnoreEOS bool
	// Logprobs is as engine.Row.Logprobs: 0 none, k: the chosen and the k-1 most likely.
	Logprobs int
	// TextInLogprobs: /generate shows the text of tokens in its logprobs.
	TextInLogprobs bool
	Echo           bool // completions: the prompt's text comes first

	RID []string // client's request ids: none, one, or one a prompt
	// Bootstrap is empty or has one entry a prompt (chat: exactly one, whatever n is).
	Bootstrap []Bootstrap
	// Resume is the answer's beginning, if another worker has begun it; otherwise nil.
	Resume *Resume

	chatLogprobs, topLogprobs int // -1 absent
	maxTokensLegacy           int
	bootHosts                 []string
	bootPorts                 []int
	bootRooms                 []uint64
	bootGen                   uint32
	bestOf                    int
	streamOptions             bool
}

// Message is one turn of a chat.
type Message struct {
	Role    string // system, developer, user or assistant
	Content string
}

// Prompt is text or tokens.
type Prompt struct {
	Text     string
	Tokens   []engine.Token
	IsTokens bool
}

// Bootstrap is a prompt's room and the prefill worker that computes it.
type Bootstrap struct {
	Host string
	Port int // 0: not given
	Key  room.Key
}

// Choices is the number of answers wanted: prompts times n.
func (r *Request) Choices() int { return max(1, len(r.Prompts)) * r.N }

// ParseChat parses a body of /v1/chat/completions. Errors are *Error.
func ParseChat(body []byte) (*Request, error) { return parse(KindChat, body, chatFields) }

// ParseCompletion parses a body of /v1/completions. Errors are *Error.
func ParseCompletion(body []byte) (*Request, error) {
	return parse(KindCompletion, body, completionFields)
}

// ParseGenerate parses a body of /generate. Errors are *Error.
func ParseGenerate(body []byte) (*Request, error) { return parse(KindGenerate, body, generateFields) }

// Parse parses a body for the endpoint kind. Errors are *Error.
func Parse(kind Kind, body []byte) (*Request, error) {
	switch kind {
	case KindChat:
		return ParseChat(body)
	case KindCompletion:
		return ParseCompletion(body)
	case KindGenerate:
		return ParseGenerate(body)
	default:
		return nil, FromCause(&room.Cause{Code: room.CodeInternal, Detail: fmt.Sprintf("no such request kind: %d", kind)})
	}
}

func parse(kind Kind, body []byte, fields fieldTable) (*Request, error) {
	members, err := splitObject(body)
	if err != nil {
		return nil, NewError(400, CodeInvalidBody, "", "%v", err)
	}
	r := &Request{Kind: kind, N: 1, chatLogprobs: -1, topLogprobs: -1, Sampling: engine.Sampling{Temperature: 1}}
	if e := fields.apply(r, members, ""); e != nil {
		return nil, e
	}
	if e := r.finish(); e != nil {
		return nil, e
	}
	return r, nil
}

// finish checks what concerns several fields at once and fills in defaults.
func (r *Request) finish() *Error {
	for _, check := range []func() *Error{
		r.finishInput, r.finishLengths, r.finishStream, r.finishLogprobs, r.finishChoices, r.finishBootstrap, r.finishResume,
	} {
		if e := check(); e != nil {
			return e
		}
	}
	return nil
}

func (r *Request) finishInput() *Error {
	switch {
	case r.Kind == KindChat && len(r.Messages) == 0:
		return invalid("messages", "messages is required and must not be empty")
	case r.Kind == KindCompletion && len(r.Prompts) == 0:
		return invalid("prompt", "prompt is required and must not be empty")
	case r.Kind == KindGenerate && len(r.Prompts) == 0:
		return invalid("text", "text or input_ids is required and must not be empty")
	}
	return nil
}

func (r *Request) finishLengths() *Error {
	if r.maxTokensLegacy != 0 {
		if r.MaxTokens != 0 && r.MaxTokens != r.maxTokensLegacy {
			return invalid("max_tokens", "max_tokens and max_completion_tokens are both given and differ")
		}
		r.MaxTokens = r.maxTokensLegacy
	}
	if r.MaxTokens == 0 {
		switch r.Kind {
		case KindCompletion:
			r.MaxTokens = DefaultCompletionTokens
		case KindGenerate:
			r.MaxTokens = DefaultGenerateTokens
		case KindChat: // until the context is full
		}
	}
	r.Sampling.IgnoreEOS = r.IgnoreEOS
	return nil
}

func (r *Request) finishStream() *Error {
	if r.streamOptions && !r.Stream {
		return invalid("stream_options", "stream_options is only allowed with stream=true")
	}
	return nil
}

func (r *Request) finishLogprobs() *Error {
	switch r.Kind {
	case KindChat, KindGenerate:
		name, switchName := "top_logprobs", "logprobs"
		if r.Kind == KindGenerate {
			name, switchName = "top_logprobs_num", "return_logprob"
		}
		if r.topLogprobs > 0 && r.chatLogprobs != 1 {
			return invalid(name, "%s needs %s=true", name, switchName)
		}
		if r.chatLogprobs == 1 {
			r.Logprobs = 1 + max(0, r.topLogprobs)
		}
	case KindCompletion:
		if r.Echo && r.Logprobs > 0 {
			return NewError(400, CodeUnsupportedField, "echo", "echo together with logprobs is not supported")
		}
	}
	return nil
}

func (r *Request) finishChoices() *Error {
	if c := r.Choices(); c > MaxChoices {
		return invalid("n", "%d prompts with n=%d are %d choices; at most %d", len(r.Prompts), r.N, c, MaxChoices)
	}
	if r.bestOf != 0 && r.bestOf != r.N {
		return NewError(400, CodeUnsupportedField, "best_of", "best_of is only supported when equal to n")
	}
	if n := len(r.RID); n > 1 && n != max(1, len(r.Prompts)) {
		return invalid("rid", "rid has %d entries for %d prompts", n, max(1, len(r.Prompts)))
	}
	return nil
}

func (r *Request) finishBootstrap() *Error {
	prompts := max(1, len(r.Prompts))
	if len(r.bootRooms) == 0 {
		if len(r.bootHosts) > 0 || len(r.bootPorts) > 0 || r.bootGen != 0 {
			return invalid("bootstrap_room", "bootstrap_room is required with the other bootstrap fields")
		}
		return nil
	}
	if r.Model == modelOfRouters {
		r.Model = ""
	}
	r.oneRoomForChoices(prompts)
	if len(r.bootRooms) != prompts {
		return invalid("bootstrap_room", "bootstrap_room has %d rooms for %d prompts; each prompt needs its own", len(r.bootRooms), prompts)
	}
	seen := map[uint64]bool{}
	for i, id := range r.bootRooms {
		if seen[id] {
			return invalid("bootstrap_room", "room %d is given to two prompts", id)
		}
		seen[id] = true
		b := Bootstrap{Key: room.Key{Room: id, Gen: r.bootGen}}
		var ok bool
		if b.Host, ok = pick(r.bootHosts, i, prompts); !ok {
			return invalid("bootstrap_host", "bootstrap_host has %d entries for %d prompts", len(r.bootHosts), prompts)
		}
		if b.Port, ok = pick(r.bootPorts, i, prompts); !ok {
			return invalid("bootstrap_port", "bootstrap_port has %d entries for %d prompts", len(r.bootPorts), prompts)
		}
		r.Bootstrap = append(r.Bootstrap, b)
	}
	return nil
}

// modelOfRouters is what sglang-router and smg write into a request whose client named no
// model. It counts as none only beside a room: clients of their own have no such habit.
const modelOfRouters = "unknown"

// oneRoomForChoices cuts lists with one entry a choice down to the first. SGLang computes a
// prompt once for each of its n choices, so its routers make n rooms for one prompt; here the
// choices share a prompt's KV, and both workers get the same list.
func (r *Request) oneRoomForChoices(prompts int) {
	if prompts != 1 || r.N == 1 || len(r.bootRooms) != r.N {
		return
	}
	r.bootRooms = r.bootRooms[:1]
	if len(r.bootHosts) == r.N {
		r.bootHosts = r.bootHosts[:1]
	}
	if len(r.bootPorts) == r.N {
		r.bootPorts = r.bootPorts[:1]
	}
}

// pick is entry i of a list that holds none, one for all, or one a prompt.
func pick[T any](list []T, i, prompts int) (v T, ok bool) {
	switch len(list) {
	case 0:
		return v, true
	case prompts:
		return list[i], true
	case 1:
		return list[0], true
	default:
		return v, false
	}
}

// fieldFunc takes one field's checked JSON value, which is not null. name is for messages.
type fieldFunc func(r *Request, name string, raw []byte) *Error

type fieldTable map[string]fieldFunc

// apply gives every member to its field. Unknown names are refused together,
// before any value is looked at. prefix names the enclosing object ("sampling_params.").
func (t fieldTable) apply(r *Request, members []member, prefix string) *Error {
	var unknown []string
	for _, m := range members {
		if t[m.key] == nil && !isNull(m.raw) {
			unknown = append(unknown, prefix+clip(m.key))
		}
	}
	if len(unknown) > 0 {
		sort.Strings(unknown)
		shown := unknown[:min(len(unknown), 16)]
		return NewError(400, CodeUnsupportedField, unknown[0], "unsupported field: %s", strings.Join(shown, ", "))
	}
	for _, m := range members {
		if isNull(m.raw) {
			continue
		}
		if e := t[m.key](r, prefix+m.key, m.raw); e != nil {
			return e
		}
	}
	return nil
}

// join makes one table of several; later ones win.
func join(tables ...fieldTable) fieldTable {
	out := fieldTable{}
	for _, t := range tables {
		for k, f := range t {
			out[k] = f
		}
	}
	return out
}

// number is a float field with lo <= v <= hi (lo < v if open).
func number(lo, hi float64, open bool, set func(*Request, float32)) fieldFunc {
	bracket := "["
	if open {
		bracket = "("
	}
	return func(r *Request, name string, raw []byte) *Error {
		var v float64
		if json.Unmarshal(raw, &v) != nil {
			return invalid(name, "%s must be a number in %s%g, %g]", name, bracket, lo, hi)
		}
		if v < lo || v > hi || open && v == lo {
			return invalid(name, "%s is %g; it must be in %s%g, %g]", name, v, bracket, lo, hi)
		}
		set(r, float32(v))
		return nil
	}
}

// integer is a whole-number field with lo <= v <= hi.
func integer(lo, hi int64, set func(*Request, int64)) fieldFunc {
	return func(r *Request, name string, raw []byte) *Error {
		v, e := wholeNumber(name, raw, lo, hi)
		if e == nil {
			set(r, v)
		}
		return e
	}
}

func wholeNumber(name string, raw []byte, lo, hi int64) (int64, *Error) {
	var v int64
	if isNull(raw) || json.Unmarshal(raw, &v) != nil {
		return 0, invalid(name, "%s must be a whole number in [%d, %d]", name, lo, hi)
	}
	if v < lo || v > hi {
		return 0, invalid(name, "%s is %d; it must be in [%d, %d]", name, v, lo, hi)
	}
	return v, nil
}

// boolean is a true/false field.
func boolean(set func(*Request, bool)) fieldFunc {
	return func(r *Request, name string, raw []byte) *Error {
		var v bool
		if json.Unmarshal(raw, &v) != nil {
			return invalid(name, "%s must be true or false", name)
		}
		set(r, v)
		return nil
	}
}

// text is a string field of at most most bytes.
func text(most int, set func(*Request, string)) fieldFunc {
	return func(r *Request, name string, raw []byte) *Error {
		v, e := str(name, raw, most)
		if e == nil {
			set(r, v)
		}
		return e
	}
}

func str(name string, raw []byte, most int) (string, *Error) {
	var v string
	if isNull(raw) || json.Unmarshal(raw, &v) != nil {
		return "", invalid(name, "%s must be a string", name)
	}
	if len(v) > most {
		return "", invalid(name, "%s has %d bytes; at most %d", name, len(v), most)
	}
	return v, nil
}

// only accepts a field Baton does not support if its value asks for nothing.
// values are compact JSON.
func only(values ...string) fieldFunc {
	return func(_ *Request, name string, raw []byte) *Error {
		compact := compactJSON(raw)
		for _, v := range values {
			if compact == v {
				return nil
			}
		}
		return NewError(400, CodeUnsupportedField, name, "unsupported field: %s (only %s is accepted)", name, strings.Join(values, " or "))
	}
}

func compactJSON(raw []byte) string {
	var v any
	if json.Unmarshal(raw, &v) != nil {
		return string(raw)
	}
	if f, ok := v.(float64); ok && f == math.Trunc(f) && math.Abs(f) < 1e15 {
		return fmt.Sprintf("%d", int64(f))
	}
	b, err := Marshal(v)
	if err != nil {
		return string(raw)
	}
	return string(b)
}
