package nixl

// work is what the pump does next.
type work struct {
	f    *flight
	id   uint64
	slot int  // of the buffer, or -1
	note bool // only the notification
}

// pump asks for entry and hands pieces to the helper until the peer fails. Then it waits for the
// helper's death and settles what is left.
func (p *peer) pump() {
	var j job
	var buf []byte
	for {
		w, ok := p.next()
		if !ok {
			break
		}
		j = job{ID: w.id, Blocks: j.Blocks[:0]}
		if w.note {
			j.Note = noteOf(p.nonce, w.f.seq)
		} else {
			p.cut(&j, w)
			p.handOut(&j, w)
		}
		buf = appendWrite(buf[:0], &j)
		if err := p.child.send(buf); err != nil {
			p.child.kill(err, false) // its end fails the peer and says why
			break
		}
	}
	<-p.down
	p.child.wait()
	_ = p.tc.Close()
	p.unmap()
	for _, v := range p.drain() {
		v.done(v.err)
	}
}

// next waits for something to do. It sends the questions that may be asked on the way.
func (p *peer) next() (work, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		if p.stopped {
			return work{}, false
		}
		for f := p.nextToAsk(); f != nil; f = p.nextToAsk() {
			p.out.with(func(b []byte) []byte { return appendEnter(b, f.seq, &f.Write) })
		}
		if len(p.pieces) < maxPieces {
			if w, ok := p.take(); ok {
				return w, true
			}
		}
		p.wake.Wait()
	}
}

// take registers the next piece: notifications first, they end writes. Under mu.
func (p *peer) take() (work, bool) {
	w := work{slot: -1}
	switch {
	case len(p.notes) > 0:
		w.f, w.note = p.notes[0], true
		p.notes = p.notes[:copy(p.notes, p.notes[1:])]
		w.f.state = stateLanding
	case len(p.ready) > 0:
		w.f = p.ready[0]
		if !p.direct(w.f) {
			n := len(p.free)
			if n == 0 {
				return work{}, false
			}
			w.slot, p.free = p.free[n-1], p.free[:n-1]
		}
		p.ready = p.ready[:copy(p.ready, p.ready[1:])]
	default:
		return work{}, false
	}
	p.pieceSeq++
	w.id = p.pieceSeq
	w.f.pieces++ // from here on nobody else ends the flight
	p.pieces[w.id] = piece{f: w.f, slot: w.slot}
	return w, true
}

// direct reports whether the next byte of f lies in registered memory. It skips empty segments.
func (p *peer) direct(f *flight) bool {
	for f.off == len(f.Segments[f.seg].Src) { // there is a byte left
		f.seg, f.off = f.seg+1, 0
	}
	_, in := offsetIn(p.source, f.Segments[f.seg].Src)
	return in
}

// cut makes the blocks of the next piece of w.f and moves its cursor; it copies what needs to be
// copied. Without the lock: the flight is the pump's.
func (p *peer) cut(j *job, w work) {
	if w.slot >= 0 {
		if p.source != nil {
			j.Region = 1
		}
		p.cutCopied(j, w)
		return
	}
	f, budget := w.f, directBytes
	for f.seg < len(f.Segments) && budget > 0 && len(j.Blocks) < pieceBlocks {
		s := &f.Segments[f.seg]
		at, in := offsetIn(p.source, s.Src)
		if len(s.Src) > 0 && !in {
			break
		}
		n := min(len(s.Src)-f.off, budget)
		b := block{From: at + uint64(f.off), To: s.Off + uint64(f.off), Len: uint64(n)}
		whole := p.block > 0 && b.Len == p.block && b.From%p.block == 0 && b.To%p.block == 0
		if len(j.Blocks) == 0 {
			j.Index = whole
		} else if whole != j.Index && n > 0 {
			break
		}
		j.add(b)
		budget -= n
		f.advance(n)
	}
}

// cutCopied gathers bytes in a slot of the buffer.
func (p *peer) cutCopied(j *job, w work) {
	f, at := w.f, w.slot*slotBytes
	end := at + slotBytes
	for f.seg < len(f.Segments) && at < end && len(j.Blocks) < pieceBlocks {
		s := &f.Segments[f.seg]
		if _, in := offsetIn(p.source, s.Src); in {
			break
		}
		n := copy(p.buffer[at:end], s.Src[f.off:])
		j.add(block{From: uint64(at), To: s.Off + uint64(f.off), Len: uint64(n)})
		at += n
		f.advance(n)
	}
}

// add appends b, or lengthens the last block where b continues it on both sides.
func (j *job) add(b block) {
	if b.Len == 0 {
		return
	}
	if n := len(j.Blocks); n > 0 && !j.Index {
		l := &j.Blocks[n-1]
		if l.From+l.Len == b.From && l.To+l.Len == b.To {
			l.Len += b.Len
			return
		}
	}
	j.Blocks = append(j.Blocks, b)
}

// advance moves the cursor.
func (f *flight) advance(n int) {
	f.sent += uint64(n)
	if f.off += n; f.off == len(f.Segments[f.seg].Src) {
		f.seg, f.off = f.seg+1, 0
	}
}

// handOut puts the flight back in turn, or ends its storing: a write of one piece carries its
// notification with it.
func (p *peer) handOut(j *job, w work) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := w.f
	switch {
	case f.sent < f.total && !f.cut:
		p.ready = append(p.ready, f)
	case f.sent == f.total && !f.cut && f.whole(j):
		j.Note = noteOf(p.nonce, f.seq)
		f.state = stateLanding
	}
}

// whole reports whether j is all of f.
func (f *flight) whole(j *job) bool {
	var n uint64
	for _, b := range j.Blocks {
		n += b.Len
	}
	return n == f.total
}

// drain empties the queues with the peer's error. The helper is dead.
func (p *peer) drain() []verdict {
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []verdict
	for _, f := range p.flights {
		list = append(list, verdict{f.Done, p.err})
	}
	for _, ln := range p.byGrant {
		for _, f := range ln.queue {
			list = append(list, verdict{f.Done, p.err})
		}
	}
	p.lines = lines{}
	p.lines.init()
	clear(p.pieces)
	return list
}
