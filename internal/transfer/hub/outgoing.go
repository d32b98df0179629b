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

// outgoing is a chunk that its room has begun and not settled. Its bytes leave in one write or several, perhaps
// while the engine still computes the rest. The notification leaves when all of them are applied and those of
// earlier chunks have left, so that neither order rests on the transport.
type outgoing struct {
	chunk int
	lease *kv.Lease // the transfer's hold is this chunk's; the request's too, once it is whole
	began time.Time
	all   []kv.Copy // of the chunk, in the order of its checksum
	rest  []kv.Copy // not handed over yet; the owner's goroutine only
	bytes int       // at the decode side

	// Guarded by sending.mu.
	crc   uint32 // with whole
	out   int    // writes of bytes that are not complete
	whole bool   // every byte was handed over
	err   error  // why it will never be; nothing more is handed over then
}

// begin asks the room for chunk i's turn, or finds it begun; nil if it must not leave.
func (s *sending) begin(i int) *outgoing {
	s.mu.Lock()
	lease := s.bufs[i]
	if k := len(s.begun) - 1; k >= 0 && s.begun[k].chunk == i && !s.begun[k].whole {
		defer s.mu.Unlock()
		return s.begun[k]
	}
	s.mu.Unlock()
	if lease == nil {
		s.Drop(i, s.fault("chunk was sent without a buffer, or twice"))
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
	c.all, c.err = way.copies(s.hub.cfg.Staging, lease, i, s.open.Chunks[i])
	c.rest = c.all
	s.mu.Lock()
	if s.over && c.err == nil { // the room has ended since EvBegin
		c.err = transfer.ErrClosed
	}
	s.begun = append(s.begun, c)
	failed := c.err != nil
	s.mu.Unlock()
	if failed { // the plan's error: the decode side has named a page twice
		s.advance()
		return nil
	}
	return c
}

// part is what of c is not on its way yet and lies in the bytes that are named.
func (s *sending) part(c *outgoing, bytes []transfer.Span, last bool) (now []kv.Copy) {
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

// hand posts stores of c, if the room still lives. The last ones make c whole.
func (s *sending) hand(c *outgoing, now []kv.Copy, last bool) {
	mem, _ := s.hub.cfg.Staging.Memory()
	crc := uint32(0)
	if last {
		crc = sum(mem, c.all)
	}
	var note []byte
	parts := slices.Collect(slices.Chunk(segments(mem, now), maxSegments))
	s.mu.Lock()
	if c.err != nil {
		s.mu.Unlock()
		if last {
			s.dropBuffer(c.chunk)
		}
		return
	}
	if last {
		c.crc, c.whole = crc, true
		s.bufs[c.chunk] = nil // the chunk's own now
	}
	if c.whole && c.out == 0 && s.begun[0] == c && len(parts) <= 1 {
		note, s.begun = s.note(c), s.begun[1:]
	} else {
		c.out += len(parts)
	}
	out := s.ss.out
	s.mu.Unlock()
	if note != nil {
		s.push(out, slices.Concat(parts...), note, func(err error) { s.settle(c, err) })
		return
	}
	for _, p := range parts {
		s.push(out, p, nil, func(err error) { s.applied(c, err) })
	}
	if last && len(parts) == 0 {
		s.advance()
	}
}

func (s *sending) push(out *outQueue, segs []transfer.Segment, note []byte, done func(error)) {
	out.push(&queued{s: s, write: transfer.Write{Grant: s.grant, Key: s.open.Key, Segments: segs, Notify: note,
		Done: func(err error) {
			done(err)
			out.wake()
		},
	}})
}

// applied ends one write of bytes.
func (s *sending) applied(c *outgoing, err error) {
	s.mu.Lock()
	c.out--
	if c.err == nil {
		c.err = err
	}
	s.mu.Unlock()
	s.advance()
}

// advance posts the notifications whose turn it is, and settles chunks that will never have one.
func (s *sending) advance() {
	s.mu.Lock()
	notes, dead := s.due()
	ss := s.ss
	s.mu.Unlock()
	for _, c := range dead {
		s.settle(c, c.err)
	}
	for _, c := range notes {
		s.push(ss.out, nil, s.note(c), func(err error) { s.settle(c, err) })
	}
}

// due takes out of begun what has no write of bytes outstanding and is complete, in order, or failed. Under mu.
func (s *sending) due() (notes, dead []*outgoing) {
	blocked := false
	s.begun = slices.DeleteFunc(s.begun, func(c *outgoing) bool {
		switch {
		case c.out > 0:
		case c.err != nil:
			dead, blocked = append(dead, c), true
			return true
		case c.whole && !blocked:
			notes = append(notes, c)
			return true
		}
		blocked = true
		return false
	})
	return notes, dead
}

// end is the room's end: no chunk goes on. Those without an outstanding write settle with the events
// it returns, the others when they have none. Runs under the room's lock.
func (s *sending) end() (follow []room.Event) {
	s.mu.Lock()
	s.over = true
	for _, c := range s.begun {
		if c.err == nil {
			c.err = transfer.ErrClosed
		}
	}
	_, dead := s.due()
	s.mu.Unlock()
	for _, c := range dead {
		s.letGo(c)
		follow = append(follow, s.settled(c, c.err))
	}
	return follow
}

func (s *sending) note(c *outgoing) []byte {
	return chunkNote{Key: s.open.Key, Index: uint32(c.chunk), Count: uint32(len(s.open.Chunks)), Bytes: uint32(c.bytes), CRC: c.crc}.encode()
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
