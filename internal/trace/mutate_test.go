package trace

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/room"
)

// mutant is a pair of traces with one field of one record changed.
type mutant struct {
	w        *world
	p, d     []Record // changed
	old, now Record
	sender   bool
	index    int
	field    string
}

// fields that a mutation may change, and how; false if it does not apply.
var fields = map[string]func(r *Record, rng *rand.Rand, w *world) bool{
	"t": func(r *Record, rng *rand.Rand, _ *world) bool {
		r.Mono += []int64{-600_000, -40, -9, -4, -2, 2, 4, 9, 40, 600_000}[rng.IntN(10)] * tick / 3
		return true
	},
	"w":    func(r *Record, rng *rand.Rand, _ *world) bool { r.Wall += rng.Int64N(1e9) + 1; return true },
	"kind": func(r *Record, rng *rand.Rand, _ *world) bool { return change(&r.Kind, rng, kindNames()) },
	"room": func(r *Record, rng *rand.Rand, w *world) bool {
		return r.Room != "" && change(&r.Room, rng, []string{w.rooms[rng.IntN(len(w.rooms))].key.String(), "4711"})
	},
	"inst": func(r *Record, rng *rand.Rand, _ *world) bool {
		r.Instance = uint64(max(0, int64(r.Instance)+nudge(rng)))
		return r.Room != ""
	},
	"seq": func(r *Record, rng *rand.Rand, _ *world) bool {
		r.Seq = uint32(max(0, int64(r.Seq)+nudge(rng)))
		return r.Room != ""
	},
	"chunks": func(r *Record, rng *rand.Rand, _ *world) bool {
		r.Chunks += int(nudge(rng))
		return r.Kind == kindOpen
	},
	"deadline": func(r *Record, rng *rand.Rand, _ *world) bool {
		r.Deadline += []int64{-2 * settled, -settled, -1, 1, settled}[rng.IntN(5)]
		return r.Kind == kindOpen
	},
	"chunk": func(r *Record, rng *rand.Rand, _ *world) bool { r.Chunk += int(nudge(rng)); return r.Seq > 0 },
	"last":  func(r *Record, _ *rand.Rand, _ *world) bool { r.Last = !r.Last; return r.Seq > 0 },
	"why": func(r *Record, rng *rand.Rand, _ *world) bool {
		return r.Seq > 0 && change(&r.Why, rng, []string{"", "deadline", "aborted", "odd"})
	},
	"from": func(r *Record, rng *rand.Rand, _ *world) bool { return r.Seq > 0 && change(&r.From, rng, nodes()) },
	"to":   func(r *Record, rng *rand.Rand, _ *world) bool { return r.Seq > 0 && change(&r.To, rng, nodes()) },
	"fx": func(r *Record, rng *rand.Rand, _ *world) bool {
		return r.Seq > 0 && change(&r.Effects, rng, []string{"", "write", "send_ack", "terminal", "stale", "free_transfer", "forget"})
	},
	"withheld": func(r *Record, rng *rand.Rand, _ *world) bool {
		return r.Seq > 0 && change(&r.Withheld, rng, []string{"", "send_ack", "send_abort", "write"})
	},
	"begun":   func(r *Record, rng *rand.Rand, _ *world) bool { r.Begun += int(nudge(rng)); return r.Seq > 0 },
	"settled": func(r *Record, rng *rand.Rand, _ *world) bool { r.Settled += int(nudge(rng)); return r.Seq > 0 },
	"landed":  func(r *Record, rng *rand.Rand, _ *world) bool { r.Landed += int(nudge(rng)); return r.Seq > 0 },
	"cause": func(r *Record, rng *rand.Rand, _ *world) bool {
		return r.Seq > 0 && change(&r.Cause, rng, []string{"", "deadline", "aborted", "peer_lost", "odd"})
	},
	"count": func(r *Record, _ *rand.Rand, _ *world) bool { r.Count++; return true },
}

func nudge(rng *rand.Rand) int64 { return []int64{-2, -1, 1, 2, 7}[rng.IntN(5)] }

