package router

import (
	"bytes"
	"encoding/json"
	"net/http"
	"slices"
	"strconv"

	"github.com/baton-pd/baton/internal/openai"
)

// ours are the top-level fields that the router sets; what a client puts there is dropped.
var ours = []string{
	"rid", "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_generation", FieldTimeout, openai.FieldResume,
}

func isOurs(name string) bool { return slices.Contains(ours, name) }

// parsed is what the router needs to know of a body. The workers check the rest.
type parsed struct {
	// rest is the body after its opening brace, without the fields in ours. All its values
	// are as the client wrote them, byte for byte. Shared by all attempts; read only.
	rest   []byte
	stream bool
	// prompts is the number of prompts, each of which needs a room; batch if they came as a list.
	prompts int
	batch   bool
	// choices is the number of answers that must each have a finish reason.
	choices int
	// rid is the client's request id as written, nil if it gave none; names are its values.
	rid   json.RawMessage
	names []string
	// timeout is the body's own deadline as written, "" without one.
	timeout string
	// model, priority and prompt are for queue and policies. prompt aliases the body, as the client wrote it.
	model    string
	priority int
	prompt   json.RawMessage
}

// parseBody checks that body is one sound JSON object and finds out what the router
// needs. Errors are the client's.
func parseBody(kind openai.Kind, body []byte) (*parsed, *openai.Error) {
	rest, m, err := openai.Take(body, isOurs)
	if err != nil {
		return nil, invalidBody("%s", openai.FromErr(err).Cause.Detail)
	}
	p := &parsed{rest: rest[1:], prompts: 1}
	switch string(m["stream"]) {
	case "", "null", "false":
	case "true":
		p.stream = true
	default:
		return nil, invalidValue("stream", "stream must be true or false")
	}
	if e := p.countPrompts(kind, m); e != nil {
		return nil, e
	}
	p.choices = p.prompts * p.countChoices(kind, m)
	if e := p.readRID(m["rid"]); e != nil {
		return nil, e
	}
	if raw := m[FieldTimeout]; raw != nil && !isNull(raw) {
		p.timeout = string(raw)
	}
	if e := p.readPriority(m["priority"]); e != nil {
		return nil, e
	}
	q := quick{b: m["model"]}
	_ = q.text(&p.model) // another thing than a string is the worker's to refuse
	for _, name := range promptFields[kind] {
		if p.prompt = m[name]; p.prompt != nil {
			break
		}
	}
	return p, nil
}

// promptFields is where the prompt is.
var promptFields = map[openai.Kind][]string{
	openai.KindChat: {"messages"}, openai.KindCompletion: {"prompt"}, openai.KindGenerate: {"text", "input_ids"},
}

// readRID takes the client's request id: a string, or a list of them.
func (p *parsed) readRID(raw json.RawMessage) *openai.Error {
	if raw == nil || isNull(raw) {
		return nil
	}
	list, ok := openai.Elements(raw, openai.MaxPrompts)
	if !ok {
		list = [][]byte{raw}
	}
	if len(list) > openai.MaxPrompts {
		return invalidValue("rid", "rid has more than %d entries", openai.MaxPrompts)
	}
	for _, one := range list {
		var name string
		if isNull(one) || json.Unmarshal(one, &name) != nil {
			return invalidValue("rid", "rid must be a string or a list of strings")
		}
		if !openai.ValidRID(name) { // it goes into headers, and nobody could abort it
			return invalidValue("rid", "rid must have 1 to %d visible ASCII characters", openai.MaxRIDBytes)
		}
		p.names = append(p.names, name)
	}
	if len(p.names) > 0 { // an empty list names nothing
		p.rid = raw
	}
	return nil
}

// countPrompts tells a list of prompts from a prompt that is a list of tokens.
func (p *parsed) countPrompts(kind openai.Kind, m map[string]json.RawMessage) *openai.Error {
	var names []string
	switch kind {
	case openai.KindCompletion:
		names = []string{"prompt"}
	case openai.KindGenerate:
		names = []string{"text", "input_ids"}
	default: // a chat is one prompt
	}
	for _, name := range names {
		raw := m[name]
		if len(raw) == 0 || raw[0] != '[' {
			continue
		}
		if first := bytes.TrimLeft(raw[1:], " \t\r\n"); first[0] != '"' && first[0] != '[' {
			continue // tokens, or something the worker will refuse
		}
		list, _ := openai.Elements(raw, openai.MaxPrompts) // a list it is
		if len(list) > openai.MaxPrompts {
			return invalidValue(name, "%s has more than %d prompts", name, openai.MaxPrompts)
		}
		p.prompts, p.batch = len(list), true
		return nil
	}
	return nil
}

// countChoices is n where the body has a sound one, otherwise 1: the worker decides
// what to say about an unsound one.
func (p *parsed) countChoices(kind openai.Kind, m map[string]json.RawMessage) int {
	raw := m["n"]
	if kind == openai.KindGenerate {
		var params map[string]json.RawMessage
		if json.Unmarshal(m["sampling_params"], &params) == nil {
			raw = params["n"]
		}
	}
	n, err := strconv.Atoi(string(raw))
	if err != nil || n < 1 || n > openai.MaxN {
		return 1
	}
	return n
}

// legHead is what precedes rest in the body for both workers of one attempt. resume, if not nil, is what they need to go on with a stream.
func (p *parsed) legHead(rid json.RawMessage, w *worker, rooms []uint64, resume json.RawMessage) []byte {
	head := make([]byte, 0, 192+24*len(rooms))
	head = append(append(head, `{"rid":`...), rid...)
	host, _ := openai.Marshal(w.bootHost) // a string always marshals
	head = append(append(head, `,"bootstrap_host":`...), host...)
	head = strconv.AppendInt(append(head, `,"bootstrap_port":`...), int64(w.bootPort), 10)
	head = append(head, `,"bootstrap_room":`...)
	if p.batch {
		head = append(head, '[')
	}
	for i, id := range rooms {
		if i > 0 {
			head = append(head, ',')
		}
		head = strconv.AppendUint(head, id, 10)
	}
	if p.batch {
		head = append(head, ']')
	}
	if resume != nil {
		head = append(append(head, `,"`+openai.FieldResume+`":`...), resume...)
	}
	if p.rest[0] != '}' {
		head = append(head, ',')
	}
	return head
}

func isNull(raw []byte) bool { return string(raw) == "null" }

func invalidBody(format string, args ...any) *openai.Error {
	return openai.NewError(http.StatusBadRequest, openai.CodeInvalidBody, "", format, args...)
}

func invalidValue(param, format string, args ...any) *openai.Error {
	return openai.NewError(http.StatusBadRequest, openai.CodeInvalidValue, param, format, args...)
}
