package router

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/router/wire"
)

const (
	readSize     = 4 << 10   // bytes a read of a stream: thousands may be open
	keepBuffer   = 256 << 10 // larger buffers are not kept for reuse
	maxErrorBody = 1 << 20   // bytes of an error answer that are looked at
	// errorGrace is how long the body of an error answer is waited for; its status is enough.
	errorGrace = 300 * time.Millisecond
	// doneGrace is how long a stream may lag behind its [DONE] before its connection is given up.
	doneGrace = 50 * time.Millisecond
)

var (
	readBuffers = sync.Pool{New: func() any { b := make([]byte, readSize); return &b }}
	streams     = sync.Pool{New: func() any { return new(stream) }}
	answers     = sync.Pool{New: func() any { return new(bytes.Buffer) }}
)

func putStream(s *stream) {
	if cap(s.buf) <= keepBuffer {
		streams.Put(s)
	}
}

func putAnswer(b *bytes.Buffer) {
	if b.Cap() <= keepBuffer {
		b.Reset()
		answers.Put(b)
	}
}

// send posts the attempt's body to the leg's worker. ctx is the attempt's or below it.
func (l *leg) send(ctx context.Context) (*http.Response, *failure) {
	a := l.a
	l.sent = time.Now()
	resp, err := l.w.wire.Post(ctx, &wire.Request{Path: l.w.prefix + a.c.path, Header: l.traceSend(), More: [2]string{HeaderTimeout, a.timeout}, Body: l.body})
	if err != nil {
		return nil, l.lost(err)
	}
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	defer func() { _ = resp.Body.Close() }()
	l.enter(legAnswer)
	t := time.AfterFunc(errorGrace, func() { wire.Abort(resp) })
	defer t.Stop()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	if l.a.ctx.Err() != nil {
		return nil, failureOf(l.a.ctx)
	}
	if err == nil {
		l.end()
	}
	return nil, l.statusError(resp.StatusCode, body, resp.Header)
}

// lost is the failure for an error of the connection: our own doing if the
// attempt has ended, otherwise the worker's.
func (l *leg) lost(err error) *failure {
	if l.a.ctx.Err() != nil {
		return failureOf(l.a.ctx)
	}
	f := l.broken(err)
	if f.refused {
		l.end() // otherwise it may live, behind a broken path or with an answer that is no HTTP, and hold the request
	}
	return f
}

// malformed is the failure for an answer that breaks the protocol.
func (l *leg) malformed(err error) *failure {
	return l.failed(room.CodeProtocol, true, "sent a bad answer: %v", err)
}

func isEventStream(h http.Header) bool {
	return strings.HasPrefix(strings.ToLower(h.Get("Content-Type")), "text/event-stream")
}

// ownContext ends with the attempt's, or by cancel if the prefill leg has limits of its own. Without any it is the attempt's: a context costs.
func (l *leg) ownContext() (ctx context.Context, cancel context.CancelFunc) {
	c := &l.a.r.cfg
	if c.PrefillFirstByteTimeout <= 0 && c.PrefillGapTimeout <= 0 {
		return l.a.ctx, func() {}
	}
	return context.WithCancel(l.a.ctx)
}

// consume reads the prefill leg's answer, which nobody sees, to its end. nil: it did its part.
func (l *leg) consume() (f *failure) {
	ctx, cancel := l.ownContext()
	defer cancel()
	watch := l.watchPrefill(cancel)
	defer watch.stop()
	defer func() {
		if alone := watch.alone.Load(); alone != nil && f != nil {
			f = alone
		}
	}()
	resp, f := l.send(ctx)
	if f != nil {
		return f
	}
	defer func() { _ = resp.Body.Close() }()
	l.enter(legAnswer)
	if isEventStream(resp.Header) {
		f = l.consumeStream(resp.Body, watch)
	} else {
		f = l.consumeAnswer(watch.reader(resp.Body))
	}
	if f == nil {
		l.enter(legDone)
		l.end()
	}
	return f
}

