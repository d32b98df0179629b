package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/stack"
)

// workerInfo is a worker's accounting.
type workerInfo = stack.WorkerInfo

func inspect(ctx context.Context, p *stack.Process) (*workerInfo, error) { return p.Inspect(ctx) }

func metric(ctx context.Context, p *stack.Process, name string) (float64, error) {
	return p.Metric(ctx, name)
}

// baseline is the footprint of each process of an idle stack.
type baseline struct {
	s  *stack.Stack
	at map[*stack.Process]stack.Footprint
}

// takeBaseline waits until s is idle and measures it until two samples agree.
func takeBaseline(t *testing.T, s *stack.Stack) *baseline {
	t.Helper()
	b := &baseline{s: s, at: map[*stack.Process]stack.Footprint{}}
	waitIdle(t, s, settleTime)
	for _, p := range s.All() {
		var last stack.Footprint
		eventually(t, settleTime, func(ctx context.Context) error {
			now, err := p.Footprint(ctx)
			if err == nil && now != last {
				last, err = now, fmt.Errorf("footprint of %s still moves: %v", p.Name, now)
			}
			return err
		})
		b.at[p] = last
	}
	return b
}

// check waits until every process is back at the baseline and no invariant was broken.
func (b *baseline) check(t *testing.T) {
	t.Helper()
	waitIdle(t, b.s, settleTime)
	for _, p := range b.s.All() {
		eventually(t, settleTime, func(ctx context.Context) error {
			now, err := p.Footprint(ctx)
			if err == nil && !now.Within(b.at[p]) {
				err = fmt.Errorf("%s holds %v; idle it held %v", p.Name, now, b.at[p])
			}
			return err
		})
	}
	for _, p := range workers(b.s) {
		w, err := inspect(t.Context(), p)
		if err != nil {
			t.Error(err)
		} else if f := w.Faults(); f != "" {
			t.Errorf("%s: %s", p.Name, f)
		}
	}
}

func workers(s *stack.Stack) []*stack.Process { return s.Workers() }

// settleTime bounds waits for something that must happen soon; only a failing test waits for it.
const settleTime = 15 * time.Second

// waitIdle waits until no worker (and no router) holds anything, and returns how long that took.
func waitIdle(t *testing.T, s *stack.Stack, limit time.Duration) time.Duration {
	t.Helper()
	began := time.Now()
	for _, p := range workers(s) {
		eventually(t, limit, func(ctx context.Context) error {
			w, err := inspect(ctx, p)
			if err == nil && w.Busy() != "" {
				err = fmt.Errorf("%s: %s", p.Name, w.Busy())
			}
			return err
		})
	}
	if s.Router != nil {
		eventually(t, limit, func(ctx context.Context) error {
			n, err := metric(ctx, s.Router, "baton_router_inflight_requests")
			if err == nil && n != 0 {
				err = fmt.Errorf("router: %v requests in flight", n)
			}
			return err
		})
	}
	return time.Since(began)
}

// eventually polls check until it returns nil; the test fails with its last error after limit.
func eventually(t *testing.T, limit time.Duration, check func(context.Context) error) {
	t.Helper()
	if err := poll(t.Context(), limit, check); err != nil {
		t.Fatalf("not within %v: %v", limit, err)
	}
}

// poll runs check every 10 ms until it returns nil; its last error after limit.
func poll(ctx context.Context, limit time.Duration, check func(context.Context) error) error {
	ctx, stop := context.WithTimeout(ctx, limit)
	defer stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if last == nil || ctx.Err() == nil { // an error of the end itself says nothing
			last = err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return last
		}
	}
}

// TestFootprintLeavesOutConnections: what a router holds is not less, and not more, for the connections that it keeps after a burst.
func TestFootprintLeavesOutConnections(t *testing.T) {
	t.Parallel()
	s, m := startSim(t, simSetup{transport: "tcp", model: "seed=3"})
	usable(t, s)
	before := takeBaseline(t, s)
	serves(t, s, m, 1, 16, 20, 4)
	after := takeBaseline(t, s)
	if a, b := after.at[s.Router], before.at[s.Router]; !a.Within(b) || !b.Within(a) {
		t.Errorf("the router holds %v, before its requests it held %v", a, b)
	}
}
