package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/stack"
)

// workerInfo is the accounting in a worker's /server_info.
type workerInfo struct {
	Live  int `json:"live_requests"`
	State struct {
		Bootstrap, Waiting, Running, Inflight, Prealloc, Transfer, Preempted int
		CellsUsed                                                            int `json:"cells_used"`
		SeqsUsed                                                             int `json:"seqs_used"`
	} `json:"state"`
	Pool  *kv.Stats `json:"pool"`
	Rooms struct{ Live, Tombstones int }
}

// busy says what keeps a worker from being idle; "" if nothing does.
func (w *workerInfo) busy() string {
	s := w.State
	switch queued := s.Bootstrap + s.Waiting + s.Running + s.Inflight + s.Prealloc + s.Transfer + s.Preempted; {
	case w.Pool == nil:
		return "no accounting"
	case w.Live != 0 || queued != 0:
		return fmt.Sprintf("%d live requests, queues %+v", w.Live, s)
	case w.Rooms.Live != 0:
		return fmt.Sprintf("%d live rooms", w.Rooms.Live)
	case s.CellsUsed != 0 || s.SeqsUsed != 0:
		return fmt.Sprintf("%d cells and %d sequences in use", s.CellsUsed, s.SeqsUsed)
	case !w.Pool.Idle():
		return fmt.Sprintf("pool not idle: %+v", *w.Pool)
	}
	return ""
}

// faults says which broken invariant the pool has counted; "" if none.
func (w *workerInfo) faults() string {
	if w.Pool.PoisonHits != 0 || w.Pool.Misuses != 0 || w.Pool.DoubleReleases != 0 {
		return fmt.Sprintf("%d stores into free pages, %d refused misuses, %d double releases", w.Pool.PoisonHits, w.Pool.Misuses, w.Pool.DoubleReleases)
	}
	return ""
}

func inspect(ctx context.Context, p *stack.Process) (*workerInfo, error) {
	var w workerInfo
	if err := p.Info(ctx, &w); err != nil {
		return nil, fmt.Errorf("%s: %w", p.Name, err)
	}
	return &w, nil
}

// metric is the sum over all label values of a sample that p exposes.
func metric(ctx context.Context, p *stack.Process, name string) (sum float64, err error) {
	ctx, stop := context.WithTimeout(ctx, 5*time.Second)
	defer stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.URL()+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, err
	}
	found := false
	for line := range strings.Lines(string(body)) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if base, _, _ := strings.Cut(key, "{"); !ok || base != name {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, fmt.Errorf("metric %s of %s: %w", name, p.Name, err)
		}
		sum, found = sum+v, true
	}
	if !found {
		return 0, fmt.Errorf("%s exposes no metric %s", p.Name, name)
	}
	return sum, nil
}

// footprint is what a process holds of the operating system and the runtime, without the
// HTTP connections of others to it and to others, whose number is not its own doing.
type footprint struct {
	goroutines int
	files      int
	mappings   int // of memory files: pools, and the peers' pools
}

func (f footprint) String() string {
	return fmt.Sprintf("%d goroutines, %d files, %d mapped pools", f.goroutines, f.files, f.mappings)
}

// slack is how much a footprint may differ from the baseline: probes and timers come and go.
const slack = 3

// within reports whether f is the baseline or below it, but for slack.
func (f footprint) within(base footprint) bool {
	return f.goroutines <= base.goroutines+slack && f.files <= base.files+slack && f.mappings <= base.mappings
}

// measure takes p's footprint. Ports are those of every HTTP side of the stack.
func measure(ctx context.Context, p *stack.Process, ports map[int]bool) (footprint, error) {
	goroutines, err := metric(ctx, p, "go_goroutines")
	if err != nil {
		return footprint{}, err
	}
	_, port, _ := net.SplitHostPort(p.HTTP)
	own, _ := strconv.Atoi(port)
	files, in, out, err := openFiles(p.PID(), own, ports)
	if err != nil {
		return footprint{}, err
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p.PID()))
	if err != nil {
		return footprint{}, err
	}
	// A connection costs its server one goroutine and its client two.
	return footprint{goroutines: int(goroutines) - in - 2*out, files: files - in - out, mappings: bytes.Count(maps, []byte("memfd:"))}, nil
}