func (l *leg) consumeStream(body io.Reader, watch *prefillWatch) *failure {
	s := streams.Get().(*stream)
	defer putStream(s)
	s.reset(l.w.side, l.phase(), 0)
	buf := readBuffers.Get().(*[]byte)
	defer readBuffers.Put(buf)
	for {
		watch.before()
		n, rerr := body.Read(*buf)
		_, e, err := s.feed((*buf)[:n])
		watch.after(s.events)
		switch {
		case e != nil:
			l.end()
			return l.reported(e, nil)
		case err != nil:
			return l.malformed(err)
		case rerr == io.EOF:
			if err := s.ended(); err != nil {
				return l.malformed(err)
			}
			return nil
		case rerr != nil:
			return l.lost(rerr)
		}
	}
}

func (l *leg) consumeAnswer(body io.Reader) *failure {
	b := answers.Get().(*bytes.Buffer)
	defer putAnswer(b)
	most := l.a.r.cfg.MaxAnswer
	if _, err := b.ReadFrom(io.LimitReader(body, most)); err != nil {
		return l.lost(err)
	}
	if int64(b.Len()) == most { // prompt logprobs of a long prompt, say; it only matters that it ends
		if _, err := io.Copy(io.Discard, body); err != nil {
			return l.lost(err)
		}
		return nil
	}
	e, err := judge(l.a.c.kind, b.Bytes(), l.w.side, l.phase())
	switch {
	case e != nil:
		l.end()
		return l.reported(e, nil)
	case err != nil:
		return l.malformed(err)
	}
	if l.a.staged() {
		if err := l.takeKV(b.Bytes()); err != nil {
			return l.malformed(err)
		}
	}
	return nil
}

// runDecode drives the decode leg and forwards its answer. nil: the client has it all.
func (a *attempt) runDecode(cl *client) *failure {
	l := &a.decode
	if f := a.awaitPrefill(); f != nil {
		return f
	}
	resp, f := l.send(a.ctx)
	if f != nil {
		return f
	}
	defer func() { _ = resp.Body.Close() }()
	switch {
	case !isEventStream(resp.Header) && cl.started:
		return l.malformed(errors.New("not a stream"))
	case !isEventStream(resp.Header):
		return a.forwardAnswer(cl, resp)
	case a.c.stream:
		return a.forwardStream(cl, resp)
	}
	return l.unasked(resp)
}

// unasked is the failure for a stream that was not asked for: the error in it, if one comes soon.
func (l *leg) unasked(resp *http.Response) *failure {
	t := time.AfterFunc(errorGrace, func() { wire.Abort(resp) })
	defer t.Stop()
	f := l.consumeStream(resp.Body, &prefillWatch{l: l, gap: newStall(0, nil)})
	switch {
	case l.a.ctx.Err() != nil:
		return failureOf(l.a.ctx)
	case f != nil && l.over.Load():
		return f
	}
	return l.malformed(fmt.Errorf("%w: a stream that was not asked for", errMalformed))
}

// forwardAnswer reads the whole answer before a byte of it is sent, so that an error in it
// can still be a status.
func (a *attempt) forwardAnswer(cl *client, resp *http.Response) *failure {
	l := &a.decode
	l.enter(legAnswer)
	b := answers.Get().(*bytes.Buffer)
	defer putAnswer(b)
	most := a.r.cfg.MaxAnswer
	if _, err := b.ReadFrom(io.LimitReader(resp.Body, most+1)); err != nil {
		return l.lost(err)
	}
	if int64(b.Len()) > most {
		return l.failed(room.CodeProtocol, false, "sent an answer of more than %d bytes", most)
	}
	l.end()
	u, e, err := l.judged(b.Bytes())
	switch {
	case e != nil:
		return l.reported(e, resp.Header)
	case err != nil:
		return l.malformed(err)
	case a.ctx.Err() != nil:
		return failureOf(a.ctx)
	case a.c.stream:
		return l.malformed(fmt.Errorf("%w: not the stream that was asked for, but %.64q", errMalformed, resp.Header.Get("Content-Type")))
	}
	a.answering.Store(true)
	l.usage = u
	a.c.rec.Usage(u.Prompt, u.Completion)
	if err := cl.whole(resp.Header, resp.StatusCode, b.Bytes()); err != nil {
		return cl.lost(a.c, err)
	}
	l.enter(legDone)
	return nil
}

