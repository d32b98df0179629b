package model

import "github.com/baton-pd/baton/internal/room"

// This file is the data plane: writes that store bytes into pages, revoking, fencing.

// writes takes the writes of life i further. Those of one grant are stored in order.
func (x *steps) writes(i uint8) {
	s := &x.from.send[i]
	for c := range uint8(x.w.sc.Chunks) {
		p := s.w[c]
		switch {
		case p == landed || p == broken:
			if s.at == open {
				x.add(opSettle, i, c, fairSettle, func(r *run) { r.settle(i, c) })
			}
			continue
		case !p.storing():
			continue
		}
		if p == queued && s.released {
			x.add(opPurge, i, c, 0, func(r *run) { r.send[i].w[c] = broken })
		}
		if c > 0 && s.w[c-1].storing() {
			continue // its turn comes
		}
		x.write(i, c, p)
	}
}

// write is one write whose turn it is.
func (x *steps) write(i, c uint8, p phase) {
	s := &x.from.send[i]
	ss := &x.from.sess[s.sess-1]
	switch p {
	case stored:
		x.add(opHandOver, i, c, fairStore, func(r *run) { r.handOver(i, c) })
	case inside1, inside2:
		x.add(opStore, i, c, fairStore, func(r *run) { r.store(i, c, p, false) })
		x.spend(budDamage, opDamage, i, c, func(r *run) { r.store(i, c, p, true) })
	default: // queued, half: nothing is being stored this moment
		if x.abandoned(ss, p) {
			x.add(opBreakWrite, i, c, fairStore, func(r *run) { r.send[i].w[c] = broken })
			if ss.gone {
				return
			}
		}
		x.spend(budError, opWriteError, i, c, func(r *run) { r.send[i].w[c] = broken })
		if x.w.sc.Transport == TransportDrain {
			x.add(opStore, i, c, fairStore, func(r *run) { r.enter(i, c, p) })
			return
		}
		x.add(opStore, i, c, fairStore, func(r *run) { r.store(i, c, p, false) })
		x.spend(budDamage, opDamage, i, c, func(r *run) { r.store(i, c, p, true) })
	}
}

// abandoned: the prefill side gives the write up because of its session's end.
func (x *steps) abandoned(ss *session, p phase) bool {
	if x.w.sc.Transport == TransportWild && p != queued {
		return ss.deadR // what was posted can not be called back
	}
	return ss.cut
}

// enter is the source's compare-and-swap that counts it into a live grant.
func (r *run) enter(i, c uint8, p phase) {
	s := &r.send[i]
	switch {
	case !r.sess[s.sess-1].deadR && !r.recv[s.grant-1].live:
		s.w[c] = broken
	case p == queued:
		s.w[c] = inside1
	default:
		s.w[c] = inside2
	}
}

// store puts half of a chunk into its page.
func (r *run) store(i, c uint8, p phase, damage bool) {
	s := &r.send[i]
	g := s.grant - 1
	if r.w.sc.Transport == TransportFence && !r.sess[s.sess-1].deadR && !r.recv[g].live {
		s.w[c] = broken // the target checks grant and session before each store
		return
	}
	whole := p == half || p == inside2
	s.w[c] = half
	if whole {
		s.w[c] = stored
	}
	if r.sess[s.sess-1].deadR {
		return // memory that nobody has any more
	}
	r.checkStore(i, c)
	pg := &r.page[r.recv[g].pages[c]]
	switch {
	case damage || pg.content == damaged:
		pg.content = damaged
	case whole && pg.content != contentOf(r.w.prompt(i), c, false):
		pg.content = damaged // the first half is somebody else's
	default:
		pg.content = contentOf(r.w.prompt(i), c, whole)
	}
	if r.w.sc.Transport == TransportDrain && !r.recv[g].live && !r.insideGrant(s.grant) {
		r.recv[g].leave = true
	}
}

// handOver brings the notification to the decode side.
func (r *run) handOver(i, c uint8) {
	s := &r.send[i]
	s.w[c] = landed
	switch {
	case r.sess[s.sess-1].deadR:
		s.w[c] = broken
	default:
		r.landing(s.grant, r.w.prompt(i), c)
	}
	if s.at != open {
		s.w[c] = vanished
	}
}

// settle reports the completion to the room.
func (r *run) settle(i, c uint8) {
	s := &r.send[i]
	e := room.Event{Kind: room.EvSettle, Chunk: int(c)}
	if s.w[c] == broken {
		e.Kind = room.EvSettleError
		s.w[c] = lost
	} else {
		s.w[c] = applied
	}
	r.snd(i, e)
}

// insideGrant: a source is counted in (drain).
func (r *run) insideGrant(grant uint8) bool {
	for i := range r.w.lives {
		for _, p := range r.send[i].w {
			if r.send[i].grant == grant && (p == inside1 || p == inside2) {
				return true
			}
		}
	}
	return false
}

// revoke is Target.Revoke for the grant of life i: is it fenced?
func (r *run) revoke(i uint8) bool {
	y := &r.recv[i]
	ended := r.sess[y.sess-1].fenced
	y.live = false
	switch {
	case ended || r.w.fault == FaultLyingFence:
		return true
	case r.w.sc.Transport == TransportFence:
		return true
	case r.w.sc.Transport == TransportDrain:
		return !r.insideGrant(i + 1)
	default:
		return false
	}
}

// touched: a write of the session may still store or notify.
func (x *steps) touched(sess uint8) bool {
	for i := range x.w.lives {
		for _, p := range x.from.send[i].w {
			if x.from.send[i].sess == sess && p.storing() {
				return true
			}
		}
	}
	return false
}

// fenceable: the target knows that no byte of the session can be stored any more. A
// connection that ends is read to its end first.
func (x *steps) fenceable(sess uint8) bool {
	s := &x.from.sess[sess-1]
	if s.fenced {
		return false
	}
	return s.gone && !x.touched(sess) || s.closed && x.w.sc.Transport == TransportFence
}
