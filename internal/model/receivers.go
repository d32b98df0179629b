package model

import "github.com/baton-pd/baton/internal/room"

// This file is internal/transfer/hub/{receivers,receiving}.go over model state.

// inReceiver is the life that the decode registry holds under key; -1: none.
func (r *run) inReceiver(key uint8, same func(i, key uint8) bool) int {
	for i := range r.w.lives {
		if r.recv[i].at == open && same(i, key) {
			return int(i)
		}
	}
	return -1
}

// openReceiver is Receivers.Open; bootstrap follows.
func (r *run) openReceiver(i uint8) {
	key := r.w.keyOf(i)
	y := &r.recv[i]
	if r.inReceiver(key, r.w.hasKey) >= 0 || r.tombR[key] != tombNone {
		y.at = refused // CodeDuplicate
		return
	}
	y.at = open
}

// bootstrap is receiving.bootstrap: session, pages, grant. It goes on after the room has ended.
func (x *steps) bootstrap(i uint8) {
	y := &x.from.recv[i]
	if y.at != open && y.at != forgotten {
		return
	}
	ended := y.m.State().Terminal()
	switch y.boot {
	case bootDial:
		x.add(opDial, i, 0, fairBoot, func(r *run) { r.dial(i) })
	case bootPages:
		if ended {
			x.add(opNoPages, i, 0, fairBoot, func(r *run) { r.recv[i].boot = bootOver })
		}
		if x.freePages() >= x.w.sc.Chunks {
			fair := fairBoot
			if ended {
				fair = 0 // both channels of the select were ready
			}
			x.add(opPages, i, 0, fair, func(r *run) { r.takePages(i) })
		}
	case bootGrant:
		x.add(opGranted, i, 0, fairBoot, func(r *run) { r.tellGranted(i) })
		if x.from.sess[y.sess-1].cut { // the end may already be known to the session's sender, though not handled
			x.add(opGranted, i, 1, 0, func(r *run) {
				r.errDown = true
				r.tellGranted(i)
			})
		}
	}
}

// tellGranted gives the room its pages.
func (r *run) tellGranted(i uint8) {
	r.recv[i].boot = bootOver
	if fx := r.rcv(i, room.Event{Kind: room.EvGranted}); fx.Has(room.FxSkip) {
		r.letRequestGo(i)
	}
}

func (x *steps) freePages() (n int) {
	for _, p := range x.from.page[:x.w.sc.Pages] {
		if p.owner == 0 {
			n++
		}
	}
	return n
}

// dial is session.Client.Get and receiving.attach.
func (r *run) dial(i uint8) {
	y := &r.recv[i]
	y.boot = bootOver
	sess := r.currentSession()
	x := &r.sess[sess-1]
	if x.downR || x.fenced {
		r.rcv(i, room.Event{Kind: room.EvPeerLost})
		return
	}
	y.sess, y.bySess = sess, !y.gone
	if y.m.State().Terminal() {
		r.post(message{kind: msgAbort, sess: sess, key: r.w.keyOf(i)})
		return
	}
	y.boot = bootPages
}

// currentSession is the newest that decode believes in; a new one if there is none.
func (r *run) currentSession() uint8 {
	if n := r.nsess; n > 0 && !r.sess[n-1].downR {
		return n
	}
	r.sess[r.nsess] = session{up: true}
	r.nsess++
	return r.nsess
}

// takePages is prealloc and receiving.adopt.
func (r *run) takePages(i uint8) {
	y := &r.recv[i]
	c := uint8(0)
	for id := range r.page[:r.w.sc.Pages] {
		if c < uint8(r.w.sc.Chunks) && r.page[id].owner == 0 {
			r.page[id] = page{owner: i + 1}
			y.pages[c] = uint8(id)
			c++
		}
	}
	y.leased, y.request, y.boot = true, true, bootGrant
	if y.unwanted {
		y.request = false
		r.reclaim(i)
	}
}

// releaseReceiver is receiving.Release.
func (r *run) releaseReceiver(i uint8) {
	r.recv[i].released = true
	r.rcv(i, room.Event{Kind: room.EvRelease})
	r.letRequestGo(i)
}

// letRequestGo ends the request's hold on the pages, now or when they come.
func (r *run) letRequestGo(i uint8) {
	y := &r.recv[i]
	y.unwanted = true
	if y.request {
		y.request = false
		r.reclaim(i)
	}
}

// reclaim returns the pages of a lease that nobody holds.
func (r *run) reclaim(i uint8) {
	y := &r.recv[i]
	if y.request || y.transfer {
		return
	}
	for _, id := range y.pages[:r.w.sc.Chunks] {
		r.page[id] = page{}
	}
}

// sendGrant is receiving.sendGrant: hold, index, allow, send. False: it did not leave.
func (r *run) sendGrant(i uint8) bool {
	y := &r.recv[i]
	y.granted = true
	if !y.request {
		return false // the lease refuses
	}
	y.transfer, y.byGrant = true, true
	x := &r.sess[y.sess-1]
	if x.closed || x.fenced {
		return false // the target refuses
	}
	y.live = true
	r.post(message{kind: msgGrant, sess: y.sess, key: r.w.keyOf(i), grant: i + 1, about: i + 1})
	return !r.errDown
}

