package router

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/baton-pd/baton/internal/otel"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/router/ending"
)

const (
	// causeGrace is how long a failure that looks like an echo waits for the other
	// leg's own.
	causeGrace = 100 * time.Millisecond
	// prefillGrace is how long a prefill leg may lag behind a finished answer before it is released.
	prefillGrace = time.Second
)

// phaseRouting is the phase of failures before or between attempts.
const phaseRouting = "routing"

// legPhase is how far a leg is.
type legPhase uint32

const (
	legHeaders legPhase = 0 // sent or being sent; nothing has come back
	legFirst   legPhase = 1 // a stream has begun, nothing of the answer is in it yet
	legStream  legPhase = 2 // streaming the answer
	legAnswer  legPhase = 3 // reading an answer that is not a stream
	legDone    legPhase = 4 // the answer was read to its end
	legWaiting legPhase = 5 // not sent yet: prefill comes first (vLLM)
)

// String is the phase in causes; it survives unknown values.
func (p legPhase) String() string {
	switch p {
	case legHeaders:
		return "waiting_for_headers"
	case legFirst:
		return "waiting_for_first_token"
	case legStream:
		return "streaming"
	case legAnswer:
		return "reading_answer"
	case legDone:
		return "done"
	case legWaiting:
		return "waiting_for_prefill"
	default:
		return "phase(" + strconv.FormatUint(uint64(p), 10) + ")"
	}
}

// leg is one of an attempt's two requests to workers.
type leg struct {
	a *attempt
	w *worker
	// body is set before the leg is sent.
	body legBody
	at   atomic.Uint32 // legPhase; written by the leg's goroutine
	// over: the exchange ended by the worker's doing, so the worker holds nothing of it.
	// Written by the leg's goroutine before it reports.
	over atomic.Bool
	// told: its worker is being told of the end; once is enough.
	told atomic.Bool
	// ended is when it was over, nanoseconds after the attempt's start.
	ended atomic.Int64
	span  *otel.Span // nil: not traced; the leg's goroutine's
	sent  time.Time  // zero: not sent; the leg's goroutine's
	usage usage      // what the answer said of its tokens; the leg's goroutine's
}

func (l *leg) phase() string { return legPhase(l.at.Load()).String() }

func (l *leg) enter(p legPhase) { l.at.Store(uint32(p)) }

// end marks the exchange as over.
func (l *leg) end() {
	l.ended.Store(int64(time.Since(l.a.start)))
	l.over.Store(true)
}

// attempt is one try of a call on one pair of workers, under rooms of its own.
type attempt struct {
	r     *Router
	c     *call
	start time.Time
	rooms []uint64
	rid   json.RawMessage
	names []string // the values of rid, for abort_request

	prefill, decode leg
	// ctx ends the attempt; the first *failure is its cause. It outlives the handler by at most
	// prefillGrace.
	ctx    context.Context
	cancel context.CancelCauseFunc
	end    ending.Context // is ctx
	link   ending.Hook    // to the call's end
	span   *otel.Span     // nil: not traced

	header  http.Header // the call's, or its own where it differs; read only
	timeout string      // HeaderTimeout
	// event is when the last event of a stream came that could go on elsewhere, in nanoseconds after start; 0: there is none such.
	event  atomic.Int64
	resume json.RawMessage // what the workers need to go on with the call's stream; nil: nothing
	kv     json.RawMessage // from a staged prefill; read after prefillDone

	// answering: the decode worker has begun to answer, so it has the prompt's KV.
	answering   atomic.Bool
	prefillDone chan struct{}

	mu    sync.Mutex
	held  *failure // a derived one that waits for a better
	timer *time.Timer
}

// newAttempt prepares attempt number n, from 0, of c. The legs counted at p and d are its own, until run has ended them.
func (r *Router) newAttempt(c *call, n int, p, d *worker) *attempt {
	a := &attempt{r: r, c: c, start: time.Now(), rooms: newRooms(c.prompts), prefillDone: make(chan struct{})}
	a.prefill.a, a.prefill.w = a, p
	a.decode.a, a.decode.w = a, d
	a.rid, a.names = c.rid, c.names
	if n > 0 || p == noWorker || d.is().kind == KindSGLang {
		// An abort of the attempt before may still be on its way to a worker that both use; and without a room the name alone says who is meant.
		// SGLang takes it for a prefix: the client's could end requests of others.
		fresh := newRID()
		a.rid, a.names = quoted(fresh), []string{fresh}
	}
	a.header = c.header
	if k := d.is().kind; k == KindVLLM || k == KindPlain { // they know no rid
		a.ownHeader().Set("X-Request-Id", a.names[0])
	}
	if p == noWorker {
		a.prefill.enter(legDone)
		a.prefill.over.Store(true)
	}
	left := max(time.Until(c.deadline).Milliseconds(), 1)
	a.timeout = strconv.FormatInt(left, 10)
	a.ctx, a.cancel = &a.end, a.end.End
	err := a.setResume()
	if err == nil {
		err = a.setBodies()
	}
	if err != nil { // parseBody found the body sound
		a.prefill.body, a.decode.body = bodyOf(nil), bodyOf(nil)
		a.cancel(routerFailure(room.CodeInternal, false, "write the workers' bodies: %v", err))
	}
	a.link.Run = func() { a.cancel(c.end.Err()) }
	c.end.Watch(&a.link)
	a.traceStart(n)
	c.current.Store(a)
	c.attempts++
	a.record()
	return a
}

