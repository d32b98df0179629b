package legacy

import "github.com/baton-pd/baton/internal/room"

// The same three threads with the production machine in the middle: room.Sender decides, and
// this file does around it what room.Registry (live rooms, tombstones) and the hub (parked grants,
// acks) do, one lock hold a step.

// causes are what the threads give to events; shared, so that machines compare equal.
var causes = map[reason]*room.Cause{
	aborted:    {Code: room.CodeAborted, Side: room.SideReceiver},
	cancelled:  {Code: room.CodeClientGone, Side: room.SideSender},
	outOfOrder: {Code: room.CodeInternal, Side: room.SideSender},
}

// reasonOf is the reason that a machine's cause stands for.
func reasonOf(c *room.Cause) reason {
	if c == nil {
		return noReason
	}
	switch c.Code {
	case room.CodeAborted:
		return aborted
	case room.CodeClientGone:
		return cancelled
	case room.CodeInternal:
		return outOfOrder
	default:
		return broken
	}
}

// apply is Registry's: one event under the room's lock, with its effects.
func (m *machine) apply(s *State, req uint8, kind room.EventKind, chunk uint8, why reason, mask room.Effects) room.Effects {
	l := &s.lives[req]
	live := !l.snd.State().Terminal()
	snd, fx := l.snd.Step(room.Event{Kind: kind, Chunk: int(chunk), Cause: causes[why]})
	l.snd = snd
	if live && snd.State() == room.StateFailed {
		l.blame(why)
	}
	if fx&mask&room.FxSendAck != 0 {
		l.acked = true
	}
	if fx.Has(room.FxForget) {
		l.open, l.gone = false, true
	}
	return fx
}

const everyEffect = ^room.Effects(0)

// kvpoll puts a machine's state into the words of the legacy map.
func kvpoll(s room.State) status { return status(s) + 1 }

func (m *machine) batonWorker(s *State, out []step) []step {
	h := s.hands[worker]
	if h.at == idle {
		if s.queued == 0 {
			return out
		}
		to := *s
		r, c := to.pop()
		a := act{thread: worker, at: idle, req: r, chunk: c, old: kvpoll(to.lives[r].snd.State())}
		if m.v.defers && !to.deferred && c == 0 {
			a.note = putBack
			to.deferred = true
			to.push(r, c)
		} else {
			to.hands[worker] = hand{at: atBegin, req: r, chunk: c}
		}
		return append(out, step{to, a})
	}
	to := *s
	a := act{thread: worker, at: h.at, req: h.req, chunk: h.chunk, old: kvpoll(to.lives[h.req].snd.State())}
	switch h.at {
	case atBegin:
		if fx := m.apply(&to, h.req, room.EvBegin, h.chunk, outOfOrder, everyEffect); fx.Has(room.FxWrite) {
			to.hands[worker].dst = h.req + 1
			to.hands[worker].at = atWrite
		} else {
			a.note = skipped
			to.free(worker)
		}
	case atWrite:
		a.note = m.store(&to, false)
		to.hands[worker].at = atWritten
	case atWritten:
		a.note = m.store(&to, true)
		to.hands[worker].at = atSettle
	case atSettle:
		if fx := m.apply(&to, h.req, room.EvSettle, h.chunk, noReason, everyEffect); fx.Has(room.FxSendAck) {
			a.note = acks
		}
		to.free(worker)
	}
	a.now = kvpoll(to.lives[h.req].snd.State())
	return append(out, step{to, a})
}

func (m *machine) batonControl(s *State, out []step) []step {
	h := s.hands[control]
	if h.at == idle {
		return m.hear(s, out, func(f frame) point {
			if f.abort {
				return atUnpark
			}
			return atGrant
		})
	}
	to := *s
	l, hd := &to.lives[h.req], &to.hands[control]
	a := act{thread: control, at: h.at, req: h.req, old: kvpoll(l.snd.State())}
	switch h.at {
	case atUnpark:
		l.parked = false
		hd.at = atFind
	case atFind:
		hd.twice = !l.open
		hd.at = atAbort
	case atAbort:
		m.batonAbort(&to, h.req, h.twice)
		if l.acked && !s.lives[h.req].acked {
			a.note = acks
		}
		to.free(control)
	case atGrant:
		switch {
		case l.open:
			m.apply(&to, h.req, room.EvGrant, 0, noReason, everyEffect)
			to.free(control)
		case l.gone:
			a.note = ignored
			to.free(control)
		default:
			a.note = noInfo
			hd.at = atPark
		}
	case atPark:
		l.parked = true
		hd.at = atRecheck
	case atRecheck:
		if l.open && l.parked {
			l.parked = false
			m.apply(&to, h.req, room.EvGrant, 0, noReason, everyEffect)
		} else {
			a.note = ignored
		}
		to.free(control)
	}
	a.now = kvpoll(l.snd.State())
	return append(out, step{to, a})
}

