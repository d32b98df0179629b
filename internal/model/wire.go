package model

import (
	"slices"

	"github.com/baton-pd/baton/internal/room"
)

// This file is the session (internal/session) and its end, and the death of a process.

// post sends m on its session, if that still takes it from this side.
func (r *run) post(m message) {
	x := &r.sess[m.sess-1]
	if x.cut || m.kind.toSender() && x.downR || !m.kind.toSender() && x.downS {
		return
	}
	if int(r.nnet) == maxNet {
		r.breaks(Tells, "more than %d messages are under way: one is sent again and again", maxNet)
		return
	}
	// After the last message of its channel, so that order across channels, which nobody sees, makes
	// no further states.
	n := int(r.nnet)
	at := n
	for at > 0 && (r.net[at-1].channel() > m.channel() || r.w.sc.Reorder && r.net[at-1].compare(m) > 0) {
		r.net[at] = r.net[at-1]
		at--
	}
	r.net[at] = m
	r.nnet++
}

// compare orders messages for a network that has no order.
func (m message) compare(o message) int {
	a := [...]uint8{m.channel(), uint8(m.kind), m.key, m.grant, m.about}
	b := [...]uint8{o.channel(), uint8(o.kind), o.key, o.grant, o.about}
	return slices.Compare(a[:], b[:])
}

func sortMessages(net []message) { slices.SortFunc(net, message.compare) }

// network delivers, loses and doubles.
func (x *steps) network() {
	sc := x.w.sc
	for n, m := range x.from.net[:x.from.nnet] {
		if n > 0 && x.from.net[n-1] == m && sc.Reorder {
			continue // its twin makes the same step
		}
		if n > 0 && !sc.Reorder && x.from.net[n-1].channel() == m.channel() {
			continue // not its turn
		}
		at := uint8(n)
		x.add(opDeliver, at, 0, fairDeliver, func(r *run) {
			r.drop(at)
			r.deliver(m)
		})
		if sc.Datagram {
			x.spend(budDup, opDuplicate, at, 0, func(r *run) { r.deliver(m) })
			x.spend(budLoss, opLose, at, 0, func(r *run) {
				r.drop(at)
				r.sess[m.sess-1].lossy = true
			})
		}
	}
	for k := range x.w.lives {
		if p := x.from.parked[k]; p.grant != 0 && !p.stuck {
			x.add(opUnpark, k, 0, fairPark, func(r *run) {
				r.parked[k] = parked{}
				r.refuse(p.sess, k, p.grant)
			})
		}
		if x.from.tombS[k] != tombNone && x.forgettable(k) {
			x.spend(budExpiry, opExpireS, k, 0, func(r *run) { r.tombS[k] = tombNone })
		}
		if x.from.tombR[k] != tombNone && x.forgettable(k) {
			x.spend(budExpiry, opExpireR, k, 0, func(r *run) { r.tombR[k] = tombNone })
		}
	}
}

// forgettable: a tombstone lives longer (60 s) than any message about its key (5 s unacked end the
// session), any parked grant, any bootstrap that still waits for its session, and the room on the other
// side. The last is not held by anything but time: EarlyReuse leaves it out.
func (x *steps) forgettable(key uint8) bool {
	if x.from.parked[key].grant != 0 {
		return false
	}
	for _, m := range x.from.net[:x.from.nnet] {
		if m.key == key {
			return false
		}
	}
	for i := range x.w.lives {
		if x.w.keyOf(i) != key {
			continue
		}
		s, y := &x.from.send[i], &x.from.recv[i]
		if y.at == forgotten && y.boot != bootOver || !x.w.sc.EarlyReuse && (s.at == open || y.at == open) {
			return false
		}
	}
	return true
}

// drop takes message at out of the network.
func (r *run) drop(at uint8) {
	copy(r.net[at:], r.net[at+1:r.nnet])
	r.nnet--
	r.net[r.nnet] = message{}
}

// deliver hands m to the hub. A stream that has ended delivers nothing; a datagram of an
// ended session is for the hub to refuse, except that the prefill side knows its sessions as objects.
func (r *run) deliver(m message) {
	x := &r.sess[m.sess-1]
	var before machines
	for i := range r.w.lives {
		before.send[i], before.recv[i] = r.send[i].m, r.recv[i].m
		before.sess[i], before.grant[i] = r.send[i].sess, r.send[i].grant
	}
	switch {
	case m.kind.toSender() && (x.downS || x.deadS):
		// no such session
	case m.kind == msgGrant:
		r.grantCame(m.sess, m.key, m.grant)
	case m.kind == msgAbort:
		r.abortCame(m.sess, m.key, m.grant)
	case m.kind == msgFailed:
		r.failedCame(m.sess, m.key, m.grant)
	case m.kind == msgAck:
		r.ackCame(m.sess, m.key, m.grant)
	}
	r.checkMessage(m, &before)
}

