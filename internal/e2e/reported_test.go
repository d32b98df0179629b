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

// Small reproductions of faults that users of other systems reported, on whole processes.

// TestReportedFaults runs the reproductions side by side: they mostly wait.
func TestReportedFaults(t *testing.T) {
	for name, test := range map[string]func(*testing.T){
		"reused pages are safe from late writes": reusedPagesAreSafeFromLateWrites,
		"pages return from a stopped writer":     pagesReturnFromAStoppedWriter,
		"one sided ends":                         oneSidedEnds,
		"cancel while peer is silent":            cancelWhilePeerIsSilent,
		"too large and too busy":                 tooLargeAndTooBusy,
		"chunk larger than staging":              chunkLargerThanStaging,
		"growing answers share cells":            growingAnswersShareCells,
		"blocked head does not block":            blockedHeadDoesNotBlock,
		"one error is forgotten":                 oneErrorIsForgotten,
		"start order does not matter":            startOrderDoesNotMatter,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t)
		})
	}
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

// holder is a request whose last chunk is half written when its client leaves.
func holder(t *testing.T, s *stack.Stack, seed int) (writer *stack.Process) {
	t.Helper()
	a := ask(t, s, seed, 10*simChunk+1, 8, true)
	eventually(t, settleTime, func(ctx context.Context) error {
		for _, p := range s.Prefills {
			n, err := metric(ctx, p, "baton_kv_transfer_in_flight")
			if err != nil {
				return err
			}
			w, err := inspect(ctx, p)
			if err != nil {
				return err
			}
			if n == 1 && w.State.Inflight == 1 {
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
// is killed.
func pagesReturnFromAStoppedWriter(t *testing.T) {
	for _, c := range []struct {
		transport string
		kill      bool
	}{{"tcp", false}, {"shm", false}, {"shm", true}} {
		t.Run(fmt.Sprintf("%s kill=%v", c.transport, c.kill), func(t *testing.T) {
			s, m := startSim(t, simSetup{transport: c.transport, prefills: 2, model: bigModel, faults: "post room=* nth=10 halfway for=1s", decode: onePool})
			w := holder(t, s, 1)
			if err := w.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			eventually(t, settleTime, func(ctx context.Context) error { return idle(ctx, s.Decodes[0]) })
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
// leaves; decode is rid of it within a second, and so is prefill once it goes on.
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
			l := ask(t, s, 2, 3*simChunk, 8, true)
			eventually(t, settleTime, func(ctx context.Context) error {
				d, err := inspect(ctx, s.Decodes[0])
				if err == nil && (d.State.Transfer != 1 || d.Pool.Granted == 0) {
					err = fmt.Errorf("decode: %+v", d.State)
				}
				return err
			})
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

// growingAnswersShareCells is K8: two answers together grow beyond the KV cells, so one is set
// back after its transfer. Both end rightly.
func growingAnswersShareCells(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "shm", cost: "step=500us", decode: []string{"--kv-cells", "700"}})
	serves(t, s, m, 1, 2, 30, 400)
	n, err := metric(t.Context(), s.Decodes[0], "baton_preemptions_total")
	if err != nil || n == 0 {
		t.Errorf("%v preemptions (%v): nothing was shown", n, err)
	}
	quiet(t, s)
}

// blockedHeadDoesNotBlock is K8: a large prompt that waits for pages does not hold up small ones.
func blockedHeadDoesNotBlock(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "shm", model: bigModel, faults: "post nth=10 halfway for=2s", decode: onePool})
	first := ask(t, s, 1, 10*simChunk+1, 8, true)
	first.at(func(p, d *workerInfo) bool { return p.State.Inflight == 1 })
	head := ask(t, s, 2, 9*simChunk, 8, true)
	head.at(func(p, d *workerInfo) bool { return p.State.Bootstrap == 1 })
	serves(t, s, m, 3, 4, simChunk, 8)
	if len(head.ended)+len(first.ended) > 0 {
		t.Error("the large ones had ended before the small ones had: nothing was shown")
	}
	for i, l := range []*leaving{first, head} {
		a := <-l.ended
		if want := m.text(prompt(1+i, []int{10*simChunk + 1, 9 * simChunk}[i]), 8); !a.ok() || a.Text != want {
			t.Errorf("large prompt %d: %v", i, a)
		}
	}
	quiet(t, s)
}

// oneErrorIsForgotten is K10: one failed write, and one failed dial, blame nobody for longer than they last.
func oneErrorIsForgotten(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "tcp", faults: "post nth=2 error=\"link down\"\ndial nth=1 error=\"no route\""})
	serves(t, s, m, 1, 1, simChunk, 8) // the dial is tried again
	a := complete(t.Context(), s.URL(), prompt(2, simChunk), 8, nil, timeoutHeader(10*time.Second)...)
	if a.ok() || a.Cause == nil || (a.Cause.Code != room.CodeTransferFailed && a.Cause.Code != room.CodePeerLost) || !a.Cause.Retryable {
		t.Errorf("the write that failed: %v", a)
	}
	serves(t, s, m, 3, 1, simChunk, 8) // at once
	quiet(t, s)
}

// startOrderDoesNotMatter is K10: decode and router are there first; a prefill worker that
// comes late, and later at the same address again, is used without anybody's help.
func startOrderDoesNotMatter(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "shm"})
	p := s.Prefills[0]
	for round := range 2 {
		p.Kill()
		a := complete(t.Context(), s.URL(), prompt(1, simChunk), 8, nil, timeoutHeader(5*time.Second)...)
		// Usually refused; a connection that was idle a moment ago may break first.
		if a.Cause == nil || (a.Cause.Code != room.CodeUnavailable && a.Cause.Code != room.CodePeerLost) || a.Took > 2*time.Second {
			t.Errorf("while there is no prefill worker: %v", a)
		}
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		usable(t, s)
		serves(t, s, m, 10*round+2, 4, 2*simChunk, 8)
		quiet(t, s)
	}
}
