package fault

import (
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

func TestParseExamples(t *testing.T) {
	r, err := Parse(`
# the examples of the package comment
post room=7 nth=2 stall until=go
post kind=tcp room=* nth=1 delay=50ms   # slow first writes
post nth=3 error="link \"down\" #1"
post prob=0.1 seed=42 drop
done nth=1- hold until=ack
post nth=4-6 hold-applied for=1s
post halfway until=half
post busy
landed drop
fenced stall
revoke unfenced
dial nth=1 error
done delay=5ms
`)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.rules) != 13 {
		t.Fatalf("%d rules", len(r.rules))
	}
	for i, want := range []rule{
		{line: 3, op: opPost, room: 7, rooms: roomOne, first: 2, last: 2, prob: -1, act: actStall, gate: "go"},
		{line: 4, op: opPost, kind: "tcp", rooms: roomEach, first: 1, last: 1, prob: -1, act: actStall, hold: 50 * time.Millisecond},
		{line: 5, op: opPost, first: 3, last: 3, prob: -1, act: actError, message: `link "down" #1`},
		{line: 6, op: opPost, prob: 0.1, seed: 42, act: actDrop},
		{line: 7, op: opDone, first: 1, last: 1<<64 - 1, prob: -1, act: actHold, gate: "ack"},
		{line: 8, op: opDone, first: 4, last: 6, prob: -1, act: actHold, hold: time.Second},
		{line: 9, op: opPost, prob: -1, act: actHalfway, gate: "half"},
		{line: 10, op: opPost, prob: -1, act: actBusy},
		{line: 11, op: opLanded, prob: -1, act: actDrop},
		{line: 12, op: opFenced, prob: -1, act: actStall},
		{line: 13, op: opRevoke, prob: -1, act: actUnfenced},
		{line: 14, op: opDial, first: 1, last: 1, prob: -1, act: actError, message: "dial failed"},
		{line: 15, op: opDone, prob: -1, act: actHold, hold: 5 * time.Millisecond},
	} {
		got := *r.rules[i]
		got.perRoom = nil
		if !sameRule(got, want) {
			t.Errorf("rule %d:\n got %+v\nwant %+v", i, got, want)
		}
	}
}

func sameRule(a, b rule) bool {
	return a.line == b.line && a.op == b.op && a.kind == b.kind && a.room == b.room && a.rooms == b.rooms &&
		a.gen == b.gen && a.genSet == b.genSet && a.first == b.first && a.last == b.last && a.prob == b.prob &&
		a.seed == b.seed && a.act == b.act && a.gate == b.gate && a.hold == b.hold && a.message == b.message
}

func TestParseErrors(t *testing.T) {
	for _, c := range []struct{ line, want string }{
		{"push drop", `unknown operation "push"`},
		{"post", "post has no action"},
		{"post=1 drop", "unknown operation"},
		{"post dely=5ms", `unknown selector "dely"`},
		{"post delay", "delay needs a time"},
		{"post delay=5", "not a duration"},
		{"post delay=-5ms", "above 0"},
		{"post rate", "bytes a second"},
		{"post rate=NaN", "bytes a second"},
		{"post rate=0", "bytes a second"},
		{"done rate=5", `done does not know "rate"`},
		{"post rate=5 for=1s", "rate holds nothing"},
		{"post drop stall", `second action "stall"`},
		{"post drop drop", "given twice"},
		{"post room=1 room=2 drop", "given twice"},
		{"post room=-1 drop", "room=-1: invalid syntax"},
		{"post room=9223372036854775808 drop", "out of range"},
		{"post gen=4294967296 drop", "out of range"},
		{"post nth=0 drop", "counted from 1"},
		{"post nth=3-2 drop", "counted from 1"},
		{"post nth=x drop", "counted from 1"},
		{"post prob=1.5 drop", "want 0 to 1"},
		{"post prob=NaN drop", "want 0 to 1"},
		{"post seed=4 drop", "seed means nothing"},
		{"post drop until=x", "drop holds nothing"},
		{"post stall until=x for=1s", "exclude each other"},
		{"post delay=1s for=1s", "exclude each other"},
		{"post delay=1s until=x", "exclude each other"},
		{"post stall until=", "until= has no value"},
		{`post error="open`, "quotes do not end"},
		{`post error="a"b`, "space after the quotes"},
		{"post =3 drop", "begins with"},
		{"post unfenced", `post does not know "unfenced"`},
		{"post hold", `post does not know "hold"`},
		{"landed error", `landed does not know "error"`},
		{"landed hold-applied", `landed does not know "hold-applied"`},
		{"revoke drop", `revoke does not know "drop"`},
		{"dial room=3 error", "dial is of no room"},
		{"fenced room=* stall", "fenced is of no room"},
	} {
		_, err := Parse("post drop\n" + c.line)
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "fault: line 2: ") {
			t.Errorf("%s: %v, want %q", c.line, err, c.want)
		}
	}
	_, err := Parse("push\npost drop\npull")
	if err == nil || !strings.Contains(err.Error(), "line 1") || !strings.Contains(err.Error(), "line 3") {
		t.Errorf("not every bad line is named: %v", err)
	}
}

