package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/stack"
)

// Kinds of faults that others reported (docs/reported.md), on whole processes: K1 to K7. The others are in
// reported_more_test.go, those of the API in reported_api_test.go.

// kind runs the cases of one kind side by side: they mostly wait.
func kind(t *testing.T, cases map[string]func(*testing.T)) {
	t.Parallel()
	for name, test := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t)
		})
	}
}

func TestReportedK1PageReuse(t *testing.T) {
	kind(t, map[string]func(*testing.T){"reused pages are safe from late writes": reusedPagesAreSafeFromLateWrites})
}

func TestReportedK2EarlyCompletion(t *testing.T) {
	kind(t, map[string]func(*testing.T){"decode stands still": decodeStandsStill})
}

func TestReportedK3Identity(t *testing.T) {
	kind(t, map[string]func(*testing.T){"two requests claim one room": twoRequestsClaimOneRoom})
}

func TestReportedK4OneSidedEnd(t *testing.T) {
	kind(t, map[string]func(*testing.T){
		"one sided ends":           oneSidedEnds,
		"a worker is asked to end": aWorkerIsAskedToEnd,
	})
}

func TestReportedK5CancelRace(t *testing.T) {
	kind(t, map[string]func(*testing.T){"cancel while peer is silent": cancelWhilePeerIsSilent})
}

func TestReportedK6ForgottenResource(t *testing.T) {
	kind(t, map[string]func(*testing.T){"pages return from a stopped writer": pagesReturnFromAStoppedWriter})
}

func TestReportedK7Deadline(t *testing.T) {
	kind(t, map[string]func(*testing.T){
		"too large and too busy":    tooLargeAndTooBusy,
		"chunk larger than staging": chunkLargerThanStaging,
	})
}

// bigModel has 4 KiB of KV a token, so that a chunk is 17 pages and a pool of 1 MiB has pages
// for 15 chunks.
const bigModel = "dim=512"

var onePool = []string{"--pool-mib", "1"}

// lateWrites waits until p's held half of a write was refused because its grant is revoked.
func lateWrites(t *testing.T, p *stack.Process) {
	t.Helper()
	eventually(t, settleTime, func(ctx context.Context) error {
		n, err := metric(ctx, p, "baton_kv_transfer_errors_total")
		if err == nil && n == 0 {
			err = errors.New("the late half of the write was not refused")
		}
		return err
	})
}

// holder is the stack's first request, whose last chunk of ten is half written when its client leaves.
func holder(t *testing.T, s *stack.Stack, seed int) (writer *stack.Process) {
	t.Helper()
	a := ask(t, s, seed, 10*simChunk+1, 8, true)
	eventually(t, settleTime, func(ctx context.Context) error {
		for _, p := range s.Prefills {
			n, err := metric(ctx, p, "baton_kv_transfer_in_flight")
			if err != nil {
				return err
			}
			written, err := metric(ctx, p, "baton_kv_transfer_writes_total")
			if err != nil {
				return err
			}
			w, err := inspect(ctx, p)
			if err != nil {
				return err
			}
			if n == 1 && written == 9 && w.State.Inflight == 1 { // the tenth, and no earlier one that is a little late
				writer = p
				return nil
			}
		}
		return errors.New("no last chunk is half written")
	})
	if len(a.ended) > 0 {
		t.Fatalf("ended early: %v", <-a.ended)
	}
	a.leave()
	return writer
}

// reusedPagesAreSafeFromLateWrites is K1: a request is cancelled while its last chunk is half
// written; the next one needs its pages while the writer still hangs, and gets them, because the
// grant is revoked; the second half comes late and is refused.
func reusedPagesAreSafeFromLateWrites(t *testing.T) {
	for _, transport := range []string{"tcp", "shm"} {
		t.Run(transport, func(t *testing.T) {
			s, m := startSim(t, simSetup{transport: transport, model: bigModel, faults: "post nth=10 halfway for=2s", decode: onePool})
			w := holder(t, s, 1)
			serves(t, s, m, 2, 1, 14*simChunk+1, 8) // 238 of 256 pages
			n, err := metric(t.Context(), w, "baton_kv_transfer_in_flight")
			if err != nil || n != 1 {
				t.Errorf("the writer did not hang any more (%v in flight, %v): nothing was shown", n, err)
			}
			lateWrites(t, w)
			serves(t, s, m, 3, 1, 14*simChunk+1, 8)
			quiet(t, s)
		})
	}
}

