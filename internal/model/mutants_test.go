package model

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/room"
)

// mutant is a production table with one line wrong.
type mutant struct {
	side room.Side
	name string // "sender: moving abort when ...: what is wrong"
	rows []room.Row
	// idle: the row was the same as no row, which the machine answers with stale; only the
	// test that the tables are total can miss it.
	idle bool
}

func (m *mutant) table() *room.Table { return room.NewTable(m.side, m.rows) }

// mutants are the wrong variants of every row of both tables: each effect taken away, each
// other effect of that side added, each other node as the next one, the count flipped, the guard
// replaced by each other that the side knows, the cause taken away or replaced, the row deleted.
func mutants() (out []*mutant) {
	for _, side := range []room.Side{room.SideSender, room.SideReceiver} {
		rows := room.SenderTable()
		guards := []room.Guard{room.WhenAlways, room.WhenNext, room.WhenUnknown, room.WhenAll, room.WhenOnly, room.WhenIdle}
		if side == room.SideReceiver {
			rows = room.ReceiverTable()
			guards = []room.Guard{room.WhenAlways, room.WhenNext, room.WhenLastNext}
		}
		nodes, effects := vocabulary(rows)
		for i, r := range rows {
			add := func(what string, change func(*room.Row)) {
				wrong := slices.Clone(rows)
				change(&wrong[i])
				out = append(out, &mutant{side: side, name: rowName(side, r) + ": " + what, rows: wrong})
			}
			for _, fx := range effects {
				if r.Effects.Has(fx) {
					add("without "+fx.String(), func(r *room.Row) { r.Effects &^= fx })
				} else {
					add("with "+fx.String(), func(r *room.Row) { r.Effects |= fx })
				}
			}
			for _, n := range nodes {
				if n != r.To {
					add("to "+n.String(), func(r *room.Row) { r.To = n })
				}
			}
			add("count flipped", func(r *room.Row) { r.Counts = !r.Counts })
			if r.When != room.WhenAlways {
				for _, g := range guards {
					if g != r.When {
						add("when "+g.String(), func(r *room.Row) { r.When = g })
					}
				}
			}
			if r.Code != "" {
				add("without code", func(r *room.Row) { r.Code = "" })
				other := room.CodeInternal
				if r.Code == other {
					other = room.CodeAborted
				}
				add("code "+string(other), func(r *room.Row) { r.Code = other })
			}
			out = append(out, &mutant{
				side: side, name: rowName(side, r) + ": deleted", rows: slices.Delete(slices.Clone(rows), i, i+1),
				idle: r.When == room.WhenAlways && r.To == r.From && r.Effects == room.FxStale && !r.Counts,
			})
		}
	}
	return out
}

// vocabulary of a table: its nodes and its effects, in order of appearance.
func vocabulary(rows []room.Row) (nodes []room.Node, effects []room.Effects) {
	for _, r := range rows {
		if !slices.Contains(nodes, r.From) {
			nodes = append(nodes, r.From)
		}
		for bit := room.Effects(1); bit != 0 && bit <= r.Effects; bit <<= 1 {
			if r.Effects.Has(bit) && !slices.Contains(effects, bit) {
				effects = append(effects, bit)
			}
		}
	}
	return nodes, effects
}

func rowName(side room.Side, r room.Row) string {
	name := "sender"
	if side == room.SideReceiver {
		name = "receiver"
	}
	s := fmt.Sprintf("%s %v %v", name, r.From, r.Event)
	if r.When != room.WhenAlways {
		s += " (" + r.When.String() + ")"
	}
	return s
}

// expectation is what room's own tests hold of a table, from room/testdata/expect: data written by
// hand, read here once more because a test of another package can not be run on a mutant.
type expectation struct {
	side  room.Side
	lines []expectLine
}

type expectLine struct {
	chunks  int
	history []room.Event
	foreign bool // every event of the other side must be stale here
	event   room.Event
	node    string
	count   int
	code    string // "-" none, "!" the one it has
	effects string
}

