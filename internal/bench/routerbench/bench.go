package routerbench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"time"
)

// Names of works and metrics in rows.
const (
	WorkWhole  = "whole"
	WorkStream = "stream"
	WorkGaps   = "gaps"
	WorkOpen   = "open"

	MetricRate      = "requests/s"
	MetricP50       = "p50"
	MetricP99       = "p99"
	MetricCPU       = "CPU router"
	MetricCPUFakes  = "CPU fakes"
	MetricCPULoad   = "CPU generator"
	MetricRSS       = "RSS"
	MetricDelayP50  = "token delay p50"
	MetricDelayP99  = "token delay p99"
	MetricGapP50    = "gap p50"
	MetricGapP99    = "gap p99"
	MetricGapMean   = "gap mean"
	MetricJitterP50 = "jitter p50"
	MetricJitterP99 = "jitter p99"
	MetricStreamRSS = "RSS with open streams"
)

// Direct is the name of the target that is a decode worker without a router.
const Direct = "direct"

// Config of [Measure].
type Config struct {
	Works    []string
	Conns    []int         // connections of whole and stream
	Rounds   int           // of everything; targets alternate within a round
	Duration time.Duration // of a measurement
	Warmup   time.Duration // before each
	Tokens   int           // an answer
	GapConns []int         // streams of gaps
	Pace     time.Duration // between the tokens of gaps
	Open     int           // streams of open
	OpenPace time.Duration // between their tokens: slow, since open measures memory and not speed
	Log      io.Writer     // progress
}

// bench is one run.
type bench struct {
	Config
	fakes   *Fakes
	targets []*Target
	rows    collector
}

// Measure runs the works on the targets, and on a decode worker itself where that says something, and returns a row for each metric.
func Measure(ctx context.Context, c Config, f *Fakes, targets []*Target) ([]Row, error) {
	b := &bench{Config: c, fakes: f, targets: targets}
	direct := &Target{Name: Direct, Addr: f.Decodes[0]}
	for round := range c.Rounds {
		for _, work := range c.Works {
			fmt.Fprintf(c.Log, "round %d of %d: %s, load %s\n", round+1, c.Rounds, work, loadAverage())
			var err error
			switch work {
			case WorkWhole, WorkStream:
				err = b.rates(ctx, work, direct)
			case WorkGaps:
				err = b.allGaps(ctx, direct)
			case WorkOpen:
				err = b.each(ctx, targets, b.open)
			default:
				err = fmt.Errorf("no work %q", work)
			}
			if err != nil {
				return b.rows.result(), fmt.Errorf("routerbench: %s: %w", work, err)
			}
		}
	}
	return b.rows.result(), nil
}

// each runs a work on every target.
func (b *bench) each(ctx context.Context, targets []*Target, do func(ctx context.Context, t *Target) error) error {
	for _, t := range targets {
		if err := errors.Join(ctx.Err(), do(ctx, t)); err != nil {
			return fmt.Errorf("%s: %w", t.Name, err)
		}
	}
	return nil
}

// loadAverage is the machine's, over the last minute.
func loadAverage() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil || len(b) < 4 {
		return "unknown"
	}
	return string(b[:4])
}

// rates runs a closed loop with each number of connections.
func (b *bench) rates(ctx context.Context, work string, direct *Target) error {
	if err := b.fakes.set(ctx, 0, b.Tokens); err != nil {
		return err
	}
	for _, conns := range b.Conns {
		targets := b.targets
		if conns == 1 {
			targets = append([]*Target{direct}, targets...)
		}
		err := b.each(ctx, targets, func(_ context.Context, t *Target) error { return b.rate(work, t, conns) })
		if err != nil {
			return err
		}
	}
	return nil
}

// parties are the processes whose CPU counts: router, fakes, generator.
func (b *bench) parties(t *Target) (u [3]usage, err error) {
	for i, pid := range []int{t.pid, b.fakes.p.cmd.Process.Pid, 0} {
		if i == 0 && pid == 0 {
			continue
		}
		one, uerr := usageOf(pid)
		u[i], err = one, errors.Join(err, uerr)
	}
	return u, err
}

