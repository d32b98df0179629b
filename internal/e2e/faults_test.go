package e2e

import (
	"cmp"
	"context"
	"fmt"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/stack"
)

// victim is the process that a fault hits.
type victim string

const (
	thePrefill victim = "prefill"
	theDecode  victim = "decode"
	theRouter  victim = "router"
)

// act is what happens to it.
type act string

const (
	actKill     act = "kill"      // kill -9, restarted when the clients have their answers
	actStop     act = "stop-cont" // kill -STOP, continued when the clients have their answers
	actStopKill act = "stop-kill" // kill -STOP, never continued: killed and restarted
	actBlip     act = "blip"      // kill -STOP and -CONT before anybody notices
)

const (
	inFlight      = 8
	faultDeadline = 5 * time.Second
	// blipTime is well below the keepalive's 2.5 s.
	blipTime = 700 * time.Millisecond
	// toldWithin: a process that is gone is known at once, without any deadline.
	toldWithin = 2 * time.Second
)

// phase is where the requests are when the fault comes. It is held there by the
// sim's cost model, by a small pool, or by a rule of the fault transport.
type phase struct {
	name    string
	cost    string
	faults  string
	prefill []string
	decode  []string
	tokens  int    // of a prompt
	max     int    // tokens of an answer
	model   string // of the sim; default dim=256
	// reached looks at both workers: enough of the requests are there.
	reached func(p, d *workerInfo, writing, written float64) bool
	// survives: what P does is over, so its end changes nothing.
	survives bool
	// cold: the prefill worker is restarted before, so that no session is there.
	cold bool
}

var phases = []phase{
	{
		// The prefill worker has been restarted, and the way back to its peer takes a while: no session.
		name: "connecting", cold: true, faults: "dial stall for=1200ms", tokens: 2*simChunk + 1, max: 8,
		reached: func(p, d *workerInfo, _, _ float64) bool {
			return p.State.Bootstrap == inFlight && d.State.Prealloc == inFlight && d.Pool.Leases == 0
		},
	}, {
		// Landing pages for 3 prompts only: the others wait for a grant.
		name: "bootstrap", model: "dim=512", cost: "prefill-chunk=100ms", decode: []string{"--pool-mib", "1"}, tokens: 5*simChunk + 1, max: 8,
		reached: func(p, _ *workerInfo, _, _ float64) bool { return p.State.Bootstrap >= 4 },
	}, {
		// One prompt is computed at a time: the others have their grants and wait.
		name: "waiting", cost: "prefill-chunk=100ms", prefill: []string{"--max-running", "1"}, tokens: 5*simChunk + 1, max: 8,
		reached: func(p, d *workerInfo, _, _ float64) bool { return p.State.Waiting >= 6 && d.State.Transfer == inFlight },
	}, {
		// A prompt's first chunk is half written while its second is computed, and others wait. There is staging for one
		// chunk, as a held write does not keep back those behind it.
		name: "mid-chunk", model: "dim=4096", cost: "prefill-chunk=100ms,step=150ms", faults: "post room=* nth=1 halfway for=200ms",
		prefill: []string{"--pool-mib", "1"}, decode: []string{"--pool-mib", "16"}, tokens: 2*simChunk + 1, max: 8,
		reached: func(p, d *workerInfo, writing, _ float64) bool {
			return writing == 1 && p.State.Running+p.State.Waiting >= 5 && d.State.Transfer >= 5
		},
	}, {
		// A prompt has some of its 5 chunks applied and not all, others wait for their turn.
		name: "between-chunks", cost: "prefill-chunk=100ms,step=100ms", tokens: 5*simChunk + 1, max: 8,
		reached: func(p, d *workerInfo, _, written float64) bool {
			return int(written)%5 >= 2 && p.State.Running >= 5 && d.State.Transfer >= 5
		},
	}, {
		name: "last-chunk", faults: "post room=* nth=5 halfway for=2s", tokens: 5*simChunk + 1, max: 8,
		reached: func(p, d *workerInfo, writing, _ float64) bool {
			return writing == inFlight && p.State.Inflight == inFlight && d.State.Transfer == inFlight
		},
	}, {
		name: "decoding", cost: "step=40ms", tokens: 5*simChunk + 1, max: 48, survives: true,
		reached: func(p, d *workerInfo, _, _ float64) bool {
			return d.State.Running == inFlight && p.Rooms.Live == 0 && p.Live == 0
		},
	},
}

// faultCase is one fault.
type faultCase struct {
	who victim
	how act
}