func change(s *string, rng *rand.Rand, to []string) bool {
	old := *s
	*s = to[rng.IntN(len(to))]
	return *s != old
}

func kindNames() []string {
	names := []string{kindOpen, kindForget, kindBeat, kindDropped, kindEnd}
	for _, k := range room.Events() {
		names = append(names, k.String())
	}
	return names
}

func nodes() (all []string) {
	for _, r := range append(room.SenderTable(), room.ReceiverTable()...) {
		if s := r.From.String(); !slices.Contains(all, s) {
			all = append(all, s)
		}
	}
	return all
}

// mutate changes one field; nil if the draw does not apply.
func mutate(w *world, rng *rand.Rand, names []string) *mutant {
	m := &mutant{w: w, p: slices.Clone(w.p.records), d: slices.Clone(w.d.records), sender: rng.IntN(2) == 0}
	rs := m.d
	if m.sender {
		rs = m.p
	}
	m.index, m.field = rng.IntN(len(rs)), names[rng.IntN(len(names))]
	r := &rs[m.index]
	m.old = *r
	if !fields[m.field](r, rng, w) || *r == m.old {
		return nil
	}
	m.now = *r
	return m
}

// harmless says why a change that was not reported need not be, by rules of its own that do
// not ask the checker; "" if there is no reason.
func (m *mutant) harmless() string {
	moved := m.old.From != m.old.To
	switch m.field {
	case "w":
		return "the wall clock is for people"
	case "t":
		return m.harmlessTime()
	case "kind":
		if m.old.Kind == kindEnd && m.now.Kind == kindBeat {
			return "a process that was killed just before its end; the report counts it as cut"
		}
		if m.sameRow() {
			return "in that node both events mean the same"
		}
	case "why":
		if !moved || strings.HasPrefix(m.old.From, "failed") || !strings.HasPrefix(m.old.To, "failed") {
			return "the cause of an event that ends nothing is not kept"
		}
		if m.old.Why == "" && m.now.Why == m.old.Cause {
			return "the cause that the table gives itself"
		}
	case "chunk", "last":
		return m.harmlessChunk()
	case "deadline":
		end := m.find(m.sender, func(r *Record) bool { return strings.Contains(r.Effects, "terminal") })
		if end.Mono <= max(m.now.Deadline, m.now.Mono)+1e9 {
			return "the room ended by that deadline too"
		}
	case "chunks":
		granted := m.find(true, func(r *Record) bool { return strings.Contains(r.Effects, "granted") })
		if granted.Mono == 0 && m.now.Chunks > 0 {
			return "no chunk of it ever moved"
		}
	}
	return ""
}

// find is the first record of the mutant's room on a side for which f holds.
func (m *mutant) find(sender bool, f func(*Record) bool) Record {
	rs := m.d
	if sender {
		rs = m.p
	}
	for i := range rs {
		if rs[i].Room == m.old.Room && f(&rs[i]) {
			return rs[i]
		}
	}
	return Record{}
}

// sameRow looks both events up in the printed table.
func (m *mutant) sameRow() bool {
	table := room.ReceiverTable()
	if m.sender {
		table = room.SenderTable()
	}
	var was, is []room.Row
	for _, r := range table {
		if r.From.String() != m.old.From || r.To.String() != m.old.To || effects(r.Effects) != m.old.Effects {
			continue
		}
		switch r.Event.String() {
		case m.old.Kind:
			was = append(was, r)
		case m.now.Kind:
			is = append(is, r)
		}
	}
	for _, a := range was {
		for _, b := range is {
			if a.Counts == b.Counts && (a.Code == b.Code || m.old.Why != "") {
				return true
			}
		}
	}
	return false
}

func (m *mutant) harmlessChunk() string {
	k := eventKinds[m.old.Kind]
	switch {
	case k == room.EvLanded && m.old.Effects == "stale",
		(k == room.EvSettle || k == room.EvSettleError) && m.old.Effects == "stale",
		k == room.EvBegin && m.old.Effects == "skip":
		return "an event that changes nothing"
	case k == room.EvBegin && !strings.Contains(m.old.Effects, "write") && m.now.Chunk != 0:
		return "a chunk begun out of turn, another one than it was"
	case k == room.EvDrop:
		return "which of the chunks was dropped ends the room all the same"
	case k == room.EvLanded && !strings.Contains(m.old.Effects, "landed"):
		return "a chunk landed out of turn, another one than it was"
	}
	return ""
}

