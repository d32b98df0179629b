package record

import (
	"time"

	"github.com/baton-pd/baton/internal/openai"
)

// Kinds of bars.
const (
	BarQueue    = "queue"    // in the router's queue
	BarWait     = "wait"     // at a worker, for memory, the other side or the engine
	BarChunk    = "chunk"    // one chunk of the prompt is computed
	BarPrefill  = "prefill"  // the prompt is computed; no more is known
	BarTransfer = "transfer" // KV travels
	BarFirst    = "first"    // the first token is computed
	BarDecode   = "decode"   // tokens come
)

// Bar is a stretch of time, in milliseconds from the request's arrival.
type Bar struct {
	Kind string  `json:"kind"`
	From float64 `json:"from"`
	To   float64 `json:"to"`
	Open bool    `json:"open,omitempty"` // it goes on
}

// Lane is what one party did for one attempt.
type Lane struct {
	Leg     string    `json:"leg"`    // router, prefill, kv or decode
	Worker  string    `json:"worker"` // "" for router and kv
	Attempt int       `json:"attempt"`
	Bars    []Bar     `json:"bars"`
	Ticks   []float64 `json:"ticks,omitempty"`  // moments at which a chunk had landed
	Failed  bool      `json:"failed,omitempty"` // it is where the attempt failed
}

