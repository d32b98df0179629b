package trace

import (
	"fmt"

	"github.com/baton-pd/baton/internal/room"
)

// stamp is when and where something was recorded; t is 0 if it was not.
type stamp struct {
	t    int64
	line int
}

func (s stamp) seen() bool { return s.line > 0 }

// write is one chunk's, as the sender's records tell it.
type write struct {
	begun, settled stamp
	applied        bool // it settled without an error
}

// landing is one EvLanded of a receiver.
type landing struct {
	stamp
	chunk     int
	delivered bool
}

// life is one room as its records tell it.
type life struct {
	inc      *incarnation
	key      room.Key
	instance uint64
	chunks   int
	deadline int64
	opened   stamp
	last     stamp
	seq      uint32
	// broken: a finding was made, or events are missing; what follows is not judged.
	broken bool

	snd room.Sender
	rcv room.Receiver

	terminal   stamp
	released   bool
	forgetting bool  // FxForget was the last event: its forget record must follow
	forgotten  stamp // the registry dropped it
	granted    stamp // sender: the grant came; receiver: it was sent
	aborted    stamp // sender: the first EvAbort
	ack        stamp // sender: the last FxSendAck
	freed      stamp // receiver: FxFreeTransfer
	freedByAck bool
	writes     []write // by chunk
	landings   []landing
}

func newLife(inc *incarnation, key room.Key, r *Record, n int) *life {
	l := &life{inc: inc, key: key, instance: r.Instance, chunks: r.Chunks, deadline: r.Deadline, opened: stamp{r.Mono, n}}
	l.last = l.opened
	if inc.side == room.SideSender {
		l.snd = room.NewSender(r.Chunks)
	} else {
		l.rcv = room.NewReceiver(r.Chunks)
	}
	return l
}

func (l *life) sender() bool { return l.inc.side == room.SideSender }

// node, cause and the counters of the replayed machine.
func (l *life) node() room.Node {
	if l.sender() {
		return l.snd.Node()
	}
	return l.rcv.Node()
}

func (l *life) cause() string {
	if l.sender() {
		return code(l.snd.Cause())
	}
	return code(l.rcv.Cause())
}

func (l *life) counters() (begun, settled, landed int) {
	if l.sender() {
		return l.snd.Begun(), l.snd.Begun() - l.snd.Outstanding(), 0
	}
	return 0, 0, l.rcv.Landed()
}

// wrong is what a finding says.
type wrong struct{ rule, what, expected, got string }

// step replays r; nil if it is what the machine does and what must hold.
func (l *life) step(r *Record, n int) *wrong {
	was := before{node: l.node(), cause: l.cause()}
	was.begun, was.settled, was.landed = l.counters()
	e := room.Event{Kind: eventKinds[r.Kind], Chunk: r.Chunk, Last: r.Last}
	if r.Why != "" {
		e.Cause = &room.Cause{Code: room.Code(r.Why)}
	}
	var fx room.Effects
	if l.sender() {
		l.snd, fx = l.snd.Step(e)
	} else {
		l.rcv, fx = l.rcv.Step(e)
	}
	withheld := l.withheld(r, fx)
	fx &^= withheld
	begun, settled, landed := l.counters()
	for _, f := range []struct{ what, expected, got string }{
		{"node before", was.node.String(), r.From},
		{"node after", l.node().String(), r.To},
		{"effects", effects(fx), r.Effects},
		{"withheld effects", effects(withheld), r.Withheld},
		{"first cause", l.cause(), r.Cause},
	} {
		if f.expected != f.got {
			return &wrong{RuleReplay, fmt.Sprintf("%s of event %d (%s)", f.what, r.Seq, r.Kind), orNone(f.expected), orNone(f.got)}
		}
	}
	if begun != r.Begun || settled != r.Settled || landed != r.Landed {
		return &wrong{RuleReplay, fmt.Sprintf("chunks begun, settled and landed after event %d (%s)", r.Seq, r.Kind),
			fmt.Sprint(begun, settled, landed), fmt.Sprint(r.Begun, r.Settled, r.Landed)}
	}
	for _, check := range []func(before, room.Event, room.Effects) *wrong{l.sticks, l.sends, l.receives, l.ends} {
		if w := check(was, e, fx); w != nil {
			w.rule = RuleSafety
			w.what += fmt.Sprintf(", at event %d (%s)", r.Seq, r.Kind)
			return w
		}
	}
	l.note(e, fx, stamp{r.Mono, n}, settled > was.settled)
	return nil
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// withheld is what the registry may keep back: the answer to an abort that came before its
// room, which was given when it came.
func (l *life) withheld(r *Record, fx room.Effects) room.Effects {
	early := l.sender() && r.Kind == room.EvAbort.String() || !l.sender() && r.Kind == room.EvRemoteFailed.String()
	if r.Withheld == "" || r.Seq != 1 || !early {
		return 0
	}
	return fx & (room.FxSendAck | room.FxSendAbort)
}

// note keeps what later checks need of a step that was right.
func (l *life) note(e room.Event, fx room.Effects, at stamp, settled bool) {
	first := func(s *stamp) {
		if !s.seen() {
			*s = at
		}
	}
	if fx.Has(room.FxTerminal) {
		l.terminal = at
	}
	if fx&(room.FxGranted|room.FxSendGrant) != 0 {
		first(&l.granted)
	}
	if fx.Has(room.FxSendAck) {
		l.ack = at
	}
	if fx.Has(room.FxFreeTransfer) {
		l.freed, l.freedByAck = at, e.Kind == room.EvAck
	}
	if fx.Has(room.FxWrite) {
		l.writes = append(l.writes, write{begun: at})
	}
	if settled {
		l.writes[e.Chunk].settled, l.writes[e.Chunk].applied = at, e.Kind == room.EvSettle
	}
	switch e.Kind {
	case room.EvAbort:
		first(&l.aborted)
	case room.EvLanded:
		l.landings = append(l.landings, landing{at, e.Chunk, fx.Has(room.FxLanded)})
	case room.EvRelease:
		l.released = true
	}
	l.forgetting = fx.Has(room.FxForget)
}
