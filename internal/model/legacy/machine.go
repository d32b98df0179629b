package legacy

import (
	"errors"

	"github.com/baton-pd/baton/internal/model/explore"
	"github.com/baton-pd/baton/internal/room"
)

// point is where a thread stands: what its next step will be. Each is one access to shared memory.
type point uint8

const (
	idle point = iota

	// The worker, with a chunk.
	atMark    // write Transferring before the transfer
	atList    // snapshot the destinations
	atWrite   // the first byte goes out
	atWritten // the last byte is stored
	atReport  // write Transferring, or Success after the last chunk
	atForget  // drop the transfer information after the last chunk
	atForce   // repair B: fail the room of a skipped chunk
	atBroken  // the snapshot found no information: record, and write Failed
	atBegin   // production: EvBegin
	atSettle  // production: EvSettle

	// The bootstrap thread, with a frame.
	atCheck   // room known, and not Success?
	atFail    // record the reason, write Failed
	atDrop    // drop the transfer information
	atAck     // send ABORT_ACK
	atStore   // keep the transfer information
	atReady   // write WaitingForInput
	atUnpark  // production: a parked grant of the room is forgotten
	atFind    // production: look the room up
	atAbort   // production: Registry.Abort
	atGrant   // production: give the grant to its room
	atPark    // production: no room yet: keep the grant
	atRecheck // production: the room may have come meanwhile

	// The scheduler, with a request.
	atCreate  // write Bootstrapping
	atCancel  // its user's cancel: record, write Failed
	atClear   // forget status and transfer information, take the failure record
	atTell    // the client gets its end
	atDeliver // production: the parked grant goes to the new room

	// bare marks the second half of an unlocked update: the write of what was computed from
	// what was read before.
	bare point = 0x80
)

// act is one step for people: who, from which point, about what.
type act struct {
	thread     thread
	at         point
	req, chunk uint8
	// what the update read and wrote, where there was one; for a take: what became of the chunk.
	old, now status
	note     note
}

// note tells two outcomes of one point apart.
type note uint8

const (
	plain note = iota
	skipped
	noInfo
	putBack
	halfway // the read of an unlocked update
	ignored
	dies
	late // after the ack
	acks // production: the step sends the ack
	bootTimeout
	polled
	handed
	receivedAbort
	receivedInfo
)

// pack is the act as the explorer carries it.
func (a act) pack() uint32 {
	return uint32(a.thread) | uint32(a.at)<<2 | uint32(a.req)<<10 | uint32(a.chunk)<<12 | uint32(a.old)<<15 | uint32(a.now)<<18 | uint32(a.note)<<21
}

func unpack(u uint32) act {
	return act{thread: thread(u & 3), at: point(u >> 2), req: uint8(u>>10) & 3, chunk: uint8(u>>12) & 7,
		old: status(u>>15) & 7, now: status(u>>18) & 7, note: note(u >> 21)}
}

// step is one step with its result.
type step struct {
	to  State
	act act
}

// machine is a policy in a variant. It implements explore.System.
type machine struct {
	p        Policy
	v        Variant
	unlocked bool
	// wanted is the fault that a search looks for; 0: none.
	wanted Fault
}

// start is the state before the first step.
func (m *machine) start() State {
	var s State
	for i, r := range m.v.requests {
		if !r.ready {
			continue
		}
		l := &s.lives[i]
		l.phase = sending
		s.rooms[r.room], s.infos[r.room] = waiting, uint8(i)+1
		if m.p.production {
			l.snd, _ = room.NewSender(int(r.chunks)).Step(room.Event{Kind: room.EvGrant})
			l.open = true
		}
		if r.computing {
			continue
		}
		l.phase, l.sent = inflight, r.chunks
		for c := range r.chunks {
			s.push(uint8(i), c)
		}
	}
	return s
}

// next appends every enabled step: at most one of the worker and the bootstrap thread a
// connection, some of the scheduler.
func (m *machine) next(s *State, out []step) []step {
	n := len(out)
	if m.p.production {
		out = m.batonWorker(s, out)
		out = m.batonControl(s, out)
		out = m.batonScheduler(s, out)
	} else {
		out = m.worker(s, out)
		out = m.control(s, out)
		out = m.scheduler(s, out)
	}
	if len(out) == n && m.p.mooncake {
		out = m.timeout(s, out)
	}
	return out
}

