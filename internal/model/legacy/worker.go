package legacy

// worker appends the transfer worker's step.
func (m *machine) worker(s *State, out []step) []step {
	h := s.hands[worker]
	if h.at == idle {
		if s.queued == 0 {
			return out
		}
		return append(out, m.take(s))
	}
	id := m.v.requests[h.req].room
	last := h.chunk+1 == m.v.requests[h.req].chunks
	to := *s
	a := act{thread: worker, at: h.at &^ bare, req: h.req, chunk: h.chunk}
	switch h.at &^ bare {
	case atMark:
		return m.update(s, worker, transferring, noReason, func(to *State) { to.hands[worker].at = atList }, out)
	case atList:
		m.list(&to, id, &a)
	case atWrite:
		a.note = m.store(&to, false)
		to.hands[worker].at = atWritten
	case atWritten:
		a.note = m.store(&to, true)
		to.hands[worker].at = atReport
		if m.p.mooncake && !last {
			to.free(worker)
		}
	case atReport:
		want, after := transferring, idle
		if last {
			want, after = success, atForget
		}
		if last && m.v.keeps {
			after = idle
		}
		return m.update(s, worker, want, noReason, func(to *State) {
			if after == idle {
				to.free(worker)
			} else {
				to.hands[worker].at = after
			}
		}, out)
	case atForget:
		if !m.p.mooncake || to.rooms[id] == absent || to.rooms[id] == success {
			to.infos[id] = 0
		} else {
			a.note = ignored
		}
		to.free(worker)
	case atForce:
		return m.force(s, out)
	case atBroken:
		return m.update(s, worker, failed, broken, func(to *State) { to.free(worker) }, out)
	}
	return append(out, step{to, a})
}

// take is the dequeue with the guards: by status, then by transfer information.
func (m *machine) take(s *State) step {
	to := *s
	r, c := to.pop()
	id := m.v.requests[r].room
	h := &to.hands[worker]
	a := act{thread: worker, at: idle, req: r, chunk: c, old: to.rooms[id]}
	*h = hand{req: r, chunk: c}
	switch {
	case m.p.guard(to.rooms[id]):
		a.note = skipped
		to.free(worker)
	case to.infos[id] == 0:
		a.note = noInfo
		if m.p.dropFails {
			h.at = atForce
		} else {
			to.free(worker)
		}
	case m.p.mooncake:
		h.at = atList
	default:
		h.at = atMark
	}
	return step{to, a}
}

// list snapshots the destinations. Information that has gone since the guard looked is an
// exception in the NIXL worker, which it catches, records and turns into Failed; mooncake's worker finds an empty list.
func (m *machine) list(s *State, id uint8, a *act) {
	h := &s.hands[worker]
	switch {
	case s.infos[id] == 0 && m.p.mooncake:
		a.note = noInfo
		s.free(worker)
	case s.infos[id] == 0:
		a.note = noInfo
		h.at = atBroken
	case m.v.defers && !s.deferred && h.chunk == 0:
		a.note = putBack
		s.deferred = true
		s.push(h.req, h.chunk)
		s.free(worker)
	default:
		h.dst = s.infos[id]
		h.at = atWrite
	}
}

// force is repair B: record a failure and write Failed, unless the status is Success or the room
// was cleared.
func (m *machine) force(s *State, out []step) []step {
	to := *s
	h := &to.hands[worker]
	id := m.v.requests[h.req].room
	a := act{thread: worker, at: atForce, req: h.req, chunk: h.chunk}
	half := h.at&bare != 0
	if m.unlocked && !half {
		h.seen, h.at = to.rooms[id], h.at|bare
		a.note, a.old = halfway, h.seen
		return append(out, step{to, a})
	}
	cur := to.rooms[id]
	if half {
		cur = h.seen
	}
	a.old = to.rooms[id]
	if cur != success && cur != absent {
		to.record[id] = dropped
		m.set(&to, h.req, failed, dropped)
	} else {
		a.note = ignored
	}
	a.now = to.rooms[id]
	to.free(worker)
	return append(out, step{to, a})
}
