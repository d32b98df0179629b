package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strconv"

	"github.com/baton-pd/baton/internal/engine"
)

// The tables of what each endpoint takes. A name that is not here is refused;
// so is a value that asks for something Baton does not do.
var (
	chatFields       fieldTable
	completionFields fieldTable
	generateFields   fieldTable
	samplingParams   fieldTable
)

func init() {
	chatFields = join(openaiFields, samplingFields, transportFields, inertFields, fieldTable{
		"messages":              messages,
		"max_completion_tokens": integer(1, MaxTokensLimit, func(r *Request, v int64) { r.MaxTokens = int(v) }),
		"logprobs":              boolean(setChatLogprobs),
		"top_logprobs":          integer(0, MaxTopLogprobs, func(r *Request, v int64) { r.topLogprobs = int(v) }),
		"tools":                 only("[]"),
		"tool_choice":           only(`"none"`, `"auto"`),
		"functions":             only("[]"),
		"function_call":         only(`"none"`, `"auto"`),
		"parallel_tool_calls":   only("true", "false"), // says nothing without tools
		"response_format":       only(`{"type":"text"}`),
		"modalities":            only(`["text"]`),
		"add_generation_prompt": only("true"), "continue_final_message": only("false"),
		"chat_template_kwargs": only("{}"),
		// SGLang's reasoning parser; without one both mean nothing there too.
		"separate_reasoning": only("true", "false"), "stream_reasoning": only("true", "false"),
	})
	completionFields = join(openaiFields, samplingFields, transportFields, inertFields, fieldTable{
		"prompt":   prompt,
		"echo":     boolean(func(r *Request, v bool) { r.Echo = v }),
		"suffix":   only(`""`),
		"best_of":  integer(1, MaxN, func(r *Request, v int64) { r.bestOf = int(v) }),
		"logprobs": integer(0, MaxTopLogprobs, func(r *Request, v int64) { r.Logprobs = int(v) + 1 }),
	})
	samplingParams = join(samplingFields, inertFields, fieldTable{
		"max_new_tokens": integer(1, MaxTokensLimit, func(r *Request, v int64) { r.MaxTokens = int(v) }),
		"min_new_tokens": only("0"),
		"stop":           stop, "n": integer(1, MaxN, func(r *Request, v int64) { r.N = int(v) }),
		"stream_interval": only("1"),
	})
	generateFields = join(transportFields, fieldTable{
		"text": prompt, "input_ids": prompt,
		"model":           text(256, func(r *Request, v string) { r.Model = v }),
		"sampling_params": sampling,
		"stream":          boolean(func(r *Request, v bool) { r.Stream = v }),
		"return_logprob":  boolean(setChatLogprobs),
		"top_logprobs_num": integer(0, MaxTopLogprobs, func(r *Request, v int64) {
			r.topLogprobs = int(v)
		}),
		"return_text_in_logprobs": boolean(func(r *Request, v bool) { r.TextInLogprobs = v }),
		"logprob_start_len":       only("-1"),
		"return_hidden_states":    only("false"),
		"log_metrics":             only("true", "false"), // Baton's own metrics are always kept
		"background":              only("false"),
		// sglang-router and smg write these into every request.
		"no_logs": only("false"), "return_bytes": only("false"), "return_entropy": only("false"),
	})
}

// openaiFields are common to OpenAI's two endpoints.
var openaiFields = fieldTable{
	"model":                text(256, func(r *Request, v string) { r.Model = v }),
	"stream":               boolean(func(r *Request, v bool) { r.Stream = v }),
	"stream_options":       streamOptions,
	"n":                    integer(1, MaxN, func(r *Request, v int64) { r.N = int(v) }),
	"max_tokens":           integer(1, MaxTokensLimit, func(r *Request, v int64) { r.maxTokensLegacy = int(v) }),
	"stop":                 stop,
	"store":                only("false"),
	"service_tier":         only(`"auto"`, `"default"`),
	"return_hidden_states": only("false"),
	// Labels: they never change an answer.
	"user":              text(512, func(*Request, string) {}),
	"safety_identifier": text(512, func(*Request, string) {}),
	"prompt_cache_key":  text(512, func(*Request, string) {}),
	"metadata":          metadata,
}

