package router

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
)

// thread is what a client has of a stream, and so what another pair needs to go on with it. Only the goroutine of the call's
// handler uses it.
//
// The workers tell the tokens of each event's text in a comment of the same event, see [openai.HeaderTokens], so the tokens here are
// exactly those whose text was forwarded, wherever a stream breaks.
type thread struct {
	tokens []int32
	// over: the last text was forwarded. Its tokens are not told: a stop string may have cut them.
	over    bool
	never   string // why the stream cannot go on elsewhere; "": it can
	id      string // of the answer
	created int64
	// keep: last is the last event's data, which holds the logprobs of all tokens (/generate).
	keep bool
	last []byte
	// goes: an attempt that goes on is under way, or looked for.
	goes   bool
	times  int       // how often it went on
	broken time.Time // when the stream broke that has not gone on yet
}

// follow makes c's stream one that can go on, if that is wanted.
func (r *Router) follow(c *call) {
	if !r.cfg.Resume || !c.stream {
		return
	}
	c.thread = &thread{keep: c.kind == openai.KindGenerate && bytes.Contains(c.rest, []byte(`"return_logprob"`))}
}

// begins looks at the head of a stream from decode worker l. A failure says that the worker did not understand that it is to go on.
func (t *thread) begins(l *leg, h http.Header) *failure {
	tells, resumed := h.Get(openai.HeaderTokens) == "1", h.Get(openai.HeaderResumed)
	h.Del(openai.HeaderTokens)
	h.Del(openai.HeaderResumed)
	switch {
	case t.goes && (resumed != strconv.Itoa(len(t.tokens)) || !tells):
		return l.failed(room.CodeProtocol, true, "does not go on with a stream of another worker")
	case t.goes:
		return nil
	}
	t.never = ""
	switch c := l.a.c; {
	case c.choices != 1:
		t.never = "it has " + strconv.Itoa(c.choices) + " choices"
	case !tells:
		kind := l.w.is().kind
		if kind == KindDetect {
			kind = "unknown"
		}
		t.never = "decode worker " + l.w.name + " (kind " + string(kind) + ") does not tell the tokens of its text"
		if l.w.mute.CompareAndSwap(false, true) {
			l.a.r.cfg.Log.Warn("streams of this worker cannot go on elsewhere: it does not tell the tokens of its text", "worker", l.w.name, "kind", string(kind))
		}
	}
	return nil
}

// forwarded notes what the client was sent of s.
func (t *thread) forwarded(s *stream) {
	if len(s.head) > 0 && t.id == "" {
		var o struct {
			ID      string `json:"id"`
			Created int64  `json:"created"`
			Meta    struct {
				ID string `json:"id"`
			} `json:"meta_info"`
		}
		_ = json.Unmarshal(s.head, &o) // it was judged; without an id the answer gets another one
		t.id, t.created = o.ID+o.Meta.ID, o.Created
	}
	if len(s.tokens) > 0 || s.over {
		t.tokens, t.over = append(t.tokens, s.tokens...), s.over
		if t.keep {
			t.last = append(t.last[:0], s.last...)
		}
	}
}

// field is the body's field for the next attempt.
func (t *thread) field(elapsed time.Duration) ([]byte, error) {
	f := struct {
		Tokens   []int32         `json:"tokens"`
		ID       string          `json:"id,omitempty"`
		Created  int64           `json:"created,omitempty"`
		Elapsed  int64           `json:"elapsed_ms"`
		Logprobs json.RawMessage `json:"logprobs,omitempty"`
		Top      json.RawMessage `json:"top,omitempty"`
	}{Tokens: t.tokens, ID: t.id, Created: t.created, Elapsed: elapsed.Milliseconds()}
	if f.Tokens == nil {
		f.Tokens = []int32{}
	}
	if len(t.last) > 0 {
		var o struct {
			Meta struct {
				Logprobs json.RawMessage `json:"output_token_logprobs"`
				Top      json.RawMessage `json:"output_top_logprobs"`
			} `json:"meta_info"`
		}
		if err := json.Unmarshal(t.last, &o); err != nil {
			return nil, err
		}
		f.Logprobs, f.Top = o.Meta.Logprobs, o.Meta.Top
	}
	return openai.Marshal(f)
}

