package trace

import (
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/room"
)

// machine brings a life of 2 chunks to where the events lead, without any judgement.
func machine(side room.Side, events ...room.Event) *life {
	l := newLife(&incarnation{side: side}, room.Key{Room: 1}, &Record{Instance: 1, Chunks: 2}, 1)
	for i, e := range events {
		_, settled, _ := l.counters()
		var fx room.Effects
		if l.sender() {
			l.snd, fx = l.snd.Step(e)
		} else {
			l.rcv, fx = l.rcv.Step(e)
		}
		_, now, _ := l.counters()
		l.note(e, fx, stamp{int64(i + 2), i + 2}, now > settled)
	}
	return l
}

func ev(k room.EventKind, chunk int) room.Event {
	return room.Event{Kind: k, Chunk: chunk, Last: k == room.EvLanded && chunk == 1}
}

// TestSafety: if the machine's table were wrong, a replay would be as wrong as the run. What
// a wrong table would do is then found by the rules of safety.go, here for one such step each:
// the life has stepped, and the state before or the effects are those of a wrong table.
func TestSafety(t *testing.T) {
	grant, begin0, begin1, settle0 := ev(room.EvGrant, 0), ev(room.EvBegin, 0), ev(room.EvBegin, 1), ev(room.EvSettle, 0)
	granted, landed0, landed1, cancel := ev(room.EvGranted, 0), ev(room.EvLanded, 0), ev(room.EvLanded, 1), ev(room.EvCancel, 0)
	release, abort, ack := ev(room.EvRelease, 0), ev(room.EvAbort, 0), ev(room.EvAck, 0)
	sender := func(e ...room.Event) *life { return machine(room.SideSender, e...) }
	receiver := func(e ...room.Event) *life { return machine(room.SideReceiver, e...) }
	failed := room.Node{State: room.StateFailed, Drain: room.DrainDone}
	moving := room.Node{State: room.StateTransferring}
	forgotten := sender(cancel, release)
	forgotten.forgotten = stamp{9, 9}
	for _, c := range []struct {
		name string
		l    *life
		was  before
		e    room.Event
		fx   room.Effects
		want string // "" for a step that is right
	}{
		{"a right end", sender(cancel), before{node: room.Node{State: room.StateBootstrapping}}, cancel, room.FxTerminal | room.FxSendFailed, ""},
		{"resurrected", sender(grant, begin0), before{node: failed, cause: "aborted", begun: 0}, begin0, room.FxWrite, "a terminal state stays"},
		{"another cause", sender(cancel), before{node: failed, cause: "deadline"}, cancel, room.FxLateCause, "the first cause stays"},
		{"an end not told", sender(cancel), before{node: moving}, cancel, 0, "the end is told once"},
		{"an end told twice", sender(cancel), before{node: failed, cause: "aborted"}, cancel, room.FxTerminal, "the end is told once"},
		{"forgotten and writing", forgotten, before{node: room.Node{State: room.StateFailed, Drain: room.DrainGone}, cause: "aborted"}, begin0, room.FxWrite, "a forgotten room changes no more"},

		{"a right write", sender(grant, begin0), before{node: room.Node{State: room.StateWaitingForInput}}, begin0, room.FxWrite, ""},
		{"a write in a failed room", sender(grant, cancel), before{node: failed, cause: "aborted"}, begin0, room.FxWrite, "a write is allowed in order"},
		{"a write of another chunk", sender(grant, begin0), before{node: moving}, begin1, room.FxWrite, "a write is allowed in order"},
		{"a counter falls", sender(grant, begin0), before{node: moving, begun: 2}, begin0, 0, "none falls"},
		{"an ack with a write under way", sender(grant, begin0, abort), before{node: failed, cause: "aborted", begun: 1}, abort, room.FxSendAck, "an ack is sent without outstanding writes"},
		{"an ack of a drained room", sender(grant, begin0, settle0, abort), before{node: moving, begun: 1, settled: 1}, abort, room.FxSendAck | room.FxTerminal, ""},

		{"a right landing", receiver(granted, landed0), before{node: room.Node{State: room.StateWaitingForInput}}, landed0, room.FxLanded, ""},
		{"delivered after the failure", receiver(granted, cancel), before{node: failed, cause: "aborted"}, landed0, room.FxLanded, "chunks are delivered in order"},
		{"delivered twice", receiver(granted, landed0), before{node: moving, landed: 1}, landed0, room.FxLanded, "chunks are delivered in order"},
		{"a grant of a failed room", receiver(cancel), before{node: failed, cause: "aborted"}, granted, room.FxSendGrant, "one grant is sent"},
		{"pages freed twice", receiver(granted, cancel, ack), before{node: failed, cause: "aborted"}, ack, room.FxFreeTransfer, "granted pages are freed once"},
		{"pages freed without a proof", receiver(granted, cancel), before{node: failed, cause: "aborted"}, ev(room.EvDeadline, 0), room.FxFreeTransfer, "pages are freed with a proof"},
		{"landed more than there is", receiver(granted, landed0), before{node: moving, landed: 2}, landed0, 0, "landed <= chunks"},

		{"success with a chunk missing", sender(grant, begin0, settle0), before{node: moving, begun: 1, settled: 1}, settle0, room.FxForget, "a room is forgotten when terminal"},
		{"forgotten live", receiver(granted, landed0), before{node: moving, landed: 1}, release, room.FxForget, "got live"},
		{"forgotten while held", receiver(granted, landed0, landed1), before{node: room.Node{State: room.StateSuccess, Drain: room.DrainDone}, landed: 2}, ack, room.FxForget, "got not released"},
		{"forgotten with a write under way", sender(grant, begin0, release), before{node: moving, begun: 1}, release, room.FxForget | room.FxTerminal, "writes outstanding"},
		{"forgotten with pages granted", receiver(granted, release), before{node: moving}, release, room.FxForget | room.FxTerminal, "its pages are not free"},
	} {
		got := ""
		for _, rule := range []func(before, room.Event, room.Effects) *wrong{c.l.sticks, c.l.sends, c.l.receives, c.l.ends} {
			if w := rule(c.was, c.e, c.fx); w != nil {
				got = w.what + ": expected " + w.expected + ", got " + w.got
				break
			}
		}
		if c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q; want %q", c.name, got, c.want)
		}
	}
}