// timeout is mooncake's bound of Bootstrapping, 300 s: longer than anything else takes.
func (m *machine) timeout(s *State, out []step) []step {
	for i, r := range m.v.requests {
		if s.lives[i].phase != booting || s.rooms[r.room] != bootstrapping {
			continue
		}
		to := *s
		to.record[r.room] = timedOut
		m.set(&to, uint8(i), failed, timedOut)
		out = append(out, step{to, act{thread: world, req: uint8(i), note: bootTimeout, old: bootstrapping, now: failed}})
	}
	return out
}

// set writes a status of req's room; why is the reason when it is Failed.
func (m *machine) set(s *State, req uint8, st status, why reason) {
	s.rooms[m.v.requests[req].room] = st
	l := &s.lives[req]
	if st == failed {
		l.blame(why)
	}
}

// update is one update_status at a thread's point: a whole step when it is locked, else
// the read in this step and the write in the next. done is where the thread goes after it.
func (m *machine) update(s *State, t thread, want status, why reason, done func(*State), out []step) []step {
	to := *s
	h := &to.hands[t]
	id := m.v.requests[h.req].room
	a := act{thread: t, at: h.at &^ bare, req: h.req, chunk: h.chunk}
	half := h.at&bare != 0
	if want == failed && !half {
		to.record[id] = why
	}
	if m.unlocked && !half {
		h.seen, h.at = to.rooms[id], h.at|bare
		a.note, a.old = halfway, h.seen
		return append(out, step{to, a})
	}
	cur := to.rooms[id]
	if half {
		cur, h.seen = h.seen, absent
	}
	a.old = to.rooms[id]
	if st, write := m.p.merge(cur, want); write {
		m.set(&to, h.req, st, why)
	}
	a.now = to.rooms[id]
	done(&to)
	return append(out, step{to, a})
}

// free makes a thread idle.
func (s *State) free(t thread) { s.hands[t] = hand{} }

// store is a write of bytes into the pages that were snapshotted.
func (m *machine) store(s *State, last bool) note {
	h := &s.hands[worker]
	d := h.dst - 1
	if last && d == h.req {
		s.lives[d].stored |= 1 << h.chunk
	}
	if s.lives[d].acked {
		s.faults |= WrittenAfterAck
		return late
	}
	return plain
}

// tell ends a request for its client and judges what it is told.
func (m *machine) tell(s *State, req uint8, end status, cause reason) {
	l := &s.lives[req]
	l.ended, l.cause = end, cause
	switch {
	case end == failed && cause != l.first, end == failed && cause == noReason:
		s.faults |= LostCause
	case end == success && (l.first != noReason || l.stored != 1<<m.v.requests[req].chunks-1):
		s.faults |= WrongSuccess
	}
}

// pinned: some request has not ended. Meant for a state without steps.
func (m *machine) pinned(s *State) bool {
	for i := range m.v.requests {
		if s.lives[i].ended == absent {
			return true
		}
	}
	return false
}

// may reports whether request req, or a frame about it, may come into the world already.
func (m *machine) may(s *State, req uint8) bool {
	return !m.v.requests[req].after || s.lives[0].ended != absent
}

var errFault = errors.New("counterexample")

// Init implements explore.System.
func (m *machine) Init() []State { return []State{m.start()} }

// Next implements explore.System. Every step must happen in the end: there is no environment.
func (m *machine) Next(s State, out []explore.Step[State]) []explore.Step[State] {
	for _, st := range m.next(&s, nil) {
		out = append(out, explore.Step[State]{To: st.to, Act: st.act.pack(), Fair: 1})
	}
	return out
}

// Key implements explore.System.
func (m *machine) Key(s State, out []byte) []byte { return s.key(out) }

// Check implements explore.System.
func (m *machine) Check(s State) error {
	switch {
	case m.wanted == 0:
	case m.wanted == Pinned && m.Done(s) && m.pinned(&s), s.faults&m.wanted != 0:
		return errFault
	}
	return nil
}

// Done implements explore.System: an execution is over when nobody has a step left.
func (m *machine) Done(s State) bool { return len(m.next(&s, nil)) == 0 }

// Describe implements explore.System.
func (m *machine) Describe(_ State, st explore.Step[State]) string {
	a := unpack(st.Act)
	return a.thread.String() + ": " + m.words(a)
}

// Show implements explore.System.
func (m *machine) Show(s State) string { return m.show(&s) }
