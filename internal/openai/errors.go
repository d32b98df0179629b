package openai

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/baton-pd/baton/internal/room"
)

// Error is a failure as a client sees it: a [room.Cause] plus what only HTTP
// knows. It is immutable.
type Error struct {
	// Status is the HTTP status, if nothing of the answer has been sent.
	Status int
	// Code is finer than the cause: "unsupported_field", "model_not_found", ...
	// It equals the cause's code where there is nothing finer to say.
	Code string
	// Param is the request field at fault; "" if none is.
	Param string
	Cause *room.Cause
	// RequestID is what the answer's X-Request-Id says, for those who see the body only; "" if it is not known.
	RequestID string
}

// Error is the cause's text, or for a client's fault just what is wrong.
func (e *Error) Error() string {
	if e.Cause.Side == 0 {
		return e.Code + ": " + e.Cause.Detail
	}
	return e.Cause.Error()
}

// Unwrap gives the cause, so errors.Is and room.CauseOf see through.
func (e *Error) Unwrap() error { return e.Cause }

// Codes that are finer than their cause.
const (
	CodeUnsupportedField = "unsupported_field"
	CodeInvalidValue     = "invalid_value"
	CodeInvalidBody      = "invalid_body"
	CodeModelNotFound    = "model_not_found"
	CodeContextLength    = "context_length_exceeded"
	CodeBodyTooLarge     = "body_too_large"
	CodeNotFound         = "not_found"
	CodeMethodNotAllowed = "method_not_allowed"
	CodeBodyTimeout      = "body_timeout"
	CodeQueueFull        = "queue_full"
)

// statusAborted is nginx's "client closed request". An aborted request was ended on
// purpose, so its status must be one that client libraries do not repeat by
// themselves; they do repeat 408, 409, 429 and every 5xx.
const statusAborted = 499

// outcome is a row of the table from cause to HTTP.
type outcome struct {
	status int
	typ    string // the error object's "type"
}

// outcomes is the one table from cause to HTTP status and error type. A capacity
// failure that cannot succeed later is the client's fault: see outcomeOf.
var outcomes = map[room.Code]outcome{
	room.CodeInvalid:        {http.StatusBadRequest, typeInvalid},
	room.CodeDuplicate:      {http.StatusConflict, typeInvalid},
	room.CodeAborted:        {statusAborted, "request_aborted"},
	room.CodeClientGone:     {statusAborted, "request_aborted"},
	room.CodeDeadline:       {http.StatusGatewayTimeout, "timeout_error"},
	room.CodeCapacity:       {http.StatusServiceUnavailable, typeUnavailable},
	room.CodeUnavailable:    {http.StatusServiceUnavailable, typeUnavailable},
	room.CodeShutdown:       {http.StatusServiceUnavailable, typeUnavailable},
	room.CodePeerLost:       {http.StatusBadGateway, typeServer},
	room.CodeTransferFailed: {http.StatusBadGateway, typeServer},
	room.CodeChunkDropped:   {http.StatusBadGateway, typeServer},
	room.CodeMismatch:       {http.StatusBadGateway, typeServer},
	room.CodeProtocol:       {http.StatusBadGateway, typeServer},
	room.CodeEngine:         {http.StatusInternalServerError, typeServer},
	room.CodeInternal:       {http.StatusInternalServerError, typeServer},
}

const (
	typeInvalid     = "invalid_request_error"
	typeUnavailable = "unavailable_error"
	typeServer      = "server_error"
)

func outcomeOf(c *room.Cause) outcome {
	if c.Code == room.CodeCapacity && !c.Retryable {
		return outcomes[room.CodeInvalid]
	}
	if o, ok := outcomes[c.Code]; ok {
		return o
	}
	return outcomes[room.CodeInternal]
}

// FromCause is the failure for a cause; nil gives an internal error, never success.
func FromCause(c *room.Cause) *Error {
	if c == nil {
		c = &room.Cause{Code: room.CodeInternal, Detail: "failed without a cause"}
	}
	code := string(c.Code)
	if c.Code == room.CodeCapacity && c.Retryable {
		code = CodeQueueFull
	}
	return &Error{Status: outcomeOf(c).status, Code: code, Cause: c}
}