// rate measures one target with so many connections.
func (b *bench) rate(work string, t *Target, conns int) error {
	var from, to [3]usage
	var failed error
	g, err := run(loadConfig{addr: t.Addr, conns: conns, stream: work == WorkStream, tokens: b.Tokens, warmup: b.Warmup, length: b.Duration, least: 1}, func(begin bool) {
		u, err := b.parties(t)
		if failed = errors.Join(failed, err); begin {
			from = u
		} else {
			to = u
		}
	})
	if err = errors.Join(err, failed); err != nil {
		return err
	}
	n := float64(len(g.latencies))
	add := func(metric, unit string, v float64) { b.rows.add(work, t.Name, conns, metric, unit, v) }
	add(MetricRate, "1/s", n/(float64(g.ended-g.began)/1e9))
	add(MetricP50, "ms", ms(time.Duration(quantile(g.latencies, 0.5))))
	add(MetricP99, "ms", ms(time.Duration(quantile(g.latencies, 0.99))))
	for i, metric := range []string{MetricCPU, MetricCPUFakes, MetricCPULoad} {
		if i > 0 || t.pid != 0 {
			add(metric, "s/1k", (to[i].cpu-from[i].cpu)/n*1000)
		}
	}
	if t.pid != 0 {
		add(MetricRSS, "MiB", float64(to[0].rss)/(1<<20))
	}
	return nil
}

// gapTokens is how many tokens the streams of gaps have.
const gapTokens = 40

// allGaps measures the pauses between tokens with each number of streams.
func (b *bench) allGaps(ctx context.Context, direct *Target) error {
	if err := b.fakes.set(ctx, b.Pace, gapTokens); err != nil {
		return err
	}
	for _, conns := range b.GapConns {
		err := b.each(ctx, append([]*Target{direct}, b.targets...), func(_ context.Context, t *Target) error { return b.gaps(t, conns) })
		if err != nil {
			return err
		}
	}
	return nil
}

// gaps measures the pauses between tokens as a client sees them.
func (b *bench) gaps(t *Target, conns int) error {
	g, err := run(loadConfig{addr: t.Addr, conns: conns, stream: true, tokens: gapTokens, times: true, warmup: b.Warmup, length: b.Duration, least: 1}, func(bool) {})
	if err != nil {
		return err
	}
	add := func(metric string, v int64) { b.rows.add(WorkGaps, t.Name, conns, metric, "ms", ms(time.Duration(v))) }
	add(MetricGapP50, quantile(g.gaps, 0.5))
	add(MetricGapP99, quantile(g.gaps, 0.99))
	add(MetricGapMean, mean(g.gaps))
	add(MetricJitterP50, quantile(g.jitter, 0.5))
	add(MetricJitterP99, quantile(g.jitter, 0.99))
	add(MetricDelayP50, quantile(g.delays, 0.5))
	add(MetricDelayP99, quantile(g.delays, 0.99))
	return nil
}

// openAtOnce is how many streams are begun at a time: each needs new connections, and a listener's queue is not what is measured.
const openAtOnce = 128

// open holds streams open and reads the router's memory at its largest.
func (b *bench) open(ctx context.Context, t *Target) error {
	if err := b.fakes.set(ctx, b.OpenPace, 1000); err != nil {
		return err
	}
	g, err := newLoad(loadConfig{addr: t.Addr, conns: b.Open, stream: true, tokens: 1000})
	if err != nil {
		return err
	}
	defer g.l.close()
	waiting := slices.Collect(maps.Values(g.l.conns))
	var most int64
	all := int64(0) // when all were open
	for limit := now() + int64(patience); all == 0 || now()-all < int64(b.OpenPace+b.OpenPace/2); {
		for len(waiting) > 0 && b.Open-len(waiting)-g.open < openAtOnce {
			if err := g.ask(waiting[0]); err != nil {
				return err
			}
			waiting = waiting[1:]
		}
		if err := g.l.wait(50 * time.Millisecond); err != nil {
			return err
		}
		if now() > limit {
			return fmt.Errorf("only %d of %d streams are open after %v", g.open, b.Open, patience)
		}
		if g.open == b.Open && all == 0 {
			all = now()
		}
		u, err := usageOf(t.pid)
		if err != nil {
			return err
		}
		most = max(most, u.rss)
	}
	b.rows.add(WorkOpen, t.Name, b.Open, MetricStreamRSS, "MiB", float64(most)/(1<<20))
	return nil
}