// quiet: everything returned, no invariant was broken.
func quiet(t *testing.T, s *stack.Stack) {
	t.Helper()
	waitIdle(t, s, settleTime)
	for _, p := range workers(s) {
		w, err := inspect(t.Context(), p)
		if err != nil {
			t.Error(err)
		} else if f := w.Faults(); f != "" {
			t.Errorf("%s: %s", p.Name, f)
		}
	}
}

// pagesReturnFromAStoppedWriter is K6: a request is cancelled in the middle of a write, and its prefill
// worker is stopped, so that no ack ever comes. The pages return all the same, by the fence, and serve another
// request through the other prefill worker. The stopped one goes on, and its late write is refused. Or it
// is killed, later or at once.
func pagesReturnFromAStoppedWriter(t *testing.T) {
	for _, c := range []struct {
		transport  string
		stop, kill bool
	}{{"tcp", true, false}, {"shm", true, false}, {"shm", true, true}, {"tcp", false, true}, {"shm", false, true}} {
		t.Run(fmt.Sprintf("%s stop=%v kill=%v", c.transport, c.stop, c.kill), func(t *testing.T) {
			s, m := startSim(t, simSetup{transport: c.transport, prefills: 2, model: bigModel, faults: "post room=* nth=10 halfway for=1s", decode: onePool})
			w := holder(t, s, 1)
			within := settleTime
			if c.stop {
				if err := w.Signal(syscall.SIGSTOP); err != nil {
					t.Fatal(err)
				}
			} else {
				within = time.Second
				w.Kill()
			}
			eventually(t, within, func(ctx context.Context) error { return idle(ctx, s.Decodes[0]) })
			serves(t, s, m, 2, 1, 9*simChunk+1, 8) // perhaps tried on the stopped one first
			if c.kill {
				w.Kill()
				if err := w.Start(t.Context()); err != nil {
					t.Fatal(err)
				}
			} else {
				if err := w.Signal(syscall.SIGCONT); err != nil {
					t.Fatal(err)
				}
				lateWrites(t, w)
			}
			usable(t, s)
			serves(t, s, m, 3, 2, 9*simChunk+1, 8)
			quiet(t, s)
		})
	}
}

// leg sends a request to one worker alone, as a router that forgets the other would.
func leg(ctx context.Context, p *stack.Process, boot string, room int, prompt []engine.Token, header ...string) answer {
	_, port, _ := net.SplitHostPort(boot)
	n, _ := strconv.Atoi(port)
	began := time.Now()
	a := stream(ctx, p.URL(), map[string]any{"prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": true, "ignore_eos": true,
		"bootstrap_host": "127.0.0.1", "bootstrap_port": n, "bootstrap_room": room}, nil, header...)
	a.Took = time.Since(began)
	return a
}

// failedWith checks how and how soon a request failed.
func failedWith(t *testing.T, a answer, code room.Code, within time.Duration) {
	t.Helper()
	if a.Cause == nil || a.Cause.Code != code {
		t.Errorf("%v, want cause %s", a, code)
	}
	if a.Took > within {
		t.Errorf("it took %v, want at most %v: %v", a.Took, within, a)
	}
}

// oneSidedEnds is K4: whichever side refuses, or never hears of the request, the other is told within
// a bound that is not the long timeout.
func oneSidedEnds(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "tcp", cost: "prefill-chunk=700ms", prefill: []string{"--max-running", "1", "--max-queue", "1"},
		args: []string{"--park-timeout", "800ms", "--bootstrap-timeout", "1200ms"}})
	serves(t, s, m, 1, 1, 1, 2)
	boot := s.Prefills[0].Bootstrap
	t.Run("prefill never hears of it", func(t *testing.T) {
		a := leg(t.Context(), s.Decodes[0], boot, 101, prompt(2, 2*simChunk), timeoutHeader(time.Minute)...)
		failedWith(t, a, room.CodeDeadline, 3*time.Second)
		quiet(t, s)
	})
	t.Run("decode never hears of it", func(t *testing.T) {
		a := leg(t.Context(), s.Prefills[0], boot, 102, prompt(3, 2*simChunk), timeoutHeader(time.Minute)...)
		failedWith(t, a, room.CodeDeadline, 3*time.Second)
		quiet(t, s)
	})
	t.Run("prefill refuses", func(t *testing.T) {
		running := ask(t, s, 4, 4*simChunk, 2, true)
		running.at(func(p, d *workerInfo) bool { return p.State.Running == 1 })
		queued := ask(t, s, 5, 4*simChunk, 2, true)
		queued.at(func(p, d *workerInfo) bool { return p.State.Waiting == 1 && d.State.Transfer == 2 })
		a := complete(t.Context(), s.URL(), prompt(6, 2*simChunk), 2, nil)
		failedWith(t, a, room.CodeCapacity, time.Second)
		if a.Status != http.StatusServiceUnavailable {
			t.Errorf("status %d, want 503", a.Status)
		}
		eventually(t, time.Second, func(ctx context.Context) error { // the decode side was told
			_, d, err := both(ctx, s)
			if err == nil && (d.Live != 2 || d.Rooms.Live != 2) {
				err = fmt.Errorf("decode: %d live, %d rooms, want the 2 others", d.Live, d.Rooms.Live)
			}
			return err
		})
		queued.gone(onlyOne)
		running.gone(nothing)
		quiet(t, s)
	})
}