// samplingFields are in every endpoint (in /generate inside sampling_params).
var samplingFields = fieldTable{
	"temperature":        number(0, 2, false, func(r *Request, v float32) { r.Sampling.Temperature = v }),
	"top_p":              number(0, 1, true, func(r *Request, v float32) { r.Sampling.TopP = v }),
	"min_p":              number(0, 1, false, func(r *Request, v float32) { r.Sampling.MinP = v }),
	"top_k":              integer(-1, math.MaxInt32, func(r *Request, v int64) { r.Sampling.TopK = int(v) }),
	"frequency_penalty":  number(-2, 2, false, func(r *Request, v float32) { r.Sampling.FrequencyPenalty = v }),
	"presence_penalty":   number(-2, 2, false, func(r *Request, v float32) { r.Sampling.PresencePenalty = v }),
	"repetition_penalty": number(0, 2, true, func(r *Request, v float32) { r.Sampling.RepetitionPenalty = v }),
	"seed":               integer(math.MinInt64, math.MaxInt64, setSeed),
	"sampling_seed":      integer(math.MinInt64, math.MaxInt64, setSeed),
	"logit_bias":         logitBias,
	"ignore_eos":         boolean(func(r *Request, v bool) { r.IgnoreEOS = v }),
}

// transportFields carry the room and the request's name.
var transportFields = fieldTable{
	"rid":                    rid,
	"bootstrap_host":         bootHost,
	"bootstrap_port":         bootPort,
	"bootstrap_room":         bootRoom,
	"bootstrap_generation":   integer(0, math.MaxUint32, func(r *Request, v int64) { r.bootGen = uint32(v) }),
	"priority":               integer(-100, 100, func(*Request, int64) {}), // of the router's queue
	FieldResume:              resume,
	"disagg_prefill_dp_rank": only("0"),
	"data_parallel_rank":     only("0"),
	"routed_dp_rank":         only("0"),
}

// inertFields are extensions that other servers' clients and routers send with the
// value that asks for nothing.
var inertFields = fieldTable{
	"min_tokens":                    only("0"),
	"stop_token_ids":                only("[]"),
	"skip_special_tokens":           only("true"),
	"spaces_between_special_tokens": only("true"),
	"no_stop_trim":                  only("false"),
}

func setChatLogprobs(r *Request, v bool) {
	r.chatLogprobs = 0
	if v {
		r.chatLogprobs = 1
	}
}

// setSeed folds 64 bits into the sampler's 32, so that seeds that differ only in
// their upper half differ here too.
func setSeed(r *Request, v int64) {
	r.Sampling.Seed = uint32(uint64(v)) ^ uint32(uint64(v)>>32)
	r.HasSeed = true
}

func sampling(r *Request, name string, raw []byte) *Error {
	members, e := object(name, raw)
	if e != nil {
		return e
	}
	return samplingParams.apply(r, members, name+".")
}

// object splits an object that is a field's value.
func object(name string, raw []byte) ([]member, *Error) {
	members, err := splitObject(raw)
	if err != nil {
		return nil, invalid(name, "%s must be an object", name)
	}
	return members, nil
}

var streamOptionFields = fieldTable{
	"include_usage":          boolean(func(r *Request, v bool) { r.IncludeUsage = v }),
	"include_obfuscation":    only("false"),
	"continuous_usage_stats": only("false"),
}

func streamOptions(r *Request, name string, raw []byte) *Error {
	members, e := object(name, raw)
	if e != nil {
		return e
	}
	r.streamOptions = true
	return streamOptionFields.apply(r, members, name+".")
}

func metadata(_ *Request, name string, raw []byte) *Error {
	members, e := object(name, raw)
	if e != nil {
		return e
	}
	if len(members) > 16 {
		return invalid(name, "metadata has %d entries; at most 16", len(members))
	}
	for _, m := range members {
		if _, e := str(name+"."+clip(m.key), m.raw, 512); e != nil {
			return e
		}
	}
	return nil
}

// oneOrMany applies f to a scalar or to each entry of a list of at most most.
func oneOrMany(name string, raw []byte, most int, f func(raw []byte) *Error) *Error {
	elems, many := splitArray(raw, most)
	if !many {
		return f(raw)
	}
	if len(elems) > most {
		return invalid(name, "%s has more than %d entries", name, most)
	}
	for _, el := range elems {
		if e := f(el); e != nil {
			return e
		}
	}
	return nil
}

