package kvbench

import (
	"bufio"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

//go:embed peers/*.py
var scripts embed.FS

// peer is another system's own API on the same work, run by Python.
type peer struct {
	script string
	env    []string
}

var peers = []peer{
	{"nixl_peer.py", []string{"UCX_TLS=tcp", "NIXL_POLL=spin"}},
	{"nixl_peer.py", []string{"UCX_TLS=tcp", "NIXL_POLL=sleep"}},
	{"nixl_peer.py", []string{"NIXL_POLL=spin"}}, // UCX chooses: on one machine cma
	{"mooncake_peer.py", nil},
}

// Peers runs NIXL's and Mooncake's Python APIs, which must be installed for the interpreter
// python (packages nixl-cu12, mooncake-transfer-engine-non-cuda and numpy), and returns their rows. What
// they say besides goes to log. One that fails is an error; the others run all the same.
func Peers(ctx context.Context, python string, w Work, log io.Writer) ([]Row, error) {
	dir, err := os.MkdirTemp("", "baton-peers-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := os.CopyFS(dir, scripts); err != nil {
		return nil, err
	}
	blocks := make([]string, len(w.Blocks))
	for i, b := range w.Blocks {
		blocks[i] = strconv.Itoa(b)
	}
	var rows []Row
	var failed error
	for _, p := range peers {
		cmd := exec.CommandContext(ctx, python, filepath.Join(dir, "peers", p.script), "--blocks", strings.Join(blocks, ","),
			"--size", strconv.Itoa(w.Size), "--rounds", strconv.Itoa(w.Rounds), "--latencies", strconv.Itoa(w.Latencies))
		cmd.Env = append(os.Environ(), p.env...)
		cmd.Stderr = log
		got, err := peerRows(cmd, log)
		rows = append(rows, got...)
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("kvbench: peer %s %v: %w", p.script, p.env, err))
		}
	}
	return rows, failed
}

// peerRows runs cmd and takes the JSON lines out of what it prints.
func peerRows(cmd *exec.Cmd, log io.Writer) ([]Row, error) {
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	var rows []Row
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var r Row
		if !strings.HasPrefix(lines.Text(), "{") || json.Unmarshal(lines.Bytes(), &r) != nil {
			fmt.Fprintln(log, lines.Text())
			continue
		}
		rows = append(rows, r)
	}
	return rows, errors.Join(lines.Err(), cmd.Wait())
}

// Ratio compares one transport with the best of the others at one block size.
type Ratio struct {
	Transport  string
	BlockBytes int
	// Rate is its GB/s over the best GB/s of a rival; Latency its p50 over the best p50 of a
	// rival that has a notification. 0: nothing to compare with.
	Rate, Latency float64
	// Rivals that were best.
	RateRival, LatencyRival string
}

// Ratios compares transport ours with the rivals that match.
func Ratios(rows []Row, ours string, rival func(string) bool) []Ratio {
	var out []Ratio
	for _, r := range rows {
		if r.Transport != ours {
			continue
		}
		x := Ratio{Transport: ours, BlockBytes: r.BlockBytes}
		var rate, p50 float64
		for _, o := range rows {
			if o.BlockBytes != r.BlockBytes || !rival(o.Transport) {
				continue
			}
			if o.GBPerS > rate {
				rate, x.RateRival = o.GBPerS, o.Transport
			}
			if o.P50US > 0 && (p50 == 0 || o.P50US < p50) {
				p50, x.LatencyRival = o.P50US, o.Transport
			}
		}
		if rate > 0 {
			x.Rate = r.GBPerS / rate
		}
		if p50 > 0 {
			x.Latency = r.P50US / p50
		}
		out = append(out, x)
	}
	return out
}
