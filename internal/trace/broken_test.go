package trace

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// good is a recorded pair of traces: room 1 handed over in two chunks, room 2 aborted by the
// decode side with a write under way.
type good struct {
	p, d   []Record
	ph, dh Header
}

func recordGood(t *testing.T) *good {
	w := newWorld(t)
	w.whole(1, 2)
	w.aborted(2)
	w.p.end()
	w.d.end()
	return &good{w.p.records, w.d.records, w.p.header, w.d.header}
}

func (g *good) check(t *testing.T) *Report {
	t.Helper()
	return check(t, lines(g.ph, g.p), lines(g.dh, g.d))
}

// at is the record of a room with that event, the nth one from 0.
func at(t *testing.T, rs []Record, key, kind string, nth int) *Record {
	t.Helper()
	for i := range rs {
		if rs[i].Room == key && rs[i].Kind == kind {
			if nth--; nth < 0 {
				return &rs[i]
			}
		}
	}
	t.Fatalf("no %s of room %s", kind, key)
	return nil
}

// without drops the records that drop says.
func without(rs []Record, drop func(*Record) bool) []Record {
	return slices.DeleteFunc(rs, func(r Record) bool { return drop(&r) })
}

// renumber makes the events of a room count from 1 again.
func renumber(rs []Record, key string) {
	n := uint32(0)
	for i := range rs {
		if rs[i].Room == key && rs[i].Seq > 0 {
			n++
			rs[i].Seq = n
		}
	}
}

