package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/stack"
)

// ending is how a request of the storm is meant to end.
type ending string

const (
	endNormal  ending = "none"        // left alone
	endEarly   ending = "early"       // the client leaves a random time after it asked
	endTalking ending = "mid-stream"  // the client leaves a random time after the first event
	endAborted ending = "abort"       // ended by /abort_request at a random time
	endTwice   ending = "abort-twice" // the same, twice at once, and the client leaves as well
)

// stormRequest is drawn from the seed and its number alone.
type stormRequest struct {
	prompt []engine.Token
	second []engine.Token // of one request with two prompts and so two rooms, not streamed; mostly nil
	max    int
	end    ending
	delay  time.Duration
	rid    string
}

func drawStorm(seed uint64, i int) stormRequest {
	rng := rand.New(rand.NewPCG(seed, uint64(i)))
	r := stormRequest{prompt: prompt(i, 1+rng.IntN(100)), max: 1 + rng.IntN(40), end: endNormal, rid: fmt.Sprintf("storm-%d-%d", seed, i)}
	if rng.IntN(8) == 0 {
		r.second = prompt(i+1<<20, 1+rng.IntN(60))
	}
	if rng.Float64() < 0.6 {
		r.end = []ending{endEarly, endTalking, endAborted, endTwice}[rng.IntN(4)]
		r.delay = time.Duration(rng.Int64N(int64(250 * time.Millisecond)))
		if rng.IntN(4) == 0 {
			r.delay /= 50 // sometimes before anything has happened
		}
	}
	return r
}

// run asks the request and ends it as drawn.
func (r *stormRequest) run(ctx context.Context, url string) (a answer, err error) {
	ctx, leave := context.WithCancel(ctx)
	defer leave()
	var wg sync.WaitGroup
	var refused error // of the abort; read it after wg.Wait
	end := func() {
		wg.Go(func() {
			select {
			case <-time.After(r.delay):
			case <-ctx.Done():
				return
			}
			switch r.end {
			case endAborted:
				refused = abort(ctx, url, r.rid)
			case endTwice:
				var both sync.WaitGroup
				both.Go(func() { _ = abort(ctx, url, r.rid) }) // it may be cut short by our own leaving
				both.Go(func() { _ = abort(ctx, url, r.rid) })
				leave()
				both.Wait()
			default:
				leave()
			}
		})
	}
	var first func()
	switch r.end {
	case endNormal:
	case endTalking:
		if first = end; r.second != nil {
			end() // nothing is streamed
		}
	default:
		end()
	}
	body := map[string]any{"prompt": r.prompt, "max_tokens": r.max, "temperature": 0, "stream": true, "ignore_eos": true, "rid": r.rid}
	if r.second == nil {
		a = stream(ctx, url, body, first)
	} else {
		body["prompt"], body["stream"] = [][]engine.Token{r.prompt, r.second}, false
		a = whole(ctx, url, body)
	}
	leave() // the end that is not needed any more
	wg.Wait()
	if refused != nil && !errors.Is(refused, context.Canceled) {
		return a, refused
	}
	return a, nil
}

