// Package routerbench measures routers for prefill and decode fleets: how many requests a second they pass, what latency they add,
// and what CPU and memory it takes.
//
// # The bench
//
// Three parties, each a process of its own: the router under test, the fakes (two prefill and two decode workers), and the generator. Fakes and
// generator are one thread each around epoll, with answers and requests made beforehand, because they share
// the machine's cores with the router: what they use is not measured, but limits the rate. Their CPU is reported with the router's, so
// that a reader can tell what a rate was bound by.
//
// # The works
//
// Whole and Stream are closed loops: each of c connections sends its next request when the last has been answered, for a fixed time. The answer has
// eight tokens, as one JSON object or as eleven events, each in a write of its own. Every answer is checked: status, number of tokens,
// finish and end. Gaps runs c streams that get a token each at every step of a clock which all fakes share, as from a worker that decodes a batch; the steps are at absolute times, so
// that a late one delays no other. A gap is the time between the arrivals of two tokens at the client, whose difference to that of a stream without a
// router is what the router adds. Each token has the time of its sending in it: the difference to the time of arrival is its delay, and the change of the delay from one token to the
// next, without its sign, is called jitter. Open
// holds many slow streams open and reads the router's memory.
package routerbench

import (
	"cmp"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Row is one measured value: the median over rounds, with the least and largest.
type Row struct {
	Work   string  `json:"work"`
	Target string  `json:"target"`
	Conns  int     `json:"connections"`
	Metric string  `json:"metric"`
	Unit   string  `json:"unit"`
	Value  float64 `json:"value"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	Rounds int     `json:"rounds"`
}

// now is CLOCK_MONOTONIC in nanoseconds, the same in every process of the machine.
func now() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // cannot fail for this clock
	return t.Nano()
}

// quantile of sorted values; 0 for none.
func quantile[T cmp.Ordered](sorted []T, q float64) T {
	if len(sorted) == 0 {
		var none T
		return none
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// mean of values, 0 for none.
func mean(all []int64) int64 {
	var sum int64
	for _, v := range all {
		sum += v
	}
	return sum / max(int64(len(all)), 1)
}

// collector gathers the values of one row over rounds, in order of first appearance.
type collector struct {
	rows   []Row // of one value each
	values [][]float64
}

func (c *collector) add(work, target string, conns int, metric, unit string, v float64) {
	for i, r := range c.rows {
		if r.Work == work && r.Target == target && r.Conns == conns && r.Metric == metric {
			c.values[i] = append(c.values[i], v)
			return
		}
	}
	c.rows = append(c.rows, Row{Work: work, Target: target, Conns: conns, Metric: metric, Unit: unit})
	c.values = append(c.values, []float64{v})
}

// result is a row each, with median and spread.
func (c *collector) result() []Row {
	out := slices.Clone(c.rows)
	for i := range out {
		v := slices.Sorted(slices.Values(c.values[i]))
		out[i].Value, out[i].Min, out[i].Max, out[i].Rounds = v[len(v)/2], v[0], v[len(v)-1], len(v)
	}
	return out
}

func ms(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }
