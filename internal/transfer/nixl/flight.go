package nixl

import (
	"slices"

	"github.com/baton-pd/baton/internal/transfer"
)

// state of a flight; it only moves forward.
type state uint8

const (
	stateQueued  state = iota // in its line
	stateAsking               // the target has been asked to let it in
	stateStoring              // it is inside; pieces are being stored
	stateNoting               // every byte is stored; its notification waits to be sent
	stateLanding              // the notification is, or goes with the last piece
)

// flight is one posted write. All fields under peer.mu, except that seg and off belong to the
// pumping goroutine while the flight is storing.
type flight struct {
	transfer.Write
	seq     uint64
	line    *line
	state   state
	total   uint64
	sent    uint64 // handed out in pieces
	seg     int    // next byte: Segments[seg].Src[off]
	off     int
	pieces  int   // with the helper
	turn    bool  // is, or was, in ready: every earlier write of the grant is stored
	stored  bool  // every byte is at the destination
	cut     bool  // the grant was revoked: no more pieces
	landed  bool  // the target has given its verdict
	verdict error // meaningful if landed
}

// line is the writes of one grant; it exists while it has any. They ask ahead, but store one after the other.
type line struct {
	grant transfer.GrantID
	queue []*flight // stateQueued
	order []*flight // later states
}

// lines are a peer's writes. Under peer.mu.
type lines struct {
	byGrant map[transfer.GrantID]*line
	ring    []*line            // those with a queue, in turn
	flights map[uint64]*flight // that have asked, by seq
	ready   []*flight          // storing, with bytes left and not with the pump, in turn
	notes   []*flight          // noting
	count   int                // posted and not settled
	seq     uint64
	spare   []*flight
}

func (l *lines) init() {
	l.byGrant = make(map[transfer.GrantID]*line)
	l.flights = make(map[uint64]*flight)
}

// Post implements [transfer.Peer].
func (p *peer) Post(w transfer.Write) error {
	if len(w.Segments) > maxSegments || len(w.Notify) > transfer.MaxNotify {
		return transfer.ErrTooLarge
	}
	var total uint64
	for i := range w.Segments {
		total += uint64(len(w.Segments[i].Src))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return p.err
	}
	if p.count >= p.tr.cfg.Queue {
		return transfer.ErrBusy
	}
	p.count++
	f := &flight{}
	if n := len(p.spare); n > 0 {
		f, p.spare = p.spare[n-1], p.spare[:n-1]
	}
	ln := p.byGrant[w.Grant]
	if ln == nil {
		ln = &line{grant: w.Grant}
		p.byGrant[w.Grant] = ln
	}
	*f = flight{Write: w, total: total, line: ln}
	if len(ln.queue) == 0 {
		p.ring = append(p.ring, ln)
	}
	ln.queue = append(ln.queue, f)
	p.wake.Signal()
	return nil
}

// nextToAsk takes the next write that may ask to enter out of its line; nil: none.
func (l *lines) nextToAsk() *flight {
	if len(l.flights) >= maxInside {
		return nil
	}
	for i, ln := range l.ring {
		if len(ln.order) >= laneInside {
			continue
		}
		f := ln.queue[0]
		ln.queue = ln.queue[1:]
		ln.order = append(ln.order, f)
		l.ring = slices.Delete(l.ring, i, i+1)
		if len(ln.queue) > 0 {
			l.ring = append(l.ring, ln)
		}
		l.seq++
		f.seq, f.state = l.seq, stateAsking
		l.flights[f.seq] = f
		return f
	}
	return nil
}

// settle forgets f and returns what is to be called, without the lock. f has no pieces.
func (l *lines) settle(f *flight, err error) verdict {
	v := verdict{f.Done, err}
	ln := f.line
	if f.state == stateQueued {
		ln.queue = slices.DeleteFunc(ln.queue, func(x *flight) bool { return x == f })
		if len(ln.queue) == 0 {
			l.ring = slices.DeleteFunc(l.ring, func(x *line) bool { return x == ln })
		}
	} else {
		ln.order = slices.DeleteFunc(ln.order, func(x *flight) bool { return x == f })
		delete(l.flights, f.seq)
		l.promote(ln)
	}
	if len(ln.order) == 0 && len(ln.queue) == 0 {
		delete(l.byGrant, ln.grant)
	}
	l.count--
	*f = flight{}
	l.spare = append(l.spare, f)
	return v
}