// TestBrokenTraces: each way to break a good trace is found, by its rule, at its line.
func TestBrokenTraces(t *testing.T) {
	for _, c := range []struct {
		name   string
		breaks func(t *testing.T, g *good)
		rule   string
		what   string // part of the first finding
		in     string // file of the first finding
	}{
		{"resurrected", func(t *testing.T, g *good) {
			r := at(t, g.p, "2", "begin", 2) // skipped after the abort
			r.To, r.Effects, r.Begun = "transferring", "write", 3
		}, RuleReplay, "node after of event 6 (begin): expected failed/owing, got transferring", "p"},
		{"another effect", func(t *testing.T, g *good) { at(t, g.p, "2", "abort", 0).Effects = "send_ack|terminal" },
			RuleReplay, "effects of event 5 (abort): expected terminal, got send_ack|terminal", "p"},
		{"another cause", func(t *testing.T, g *good) { at(t, g.d, "2", "ack", 0).Cause = "aborted" },
			RuleReplay, "first cause of event 4 (ack): expected client_gone, got aborted", "d"},
		{"a counter", func(t *testing.T, g *good) { at(t, g.p, "1", "settle", 0).Settled = 2 },
			RuleReplay, "begun, settled and landed after event 3 (settle): expected 1 1 0, got 1 2 0", "p"},
		{"wrong node before", func(t *testing.T, g *good) { at(t, g.d, "1", "landed", 1).From = "waiting" },
			RuleReplay, "node before", "d"},
		{"a chunk out of order", func(t *testing.T, g *good) { at(t, g.d, "1", "landed", 1).Chunk = 0 },
			RuleReplay, "node after", "d"},
		{"the same write settles twice", func(t *testing.T, g *good) { at(t, g.p, "1", "settle", 1).Chunk = 0 },
			RuleSafety, "each write settles once", "p"},
		{"an event is missing", func(t *testing.T, g *good) {
			g.p = without(g.p, func(r *Record) bool { return r.Room == "1" && r.Seq == 3 })
		}, RuleOrder, "numbered without a gap: expected 3, got 4", "p"},
		{"an event is there twice", func(t *testing.T, g *good) {
			r := *at(t, g.p, "1", "begin", 0)
			i := slices.Index(g.p, r)
			g.p = slices.Insert(g.p, i+1, r)
		}, RuleOrder, "numbered without a gap: expected 3, got 2", "p"},
		{"events are missing and renumbered", func(t *testing.T, g *good) {
			g.p = without(g.p, func(r *Record) bool { return r.Room == "1" && r.Kind == "settle" && r.Chunk == 0 })
			renumber(g.p, "1")
		}, RuleReplay, "settled", "p"},
		{"never opened", func(t *testing.T, g *good) {
			g.p = without(g.p, func(r *Record) bool { return r.Room == "1" && r.Kind == kindOpen })
		}, RuleLife, "a room is opened first: expected open, got grant", "p"},
		{"opened twice", func(t *testing.T, g *good) { at(t, g.p, "2", kindOpen, 0).Instance = 1 },
			RuleLife, "each instance is opened once", "p"},
		{"an instance is left out", func(t *testing.T, g *good) {
			for i := range g.p {
				if g.p[i].Instance == 2 {
					g.p[i].Instance = 3
				}
			}
		}, RuleOrder, "rooms are numbered without a gap", "p"},
		{"a key in use is opened", func(t *testing.T, g *good) {
			g.p = without(g.p, func(r *Record) bool {
				return r.Room == "1" && (r.Kind == kindForget || r.Kind == "release")
			})
			for i := range g.p {
				if g.p[i].Room == "2" {
					g.p[i].Room = "1"
				}
			}
		}, RuleLife, "in use is not opened again", "p"},
		{"a key is reused early", func(t *testing.T, g *good) {
			for i := range g.p {
				if g.p[i].Room == "2" {
					g.p[i].Room = "1"
				}
			}
		}, RuleLife, "a key is not reused early: expected at least 1m0s later, got", "p"},
		{"an instance changes its key", func(t *testing.T, g *good) { at(t, g.p, "1", "begin", 1).Room = "7" },
			RuleLife, "an instance has one key", "p"},
		{"not forgotten", func(t *testing.T, g *good) {
			g.p = without(g.p, func(r *Record) bool { return r.Room == "1" && r.Kind == kindForget })
		}, RuleEnd, "at the end every room is forgotten", "p"},
		{"forgotten too early", func(t *testing.T, g *good) {
			g.p = without(g.p, func(r *Record) bool { return r.Room == "1" && r.Kind == "release" })
		}, RuleLife, "forgotten once, when its last step asks for it", "p"},
		{"forgotten twice", func(t *testing.T, g *good) {
			r := *at(t, g.p, "1", kindForget, 0)
			g.p = slices.Insert(g.p, slices.Index(g.p, r)+1, r)
		}, RuleLife, "forgotten once", "p"},
		{"live at the end", func(t *testing.T, g *good) {
			g.d = without(g.d, func(r *Record) bool { return r.Room == "1" && r.Seq > 2 || r.Room == "1" && r.Kind == kindForget })
		}, RuleEnd, "at the end every room has ended: expected a terminal state, got transferring", "d"},
		{"late", func(t *testing.T, g *good) {
			for nth := range 2 { // two silences that are too short to be a stall
				from := at(t, g.d, "1", "landed", nth).Mono
				for _, rs := range [][]Record{g.p, g.d} {
					for i := range rs {
						if rs[i].Mono >= from {
							rs[i].Mono += int64(900 * time.Millisecond)
						}
					}
				}
			}
			at(t, g.d, "1", kindOpen, 0).Deadline = at(t, g.d, "1", "landed", 1).Mono - 1_000_000_001
		}, RuleDeadline, "a room ends by its deadline: expected at most 1s late, got 1.000000001s", "d"},
		{"late and cut", func(t *testing.T, g *good) {
			g.d = without(g.d, func(r *Record) bool {
				return r.Kind == kindEnd || r.Room == "1" && (r.Seq > 2 || r.Kind == kindForget)
			})
			at(t, g.d, "1", kindOpen, 0).Deadline = 1
			now := g.d[len(g.d)-1].Mono
			for range 40 { // the process ran on for 8 s
				now += int64(beat)
				g.d = append(g.d, Record{Mono: now, Wall: 1, Kind: kindBeat})
			}
		}, RuleDeadline, "a room ends by its deadline", "d"},
		{"time goes back", func(t *testing.T, g *good) { at(t, g.p, "1", "begin", 1).Mono -= 5 * tick },
			RuleOrder, "time goes on", "p"},
		{"a record after the end", func(t *testing.T, g *good) {
			g.p = append(g.p, Record{Mono: g.p[len(g.p)-1].Mono, Wall: 1, Kind: kindBeat})
		}, RuleOrder, "after the end", "p"},
		{"the side is none", func(t *testing.T, g *good) { g.ph.Side = "router" },
			RuleFormat, "the side of the worker: expected prefill or decode, got router", "p"},
		{"the other side's room", func(t *testing.T, g *good) { g.ph.Side = "decode" },
			RuleReplay, "", "p"},
		{"a room without chunks", func(t *testing.T, g *good) { at(t, g.p, "1", kindOpen, 0).Chunks = 0 },
			RuleLife, "the chunks of a room", "p"},
		{"a kind that is none", func(t *testing.T, g *good) { at(t, g.p, "1", "begin", 0).Kind = "start" },
			RuleFormat, `"start" is unknown`, "p"},
		{"a beat of a room", func(t *testing.T, g *good) { at(t, g.p, "1", kindForget, 0).Kind = kindBeat },
			RuleFormat, "fields that", "p"},

		// What only the other side's trace can tell.
		{"success without its writes", func(t *testing.T, g *good) {
			g.p = without(g.p, func(r *Record) bool { return r.Room == "1" && (r.Seq > 1 || r.Kind == kindForget) })
			r := at(t, g.p, "1", "grant", 0)
			g.p = slices.Insert(g.p, slices.Index(g.p, *r)+1,
				Record{Mono: r.Mono, Wall: 1, Kind: "release", Room: "1", Instance: 1, Seq: 2, From: "waiting", To: "failed/gone", Effects: "send_failed|terminal|forget", Cause: "aborted"},
				Record{Mono: r.Mono, Wall: 1, Kind: kindForget, Room: "1", Instance: 1})
		}, RulePair, "a success had all its chunks written: expected 2 writes, got 0 of 2", "d"},
		{"a chunk lands before its write", func(t *testing.T, g *good) { shift(g.d, "1", "landed", -3*tick) },
			RulePair, "a chunk lands after its write began", "d"},
		{"applied before it landed", func(t *testing.T, g *good) { shift(g.d, "1", "landed", 3*tick) },
			RulePair, "a write is applied when the decode worker has its chunk", "p"},
		{"pages freed before the writes were over", func(t *testing.T, g *good) { shift(g.d, "2", "ack", -5*tick) },
			RulePair, "pages are freed by an ack when every write has settled: expected chunk 1 settled before", "d"},
		{"a write after the pages were freed", func(t *testing.T, g *good) {
			from := at(t, g.p, "2", "begin", 1).Mono
			for i := range g.p {
				if g.p[i].Mono >= from {
					g.p[i].Mono += 20 * tick
				}
			}
		}, RulePair, "no write begins after its pages were freed by an ack", "p"},
		{"a grant that nobody had sent", func(t *testing.T, g *good) { shift(g.d, "1", "granted", 5*tick) },
			RulePair, "a grant came that was sent before", "p"},
		{"an abort of a live room", func(t *testing.T, g *good) { shift(g.d, "2", "cancel", 5*tick) },
			RulePair, "an abort came of a room that had ended", "p"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := recordGood(t)
			if rep := g.check(t); !rep.OK() || rep.Pairs != 2 {
				t.Fatalf("the good trace:\n%s", rep.text())
			}
			c.breaks(t, g)
			rep := g.check(t)
			if rep.Verdict != VerdictInvalid || len(rep.Findings) == 0 {
				t.Fatalf("not found:\n%s", rep.text())
			}
			f := rep.Findings[0]
			if f.Rule != c.rule || f.File != c.in || !strings.Contains(f.String(), c.what) {
				t.Errorf("found %s; want rule %s in %s with %q", f, c.rule, c.in, c.what)
			}
		})
	}
}