// whole asks for an answer that is not streamed; its texts are joined by "|".
func whole(ctx context.Context, url string, body map[string]any) (a answer) {
	res, err := post(ctx, url+"/v1/completions", body)
	if err != nil {
		a.Err = err
		return a
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	a.Status, a.Err, a.Cause = res.StatusCode, err, causeOf(raw)
	if a.Status != http.StatusOK || err != nil {
		a.Raw = string(raw)
		return a
	}
	var v struct {
		Choices []struct {
			Index  int    `json:"index"`
			Text   string `json:"text"`
			Finish string `json:"finish_reason"`
		} `json:"choices"`
	}
	if a.Err = json.Unmarshal(raw, &v); a.Err != nil {
		return a
	}
	texts := make([]string, len(v.Choices))
	for _, c := range v.Choices {
		if c.Index < 0 || c.Index >= len(texts) {
			a.Err = fmt.Errorf("choice %d of %d", c.Index, len(texts))
			return a
		}
		texts[c.Index], a.Finish = c.Text, c.Finish
	}
	a.Text, a.Done = strings.Join(texts, "|"), true
	return a
}

// verdict says what is wrong with an end.
func (r *stormRequest) verdict(m simModel, a answer) error {
	want := m.text(r.prompt, r.max)
	if r.second != nil {
		want += "|" + m.text(r.second, r.max)
	}
	aborted := a.Cause != nil && a.Cause.Code == room.CodeAborted
	left := errors.Is(a.Err, context.Canceled)
	switch {
	case !strings.HasPrefix(want, a.Text):
		return fmt.Errorf("text %q is no beginning of %q: %v", a.Text, want, a)
	case a.ok() && a.Done:
		if a.Text != want {
			return fmt.Errorf("answer %q, want %q", a.Text, want)
		}
		return nil
	case r.end == endAborted && aborted, r.end == endTwice && (aborted || left), (r.end == endEarly || r.end == endTalking) && left:
		return nil
	}
	return fmt.Errorf("ended as nobody asked for: %v", a)
}

// TestAbortStorm sends 2,000 requests to one pair of workers, 64 at a time, of which 60% are
// cancelled at random points: by the client's leaving or by /abort_request, before, during and after
// everything. All end, nothing but the cancellations is an error, every token of the
// others is right, and the baseline is restored. The short form runs 2,000 over tcp and 400 over
// shm; BATON_PROVE=1 10,000 over each.
func TestAbortStorm(t *testing.T) {
	for transport, n := range map[string]int{"tcp": 2000, "shm": 400} {
		if prove {
			n = 10000
		}
		t.Run(transport, func(t *testing.T) {
			s, m := startSim(t, simSetup{transport: transport, cost: "prefill-chunk=500us,step=1ms", args: []string{"--max-running", "16", "--max-queue", "128"}})
			serves(t, s, m, 1, 4, simChunk+1, 4)
			base := takeBaseline(t, s)
			storm(t, s, m, n)
			base.check(t)
			serves(t, s, m, 1<<20, 8, 3*simChunk, 8)
			base.check(t)
			for _, w := range workers(s) {
				if n, err := metric(t.Context(), w, "baton_session_handler_panics_total"); err != nil || n != 0 {
					t.Errorf("%s: %v panics of session handlers (%v)", w.Name, n, err)
				}
			}
		})
	}
}

func storm(t *testing.T, s *stack.Stack, m simModel, n int) {
	seed := stormSeed(t)
	t.Logf("seed %d (BATON_SEED=%d draws the same requests)", seed, seed)
	ctx, stop := context.WithTimeout(t.Context(), 5*time.Minute)
	defer stop()
	began := time.Now()
	next := make(chan int)
	var mu sync.Mutex
	ends := map[string]int{}
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			for i := range next {
				r := drawStorm(seed, i)
				a, err := r.run(ctx, s.URL())
				if err == nil {
					err = r.verdict(m, a)
				}
				if err != nil {
					t.Errorf("request %d (%s after %v, %d prompt tokens, %d to answer): %v", i, r.end, r.delay, len(r.prompt), r.max, err)
				}
				mu.Lock()
				if a.ok() {
					ends[string(r.end)+" answered"]++
				} else {
					ends[string(r.end)+" ended"]++
				}
				mu.Unlock()
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	t.Logf("%d requests in %v: %v", n, time.Since(began).Round(time.Millisecond), ends)
	if cancelled := n - ends["none answered"]; cancelled < n/2 || ends["early ended"]+ends["mid-stream ended"]+ends["abort ended"]+ends["abort-twice ended"] < n/4 {
		t.Errorf("too few cancellations had an effect: %v", ends)
	}
}

// stormSeed is BATON_SEED, or drawn.
func stormSeed(t *testing.T) uint64 {
	if v := os.Getenv("BATON_SEED"); v != "" {
		n, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			t.Fatalf("BATON_SEED: %v", err)
		}
		return n
	}
	return rand.Uint64()
}