// FromErr finds an *Error or a *room.Cause in err's chain, or wraps err as internal.
func FromErr(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return FromCause(room.CauseOf(err))
}

// NewError is a client's fault with its own status and code; param may be "".
func NewError(status int, code, param, format string, args ...any) *Error {
	c := &room.Cause{Code: room.CodeInvalid, Phase: "request", Detail: fmt.Sprintf(format, args...)}
	return &Error{Status: status, Code: code, Param: param, Cause: c}
}

// ModelNotFound is the 404 for a model that is not served.
func ModelNotFound(name string) *Error {
	return NewError(http.StatusNotFound, CodeModelNotFound, "model", "the model %q is not served here", clip(name))
}

func invalid(param, format string, args ...any) *Error {
	return NewError(http.StatusBadRequest, CodeInvalidValue, param, format, args...)
}

// errorBody is the "error" object on the wire.
type errorBody struct {
	Message   string  `json:"message"`
	Type      string  `json:"type"`
	Code      string  `json:"code"`
	Param     *string `json:"param"`
	Cause     string  `json:"cause"`
	Side      string  `json:"side,omitempty"`
	Phase     string  `json:"phase,omitempty"`
	Room      string  `json:"room,omitempty"` // a string: 63 bits do not fit a JavaScript number
	Peer      string  `json:"peer,omitempty"`
	Retryable bool    `json:"retryable"`
	RequestID string  `json:"request_id,omitempty"`
}

type errorEnvelope struct {
	Error errorBody `json:"error"`
}

// Body is {"error":{...}}, the body of an HTTP error and the data of an error event.
func (e *Error) Body() []byte {
	b := errorBody{
		Message: e.Cause.Detail, Type: outcomeOf(e.Cause).typ, Code: e.Code,
		Cause: string(e.Cause.Code), Phase: e.Cause.Phase, Peer: e.Cause.Peer, Retryable: e.Cause.Retryable,
		RequestID: e.RequestID,
	}
	if b.Message == "" {
		b.Message = string(e.Cause.Code)
	}
	if e.Param != "" {
		b.Param = &e.Param
	}
	if e.Cause.Side != 0 {
		b.Side = e.Cause.Side.String()
	}
	if e.Cause.Key != (room.Key{}) {
		b.Room = e.Cause.Key.String()
	}
	out, err := Marshal(errorEnvelope{b})
	if err != nil { // strings and bools always marshal
		return []byte(`{"error":{"message":"internal error","type":"server_error","code":"internal","param":null,"cause":"internal","retryable":false}}`)
	}
	return out
}

// SetHeader adds the headers that go with the error: Retry-After if waiting helps,
// and X-Should-Retry, which OpenAI's clients obey, so that they repeat exactly the
// requests that may succeed.
func (e *Error) SetHeader(h http.Header) {
	h.Set("Content-Type", "application/json")
	h.Set("X-Should-Retry", strconv.FormatBool(e.Cause.Retryable))
	if e.Status == http.StatusServiceUnavailable && e.Cause.Retryable {
		h.Set("Retry-After", "1")
	}
}

// Of gives the error the id of the request whose answer has header h.
func (e *Error) Of(h http.Header) *Error {
	id := h.Get("X-Request-Id")
	if id == "" || id == e.RequestID {
		return e
	}
	out := *e
	out.RequestID = id
	return &out
}

// WriteError answers a request of which nothing has been answered yet.
func WriteError(w http.ResponseWriter, e *Error) {
	e = e.Of(w.Header())
	body := append(e.Body(), '\n')
	e.SetHeader(w.Header())
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(e.Status)
	_, _ = w.Write(body) // the client may be gone; there is nobody left to tell
}

