package router

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// shownFault is something that users of other routers wait for, or are not told of (docs/faults.md, "What the router makes of it").
type shownFault struct {
	name   string
	c      Config
	p, d   script
	leaves time.Duration // the client does then; 0: stays
	ends   time.Duration // when the client has its end
	status int
	cause  string
	begun  string // what it had got of a stream
	retry  string // Retry-After
	held   string // the legs that hold the request until the router releases them
}

// pinging is a stream that has begun and then lives by comments alone, for longer than any test.
func pinging(parts ...any) script {
	for range 200 {
		parts = append(parts, ": ping\n\n", 100*time.Millisecond)
	}
	return sse(parts...)
}

func shownFaults() []shownFault {
	limit := 700 * time.Millisecond
	moment := 20 * time.Millisecond // the other leg has arrived
	refuse := func(status int) script {
		return after(moment, say(status, `{"error":{"message":"full"}}`, "Retry-After", "7"))
	}
	return []shownFault{
		{name: "decode hangs before its first byte", p: silent, d: silent, ends: 2 * time.Second, status: 504, cause: "deadline", held: "pd"},
		{name: "decode hangs before its first token", p: okPrefill, d: sse(role, nil), ends: 2 * time.Second, cause: "deadline", begun: role, held: "d"},
		{name: "decode hangs, and the limit of the first byte is shorter", c: Config{FirstByteTimeout: limit}, p: silent, d: pinging(), ends: limit, status: 504, cause: "deadline", held: "pd"},
		{name: "decode hangs in mid-stream behind pings", c: Config{InterTokenTimeout: limit}, p: silent, d: pinging(role, token), ends: limit, cause: "deadline", begun: role + token, held: "pd"},
		{name: "decode hangs in mid-stream behind pings, without a limit", p: okPrefill, d: pinging(role, token), ends: 2 * time.Second, cause: "deadline", begun: role + token, held: "d"},
		{name: "prefill says 200 and finish abort", p: after(moment, say(200, genAbort)), d: silent, ends: moment, status: 503, cause: "engine_failed", retry: "1", held: "d"},
		{name: "prefill says 200 and finish abort in a stream", p: after(moment, sse(abortLast, done)), d: sse(nil), ends: moment + causeGrace, status: 499, cause: "aborted", held: "d"},
		{name: "the client leaves while decode is silent", p: silent, d: silent, leaves: limit, ends: limit, held: "pd"},
		{name: "the client leaves while decode has stalled", p: okPrefill, d: sse(role, token, nil), leaves: limit, ends: limit, held: "d"},
		{name: "the client leaves while decode only pings", p: silent, d: pinging(role, token), leaves: limit, ends: limit, held: "pd"},
		{name: "the client leaves while prefill is silent", p: silent, d: sse(nil), leaves: limit, ends: limit, held: "pd"},
		{name: "the stream is cut without finish", p: silent, d: sse(moment, role, token), ends: moment, cause: "protocol", begun: role + token, held: "p"},
		{name: "the stream is reset", p: silent, d: sse(moment, role, token, errReset), ends: moment, cause: "peer_lost", begun: role + token, held: "p"},
		{name: "decode is full and says 429", p: silent, d: refuse(429), ends: moment, status: 429, cause: "capacity", retry: "7", held: "p"},
		{name: "decode is full and says 503", p: silent, d: refuse(503), ends: moment, status: 503, cause: "unavailable", retry: "7", held: "p"},
		{name: "prefill is full and says 503", p: refuse(503), d: silent, ends: moment, status: 503, cause: "unavailable", retry: "7", held: "d"},
		{name: "prefill says 400 and decode nothing", p: after(moment, say(400, `{"error":{"message":"m"}}`)), d: silent, ends: moment, status: 400, cause: "invalid_request", held: "d"},
	}
}

// check is the client's side.
func (s *shownFault) check(t *testing.T, g got) {
	t.Helper()
	switch {
	case s.leaves > 0:
		if g.err == nil {
			t.Fatalf("a client that left got %d %q", g.status, g.body)
		}
		return
	case s.begun == "":
		g.fails(t, s.status, s.cause)
		if r := g.header.Get("Retry-After"); r != s.retry {
			t.Errorf("Retry-After %q, want %q", r, s.retry)
		}
		return
	}
	pings := strings.Count(g.body, ": ping\n\n")
	g.body = strings.ReplaceAll(g.body, ": ping\n\n", "")
	if e := g.breaks(t, s.begun, s.cause); e.Error.Room == "" || e.Error.Phase == "" || e.Error.Peer == "" {
		t.Errorf("the error does not say where (after %d pings): %s", pings, g.body)
	}
}