// batonAbort is Registry.Abort with what the hub does after it. unfound: the hub had found no room.
func (m *machine) batonAbort(s *State, req uint8, unfound bool) {
	l := &s.lives[req]
	if l.open {
		m.apply(s, req, room.EvAbort, 0, aborted, everyEffect)
	} else if !l.gone {
		l.tombstone = true
		l.blame(aborted)
	}
	if !l.open || unfound {
		l.acked = true
	}
}

func (m *machine) batonScheduler(s *State, out []step) []step {
	if h := s.hands[scheduler]; h.at != idle {
		return append(out, m.batonSchedule(s))
	}
	for i, rq := range m.v.requests {
		r := uint8(i)
		l := &s.lives[r]
		to := *s
		st := l.snd.State()
		switch {
		case l.phase == unborn && m.may(s, r):
			m.batonOpen(&to, r)
			out = append(out, step{to, act{thread: scheduler, at: atCreate, req: r, now: kvpoll(to.lives[r].snd.State())}})
		case (l.phase == booting || l.phase == inflight) && st.Terminal():
			to.lives[r].phase = telling
			to.hands[scheduler] = hand{at: atTell, req: r, seen: kvpoll(st)}
			out = append(out, step{to, act{thread: scheduler, at: idle, req: r, old: kvpoll(st), note: polled}})
		case l.phase == booting && st != room.StateBootstrapping:
			to.lives[r].phase = sending
			out = append(out, step{to, act{thread: scheduler, at: idle, req: r, old: kvpoll(st), note: polled}})
		case l.phase == sending:
			out = append(out, m.handOver(s, r))
		}
		if rq.cancelled && !l.cancelled && l.phase >= booting && l.phase <= inflight {
			to := *s
			to.lives[r].cancelled = true
			a := act{thread: scheduler, at: atCancel, req: r, old: kvpoll(st)}
			m.apply(&to, r, room.EvCancel, 0, cancelled, everyEffect)
			a.now = kvpoll(to.lives[r].snd.State())
			out = append(out, step{to, a})
		}
	}
	return out
}

// batonOpen is Registry.Open. The abort that came first was acked when it was remembered.
func (m *machine) batonOpen(s *State, r uint8) {
	l := &s.lives[r]
	l.snd, l.open, l.phase = room.NewSender(int(m.v.requests[r].chunks)), true, booting
	if l.tombstone {
		l.tombstone = false
		m.apply(s, r, room.EvAbort, 0, aborted, ^room.FxSendAck)
	}
	s.hands[scheduler] = hand{at: atDeliver, req: r}
}

func (m *machine) batonSchedule(s *State) step {
	to := *s
	h := s.hands[scheduler]
	l := &to.lives[h.req]
	a := act{thread: scheduler, at: h.at, req: h.req, old: kvpoll(l.snd.State())}
	switch h.at {
	case atDeliver:
		if l.parked {
			l.parked = false
			m.apply(&to, h.req, room.EvGrant, 0, noReason, everyEffect)
		} else {
			a.note = ignored
		}
		to.free(scheduler)
	case atTell:
		m.tell(&to, h.req, h.seen, reasonOf(l.snd.Cause()))
		to.hands[scheduler] = hand{at: atClear, req: h.req}
	case atClear:
		m.apply(&to, h.req, room.EvRelease, 0, noReason, everyEffect)
		l.phase = over
		to.free(scheduler)
	}
	a.now = kvpoll(l.snd.State())
	if h.at == atTell {
		a.now = h.seen
	}
	return step{to, a}
}
