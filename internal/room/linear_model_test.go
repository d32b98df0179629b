package room

import (
	"fmt"
	"slices"

	"github.com/anishathalye/porcupine"
)

// linKind is what a recorded operation did.
type linKind uint8

const (
	linOpen linKind = iota
	linGet
	linEnded
	linAbort
	linApply
	linState       // State, a lock-free read
	linDrain       // Drain
	linOutstanding // Outstanding
	linCause       // Cause
	linClose
	// Steps that the registry takes inside an operation or by itself. They are recorded by
	// the executor, since lock-free readers may see the room between them.
	linInner  // birth of an aborted room, deadline, follow-up: an Apply by the registry
	linForget // the room leaves the map and its tombstone is there
)

// linOp is one operation with what it answered. life names a room by the Open that made it;
// 0: none.
type linOp struct {
	kind      linKind
	key, life int
	by        int // goroutine; -1: the registry
	id        int // of the event's cause, unique in a history
	ev        Event
	follow    linFollow // of a linInner: what it was

	// Answers.
	ok    bool
	code  Code
	fx    Effects
	seq   int // which executor call of its room it was; 0: the executor was not called
	state State
	drain Drain
	n     int
	cause *Cause

	call, ret int64
}

// linFollow is why the registry applied an event by itself.
type linFollow uint8

const (
	notInner linFollow = iota
	innerBirth
	innerDeadline
	innerFollowUp
)

func (o *linOp) String() string {
	s := fmt.Sprintf("[%d,%d] goroutine %d key %d life %d: ", o.call, o.ret, o.by, o.key, o.life)
	switch o.kind {
	case linOpen:
		return s + fmt.Sprintf("open -> %v %s", o.ok, o.code)
	case linGet:
		return s + "get"
	case linEnded:
		return s + fmt.Sprintf("ended -> %v %v", o.ok, o.cause)
	case linAbort:
		return s + fmt.Sprintf("abort(op %d) -> %v, %v, executor %d", o.id, o.fx, o.ok, o.seq)
	case linApply, linInner:
		return s + fmt.Sprintf("%v chunk %d (op %d, inner %d) -> %v, executor %d", o.ev.Kind, o.ev.Chunk, o.id, o.follow, o.fx, o.seq)
	case linState:
		return s + "state -> " + o.state.String()
	case linDrain:
		return s + "drain -> " + o.drain.String()
	case linOutstanding:
		return s + fmt.Sprintf("outstanding -> %d", o.n)
	case linCause:
		return s + fmt.Sprintf("cause -> %v", o.cause)
	case linClose:
		return s + "close"
	default:
		return s + "forget"
	}
}

// linLife is one room of the model: the production machine, and what the registry has
// still to do under the same hold of the room's lock.
type linLife struct {
	id           int
	snd          Sender
	rcv          Receiver
	phase        State // it failed in
	execs        int
	birth        bool // the early abort is not applied yet
	followUp     bool // the executor's event is not applied yet
	leaving      bool // not forgotten yet
	withFollowUp bool
}

// linTomb is an ended tombstone. A cause without a code is none: success.
type linTomb struct {
	there bool
	cause Cause
}

// linKey is the sequential registry of one key.
type linKey struct {
	side    Side
	expiry  bool // tombstones may expire at any moment
	closed  bool
	lives   []linLife // never written to, always copied
	inMap   int       // life that Get finds; 0: none
	ended   linTomb
	aborted *Cause // of an abort that waits for its room
}

func (k linKey) equal(o linKey) bool {
	return k.closed == o.closed && k.inMap == o.inMap && k.ended == o.ended && k.aborted == o.aborted && slices.Equal(k.lives, o.lives)
}

// find is the index of a life; -1 if it is not open yet.
func (k linKey) find(id int) int {
	return slices.IndexFunc(k.lives, func(l linLife) bool { return l.id == id })
}

func (k linKey) with(l linLife) linKey {
	k.lives = slices.Clone(k.lives)
	if i := k.find(l.id); i >= 0 {
		k.lives[i] = l
	} else {
		k.lives = append(k.lives, l)
	}
	return k
}

// linModel is the sequential registry for porcupine; recs are the rooms of the history by
// life.
func linModel(side Side, expiry bool, recs map[int]*linRec) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return linKey{side: side, expiry: expiry} },
		Step: func(state, input, _ any) (bool, any) {
			next, ok := state.(linKey).step(input.(*linOp), recs)
			return ok, next
		},
		Equal: func(a, b any) bool { return a.(linKey).equal(b.(linKey)) },
		Hash: func(s any) uint64 {
			k := s.(linKey)
			h := uint64(k.inMap)*31 + uint64(len(k.lives))
			for _, l := range k.lives {
				h = h*1021 + uint64(l.execs)*8 + uint64(l.node().State)
			}
			return h
		},
		DescribeOperation: func(input, _ any) string { return input.(*linOp).String() },
	}
}

