package kvbench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// System moves blocks between two processes: a transport of ours, or another system's API. Its target
// process and its connections are there already. Between two calls it takes no CPU.
type System interface {
	Name() string
	// Round writes a pool of blocks once, with the bytes of seed, and compares all of them at the target.
	Round(ctx context.Context, block int, seed uint64) (Round, error)
	// Singles writes n single blocks with a notification, one after the other, and returns their one-way
	// times in nanoseconds; none if the system has no such thing.
	Singles(ctx context.Context, block, n int) ([]int64, error)
	// Close ends the system's side in this process, and what it has started.
	Close() error
}

// Round is one pass over the pool.
type Round struct {
	Rooms    int     `json:"rooms"`
	Bytes    int64   `json:"bytes"`
	Seconds  float64 `json:"seconds"` // from the first post to the last completion
	CPU      float64 `json:"cpu"`     // CPU seconds of both processes in that time
	Verified bool    `json:"verified"`
}

// Bench collects what systems do side by side: of a block size each system does one round, then each the next, so that
// what the machine does meanwhile meets all of them. Rounds during which the two cores were apart are repeated, see
// [Work.Patience]. It is for one goroutine.
type Bench struct {
	w       Work
	cores   cores
	seed    uint64
	done    int // rounds of each block size
	names   []string
	records map[string][]record // by name and block size
	out     map[string]bool     // failed
}

// NewBench of w, whose Rounds are all that will be run.
func NewBench(w Work) *Bench {
	return &Bench{w: w, cores: cores{distance: coreDistance, patience: w.Patience}, records: map[string][]record{}, out: map[string]bool{}}
}

// Run adds rounds of each block size, after one that warms up. Each system has a name of its own; one of the same name as in
// an earlier Run is the same one, started anew. A system that fails is left out from there on, and the error says so.
func (b *Bench) Run(ctx context.Context, systems []System, rounds int) error {
	for _, s := range systems {
		if b.records[s.Name()] == nil {
			b.names = append(b.names, s.Name())
			b.records[s.Name()] = make([]record, len(b.w.Blocks))
		}
	}
	var failed error
	for k, block := range b.w.Blocks {
		for round := range rounds + 1 {
			for i := range systems {
				s := systems[(i+round)%len(systems)] // nobody is always first
				if b.out[s.Name()] {
					continue
				}
				number := 0 // warms up
				if round > 0 {
					number = b.done + round
				}
				if err := b.records[s.Name()][k].round(ctx, s, b.w, block, number, &b.seed, &b.cores); err != nil {
					failed = errors.Join(failed, fmt.Errorf("kvbench: %s, blocks of %d bytes: %w", s.Name(), block, err))
					b.out[s.Name()] = true
				}
			}
		}
	}
	b.done += rounds
	return failed
}

// Rows are of what was measured whole. A row whose bytes were wrong has Verified false.
func (b *Bench) Rows() []Row {
	var rows []Row
	for _, name := range b.names {
		for k, block := range b.w.Blocks {
			if r := &b.records[name][k]; len(r.rates) == b.done && b.done > 0 {
				rows = append(rows, r.row(name, block))
			}
		}
	}
	return rows
}

// record is what is known of one system and one block size.
type record struct {
	rates    []float64
	cpu, gb  float64
	times    []int64
	wrong    bool
	rooms    int
	repeated int
	coreNS   float64
}

// round does one round, numbered from 1; number 0, which warms up, is only verified.
func (r *record) round(ctx context.Context, s System, w Work, block, round int, seed *uint64, c *cores) error {
	for {
		before := c.together(ctx)
		*seed += 1_000_003
		got, err := s.Round(ctx, block, *seed)
		if err != nil {
			return err
		}
		r.wrong, r.rooms = r.wrong || !got.Verified, got.Rooms
		if round == 0 {
			return nil
		}
		times, err := s.Singles(ctx, block, w.Latencies*round/w.Rounds-w.Latencies*(round-1)/w.Rounds)
		if err != nil {
			return err
		}
		after, again := c.check()
		if again {
			r.repeated++
			continue
		}
		gb := float64(got.Bytes) / 1e9
		r.rates, r.cpu, r.gb = append(r.rates, gb/got.Seconds), r.cpu+got.CPU, r.gb+gb
		r.times = append(r.times, times...)
		r.coreNS = max(r.coreNS, before, after)
		return nil
	}
}

func (r *record) row(name string, block int) Row {
	slices.Sort(r.rates)
	slices.Sort(r.times)
	row := Row{
		Transport: name, BlockBytes: block, Rooms: r.rooms, Rounds: len(r.rates), Verified: !r.wrong,
		GBPerS: r.rates[len(r.rates)/2], MinGBPS: r.rates[0], MaxGBPS: r.rates[len(r.rates)-1],
		CPUPerGB: r.cpu / r.gb, Repeated: r.repeated, CoreNS: r.coreNS,
	}
	if len(r.times) > 0 {
		row.P50US, row.P99US = quantile(r.times, 0.5), quantile(r.times, 0.99)
	}
	return row
}

// quantile of sorted nanoseconds, in microseconds.
func quantile(sorted []int64, q float64) float64 {
	return float64(sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]) / 1e3
}

// cores watches how near to each other the two cores are that this process may use. A virtual machine's cores are
// moved by its host: while they do not share a cache, everything that goes from one to the other takes several
// times as long, so that a round tells of the host and not of what is measured.
type cores struct {
	distance func() (float64, bool)
	patience time.Duration // left to wait for the cores and to repeat rounds
	began    time.Time     // of the round under way
}

// apartNS is the distance from which on two cores do not share a cache. Within one complex it is 20 to 60 ns on
// x86-64 servers, across complexes 120 and more.
const apartNS = 100

// together waits until the cores are together, as long as there is patience, and returns their distance; 0 if
// it is unknown.
func (c *cores) together(ctx context.Context) float64 {
	for {
		c.began = time.Now()
		d, ok := c.distance()
		if !ok || d < apartNS || c.patience <= 0 || ctx.Err() != nil {
			return d
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
		}
		c.patience -= time.Since(c.began)
	}
}

// check returns the distance after a round, and whether the round is to be repeated.
func (c *cores) check() (float64, bool) {
	d, ok := c.distance()
	if !ok || d < apartNS || c.patience <= 0 {
		return d, false
	}
	c.patience -= time.Since(c.began)
	return d, true
}
