package hub

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// maxSegments is how many stores one write gets; every transport can carry as many.
const maxSegments = 8192

// outgoing is a chunk that its room has begun and not settled. Its bytes leave in one write with the chunk's
// notification, or in several parts, perhaps while the engine still computes the rest; then each part has a notification
// of its own and the chunk's counts them, so that it may overtake the last ones. It leaves behind those of earlier chunks,
// and when all parts of these are applied. So no order within a chunk rests on the
// transport; that between chunks rests on the order of a grant's writes, which every transport keeps.
type outgoing struct {
	chunk int
	lease *kv.Lease // the transfer's hold is this chunk's; the request's too, once it is whole
	began time.Time
	all   []piece // of the chunk, in the order of its checksum
	rest  []piece // not handed over yet; the owner's goroutine only
	bytes int     // at the decode side

	// Guarded by sending.mu.
	crc   uint32 // with whole
	parts int    // writes that were handed over as parts; only the owner's goroutine adds
	out   int    // of them, not complete
	whole bool   // every byte was handed over
	note  noteState
	err   error // why it will never be; nothing more is handed over then
}

// noteState is where a chunk's notification is.
type noteState uint8

const (
	noteDue  noteState = iota // not handed over
	noteOut                   // handed over, not complete
	noteDone                  // complete
)

// passed reports that nothing of c holds up the next chunk's notification. Under sending.mu.
func (c *outgoing) passed() bool { return c.err == nil && c.out == 0 && c.note != noteDue }

// begin asks the room for chunk i's turn, or finds it begun; nil if it must not leave.
func (s *sending) begin(i int) *outgoing {
	s.mu.Lock()
	lease := s.bufs[i]
	if k := len(s.begun) - 1; k >= 0 && s.begun[k].chunk == i && !s.begun[k].whole {
		defer s.mu.Unlock()
		return s.begun[k]
	}
	failed := s.last != nil && s.last.chunk == i && !s.last.whole
	s.mu.Unlock()
	if lease == nil {
		s.Drop(i, s.fault("chunk was sent without a buffer, or twice"))
		return nil
	}
	if failed { // the room has heard so, or is about to
		return nil
	}
	if fx := s.room.Load().Apply(room.Event{Kind: room.EvBegin, Chunk: i}); !fx.Has(room.FxWrite) {
		return nil
	}
	s.mu.Lock() // after EvBegin: the room allows a write only when the grant has been bound
	way := s.way
	s.mu.Unlock()
	lease.Grant() // the transfer is the second owner until the chunk settles
	c := &outgoing{chunk: i, lease: lease, began: time.Now(), bytes: way.sizes[i]}
	copies, err := way.copies(s.hub.cfg.Staging, lease, i, s.open.Chunks[i])
	c.all, c.err = inOrder(copies), err
	c.rest, s.last = c.all, c
	s.mu.Lock()
	if !s.ended.IsZero() && c.err == nil { // the room has ended since EvBegin
		c.err = transfer.ErrClosed
	}
	s.begun = append(s.begun, c)
	failed = c.err != nil
	s.mu.Unlock()
	if failed { // the plan's error: the decode side has named a page twice
		s.advance()
		return nil
	}
	return c
}

// part is what of c is not on its way yet and lies in the bytes that are named.
func (s *sending) part(c *outgoing, bytes []transfer.Span, last bool) (now []piece) {
	ready, err := c.staged(bytes, s.hub.cfg.Staging.PageBytes(), s.open.Chunks[c.chunk])
	now, c.rest = cut(c.rest, ready)
	if err == nil && last && len(c.rest) > 0 {
		err = fmt.Errorf("the parts of chunk %d do not add up to it: %d stores are left", c.chunk, len(c.rest))
	}
	if err != nil {
		s.Cancel(s.fault(err.Error()))
	}
	return now
}

// hand posts stores of c, if the room still lives. The last ones make c whole. What is all of c goes with the notification
// in one write; parts go at once, and their sum, which is of the bytes as they are when all have left, is worked
// out while they travel.
func (s *sending) hand(c *outgoing, now []piece, last bool) {
	mem, _ := s.hub.cfg.Staging.Memory()
	if last && c.parts == 0 && len(now) <= maxSegments && s.handWhole(c, mem, now) {
		return
	}
	s.handParts(c, mem, now)
	if !last {
		return
	}
	crc := sum(mem, c.all)
	s.mu.Lock()
	ok := s.finish(c, crc)
	s.mu.Unlock()
	if !ok {
		s.dropBuffer(c.chunk)
		return
	}
	s.advance()
}

// finish makes c whole, false if it must not be. Under mu.
func (s *sending) finish(c *outgoing, crc uint32) bool {
	if c.err != nil {
		return false
	}
	c.crc, c.whole = crc, true
	s.bufs[c.chunk] = nil // the chunk's own now
	return true
}

// handWhole posts all of c with its notification, false if that must wait for others or c has failed.
func (s *sending) handWhole(c *outgoing, mem []byte, all []piece) bool {
	s.mu.Lock()
	ok := s.turn(c)
	s.mu.Unlock()
	if !ok {
		return false
	}
	crc, segs := sum(mem, c.all), segments(mem, all)
	s.mu.Lock()
	if !s.finish(c, crc) {
		s.mu.Unlock()
		return false
	}
	w, out := s.notify(c, segs), s.ss.out
	s.mu.Unlock()
	out.send(w)
	return true
}