// machines are what a message may change, and what it must be about to do so.
type machines struct {
	send        [maxLives]room.Sender
	recv        [maxLives]room.Receiver
	sess, grant [maxLives]uint8 // of the senders
}

// discard drops what is under way to one side on a stream that it has given up.
func (r *run) discard(sess uint8, toSender bool) {
	if r.w.sc.Datagram {
		return
	}
	for n := int(r.nnet) - 1; n >= 0; n-- {
		if m := r.net[n]; m.sess == sess && m.kind.toSender() == toSender {
			r.drop(uint8(n))
		}
	}
}

// sessions end, each side handles the end, the transports fence.
func (x *steps) sessions() {
	for i := range x.from.nsess {
		s := &x.from.sess[i]
		n := i + 1
		if !s.cut {
			cut := func(r *run) { r.sess[i].cut = true }
			x.spend(budBreak, opSessionEnds, i, 0, cut)
			if s.lossy {
				x.add(opSessionEnds, i, 0, fairEnd, cut) // a message was not acked in time
			}
			x.spend(budDataBreak, opDataEnds, i, 0, func(r *run) { r.sess[i].cut, r.sess[i].gone = true, true })
		}
		if s.cut && !s.downS {
			x.add(opDownS, i, 0, fairEnd, func(r *run) {
				r.discard(n, true)
				r.downSender(n)
			})
		}
		if s.cut && !s.downR {
			x.add(opDownR, i, 0, fairEnd, func(r *run) {
				r.discard(n, false)
				r.downReceiver(n)
			})
		}
		if s.closing {
			x.add(opCloseSession, i, 0, fairActions, func(r *run) { r.closeSession(n) })
		}
		if s.downS && !s.gone && !x.touched(n) {
			x.add(opCloseData, i, 0, fairEnd, func(r *run) { r.sess[i].gone = true })
		}
		if x.fenceable(n) {
			x.add(opFenced, i, 0, fairFence, func(r *run) { r.fenced(n) })
		}
	}
}

// closeSession is Target.CloseSession, from the actions goroutine.
func (r *run) closeSession(sess uint8) {
	r.sess[sess-1].closing, r.sess[sess-1].closed = false, true
	for i := range r.w.lives {
		if r.recv[i].sess == sess {
			r.recv[i].live = false
		}
	}
}

// crashes: a process dies and starts anew. Streams end, memory is gone, no write of a dead
// process goes on; what it had sent may still arrive.
func (x *steps) crashes() {
	x.spend(budCrashS, opCrashS, 0, 0, (*run).crashSender)
	x.spend(budCrashR, opCrashR, 0, 0, (*run).crashReceiver)
}

func (r *run) crashSender() {
	for i := range r.w.lives {
		s := &r.send[i]
		if s.at == open {
			*s = sending{m: s.m, at: died, sess: s.sess, grant: s.grant, w: s.w}
		}
		for c, p := range s.w {
			if s.at == died && p.unsettled() && p != stored {
				s.w[c] = vanished
			}
		}
	}
	clear(r.parked[:])
	clear(r.tombS[:])
	for i := range r.nsess {
		x := &r.sess[i]
		if !x.downS {
			x.cut, x.deadS, x.downS = true, true, true
			r.discard(i+1, true)
		}
		x.gone = true
	}
}

func (r *run) crashReceiver() {
	for i := range r.w.lives {
		y := &r.recv[i]
		switch y.at {
		case open:
			*y = receiving{m: y.m, at: died, sess: y.sess, granted: y.granted, boot: bootOver}
		case forgotten:
			*y = receiving{m: y.m, at: forgotten, sess: y.sess, granted: y.granted, boot: bootOver, gone: true}
		}
	}
	clear(r.page[:])
	clear(r.tombR[:])
	for i := range r.nsess {
		x := &r.sess[i]
		x.cut, x.deadR, x.downR, x.closing, x.closed, x.fenced = true, true, true, false, true, true
		r.discard(i+1, false)
	}
}
