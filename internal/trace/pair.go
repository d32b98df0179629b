package trace

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/baton-pd/baton/internal/room"
)

// pairs compares the rooms that were seen from both sides.
func (c *checker) pairs() {
	sides := map[room.Side]map[room.Key][]*life{room.SideSender: {}, room.SideReceiver: {}}
	var keys []room.Key
	for _, in := range c.all {
		for _, l := range in.order {
			m := sides[in.side]
			if len(m[l.key]) == 0 && (in.side == room.SideSender || len(sides[room.SideSender][l.key]) == 0) {
				keys = append(keys, l.key)
			}
			m[l.key] = append(m[l.key], l)
		}
	}
	slices.SortFunc(keys, func(a, b room.Key) int { return cmp.Or(cmp.Compare(a.Room, b.Room), cmp.Compare(a.Gen, b.Gen)) })
	for _, k := range slices.Compact(keys) {
		c.pair(sides[room.SideSender][k], sides[room.SideReceiver][k])
	}
}

// pair matches the rooms of one key: those that are alone on their side, otherwise those
// whose lives overlap.
func (c *checker) pair(senders, receivers []*life) {
	alone := len(senders) <= 1 && len(receivers) <= 1
	used := map[*life]bool{}
	for _, r := range receivers {
		var match []*life
		for _, s := range senders {
			if alone || overlap(r, s) {
				match = append(match, s)
			}
		}
		for _, s := range match {
			used[s] = true
		}
		switch len(match) {
		case 0:
			c.rep.Unpaired++
			c.lonely(r)
		case 1:
			if rivals(match[0], receivers) > 1 && !alone {
				c.rep.Ambiguous++
				continue
			}
			c.rep.Pairs++
			c.compare(match[0], r)
		default:
			c.rep.Ambiguous++
		}
	}
	for _, s := range senders {
		if !used[s] {
			c.rep.Unpaired++
		}
	}
}

func overlap(a, b *life) bool { return a.opened.t <= b.last.t && b.opened.t <= a.last.t }

// rivals counts the lives that overlap l.
func rivals(l *life, all []*life) (n int) {
	for _, o := range all {
		if overlap(l, o) {
			n++
		}
	}
	return n
}

// told reports whether in's trace has all that happened to its rooms.
func told(in *incarnation) bool { return in.ended && !in.lossy }

// covers reports whether l's trace has all that happened to it until t: records are written in
// order of time, so what is missing of a trace that was cut is later than its last one.
func (p *pairing) covers(l *life, t int64) bool {
	return told(l.inc) || !l.inc.lossy && p.clock && l.inc.last.t > t
}

// lonely judges a receiver without a sender.
func (c *checker) lonely(r *life) {
	if !c.o.Whole || r.broken || r.node().State != room.StateSuccess {
		return
	}
	for _, in := range c.all {
		if in.side == room.SideSender && !told(in) {
			return
		}
	}
	r.inc.blame(r, r.terminal.line, wrong{RulePair, "a success has a sender", "a prefill room in some trace", "none"})
}

// compare holds the two sides of a room against each other.
func (c *checker) compare(s, r *life) {
	if s.broken || r.broken {
		return
	}
	clock := s.inc.header.Boot != "" && s.inc.header.Boot == r.inc.header.Boot
	if !clock {
		c.rep.Unclocked++
	}
	p := &pairing{s: s, r: r, clock: clock}
	for _, check := range []func(){p.messages, p.success, p.landings, p.settles, p.acks} {
		if check(); p.found {
			return
		}
	}
}

// pairing is one room seen from both sides.
type pairing struct {
	s, r  *life
	clock bool // their times are of one clock
	found bool
}

// blame makes one finding, at a record of l.
func (p *pairing) blame(l *life, n int, what, expected, got string) {
	if !p.found {
		p.found = true
		l.inc.blame(l, n, wrong{RulePair, what, expected, got})
	}
}