// shift moves the time of a room's events of one kind, and keeps the file's time going on: it
// moves everything else of the file out of the way.
func shift(rs []Record, key, kind string, by int64) {
	for i := range rs {
		if rs[i].Room == key && rs[i].Kind == kind {
			rs[i].Mono += by
		}
	}
	if by > 0 {
		for i := 1; i < len(rs); i++ {
			rs[i].Mono = max(rs[i].Mono, rs[i-1].Mono)
		}
		return
	}
	for i := len(rs) - 2; i >= 0; i-- {
		rs[i].Mono = min(rs[i].Mono, rs[i+1].Mono)
	}
}

// TestStallIsForgiven: a process that was stopped ends its rooms late, and the trace shows
// that it was: nothing was written meanwhile, not even beats.
func TestStallIsForgiven(t *testing.T) {
	for _, stopped := range []bool{true, false} {
		g := recordGood(t)
		last := at(t, g.d, "1", "landed", 1)
		i := slices.Index(g.d, *last)
		open := at(t, g.d, "1", kindOpen, 0)
		open.Deadline = last.Mono + tick
		by := int64(10 * time.Second)
		for k := i; k < len(g.d); k++ {
			g.d[k].Mono += by
		}
		for k := range g.p {
			if g.p[k].Mono > open.Deadline-3*tick {
				g.p[k].Mono += by
			}
		}
		for k := int64(1); !stopped && k < by/int64(beat); k++ {
			g.d = slices.Insert(g.d, i+int(k)-1, Record{Mono: open.Deadline + k*int64(beat), Wall: 1, Kind: kindBeat})
		}
		rep := check(t, nil, lines(g.dh, g.d))
		if rep.OK() != stopped || stopped && rep.Stalls != 1 {
			t.Errorf("stopped %v:\n%s", stopped, rep.text())
		}
	}
}