// ParseError reads a worker's error answer, Baton's own or that of SGLang, vLLM or a proxy.
// side and phase say where the reader was, for answers that do not.
func ParseError(status int, body []byte, side room.Side, phase string) *Error {
	if e := parseOwn(body); e != nil {
		e.Status = status
		return e
	}
	c := &room.Cause{
		Code: codeOfStatus(status), Side: side, Phase: phase,
		Detail: fmt.Sprintf("worker answered %d: %s", status, foreignMessage(body)),
	}
	c.Retryable = status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable
	e := FromCause(c)
	if c.Code == room.CodeInvalid {
		e.Status = status
	}
	return e
}

// ParseErrorEvent reads the data of a stream event; nil if it is not an error
// event. SGLang's {"error":{...}} without a cause becomes engine_failed.
func ParseErrorEvent(data []byte, side room.Side, phase string) *Error {
	if e := parseOwn(data); e != nil {
		return e
	}
	var probe struct {
		Error json.RawMessage `json:"error"`
	}
	if json.Unmarshal(data, &probe) != nil || len(probe.Error) == 0 || isNull(probe.Error) {
		return nil
	}
	return FromCause(&room.Cause{
		Code: room.CodeEngine, Side: side, Phase: phase, Detail: "worker failed in mid-stream: " + foreignMessage(data),
	})
}

// parseOwn reads Baton's error object; nil if it is not one.
func parseOwn(body []byte) *Error {
	var env errorEnvelope
	if json.Unmarshal(body, &env) != nil {
		return nil
	}
	b := env.Error
	code := room.Code(b.Cause)
	if _, known := outcomes[code]; !known {
		return nil
	}
	c := &room.Cause{Code: code, Phase: b.Phase, Key: parseKey(b.Room), Peer: b.Peer, Detail: b.Message, Retryable: b.Retryable}
	for _, s := range []room.Side{room.SideSender, room.SideReceiver, room.SideRouter} {
		if s.String() == b.Side {
			c.Side = s
		}
	}
	e := FromCause(c)
	e.Code = b.Code
	if b.Param != nil {
		e.Param = *b.Param
	}
	return e
}

// parseKey undoes Key.String; anything else gives the zero Key.
func parseKey(s string) room.Key {
	id, gen, _ := strings.Cut(s, "#")
	r, err := strconv.ParseUint(id, 10, 63)
	if err != nil {
		return room.Key{}
	}
	g, err := strconv.ParseUint(gen, 10, 32)
	if err != nil {
		g = 0
	}
	return room.Key{Room: r, Gen: uint32(g)}
}

func codeOfStatus(status int) room.Code {
	switch {
	case status == statusAborted:
		return room.CodeAborted
	case status == http.StatusRequestTimeout || status == http.StatusGatewayTimeout:
		return room.CodeDeadline
	case status == http.StatusTooManyRequests:
		return room.CodeCapacity
	case status == http.StatusServiceUnavailable:
		return room.CodeUnavailable
	case status >= 400 && status < 500:
		return room.CodeInvalid
	default:
		return room.CodeEngine
	}
}

// foreignMessage finds the text in the error bodies of other servers:
// {"error":{"message"}}, {"error":"..."}, {"message"}, {"detail"}, or plain text.
func foreignMessage(body []byte) string {
	const most = 512
	var m struct {
		Error   json.RawMessage `json:"error"`
		Message string          `json:"message"`
		Detail  json.RawMessage `json:"detail"`
	}
	text := strings.ToValidUTF8(strings.TrimSpace(string(body[:min(len(body), most)])), "\uFFFD")
	if json.Unmarshal(body, &m) == nil {
		var inner struct {
			Message string `json:"message"`
		}
		var plain string
		switch {
		case json.Unmarshal(m.Error, &inner) == nil && inner.Message != "":
			text = inner.Message
		case json.Unmarshal(m.Error, &plain) == nil && plain != "":
			text = plain
		case m.Message != "":
			text = m.Message
		case json.Unmarshal(m.Detail, &plain) == nil && plain != "":
			text = plain
		}
	}
	if text == "" {
		return "no message"
	}
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "..."
	}
	return text
}