// TestShownFaults: to the millisecond, in simulated time: when the client has which end, and that both legs are released within a
// second of it, by the connection's end and by /abort_request.
func TestShownFaults(t *testing.T) {
	for _, s := range shownFaults() {
		t.Run(s.name, func(t *testing.T) {
			inBubble(t, s.c, []script{s.p}, []script{s.d}, func(t *testing.T, b *bed, p, d []*fake) {
				ctx := t.Context()
				if s.leaves > 0 {
					var leave context.CancelFunc
					ctx, leave = context.WithTimeout(ctx, s.leaves)
					defer leave()
				}
				g := b.post(ctx, "/v1/chat/completions", streamBody, HeaderTimeout, "2000")
				end := time.Now()
				if s.check(t, g); g.took < s.ends || g.took > s.ends+500*time.Millisecond {
					t.Errorf("it ended after %v, want %v", g.took, s.ends)
				}
				<-time.After(3 * time.Second)
				if strings.Contains(s.held, "p") {
					p[0].released(0, end, time.Second)
				}
				if strings.Contains(s.held, "d") {
					d[0].released(0, end, time.Second)
				}
			})
		})
	}
}

// TestShownFaultsOverTCP: the same over real sockets, without a clock: it happens at all.
func TestShownFaultsOverTCP(t *testing.T) {
	for _, s := range shownFaults() {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			both := newMeeting(2)
			worker := func(sc script) *fake {
				met := func(w http.ResponseWriter, r *http.Request, l *leg1) {
					both.arrive(r.Context())
					sc(w, r, l)
				}
				f := &fake{t: t, script: met, aborts: map[string]time.Time{}}
				srv := httptest.NewServer(f)
				t.Cleanup(srv.Close)
				f.addr = srv.Listener.Addr().String()
				return f
			}
			p, d := worker(s.p), worker(s.d)
			srv := overTCP(t, s.c, p.addr, d.addr)
			ctx := t.Context()
			if s.leaves > 0 {
				var leave context.CancelFunc
				ctx, leave = context.WithCancel(ctx)
				defer leave()
				go func() {
					defer leave()
					limit := time.After(must)
					for p.count() == 0 || d.count() == 0 { // both legs have arrived
						select {
						case <-time.After(5 * time.Millisecond):
						case <-limit:
							return // an answer would be told of
						}
					}
				}()
			}
			b := &bed{t: t, client: srv.Client()}
			s.check(t, b.postTo(ctx, srv.URL+"/v1/chat/completions", streamBody, HeaderTimeout, "2000"))
			for leg, f := range map[string]*fake{"p": p, "d": d} {
				if strings.Contains(s.held, leg) {
					eventually(t, func() error {
						f.mu.Lock()
						defer f.mu.Unlock()
						if len(f.legs) == 1 && f.legs[0].closed && len(f.aborts) == 1 {
							return nil
						}
						return fmt.Errorf("%s has seen %d legs and %d aborts, and is not rid of them", f.addr, len(f.legs), len(f.aborts))
					})
				}
			}
		})
	}
}

// A worker that answers nothing, not even an abort, does not keep others from being told: when many clients leave at once, all
// prefill legs are released within a second.
func TestStuckAbortsHinderNobody(t *testing.T) {
	const clients = 4 * releaseAtOnce
	inBubble(t, Config{}, []script{silent}, []script{silent}, func(t *testing.T, b *bed, p, d []*fake) {
		d[0].mu.Lock()
		d[0].stuck = true
		d[0].mu.Unlock()
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		var wg sync.WaitGroup
		for range clients {
			wg.Go(func() { b.post(ctx, "/v1/chat/completions", streamBody) })
		}
		<-time.After(time.Second)
		left := time.Now()
		leave()
		wg.Wait()
		<-time.After(10 * time.Second)
		for i := range clients {
			p[0].released(i, left, time.Second)
		}
	})
}