// TestMissingSides: whose trace is there and whose is not changes what can be asked.
func TestMissingSides(t *testing.T) {
	g := recordGood(t)
	run := func(whole bool, src ...[]byte) *Report {
		var all []Source
		for _, s := range src {
			all = append(all, Source{"f", bytes.NewReader(s)})
		}
		rep, err := Check(Options{Whole: whole}, all...)
		if err != nil {
			t.Fatal(err)
		}
		return rep
	}
	if rep := run(false, lines(g.dh, g.d)); !rep.OK() || rep.Unpaired != 2 {
		t.Error(rep.text())
	}
	if rep := run(true, lines(g.dh, g.d)); rep.OK() || !strings.Contains(rep.Findings[0].What, "a success has a sender") {
		t.Error(rep.text())
	}
	killed := lines(g.ph, g.p[:1])
	if rep := run(true, lines(g.dh, g.d), killed); !rep.OK() {
		t.Error(rep.text())
	}
	g.dh.Boot = "another"
	shift(g.d, "1", "landed", 3*tick) // of no meaning on another clock
	if rep := run(true, lines(g.dh, g.d), lines(g.ph, g.p)); !rep.OK() || rep.Unclocked != 2 {
		t.Error(rep.text())
	}
}

// TestEffectsAfterForget: what comes for a forgotten room changes nothing, and is told from
// what would.
func TestEffectsAfterForget(t *testing.T) {
	w := newWorld(t)
	p := w.whole(1, 1)
	for _, k := range room.Events() {
		p.s.Apply(room.Event{Kind: k})
		p.r.Apply(room.Event{Kind: k})
	}
	w.p.end()
	w.d.end()
	if rep := check(t, w.p.bytes(), w.d.bytes()); !rep.OK() {
		t.Fatal(rep.text())
	}
}