func stop(r *Request, name string, raw []byte) *Error {
	return oneOrMany(name, raw, MaxStops, func(raw []byte) *Error {
		s, e := str(name, raw, MaxStopBytes)
		switch {
		case e != nil:
			return e
		case s == "":
			return invalid(name, "stop strings must not be empty")
		}
		r.Stop = append(r.Stop, s)
		return nil
	})
}

func rid(r *Request, name string, raw []byte) *Error {
	return oneOrMany(name, raw, MaxPrompts, func(raw []byte) *Error {
		s, e := str(name, raw, MaxRIDBytes)
		switch {
		case e != nil:
			return e
		case !ValidRID(s):
			return invalid(name, "rid must have 1 to %d visible ASCII characters", MaxRIDBytes)
		}
		r.RID = append(r.RID, s)
		return nil
	})
}

// ValidRID reports whether s may name a request: 1 to MaxRIDBytes visible ASCII
// characters, which are safe in headers and logs.
func ValidRID(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return len(s) > 0 && len(s) <= MaxRIDBytes
}

func bootHost(r *Request, name string, raw []byte) *Error {
	return oneOrMany(name, raw, MaxPrompts, func(raw []byte) *Error {
		s, e := str(name, raw, 255)
		if e == nil && s == "" {
			e = invalid(name, "bootstrap_host must not be empty")
		}
		r.bootHosts = append(r.bootHosts, s)
		return e
	})
}

func bootPort(r *Request, name string, raw []byte) *Error {
	return oneOrMany(name, raw, MaxPrompts, func(raw []byte) *Error {
		if isNull(raw) { // SGLang's router sends null for "the default port"
			r.bootPorts = append(r.bootPorts, 0)
			return nil
		}
		v, e := wholeNumber(name, raw, 1, 65535)
		r.bootPorts = append(r.bootPorts, int(v))
		return e
	})
}

func bootRoom(r *Request, name string, raw []byte) *Error {
	return oneOrMany(name, raw, MaxPrompts, func(raw []byte) *Error {
		v, e := wholeNumber(name, raw, 0, math.MaxInt64)
		r.bootRooms = append(r.bootRooms, uint64(v))
		return e
	})
}

func logitBias(r *Request, name string, raw []byte) *Error {
	members, e := object(name, raw)
	if e != nil {
		return e
	}
	if len(members) > MaxLogitBias {
		return invalid(name, "logit_bias has %d entries; at most %d", len(members), MaxLogitBias)
	}
	for _, m := range members {
		id, err := strconv.ParseInt(m.key, 10, 32)
		if err != nil || id < 0 || strconv.FormatInt(id, 10) != m.key {
			return invalid(name, "logit_bias key %q is not a token id", clip(m.key))
		}
		var bias float64
		if isNull(m.raw) || json.Unmarshal(m.raw, &bias) != nil || bias < -100 || bias > 100 {
			return invalid(name, "logit_bias of token %d must be a number in [-100, 100]", id)
		}
		if r.Sampling.LogitBias == nil {
			r.Sampling.LogitBias = make(map[engine.Token]float32, len(members))
		}
		r.Sampling.LogitBias[engine.Token(id)] = float32(bias)
	}
	return nil
}

// prompt takes a string, a list of strings, a list of tokens, or a list of lists of tokens.
// In /generate the first two are "text" and the others "input_ids".
func prompt(r *Request, name string, raw []byte) *Error {
	if len(r.Prompts) > 0 {
		return invalid(name, "text and input_ids must not both be given")
	}
	wantText, wantTokens := name != "input_ids", name != "text"
	elems, isList := splitArray(raw, MaxPrompts)
	switch {
	case !isList:
		return r.addPrompt(name, raw, wantText, wantTokens && !wantText)
	case len(elems) == 0:
		return invalid(name, "%s must not be empty", name)
	case wantTokens && elems[0][0] != '"' && elems[0][0] != '[':
		return r.addPrompt(name, raw, false, true)
	case len(elems) > MaxPrompts:
		return invalid(name, "%s has more than %d prompts", name, MaxPrompts)
	}
	r.Batch = true
	asText := wantText && (elems[0][0] == '"' || !wantTokens)
	for i, el := range elems {
		if e := r.addPrompt(fmt.Sprintf("%s[%d]", name, i), el, asText, !asText); e != nil {
			return e
		}
	}
	return nil
}