// TestProbIgnoresOrder: which calls of a room fire does not depend on other rooms.
func TestProbIgnoresOrder(t *testing.T) {
	const rooms, calls = 20, 200
	text := "post prob=0.25 seed=9 drop"
	fired := func(order func(i int) (roomID uint64)) map[[2]uint64]bool {
		r := MustParse(text)
		nth := map[uint64]uint64{}
		got := map[[2]uint64]bool{}
		for i := range rooms * calls {
			id := order(i)
			nth[id]++
			if r.decide(opPost, "mem", room.Key{Room: id}).rule != nil {
				got[[2]uint64{id, nth[id]}] = true
			}
		}
		return got
	}
	a := fired(func(i int) uint64 { return uint64(i % rooms) })
	b := fired(func(i int) uint64 { return uint64(i / calls) })
	if len(a) != len(b) {
		t.Fatalf("%d and %d fired", len(a), len(b))
	}
	for k := range a {
		if !b[k] {
			t.Fatalf("call %v fired in one order only", k)
		}
	}
	if n := len(a); n < rooms*calls/5 || n > rooms*calls*3/10 {
		t.Errorf("%d of %d fired, want about a quarter", n, rooms*calls)
	}
	text = "post prob=0.25 seed=10 drop"
	same := 0
	for k := range fired(func(i int) uint64 { return uint64(i % rooms) }) {
		if a[k] {
			same++
		}
	}
	if same == len(a) {
		t.Error("another seed fires at the same calls")
	}
}

func TestNthCounting(t *testing.T) {
	for _, c := range []struct {
		text string
		want string // a letter for each call: x fired
	}{
		{"post nth=2 drop", ".x...."},
		{"post room=* nth=2 drop", "..xx.."},
		{"post room=2 nth=2-3 drop", "...x.x"},
		{"post room=2 nth=2- drop", "...x.x"},
		{"post gen=1 drop", "......"},
		{"post drop", "xxxxxx"},
		{"post kind=tcp drop", "......"},
		{"done drop", "......"},
		{"post nth=1 busy\npost nth=2 drop", "xx...."}, // both rules count every call
	} {
		r := MustParse(c.text)
		got := ""
		for _, id := range []uint64{1, 2, 1, 2, 1, 2} {
			if r.decide(opPost, "mem", room.Key{Room: id}).rule != nil {
				got += "x"
			} else {
				got += "."
			}
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", strings.ReplaceAll(c.text, "\n", "; "), got, c.want)
		}
	}
	r := MustParse("post room=* nth=1 drop")
	v := r.decide(opPost, "mem", room.Key{Room: 1})
	r.undo(v)
	if r.decide(opPost, "mem", room.Key{Room: 1}).rule == nil {
		t.Error("a call that was undone counts")
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"post nth=3 error=\"a b\"", "dial delay=1h", "done nth=1- hold until=x # c", "post room=* prob=.5 seed=1 drop", "post \"\"=", "=\"", "a=\"\\xzz\""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, err := Parse(text)
		if err != nil {
			if r != nil {
				t.Error("rules beside an error")
			}
			return
		}
		for _, u := range r.rules {
			if u.act == "" {
				t.Errorf("rule without an action in %q", text)
			}
		}
		for o := range actionsOf {
			r.decide(o, "mem", room.Key{Room: 1})
		}
	})
}
