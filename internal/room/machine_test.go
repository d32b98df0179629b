package room

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unsafe"
)

// machine is either side's, as the tests see it.
type machine interface {
	step(Event) (machine, Effects)
	Node() Node
	Cause() *Cause
	count() int // outstanding writes, or chunks landed
}

func (s Sender) step(e Event) (machine, Effects) { n, fx := s.Step(e); return n, fx }
func (s Sender) count() int                      { return s.Outstanding() }

func (r Receiver) step(e Event) (machine, Effects) { n, fx := r.Step(e); return n, fx }
func (r Receiver) count() int                      { return r.Landed() }

var eventWord = regexp.MustCompile(`^([a-z_]+)(-?\d+)?(!)?$`)

// parseEvent reads "begin1", "abort", "landed2!".
func parseEvent(word string) (Event, error) {
	m := eventWord.FindStringSubmatch(word)
	if m == nil {
		return Event{}, fmt.Errorf("no event: %q", word)
	}
	i := slices.Index(eventNames[:], m[1])
	if i < 0 {
		return Event{}, fmt.Errorf("unknown event %q", m[1])
	}
	e := Event{Kind: EventKind(i), Last: m[3] != ""}
	if m[2] != "" {
		e.Chunk, _ = strconv.Atoi(m[2])
	}
	return e, nil
}

func parseEffects(s string) (fx Effects, err error) {
	if s == "none" {
		return 0, nil
	}
	for _, name := range strings.Split(s, "|") {
		i := slices.Index(effectNames[:], name)
		if i < 0 {
			return 0, fmt.Errorf("unknown effect %q", name)
		}
		fx |= 1 << i
	}
	return fx, nil
}

// TestExpectation holds both tables against expectations written by hand, and the
// expectations against the tables: every pair and every row must be asked for.
func TestExpectation(t *testing.T) {
	for _, side := range []struct {
		name    string
		start   func(chunks int) machine
		rows    []Row
		foreign []EventKind
	}{
		{"sender", func(n int) machine { return NewSender(n) }, senderRows, []EventKind{EvGranted, EvLanded, EvRemoteFailed, EvFenced, EvAck}},
		{"receiver", func(n int) machine { return NewReceiver(n) }, receiverRows, []EventKind{EvGrant, EvBegin, EvSettle, EvSettleError, EvDrop, EvAbort}},
	} {
		t.Run(side.name, func(t *testing.T) {
			text, err := os.ReadFile("testdata/expect/" + side.name + ".txt")
			if err != nil {
				t.Fatal(err)
			}
			asked := make(map[string]bool)
			var at machine
			var situation string
			for n, line := range strings.Split(string(text), "\n") {
				if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
					continue
				}
				if head, history, ok := strings.Cut(line, ":"); ok {
					chunks := 3
					_, _ = fmt.Sscanf(head, "situation %s of %d", new(string), &chunks)
					situation, at = head, side.start(chunks)
					for _, w := range strings.Fields(history) {
						e, err := parseEvent(w)
						if err != nil {
							t.Fatalf("line %d: %v", n+1, err)
						}
						at, _ = at.step(e)
					}
					for _, k := range side.foreign {
						next, fx := at.step(Event{Kind: k})
						if next != at || fx != FxStale {
							t.Errorf("%s: foreign %v gives %v %v", situation, k, next.Node(), fx)
						}
						asked[fmt.Sprint(at.Node(), k, WhenAlways)] = true
					}
					continue
				}
				row := checkLine(t, fmt.Sprintf("line %d (%s)", n+1, situation), at, strings.Fields(line), side.rows)
				asked[row] = true
			}
			for _, r := range side.rows {
				if !asked[fmt.Sprint(r.From, r.Event, r.When)] {
					t.Errorf("no line asks for row %v, %v when %v", r.From, r.Event, r.When)
				}
			}
		})
	}
}