// openFiles counts pid's descriptors, and how many of them are HTTP connections that came in at
// port own, or go out to one of the ports.
func openFiles(pid, own int, ports map[int]bool) (files, in, out int, err error) {
	type ends struct{ local, remote int }
	sockets := map[string]ends{}
	table, err := os.Open(fmt.Sprintf("/proc/%d/net/tcp", pid))
	if err != nil {
		return 0, 0, 0, err
	}
	defer table.Close()
	lines := bufio.NewScanner(table)
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		const listening = "0A"
		if len(f) < 10 || f[3] == listening {
			continue
		}
		sockets[f[9]] = ends{portOf(f[1]), portOf(f[2])}
	}
	if err := lines.Err(); err != nil {
		return 0, 0, 0, err
	}
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	fds, err := os.ReadDir(dir)
	if err != nil {
		return 0, 0, 0, err
	}
	for _, fd := range fds {
		to, err := os.Readlink(filepath.Join(dir, fd.Name()))
		if err != nil {
			continue // closed meanwhile
		}
		files++
		inode, ok := strings.CutPrefix(to, "socket:[")
		switch e, known := sockets[strings.TrimSuffix(inode, "]")]; {
		case !ok || !known:
		case e.local == own:
			in++
		case ports[e.remote]:
			out++
		}
	}
	return files, in, out, nil
}

// portOf reads the port of an address in /proc/net/tcp.
func portOf(addr string) int {
	_, p, _ := strings.Cut(addr, ":")
	b, err := hex.DecodeString(p)
	if err != nil || len(b) != 2 {
		return 0
	}
	return int(b[0])<<8 | int(b[1])
}

// baseline is the footprint of each process of an idle stack.
type baseline struct {
	s     *stack.Stack
	ports map[int]bool
	at    map[*stack.Process]footprint
}

// takeBaseline waits until s is idle and measures it until two samples agree.
func takeBaseline(t *testing.T, s *stack.Stack) *baseline {
	t.Helper()
	b := &baseline{s: s, ports: map[int]bool{}, at: map[*stack.Process]footprint{}}
	for _, p := range s.All() {
		_, port, _ := net.SplitHostPort(p.HTTP)
		n, err := strconv.Atoi(port)
		if err != nil {
			t.Fatalf("%s listens on %s: %v", p.Name, p.HTTP, err)
		}
		b.ports[n] = true
	}
	waitIdle(t, s, settleTime)
	for _, p := range s.All() {
		var last footprint
		eventually(t, settleTime, func(ctx context.Context) error {
			now, err := measure(ctx, p, b.ports)
			if err == nil && now != last {
				last, err = now, fmt.Errorf("footprint of %s still moves: %v", p.Name, now)
			}
			return err
		})
		b.at[p] = last
	}
	return b
}

// check waits until every process is back at the baseline and no invariant was broken.
func (b *baseline) check(t *testing.T) {
	t.Helper()
	waitIdle(t, b.s, settleTime)
	for _, p := range b.s.All() {
		eventually(t, settleTime, func(ctx context.Context) error {
			now, err := measure(ctx, p, b.ports)
			if err == nil && !now.within(b.at[p]) {
				err = fmt.Errorf("%s holds %v; idle it held %v", p.Name, now, b.at[p])
			}
			return err
		})
	}
	for _, p := range workers(b.s) {
		w, err := inspect(t.Context(), p)
		if err != nil {
			t.Error(err)
		} else if f := w.faults(); f != "" {
			t.Errorf("%s: %s", p.Name, f)
		}
	}
}

func workers(s *stack.Stack) []*stack.Process {
	return append(append([]*stack.Process(nil), s.Prefills...), s.Decodes...)
}

// settleTime bounds waits for something that must happen soon; only a failing test waits for it.
const settleTime = 15 * time.Second

// waitIdle waits until no worker (and no router) holds anything, and returns how long that took.
func waitIdle(t *testing.T, s *stack.Stack, limit time.Duration) time.Duration {
	t.Helper()
	began := time.Now()
	for _, p := range workers(s) {
		eventually(t, limit, func(ctx context.Context) error {
			w, err := inspect(ctx, p)
			if err == nil && w.busy() != "" {
				err = fmt.Errorf("%s: %s", p.Name, w.busy())
			}
			return err
		})
	}
	if s.Router != nil {
		eventually(t, limit, func(ctx context.Context) error {
			n, err := metric(ctx, s.Router, "baton_router_inflight_requests")
			if err == nil && n != 0 {
				err = fmt.Errorf("router: %v requests in flight", n)
			}
			return err
		})
	}
	return time.Since(began)
}

// eventually polls check until it returns nil; the test fails with its last error after limit.
func eventually(t *testing.T, limit time.Duration, check func(context.Context) error) {
	t.Helper()
	if err := poll(t.Context(), limit, check); err != nil {
		t.Fatalf("not within %v: %v", limit, err)
	}
}

// poll runs check every 10 ms until it returns nil; its last error after limit.
func poll(ctx context.Context, limit time.Duration, check func(context.Context) error) error {
	ctx, stop := context.WithTimeout(ctx, limit)
	defer stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if last == nil || ctx.Err() == nil { // an error of the end itself says nothing
			last = err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return last
		}
	}
}