// success: every chunk of a success was allowed, and its write is over.
func (p *pairing) success() {
	if p.r.node().State != room.StateSuccess || !p.covers(p.s, p.r.terminal.t) {
		return
	}
	if p.s.chunks != p.r.chunks || len(p.s.writes) != p.r.chunks {
		p.blame(p.r, p.r.terminal.line, "a success had all its chunks written", fmt.Sprintf("%d writes", p.r.chunks), fmt.Sprintf("%d of %d at %s:%d", len(p.s.writes), p.s.chunks, p.s.inc.file, p.s.last.line))
	}
}

// landings: what was delivered had been allowed before.
func (p *pairing) landings() {
	for _, d := range p.r.landings {
		switch {
		case !d.delivered:
		case d.chunk >= len(p.s.writes):
			if p.covers(p.s, d.t) {
				p.blame(p.r, d.line, "a chunk that landed was written", fmt.Sprint("a write of chunk ", d.chunk), "none at the prefill worker")
			}
		case p.clock && p.s.writes[d.chunk].begun.t > d.t:
			w := p.s.writes[d.chunk]
			p.blame(p.r, d.line, "a chunk lands after its write began", fmt.Sprintf("after %d (%s:%d)", w.begun.t, p.s.inc.file, w.begun.line), fmt.Sprint(d.t))
		}
	}
}

// settles: a write that is applied has landed, or met a room that had ended.
func (p *pairing) settles() {
	for i, w := range p.s.writes {
		if !w.applied || !p.clock {
			continue
		}
		ok := p.r.terminal.seen() && p.r.terminal.t <= w.settled.t
		for _, d := range p.r.landings {
			ok = ok || d.chunk == i && d.t <= w.settled.t
		}
		if !ok && p.covers(p.r, w.settled.t) {
			p.blame(p.s, w.settled.line, "a write is applied when the decode worker has its chunk", fmt.Sprintf("chunk %d landed before", i), "it had not, and its room was live")
		}
	}
}

// acks: pages freed by an ack have no write any more.
func (p *pairing) acks() {
	if !p.r.freedByAck || !p.clock {
		return
	}
	for i, w := range p.s.writes {
		switch {
		case w.begun.t > p.r.freed.t:
			p.blame(p.s, w.begun.line, "no write begins after its pages were freed by an ack", fmt.Sprintf("before %d (%s:%d)", p.r.freed.t, p.r.inc.file, p.r.freed.line), fmt.Sprintf("chunk %d at %d", i, w.begun.t))
		case !w.settled.seen() && !p.covers(p.s, p.r.freed.t):
		case !w.settled.seen() || w.settled.t > p.r.freed.t:
			p.blame(p.r, p.r.freed.line, "pages are freed by an ack when every write has settled", fmt.Sprintf("chunk %d settled before (%s:%d)", i, p.s.inc.file, w.settled.line), fmt.Sprint(p.r.freed.t))
		}
	}
}

// messages: a grant that came is of the same chunks and was sent before, and an abort came
// after the end.
func (p *pairing) messages() {
	if g := p.s.granted; g.seen() && p.r.granted.seen() && p.s.chunks != p.r.chunks {
		p.blame(p.s, g.line, "a grant is taken for the same chunks", fmt.Sprint(p.r.chunks, " chunks"), fmt.Sprint(p.s.chunks))
	}
	if !p.clock {
		return
	}
	late := func(at, origin stamp) bool {
		if !origin.seen() {
			return p.covers(p.r, at.t)
		}
		return origin.t > at.t
	}
	if g := p.s.granted; g.seen() && late(g, p.r.granted) {
		p.blame(p.s, g.line, "a grant came that was sent before", fmt.Sprint("sent before ", g.t), sentAt(p.r.granted))
	}
	if a := p.s.aborted; a.seen() && late(a, p.r.terminal) {
		p.blame(p.s, a.line, "an abort came of a room that had ended", fmt.Sprint("ended before ", a.t), sentAt(p.r.terminal))
	}
}

func sentAt(s stamp) string {
	if !s.seen() {
		return "never"
	}
	return fmt.Sprint("at ", s.t)
}
