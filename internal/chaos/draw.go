package chaos

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// World is what faults can happen to.
type World struct {
	Prefills, Decodes int
	Transport         string // "tcp" or "shm": shm has no data connection
	// Gap is the mean time between the starts of two faults. Default 700 ms.
	Gap time.Duration
	// Longest bounds how long a fault lasts. Default 4 s.
	Longest time.Duration
	// Only limits the kinds; nil: all.
	Only []Kind
}

func (w World) processes() (all, prefills []string) {
	for i := range w.Prefills {
		prefills = append(prefills, fmt.Sprintf("prefill-%d", i))
	}
	all = append(all, prefills...)
	for i := range w.Decodes {
		all = append(all, fmt.Sprintf("decode-%d", i))
	}
	return append(all, router), prefills
}

const router = "router"

// links are all pairs that talk to each other.
func (w World) links() (out []string) {
	all, prefills := w.processes()
	for _, p := range all[:len(all)-1] {
		out = append(out, router+"~"+p)
	}
	for _, p := range prefills {
		for _, d := range all[len(prefills) : len(all)-1] {
			out = append(out, d+"~"+p)
		}
	}
	return out
}

// transferRules are what a transfer fault may do. Each is followed by its chance and seed.
var transferRules = []string{
	"post prob=%.2f seed=%d error=\"link down\"",
	"post prob=%.2f seed=%d halfway for=300ms",
	"post prob=%.2f seed=%d delay=200ms",
	"post prob=%.2f seed=%d corrupt",
	"post prob=%.2f seed=%d busy",
	"done prob=%.2f seed=%d delay=150ms",
	"post prob=%.2f seed=%d drop",
}

// drawer keeps what has been drawn so far.
type drawer struct {
	w     World
	rng   *rand.Rand
	busy  map[string]time.Duration // target -> until when something happens to it
	hits  map[string]int           // target -> how often something has
	kinds []Kind                   // still to come before all come again
	rules []string
}

// Draw makes a schedule of n faults. Every kind comes up before any comes up again; nothing happens twice at a
// time to one process or link. The same arguments give the same schedule.
func Draw(seed uint64, n int, w World) []Fault {
	if w.Gap == 0 {
		w.Gap = 700 * time.Millisecond
	}
	if w.Longest == 0 {
		w.Longest = 4 * time.Second
	}
	if len(w.Only) == 0 {
		w.Only = Kinds()
	}
	d := &drawer{w: w, rng: rand.New(rand.NewPCG(seed, 1<<40)), busy: map[string]time.Duration{}, hits: map[string]int{}}
	at := w.Gap
	var out []Fault
	for range n {
		f := d.fault(at)
		out = append(out, f)
		at = f.At + w.Gap/4 + d.between(0, w.Gap*3/2)
	}
	return out
}

// between draws a duration in [a, b), in whole milliseconds.
func (d *drawer) between(a, b time.Duration) time.Duration {
	return (a + time.Duration(d.rng.Int64N(int64(max(b-a, time.Millisecond))))).Truncate(time.Millisecond)
}

func (d *drawer) fault(at time.Duration) Fault {
	if len(d.kinds) == 0 {
		d.kinds = append(d.kinds, d.w.Only...)
		d.rng.Shuffle(len(d.kinds), func(i, k int) { d.kinds[i], d.kinds[k] = d.kinds[k], d.kinds[i] })
	}
	f := Fault{At: at, Kind: d.kinds[0]}
	d.kinds = d.kinds[1:]
	d.shape(&f)
	processes, prefills := d.w.processes()
	switch kinds[f.Kind].where {
	case onProcess:
		f.Target, f.At = d.free(processes, at)
	case onPrefill:
		f.Target, f.At = d.free(prefills, at)
	case onLink:
		links := d.w.links()
		if f.Port != "" { // only decode and prefill workers have them
			links = links[len(processes)-1:]
		}
		f.Target, f.At = d.free(links, at)
		if a, b, _ := f.Ends(); f.Kind == HalfOpen && d.rng.IntN(2) == 0 {
			f.Target = b + "~" + a
		}
	case onClients:
		f.Target = Clients
	}
	if f.Target != Clients {
		d.busy[f.Target] = f.At + f.For + time.Second
	}
	return f
}

// free picks, of the targets to which nothing happens at that time, one that was hit least; if all are
// busy, the first that will be free.
func (d *drawer) free(targets []string, at time.Duration) (string, time.Duration) {
	order := append([]string(nil), targets...)
	d.rng.Shuffle(len(order), func(i, k int) { order[i], order[k] = order[k], order[i] })
	slices.SortStableFunc(order, func(a, b string) int {
		return cmp.Or(cmp.Compare(max(d.busy[a], at), max(d.busy[b], at)), cmp.Compare(d.hits[a], d.hits[b]))
	})
	d.hits[order[0]]++
	return order[0], max(d.busy[order[0]], at)
}

// shape draws duration and parameters.
func (d *drawer) shape(f *Fault) {
	chance := func(low, high float64) float64 { return float64(int((low+(high-low)*d.rng.Float64())*1000)) / 1000 }
	long := func() time.Duration {
		if d.rng.IntN(2) == 0 {
			return d.between(20*time.Millisecond, d.w.Longest/10)
		}
		return d.between(d.w.Longest/10, d.w.Longest)
	}
	switch f.Kind {
	case Kill:
		f.For = d.between(0, d.w.Longest/4)
	case Stop, StopKill, Partition, HalfOpen:
		f.For = long()
	case Restart, Cut, Abort, Garbage:
	case Drop:
		f.For, f.P = long(), chance(.02, .4)
	case Delay:
		f.For, f.Delay = long(), d.between(5*time.Millisecond, 300*time.Millisecond)
	case Reorder, Duplicate:
		f.For, f.P = long(), chance(.05, .5)
	case Reset:
		f.For = d.between(20*time.Millisecond, 200*time.Millisecond)
	case Corrupt:
		f.For, f.P = long(), chance(.01, .2)
		if f.Port = "session"; d.w.Transport == "tcp" && d.rng.IntN(2) == 0 {
			f.Port = "data"
		}
	case Transfer:
		if len(d.rules) == 0 {
			d.rules = append(d.rules, transferRules...)
			d.rng.Shuffle(len(d.rules), func(i, k int) { d.rules[i], d.rules[k] = d.rules[k], d.rules[i] })
		}
		f.For = d.w.Longest/2 + long()
		f.Rule = fmt.Sprintf(d.rules[0], chance(.05, .3), d.rng.IntN(1000))
		d.rules = d.rules[1:]
	case Fill:
		f.N = 2 + d.rng.IntN(5)
	case Skew:
		f.For = d.between(d.w.Longest/4, d.w.Longest)
	}
}
