package httpapi

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/httpbody"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sched"
)

// HeaderTimeout names the milliseconds a request has left; the router sends it to each hop.
const HeaderTimeout = "X-Request-Timeout-Ms"

// randomID is a 96-bit name for a request whose client gave none.
func randomID() string {
	var b [12]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand aborts the process instead
	return hex.EncodeToString(b[:])
}

// randomSeed is for sampled requests that name no seed.
func randomSeed() uint32 {
	var b [4]byte
	_, _ = rand.Read(b[:])
	return uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
}

// admitted is a request that was checked against the model, not yet submitted.
type admitted struct {
	req      *openai.Request
	prompts  [][]engine.Token
	ids      []string // names that /abort_request may use
	deadline time.Time
	// tellTokens: the events tell their tokens, so that the answer can go on elsewhere.
	tellTokens bool
}

// admit reads, parses and checks a generation request.
func (s *server) admit(w *response, r *http.Request, kind openai.Kind) (*admitted, *openai.Error) {
	a := &admitted{}
	var e *openai.Error
	if a.deadline, e = s.deadline(r, w.start); e != nil {
		return nil, e
	}
	if a.deadline.Before(w.start.Add(s.BodyTimeout)) {
		_ = w.ctl.SetReadDeadline(a.deadline)
	}
	body, e := s.readBody(w, r)
	if e != nil {
		if e.Code == openai.CodeBodyTimeout && !s.now().Before(a.deadline) {
			e = openai.FromCause(s.cause(room.CodeDeadline, "the request's deadline passed before its body had arrived"))
		}
		return nil, e
	}
	req, err := openai.Parse(kind, body)
	if err != nil {
		return nil, openai.FromErr(err)
	}
	a.req = req
	a.tellTokens = r.Header.Get(openai.HeaderTokens) == "1" && req.Stream && req.Choices() == 1 && s.Role == RoleDecode
	a.ids = s.name(w, req)
	for i, b := range req.Bootstrap {
		if i > 0 {
			w.rooms += ","
		}
		w.rooms += b.Key.String()
	}
	if w.rooms != "" {
		w.Header().Set("X-Baton-Room", w.rooms)
	}
	if req.Model != "" && req.Model != s.Info.ModelName {
		return nil, openai.ModelNotFound(req.Model)
	}
	if e := s.checkRoom(req); e != nil {
		return nil, e
	}
	if a.prompts, e = s.tokenize(req); e != nil {
		return nil, e
	}
	for _, p := range a.prompts {
		w.promptToks += len(p)
	}
	for t := range req.Sampling.LogitBias {
		if int(t) >= s.Info.VocabSize {
			return nil, bad("logit_bias", "logit_bias names token %d; the vocabulary has %d", t, s.Info.VocabSize)
		}
	}
	if !req.HasSeed {
		req.Sampling.Seed = randomSeed()
	}
	return a, nil
}

func bad(param, format string, args ...any) *openai.Error {
	return openai.NewError(http.StatusBadRequest, openai.CodeInvalidValue, param, format, args...)
}

// name picks the request's ids: the body's, else the header's or a made one. The
// body's is shown in X-Request-Id unless the header named one.
func (s *server) name(w *response, req *openai.Request) []string {
	if len(req.RID) == 0 {
		return []string{w.id}
	}
	if !w.fromClient {
		w.id = req.RID[0]
		w.Header().Set("X-Request-Id", w.id)
	}
	return req.RID
}

// deadline is start plus what the header leaves, or the default.
func (s *server) deadline(r *http.Request, start time.Time) (time.Time, *openai.Error) {
	v := r.Header.Get(HeaderTimeout)
	if v == "" {
		return start.Add(s.DefaultTimeout), nil
	}
	ms, err := strconv.ParseInt(v, 10, 64)
	if err != nil || ms < 1 || ms > s.MaxTimeout.Milliseconds() {
		return time.Time{}, bad(HeaderTimeout, "header %s must be a whole number in [1, %d]", HeaderTimeout, s.MaxTimeout.Milliseconds())
	}
	return start.Add(time.Duration(ms) * time.Millisecond), nil
}

// readBody reads at most MaxBody bytes. ServeHTTP has set the deadline for them.
func (s *server) readBody(w *response, r *http.Request) ([]byte, *openai.Error) {
	if enc := r.Header.Get("Content-Encoding"); enc != "" && !strings.EqualFold(enc, "identity") {
		return nil, openai.NewError(http.StatusUnsupportedMediaType, openai.CodeInvalidBody, "Content-Encoding", "content encoding %q is not supported", clip(enc, 32))
	}
	tooLarge := openai.NewError(http.StatusRequestEntityTooLarge, openai.CodeBodyTooLarge, "", "the body is larger than %d bytes", s.MaxBody)
	if r.ContentLength > s.MaxBody {
		w.Header().Set("Connection", "close")
		httpbody.Drain(w.ResponseWriter, r)
		return nil, tooLarge
	}
	body, err := httpbody.Read(http.MaxBytesReader(w.ResponseWriter, r.Body, s.MaxBody))
	var max *http.MaxBytesError
	switch {
	case err == nil:
		// The deadline must go: net/http watches for the client's disconnect by reading on.
		_ = w.ctl.SetReadDeadline(time.Time{})
		return body, nil
	case errors.As(err, &max):
		w.Header().Set("Connection", "close")
		httpbody.Drain(w.ResponseWriter, r)
		return nil, tooLarge
	case errors.Is(err, os.ErrDeadlineExceeded):
		w.Header().Set("Connection", "close")
		return nil, openai.NewError(http.StatusRequestTimeout, openai.CodeBodyTimeout, "", "the body did not arrive within %s", s.BodyTimeout)
	case errors.Is(err, io.ErrUnexpectedEOF) || r.Context().Err() != nil:
		return nil, openai.FromCause(s.cause(room.CodeClientGone, "the client left while sending its request"))
	default:
		return nil, openai.NewError(http.StatusBadRequest, openai.CodeInvalidBody, "", "read body: %v", err)
	}
}

