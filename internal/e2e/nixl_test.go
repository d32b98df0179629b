package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/setup"
	"github.com/baton-pd/baton/internal/stack"
)

// needNIXL skips where the NIXL library is not.
func needNIXL(t *testing.T) {
	t.Helper()
	if os.Getenv("BATON_NIXL_LIB") != "" {
		return
	}
	if _, err := setup.LocateNIXL(""); err != nil {
		t.Skipf("needs the NIXL library: %v", err)
	}
}

// helpers are the NIXL helper processes of a worker.
func helpers(p *stack.Process) (pids []int) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		stat, err := os.ReadFile(filepath.Join(d, "stat"))
		if err != nil {
			continue // gone
		}
		// Behind the name in parentheses: state, parent.
		f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		args, _ := os.ReadFile(filepath.Join(d, "cmdline"))
		if len(f) > 1 && string(f[1]) == strconv.Itoa(p.PID()) && bytes.Contains(args, []byte("\x00nixl-helper\x00")) && string(f[0]) != "Z" {
			pid, _ := strconv.Atoi(filepath.Base(d))
			pids = append(pids, pid)
		}
	}
	return pids
}

// TestNIXLModel: over NIXL too, the real model's greedy answers are those of one process to the last bit, at prompts of all the
// lengths around a chunk's (TestEquality has the other transports, and more).
func TestNIXLModel(t *testing.T) {
	needModel(t)
	needNIXL(t)
	var prompts [][]engine.Token
	var all []int
	sent := 0.0
	for _, p := range equalityPrompts() {
		if slices.Contains(chunkEdges, len(p)) && len(p) < 300 {
			all = append(all, len(prompts))
			prompts = append(prompts, p)
			sent += float64(len(p)-1) * kvBytesPerToken
		}
	}
	const max = 4
	args := []string{"--threads", "1"}
	alone := start(t, stack.Config{Monolithic: true, Decode: 1, Args: args})
	ref := startReference(t, alone.URL(), prompts, all, max)
	s := start(t, stack.Config{Prefill: 1, Decode: 1, Args: append(args, "--transport", "nixl")})
	round{transport: "nixl", concurrency: 2, prompts: all}.run(t, s.URL(), prompts, ref, max)
	waitIdle(t, s, settleTime)
	if got, err := metric(t.Context(), s.Prefills[0], "baton_kv_transfer_bytes_total"); err != nil || got < sent {
		t.Errorf("%v bytes were sent (%v), want at least %v: answers did not come from handed-over KV", got, err, sent)
	}
}

// TestNIXL serves over the real NIXL library: right answers; a helper that is killed or stopped
// on either side costs the requests on it, which end with a cause, and nothing else; a new one starts;
// everything returns.
func TestNIXL(t *testing.T) {
	needNIXL(t)
	s, m := startSim(t, simSetup{transport: "nixl", cost: "prefill-chunk=20ms,step=2ms"})
	usable(t, s)
	serves(t, s, m, 1, 8, 200, 20)
	base := takeBaseline(t, s)
	for i, side := range []*stack.Process{s.Decodes[0], s.Prefills[0]} {
		for k, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
			t.Run(fmt.Sprintf("%s helper %v", side.Name, sig), func(t *testing.T) {
				disturb(t, s, m, side, sig, 1000*(2*i+k+1))
			})
		}
	}
	base.check(t)
}

// disturb sends sig to the helper of one side while requests are under way.
func disturb(t *testing.T, s *stack.Stack, m simModel, side *stack.Process, sig syscall.Signal, seed int) {
	old := helpers(side)
	if len(old) != 1 {
		t.Fatalf("%s has %d helpers, want 1: %v", side.Name, len(old), old)
	}
	const n = 6
	ended := make(chan answer, n)
	ctx, stop := context.WithTimeout(t.Context(), 60*time.Second)
	defer stop()
	for i := range n {
		go func() {
			p := prompt(seed+i, 600)
			a := complete(ctx, s.URL(), p, 8, nil, timeoutHeader(40*time.Second)...)
			if a.ok() && a.Text != m.text(p, 8) {
				t.Errorf("request %d: wrong text %q", i, a.Text)
			}
			ended <- a
		}()
	}
	eventually(t, settleTime, func(ctx context.Context) error {
		p, d, err := both(ctx, s)
		if err == nil && (p.Rooms.Live == 0 || d.Rooms.Live == 0) {
			err = fmt.Errorf("no room is live")
		}
		return err
	})
	if err := syscall.Kill(old[0], sig); err != nil {
		t.Fatal(err)
	}
	good, bad := 0, 0
	for range n {
		switch a := <-ended; {
		case a.ok():
			good++
		case a.Cause != nil:
			bad++
			if bad == 1 {
				t.Logf("one ended after %v with: %v", a.Took.Round(time.Millisecond), a.Cause)
			}
		default:
			t.Errorf("a request ended without answer and cause: %v", a)
		}
	}
	t.Logf("%d answered rightly, %d ended with a cause", good, bad)
	eventually(t, settleTime, func(ctx context.Context) error { // until the session is made anew
		p := prompt(seed+77, 40)
		if a := complete(ctx, s.URL(), p, 4, nil); !a.ok() || a.Text != m.text(p, 4) {
			return fmt.Errorf("not served: %v", a)
		}
		return nil
	})
	if now := helpers(side); len(now) != 1 || now[0] == old[0] {
		t.Errorf("%s has helpers %v, before %v: want one new", side.Name, now, old)
	}
}