// forwardStream passes whole events on as they come.
func (a *attempt) forwardStream(cl *client, resp *http.Response) *failure {
	l := &a.decode
	l.enter(legFirst)
	s := streams.Get().(*stream)
	defer putStream(s)
	s.reset(l.w.side, l.phase(), a.c.choices)
	buf := readBuffers.Get().(*[]byte)
	defer readBuffers.Put(buf)
	if t := a.c.thread; t != nil {
		if f := t.begins(l, resp.Header); f != nil {
			return f
		}
		s.follow, s.keep = t.never == "", t.keep
	}
	watch := newStall(a.r.cfg.InterTokenTimeout, a.stalled)
	defer watch.stop()
	defer func() { // before s is given back
		l.usage = s.usage
		a.c.rec.Usage(s.usage.Prompt, s.usage.Completion)
	}()
	for {
		watch.before(s.content)
		whole := s.complete()
		n, rerr := resp.Body.Read(*buf)
		forward, e, ferr := s.feed((*buf)[:n])
		watch.after(s.events)
		a.c.rec.Count(s.events)
		if len(forward) > 0 {
			switch {
			case a.ctx.Err() != nil && whole:
				return a.finishFor(cl, resp)
			case a.ctx.Err() != nil: // another cause was first: the error event comes next
				return failureOf(a.ctx)
			}
			if s.content && !a.answering.Load() {
				a.answering.Store(true)
				a.wentOn()
				a.c.rec.Token(time.Now())
				l.enter(legStream)
				s.phase = l.phase()
				l.began()
			}
			if err := cl.events(resp.Header, resp.StatusCode, forward, s.done && rerr == io.EOF); err != nil {
				return cl.lost(a.c, err)
			}
			if s.follow {
				a.c.thread.forwarded(s)
				a.alive()
			}
		}
		switch {
		case s.done:
			l.drain(resp, rerr)
			return nil
		case s.complete() && (e != nil || ferr != nil || rerr != nil && (rerr != io.EOF || s.cut())):
			return a.finishFor(cl, resp)
		case rerr != nil && rerr != io.EOF && e == nil:
			return l.lost(rerr)
		default:
			if f, end := l.streamEnd(s, e, ferr, rerr == io.EOF); end {
				if f == nil { // whole, and without its last line, which clients wait for
					return a.endStream(cl, resp)
				}
				return f
			}
		}
	}
}

// finishFor ends a stream in its worker's place: every choice has its finish, and then the worker fell silent, broke off or
// sent what cannot be passed on. The client's answer is whole; at most the usage is missing.
func (a *attempt) finishFor(cl *client, resp *http.Response) *failure {
	l := &a.decode
	if a.ctx.Err() == nil {
		l.w.probeNow()
	}
	a.r.release(a)
	if f := a.endStream(cl, resp); f != nil {
		return f
	}
	l.enter(legDone)
	return nil
}

// endStream writes a stream's last line in its worker's place.
func (a *attempt) endStream(cl *client, resp *http.Response) *failure {
	if err := cl.events(resp.Header, resp.StatusCode, []byte("data: "+openai.DoneData+"\n\n"), true); err != nil {
		return cl.lost(a.c, err)
	}
	return nil
}

// streamEnd says whether the stream has ended, and how.
func (l *leg) streamEnd(s *stream, e *openai.Error, err error, eof bool) (f *failure, end bool) {
	switch {
	case e != nil:
		l.end()
		return l.reported(e, nil), true
	case err != nil:
		return l.malformed(err), true
	case !eof:
		return nil, false
	}
	l.end()
	if err := s.ended(); err != nil {
		return l.malformed(err), true
	}
	l.enter(legDone)
	return nil, true
}

// drain reads on to the stream's end after [DONE], so that the connection can be used
// again; a worker that does not end it in time loses the connection. err came with the last read.
func (l *leg) drain(resp *http.Response, err error) {
	if err == nil {
		t := time.AfterFunc(doneGrace, func() { wire.Abort(resp) })
		defer t.Stop()
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, drainLimit)) // the answer is complete; only the connection is at stake
	}
	l.end()
	l.enter(legDone)
}
