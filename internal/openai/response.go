package openai

import (
	"encoding/json"
	"errors"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Usage counts tokens. Total is the sum of the other two.
type Usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
}

// NewUsage fills in the total.
func NewUsage(prompt, completion int) Usage {
	return Usage{PromptTokens: prompt, CompletionTokens: completion, TotalTokens: prompt + completion}
}

// Objects as named in answers.
const (
	ObjectChat      = "chat.completion"
	ObjectChatChunk = "chat.completion.chunk"
	ObjectText      = "text_completion"
)

// ChatCompletion is the answer of /v1/chat/completions.
type ChatCompletion struct {
	ID      string       `json:"id"`
	Object  string       `json:"object"` // ObjectChat
	Created int64        `json:"created"`
	Model   string       `json:"model"`
	Choices []ChatChoice `json:"choices"`
	Usage   Usage        `json:"usage"`
}

// ChatChoice is one answer of a chat.
type ChatChoice struct {
	Index        int           `json:"index"`
	Message      ChatMessage   `json:"message"`
	Logprobs     *ChatLogprobs `json:"logprobs"`
	FinishReason string        `json:"finish_reason"`
}

// ChatMessage is the assistant's turn.
type ChatMessage struct {
	Role    string  `json:"role"`
	Content string  `json:"content"`
	Refusal *string `json:"refusal"`
}

// ChatChunk is one event of a streamed chat.
type ChatChunk struct {
	ID      string            `json:"id"`
	Object  string            `json:"object"` // ObjectChatChunk
	Created int64             `json:"created"`
	Model   string            `json:"model"`
	Choices []ChatChunkChoice `json:"choices"`
	Usage   json.RawMessage   `json:"usage,omitempty"` // see StreamUsage
}

// ChatChunkChoice is a piece of one answer.
type ChatChunkChoice struct {
	Index        int           `json:"index"`
	Delta        ChatDelta     `json:"delta"`
	Logprobs     *ChatLogprobs `json:"logprobs"`
	FinishReason *string       `json:"finish_reason"`
}

// ChatDelta is what a chunk adds.
type ChatDelta struct {
	Role    string  `json:"role,omitempty"`
	Content *string `json:"content,omitempty"`
}

// ChatLogprobs is the chat style of logprobs.
type ChatLogprobs struct {
	Content []ChatTokenLogprob `json:"content"`
}

// ChatTokenLogprob is one token with its alternatives. Bytes are exact; Token is
// text, with replacement characters if the token is part of a character.
type ChatTokenLogprob struct {
	Token       string           `json:"token"`
	Logprob     float64          `json:"logprob"`
	Bytes       []int            `json:"bytes"`
	TopLogprobs []ChatTopLogprob `json:"top_logprobs"`
}

// ChatTopLogprob is one alternative.
type ChatTopLogprob struct {
	Token   string  `json:"token"`
	Logprob float64 `json:"logprob"`
	Bytes   []int   `json:"bytes"`
}

// TextCompletion is the answer of /v1/completions and, with one choice's piece at a
// time, its stream events.
type TextCompletion struct {
	ID      string          `json:"id"`
	Object  string          `json:"object"` // ObjectText
	Created int64           `json:"created"`
	Model   string          `json:"model"`
	Choices []TextChoice    `json:"choices"`
	Usage   json.RawMessage `json:"usage,omitempty"` // see StreamUsage
}

// TextChoice is one answer, or a piece of it.
type TextChoice struct {
	Index        int           `json:"index"`
	Text         string        `json:"text"`
	Logprobs     *TextLogprobs `json:"logprobs"`
	FinishReason *string       `json:"finish_reason"`
}

// TextLogprobs is the older style of logprobs: parallel lists. TextOffset counts
// characters from the start of the choice's text.
type TextLogprobs struct {
	Tokens        []string             `json:"tokens"`
	TokenLogprobs []float64            `json:"token_logprobs"`
	TopLogprobs   []map[string]float64 `json:"top_logprobs"`
	TextOffset    []int                `json:"text_offset"`
}

// StreamUsage is the usage field of a stream event: absent unless the client asked,
// then null in every event but the last, which has the counts and no choices.
func StreamUsage(asked bool, u *Usage) json.RawMessage {
	if !asked {
		return nil
	}
	if u == nil {
		return json.RawMessage("null")
	}
	raw, err := json.Marshal(u)
	if err != nil { // three ints always marshal
		return json.RawMessage("null")
	}
	return raw
}