// rcv gives the receiver of life i an event and executes the effects.
func (r *run) rcv(i uint8, e room.Event) room.Effects {
	y := &r.recv[i]
	was := y.m
	now, fx := r.w.stepR(was, e)
	y.m = now
	r.checkReceiver(i, e, was, now, fx)
	failed := fx.Has(room.FxSendGrant) && !r.sendGrant(i)
	if fx.Has(room.FxSendAbort) && y.sess != 0 {
		r.post(message{kind: msgAbort, sess: y.sess, key: r.w.keyOf(i), grant: y.grant(i), about: y.grant(i)})
	}
	if a := r.action(e, fx); a != 0 {
		r.act(i, a)
	}
	if fx.Has(room.FxForget) {
		r.act(i, actForget)
		y.at = forgotten
		r.tombR[r.w.keyOf(i)] = tombEnded
	}
	if failed {
		r.rcv(i, room.Event{Kind: room.EvCancel})
	}
	return fx
}

// grant is the id on the wire; 0: none was made.
func (y *receiving) grant(i uint8) uint8 {
	if y.granted {
		return i + 1
	}
	return 0
}

// action is what the actions goroutine must do for these effects.
func (r *run) action(e room.Event, fx room.Effects) (a action) {
	if fx.Has(room.FxRevoke) && r.w.fault != FaultNoRevoke {
		a |= actRevoke
	}
	if fx.Has(room.FxFreeTransfer) {
		a |= actFree
	}
	if r.w.fault == FaultFreeOnDeadline && e.Kind == room.EvDeadline || r.w.fault == FaultFreeOnLost && e.Kind == room.EvPeerLost {
		a |= actFree
	}
	if a&actFree != 0 && e.Kind == room.EvFenced {
		a |= actFenced
	}
	return a
}

func (r *run) act(i uint8, a action) {
	y := &r.recv[i]
	if int(y.nacts) == maxActs {
		r.breaks(Returns, "more than %d actions wait for %s: an effect comes again and again", maxActs, r.w.name(i))
		return
	}
	y.acts[y.nacts] = a
	y.nacts++
}

// actions is the actions goroutine at the next function of one room. Rooms do not depend on
// each other's order.
func (x *steps) actions(i uint8) {
	y := &x.from.recv[i]
	if y.leave {
		x.add(opLeft, i, 0, fairStore, func(r *run) { // Receivers.Revoked
			r.recv[i].leave = false
			if r.recv[i].byGrant {
				r.rcv(i, room.Event{Kind: room.EvFenced})
			}
		})
	}
	if y.nacts == 0 {
		return
	}
	x.add(opAct, i, 0, fairActions, func(r *run) {
		y := &r.recv[i]
		a := y.acts[0]
		copy(y.acts[:], y.acts[1:])
		y.nacts--
		y.acts[y.nacts] = 0
		if a&actForget != 0 {
			r.forget(i)
			return
		}
		r.letGo(i, a)
	})
}

// letGo is receiving.letGo: revoke, and return the transfer's hold where that is proven.
func (r *run) letGo(i uint8, a action) {
	y := &r.recv[i]
	if !y.granted {
		return
	}
	if a&actRevoke != 0 && r.revoke(i) && a&actFree == 0 {
		r.rcv(i, room.Event{Kind: room.EvFenced})
	}
	if a&actFree != 0 && y.transfer {
		r.checkFree(i)
		y.transfer = false
		r.reclaim(i)
	}
}

// forget drops the room from the hub's indexes.
func (r *run) forget(i uint8) {
	y := &r.recv[i]
	y.gone = true
	y.bySess = false
	if r.w.fault != FaultKeepIndex {
		y.byGrant = false
	}
}

// failedCame is Receivers.Failed.
func (r *run) failedCame(sess, key, grant uint8) {
	if i := r.find(sess, key); i >= 0 && (grant == 0 || r.recv[i].grant(uint8(i)) == grant) {
		r.rcv(uint8(i), room.Event{Kind: room.EvRemoteFailed})
	}
}

// ackCame is Receivers.AbortAck.
func (r *run) ackCame(sess, key, grant uint8) {
	if i := r.find(sess, key); i >= 0 && r.recv[i].grant(uint8(i)) == grant {
		r.rcv(uint8(i), room.Event{Kind: room.EvAck})
	}
}

// find is the live room key of session sess; -1: none, the message is counted as stray.
func (r *run) find(sess, key uint8) int {
	i := r.inReceiver(key, r.w.named)
	if i >= 0 && r.recv[i].sess != sess && r.w.fault != FaultAnySession {
		return -1
	}
	return i
}

// downReceiver is Receivers.Down.
func (r *run) downReceiver(sess uint8) {
	x := &r.sess[sess-1]
	x.downR, x.closing = true, true
	if x.fenced {
		return // Fenced has ended its rooms
	}
	for i := range r.w.lives {
		if y := &r.recv[i]; y.bySess && y.sess == sess {
			r.rcv(i, room.Event{Kind: room.EvPeerLost})
		}
	}
}

// fenced is Receivers.Fenced.
func (r *run) fenced(sess uint8) {
	r.sess[sess-1].fenced = true
	for i := range r.w.lives {
		y := &r.recv[i]
		if y.sess != sess {
			continue
		}
		y.live, y.leave = false, false
		if y.bySess {
			r.rcv(i, room.Event{Kind: room.EvPeerLost})
			r.rcv(i, room.Event{Kind: room.EvFenced})
		}
	}
}

// landing is Receivers.Landed and receiving.land: the notification of a chunk.
func (r *run) landing(grant, prompt, chunk uint8) {
	i := grant - 1
	y := &r.recv[i]
	if !y.byGrant {
		return // stray
	}
	ok := y.leased && r.page[y.pages[chunk]].content == contentOf(prompt, chunk, true)
	if !ok && r.w.fault != FaultNoChecksum {
		r.rcv(i, room.Event{Kind: room.EvCancel}) // CodeTransferFailed
		return
	}
	r.rcv(i, room.Event{Kind: room.EvLanded, Chunk: int(chunk), Last: int(chunk) == r.w.sc.Chunks-1})
}