// promote gives the first write of ln that is not stored its turn, if it has been let in.
func (l *lines) promote(ln *line) {
	for _, f := range ln.order {
		if f.stored {
			continue
		}
		if f.state == stateStoring && !f.turn && !f.cut {
			f.turn = true
			l.ready = append(l.ready, f)
		}
		return
	}
}

// verdict is a Done to be called.
type verdict struct {
	done func(error)
	err  error
}

// leave ends f, which has entered and will store nothing more, and tells the target.
func (p *peer) leave(f *flight) verdict {
	p.out.with(func(b []byte) []byte { return appendWords(b, ctlLeft, f.seq) })
	return p.settle(f, transfer.ErrGrant)
}

// answered takes the target's verdict on a write.
func (p *peer) answered(seq, code uint64) error {
	p.mu.Lock()
	f := p.flights[seq]
	var v verdict
	ok := f != nil
	switch {
	case !ok:
	case f.state == stateAsking && code == verdictEnter && f.cut:
		v = p.leave(f)
	case f.state == stateAsking && code == verdictEnter && f.total == 0:
		f.state, f.stored = stateNoting, true
		p.notes = append(p.notes, f)
		p.promote(f.line)
	case f.state == stateAsking && code == verdictEnter:
		f.state = stateStoring
		p.promote(f.line)
	case f.state == stateAsking && code == verdictGrant:
		v = p.settle(f, transfer.ErrGrant)
	case f.state == stateAsking && code == verdictBounds:
		v = p.settle(f, transfer.ErrBounds)
	case f.state == stateLanding && !f.landed && (code == verdictDone || code == verdictGrant):
		f.landed = true
		if code == verdictGrant {
			f.verdict = transfer.ErrGrant
		}
		if f.pieces == 0 { // else the helper's own word is still to come
			v = p.settle(f, f.verdict)
		}
	default:
		ok = false
	}
	p.moved = true
	p.mu.Unlock()
	p.wake.Signal()
	if v.done != nil {
		v.done(v.err)
	}
	if !ok {
		return errAnswer
	}
	return nil
}

// done hears that the helper has finished a piece.
func (p *peer) done(body []byte) error {
	var id uint64
	if err := words(body, &id); err != nil {
		return err
	}
	p.mu.Lock()
	pc, ok := p.pieces[id]
	if !ok {
		p.mu.Unlock()
		return errOrder
	}
	delete(p.pieces, id)
	if pc.slot >= 0 {
		p.free = append(p.free, pc.slot)
	}
	f := pc.f
	f.pieces--
	if f.pieces == 0 && f.sent == f.total {
		f.stored = true
		p.promote(f.line)
	}
	var v verdict
	switch {
	case f.pieces > 0:
	case f.landed:
		v = p.settle(f, f.verdict)
	case f.cut && f.state == stateStoring:
		v = p.leave(f)
	case f.state == stateStoring && f.sent == f.total:
		f.state = stateNoting
		p.notes = append(p.notes, f)
	}
	p.moved = true
	p.mu.Unlock()
	p.wake.Signal()
	if v.done != nil {
		v.done(v.err)
	}
	return nil
}

// revoked ends the writes of a grant as soon as they store nothing more. Those whose
// notification is on its way wait for the target's verdict.
func (p *peer) revoked(id transfer.GrantID) {
	p.mu.Lock()
	ln := p.byGrant[id]
	if ln == nil {
		p.mu.Unlock()
		return
	}
	var list []verdict
	for len(ln.queue) > 0 {
		list = append(list, p.settle(ln.queue[len(ln.queue)-1], transfer.ErrGrant))
	}
	of := func(f *flight) bool { return f.line == ln }
	p.ready = slices.DeleteFunc(p.ready, of)
	p.notes = slices.DeleteFunc(p.notes, of)
	var gone []*flight
	for _, f := range ln.order {
		f.cut = true
		if f.pieces == 0 && (f.state == stateStoring || f.state == stateNoting) {
			gone = append(gone, f)
		}
	}
	for _, f := range gone {
		list = append(list, p.leave(f))
	}
	p.mu.Unlock()
	for _, v := range list {
		v.done(v.err)
	}
}
