package router

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/router/wire"
)

// status is what the router knows of a worker.
type status uint8

const (
	// statusUnproven: no probe has ended yet. Requests may use it, readiness does not count on it.
	statusUnproven status = 0
	// statusUp: the last probe succeeded. Left by a refused connection, a bad answer to a
	// probe, or silentProbes probes without an answer.
	statusUp status = 1
	// statusOut: not used until a probe succeeds.
	statusOut status = 2
)

// String survives unknown values.
func (s status) String() string {
	switch s {
	case statusUnproven:
		return "unproven"
	case statusUp:
		return "up"
	case statusOut:
		return "out"
	default:
		return fmt.Sprintf("status(%d)", uint8(s))
	}
}

const (
	// silentProbes is how many probes in a row must time out before a worker is out:
	// one may be the fault of a busy machine.
	silentProbes = 2
	// firstReprobe is the pause before the first probe of a worker that just went
	// out; it doubles up to the health interval.
	firstReprobe = 100 * time.Millisecond
	// probeGap is the least time between two probes, whatever asks for them.
	probeGap = 20 * time.Millisecond
	// drainLimit is how much of an unneeded body is read to keep a connection, in bytes.
	drainLimit = 64 << 10
)

// worker is one backend. Its fields are fixed but for those below the line.
type worker struct {
	side     room.Side
	name     string // host:port
	base     *url.URL
	bootHost string
	bootPort int
	zone     string
	models   []string        // all it has; empty: not known
	rt       *http.Transport // for questions; legs go over wire
	wire     *wire.Client
	prefix   string // of legs' paths, escaped
	wantLoad bool   // read its metrics after each probe
	freed    func() // a leg has ended: somebody else may have its place
	signIn   func(http.Header)

	outlier outlier
	series  *legSeries  // set when it joins
	mute    atomic.Bool // it does not tell its tokens, and that was logged
	// nature is written by watch, unless it is fixed by the configuration; settled, which is watch's, means that it needs no asking now.
	nature         atomic.Pointer[nature]
	fixed, settled bool

	// inflight counts attempts of this router whose leg has not ended.
	inflight atomic.Int64
	load     atomic.Pointer[loadReport] // nil before the first
	// state is a copy of status for choosing, written under mu.
	state atomic.Uint32
	kick  chan struct{} // asks for a probe now; buffered
	// releases are the slots of abort requests under way.
	releases chan struct{}
	// leaving: it gets no new requests. Written under the roster's lock.
	leaving atomic.Bool

	// asking is when the first of the probes that have had no answer yet was sent, Unix nanoseconds; 0: none. Written by watch.
	asking atomic.Int64

	mu      sync.Mutex
	since   time.Time // of the state
	reason  string    // why it is out
	silent  int       // probes without an answer in a row
	changed func(w *worker, s status, reason string)
	// lost is called when the worker goes out because it answers no probe.
	lost func(w *worker)
}

func (w *worker) status() status { return status(w.state.Load()) }

// usable: a request may be sent there.
func (w *worker) usable() bool { return w.status() != statusOut }

// set changes the state and tells the observer of a change.
func (w *worker) set(s status, reason string) {
	w.mu.Lock()
	old := w.status()
	w.reason = reason
	if old != s {
		w.state.Store(uint32(s))
		w.since = time.Now()
	}
	w.mu.Unlock()
	if old == s {
		return
	}
	if s == statusOut {
		w.closeIdle() // they lead to a process that may be gone
	}
	w.changed(w, s, reason)
}

// closeIdle closes what connects the router with the worker and carries no leg.
func (w *worker) closeIdle() {
	w.rt.CloseIdleConnections()
	w.wire.CloseIdle()
}

// exclude takes the worker out at once; a probe brings it back.
func (w *worker) exclude(reason string) {
	w.set(statusOut, reason)
	w.probeNow()
}

// probeNow asks for a probe without waiting for it.
func (w *worker) probeNow() {
	select {
	case w.kick <- struct{}{}:
	default: // one is asked for already
	}
}