// step is what may happen next: whether o with its answers can follow k, and to what.
func (k linKey) step(o *linOp, recs map[int]*linRec) (linKey, bool) {
	switch o.kind {
	case linOpen:
		return k.open(o, recs[o.life])
	case linGet:
		return k, o.life == k.inMap
	case linEnded:
		if k.ended.there && (o.ok || !k.expiry) {
			return k, o.ok && sameCause(o.cause, &k.ended.cause)
		}
		k.ended = linTomb{}
		return k, !o.ok
	case linAbort:
		if o.ok {
			return k.apply(o)
		}
		return k.remember(o)
	case linApply, linInner:
		return k.apply(o)
	case linForget:
		i := k.find(o.life)
		if i < 0 || !k.lives[i].leaving || k.inMap != o.life {
			return k, false
		}
		l := k.lives[i]
		l.leaving = false
		k.inMap, k.ended = 0, linTomb{there: true}
		if c := l.published(k.side); c != nil {
			k.ended.cause = *c
		}
		return k.with(l), true
	case linClose:
		k.closed = true
		return k, true
	default:
		return k, k.read(o)
	}
}

// read is what the lock-free questions may answer.
func (k linKey) read(o *linOp) bool {
	i := k.find(o.life)
	if i < 0 {
		return false
	}
	l := k.lives[i]
	switch o.kind {
	case linState:
		return o.state == l.node().State
	case linDrain:
		return o.drain == l.node().Drain
	case linOutstanding:
		return o.n == l.snd.Outstanding()
	default:
		return sameCause(o.cause, l.published(k.side))
	}
}

// open: o.life is the new room's even where it was refused.
func (k linKey) open(o *linOp, rec *linRec) (linKey, bool) {
	switch {
	case k.closed:
		return k, !o.ok && o.code == CodeShutdown
	case k.inMap != 0:
		return k, !o.ok && o.code == CodeDuplicate
	case k.ended.there && (!k.expiry || !o.ok):
		return k, !o.ok && o.code == CodeDuplicate
	case !o.ok:
		return k, false
	}
	born := k.aborted != nil && (rec.born || !k.expiry)
	if born != rec.born {
		return k, false
	}
	l := linLife{id: o.life, birth: born, withFollowUp: rec.followUp}
	if k.side == SideSender {
		l.snd = NewSender(rec.chunks)
	} else {
		l.rcv = NewReceiver(rec.chunks)
	}
	k.inMap, k.ended = o.life, linTomb{}
	if !born {
		k.aborted = nil
	}
	return k.with(l), true
}

// remember is an abort that found no room.
func (k linKey) remember(o *linOp) (linKey, bool) {
	var fx Effects
	if k.side == SideSender {
		fx = FxSendAck
	}
	switch {
	case k.inMap != 0:
		return k, false
	case k.ended.there && (!k.expiry || o.fx.Has(FxStale)):
		return k, o.fx == fx|FxStale
	case k.aborted != nil && (!k.expiry || o.fx.Has(FxDuplicate)):
		k.ended = linTomb{}
		return k, o.fx == fx|FxDuplicate
	}
	k.ended, k.aborted = linTomb{}, o.ev.Cause
	return k, o.fx == fx
}

// apply gives the room one event. Nobody may come between what happens under one hold of
// its lock. An abort finds its room first and is applied then: the room may be forgotten
// in between, which changes nothing for it (finish holds that it was there).
func (k linKey) apply(o *linOp) (linKey, bool) {
	i := k.find(o.life)
	if i < 0 {
		return k, false
	}
	l := k.lives[i]
	ev, mask := o.ev, ^Effects(0)
	switch {
	case l.leaving, l.birth != (o.follow == innerBirth), l.followUp != (o.follow == innerFollowUp):
		return k, false
	case l.birth:
		if ev.Cause != k.aborted {
			return k, false
		}
		l.birth, k.aborted, mask = false, nil, ^(FxSendAck | FxSendAbort)
	case o.follow == innerDeadline && l.node().State.Terminal():
		return k, false
	}
	l.followUp = false
	was := l.node().State
	fx := l.take(ev) & mask
	if fx != o.fx {
		return k, false
	}
	if was != StateFailed && l.node().State == StateFailed {
		l.phase = was
	}
	if fx != 0 {
		l.execs++
		l.leaving = l.leaving || fx.Has(FxForget)
		// A follow-up without effects is not shown to the executor, and changes nothing.
		after := l
		l.followUp = l.withFollowUp && fx.Has(FxRevoke) && after.take(Event{Kind: EvFenced}) != 0
	}
	if want := l.execs; o.seq != want && (fx != 0 || o.seq != 0) {
		return k, false
	}
	return k.with(l), true
}

// take steps the machine.
func (l *linLife) take(e Event) (fx Effects) {
	if l.snd.total > 0 {
		l.snd, fx = l.snd.Step(e)
	} else {
		l.rcv, fx = l.rcv.Step(e)
	}
	return fx
}

func (l linLife) node() Node {
	if l.snd.total > 0 {
		return l.snd.Node()
	}
	return l.rcv.Node()
}

// published is the cause as the registry completes it; nil unless failed.
func (l linLife) published(side Side) *Cause {
	c := l.snd.Cause()
	if c == nil {
		c = l.rcv.Cause()
	}
	if c == nil {
		return nil
	}
	full := *c
	if full.Phase == "" {
		full.Phase = l.phase.String()
	}
	full.Side = side
	return &full
}

// sameCause compares what tells causes of one history apart. A code is never empty, so
// the zero cause and none are the same.
func sameCause(a, b *Cause) bool {
	none := new(Cause)
	if a == nil {
		a = none
	}
	if b == nil {
		b = none
	}
	return a.Code == b.Code && a.Detail == b.Detail && a.Phase == b.Phase && a.Side == b.Side
}