func faultCases() (all []faultCase) {
	for _, who := range []victim{thePrefill, theDecode, theRouter} {
		for _, how := range []act{actKill, actStop, actStopKill, actBlip} {
			all = append(all, faultCase{who, how})
		}
	}
	return all
}

// TestProcessFaults kills and stops each process in each phase with 8 requests in flight. Every client
// gets its answer, or an error that names the cause, within its deadline; then
// everything is back at the idle baseline, and 8 new requests succeed. The cases
// of one phase and transport share a stack, so a leak adds up.
//
// The short form runs one or two of the twelve faults in each phase and transport, and every fault
// at least once; BATON_PROVE=1 runs all 168.
func TestProcessFaults(t *testing.T) {
	i := 0
	for _, transport := range []string{"tcp", "shm"} {
		for _, ph := range phases {
			var cases []faultCase
			for k, c := range faultCases() {
				// 5 has no divisor in common with 8: over the groups every case comes up.
				if prove || k%8 == (5*i)%8 {
					cases = append(cases, c)
				}
			}
			i++
			t.Run(ph.name+"/"+transport, func(t *testing.T) {
				t.Parallel()
				r := startRig(t, ph, transport)
				for n, c := range cases {
					if !t.Run(string(c.who)+"/"+string(c.how), func(t *testing.T) { r.run(t, c, (n+1)*100) }) {
						return // the stack is in a state of its own
					}
				}
			})
		}
	}
}

// rig is a stack that faults happen to.
type rig struct {
	*stack.Stack
	ph    phase
	model simModel
	base  *baseline
}

func startRig(t *testing.T, ph phase, transport string) *rig {
	r := &rig{ph: ph}
	// 2 KiB of KV a token: a chunk is several pages, and 3 prompts of 5 chunks fill 1 MiB.
	r.Stack, r.model = startSim(t, simSetup{transport: transport, model: cmp.Or(ph.model, "dim=256"), cost: ph.cost, faults: ph.faults, prefill: ph.prefill, decode: ph.decode})
	serves(t, r.Stack, r.model, 1, 2, simChunk+1, 4) // sessions and connections are up
	r.base = takeBaseline(t, r.Stack)
	return r
}

func (r *rig) process(v victim) *stack.Process {
	switch v {
	case thePrefill:
		return r.Prefills[0]
	case theDecode:
		return r.Decodes[0]
	default:
		return r.Router
	}
}

// asked is one request and what became of it.
type asked struct {
	prompt []engine.Token
	answer answer
}

// ask sends 8 requests and returns where their ends will be told.
func (r *rig) ask(t *testing.T, seed int, deadline time.Duration, started *atomic.Int32) <-chan asked {
	ends := make(chan asked, inFlight)
	for i := range inFlight {
		p := prompt(seed+i, r.ph.tokens)
		go func() {
			// Longer than allowed, so that an overrun is measured and not hidden.
			ctx, stop := context.WithTimeout(context.WithoutCancel(t.Context()), deadline+10*time.Second)
			defer stop()
			ends <- asked{p, complete(ctx, r.URL(), p, r.ph.max, func() { started.Add(1) }, timeoutHeader(deadline)...)}
		}()
	}
	return ends
}

// await waits until the phase is reached.
func (r *rig) await(t *testing.T, ends <-chan asked, started *atomic.Int32, written float64) {
	t.Helper()
	eventually(t, settleTime, func(ctx context.Context) error {
		if len(ends) > 0 {
			t.Fatalf("a request ended before the fault: %v", (<-ends).answer)
		}
		p, err := inspect(ctx, r.Prefills[0])
		if err != nil {
			return err
		}
		d, err := inspect(ctx, r.Decodes[0])
		if err != nil {
			return err
		}
		writing, err := metric(ctx, r.Prefills[0], "baton_kv_transfer_in_flight")
		if err != nil {
			return err
		}
		now, err := metric(ctx, r.Prefills[0], "baton_kv_transfer_writes_total")
		if err != nil {
			return err
		}
		if !r.ph.reached(p, d, writing, now-written) || r.ph.survives && started.Load() < inFlight {
			return fmt.Errorf("phase %s not reached: prefill %+v, decode %+v, %v chunks being written, %v written", r.ph.name, p.State, d.State, writing, now-written)
		}
		return nil
	})
}

