package trace

import (
	"fmt"
	"io"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// Source is one trace, with the name that findings give it.
type Source struct {
	Name   string
	Reader io.Reader
}

// Options of a check.
type Options struct {
	// Slack is how late a room may end after its deadline, besides the time in which its
	// process did not run. 0: 1 s.
	Slack time.Duration
	// Whole says that the sources are the traces of all workers of a stack, so that a decode
	// room that succeeded must have its prefill room in one of them.
	Whole bool
}

const (
	// stallAfter is a silence that says that a process did not run: five missing beats.
	stallAfter = int64(time.Second)
	// tombstonesKept is the least number of ended rooms that a registry remembers, however
	// many end: its share for one shard.
	tombstonesKept = 1 << 17 / 64
)

// Check reads the traces and reports. The error is a reader's; what is wrong with a trace is
// in the report.
//
// Within a process: the records are well formed and in order; each room's replay gives the
// same nodes, effects, counters and first cause, and keeps what safety.go says; rooms are
// opened once and forgotten once, and no key is reused before its time; rooms end by their
// deadlines; at the end of a closed trace nothing is live.
//
// Between processes, for each key with a room on either side: a decode room that succeeded
// had every chunk allowed by its prefill room; each chunk landed after it was allowed, and
// settled as applied after it landed or its room had ended; the grant was sent before it
// came, and the room had ended before its abort came; pages freed by an ack were freed
// after every write had settled. Where a process was killed, what it can not tell any more
// is not asked for.
func Check(o Options, sources ...Source) (*Report, error) {
	if o.Slack <= 0 {
		o.Slack = time.Second
	}
	c := &checker{o: o, rep: &Report{
		Rooms: map[string]int{}, Ends: map[string]map[string]int{"prefill": {}, "decode": {}}, Findings: []Finding{},
	}}
	for _, s := range sources {
		if err := c.file(s); err != nil {
			return nil, fmt.Errorf("read room trace %s: %w", s.Name, err)
		}
	}
	c.pairs()
	c.rep.judge()
	return c.rep, nil
}

type checker struct {
	o   Options
	rep *Report
	all []*incarnation
}

func (c *checker) file(s Source) error {
	c.rep.Files++
	var now *incarnation
	err := scan(s.Reader, func(l line) {
		bad := func(what, expected, got string) {
			c.rep.find(Finding{File: s.Name, Line: l.n, Rule: RuleFormat, What: what, Expected: expected, Got: got})
		}
		switch {
		case l.err != nil:
			bad("the line", "a header or a record", l.err.Error())
		case l.torn:
			c.rep.Torn++
		case l.header != nil:
			if now != nil {
				now.close()
			}
			side := map[string]room.Side{"prefill": room.SideSender, "decode": room.SideReceiver}[l.header.Side]
			if now = nil; side == 0 {
				bad("the side of the worker", "prefill or decode", l.header.Side)
				return
			}
			now = newIncarnation(c, s.Name, side, l.header, l.n)
		case now == nil:
			bad("the trace", "a header first", l.record.Kind)
		default:
			c.rep.Records++
			now.record(l.record, l.n)
		}
	})
	if now != nil {
		now.close()
	}
	return err
}

// incarnation is one process's part of a trace.
type incarnation struct {
	*checker
	file   string
	header *Header
	side   room.Side
	last   stamp
	ended  bool // the end record came
	lossy  bool // records are missing: dropped of them
	stalls []stall

	dropped uint64

	rooms   map[uint64]*life // by instance
	order   []*life
	live    map[room.Key]*life
	buried  map[room.Key]burial
	burials int
	top     uint64 // highest instance
}

type stall struct{ from, to int64 }

type burial struct {
	t int64
	n int // how many were forgotten before
}

func newIncarnation(c *checker, file string, side room.Side, h *Header, n int) *incarnation {
	in := &incarnation{checker: c, file: file, header: h, side: side, last: stamp{h.Mono, n},
		rooms: map[uint64]*life{}, live: map[room.Key]*life{}, buried: map[room.Key]burial{}}
	c.all = append(c.all, in)
	c.rep.Incarnations++
	return in
}

func (in *incarnation) find(n int, rule, what, expected, got string) {
	in.rep.find(Finding{File: in.file, Line: n, Rule: rule, What: what, Expected: expected, Got: got})
}

// blame makes a finding of a room, which is not judged any further.
func (in *incarnation) blame(l *life, n int, w wrong) {
	l.broken = true
	in.rep.find(Finding{File: in.file, Line: n, Rule: w.rule, Room: l.key.String(), Instance: l.instance, What: w.what, Expected: w.expected, Got: w.got})
}

func (in *incarnation) record(r *Record, n int) {
	if in.ended {
		in.find(n, RuleOrder, "a record after the end", "nothing, or another process's header", r.Kind)
	}
	if r.Mono < in.last.t {
		in.find(n, RuleOrder, "time goes on", fmt.Sprint("at least ", in.last.t), fmt.Sprint(r.Mono))
	} else if r.Mono-in.last.t > stallAfter {
		in.stalls = append(in.stalls, stall{in.last.t, r.Mono})
		in.rep.Stalls++
	}
	in.last = stamp{max(r.Mono, in.last.t), n}
	switch r.Kind {
	case kindBeat:
	case kindDropped:
		in.drop(max(r.Count, 1))
	case kindEnd:
		in.ended = true
		if r.Count > in.dropped { // the last ones had no room for a record of their own
			in.drop(r.Count - in.dropped)
		}
	case kindOpen:
		in.open(r, n)
	case kindForget:
		if l := in.room(r, n); l != nil {
			in.forget(l, r, n)
		}
	default:
		if l := in.room(r, n); l != nil {
			in.event(l, r, n)
		}
	}
}

func (in *incarnation) drop(n uint64) {
	in.lossy = true
	in.dropped += n
	in.rep.Dropped += n
}

func (in *incarnation) open(r *Record, n int) {
	key, _ := parseKey(r.Room) // shape has looked
	fail := func(what, expected, got string) {
		in.rep.find(Finding{File: in.file, Line: n, Rule: RuleLife, Room: r.Room, Instance: r.Instance, What: what, Expected: expected, Got: got})
	}
	if in.rooms[r.Instance] != nil {
		fail("each instance is opened once", "a new number", fmt.Sprint(r.Instance))
		return
	}
	if r.Chunks < 1 || r.Chunks > 1<<31-1 {
		fail("the chunks of a room", "at least 1", fmt.Sprint(r.Chunks))
		return
	}
	ttl := in.header.Tombstone
	if old := in.live[key]; old != nil && !in.lossy {
		fail("a key that is in use is not opened again", fmt.Sprintf("instance %d forgotten", old.instance), "it is not")
	}
	if b, ok := in.buried[key]; ok && r.Mono-b.t < ttl && in.burials-b.n < tombstonesKept {
		fail("a key is not reused early", "at least "+time.Duration(ttl).String()+" later", time.Duration(r.Mono-b.t).String())
	}
	l := newLife(in, key, r, n)
	in.rooms[r.Instance], in.live[key] = l, l
	in.order = append(in.order, l)
	in.top = max(in.top, r.Instance)
	in.rep.Rooms[in.side.String()]++
}

// room is the one that r belongs to; nil if it is not to be judged.
func (in *incarnation) room(r *Record, n int) *life {
	l := in.rooms[r.Instance]
	if l == nil {
		if !in.lossy {
			in.rep.find(Finding{File: in.file, Line: n, Rule: RuleLife, Room: r.Room, Instance: r.Instance, What: "a room is opened first", Expected: kindOpen, Got: r.Kind})
		}
		return nil
	}
	if l.broken {
		return nil
	}
	if l.key.String() != r.Room {
		in.blame(l, n, wrong{RuleLife, "an instance has one key", l.key.String(), r.Room})
		return nil
	}
	l.last = stamp{r.Mono, n}
	return l
}

func (in *incarnation) event(l *life, r *Record, n int) {
	switch {
	case r.Seq == l.seq+1 && !l.forgetting:
	case in.lossy: // it may be among the dropped
		l.broken = true
		in.rep.Unverified++
		return
	case l.forgetting:
		in.blame(l, n, wrong{RuleLife, "a room is dropped at once after FxForget", kindForget, r.Kind})
		return
	default:
		in.blame(l, n, wrong{RuleOrder, "a room's events are numbered without a gap", fmt.Sprint(l.seq + 1), fmt.Sprint(r.Seq)})
		return
	}
	l.seq++
	live := !l.terminal.seen()
	if w := l.step(r, n); w != nil {
		in.blame(l, n, *w)
		return
	}
	if live && l.terminal.seen() {
		in.overdue(l, r.Mono, n)
	}
}

func (in *incarnation) forget(l *life, r *Record, n int) {
	if !l.forgetting {
		if in.lossy {
			l.broken = true
			in.rep.Unverified++
			return
		}
		in.blame(l, n, wrong{RuleLife, "a room is forgotten once, when its last step asks for it", "FxForget before", l.node().String()})
		return
	}
	l.forgetting, l.forgotten = false, stamp{r.Mono, n}
	if in.live[l.key] == l {
		delete(in.live, l.key)
	}
	in.buried[l.key] = burial{r.Mono, in.burials}
	in.burials++
}

// overdue blames l if it was still live at t, too late.
func (in *incarnation) overdue(l *life, t int64, n int) {
	due := max(l.deadline, l.opened.t)
	limit := addSaturated(due, int64(in.o.Slack))
	for _, s := range in.stalls {
		if s.from < limit && s.to > limit {
			limit = s.to + int64(in.o.Slack)
		}
	}
	if t > limit {
		in.blame(l, n, wrong{RuleDeadline, "a room ends by its deadline", "at most " + in.o.Slack.String() + " late", time.Duration(t - due).String()})
	}
}

// close judges what is left when the process's part of the trace is over.
func (in *incarnation) close() {
	if !in.ended {
		in.rep.Cut++
	}
	for _, l := range in.order {
		in.tally(l)
		if !l.broken {
			in.left(l)
		}
	}
	if in.ended && !in.lossy && in.top != uint64(len(in.order)) {
		in.find(in.last.line, RuleOrder, "rooms are numbered without a gap", fmt.Sprintf("instances 1 to %d", in.top), fmt.Sprintf("%d of them", len(in.order)))
	}
}

// tally counts how l ended.
func (in *incarnation) tally(l *life) {
	end := "live"
	switch s := l.node().State; {
	case s == room.StateSuccess:
		end = "success"
	case s == room.StateFailed:
		end = "failed: " + l.cause()
	}
	in.rep.Ends[in.side.String()][end]++
}

// left judges a room that was not forgotten.
func (in *incarnation) left(l *life) {
	node, n := l.node(), in.last.line
	switch {
	case l.forgotten.seen():
	case in.lossy:
		l.broken = true
		in.rep.Unverified++
	case !in.ended:
		if !node.State.Terminal() {
			in.overdue(l, in.last.t, n)
		}
	case !node.State.Terminal():
		in.blame(l, n, wrong{RuleEnd, "at the end every room has ended", "a terminal state", node.String()})
	case l.forgetting, !l.released, in.side == room.SideSender:
		in.blame(l, n, wrong{RuleEnd, "at the end every room is forgotten", kindForget, node.String()})
	default:
		in.rep.Undrained++ // its pages waited for a proof that the peer did not give
	}
}