// cancelWhilePeerIsSilent is K5: a request waits for KV from a prefill worker that says nothing. Its client
// leaves after 200 ms; decode is rid of it within a second, and so is prefill once it goes on.
func cancelWhilePeerIsSilent(t *testing.T) {
	for _, transport := range []string{"tcp", "shm"} {
		t.Run(transport, func(t *testing.T) {
			s, m := startSim(t, simSetup{transport: transport})
			serves(t, s, m, 1, 2, simChunk+1, 2)
			base := takeBaseline(t, s)
			p := s.Prefills[0]
			if err := p.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			l := ask(t, s, 2, 3*simChunk, 8, true)
			eventually(t, settleTime, func(ctx context.Context) error {
				d, err := inspect(ctx, s.Decodes[0])
				if err == nil && (d.State.Transfer != 1 || d.Pool.Granted == 0) {
					err = fmt.Errorf("decode: %+v", d.State)
				}
				return err
			})
			after(t, 200*time.Millisecond-time.Since(began)) // as reported
			l.leave()
			eventually(t, time.Second, func(ctx context.Context) error { return idle(ctx, s.Decodes[0]) })
			if err := p.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			usable(t, s)
			base.check(t)
			serves(t, s, m, 3, 4, 3*simChunk, 8)
			base.check(t)
		})
	}
}

// tooLargeAndTooBusy is K7: what can never fit is refused at once, and what waits for
// pages that do not come ends by its deadline.
func tooLargeAndTooBusy(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "tcp", model: bigModel, faults: "post nth=10 halfway for=4s", decode: onePool})
	t.Run("larger than the pool", func(t *testing.T) {
		a := complete(t.Context(), s.URL(), prompt(1, 20*simChunk), 8, nil, timeoutHeader(time.Minute)...)
		failedWith(t, a, room.CodeCapacity, time.Second)
		quiet(t, s)
	})
	t.Run("pages in use", func(t *testing.T) {
		big := ask(t, s, 2, 10*simChunk+1, 8, true)
		big.at(func(p, d *workerInfo) bool { return p.State.Inflight == 1 })
		a := complete(t.Context(), s.URL(), prompt(3, 8*simChunk), 8, nil, timeoutHeader(time.Second)...)
		failedWith(t, a, room.CodeDeadline, 2*time.Second)
		serves(t, s, m, 4, 4, simChunk+1, 8) // these fit beside it
		if a := <-big.ended; !a.ok() || a.Text != m.text(prompt(2, 10*simChunk+1), 8) {
			t.Errorf("the one that had the pages: %v", a)
		}
		quiet(t, s)
	})
}

// chunkLargerThanStaging is K7 on the other side: the prefill worker can never hand a chunk over.
func chunkLargerThanStaging(t *testing.T) {
	s, _ := startSim(t, simSetup{transport: "tcp", model: "dim=8192", args: []string{"--pool-mib", "3"}, prefill: []string{"--pool-mib", "1", "--page-bytes", "1048576"}})
	for round := range 2 {
		a := complete(t.Context(), s.URL(), prompt(round, 2*simChunk+1), 8, nil, timeoutHeader(time.Minute)...)
		failedWith(t, a, room.CodeCapacity, 2*time.Second)
		quiet(t, s)
	}
}

