package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/stack"
)

// leaving is a client that goes away at some point.
type leaving struct {
	t     *testing.T
	s     *stack.Stack
	leave context.CancelFunc
	ended chan answer
}

// ask sends a request whose client will leave.
func ask(t *testing.T, s *stack.Stack, seed, promptLen, max int, streamed bool) *leaving {
	t.Helper()
	ctx, leave := context.WithCancel(t.Context())
	t.Cleanup(leave)
	l := &leaving{t: t, s: s, leave: leave, ended: make(chan answer, 1)}
	go func() {
		l.ended <- stream(ctx, s.URL(), map[string]any{"prompt": prompt(seed, promptLen), "max_tokens": max, "temperature": 0, "stream": streamed, "ignore_eos": true}, nil)
	}()
	return l
}

// at waits until both workers are where check wants them.
func (l *leaving) at(check func(p, d *workerInfo) bool) {
	l.t.Helper()
	eventually(l.t, settleTime, func(ctx context.Context) error {
		if len(l.ended) > 0 {
			l.t.Fatalf("ended before its client left: %v", <-l.ended)
		}
		p, d, err := both(ctx, l.s)
		if err == nil && !check(p, d) {
			err = fmt.Errorf("the phase is not reached: prefill %+v %+v, decode %+v %+v", p.State, p.Rooms, d.State, d.Rooms)
		}
		return err
	})
}

// gone lets the client leave; within a second nothing but want may be left of it.
func (l *leaving) gone(want func(p, d *workerInfo) string) {
	l.t.Helper()
	began := time.Now()
	l.leave()
	eventually(l.t, time.Second, func(ctx context.Context) error {
		p, d, err := both(ctx, l.s)
		if err == nil && want(p, d) != "" {
			err = fmt.Errorf("after the client left: %s", want(p, d))
		}
		return err
	})
	l.t.Logf("both sides were rid of it after %v", time.Since(began).Round(time.Millisecond))
	if a := <-l.ended; a.ok() {
		l.t.Errorf("the client had its answer: %v", a)
	}
}

func both(ctx context.Context, s *stack.Stack) (p, d *workerInfo, err error) {
	if p, err = inspect(ctx, s.Prefills[0]); err != nil {
		return nil, nil, err
	}
	d, err = inspect(ctx, s.Decodes[0])
	return p, d, err
}

// nothing is left.
func nothing(p, d *workerInfo) string {
	if b := p.Busy(); b != "" {
		return "prefill: " + b
	}
	if b := d.Busy(); b != "" {
		return "decode: " + b
	}
	return ""
}

// onlyOne request is left, and its room on both sides.
func onlyOne(p, d *workerInfo) string {
	if p.Live == 1 && d.Live == 1 && p.Rooms.Live <= 1 && d.Rooms.Live <= 1 && p.State.Waiting+p.State.Bootstrap == 0 && d.State.Prealloc == 0 {
		return ""
	}
	return fmt.Sprintf("more than the other request: prefill %d live %+v %+v, decode %d live %+v %+v", p.Live, p.State, p.Rooms, d.Live, d.State, d.Rooms)
}

// TestClientDisconnect: a client that leaves in any phase frees both sides within a second, also
// in the middle of a chunk that takes longer than that.
func TestClientDisconnect(t *testing.T) {
	// One prompt at a time; decode has cells for two requests of 200.
	s, m := startSim(t, simSetup{transport: "tcp", cost: "prefill-chunk=1500ms,step=20ms", prefill: []string{"--max-running", "1"},
		decode: []string{"--kv-cells", "450", "--ctx", "440"}, args: []string{"--ctx", "440"}})
	serves(t, s, m, 1, 2, 1, 2) // a prompt of one token has no chunk
	base := takeBaseline(t, s)
	for _, streamed := range []bool{true, false} {
		name := map[bool]string{true: "stream", false: "whole"}[streamed]
		t.Run("prefilling/"+name, func(t *testing.T) {
			l := ask(t, s, 10, 2*simChunk, 10, streamed)
			l.at(func(p, d *workerInfo) bool { return p.State.Running == 1 && d.State.Transfer == 1 })
			l.gone(nothing)
		})
		t.Run("decoding/"+name, func(t *testing.T) {
			l := ask(t, s, 11, 1, 400, streamed)
			l.at(func(p, d *workerInfo) bool { return p.Live == 0 && d.State.Running == 1 && d.State.CellsUsed > 3 })
			l.gone(nothing)
		})
	}
	t.Run("transferring", func(t *testing.T) {
		l := ask(t, s, 12, 3*simChunk, 10, true)
		// The first chunk is computed and on its way, the second one is being computed.
		l.at(func(p, d *workerInfo) bool {
			return p.State.Running == 1 && p.State.CellsUsed >= simChunk && d.State.Transfer == 1
		})
		l.gone(nothing)
	})
	t.Run("queued at prefill", func(t *testing.T) {
		first := ask(t, s, 13, 2*simChunk, 2, true)
		first.at(func(p, _ *workerInfo) bool { return p.State.Running == 1 })
		l := ask(t, s, 14, 2*simChunk, 2, true)
		l.at(func(p, d *workerInfo) bool { return p.State.Waiting == 1 && d.State.Transfer == 2 })
		l.gone(onlyOne)
		first.gone(nothing)
	})
	t.Run("queued at decode", func(t *testing.T) {
		first := ask(t, s, 15, 1, 400, true)
		first.at(func(_, d *workerInfo) bool { return d.State.Running == 1 })
		l := ask(t, s, 16, 10*simChunk, 200, true) // its cells are not free
		l.at(func(p, d *workerInfo) bool { return d.State.Prealloc == 1 && p.State.Bootstrap == 1 })
		l.gone(func(p, d *workerInfo) string {
			if p.Busy() != "" {
				return "prefill: " + p.Busy()
			}
			if d.Live != 1 || d.State.Prealloc != 0 {
				return fmt.Sprintf("decode: %d live, %+v", d.Live, d.State)
			}
			return ""
		})
		first.gone(nothing)
	})
	base.check(t)
}

// TestClientDisconnectDuringWrite: a chunk is half written and the writer hangs for 3 s. Engine and
// queues are free within a second on both sides, and so are the pages of the decode side, because the
// grant is revoked; only the staging memory that the writer still reads waits for it.
func TestClientDisconnectDuringWrite(t *testing.T) {
	for _, transport := range []string{"tcp", "shm"} {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			s, m := startSim(t, simSetup{transport: transport, model: "dim=128", faults: "post room=* nth=2 halfway for=3s"})
			serves(t, s, m, 1, 2, simChunk+1, 2)
			base := takeBaseline(t, s)
			l := ask(t, s, 20, 2*simChunk+1, 10, true)
			l.at(func(p, d *workerInfo) bool { return p.State.Inflight == 1 && p.Pool.Granted > 0 && d.Pool.Granted > 0 })
			l.gone(func(p, d *workerInfo) string {
				if b := d.Busy(); b != "" {
					return "decode: " + b
				}
				if s := p.State; p.Live != 0 || s.Inflight+s.Running+s.Waiting+s.Bootstrap+s.CellsUsed+s.SeqsUsed != 0 {
					return fmt.Sprintf("prefill: %d live, %+v", p.Live, s)
				}
				return ""
			})
			serves(t, s, m, 30, 8, simChunk+1, 20) // while the writer still hangs: the pages are used again
			base.check(t)
		})
	}
}
