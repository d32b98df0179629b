package model

import (
	"fmt"

	"github.com/baton-pd/baton/internal/model/explore"
	"github.com/baton-pd/baton/internal/room"
)

// Steps of requests and of the two owners: the schedulers.
const (
	opOpenS op = iota
	opOpenR
	opAbsentS
	opAbsentR
	opSend
	opSkipLast
	opDrop
	opCancelS
	opCancelR
	opReleaseS
	opReleaseR
	opDeadlineS
	opDeadlineR
	opPurge
	opStore
	opWriteError
	opDamage
	opBreakWrite
	opHandOver
	opSettle
	opDial
	opNoPages
	opPages
	opGranted
	opAct
	opLeft
	opDeliver
	opDuplicate
	opLose
	opUnpark
	opExpireS
	opExpireR
	opSessionEnds
	opDataEnds
	opDownS
	opDownR
	opCloseSession
	opCloseData
	opFenced
	opCrashS
	opCrashR
)

// requests: a life begins on each side when its request comes, in either order, or never
// comes. A reused id comes after the request that had it first.
func (x *steps) requests(i uint8) {
	first := int(i) - x.w.sc.Rooms // whose id this one reuses
	if s := &x.from.send[i]; s.at == unborn && (first < 0 || x.from.send[first].at != unborn) {
		x.add(opOpenS, i, 0, fairRequest, func(r *run) { r.openSender(i) })
		x.spend(budAbsent, opAbsentS, i, 0, func(r *run) { r.send[i].at = refused })
	}
	if s := &x.from.recv[i]; s.at == unborn && (first < 0 || x.from.recv[first].at != unborn) {
		x.add(opOpenR, i, 0, fairRequest, func(r *run) { r.openReceiver(i) })
		x.spend(budAbsent, opAbsentR, i, 0, func(r *run) { r.recv[i].at = refused })
	}
}

// senderOwner: sends chunk after chunk once granted, may cancel, drop, let go early; lets go
// when the room has ended.
func (x *steps) senderOwner(i uint8) {
	s := &x.from.send[i]
	state := s.m.State()
	granted, live := state != room.StateBootstrapping, !state.Terminal()
	if !s.released {
		if granted && int(s.next) < x.w.sc.Chunks {
			fair := fairOwner
			if !live {
				fair = 0 // a chunk that was under way when the room ended
			}
			if x.w.fault == FaultSkipLast && int(s.next) == x.w.sc.Chunks-1 && x.w.sc.Chunks > 1 {
				x.add(opSkipLast, i, s.next, fair, func(r *run) { r.send[i].next++ })
			} else {
				x.add(opSend, i, s.next, fair, func(r *run) { r.sendChunk(i) })
			}
		}
		if live && int(s.next) < x.w.sc.Chunks {
			x.spend(budDrop, opDrop, i, s.next, func(r *run) { r.snd(i, room.Event{Kind: room.EvDrop, Chunk: int(s.next)}) })
		}
		if live {
			x.spend(budAbort, opCancelS, i, 0, func(r *run) { r.snd(i, room.Event{Kind: room.EvCancel}) })
			x.spend(budRelease, opReleaseS, i, 0, func(r *run) { r.releaseSender(i) })
		} else {
			x.add(opReleaseS, i, 0, fairRelease, func(r *run) { r.releaseSender(i) })
		}
	}
	if live && x.w.sc.Deadlines && x.w.fault != FaultNoDeadline {
		x.add(opDeadlineS, i, 0, fairDeadline, func(r *run) { r.snd(i, room.Event{Kind: room.EvDeadline}) })
	}
}

// receiverOwner: as senderOwner; the chunks come by themselves.
func (x *steps) receiverOwner(i uint8) {
	s := &x.from.recv[i]
	if s.at != open {
		return
	}
	live := !s.m.State().Terminal()
	if !s.released {
		if live {
			x.spend(budAbort, opCancelR, i, 0, func(r *run) { r.rcv(i, room.Event{Kind: room.EvCancel}) })
			x.spend(budRelease, opReleaseR, i, 0, func(r *run) { r.releaseReceiver(i) })
		} else {
			x.add(opReleaseR, i, 0, fairRelease, func(r *run) { r.releaseReceiver(i) })
		}
	}
	if live && x.w.sc.Deadlines && x.w.fault != FaultNoDeadline {
		x.add(opDeadlineR, i, 0, fairDeadline, func(r *run) { r.rcv(i, room.Event{Kind: room.EvDeadline}) })
	}
}

