package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/stack"
)

const (
	chaosClients  = 12
	chaosDeadline = 4 * time.Second
)

// chaos is a stack under steady load whose processes are killed and stopped at random times, so also in the
// middle of a copy into the other's memory.
type chaos struct {
	*stack.Stack
	model simModel
	// disturbed counts the beginnings and ends of faults of the router: its clients may lose
	// their connection without a word only while there is one.
	disturbed atomic.Int64

	mu   sync.Mutex
	ends map[string]int
}

// request asks one request drawn from rng and judges its end.
func (c *chaos) request(ctx context.Context, rng *rand.Rand, id int) error {
	p, max := prompt(id, 1+rng.IntN(10*simChunk)), 1+rng.IntN(30)
	asked, leave := context.WithTimeout(ctx, chaosDeadline+10*time.Second)
	defer leave()
	left := rng.IntN(5) == 0
	if left {
		t := time.AfterFunc(time.Duration(rng.Int64N(int64(time.Second))), leave)
		defer t.Stop()
	}
	before := c.disturbed.Load()
	a := complete(asked, c.URL(), p, max, nil, timeoutHeader(chaosDeadline)...)
	alone := before%2 == 0 && c.disturbed.Load() == before
	want := c.model.text(p, max)
	end := "answered"
	switch {
	case !strings.HasPrefix(want, a.Text) || a.ok() && a.Text != want:
		return fmt.Errorf("text %q, want %q: %v", a.Text, want, a)
	case a.ok():
	case a.Cause != nil && named[a.Cause.Code]:
		end = string(a.Cause.Code)
	case left && errors.Is(a.Err, context.Canceled):
		end = "left"
	case a.Cause == nil && !alone:
		end = "router gone"
	default:
		return fmt.Errorf("ended without a word of the cause: %v", a)
	}
	if alone && a.Took > chaosDeadline+time.Second {
		return fmt.Errorf("ended after %v; the deadline was %v: %v", a.Took, chaosDeadline, a)
	}
	c.mu.Lock()
	c.ends[end]++
	c.mu.Unlock()
	return nil
}

// fault does one random thing to a process and undoes it.
func (c *chaos) fault(t *testing.T, p *stack.Process, rng *rand.Rand) {
	t.Helper()
	stop, again := rng.IntN(3) > 0, rng.IntN(2) == 0
	hold := time.Duration(rng.Int64N(int64(4 * time.Second)))
	if rng.IntN(2) == 0 {
		hold /= 20
	}
	t.Logf("%s: stop %v for %v, go on %v", p.Name, stop, hold.Round(time.Millisecond), again)
	if p == c.Router {
		c.disturbed.Add(1)
		defer c.disturbed.Add(1)
	}
	if stop {
		c.signal(t, p, syscall.SIGSTOP)
		after(t, hold)
		if again {
			c.signal(t, p, syscall.SIGCONT)
			return
		}
	}
	p.Kill()
	if err := p.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if p == c.Router { // connections are refused until it listens
		usable(t, c.Stack)
	}
}

func (c *chaos) signal(t *testing.T, p *stack.Process, s syscall.Signal) {
	t.Helper()
	if err := p.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// TestChaos: 12 clients without a pause, and processes that are killed and stopped at random times for random
// times. Every client hears what happened by its deadline, every answer is right, and afterwards nothing is held.
// The short form has 6 faults on each transport, BATON_PROVE=1 has 80.
func TestChaos(t *testing.T) {
	faults := 6
	if prove {
		faults = 80
	}
	for _, transport := range []string{"tcp", "shm"} {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			seed := stormSeed(t)
			t.Logf("seed %d (BATON_SEED=%d draws the same requests and faults)", seed, seed)
			c := &chaos{ends: map[string]int{}}
			// 8 KiB of KV a token: the pool holds the prompts of 3 requests, and copies take their time.
			c.Stack, c.model = startSim(t, simSetup{transport: transport, prefills: 2, model: "dim=1024", cost: "prefill-chunk=5ms,step=2ms"})
			serves(t, c.Stack, c.model, 1, 4, simChunk+1, 4)
			base := takeBaseline(t, c.Stack)
			c.run(t, seed, faults)
			usable(t, c.Stack)
			serves(t, c.Stack, c.model, 1, 8, simChunk+1, 8)
			base.check(t)
			t.Logf("ends of requests: %v", c.ends)
			if c.ends["answered"] == 0 {
				t.Error("nothing was answered")
			}
		})
	}
}

func (c *chaos) run(t *testing.T, seed uint64, faults int) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	quit := make(chan struct{})
	for n := range chaosClients {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(n)))
			for i := 0; ; i++ {
				select {
				case <-quit:
					return
				case <-ctx.Done():
					return
				case <-time.After(30 * time.Millisecond): // what is refused at once must not be all there is
				}
				if err := c.request(ctx, rng, i*chaosClients+n); err != nil && ctx.Err() == nil {
					t.Errorf("client %d, request %d: %v", n, i, err)
				}
			}
		})
	}
	rng := rand.New(rand.NewPCG(seed, 1<<32))
	var order []*stack.Process
	for range faults {
		if len(order) == 0 { // each process in its turn, in an order of its own each time
			order = c.All()
			rng.Shuffle(len(order), func(i, k int) { order[i], order[k] = order[k], order[i] })
		}
		after(t, 200*time.Millisecond+time.Duration(rng.Int64N(int64(time.Second))))
		c.fault(t, order[0], rng)
		order = order[1:]
	}
	close(quit)
	wg.Wait()
}
