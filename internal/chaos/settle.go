package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/stack"
	"github.com/baton-pd/baton/internal/trace"
)

const (
	// settleTime bounds the waits for something that must happen soon; only a failing run waits so long.
	settleTime = 30 * time.Second
	// heapSlack is how much more live memory than at the baseline is no leak: buffers, pools of buffers, and
	// what the last collection, which may have run under load, still found in use.
	heapSlack = 48 << 20
)

// idleState is what an idle process holds.
type idleState struct {
	stack.Footprint
	heap float64 // bytes live at the last collection
}

// poll runs check every 20 ms until it returns nil; its last error after settleTime.
func poll(ctx context.Context, check func(context.Context) error) error {
	ctx, stop := context.WithTimeout(ctx, settleTime)
	defer stop()
	var last error
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if last == nil || ctx.Err() == nil { // an error of the end itself says nothing
			last = err
		}
		if !pause(ctx, 20*time.Millisecond) {
			return last
		}
	}
}

// allUp waits until the router would use every worker.
func (r *run) allUp(ctx context.Context) error {
	return poll(ctx, func(ctx context.Context) error {
		up, err := r.s.Router.Metric(ctx, "baton_router_worker_up")
		if n := len(r.s.Workers()); err == nil && int(up) != n {
			err = fmt.Errorf("the router would use %v of %d workers", up, n)
		}
		return err
	})
}

// quiet waits until nobody holds anything.
func (r *run) quiet(ctx context.Context) error {
	var errs []error
	for _, p := range r.s.Workers() {
		errs = append(errs, poll(ctx, func(ctx context.Context) error {
			w, err := p.Inspect(ctx)
			if err == nil && w.Busy() != "" {
				err = fmt.Errorf("%s: %s", p.Name, w.Busy())
			}
			return err
		}))
	}
	errs = append(errs, poll(ctx, func(ctx context.Context) error {
		n, err := r.s.Router.Metric(ctx, "baton_router_inflight_requests")
		if err == nil && n != 0 {
			err = fmt.Errorf("router: %v requests in flight", n)
		}
		return err
	}))
	return errors.Join(errs...)
}

// state measures an idle process.
func state(ctx context.Context, p *stack.Process) (idleState, error) {
	f, err := p.Footprint(ctx)
	if err != nil {
		return idleState{}, err
	}
	next, err := p.Metric(ctx, "go_memstats_next_gc_bytes")
	return idleState{f, next / 2}, err // the collector lets live memory double
}