// Describe implements [explore.System].
func (w *World) Describe(from State, st explore.Step[State]) string {
	o, a, b := op(st.Act>>16), uint8(st.Act>>8), uint8(st.Act)
	switch o {
	case opDeliver, opDuplicate, opLose:
		what := map[op]string{opDeliver: "delivers", opDuplicate: "delivers, and keeps a copy of,", opLose: "loses"}[o]
		return "network " + what + " " + w.showMessage(from.net[a])
	case opUnpark:
		return fmt.Sprintf("prefill: the parked grant %d of key %d has waited long enough and is refused", from.parked[a].grant, a)
	case opExpireS, opExpireR:
		return fmt.Sprintf("%s: the tombstone of key %d expires", map[op]string{opExpireS: "prefill", opExpireR: "decode"}[o], a)
	case opSessionEnds, opDataEnds, opDownS, opDownR, opCloseSession, opCloseData, opFenced:
		return fmt.Sprintf(opWords[o], a+1)
	case opCrashS, opCrashR:
		return opWords[o]
	}
	return w.name(a) + ": " + fmt.Sprintf(opWords[o], w.wordArgs(o, a, b, &from)...)
}

// wordArgs are what the words of a step of a room need.
func (w *World) wordArgs(o op, a, b uint8, from *State) []any {
	switch o {
	case opSend, opSkipLast, opDrop, opStore, opWriteError, opDamage, opBreakWrite, opPurge, opHandOver:
		return []any{b}
	case opSettle:
		how := "applied"
		if from.send[a].w[b] == broken {
			how = "not applied"
		}
		return []any{b, how}
	case opAct:
		return []any{from.recv[a].acts[0]}
	}
	return nil
}

var opWords = map[op]string{
	opOpenS: "the request reaches prefill", opOpenR: "the request reaches decode",
	opAbsentS: "the request never reaches prefill", opAbsentR: "the request never reaches decode",
	opSend: "prefill sends chunk %d", opSkipLast: "prefill skips chunk %d and says nothing", opDrop: "prefill can not send chunk %d",
	opCancelS: "prefill cancels", opCancelR: "decode cancels",
	opReleaseS: "prefill's owner lets go", opReleaseR: "decode's owner lets go",
	opDeadlineS: "deadline at prefill", opDeadlineR: "deadline at decode",
	opPurge: "the write of chunk %d is taken out of the queue", opStore: "the write of chunk %d goes on",
	opWriteError: "the write of chunk %d fails", opDamage: "the write of chunk %d goes on and damages its bytes",
	opBreakWrite: "the write of chunk %d is abandoned, its session has ended", opHandOver: "the notification of chunk %d reaches decode",
	opSettle: "the write of chunk %d completes: %s", opDial: "decode gets a session", opNoPages: "decode gives up waiting for pages",
	opPages: "decode gets pages", opGranted: "decode tells the room that it has pages", opAct: "decode's actions: %v", opLeft: "the writer says that it has left",
	opSessionEnds: "session %d ends", opDataEnds: "the data connection of session %d ends", opDownS: "prefill handles the end of session %d",
	opDownR: "decode handles the end of session %d", opCloseSession: "decode closes session %d at its transports",
	opCloseData: "prefill closes the data connection of session %d", opFenced: "decode's transport reports: session %d is fenced",
	opCrashS: "prefill's process dies and starts anew", opCrashR: "decode's process dies and starts anew",
}

// String lists what is done.
func (a action) String() string {
	s := ""
	for i, name := range []string{"revoke", "free", "(fenced)", "forget"} {
		if a&(1<<i) != 0 {
			s += name + " "
		}
	}
	if s == "" {
		return "nothing"
	}
	return s[:len(s)-1]
}