// cause is a failure found at this edge.
func (s *server) cause(code room.Code, format string, args ...any) *room.Cause {
	side := room.SideReceiver
	if s.Role == RolePrefill {
		side = room.SideSender
	}
	return &room.Cause{Code: code, Side: side, Phase: "http", Detail: fmt.Sprintf(format, args...)}
}

// checkRoom holds the request's bootstrap fields against the worker's role.
func (s *server) checkRoom(req *openai.Request) *openai.Error {
	switch {
	case len(req.Bootstrap) == 0 && s.Role == RolePrefill:
		return bad("bootstrap_room", "this is a prefill worker: it serves requests with bootstrap_room only; ask the router, or a decode worker started with local serving")
	case len(req.Bootstrap) == 0 && !s.AllowLocal:
		return bad("bootstrap_room", "this decode worker does not compute prompts itself: bootstrap_host, bootstrap_port and bootstrap_room are required; ask the router")
	}
	if s.Role != RoleDecode {
		return nil
	}
	for _, b := range req.Bootstrap {
		if b.Host == "" || b.Port == 0 {
			return bad("bootstrap_host", "bootstrap_host and bootstrap_port are required with bootstrap_room on a decode worker")
		}
	}
	return nil
}

// bytesPerToken is more than any vocabulary's longest token; longer texts are
// refused without tokenizing them.
const bytesPerToken = 256

// tokenize turns the request into one token list a prompt, each within the context.
func (s *server) tokenize(req *openai.Request) ([][]engine.Token, *openai.Error) {
	if req.Kind == openai.KindChat {
		if s.templateErr != nil {
			return nil, s.templateErr
		}
		size := 0
		for _, m := range req.Messages {
			size += len(m.Content)
		}
		if e := s.fitsText(size, "messages"); e != nil {
			return nil, e
		}
		toks, err := s.template.Prompt(req.Messages, s.now())
		if err != nil {
			return nil, openai.FromErr(err)
		}
		return [][]engine.Token{toks}, s.fits(toks, "messages")
	}
	param := "prompt"
	if req.Kind == openai.KindGenerate {
		param = "text"
	}
	out := make([][]engine.Token, 0, len(req.Prompts))
	for _, p := range req.Prompts {
		toks, e := s.promptTokens(p, param)
		if e == nil {
			e = s.fits(toks, param)
		}
		if e != nil {
			return nil, e
		}
		out = append(out, toks)
	}
	return out, nil
}

func (s *server) promptTokens(p openai.Prompt, param string) ([]engine.Token, *openai.Error) {
	if p.IsTokens {
		for _, t := range p.Tokens {
			if t < 0 || int(t) >= s.Info.VocabSize {
				return nil, bad(param, "%d is not a token id; the vocabulary has %d", t, s.Info.VocabSize)
			}
		}
		return p.Tokens, nil
	}
	if e := s.fitsText(len(p.Text), param); e != nil {
		return nil, e
	}
	// Text of special tokens in a prompt is the user's, so it stays text.
	toks, err := s.Tokenizer.Tokenize(p.Text, true, false)
	if err != nil {
		return nil, bad(param, "tokenize: %v", err)
	}
	return toks, nil
}

func (s *server) fitsText(size int, param string) *openai.Error {
	if size/bytesPerToken > s.MaxPromptTokens {
		return openai.NewError(http.StatusBadRequest, openai.CodeContextLength, param,
			"the prompt has %d bytes; a prompt may have at most %d tokens", size, s.MaxPromptTokens)
	}
	return nil
}

func (s *server) fits(toks []engine.Token, param string) *openai.Error {
	switch {
	case len(toks) == 0:
		return bad(param, "the prompt is empty")
	case len(toks) > s.MaxPromptTokens:
		return openai.NewError(http.StatusBadRequest, openai.CodeContextLength, param,
			"the prompt has %d tokens; at most %d fit (context of %d tokens)", len(toks), s.MaxPromptTokens, s.Info.ContextLen)
	}
	return nil
}

// schedRequest is prompt i as the scheduler takes it.
func (a *admitted) schedRequest(s *server, i int, deadline time.Time) *sched.Request {
	id := a.ids[0]
	if len(a.ids) > 1 {
		id = a.ids[i]
	}
	req := &sched.Request{
		// Clients' ids need not be unique; the counter makes them so.
		ID:     fmt.Sprintf("%s/%d", id, s.counter.Add(1)),
		Prompt: a.prompts[i], N: a.req.N, Sampling: a.req.Sampling, MaxTokens: a.req.MaxTokens,
		Stop: a.req.Stop, IgnoreEOS: a.req.IgnoreEOS, Logprobs: a.req.Logprobs, Deadline: deadline, WholeTokens: a.tellTokens,
	}
	if r := a.req.Resume; r != nil {
		req.Prompt, req.Emitted = slices.Concat(req.Prompt, r.Tokens), len(r.Tokens)
		if req.MaxTokens > 0 {
			req.MaxTokens -= len(r.Tokens) // at least one is left
		}
	}
	if len(a.req.Bootstrap) > 0 {
		b := a.req.Bootstrap[i]
		req.Bootstrap = &sched.Bootstrap{Key: b.Key, Host: b.Host, Port: b.Port}
	}
	return req
}