// notify puts c's notification, with segs, in its place behind those of earlier chunks; outQueue.send must follow, without
// the lock. Who decided that it may leave has not let go of mu since, or a later chunk's could come before it. Under mu.
func (s *sending) notify(c *outgoing, segs []transfer.Segment) *queued {
	c.note = noteOut
	w := s.queued(s.ss.out, segs, s.note(c), func(err error) { s.noted(c, err) })
	s.ss.out.add(w)
	return w
}

// handParts posts stores that are some of c, or all of it before its turn.
func (s *sending) handParts(c *outgoing, mem []byte, now []piece) {
	parts := slices.Collect(slices.Chunk(now, maxSegments))
	s.mu.Lock()
	if c.err != nil {
		s.mu.Unlock()
		return
	}
	first, out := c.parts, s.ss.out
	if first+len(parts) > maxParts {
		s.mu.Unlock()
		s.Cancel(s.fault(fmt.Sprintf("chunk %d leaves in more than %d parts", c.chunk, maxParts)))
		return
	}
	c.parts += len(parts)
	c.out += len(parts)
	s.mu.Unlock()
	for k, p := range parts {
		note := partNote{Key: s.open.Key, Index: uint32(c.chunk), Part: uint32(first + k), Runs: runsOf(joined(p))}
		out.push(s.queued(out, segments(mem, p), note.encode(), func(err error) { s.applied(c, err) }))
	}
}

func (s *sending) queued(out *outQueue, segs []transfer.Segment, note []byte, done func(error)) *queued {
	return &queued{s: s, write: transfer.Write{Grant: s.grant, Key: s.open.Key, Segments: segs, Notify: note,
		Done: func(err error) {
			done(err)
			out.wake()
		},
	}}
}

// applied ends the write of a part.
func (s *sending) applied(c *outgoing, err error) {
	s.mu.Lock()
	c.out--
	if c.err == nil {
		c.err = err
	}
	s.mu.Unlock()
	s.advance()
}

// noted ends the write of the notification.
func (s *sending) noted(c *outgoing, err error) {
	s.mu.Lock()
	c.note = noteDone
	if c.err == nil {
		c.err = err
	}
	s.mu.Unlock()
	s.advance()
}

// advance posts the notifications whose turn it is, and settles the chunks of which no write is outstanding and none will be.
func (s *sending) advance() {
	s.mu.Lock()
	due, over := s.due()
	notes, ss := make([]*queued, len(due)), s.ss
	for k, c := range due {
		notes[k] = s.notify(c, nil)
	}
	s.mu.Unlock()
	for _, c := range over {
		s.settle(c, c.err)
	}
	for _, w := range notes {
		ss.out.send(w)
	}
}

// turn reports whether c's notification may leave. Under mu.
func (s *sending) turn(c *outgoing) bool {
	for _, b := range s.begun {
		if b == c {
			return true
		}
		if !b.passed() {
			return false
		}
	}
	return false // settled
}

// due takes out of begun what is over, and names the chunks whose notification is to leave now, in order. Under mu.
func (s *sending) due() (notes, over []*outgoing) {
	blocked := false
	s.begun = slices.DeleteFunc(s.begun, func(c *outgoing) bool {
		if c.err == nil && c.whole && c.note == noteDue && !blocked {
			c.note = noteOut
			notes = append(notes, c)
		}
		blocked = blocked || !c.passed()
		if c.out > 0 || c.note == noteOut || c.err == nil && c.note == noteDue {
			return false
		}
		over = append(over, c)
		return true
	})
	return notes, over
}

// end is the room's end: no chunk goes on. Those without an outstanding write settle with the events
// it returns, the others when they have none. Runs under the room's lock.
func (s *sending) end() (follow []room.Event) {
	s.mu.Lock()
	s.ended = time.Now()
	for _, c := range s.begun {
		if c.err == nil && c.note == noteDue {
			c.err = transfer.ErrClosed
		}
	}
	_, over := s.due()
	s.mu.Unlock()
	for _, c := range over {
		s.letGo(c)
		follow = append(follow, s.settled(c, c.err))
	}
	return follow
}

func (s *sending) note(c *outgoing) []byte {
	return chunkNote{Key: s.open.Key, Index: uint32(c.chunk), Count: uint32(len(s.open.Chunks)), Bytes: uint32(c.bytes), CRC: c.crc, Parts: uint32(c.parts)}.encode()
}

// fault is the cause of a room whose scheduler did what it must not.
func (s *sending) fault(detail string) *room.Cause {
	return &room.Cause{Code: room.CodeInternal, Side: room.SideSender, Key: s.open.Key, Detail: detail}
}

// staged translates ranges of a chunk of size bytes into ranges of the staging memory, ascending.
func (c *outgoing) staged(bytes []transfer.Span, pageBytes, size int) ([]kv.Range, error) {
	var out []kv.Range
	per := uint64(pageBytes)
	for _, b := range bytes {
		if b.Off > uint64(size) || b.Len > uint64(size)-b.Off {
			return nil, fmt.Errorf("a part of chunk %d with bytes [%d,+%d), of %d", c.chunk, b.Off, b.Len, size)
		}
		for b.Len > 0 {
			at := b.Off % per
			n := min(b.Len, per-at)
			out = append(out, kv.Range{Off: uint64(c.lease.Pages()[b.Off/per])*per + at, Len: n})
			b.Off, b.Len = b.Off+n, b.Len-n
		}
	}
	slices.SortFunc(out, func(a, b kv.Range) int { return cmp.Compare(a.Off, b.Off) })
	return out, nil
}
