package nixl

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/baton-pd/baton/internal/transfer"
)

// agentOn is an agent over n bytes of its own, with what it says.
func agentOn(t *testing.T, n int) (a *Agent, mem []byte, connected chan struct{}, done chan uint64, end chan error) {
	t.Helper()
	mem, f := shared(t, n)
	connected, done, end = make(chan struct{}, 1), make(chan uint64, 64), make(chan error, 2)
	a, err := StartAgent(t.Context(), testConfig(), transfer.Memory{Bytes: mem, FD: int(f.Fd())}, AgentEvents{
		Connected: func() { connected <- struct{}{} }, Done: func(id uint64) { done <- id }, End: func(err error) { end <- err },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Kill(errSessionClosed); a.Wait() })
	return a, mem, connected, done, end
}

// TestAgent: blocks go to addresses of the other agent's process, merged where they continue; a kill is the last event.
func TestAgent(t *testing.T) {
	needLibrary(t)
	const n = 1 << 20
	target, to, _, _, targetEnd := agentOn(t, n)
	source, from, connected, done, sourceEnd := agentOn(t, n)
	for i := range from {
		from[i] = byte(i>>8) + byte(i)
	}
	if err := target.Active(true); err != nil {
		t.Fatal(err)
	}
	if err := source.Connect(target.Metadata()); err != nil {
		t.Fatal(err)
	}
	recv(t, connected, "connected")
	if target.Name() == source.Name() || target.Base() == 0 {
		t.Error("names or base")
	}
	list := []Block{{From: 0, To: target.Base() + 8192, Len: 4096}, {From: 4096, To: target.Base() + 12288, Len: 100}, {From: 500000, To: target.Base(), Len: 7}}
	if err := source.Write(3, list); err != nil {
		t.Fatal(err)
	}
	if id := recv(t, done, "done"); id != 3 {
		t.Error(id)
	}
	for _, b := range list {
		at := b.To - target.Base()
		if string(to[at:at+b.Len]) != string(from[b.From:b.From+b.Len]) {
			t.Errorf("block %+v differs", b)
		}
	}
	if to[7] != 0 || to[12288+100] != 0 || to[8191] != 0 {
		t.Error("bytes beside the blocks were written")
	}
	for _, bad := range [][]Block{nil, make([]Block, MaxBlocks+1), {{Len: 0}}} {
		if err := source.Write(4, bad); err == nil {
			t.Errorf("a write of %d blocks was taken", len(bad))
		}
	}
	cause := errors.New("enough")
	target.Kill(cause)
	target.Wait()
	if err := recv(t, targetEnd, "end"); !errors.Is(err, cause) {
		t.Error(err)
	}
	// Into a dead process: an error of the library ends the agent, not the test's process.
	if err := source.Write(5, list); err != nil {
		t.Fatal(err)
	}
	if err := recv(t, sourceEnd, "end"); err == nil {
		t.Error("no error")
	}
}

// TestAgentOutside: a block that begins outside the own memory ends the agent before anything is read.
func TestAgentOutside(t *testing.T) {
	needLibrary(t)
	target, _, _, _, _ := agentOn(t, 4096)
	source, _, connected, _, end := agentOn(t, 4096)
	if err := source.Connect(target.Metadata()); err != nil {
		t.Fatal(err)
	}
	recv(t, connected, "connected")
	if err := source.Write(1, []Block{{From: 4000, To: target.Base(), Len: 97}}); err != nil {
		t.Fatal(err)
	}
	if err := recv(t, end, "end"); err == nil {
		t.Error("no error")
	}
}

// TestAgentNotStarted: no process and no event is left of an agent that could not start.
func TestAgentNotStarted(t *testing.T) {
	needLibrary(t)
	mem, f := shared(t, 4096)
	on := AgentEvents{End: func(error) { t.Error("an event of an agent that never was") }}
	good := transfer.Memory{Bytes: mem, FD: int(f.Fd())}
	notALibrary := filepath.Join(t.TempDir(), "lib.so")
	if err := os.WriteFile(notALibrary, []byte("no"), 0o600); err != nil {
		t.Fatal(err)
	}
	wrong := testConfig()
	wrong.Library = notALibrary
	ctx, stop := context.WithCancel(t.Context())
	stop()
	for name, start := range map[string]func() (*Agent, error){
		"library": func() (*Agent, error) { return StartAgent(t.Context(), wrong, good, on) },
		"no descriptor": func() (*Agent, error) {
			return StartAgent(t.Context(), testConfig(), transfer.Memory{Bytes: mem, FD: -1}, on)
		},
		"no time":       func() (*Agent, error) { return StartAgent(ctx, testConfig(), good, on) },
		"configuration": func() (*Agent, error) { return StartAgent(t.Context(), Config{Queue: -1}, good, on) },
	} {
		if a, err := start(); err == nil {
			t.Errorf("%s: an agent was started", name)
			a.Kill(nil)
			a.Wait()
		}
	}
	for tls, want := range map[string]bool{"": true, "tcp": true, "all": false, "tcp,cma": false} {
		c := testConfig()
		c.TLS = tls
		if got, err := AgentFences(c); err != nil || got != want && os.Getenv("UCX_TLS") == "" {
			t.Errorf("AgentFences with %q: %v, %v", tls, got, err)
		}
	}
}