// why is the state for people: "connection refused, out for 3s".
func (w *worker) why() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.status() != statusOut {
		return w.status().String()
	}
	return fmt.Sprintf("%s, out for %v", w.reason, time.Since(w.since).Round(time.Millisecond))
}

// watch probes the worker until ctx ends.
func (w *worker) watch(ctx context.Context, interval, timeout time.Duration) {
	pause := firstReprobe
	for {
		w.asking.CompareAndSwap(0, time.Now().UnixNano())
		err := w.probe(ctx, timeout)
		if !errors.Is(err, context.DeadlineExceeded) {
			w.asking.Store(0)
		}
		if err == nil {
			w.detect(ctx, timeout)
		}
		w.judge(ctx, err)
		w.wire.Reap()
		if w.status() == statusOut {
			w.settled = false // another server may come back at its address
		}
		if w.wantLoad && w.status() == statusUp {
			w.pollLoad(ctx, interval, timeout)
		}
		wait := interval
		if w.status() == statusOut {
			wait = min(pause, interval)
			pause *= 2
		} else {
			pause = firstReprobe
		}
		if !sleep(ctx, min(probeGap, wait), nil) || !sleep(ctx, wait-probeGap, w.kick) {
			return
		}
	}
}

// sleep waits for d or early; false when ctx has ended.
func sleep(ctx context.Context, d time.Duration, early <-chan struct{}) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-early:
		return true
	case <-t.C:
		return true
	}
}

// judge turns a probe's result into the state.
func (w *worker) judge(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		w.mu.Lock()
		w.silent = 0
		w.mu.Unlock()
		w.set(statusUp, "")
		return
	}
	mute := errors.Is(err, context.DeadlineExceeded)
	if mute {
		w.mu.Lock()
		w.silent++
		silent := w.silent
		w.mu.Unlock()
		if silent < silentProbes {
			w.probeNow()
			return
		}
	}
	was := w.status()
	w.set(statusOut, "health probe: "+err.Error())
	if mute && was != statusOut {
		w.lost(w)
	}
}

// probe asks /health once.
func (w *worker) probe(ctx context.Context, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	a, err := w.ask(ctx, http.MethodGet, "/health", nil, drainLimit)
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("no answer within %v: %w", timeout, context.DeadlineExceeded)
	case err != nil:
		return errors.New(plainError(err))
	case a.status/100 != 2:
		return fmt.Errorf("status %d: %.200s", a.status, bytes.TrimSpace(a.body))
	}
	return nil
}

// asked is a worker's answer to a question of the router's own.
type asked struct {
	status int
	header http.Header
	body   []byte
}

// errSwitched: the worker answered 101. Nothing bounds the reading of what follows: net/http gives such a connection away, and the
// context's end does not close it.
var errSwitched = errors.New("it switches to a protocol that nobody asked for")

// roundTrip sends req. The answer's body ends with req's context, whatever the worker does.
func (w *worker) roundTrip(req *http.Request) (*http.Response, error) {
	resp, err := w.rt.RoundTrip(req)
	if err == nil && resp.StatusCode == http.StatusSwitchingProtocols {
		_ = resp.Body.Close()
		return nil, errSwitched
	}
	return resp, err
}

// ask sends a small request and reads at most limit bytes of the answer; more is an error.
func (w *worker) ask(ctx context.Context, method, path string, body []byte, limit int64) (a asked, err error) {
	req, err := http.NewRequestWithContext(ctx, method, w.base.JoinPath(path).String(), bytes.NewReader(body))
	if err != nil {
		return a, fmt.Errorf("ask %s for %s: %w", w.name, path, err)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	w.signIn(req.Header)
	resp, err := w.roundTrip(req)
	if err != nil {
		return a, err
	}
	defer func() { _ = resp.Body.Close() }()
	a.status, a.header = resp.StatusCode, resp.Header
	if a.body, err = io.ReadAll(io.LimitReader(resp.Body, limit+1)); err != nil {
		return a, err
	}
	if int64(len(a.body)) > limit {
		return a, fmt.Errorf("%s answered %s with more than %d bytes", w.name, path, limit)
	}
	return a, nil
}