// checkLine applies one expectation and names the row that answered it.
func checkLine(t *testing.T, where string, at machine, f []string, rows []Row) string {
	t.Helper()
	if len(f) != 5 {
		t.Fatalf("%s: want five fields: %v", where, f)
	}
	e, err := parseEvent(f[0])
	if err != nil {
		t.Fatalf("%s: %v", where, err)
	}
	want, err := parseEffects(f[4])
	if err != nil {
		t.Fatalf("%s: %v", where, err)
	}
	next, fx := at.step(e)
	if next.Node().String() != f[1] || strconv.Itoa(next.count()) != f[2] || fx != want {
		t.Errorf("%s: %s gives %v %d %v, want %s %s %v", where, f[0], next.Node(), next.count(), fx, f[1], f[2], want)
	}
	switch c := next.Cause(); f[3] {
	case "-":
		if c != nil {
			t.Errorf("%s: %s gives cause %v", where, f[0], c)
		}
	case "!":
		if c == nil || c != at.Cause() {
			t.Errorf("%s: %s replaces the first cause by %v", where, f[0], c)
		}
	default:
		if at.Cause() != nil || c == nil || string(c.Code) != f[3] || c.Phase != at.Node().State.String() || c.Side == 0 || c.Detail == "" {
			t.Errorf("%s: %s gives cause %+v, want a new %s of phase %v", where, f[0], c, f[3], at.Node().State)
		}
	}
	// The row is found by what it did, not by the code under test's own lookup.
	for _, r := range rows {
		if r.From == at.Node() && r.Event == e.Kind && r.To == next.Node() && r.Effects == fx && (r.Counts == (next.count() != at.count())) {
			return fmt.Sprint(r.From, r.Event, r.When)
		}
	}
	t.Errorf("%s: no row of the table explains %s", where, f[0])
	return ""
}

// TestTablesAreTotal: every node that can be entered has rows for every event, together
// and with an unguarded last one, each with a reason; terminal nodes have no way out.
func TestTablesAreTotal(t *testing.T) {
	for side, rows := range map[Side][]Row{SideSender: SenderTable(), SideReceiver: ReceiverTable()} {
		type pair struct {
			Node
			EventKind
		}
		nodes := make(map[Node]bool)
		pairs := make(map[pair][]Row)
		for i, r := range rows {
			nodes[r.From], nodes[r.To] = true, true
			p := pair{r.From, r.Event}
			if i > 0 && len(pairs[p]) > 0 && (rows[i-1].From != r.From || rows[i-1].Event != r.Event) {
				t.Errorf("%v: rows of %v, %v do not stand together", side, r.From, r.Event)
			}
			pairs[p] = append(pairs[p], r)
			checkRow(t, side, r)
		}
		for n := range nodes {
			for _, k := range Events() {
				rs := pairs[pair{n, k}]
				if len(rs) == 0 {
					t.Errorf("%v: no row for %v, %v", side, n, k)
					continue
				}
				for i, r := range rs {
					if last := i == len(rs)-1; last != (r.When == WhenAlways) {
						t.Errorf("%v: row %d of %v, %v is guarded by %v", side, i, n, k, r.When)
					}
				}
			}
		}
	}
}

func checkRow(t *testing.T, side Side, r Row) {
	t.Helper()
	name := fmt.Sprintf("%v: %v, %v when %v", side, r.From, r.Event, r.When)
	if r.Reason == "" {
		t.Errorf("%s: no reason", name)
	}
	if r.From.State.Terminal() && r.To.State != r.From.State {
		t.Errorf("%s: leaves a terminal state", name)
	}
	enters := !r.From.State.Terminal() && r.To.State.Terminal()
	if enters != r.Effects.Has(FxTerminal) {
		t.Errorf("%s: terminal %v, effects %v", name, enters, r.Effects)
	}
	if (enters && r.To.State == StateFailed) != (r.Code != "") {
		t.Errorf("%s: code %q", name, r.Code)
	}
	if (r.To.Drain == DrainGone && r.From.Drain != DrainGone) != r.Effects.Has(FxForget) {
		t.Errorf("%s: effects %v", name, r.Effects)
	}
	if r.To.State.Terminal() == (r.To.Drain == DrainLive) {
		t.Errorf("%s: ends in %v", name, r.To)
	}
	if r.Effects.Has(FxSendAck) && r.To.Drain.Pending() {
		t.Errorf("%s: acks while %v", name, r.To)
	}
}