// ownHeader is the attempt's header, to be changed.
func (a *attempt) ownHeader() http.Header {
	a.header = maps.Clone(a.header)
	return a.header
}

// unlink: the attempt no longer ends with its call.
func (a *attempt) unlink() { a.c.end.Unwatch(&a.link) }

// key names the attempt's first room.
func (a *attempt) key() room.Key { return room.Key{Room: a.rooms[0]} }

// run sends both legs, forwards the answer and returns nil, or the first failure. Afterwards
// both legs have ended or are being released.
func (a *attempt) run(cl *client) *failure {
	if !a.r.group.enter() {
		a.unlink()
		a.prefill.w.put()
		a.decode.w.put()
		a.traceEnd(failureOf(&a.r.base))
		return failureOf(&a.r.base)
	}
	defer a.r.group.leave()
	if a.prefill.w == noWorker {
		a.prefill.w.put()
		close(a.prefillDone)
	} else {
		a.r.group.spawn(a.runPrefill)
	}
	if first := a.r.cfg.FirstByteTimeout; first > 0 && a.c.stream {
		t := time.AfterFunc(first, a.tooSlow)
		defer t.Stop()
	}
	f := a.runDecode(cl)
	a.decode.finished(f)
	a.decode.w.put()
	if f == nil {
		a.decode.w.outlier.succeeded(time.Now())
		a.settle()
		a.traceEnd(nil)
		return nil
	}
	if a.ctx.Err() == nil {
		a.fail(&a.decode, f)
		<-a.ctx.Done()
	}
	a.unlink()
	a.stopTimer()
	a.r.release(a)
	f = a.named(failureOf(a.ctx))
	a.traceEnd(f)
	return f
}

// named puts the attempt's room and phase into a failure that knows of none.
func (a *attempt) named(f *failure) *failure {
	if f.cause().Key != (room.Key{}) {
		return f
	}
	out, e, c := *f, *f.err, *f.cause()
	c.Key, c.Phase = a.key(), a.decode.phase()
	e.Cause, out.err = &c, &e
	return &out
}

// fail reports the failure of a leg. The first failure ends the attempt at once, but for an echo of the
// other side's, which waits causeGrace for that.
func (a *attempt) fail(l *leg, f *failure) {
	other := &a.prefill
	if l == other {
		other = &a.decode
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case !f.derived:
		a.cancel(f)
	case a.held != nil:
		a.cancel(a.held)
	case legPhase(other.at.Load()) == legDone: // not merely over: it may be about to report
		a.cancel(f)
	default:
		a.held = f
		a.timer = time.AfterFunc(causeGrace, func() {
			if l == &a.decode || !a.prefillMoot() {
				a.cancel(f)
			}
		})
	}
}

func (a *attempt) stopTimer() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.timer != nil {
		a.timer.Stop()
	}
}

// prefillMoot: a failure of the prefill leg cannot matter any more, because the
// decode worker has the KV of the only prompt.
func (a *attempt) prefillMoot() bool { return a.answering.Load() && a.c.prompts == 1 }

// tooSlow ends an attempt whose stream has not begun in time.
func (a *attempt) tooSlow() {
	if a.answering.Load() {
		return
	}
	l := &a.decode
	f := l.failed(room.CodeDeadline, true, "sent nothing of the answer for %v; prefill worker %s: %s",
		a.r.cfg.FirstByteTimeout, a.prefill.w.name, a.prefill.phase())
	if !a.prefill.over.Load() {
		f.blame = blameBoth
	}
	a.decode.w.probeNow()
	a.prefill.w.probeNow()
	a.cancel(f)
}

// runPrefill drives the prefill leg in a goroutine of its own.
func (a *attempt) runPrefill() {
	defer close(a.prefillDone)
	defer a.prefill.w.put()
	l := &a.prefill
	f := l.consume()
	l.finished(f)
	if f == nil {
		l.w.outlier.succeeded(time.Now())
		a.c.rec.PrefillDone(time.Now(), a.rooms[0])
	}
	if f == nil || a.ctx.Err() != nil {
		return
	}
	if a.prefillMoot() {
		a.r.cfg.Log.Debug("prefill failed after its work was done", "worker", l.w.name, "room", a.key().String(), "error", f.err)
		return
	}
	a.fail(l, f)
}

// settle ends an attempt that succeeded: the prefill leg gets a moment to end by itself.
func (a *attempt) settle() {
	a.unlink()
	a.stopTimer()
	select {
	case <-a.prefillDone:
		a.r.release(a) // it may have failed
		a.cancel(context.Canceled)
	default:
		a.r.group.spawn(a.settlePrefill)
	}
}

func (a *attempt) settlePrefill() {
	t := time.NewTimer(prefillGrace)
	defer t.Stop()
	select {
	case <-a.prefillDone:
	case <-a.ctx.Done():
	case <-a.r.base.Done():
		a.cancel(a.r.base.Err())
	case <-t.C:
		a.r.cfg.Log.Warn("prefill has not ended although its answer has", "worker", a.prefill.w.name, "room", a.key().String(), "phase", a.prefill.phase())
	}
	a.r.release(a) // unless it has done its part
	a.cancel(context.Canceled)
}
