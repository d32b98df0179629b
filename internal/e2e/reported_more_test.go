package e2e

import (
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/stack"
)

func TestReportedK8Deadlock(t *testing.T) {
	kind(t, map[string]func(*testing.T){
		"growing answers share cells": growingAnswersShareCells,
		"blocked head does not block": blockedHeadDoesNotBlock,
		"one place of everything":     onePlaceOfEverything,
	})
}

func TestReportedK9Garbage(t *testing.T) {
	kind(t, map[string]func(*testing.T){"no file descriptors left": noFileDescriptorsLeft})
}

func TestReportedK10StickyBlame(t *testing.T) {
	kind(t, map[string]func(*testing.T){
		"one error is forgotten":      oneErrorIsForgotten,
		"start order does not matter": startOrderDoesNotMatter,
	})
}

// growingAnswersShareCells is K8: two answers together grow beyond the KV cells, so one is set
// back after its transfer. Both end rightly.
func growingAnswersShareCells(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "shm", cost: "step=500us", decode: []string{"--kv-cells", "700"}})
	serves(t, s, m, 1, 2, 30, 400)
	n, err := metric(t.Context(), s.Decodes[0], "baton_preemptions_total")
	if err != nil || n == 0 {
		t.Errorf("%v preemptions (%v): nothing was shown", n, err)
	}
	quiet(t, s)
}

// blockedHeadDoesNotBlock is K8: a large prompt that waits for pages does not hold up small ones.
func blockedHeadDoesNotBlock(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "shm", model: bigModel, faults: "post nth=10 halfway for=2s", decode: onePool})
	first := ask(t, s, 1, 10*simChunk+1, 8, true)
	first.at(func(p, d *workerInfo) bool { return p.State.Inflight == 1 })
	head := ask(t, s, 2, 9*simChunk, 8, true)
	head.at(func(p, d *workerInfo) bool { return p.State.Bootstrap == 1 })
	serves(t, s, m, 3, 4, simChunk, 8)
	if len(head.ended)+len(first.ended) > 0 {
		t.Error("the large ones had ended before the small ones had: nothing was shown")
	}
	for i, l := range []*leaving{first, head} {
		a := <-l.ended
		if want := m.text(prompt(1+i, []int{10*simChunk + 1, 9 * simChunk}[i]), 8); !a.ok() || a.Text != want {
			t.Errorf("large prompt %d: %v", i, a)
		}
	}
	quiet(t, s)
}

// oneErrorIsForgotten is K10: one failed write, and one failed dial, blame nobody for longer than they last.
func oneErrorIsForgotten(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "tcp", faults: "post nth=2 error=\"link down\"\ndial nth=1 error=\"no route\""})
	serves(t, s, m, 1, 1, simChunk, 8) // the dial is tried again
	a := complete(t.Context(), s.URL(), prompt(2, simChunk), 8, nil, timeoutHeader(10*time.Second)...)
	if a.ok() || a.Cause == nil || (a.Cause.Code != room.CodeTransferFailed && a.Cause.Code != room.CodePeerLost) || !a.Cause.Retryable {
		t.Errorf("the write that failed: %v", a)
	}
	serves(t, s, m, 3, 1, simChunk, 8) // at once
	quiet(t, s)
}

// startOrderDoesNotMatter is K10: decode and router are there first; a prefill worker that
// comes late, and later at the same address again, is used without anybody's help.
func startOrderDoesNotMatter(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "shm"})
	p := s.Prefills[0]
	for round := range 2 {
		p.Kill()
		a := complete(t.Context(), s.URL(), prompt(1, simChunk), 8, nil, timeoutHeader(5*time.Second)...)
		// Usually refused; a connection that was idle a moment ago may break first.
		if a.Cause == nil || (a.Cause.Code != room.CodeUnavailable && a.Cause.Code != room.CodePeerLost) || a.Took > 2*time.Second {
			t.Errorf("while there is no prefill worker: %v", a)
		}
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		usable(t, s)
		serves(t, s, m, 10*round+2, 4, 2*simChunk, 8)
		quiet(t, s)
	}
}

// onePlaceOfEverything is K8: staging for one chunk, one prompt computed at a time, pages for one prompt, cells for
// one answer. Ten requests at once all end rightly, so nobody holds what another waits for.
func onePlaceOfEverything(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "tcp", model: bigModel,
		prefill: []string{"--max-running", "1", "--pool-mib", "1", "--page-bytes", "1048576"},
		decode:  []string{"--pool-mib", "1", "--kv-cells", "220", "--ctx", "200"}, args: []string{"--ctx", "200"}})
	serves(t, s, m, 1, 10, 10*simChunk+1, 12)
	quiet(t, s)
}

// noFileDescriptorsLeft is K9: a flood of connections takes every file descriptor of a worker. Its accept loops live
// through it; when the flood is over the worker serves, at every port, without help.
func noFileDescriptorsLeft(t *testing.T) {
	data, err := stack.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	s, m := startSim(t, simSetup{transport: "tcp", decode: []string{"--data-listen", data}})
	serves(t, s, m, 1, 2, simChunk+1, 4)
	for _, c := range []struct {
		p     *stack.Process
		ports []string
	}{{s.Decodes[0], []string{s.Decodes[0].HTTP, data}}, {s.Prefills[0], []string{s.Prefills[0].HTTP, s.Prefills[0].Bootstrap}}} {
		free := limitFiles(t, c.p, 4)
		var conns []net.Conn
		for i := range 40 {
			conn, err := net.DialTimeout("tcp", c.ports[i%2], time.Second)
			if err != nil {
				continue // its backlog is full
			}
			conns = append(conns, conn)
		}
		after(t, 300*time.Millisecond) // the loops meet their limit
		for _, conn := range conns {
			conn.Close()
		}
		free()
		usable(t, s)
		// Sessions and data connections are made anew.
		other := s.Prefills[0]
		if c.p == other {
			other = s.Decodes[0]
		}
		other.Kill()
		if err := other.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		usable(t, s)
		serves(t, s, m, 10, 8, 2*simChunk, 8)
		quiet(t, s)
	}
}

// limitFiles lets p have n more descriptors than it has now, until free.
func limitFiles(t *testing.T, p *stack.Process, n int) (free func()) {
	t.Helper()
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.PID()))
	if err != nil {
		t.Fatal(err)
	}
	var old unix.Rlimit
	if err := unix.Prlimit(p.PID(), unix.RLIMIT_NOFILE, nil, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Prlimit(p.PID(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(len(files) + n), Max: old.Max}, nil); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := unix.Prlimit(p.PID(), unix.RLIMIT_NOFILE, &old, nil); err != nil {
			t.Fatal(err)
		}
	}
}
