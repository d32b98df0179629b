package e2e

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/stack"
)

// simChunk is the chunk size of every sim stack, in tokens.
const simChunk = 16

// simSetup is a stack on the sim engine whose binary has the race detector in it.
type simSetup struct {
	transport       string
	prefills        int    // default 1
	decodes         int    // default 1
	model           string // sim settings that decide the answers
	cost            string // sim settings that only cost time
	faults          string // rules for the prefill workers' transport
	args            []string
	prefill, decode []string // more flags, the last one wins
	router          []string
	tls             *tls.Config // workers serve TLS; how to speak to them
	key             string      // that workers want
	extra           func(process string) []string
}

// simModel is what a sim stack answers.
type simModel sim.Config

// startSim runs the stack. Pools are poisoned and pages are small, so that a store to the
// wrong place is found, and a stopped peer is noticed after 2.5 s.
func startSim(t *testing.T, c simSetup) (*stack.Stack, simModel) {
	t.Helper()
	cfg, err := sim.ParseConfig(c.model)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ChunkTokens = simChunk
	args := []string{"--engine", "sim", "--chunk", strconv.Itoa(simChunk), "--sim", strings.Trim(c.model+","+c.cost, ","), "--transport", c.transport,
		"--max-running", "8", "--pool-mib", "4", "--page-bytes", "4096", "--poison-pages",
		"--keepalive-time", "1s", "--keepalive-timeout", "1500ms"}
	pre := c.prefill
	if c.faults != "" {
		file := filepath.Join(t.TempDir(), "faults")
		if err := os.WriteFile(file, []byte(c.faults), 0o600); err != nil {
			t.Fatal(err)
		}
		pre = append([]string{"--fault", file}, pre...)
	}
	s := start(t, stack.Config{Binary: binaryRace, Prefill: max(c.prefills, 1), Decode: max(c.decodes, 1), Args: append(args, c.args...), TraceDir: t.TempDir(),
		PrefillArgs: pre, DecodeArgs: c.decode, RouterArgs: c.router, WorkerTLS: c.tls, WorkerKey: c.key, Extra: c.extra})
	return s, simModel(cfg)
}

// prompt makes n tokens that differ for each id.
func prompt(id, n int) []engine.Token {
	p := make([]engine.Token, n)
	for i := range p {
		p[i] = engine.Token(3 + (id*131+i*7+i*i*id)%256) // any byte
	}
	return p
}

// text is the right answer of max tokens.
func (m simModel) text(prompt []engine.Token, max int) string {
	var b strings.Builder
	for _, t := range sim.Expected(sim.Config(m), prompt, max) {
		b.WriteByte(byte(t - 3)) // the sim's tokens are bytes
	}
	return b.String()
}

// usable waits until the router has probed every worker and would use it.
func usable(t *testing.T, s *stack.Stack) {
	t.Helper()
	eventually(t, settleTime, func(ctx context.Context) error {
		up, err := metric(ctx, s.Router, "baton_router_worker_up")
		if err == nil && int(up) != len(workers(s)) {
			err = fmt.Errorf("%v of %d workers are up", up, len(workers(s)))
		}
		return err
	})
}

// serves asks n requests at once, all of which must be answered rightly.
func serves(t *testing.T, s *stack.Stack, m simModel, seed, n, promptLen, max int) {
	t.Helper()
	answers := make(chan error, n)
	for i := range n {
		go func() {
			p := prompt(seed+i, promptLen)
			ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
			defer stop()
			a := complete(ctx, s.URL(), p, max, nil)
			if want := m.text(p, max); !a.ok() || !a.Done || a.Text != want {
				answers <- fmt.Errorf("request %d: %v, text %q, want %q", i, a, a.Text, want)
				return
			}
			answers <- nil
		}()
	}
	for range n {
		if err := <-answers; err != nil {
			t.Error(err)
		}
	}
}

// timeoutHeader carries a request's deadline.
func timeoutHeader(d time.Duration) []string {
	return []string{"X-Request-Timeout-Ms", strconv.FormatInt(d.Milliseconds(), 10)}
}

// abort asks the endpoint to end a request by its id.
func abort(ctx context.Context, url, rid string) error {
	res, err := post(ctx, url+"/abort_request", map[string]any{"rid": rid})
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("abort %s: %s", rid, res.Status)
	}
	return nil
}