// aWorkerIsAskedToEnd is K4 as an operator meets it: SIGTERM while a prompt is computed and while an answer is written. The
// client hears of it when the grace is over, and the other worker is rid of the request.
func aWorkerIsAskedToEnd(t *testing.T) {
	for _, c := range []struct {
		name string
		at   func(p, d *workerInfo) bool
		max  int
	}{
		{"prefill", func(p, d *workerInfo) bool { return p.State.Running == 1 && d.State.Transfer == 1 }, 8},
		{"decode", func(p, d *workerInfo) bool { return p.Live == 0 && d.State.Running == 1 }, 400},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, m := startSim(t, simSetup{transport: "tcp", cost: "prefill-chunk=900ms,step=20ms", args: []string{"--shutdown-grace", "300ms"}})
			victim, other, tokens := s.Prefills[0], s.Decodes[0], 4*simChunk
			if c.name == "decode" {
				victim, other, tokens = other, victim, 1
			}
			l := ask(t, s, 1, tokens, c.max, true)
			l.at(c.at)
			began := time.Now()
			if err := victim.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			a := <-l.ended
			if a.Cause == nil || a.Cause.Code != room.CodeShutdown && a.Cause.Code != room.CodePeerLost || a.Done || a.Finish != "" {
				t.Errorf("the client: %v", a)
			}
			if took := time.Since(began); took > 300*time.Millisecond+time.Second {
				t.Errorf("the client heard of it after %v: %v", took, a)
			}
			eventually(t, time.Second, func(ctx context.Context) error { return idle(ctx, other) })
			victim.Wait()
			if err := victim.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			usable(t, s)
			serves(t, s, m, 2, 1, simChunk+1, 4)
			quiet(t, s)
		})
	}
}

// decodeStandsStill is K2: 8 MiB of KV are on their way when the decode process stops. The prefill side must not take
// its socket for the destination: it is not done before decode goes on, and then the answer is right.
func decodeStandsStill(t *testing.T) {
	for _, transport := range []string{"tcp", "shm"} {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			s, m := startSim(t, simSetup{transport: transport, model: "dim=2048", cost: "prefill-chunk=20ms", args: []string{"--pool-mib", "10"}})
			serves(t, s, m, 1, 1, 1, 2)
			a := ask(t, s, 2, 32*simChunk+1, 4, true)
			a.at(func(p, d *workerInfo) bool { return p.State.Running == 1 && d.Pool.Granted > 0 })
			if err := s.Decodes[0].Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			// Far longer than the prompt takes, and not as long as the keepalive.
			after(t, time.Second)
			p, err := inspect(t.Context(), s.Prefills[0])
			if err != nil {
				t.Fatal(err)
			}
			if p.Live != 1 || p.Rooms.Live != 1 || p.Pool.Granted == 0 || len(a.ended) != 0 {
				t.Errorf("with decode stopped: %d live, rooms %+v, pages %+v, ended %v", p.Live, p.Rooms, p.Pool, len(a.ended) != 0)
			}
			if err := s.Decodes[0].Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			if got := <-a.ended; !got.ok() || got.Text != m.text(prompt(2, 32*simChunk+1), 4) {
				t.Errorf("after it went on: %v %q", got, got.Text)
			}
			quiet(t, s)
		})
	}
}

// twoRequestsClaimOneRoom is K3: two clients that make their own room ids choose the same, with different prompts, and the
// four legs come in any order. Nobody gets the other's answer, nobody waits.
func twoRequestsClaimOneRoom(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "shm", args: []string{"--park-timeout", "2s"}})
	right, refused := 0, 0
	for round := range 12 {
		ends := make(chan asked, 4)
		for client := range 2 {
			p := prompt(100*round+client, 3*simChunk+1)
			for _, w := range []*stack.Process{s.Prefills[0], s.Decodes[0]} {
				go func() {
					a := leg(t.Context(), w, s.Prefills[0].Bootstrap, 9000+round, p, timeoutHeader(time.Minute)...)
					if w == s.Prefills[0] && a.ok() {
						a.Text = m.text(p, 8) // it has none
					}
					ends <- asked{p, a}
				}()
			}
		}
		for range 4 {
			e := <-ends
			switch a := e.answer; {
			case a.ok() && a.Text == m.text(e.prompt, 8):
				right++
			case a.ok():
				t.Errorf("round %d: a wrong answer %q", round, a.Text)
			case a.Cause == nil || a.Took > 5*time.Second:
				t.Errorf("round %d: %v", round, a)
			default:
				refused++
			}
		}
	}
	t.Logf("%d legs were right, %d were refused", right, refused)
	if right+refused != 48 || refused < 12 {
		t.Errorf("%d legs were right, %d were refused: in each round at most one client can have the room", right, refused)
	}
	quiet(t, s)
}