func (r *Request) addPrompt(name string, raw []byte, asText, asTokens bool) *Error {
	var p Prompt
	switch {
	case asTokens && raw[0] == '[':
		// encoding/json would read null as token 0.
		if bytes.Contains(raw, []byte("null")) || json.Unmarshal(raw, &p.Tokens) != nil {
			return invalid(name, "%s must hold token ids (whole numbers)", name)
		}
		if len(p.Tokens) == 0 {
			return invalid(name, "%s must not be empty", name)
		}
		for _, t := range p.Tokens {
			if t < 0 {
				return invalid(name, "%s: %d is not a token id", name, t)
			}
		}
		p.IsTokens = true
	case asText && raw[0] == '"':
		if json.Unmarshal(raw, &p.Text) != nil {
			return invalid(name, "%s must be a string", name)
		}
	case asText:
		return invalid(name, "%s must be a string", name)
	default:
		return invalid(name, "%s must be a list of token ids", name)
	}
	r.Prompts = append(r.Prompts, p)
	return nil
}

func messages(r *Request, name string, raw []byte) *Error {
	elems, ok := splitArray(raw, MaxMessages)
	switch {
	case !ok:
		return invalid(name, "messages must be a list")
	case len(elems) > MaxMessages:
		return invalid(name, "messages has more than %d entries", MaxMessages)
	}
	for i, el := range elems {
		m, e := message(fmt.Sprintf("messages[%d]", i), el)
		if e != nil {
			return e
		}
		r.Messages = append(r.Messages, m)
	}
	return nil
}

// message takes one turn. Fields that OpenAI's clients send back from an earlier
// answer are accepted when empty.
func message(name string, raw []byte) (Message, *Error) {
	var m Message
	members, e := object(name, raw)
	if e != nil {
		return m, e
	}
	hasContent := false
	table := fieldTable{
		"role": func(_ *Request, name string, raw []byte) (e *Error) {
			m.Role, e = role(name, raw)
			return e
		},
		"content": func(_ *Request, name string, raw []byte) (e *Error) {
			hasContent = true
			m.Content, e = content(name, raw)
			return e
		},
		"refusal": only(`""`), "annotations": only("[]"), "tool_calls": only("[]"),
	}
	if e := table.apply(nil, members, name+"."); e != nil {
		return m, e
	}
	if m.Role == "" {
		return m, invalid(name+".role", "%s.role is required", name)
	}
	if !hasContent {
		return m, invalid(name+".content", "%s.content is required", name)
	}
	return m, nil
}

func role(name string, raw []byte) (string, *Error) {
	v, e := str(name, raw, 64)
	if e != nil {
		return "", e
	}
	switch v {
	case "system", "developer", "user", "assistant":
		return v, nil
	case "tool", "function":
		return "", NewError(400, CodeUnsupportedField, name, "unsupported field: role %q: tools are not supported", v)
	default:
		return "", invalid(name, "role %q is none of system, developer, user, assistant", clip(v))
	}
}

// content takes a string or a list of text parts, which are joined by newlines (as
// vLLM and llama.cpp do).
func content(name string, raw []byte) (string, *Error) {
	elems, isList := splitArray(raw, MaxMessages)
	if !isList {
		return str(name, raw, math.MaxInt)
	}
	if len(elems) > MaxMessages {
		return "", invalid(name, "%s has more than %d parts", name, MaxMessages)
	}
	var out []byte
	for i, el := range elems {
		part, e := contentPart(fmt.Sprintf("%s[%d]", name, i), el)
		if e != nil {
			return "", e
		}
		if i > 0 {
			out = append(out, '\n')
		}
		out = append(out, part...)
	}
	return string(out), nil
}

func contentPart(name string, raw []byte) (string, *Error) {
	members, e := object(name, raw)
	if e != nil {
		return "", e
	}
	var typ, txt string
	var hasText bool
	for _, m := range members {
		if m.key == "type" {
			if typ, e = str(name+".type", m.raw, 64); e != nil {
				return "", e
			}
		}
	}
	if typ != "text" {
		return "", NewError(400, CodeUnsupportedField, name+".type", "unsupported field: %s.type %q (only \"text\" is accepted)", name, clip(typ))
	}
	table := fieldTable{
		"type": only(`"text"`),
		"text": func(_ *Request, name string, raw []byte) (e *Error) {
			hasText = true
			txt, e = str(name, raw, math.MaxInt)
			return e
		},
	}
	if e := table.apply(nil, members, name+"."); e != nil {
		return "", e
	}
	if !hasText {
		return "", invalid(name+".text", "%s.text is required", name)
	}
	return txt, nil
}