// breaks reports whether a stream that failed so may go on elsewhere: its worker is lost, silent or at fault. A refusal, an abort that
// somebody asked for, and the end of the request's time stay what they are.
func (f *failure) breaks() bool {
	switch f.cause().Code {
	case room.CodePeerLost, room.CodeProtocol, room.CodeEngine, room.CodeInternal, room.CodeShutdown, room.CodeUnavailable,
		room.CodeTransferFailed, room.CodeChunkDropped, room.CodeMismatch, room.CodeCapacity:
		return !f.gone
	case room.CodeDeadline:
		return f.cause().Retryable // a limit of this router's on silence
	default:
		return false
	}
}

// goOn decides whether c's stream, which the client has begun to read, goes on with another pair after f. If not, the failure
// for the client is returned. last is the failure before, if there was one.
func (r *Router) goOn(c *call, f, last *failure) (bool, *failure) {
	t := c.thread
	if t == nil || c.ctx.Err() != nil || f.gone {
		return false, f
	}
	why := t.never
	switch {
	case !f.breaks() && t.goes && last != nil && f.blame != 0: // the refusal is about our own field
		return false, last.with("; it could not go on elsewhere: " + f.cause().Detail)
	case !f.breaks() || f.blame == 0:
		return false, f
	case t.over:
		why = "only its end is missing, and that is not told"
	case t.times >= r.cfg.MaxResumes:
		why = "it has gone on " + strconv.Itoa(t.times) + " times"
	}
	if why != "" {
		return false, f.with("; it does not go on elsewhere: " + why)
	}
	if t.broken.IsZero() {
		t.broken = time.Now()
	}
	t.goes = true
	t.times++
	r.m.resumes.WithLabelValues(string(f.cause().Code)).Inc()
	return true, f
}

// with is f with more words.
func (f *failure) with(words string) *failure {
	out, e, c := *f, *f.err, *f.cause()
	c.Detail += words
	e.Cause, out.err = &c, &e
	return &out
}

// wentOn: the attempt has begun to answer.
func (a *attempt) wentOn() {
	t := a.c.thread
	if t == nil || t.broken.IsZero() {
		return
	}
	gap := time.Since(t.broken)
	t.broken = time.Time{}
	a.r.m.resumeGap.Observe(gap.Seconds())
	a.r.cfg.Log.Info("stream goes on with another pair", "room", a.key().String(), "prefill", a.prefill.w.name, "decode", a.decode.w.name,
		"tokens", len(t.tokens), "gap_ms", ms(gap))
}

// alive notes an event of a stream.
func (a *attempt) alive() {
	if a.c.thread.over {
		a.event.Store(0)
		return
	}
	a.event.Store(int64(time.Since(a.start)))
}

// stuck: the stream could go on elsewhere, and has carried nothing for d.
func (a *attempt) stuck(d time.Duration) bool {
	at := a.event.Load()
	return at > 0 && time.Since(a.start)-time.Duration(at) >= d
}

// goesOn: w may go on with c's stream, or c has no such wish.
func (w *worker) goesOn(c *call) bool {
	if c.thread == nil || !c.thread.goes {
		return true
	}
	k := w.is().kind
	return k == KindBaton || k == KindDetect
}

// setResume adds to the attempt's bodies and header what its workers need to go on with a stream, and to tell its tokens.
func (a *attempt) setResume() error {
	t := a.c.thread
	if t == nil || a.c.choices != 1 {
		return nil
	}
	a.ownHeader().Set(openai.HeaderTokens, "1")
	if !t.goes {
		return nil
	}
	var err error
	a.resume, err = t.field(time.Since(a.c.start))
	return err
}

// cutTokens takes the comment with the tokens off the event that begins at s.next and ends at end, and gives its new end.
func (s *stream) cutTokens(end int) (int, []int32, error) {
	event := s.buf[s.next:end]
	if !bytes.HasPrefix(event, tokensMark) {
		return end, nil, nil
	}
	tokens, over, rest, ok := openai.CutTokens[int32](nil, event)
	if !ok {
		return end, nil, fmt.Errorf("%w: the tokens of an event: %.80q", errMalformed, event)
	}
	s.over = over
	n := len(event) - len(rest)
	s.buf = append(s.buf[:s.next], s.buf[s.next+n:]...)
	return end - n, tokens, nil
}

// tokensMark is how a comment with tokens begins.
var tokensMark = []byte(": baton-tokens")

// took notes an event that is let through.
func (s *stream) took(tokens []int32, data []byte) {
	s.tokens = append(s.tokens, tokens...)
	if s.events == 0 {
		s.head = append(s.head[:0], data...)
	}
	if len(tokens) > 0 && s.keep {
		s.last = append(s.last[:0], data...)
	}
}