// Timeline draws a record as of now. reports gives what the workers of a room told of it, nil if they told nothing. Their moments
// begin when they got the request, which is taken to be when it was sent.
func Timeline(r *Record, now time.Time, reports func(room uint64) (prefill, decode *openai.RoomReport)) []Lane {
	end := r.End
	if end == Never {
		end = now.Sub(r.Start)
	}
	lanes := []Lane{routerLane(r, end)}
	for i := range r.Attempts {
		a := &r.Attempts[i]
		d := drawing{a: a, base: millis(a.Start), end: millis(a.End), open: a.End == Never}
		if d.open {
			d.end = millis(end)
		}
		if a.Room != 0 && reports != nil {
			d.p, d.d = reports(a.Room)
		}
		lanes = append(lanes, d.lanes(i)...)
	}
	return lanes
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// routerLane shows the queue. Waits of later attempts lie between attempts; the first is what there was before the first attempt.
func routerLane(r *Record, end time.Duration) Lane {
	l := Lane{Leg: "router", Failed: r.Cause != nil && (r.Cause.Side == "router" || len(r.Attempts) == 0)}
	at := time.Duration(0)
	gap := func(to time.Duration, open bool) {
		if open || to-at >= time.Millisecond {
			l.Bars = append(l.Bars, Bar{Kind: BarQueue, From: millis(at), To: millis(to), Open: open})
		}
	}
	for i := range r.Attempts {
		a := &r.Attempts[i]
		gap(a.Start, false)
		if a.End == Never {
			return l
		}
		at = a.End
	}
	if r.Waiting || len(r.Attempts) == 0 {
		gap(end, r.Outcome == "")
	}
	return l
}

// drawing is one attempt to be drawn. Times are milliseconds from the request's arrival.
type drawing struct {
	a         *Attempt
	p, d      *openai.RoomReport
	base, end float64
	open      bool
}

// bar adds a stretch of a worker's: to is nil while it goes on. Nothing lasts longer than the attempt, but what a
// worker says of its end, which may come a moment after.
func (d *drawing) bar(l *Lane, kind string, from float64, to *float64) {
	b := Bar{Kind: kind, From: d.base + from}
	switch {
	case to != nil:
		b.To = d.base + *to
	default:
		b.To, b.Open = max(d.end, b.From), d.open
	}
	if b.To > b.From || b.Open {
		l.Bars = append(l.Bars, b)
	}
}

// first is the earliest moment that has come.
func first(ms ...*float64) *float64 {
	for _, m := range ms {
		if m != nil {
			return m
		}
	}
	return nil
}

func (d *drawing) lanes(n int) []Lane {
	var out []Lane
	fails := func(side, worker string) bool {
		c := d.a.Cause
		return c != nil && (c.Worker == worker && worker != "" && c.Side == side || c.Worker == "" && c.Side == side)
	}
	if d.a.Prefill != "" {
		l := Lane{Leg: "prefill", Worker: d.a.Prefill, Attempt: n, Failed: fails("prefill", d.a.Prefill)}
		if d.p != nil {
			d.prefill(&l)
		} else {
			d.unknownPrefill(&l)
		}
		out = append(out, l)
		if kv := d.transfer(n); kv != nil {
			out = append(out, *kv)
		}
	}
	l := Lane{Leg: "decode", Worker: d.a.Decode, Attempt: n, Failed: fails("decode", d.a.Decode)}
	if d.d != nil {
		d.decode(&l)
	} else {
		d.unknownDecode(&l)
	}
	return append(out, l)
}

// prefill draws what the prefill worker told: the wait for the grant and the engine, its chunks, and what it waited for after them.
func (d *drawing) prefill(l *Lane) {
	p := d.p
	if len(p.Chunks) == 0 {
		d.bar(l, BarWait, 0, first(p.TransferredMS, p.EndedMS))
		return
	}
	d.bar(l, BarWait, 0, &p.Chunks[0][0])
	last := 0.0
	for _, c := range p.Chunks {
		d.bar(l, BarChunk, c[0], &c[1])
		last = c[1]
	}
	if len(p.Chunks) < p.ChunksTotal && p.EndedMS == nil {
		return // the next chunk is on its way
	}
	d.bar(l, BarTransfer, last, first(p.TransferredMS, p.EndedMS))
}

// leaves is when the first chunk could leave: it was computed, or else had landed. nil: that is not known.
func (d *drawing) leaves() *float64 {
	switch {
	case d.p != nil && len(d.p.Chunks) > 0:
		return &d.p.Chunks[0][1]
	case d.d != nil && len(d.d.Chunks) > 0:
		return &d.d.Chunks[0][1]
	default:
		return nil
	}
}

// transfer draws the KV's way, if anything is known of it.
func (d *drawing) transfer(n int) *Lane {
	from := d.leaves()
	if from == nil {
		return nil
	}
	l := &Lane{Leg: "kv", Attempt: n}
	var to *float64
	if d.p != nil {
		to = first(d.p.TransferredMS, d.p.EndedMS)
	}
	if d.d != nil {
		for _, c := range d.d.Chunks {
			l.Ticks = append(l.Ticks, d.base+c[1])
		}
		if c := d.d.Chunks; len(c) > 0 && len(c) >= d.d.ChunksTotal {
			to = &c[len(c)-1][1]
		} else if to == nil {
			to = first(d.d.TransferredMS, d.d.EndedMS)
		}
	}
	d.bar(l, BarTransfer, *from, to)
	return l
}

// decode draws what the decode worker told.
func (d *drawing) decode(l *Lane) {
	r := d.d
	come := d.leaves()
	if come != nil && r.TransferredMS != nil && *come > *r.TransferredMS {
		come = nil // the workers' moments begin at different times; by so much they are no use
	}
	d.bar(l, BarWait, 0, first(come, r.TransferredMS, r.EndedMS))
	if come != nil {
		d.bar(l, BarTransfer, *come, first(r.TransferredMS, r.EndedMS))
	}
	if r.TransferredMS != nil {
		d.bar(l, BarFirst, *r.TransferredMS, first(r.FirstTokenMS, r.EndedMS))
	}
	if r.FirstTokenMS != nil {
		d.bar(l, BarDecode, *r.FirstTokenMS, r.EndedMS)
	}
}

// since is a moment of the router's as one of the workers'.
func (d *drawing) since(m time.Duration) *float64 {
	if m == Never {
		return nil
	}
	ms := millis(m) - d.base
	return &ms
}

func (d *drawing) unknownPrefill(l *Lane) {
	d.bar(l, BarPrefill, 0, d.since(d.a.PrefillEnd))
}

func (d *drawing) unknownDecode(l *Lane) {
	token := d.since(d.a.FirstToken)
	d.bar(l, BarWait, 0, token)
	if token != nil {
		d.bar(l, BarDecode, *token, d.since(d.a.End))
	}
}