// baseline measures every process of the idle stack until two samples agree.
func (r *run) baseline(ctx context.Context) (map[string]idleState, error) {
	if err := r.quiet(ctx); err != nil {
		return nil, fmt.Errorf("chaos: no idle baseline: %w", err)
	}
	out := map[string]idleState{}
	for _, p := range r.s.All() {
		var last idleState
		err := poll(ctx, func(ctx context.Context) error {
			now, err := state(ctx, p)
			if err == nil && now.Footprint != last.Footprint {
				err = fmt.Errorf("what %s holds still moves: %v", p.Name, now.Footprint)
			}
			last = now
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("chaos: no idle baseline: %w", err)
		}
		out[p.Name] = last
	}
	return out, nil
}

// held compares the idle stack with the baseline and returns the differences.
func (r *run) held(ctx context.Context) (out []string) {
	if err := r.quiet(ctx); err != nil {
		out = append(out, err.Error())
	}
	for _, p := range r.s.All() {
		base := r.base[p.Name]
		err := poll(ctx, func(ctx context.Context) error {
			now, err := state(ctx, p)
			switch {
			case err != nil:
				return err
			case !now.Within(base.Footprint):
				return fmt.Errorf("%s holds %v; idle it held %v", p.Name, now.Footprint, base.Footprint)
			case now.heap > base.heap+heapSlack:
				return fmt.Errorf("%s has %.0f MiB of live memory; idle it had %.0f", p.Name, now.heap/(1<<20), base.heap/(1<<20))
			}
			return nil
		})
		if err != nil {
			out = append(out, err.Error())
		}
	}
	for _, p := range r.s.Workers() {
		w, err := p.Inspect(ctx)
		switch {
		case err != nil:
			out = append(out, err.Error())
		case w.Faults() != "":
			out = append(out, p.Name+": "+w.Faults())
		}
	}
	return out
}

// drawCalm is a request of those that nothing happens to.
func (r *run) drawCalm(i int) Ask {
	return r.cfg.Work.Draw(rand.New(rand.NewPCG(r.cfg.Seed, uint64(calm+i))), SizeAny)
}

// settle waits until everything is back, asks once more, and looks at what is held and counted.
func (r *run) settle(ctx context.Context) error {
	h := &r.hist
	after := len(r.cfg.Faults) + r.cfg.Requests
	if err := r.allUp(ctx); err != nil {
		h.Idle = append(h.Idle, "after the last fault: "+err.Error())
	}
	if err := pauseFor(ctx, time.Second); err != nil { // connections that a fault broke without a word are found
		return err
	}
	var wg sync.WaitGroup
	for i := range 4 * r.cfg.World.Prefills * r.cfg.World.Decodes {
		wg.Go(func() {
			if e, err := r.quietly(ctx, r.drawCalm(after+i)); err != nil {
				r.mu.Lock()
				h.Idle = append(h.Idle, fmt.Sprintf("after the last fault: %v (%v)", err, e))
				r.mu.Unlock()
			}
		})
	}
	wg.Wait()
	h.Idle = append(h.Idle, r.held(ctx)...)
	for _, p := range r.s.All() {
		l, err := r.lifeOf(ctx, p)
		if err != nil {
			h.Idle = append(h.Idle, err.Error())
			continue
		}
		h.Lives = append(h.Lives, l)
	}
	return ctx.Err()
}

func pauseFor(ctx context.Context, d time.Duration) error {
	pause(ctx, d)
	return ctx.Err()
}

// lifeOf reads the counters of a process that is idle.
func (r *run) lifeOf(ctx context.Context, p *stack.Process) (Life, error) {
	m, err := p.Metrics(ctx)
	if err != nil {
		return Life{}, err
	}
	l := Life{Process: p.Name, Life: r.log.lifeOf(p.Name), Final: true}
	if p == r.s.Router {
		l.Requests = map[string]int{}
	}
	for key, v := range m {
		name, labels, _ := strings.Cut(key, "{")
		switch {
		case name == "baton_router_requests_total" && v != 0:
			l.Requests[label(labels, "outcome")+"/"+label(labels, "cause")] = int(v)
		case name == "baton_rooms_ended_total" && label(labels, "state") == "failed":
			l.FailedRooms += int(v)
		case name == "baton_session_handler_panics_total" && v != 0:
			r.log.remark(fmt.Sprintf("%s: %v panics of session handlers", p.Name, v))
		}
	}
	return l, nil
}

// label finds a label's value in what is between a sample's braces.
func label(labels, name string) string {
	_, rest, ok := strings.Cut(","+labels, ","+name+`="`)
	if !ok {
		return ""
	}
	value, _, _ := strings.Cut(rest, `"`)
	return value
}

// report judges what is on record. The stack has ended.
func (r *run) report() *Report {
	h := &r.hist
	traced := r.checkTrace()
	h.Faults, h.Wide = r.dist.done, r.net.wide
	h.Lines, h.Failures, h.Odd = r.log.lines, r.log.failures, r.log.odd
	rep := &Report{Seed: r.cfg.Seed, Network: r.net.about, Requests: len(h.Requests), Ends: map[string]int{}, Faults: map[Kind]int{},
		Packets: r.net.counts(), Rooms: len(h.Failures), Trace: traced, Latest: -time.Hour}
	for _, s := range h.Starved {
		rep.Starved += s.To - s.From
	}
	for _, q := range h.Requests {
		e := h.Ends[q.ID]
		rep.Ends[e.Kind()]++
		took := e.Over - e.Sent
		rep.Slowest = max(rep.Slowest, took)
		if !e.Left {
			rep.Latest = max(rep.Latest, took-max(q.Deadline, 0))
		}
	}
	for _, f := range h.Faults {
		rep.Faults[f.Kind]++
	}
	for _, n := range r.log.life {
		rep.Restarts += n
	}
	rep.Violations = Judge(h)
	return rep
}

// checkTrace checks the recorded room events of all workers.
func (r *run) checkTrace() string {
	var sources []trace.Source
	for _, name := range r.s.Traces() {
		f, err := os.Open(name)
		if err != nil {
			r.hist.Trace = append(r.hist.Trace, err.Error())
			continue
		}
		defer f.Close()
		sources = append(sources, trace.Source{Name: name, Reader: f})
	}
	rep, err := trace.Check(trace.Options{Whole: true}, sources...)
	if err != nil {
		r.hist.Trace = append(r.hist.Trace, err.Error())
		return "not readable"
	}
	for _, f := range rep.Findings {
		r.hist.Trace = append(r.hist.Trace, f.String())
	}
	if !rep.OK() && len(rep.Findings) == 0 {
		r.hist.Trace = append(r.hist.Trace, "the trace is "+rep.Verdict)
	}
	return fmt.Sprintf("%s: %d records of %d processes, %d rooms on prefill and %d on decode side, %d pairs compared", rep.Verdict, rep.Records,
		rep.Incarnations, rep.Rooms["prefill"], rep.Rooms["decode"], rep.Pairs)
}