// TestUnknown: what is outside the table changes nothing.
func TestUnknown(t *testing.T) {
	for _, k := range []EventKind{0, numEvents, 255} {
		if s, fx := NewSender(1).Step(Event{Kind: k}); s != NewSender(1) || fx != FxStale {
			t.Errorf("%v: %v %v", k, s, fx)
		}
		if r, fx := NewReceiver(1).Step(Event{Kind: k}); r != NewReceiver(1) || fx != FxStale {
			t.Errorf("%v: %v %v", k, r, fx)
		}
	}
	for _, k := range Events() {
		if s, fx := (Sender{}).Step(Event{Kind: k}); s != (Sender{}) || fx != FxStale {
			t.Errorf("zero sender, %v: %v %v", k, s, fx)
		}
		if s, fx := (Sender{state: 77, drain: 99}).Step(Event{Kind: k}); s.state != 77 || fx != FxStale {
			t.Errorf("odd sender, %v: %v %v", k, s, fx)
		}
	}
}

// TestGivenCause: an event's own cause is kept as it is, and only the first.
func TestGivenCause(t *testing.T) {
	first, second := &Cause{Code: CodeEngine}, &Cause{Code: CodeShutdown}
	s, _ := NewSender(1).Step(Event{Kind: EvCancel, Cause: first})
	s, _ = s.Step(Event{Kind: EvAbort, Cause: second})
	if s.Cause() != first {
		t.Errorf("cause %v", s.Cause())
	}
	r, _ := NewReceiver(1).Step(Event{Kind: EvRemoteFailed, Cause: first})
	r, _ = r.Step(Event{Kind: EvCancel, Cause: second})
	if r.Cause() != first {
		t.Errorf("cause %v", r.Cause())
	}
}

func TestStrings(t *testing.T) {
	for got, want := range map[string]string{
		Effects(0).String():                      "none",
		(FxSendAck | FxTerminal).String():        "send_ack|terminal",
		(FxStale | 1<<31).String():               "stale|effects(0x80000000)",
		EvSettleError.String():                   "settle_error",
		EventKind(0).String():                    "event(0)",
		EventKind(99).String():                   "event(99)",
		Drain(9).String():                        "drain(9)",
		State(9).String():                        "state(9)",
		Side(9).String():                         "side(9)",
		Guard(99).String():                       "guard(?)",
		boot.String():                            "bootstrapping",
		debtor.String():                          "failed/orphan_owing",
		Key{Room: 7}.String():                    "7",
		(Key{Room: 7, Gen: 2}).String():          "7#2",
		fmt.Sprint(len(Events())):                "15",
		fmt.Sprint(slices.Contains(Events(), 0)): "false",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for g := WhenAlways; g <= WhenIdle; g++ {
		if strings.Contains(g.String(), "?") {
			t.Errorf("guard %d has no name", g)
		}
	}
}

// TestSizes keeps the machines small enough to be copied.
func TestSizes(t *testing.T) {
	if n := unsafe.Sizeof(Sender{}); n > 40 {
		t.Errorf("a sender has %d bytes", n)
	}
	if n := unsafe.Sizeof(Receiver{}); n > 40 {
		t.Errorf("a receiver has %d bytes", n)
	}
	if n := unsafe.Sizeof(Room{}); n > 256 {
		t.Errorf("a room has %d bytes", n)
	}
}
