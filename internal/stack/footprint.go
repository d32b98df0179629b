package stack

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Footprint is what a process holds of the operating system and the runtime, without the
// HTTP connections of others to it and to others, whose number is not its own doing.
type Footprint struct {
	Goroutines int
	Files      int
	Mappings   int // of memory files: pools, and the peers' pools
}

// String is for people.
func (f Footprint) String() string {
	return fmt.Sprintf("%d goroutines, %d files, %d mapped pools", f.Goroutines, f.Files, f.Mappings)
}

// footprintSlack is how much a footprint may differ from the baseline: probes and timers come and go.
const footprintSlack = 3

// Within reports whether f is the baseline or below it, but for a few goroutines and files
// of probes and timers.
func (f Footprint) Within(base Footprint) bool {
	return f.Goroutines <= base.Goroutines+footprintSlack && f.Files <= base.Files+footprintSlack && f.Mappings <= base.Mappings
}

// Footprint measures p.
func (p *Process) Footprint(ctx context.Context) (Footprint, error) {
	metrics, err := p.Metrics(ctx)
	if err != nil {
		return Footprint{}, err
	}
	goroutines, found := metrics.Sum("go_goroutines")
	if !found {
		return Footprint{}, fmt.Errorf("%s exposes no metric go_goroutines", p.Name)
	}
	bare, _ := metrics.Sum("baton_router_worker_idle_connections")
	ports := map[int]bool{}
	for _, q := range p.s.All() {
		ports[portNumber(q.HTTP)] = true
	}
	for _, addr := range p.s.proxied {
		ports[portNumber(addr)] = true
	}
	files, in, out, err := openFiles(p.PID(), portNumber(p.HTTP), ports)
	if err != nil {
		return Footprint{}, err
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p.PID()))
	if err != nil {
		return Footprint{}, err
	}
	// A connection costs its server one goroutine and its client two, but a router's idle ones for legs cost none.
	return Footprint{Goroutines: int(goroutines) - in - 2*(out-int(bare)), Files: files - in - out, Mappings: bytes.Count(maps, []byte("memfd:"))}, nil
}

// portNumber is the port of host:port; 0 if it has none.
func portNumber(addr string) int {
	_, port, _ := net.SplitHostPort(addr)
	n, _ := strconv.Atoi(port)
	return n
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
