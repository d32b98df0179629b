package model

import "github.com/baton-pd/baton/internal/room"

// This file is internal/transfer/hub/{senders,sending}.go over model state: each method is
// one critical section of it.

// inSender is the life that the prefill registry holds under key; -1: none.
func (r *run) inSender(key uint8, same func(i, key uint8) bool) int {
	for i := range r.w.lives {
		if r.send[i].at == open && same(i, key) {
			return int(i)
		}
	}
	return -1
}

// hasKey: key is that of life i.
func (w *World) hasKey(i, key uint8) bool { return w.keyOf(i) == key }

// named: key on a wire means life i.
func (w *World) named(i, key uint8) bool {
	return w.hasKey(i, key) || w.fault == FaultNoGeneration && w.roomOf(i) == w.roomOf(key)
}

// openSender is Senders.Open with Registry.Open.
func (r *run) openSender(i uint8) {
	key := r.w.keyOf(i)
	s := &r.send[i]
	if r.inSender(key, r.w.hasKey) >= 0 || r.tombS[key] == tombEnded {
		s.at = refused // CodeDuplicate
		return
	}
	s.at = open
	if r.tombS[key] == tombAborted {
		r.tombS[key] = tombNone
		r.sndMasked(i, room.Event{Kind: room.EvAbort}, ^(room.FxSendAck | room.FxSendAbort))
	}
	if p := r.takeParked(key, 0); p.grant != 0 {
		r.deliverGrant(i, p.sess, p.grant)
	}
}

// takeParked takes the grant parked for key, if it is of sess or sess is 0.
func (r *run) takeParked(key, sess uint8) (p parked) {
	p = r.parked[key]
	if p.grant == 0 || sess != 0 && p.sess != sess {
		return parked{}
	}
	r.parked[key] = parked{}
	return p
}

// grantCame is Senders.Grant.
func (r *run) grantCame(sess, key, grant uint8) {
	if i := r.inSender(key, r.w.named); i >= 0 {
		r.deliverGrant(uint8(i), sess, grant)
		return
	}
	if r.tombS[key] == tombEnded {
		r.refuse(sess, key, grant)
		return
	}
	old := r.parked[key]
	r.parked[key] = parked{sess: sess, grant: grant}
	if old.grant != 0 && old != r.parked[key] {
		r.refuse(old.sess, key, old.grant)
	}
}

// refuse tells the decode side that its room can not be served.
func (r *run) refuse(sess, key, grant uint8) {
	if r.w.fault == FaultSilentRefusal {
		return
	}
	r.post(message{kind: msgFailed, sess: sess, key: key, grant: grant, about: grant})
}

// deliverGrant is Senders.deliver.
func (r *run) deliverGrant(i, sess, grant uint8) {
	s := &r.send[i]
	key := r.w.keyOf(i)
	if s.sess != 0 {
		if s.sess != sess || s.grant != grant {
			r.refuse(sess, key, grant)
		}
		return
	}
	if r.w.prompt(i) != r.w.prompt(grant-1) && r.w.fault != FaultNoDigest {
		r.refuse(sess, key, grant)
		r.snd(i, room.Event{Kind: room.EvCancel}) // CodeMismatch
		return
	}
	s.sess, s.grant, s.indexed = sess, grant, true
	r.snd(i, room.Event{Kind: room.EvGrant})
	if s.m.State() == room.StateFailed {
		r.refuse(sess, key, grant)
	}
	if s.m.Node().Drain == room.DrainGone {
		s.indexed = false
	}
}

// abortCame is Senders.Abort with Registry.Abort.
func (r *run) abortCame(sess, key, grant uint8) {
	if r.w.fault == FaultKeepParked {
		r.parked[key].stuck = r.parked[key].grant != 0 // its timer is stopped, and it stays
	} else {
		r.takeParked(key, sess)
	}
	i := r.inSender(key, r.w.named)
	if i < 0 {
		if r.tombS[key] == tombNone && r.w.fault != FaultNoTombstone {
			r.tombS[key] = tombAborted
		}
		r.ack(sess, key, grant)
		return
	}
	s := &r.send[i]
	if s.sess != 0 && (s.sess != sess || s.grant != grant) {
		r.ack(sess, key, grant) // a room that serves another grant: this one can have no write outstanding
		return
	}
	s.ackSess, s.ackGrant = sess, grant
	fx := r.snd(uint8(i), room.Event{Kind: room.EvAbort})
	if r.w.fault == FaultEarlyAck && !fx.Has(room.FxSendAck) {
		r.ack(sess, key, grant)
	}
}

// ack says that nothing is or will be outstanding under grant.
func (r *run) ack(sess, key, grant uint8) {
	r.checkAck(grant)
	r.acked |= 1 << grant
	r.post(message{kind: msgAck, sess: sess, key: key, grant: grant, about: grant})
}

// snd gives the sender of life i an event and executes the effects.
func (r *run) snd(i uint8, e room.Event) room.Effects {
	return r.sndMasked(i, e, ^room.Effects(0))
}

func (r *run) sndMasked(i uint8, e room.Event, mask room.Effects) room.Effects {
	s := &r.send[i]
	was := s.m
	now, fx := r.w.stepS(was, e)
	s.m = now
	r.checkSender(i, e, was, now, fx)
	fx &= mask
	key := r.w.keyOf(i)
	if fx.Has(room.FxSendFailed) && s.sess != 0 {
		r.post(message{kind: msgFailed, sess: s.sess, key: key, grant: s.grant, about: s.grant})
	}
	if fx.Has(room.FxSendAck) {
		switch {
		case s.ackSess != 0:
			r.ack(s.ackSess, key, s.ackGrant)
		case s.sess != 0:
			r.ack(s.sess, key, s.grant)
		}
	}
	if fx.Has(room.FxForget) {
		s.indexed = false
		s.at = forgotten
		r.tombS[key] = tombEnded
	}
	return fx
}

// sendChunk is sending.Send: ask the room, post the write.
func (r *run) sendChunk(i uint8) {
	s := &r.send[i]
	c := s.next
	live := !s.m.State().Terminal()
	fx := r.snd(i, room.Event{Kind: room.EvBegin, Chunk: int(c)})
	if live {
		s.next++
	}
	if !fx.Has(room.FxWrite) {
		return
	}
	r.checkBegin(i, c)
	s.w[c] = queued
	if x := &r.sess[s.sess-1]; x.downS {
		s.w[c] = broken // the queue is closed
	}
}

// releaseSender is sending.Release. What is still queued may be purged after it, see writes.
func (r *run) releaseSender(i uint8) {
	r.send[i].released = true
	r.snd(i, room.Event{Kind: room.EvRelease})
}

// downSender is Senders.Down: the end of a session for the rooms in its index.
func (r *run) downSender(sess uint8) {
	r.sess[sess-1].downS = true
	for k := range r.parked {
		if r.parked[k].sess == sess {
			r.parked[k] = parked{}
		}
	}
	for i := range r.w.lives {
		if s := &r.send[i]; s.at == open && s.indexed && s.sess == sess {
			r.snd(i, room.Event{Kind: room.EvPeerLost})
		}
	}
}
