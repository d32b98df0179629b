package trace

import (
	"fmt"

	"github.com/baton-pd/baton/internal/room"
)

// This file is what must hold of every step whatever the machine's table says: a wrong table
// would replay rightly. The checks run after the machine has stepped and before the step is
// noted.

// before is a room's machine before a step.
type before struct {
	node                   room.Node
	cause                  string
	begun, settled, landed int
}

// lateEffects may follow from an event of a forgotten room: answers that are always true.
const lateEffects = room.FxStale | room.FxDuplicate | room.FxLateCause | room.FxSkip | room.FxSendAck | room.FxSendFailed

// sticks: a terminal state and its cause stay, and the end is told once.
func (l *life) sticks(was before, _ room.Event, fx room.Effects) *wrong {
	to := l.node()
	ended := !was.node.State.Terminal() && to.State.Terminal()
	switch {
	case was.node.State.Terminal() && to.State != was.node.State:
		return &wrong{"", "a terminal state stays", was.node.String(), to.String()}
	case was.node.State == room.StateFailed && l.cause() != was.cause:
		return &wrong{"", "the first cause stays", was.cause, l.cause()}
	case (to.State == room.StateFailed) != (l.cause() != ""):
		return &wrong{"", "a failed room has a cause and no other has", to.String(), "cause " + orNone(l.cause())}
	case ended != fx.Has(room.FxTerminal):
		return &wrong{"", "the end is told once, when it comes", fmt.Sprint(ended), fx.String()}
	case l.forgotten.seen() && (to != was.node || fx&^lateEffects != 0):
		return &wrong{"", "a forgotten room changes no more", was.node.String(), to.String() + " with " + fx.String()}
	}
	return nil
}

// sends: writes are allowed in order, in a live and granted room, settle once, and are over
// before an ack.
func (l *life) sends(was before, e room.Event, fx room.Effects) *wrong {
	begun, settled, _ := l.counters()
	to := l.node()
	chunk := fmt.Sprintf("chunk %d in state %s", e.Chunk, to)
	switch {
	case settled > begun || begun > l.chunks || begun < was.begun || settled < was.settled:
		return &wrong{"", "settled <= begun <= chunks, and none falls", fmt.Sprint(was.settled, was.begun, l.chunks), fmt.Sprint(settled, begun, l.chunks)}
	case fx.Has(room.FxWrite) && (to.State.Terminal() || !l.granted.seen() || e.Chunk != was.begun || begun != was.begun+1):
		return &wrong{"", "a write is allowed in order, after the grant, in a live room", fmt.Sprint("chunk ", was.begun), chunk}
	case fx.Has(room.FxWrite) && l.ack.seen():
		return &wrong{"", "no write is allowed after an ack", "none", chunk}
	case fx.Has(room.FxSendAck) && begun != settled:
		return &wrong{"", "an ack is sent without outstanding writes", "0", fmt.Sprint(begun - settled)}
	case settled > was.settled && (e.Chunk < 0 || e.Chunk >= len(l.writes) || l.writes[e.Chunk].settled.seen()):
		return &wrong{"", "each write settles once", "a write that is outstanding", chunk}
	}
	return nil
}

// receives: one grant, chunks delivered in order in a room that has not failed, pages freed
// once and with a proof.
func (l *life) receives(was before, e room.Event, fx room.Effects) *wrong {
	to := l.node()
	_, _, landed := l.counters()
	switch {
	case landed > l.chunks || landed < was.landed:
		return &wrong{"", "landed <= chunks, and does not fall", fmt.Sprint(was.landed, l.chunks), fmt.Sprint(landed, l.chunks)}
	case fx.Has(room.FxLanded) && (to.State == room.StateFailed || e.Chunk != was.landed || landed != was.landed+1):
		return &wrong{"", "chunks are delivered in order, in a room that has not failed", fmt.Sprint("chunk ", was.landed), fmt.Sprintf("chunk %d in state %s", e.Chunk, to)}
	case fx.Has(room.FxSendGrant) && (l.granted.seen() || to.State.Terminal()):
		return &wrong{"", "one grant is sent, for a live room", "the first", to.String()}
	case fx.Has(room.FxFreeTransfer) && (l.freed.seen() || !l.granted.seen()):
		return &wrong{"", "granted pages are freed once", "the first time", "again, or never granted"}
	case fx.Has(room.FxFreeTransfer) && to.State != room.StateSuccess && e.Kind != room.EvAck && e.Kind != room.EvFenced:
		return &wrong{"", "pages are freed with a proof", "success, ack or fence", e.Kind.String()}
	}
	return nil
}

// ends: a success is complete, and a room is forgotten when it is terminal, released and drained.
func (l *life) ends(_ before, e room.Event, fx room.Effects) *wrong {
	begun, settled, landed := l.counters()
	to := l.node()
	if to.State == room.StateSuccess && settled+landed != l.chunks {
		return &wrong{"", "a success is complete", fmt.Sprint(l.chunks, " chunks"), fmt.Sprint(settled + landed)}
	}
	if !fx.Has(room.FxForget) {
		return nil
	}
	missing := ""
	switch {
	case !to.State.Terminal():
		missing = "live"
	case !l.released && e.Kind != room.EvRelease:
		missing = "not released"
	case begun != settled:
		missing = fmt.Sprint(begun-settled, " writes outstanding")
	case !l.sender() && l.granted.seen() && !l.freed.seen() && !fx.Has(room.FxFreeTransfer):
		missing = "its pages are not free"
	}
	if missing != "" {
		return &wrong{"", "a room is forgotten when terminal, released and drained", "all three", missing}
	}
	return nil
}