// Generated is the answer of /generate for one choice. In a stream Text and OutputIDs are
// all so far, as SGLang's are.
type Generated struct {
	Text      string  `json:"text"`
	OutputIDs []int32 `json:"output_ids"`
	Meta      Meta    `json:"meta_info"`
	Index     *int    `json:"index,omitempty"` // in streams of several choices
}

// Meta is /generate's meta_info.
type Meta struct {
	ID                  string            `json:"id"`
	FinishReason        *GenerateFinish   `json:"finish_reason"` // null while running
	PromptTokens        int               `json:"prompt_tokens"`
	CompletionTokens    int               `json:"completion_tokens"`
	CachedTokens        int               `json:"cached_tokens"`
	E2ELatency          *float64          `json:"e2e_latency,omitempty"` // seconds
	OutputTokenLogprobs []GenerateLogprob `json:"output_token_logprobs,omitempty"`
	OutputTopLogprobs   []GenerateTop     `json:"output_top_logprobs,omitempty"`
}

// GenerateFinish is SGLang's finish reason: {"type":"stop","matched":...} or {"type":"length","length":n}.
type GenerateFinish struct {
	Type    string `json:"type"`
	Matched any    `json:"matched,omitempty"` // the stop string, or the token's id
	Length  int    `json:"length,omitempty"`
}

// GenerateLogprob is written as [logprob, id, text or null].
type GenerateLogprob struct {
	Logprob float64
	ID      int32
	Text    *string
}

// MarshalJSON writes the triple.
func (g GenerateLogprob) MarshalJSON() ([]byte, error) {
	return Marshal([]any{g.Logprob, g.ID, g.Text})
}

// UnmarshalJSON reads the triple.
func (g *GenerateLogprob) UnmarshalJSON(b []byte) error {
	*g = GenerateLogprob{}
	parts := []any{&g.Logprob, &g.ID, &g.Text}
	if err := json.Unmarshal(b, &parts); err != nil {
		return err
	}
	if len(parts) != 3 {
		return errors.New("a logprob is [number, token, text or null]")
	}
	return nil
}

// GenerateTop is the alternatives of one token.
type GenerateTop []GenerateLogprob

// Model is one entry of /v1/models.
type Model struct {
	ID          string `json:"id"`
	Object      string `json:"object"` // "model"
	Created     int64  `json:"created"`
	OwnedBy     string `json:"owned_by"`
	Root        string `json:"root"`
	MaxModelLen int    `json:"max_model_len"` // tokens of prompt and answer
}

// ModelList is the answer of /v1/models.
type ModelList struct {
	Object string  `json:"object"` // "list"
	Data   []Model `json:"data"`
}

// NewModel describes the served model.
func NewModel(name string, created int64, maxLen int) Model {
	return Model{ID: name, Object: "model", Created: created, OwnedBy: "baton", Root: name, MaxModelLen: maxLen}
}

// minLogprob stands for minus infinity, which JSON cannot hold. OpenAI shows the same number.
const minLogprob = -9999.0

// JSONLogprob is a logprob that JSON can hold.
func JSONLogprob(v float32) float64 {
	f := float64(v)
	if math.IsNaN(f) || f < minLogprob {
		return minLogprob
	}
	if f > 0 {
		return 0
	}
	return f
}

// TokenText is the text shown for a token in chat logprobs.
func TokenText(b []byte) string { return strings.ToValidUTF8(string(b), "\uFFFD") }

// TokenKey is the text shown for a token in completion logprobs, where texts are
// keys and must differ: a part of a character is written "bytes:\xNN".
func TokenKey(b []byte) string {
	if utf8.Valid(b) {
		return string(b)
	}
	var s strings.Builder
	s.WriteString("bytes:")
	for _, c := range b {
		s.WriteString(`\x`)
		if c < 16 {
			s.WriteByte('0')
		}
		s.WriteString(strconv.FormatUint(uint64(c), 16))
	}
	return s.String()
}

// TokenBytes is a token's bytes as a list of numbers, never null.
func TokenBytes(b []byte) []int {
	out := make([]int, len(b))
	for i, c := range b {
		out[i] = int(c)
	}
	return out
}