// expectations reads both files.
func expectations(t *testing.T) (out []*expectation) {
	t.Helper()
	for side, name := range map[room.Side]string{room.SideSender: "sender", room.SideReceiver: "receiver"} {
		text, err := os.ReadFile("../room/testdata/expect/" + name + ".txt")
		if err != nil {
			t.Fatal(err)
		}
		x := &expectation{side: side}
		var at expectLine
		for n, line := range strings.Split(string(text), "\n") {
			if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
				continue
			}
			if head, history, ok := strings.Cut(line, ":"); ok {
				at = expectLine{chunks: 3, foreign: true}
				_, _ = fmt.Sscanf(head, "situation %s of %d", new(string), &at.chunks)
				for _, w := range strings.Fields(history) {
					at.history = append(at.history, expectEvent(t, w))
				}
				x.lines = append(x.lines, at)
				continue
			}
			f := strings.Fields(line)
			if len(f) != 5 {
				t.Fatalf("%s, line %d: %v", name, n+1, f)
			}
			count, err := strconv.Atoi(f[2])
			if err != nil {
				t.Fatal(err)
			}
			x.lines = append(x.lines, expectLine{chunks: at.chunks, history: at.history, event: expectEvent(t, f[0]), node: f[1], count: count, code: f[3], effects: effectSet(f[4])})
		}
		out = append(out, x)
	}
	return out
}

// effectSet is a list of effects in one order.
func effectSet(s string) string {
	names := strings.Split(s, "|")
	slices.Sort(names)
	return strings.Join(names, "|")
}

func expectEvent(t *testing.T, word string) room.Event {
	t.Helper()
	name, last := strings.CutSuffix(word, "!")
	digits := strings.TrimLeft(name, "abcdefghijklmnopqrstuvwxyz_")
	e := room.Event{Last: last}
	for _, k := range room.Events() {
		if k.String() == strings.TrimSuffix(name, digits) {
			e.Kind = k
		}
	}
	if digits != "" {
		n, err := strconv.Atoi(digits)
		if err != nil {
			t.Fatal(err)
		}
		e.Chunk = n
	}
	if e.Kind == 0 {
		t.Fatalf("no event %q", word)
	}
	return e
}

// step of either machine, with what an expectation looks at.
func stepBy(tab *room.Table, m any, e room.Event) (next any, n room.Node, count int, c *room.Cause, fx room.Effects) {
	if s, ok := m.(room.Sender); ok {
		s, fx = tab.Sender(s, e)
		return s, s.Node(), s.Outstanding(), s.Cause(), fx
	}
	r, fx := tab.Receiver(m.(room.Receiver), e)
	return r, r.Node(), r.Landed(), r.Cause(), fx
}

// contradicts reports whether tab differs from what x expects.
func (x *expectation) contradicts(tab *room.Table) bool {
	for _, l := range x.lines {
		var m any = room.NewSender(l.chunks)
		if x.side == room.SideReceiver {
			m = room.NewReceiver(l.chunks)
		}
		var at room.Node
		var had *room.Cause
		at.State, at.Drain = room.StateBootstrapping, room.DrainLive
		for _, e := range l.history {
			m, at, _, had, _ = stepBy(tab, m, e)
		}
		if l.foreign {
			for _, k := range room.Events() {
				if next, _, _, _, fx := stepBy(tab, m, room.Event{Kind: k}); foreignTo(x.side, k) && (next != m || fx != room.FxStale) {
					return true
				}
			}
			continue
		}
		_, n, count, c, fx := stepBy(tab, m, l.event)
		if n.String() != l.node || count != l.count || effectSet(fx.String()) != l.effects {
			return true
		}
		switch l.code {
		case "-":
			if c != nil {
				return true
			}
		case "!":
			if c == nil || c != had {
				return true
			}
		default:
			if had != nil || c == nil || string(c.Code) != l.code || c.Phase != at.State.String() {
				return true
			}
		}
	}
	return false
}

// invalid reports whether a mutant's table breaks what TestTablesAreTotal holds of its form.
func (m *mutant) invalid() bool {
	last := make(map[string]room.Guard)
	nodes, _ := vocabulary(m.rows)
	for i, r := range m.rows {
		key := fmt.Sprint(r.From, r.Event)
		if g, seen := last[key]; seen && g == room.WhenAlways {
			return true // rows behind an unguarded one are never asked
		}
		last[key] = m.rows[i].When
	}
	for _, n := range nodes {
		for _, k := range room.Events() {
			if g, ok := last[fmt.Sprint(n, k)]; !ok || g != room.WhenAlways {
				return true
			}
		}
	}
	return false
}
