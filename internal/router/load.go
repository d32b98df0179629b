package router

import (
	"bytes"
	"context"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/baton-pd/baton/internal/router/policy"
)

const (
	// loadTimeout bounds the reading of a worker's metrics: health probes wait for it.
	loadTimeout = 500 * time.Millisecond
	// loadStale is how many health intervals a report is believed.
	loadStale = 5
)

// loadReport is what a worker's metrics said, and until when that counts.
type loadReport struct {
	policy.Load
	until time.Time
}

// reportedLoad is the last report, if it is not too old.
func (w *worker) reportedLoad() policy.Load {
	if l := w.load.Load(); l != nil && time.Now().Before(l.until) {
		return l.Load
	}
	return policy.Load{}
}

// pollLoad reads the worker's metrics once. A worker without metrics, or without those that count, has no load.
func (w *worker) pollLoad(ctx context.Context, interval, timeout time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, min(timeout, loadTimeout))
	defer cancel()
	a, err := w.ask(ctx, http.MethodGet, "/metrics", nil, maxInfo)
	if err != nil || a.status != http.StatusOK {
		return
	}
	if l := parseLoad(a.body); l.Known {
		w.load.Store(&loadReport{l, time.Now().Add(loadStale * interval)})
	}
}

// Families of gauges by what they tell, without the prefixes in loadPrefixes. Sources: docs/metrics.md for Baton; SGLang's
// and vLLM's own lists of metrics.
var (
	queueGauges = map[string]bool{
		"num_queue_reqs": true, "num_prefill_bootstrap_queue_reqs": true, "num_prefill_prealloc_queue_reqs": true,
		"num_decode_prealloc_queue_reqs": true, "num_requests_waiting": true,
	}
	usageGauges  = map[string]bool{"token_usage": true, "kv_cache_usage_perc": true, "gpu_cache_usage_perc": true}
	loadPrefixes = []string{"baton_", "sglang:", "vllm:"}
)

// parseLoad reads Prometheus' text form. Series of one family (ranks of a worker) add up for queues; for memory the
// fullest counts.
func parseLoad(text []byte) (l policy.Load) {
	var used, pages, free float64
	usage := false
	for line := range bytes.Lines(text) {
		name, labels, v, ok := sample(string(bytes.TrimSpace(line)))
		if !ok {
			continue
		}
		switch {
		case queueGauges[name]:
			l.Known = true
			l.Queue += int(min(v, 1e6))
		case usageGauges[name]:
			l.Known, usage = true, true
			used = max(used, v)
		case name == "kv_pages":
			pages += v
			if strings.Contains(labels, `owner="free"`) {
				free += v
			}
		case name == "room_oldest_age_seconds" && (strings.Contains(labels, `state="bootstrapping"`) || strings.Contains(labels, `state="waiting"`)):
			l.Oldest = max(l.Oldest, time.Duration(min(v, 1e6)*float64(time.Second)))
		}
	}
	switch {
	case !l.Known:
		return policy.Load{}
	case pages > 0:
		l.Free = free / pages
	case usage:
		l.Free = max(0, 1-used)
	default:
		l.Free = 1
	}
	return l
}

// sample splits a line "prefix_name{labels} value"; ok is false for lines that are none of ours, and for values that are
// not sound ones.
func sample(line string) (name, labels string, v float64, ok bool) {
	for _, p := range loadPrefixes {
		rest, found := strings.CutPrefix(line, p)
		if !found {
			continue
		}
		i := strings.IndexAny(rest, "{ ")
		if i < 0 {
			return "", "", 0, false
		}
		name, rest = rest[:i], rest[i:]
		if j := strings.LastIndexByte(rest, '}'); rest[0] == '{' {
			if j < 0 {
				return "", "", 0, false
			}
			labels, rest = rest[1:j], rest[j+1:]
		}
		fields := strings.Fields(rest) // a time may follow
		if len(fields) == 0 {
			return "", "", 0, false
		}
		v, err := strconv.ParseFloat(fields[0], 64)
		return name, labels, min(v, 1e15), err == nil && v >= 0 // NaN is not; sums stay finite
	}
	return "", "", 0, false
}