// harmlessTime: only records whose order means nothing have changed places; equal times have not.
func (m *mutant) harmlessTime() string {
	own, other := m.w.d.records, m.w.p.records
	if m.sender {
		own, other = other, own
	}
	if i := m.index; i > 0 && m.now.Mono < own[i-1].Mono || i+1 < len(own) && m.now.Mono > own[i+1].Mono {
		return ""
	}
	lo, hi := min(m.old.Mono, m.now.Mono), max(m.old.Mono, m.now.Mono)
	ended := m.find(false, func(r *Record) bool { return strings.Contains(r.Effects, "terminal") })
	for i := range other {
		if o := &other[i]; o.Room == m.old.Room && o.Mono > lo && o.Mono < hi && m.linked(&m.old, o, ended.Mono) {
			return ""
		}
	}
	return "no record that follows from another has changed places with it"
}

// linked reports whether one of two records, of both sides of a room, follows from the other.
func (m *mutant) linked(a, b *Record, ended int64) bool {
	s, r := b, a
	if m.sender {
		s, r = a, b
	}
	has := func(r *Record, fx string) bool { return slices.Contains(strings.Split(r.Effects, "|"), fx) }
	switch {
	case s.Kind == "grant" && has(s, "granted"):
		return has(r, "send_grant")
	case s.Kind == "abort":
		return has(r, "terminal")
	case s.Kind == "begin" && has(s, "write"):
		return r.Chunk == s.Chunk && has(r, "landed") || r.Kind == "ack" && has(r, "free_transfer")
	case s.Kind == "settle", s.Kind == "settle_error":
		own := m.find(false, func(l *Record) bool { return l.Kind == "landed" && l.Chunk == s.Chunk })
		worse := m.sender == (m.now.Mono < m.old.Mono) // the settle earlier or the landing later
		return worse && s.Kind == "settle" && !has(s, "stale") &&
			(r.Kind == "landed" && r.Chunk == s.Chunk && ended >= r.Mono || own.Mono == 0 && has(r, "terminal")) ||
			r.Kind == "ack" && has(r, "free_transfer")
	}
	return false
}

// TestMutatedTraces changes single fields of recorded traces. Each change must be reported,
// or be one of those that make another valid trace, by rules that do not ask the checker.
// BATON_PROVE=1 draws more.
func TestMutatedTraces(t *testing.T) {
	worlds, draws := uint64(4), 300
	if os.Getenv("BATON_PROVE") != "" {
		worlds, draws = 20, 1000
	}
	names := make([]string, 0, len(fields))
	for n := range fields {
		names = append(names, n)
	}
	slices.Sort(names)
	reported, total := 0, 0
	reasons := map[string]int{}
	for seed := range worlds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			w := randomWorld(t, 1000+seed, 6)
			rng := rand.New(rand.NewPCG(seed, 2))
			for range draws {
				m := mutate(w, rng, names)
				if m == nil {
					continue
				}
				total++
				if rep := check(t, lines(w.p.header, m.p), lines(w.d.header, m.d)); !rep.OK() {
					reported++
					continue
				}
				why := m.harmless()
				reasons[m.field+": "+why]++
				if why == "" {
					t.Errorf("seed %d: %s changed and not reported:\n%+v\n%+v", seed, m.field, m.old, m.now)
				}
			}
		})
	}
	var list []string
	for why, n := range reasons {
		list = append(list, fmt.Sprintf("%5d  %s", n, why))
	}
	slices.SortFunc(list, func(a, b string) int { return cmp.Compare(b, a) })
	t.Logf("%d changes: %d reported, %d make another valid trace:\n%s", total, reported, total-reported, strings.Join(list, "\n"))
	if reported < total/2 {
		t.Errorf("only %d of %d changes were reported", reported, total)
	}
}