func (r *rig) run(t *testing.T, c faultCase, seed int) {
	if r.ph.cold {
		r.Prefills[0].Kill()
		if err := r.Prefills[0].Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		usable(t, r.Stack)
	}
	written, err := metric(t.Context(), r.Prefills[0], "baton_kv_transfer_writes_total")
	if err != nil {
		t.Fatal(err)
	}
	deadline := faultDeadline
	if c.how == actBlip {
		deadline = 4 * faultDeadline // what is stopped for a moment must not fail: see verdict
	}
	var started atomic.Int32
	began := time.Now()
	ends := r.ask(t, seed, deadline, &started)
	r.await(t, ends, &started, written)
	p := r.process(c.who)
	hit := time.Now()
	if c.how == actKill {
		p.Kill()
	} else if err := p.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	switch {
	case c.how == actBlip:
		after(t, blipTime)
		r.signal(t, p, syscall.SIGCONT)
	case c.who == theRouter && c.how == actStop:
		after(t, faultDeadline/3) // nobody else can answer: it goes on before the deadline
		r.signal(t, p, syscall.SIGCONT)
	case c.who == theRouter && c.how == actStopKill:
		// Nobody tells the workers anything: they keep the deadline by themselves.
		for _, w := range workers(r.Stack) {
			eventually(t, settleTime, func(ctx context.Context) error { return idle(ctx, w) })
		}
		if took := time.Since(began); took > deadline+time.Second {
			t.Errorf("with the router stopped the workers were idle after %v; the deadline was %v", took, deadline)
		}
		p.Kill()
	}
	causes := map[room.Code]int{}
	for range inFlight {
		a := <-ends
		if a.answer.Cause != nil {
			causes[a.answer.Cause.Code]++
		}
		r.verdict(t, c, a, deadline)
	}
	took := time.Since(hit)
	t.Logf("causes of %d requests: %v; the last one ended %v after the fault", inFlight, causes, took.Round(time.Millisecond))
	if c.how == actKill && !r.ph.survives && took > toldWithin {
		t.Errorf("the last client heard of a killed process after %v", took)
	}
	r.recover(t, c, p)
	r.base.check(t)
	serves(t, r.Stack, r.model, seed+50, 8, simChunk+1, 8)
	r.base.check(t)
}

// recover undoes the fault.
func (r *rig) recover(t *testing.T, c faultCase, p *stack.Process) {
	t.Helper()
	switch c.how {
	case actStopKill:
		p.Kill()
		fallthrough
	case actKill:
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
	case actStop:
		r.signal(t, p, syscall.SIGCONT)
	case actBlip:
	}
	usable(t, r.Stack)
}

func (r *rig) signal(t *testing.T, p *stack.Process, s syscall.Signal) {
	t.Helper()
	if err := p.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// verdict judges one client's end.
func (r *rig) verdict(t *testing.T, c faultCase, a asked, deadline time.Duration) {
	t.Helper()
	got := a.answer
	routerDied := c.who == theRouter && (c.how == actKill || c.how == actStopKill)
	mustSucceed := c.how == actBlip || c.who == thePrefill && r.ph.survives
	switch {
	case got.ok():
		if want := r.model.text(a.prompt, r.ph.max); got.Text != want {
			t.Errorf("answer %q, want %q", got.Text, want)
		}
	case mustSucceed:
		t.Errorf("failed although nobody should have noticed: %v", got)
	case routerDied: // whatever the client sees of a dead endpoint
	case got.Err != nil && got.Cause == nil: // with a cause the connection breaks off by design
		t.Errorf("a connection broke without a word of its cause: %v", got)
	case got.Cause == nil || got.Cause.Detail == "":
		t.Errorf("an error without its cause: %v", got)
	case !named[got.Cause.Code] || got.Cause.Code == room.CodeDeadline && c.how == actKill:
		t.Errorf("cause %q does not tell what happened: %v", got.Cause.Code, got)
	case got.Done:
		t.Errorf("a failed stream ended like a whole one: %v", got)
	}
	if !routerDied && got.Took > deadline+time.Second {
		t.Errorf("ended after %v; the deadline was %v: %v", got.Took, deadline, got)
	}
	if routerDied && got.Took > deadline+5*time.Second {
		t.Errorf("the client of a dead router waited %v: %v", got.Took, got)
	}
}

// named are the causes that tell of a process that is gone or silent.
var named = map[room.Code]bool{room.CodePeerLost: true, room.CodeUnavailable: true, room.CodeDeadline: true, room.CodeTransferFailed: true}

// idle says what p holds.
func idle(ctx context.Context, p *stack.Process) error {
	w, err := inspect(ctx, p)
	if err == nil && w.Busy() != "" {
		err = fmt.Errorf("%s: %s", p.Name, w.Busy())
	}
	return err
}

// after lets d pass in the world of the processes under test.
func after(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
		t.Fatal("the test ended")
	}
}
