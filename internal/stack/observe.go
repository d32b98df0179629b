package stack

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/baton-pd/baton/internal/kv"
)

// WorkerInfo is the accounting in a worker's /server_info: everything that must return to
// the idle baseline, counted at its source.
type WorkerInfo struct {
	Live  int `json:"live_requests"`
	State struct {
		Bootstrap, Waiting, Running, Inflight, Prealloc, Transfer, Preempted int
		CellsUsed                                                            int `json:"cells_used"`
		SeqsUsed                                                             int `json:"seqs_used"`
	} `json:"state"`
	Pool  *kv.Stats `json:"pool"`
	Rooms struct{ Live, Tombstones int }
}

// Busy says what keeps a worker from being idle; "" if nothing does.
func (w *WorkerInfo) Busy() string {
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

// Faults says which broken invariant the pool has counted; "" if none.
func (w *WorkerInfo) Faults() string {
	if w.Pool.PoisonHits != 0 || w.Pool.Misuses != 0 || w.Pool.DoubleReleases != 0 {
		return fmt.Sprintf("%d stores into free pages, %d refused misuses, %d double releases", w.Pool.PoisonHits, w.Pool.Misuses, w.Pool.DoubleReleases)
	}
	return ""
}

// Inspect reads a worker's accounting.
func (p *Process) Inspect(ctx context.Context) (*WorkerInfo, error) {
	var w WorkerInfo
	if err := p.Info(ctx, &w); err != nil {
		return nil, fmt.Errorf("%s: %w", p.Name, err)
	}
	return &w, nil
}

// Workers lists the prefill and the decode processes.
func (s *Stack) Workers() []*Process {
	return append(append([]*Process(nil), s.Prefills...), s.Decodes...)
}

// Samples are a process's metrics at one moment, by name and labels as they are printed.
type Samples map[string]float64

// Metrics reads what a process exposes.
func (p *Process) Metrics(ctx context.Context) (Samples, error) {
	body, err := p.Get(ctx, "/metrics")
	if err != nil {
		return nil, err
	}
	out := Samples{}
	for line := range strings.Lines(string(body)) {
		line = strings.TrimSpace(line)
		at := strings.LastIndexByte(line, ' ')
		if at < 0 || line[0] == '#' {
			continue
		}
		v, err := strconv.ParseFloat(line[at+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("metric %s of %s: %w", line[:at], p.Name, err)
		}
		out[line[:at]] = v
	}
	return out, nil
}

// Sum adds the values of all labels of a metric; found is false if there is no sample of it.
func (s Samples) Sum(name string) (sum float64, found bool) {
	for key, v := range s {
		if base, _, _ := strings.Cut(key, "{"); base == name {
			sum, found = sum+v, true
		}
	}
	return sum, found
}

// Metric is the sum over all label values of a sample that p exposes.
func (p *Process) Metric(ctx context.Context, name string) (float64, error) {
	all, err := p.Metrics(ctx)
	if err != nil {
		return 0, err
	}
	sum, found := all.Sum(name)
	if !found {
		return 0, fmt.Errorf("%s exposes no metric %s", p.Name, name)
	}
	return sum, nil
}
