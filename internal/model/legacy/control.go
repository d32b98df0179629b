package legacy

// control appends the bootstrap thread's steps: one for every connection it may hear
// next, or the one it is at.
func (m *machine) control(s *State, out []step) []step {
	if s.dead {
		return out
	}
	h := s.hands[control]
	if h.at == idle {
		return m.hear(s, out, func(f frame) point {
			if f.abort {
				return atCheck
			}
			return atStore
		})
	}
	id := m.v.requests[h.req].room
	to := *s
	a := act{thread: control, at: h.at &^ bare, req: h.req, old: to.rooms[id]}
	switch h.at &^ bare {
	case atCheck:
		m.check(&to, id, &a)
	case atFail:
		why := aborted
		if m.p.mooncake {
			why = noReason // it writes Failed and records nothing
		}
		return m.failBy(s, why, out)
	case atDrop:
		to.infos[id] = 0
		to.hands[control].at = atAck
	case atAck:
		to.lives[h.req].acked = true
		to.free(control)
	case atStore:
		to.infos[id] = h.req + 1
		to.hands[control].at = atReady
	case atReady:
		return m.update(s, control, waiting, noReason, func(to *State) { to.free(control) }, out)
	}
	return append(out, step{to, a})
}

// hear takes the next frame of each connection that has one.
func (m *machine) hear(s *State, out []step, begin func(frame) point) []step {
	for i, frames := range m.v.conns {
		if int(s.heard[i]) == len(frames) || !m.may(s, frames[s.heard[i]].req) {
			continue
		}
		f := frames[s.heard[i]]
		to := *s
		to.heard[i]++
		to.hands[control] = hand{at: begin(f), req: f.req, conn: uint8(i)}
		a := act{thread: control, at: idle, req: f.req, chunk: uint8(i), note: receivedInfo}
		if f.abort {
			a.note = receivedAbort
		}
		if f.abort && m.v.asserts && !m.p.mooncake && !m.p.production {
			a.note = dies
			to.free(control)
			to.dead = true
		}
		out = append(out, step{to, a})
	}
	return out
}

// check looks the room up. An ABORT for a room without a status is forgotten: the reason it
// gives is the truth all the same.
func (m *machine) check(s *State, id uint8, a *act) {
	h := &s.hands[control]
	switch s.rooms[id] {
	case success:
		a.note = ignored
		h.at = atAck
	case absent:
		a.note = ignored
		s.lives[h.req].blame(aborted)
		h.at = atDrop
		if m.p.mooncake {
			h.at = atAck
		}
	default:
		h.at = atFail
	}
}

// failBy writes Failed for an ABORT. The truth is the abort, also where nothing is recorded.
func (m *machine) failBy(s *State, why reason, out []step) []step {
	at := len(out)
	id := m.v.requests[s.hands[control].req].room
	record := s.record[id]
	out = m.update(s, control, failed, aborted, func(to *State) {
		to.hands[control].at = atDrop
		if m.p.mooncake {
			to.hands[control].at = atAck
		}
	}, out)
	if why == noReason {
		out[at].to.record[id] = record
	}
	return out
}
