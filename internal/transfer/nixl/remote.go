package nixl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
)

// Agent is one NIXL agent in a helper process of its own, without the protocol of [Transport]: for
// packages that speak another system's control protocol and only move bytes by NIXL. Its memory
// can be written to by whoever has its metadata, until its process has ended.
type Agent struct {
	child *child
	name  string
	info  readyInfo
}

// Block is one block of an Agent's write: Len bytes from offset From of its memory to the address To in
// the other agent's process.
type Block struct{ From, To, Len uint64 }

// MaxBlocks of one Agent.Write.
const MaxBlocks = (maxBody - jobHead) / blockLen

// AgentEvents are called by goroutines of the Agent, one at a time; they must not block.
type AgentEvents struct {
	Connected func()          // of Connect
	Done      func(id uint64) // every byte of that write is at the destination
	// End is the last: the process is dead and reaped. After an error of the library, too.
	End func(error)
}

// AgentFences reports whether with c the end of an Agent's process fences its memory: no other process can
// store into it any more. See [Transport.SessionFences].
func AgentFences(c Config) (bool, error) {
	c, err := c.withDefaults()
	return err == nil && c.targetFences(), err
}

// StartAgent starts an agent over mem, the whole of a memfd or its beginning, and waits until it is ready
// or ctx or Config.Handshake ends. After an error no event comes.
func StartAgent(ctx context.Context, c Config, mem transfer.Memory, on AgentEvents) (*Agent, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	if err := checkMemory(mem); err != nil {
		return nil, fmt.Errorf("nixl: start agent: %w", err)
	}
	fd, err := unix.FcntlInt(uintptr(mem.FD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("nixl: start agent: duplicate the memory's descriptor: %w", err)
	}
	file := os.NewFile(uintptr(fd), "memory")
	defer file.Close()

	ready, ended, known := make(chan readyInfo, 1), make(chan error, 1), make(chan struct{})
	started := false
	a := &Agent{name: agentName("agent")}
	a.child = newChild(func(k kind, body []byte) error { return handleAgent(k, body, ready, on) }, func(err error, _ bool) {
		ended <- err
		<-known
		if started && on.End != nil {
			on.End(err)
		}
	}, nil)
	if err := a.child.start(&c, c.job(a.name, uint64(len(mem.Bytes))), []*os.File{file}); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.Handshake)
	defer cancel()
	select {
	case a.info = <-ready:
		started = true
	case err = <-ended:
	case <-ctx.Done():
		err = fmt.Errorf("nixl: the helper process was not ready in time: %w", context.Cause(ctx))
	}
	close(known)
	if started {
		return a, nil
	}
	a.child.kill(err, true)
	a.child.wait()
	return nil, err
}

// Probe starts a helper as sessions do, over a page of memory, and ends it: what the library, its backend or the
// configured parameters, devices and memory refuse shows now and not with the first session. Half a second of a processor.
func (t *Transport) Probe(ctx context.Context) error {
	if t.err != nil {
		return t.err
	}
	fd, err := unix.MemfdCreate("baton-nixl-probe", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("nixl: probe: create memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), "probe")
	defer f.Close()
	page := make([]byte, os.Getpagesize()) // only its length counts: the helper maps the file
	if err := f.Truncate(int64(len(page))); err != nil {
		return fmt.Errorf("nixl: probe: create memory: %w", err)
	}
	a, err := StartAgent(ctx, t.cfg, transfer.Memory{Bytes: page, FD: fd}, AgentEvents{})
	if err != nil {
		return err
	}
	a.Kill(transfer.ErrClosed)
	a.Wait()
	return nil
}

// handleAgent takes what the helper says.
func handleAgent(k kind, body []byte, ready chan<- readyInfo, on AgentEvents) error {
	switch k {
	case evReady:
		var r readyInfo
		err := json.Unmarshal(body, &r)
		if err == nil {
			ready <- r // once: the child sees to it
		}
		return err
	case evConnected:
		if on.Connected != nil {
			on.Connected()
		}
		return nil
	case evDone:
		var id uint64
		if err := words(body, &id); err != nil {
			return err
		}
		if on.Done != nil {
			on.Done(id)
		}
		return nil
	case evNote: // of a peer that sends some; nobody here asks for them
		return nil
	default:
		return errOrder
	}
}

// Name is the agent's; no other agent has it.
func (a *Agent) Name() string { return a.name }

// Metadata is what others need to write to it; read-only.
func (a *Agent) Metadata() []byte { return a.info.Metadata }

// Base is where its memory begins in its process.
func (a *Agent) Base() uint64 { return a.info.Base }

// Pid is the helper's process, for experiments that stop it.
func (a *Agent) Pid() int { return a.child.cmd.Process.Pid }

// Connect opens the way to the agent that metadata describes, the only one that Write can write to.
func (a *Agent) Connect(metadata []byte) error {
	// No window: the addresses of another system's memory are its caller's to check.
	return a.child.sendJSON(cmdConnect, connectJob{Metadata: metadata, Size: 1 << 63})
}

// Write posts a write after Connected. The blocks From must lie in the memory and the blocks To in
// what the other agent has registered: a helper that is asked for anything else ends. It may block
// while the helper is busy; call it from a goroutine that may.
func (a *Agent) Write(id uint64, blocks []Block) error {
	if len(blocks) == 0 || len(blocks) > MaxBlocks {
		return fmt.Errorf("nixl: a write of %d blocks, need 1 to %d: %w", len(blocks), MaxBlocks, transfer.ErrTooLarge)
	}
	j := job{ID: id, Blocks: make([]block, 0, len(blocks))}
	for _, b := range blocks {
		j.add(block(b))
	}
	if len(j.Blocks) == 0 {
		return errors.New("nixl: a write of no bytes")
	}
	return a.child.send(appendWrite(nil, &j))
}

// Active tells the helper whether somebody may be writing to its memory, so that it looks often. It may block
// like Write.
func (a *Agent) Active(on bool) error {
	n := uint64(0)
	if on {
		n = 1
	}
	return a.child.send(appendWords(nil, cmdActive, n))
}

// Kill ends the process; cause is what End hears. It never blocks.
func (a *Agent) Kill(cause error) { a.child.kill(cause, true) }

// Wait returns when the process is dead and End has returned.
func (a *Agent) Wait() { a.child.wait() }
