package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/stack"
)

// begun starts a request and returns when its first event has come.
func begun(t *testing.T, s *stack.Stack, seed, max int, header ...string) <-chan answer {
	t.Helper()
	out, first := make(chan answer, 1), make(chan struct{})
	go func() {
		ctx, stop := context.WithTimeout(context.Background(), time.Minute)
		defer stop()
		out <- complete(ctx, s.URL(), prompt(seed, 5), max, func() { close(first) }, header...)
	}()
	select {
	case <-first:
	case a := <-out:
		t.Fatalf("request %d: %v", seed, a)
	}
	return out
}

// TestRouterShutdown: a router that is asked to end takes nobody new, lets streams end for the grace, tells the rest why they end, and
// exits with success. Its workers have nothing left.
func TestRouterShutdown(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "tcp", model: "seed=3", cost: "step=20ms", router: []string{"--shutdown-grace", "4s"}})
	usable(t, s)
	short, long := begun(t, s, 1, 30), begun(t, s, 2, 1000)
	if err := s.Router.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	eventually(t, settleTime, func(ctx context.Context) error {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.Router.HTTP)
		if err == nil {
			_ = conn.Close()
			return errors.New("the port is still open")
		}
		return nil
	})
	select {
	case a := <-long:
		t.Fatalf("the long stream has ended with the port: %v", a)
	default:
	}
	if a := <-short; !a.ok() || !a.Done || a.Text != m.text(prompt(1, 5), 30) {
		t.Errorf("the short stream: %v, %q", a, a.Text)
	}
	if a := <-long; a.Cause == nil || a.Cause.Code != room.CodeShutdown || a.Done || a.Status != 200 || !strings.Contains(a.Raw, `"room":"`) {
		t.Errorf("the long stream: %v", a)
	}
	s.Router.Wait()
	if err := s.Router.Err(); err != nil {
		t.Errorf("the router's end: %v\n%s", err, s.Router.Output())
	}
	eventually(t, settleTime, func(ctx context.Context) error {
		p, d, err := both(ctx, s)
		if err == nil {
			if busy := nothing(p, d); busy != "" {
				err = errors.New(busy)
			}
		}
		return err
	})
}

// TestReadinessOfStoppedWorkers: the kernel of a stopped process still takes connections, so that only its silence tells.
func TestReadinessOfStoppedWorkers(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "tcp", model: "seed=4"})
	usable(t, s)
	for _, p := range []*stack.Process{s.Decodes[0], s.Prefills[0]} {
		if err := p.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		stopped := time.Now()
		eventually(t, settleTime, func(ctx context.Context) error {
			if _, err := s.Router.Get(ctx, "/health"); err == nil {
				return errors.New("it is still ready")
			}
			return nil
		})
		t.Logf("%s: not ready %v after it was stopped", p.Name, time.Since(stopped).Round(time.Millisecond))
		if err := p.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		goesOn := time.Now()
		if err := s.Router.WaitHealthy(t.Context()); err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: ready %v after it went on", p.Name, time.Since(goesOn).Round(time.Millisecond))
	}
	usable(t, s)
	serves(t, s, m, 1, 2, 20, 4)
}

// TestKeysChangeWhileItRuns: a stream outlives its key, new requests need one of the new, and a broken file changes nothing.
func TestKeysChangeWhileItRuns(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	put := func(text string) {
		t.Helper()
		if err := errors.Join(os.WriteFile(file+".new", []byte(text), 0o600), os.Rename(file+".new", file)); err != nil {
			t.Fatal(err)
		}
	}
	old, oldHash := edge.NewKey()
	fresh, freshHash := edge.NewKey()
	put("team " + oldHash + " max-inflight=1\n")
	s, m := startSim(t, simSetup{transport: "tcp", model: "seed=5", cost: "step=20ms", router: []string{"--api-key-file", file, "--open-metrics"}})
	usable(t, s)
	with := func(key string) []string { return []string{"Authorization", "Bearer " + key} }
	status := func(key string) int {
		ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
		defer stop()
		return complete(ctx, s.URL(), prompt(9, 5), 2, nil, with(key)...).Status
	}
	running := begun(t, s, 1, 400, with(old)...)
	if got := status(old); got != http.StatusTooManyRequests {
		t.Errorf("a second request of a client that may have one: %d", got)
	}
	put("team " + oldHash[:20] + "\n")
	eventually(t, settleTime, func(context.Context) error {
		if !strings.Contains(s.Router.Output(), "could not take a change") {
			return errors.New("a broken file is not told of")
		}
		return nil
	})
	put("team " + freshHash + "\n")
	eventually(t, settleTime, func(context.Context) error {
		if got := status(fresh); got != http.StatusOK {
			return fmt.Errorf("the new key: %d", got)
		}
		return nil
	})
	if got := status(old); got != http.StatusUnauthorized {
		t.Errorf("the old key: %d", got)
	}
	select {
	case a := <-running:
		t.Fatalf("the stream ended before the change: %v", a)
	default:
	}
	if a := <-running; !a.ok() || a.Text != m.text(prompt(1, 5), 400) {
		t.Errorf("the stream of the old key: %v", a)
	}
	for _, p := range s.All() {
		if out := p.Output(); strings.Contains(out, old) || strings.Contains(out, fresh) || strings.Contains(out, oldHash[7:30]) {
			t.Errorf("%s has logged a key or its hash", p.Name)
		}
	}
}
