package legacy

// scheduler appends the steps that the scheduler may take: it goes round its requests, so
// any of them may be the next.
func (m *machine) scheduler(s *State, out []step) []step {
	h := s.hands[scheduler]
	if h.at != idle {
		return m.schedule(s, out)
	}
	for i := range m.v.requests {
		r := uint8(i)
		switch s.lives[r].phase {
		case unborn:
			if m.may(s, r) {
				to := *s
				to.hands[scheduler] = hand{at: atCreate, req: r}
				out = m.schedule(&to, out)
			}
		case booting, inflight:
			out = m.poll(s, r, out)
		case sending:
			out = append(out, m.handOver(s, r))
		}
		if p := s.lives[r].phase; m.v.requests[r].cancelled && !s.lives[r].cancelled && p >= booting && p <= inflight {
			to := *s
			to.lives[r].cancelled = true
			to.hands[scheduler] = hand{at: atCancel, req: r}
			out = m.schedule(&to, out)
		}
	}
	return out
}

// poll reads the status. Seeing nothing new is no step.
func (m *machine) poll(s *State, r uint8, out []step) []step {
	st := s.rooms[m.v.requests[r].room]
	if st == absent {
		st = waiting // what check_status says of a room it does not know
	}
	l := s.lives[r]
	to := *s
	switch {
	case st == failed, st == success && l.phase == inflight:
		to.lives[r].phase = telling
		to.hands[scheduler] = hand{at: atClear, req: r, seen: st}
	case l.phase == booting && st != bootstrapping:
		to.lives[r].phase = sending
	default:
		return out
	}
	return append(out, step{to, act{thread: scheduler, at: idle, req: r, old: st, note: polled}})
}

// handOver gives the next chunk to the worker.
func (m *machine) handOver(s *State, r uint8) step {
	to := *s
	l := &to.lives[r]
	a := act{thread: scheduler, at: idle, req: r, chunk: l.sent, note: handed}
	to.push(r, l.sent)
	l.sent++
	if l.sent == m.v.requests[r].chunks {
		l.phase = inflight
	}
	return step{to, a}
}

// schedule goes on with what the scheduler is in the middle of.
func (m *machine) schedule(s *State, out []step) []step {
	h := s.hands[scheduler]
	id := m.v.requests[h.req].room
	to := *s
	a := act{thread: scheduler, at: h.at &^ bare, req: h.req}
	switch h.at &^ bare {
	case atCreate:
		return m.update(s, scheduler, bootstrapping, noReason, func(to *State) {
			to.lives[to.hands[scheduler].req].phase = booting
			to.free(scheduler)
		}, out)
	case atCancel:
		return m.update(s, scheduler, failed, cancelled, func(to *State) { to.free(scheduler) }, out)
	case atClear:
		hd := &to.hands[scheduler]
		if h.seen == failed {
			hd.why, to.record[id] = to.record[id], noReason
		}
		to.rooms[id], to.infos[id] = absent, 0
		hd.at = atTell
	case atTell:
		m.tell(&to, h.req, h.seen, h.why)
		to.lives[h.req].phase = over
		a.now = h.seen
		to.free(scheduler)
	}
	return append(out, step{to, a})
}
