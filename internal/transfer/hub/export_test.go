package hub

import (
	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/transfer"
)

const (
	MaxParked = maxParked // bounds grants without a request
	MaxPieces = maxPieces // bounds what is remembered of a chunk's parts
	MaxParts  = maxParts
)

// Indexed counts what the hub's indexes name: rooms under sessions, and grants.
func (h *Receivers) Indexed() (rooms, grants int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, rs := range h.sessions {
		rooms += len(rs.rooms)
	}
	return rooms, len(h.byGrant)
}

// Indexed counts rooms under sessions, and parked grants.
func (h *Senders) Indexed() (rooms, parked int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, ss := range h.sessions {
		rooms += len(ss.rooms)
	}
	return rooms, len(h.parked)
}

// Deliver gives a grant to a room that its owner may have let go of meanwhile.
func (h *Senders) Deliver(s transfer.Sending, sess *session.ServerSession, g session.Grant) {
	h.deliver(s.(*sending).room.Load(), sess, g)
}

// Flush waits until everything that was queued for the hub's goroutine has run.
func (h *Receivers) Flush() {
	done := make(chan struct{})
	h.acts.do(func() { close(done) })
	<-done
}

// KeepBuffer is the end of a Buffer call whose room may have been released meanwhile.
func KeepBuffer(s transfer.Sending, i int, l *kv.Lease) bool { return s.(*sending).keepBuffer(i, l) }

// Note is the notification of a chunk, as the sender of key would write it.
func Note(key room.Key, index, count int, parts [][]byte) []byte {
	n := 0
	for _, p := range parts {
		n += len(p)
	}
	return chunkNote{Key: key, Index: uint32(index), Count: uint32(count), Bytes: uint32(n), CRC: crcOf(parts)}.encode()
}

// FailBegun lets the chunks that were begun and have no write outstanding end with err, up to the moment before their room
// hears of it; then that.
func FailBegun(s transfer.Sending, err error) (rest func()) {
	snd := s.(*sending)
	snd.mu.Lock()
	defer snd.mu.Unlock()
	for _, c := range snd.begun {
		c.err = err
	}
	_, over := snd.due()
	return func() {
		for _, c := range over {
			snd.settle(c, c.err)
		}
	}
}

// Waiting is the number of requests that wait for landing pages.
func (h *Receivers) Waiting() int { return h.alloc.waiting() }

// MakesWhole reports whether a write's notification is a chunk's.
func MakesWhole(notify []byte) bool {
	_, part, err := decodeNote(notify)
	return err == nil && part == nil
}

// PartNote is the notification of a part of a chunk, with runs of {offset, length, stride, count}.
func PartNote(key room.Key, index, part int, runs ...[4]uint32) []byte {
	n := partNote{Key: key, Index: uint32(index), Part: uint32(part)}
	for _, r := range runs {
		n.Runs = append(n.Runs, run{r[0], r[1], r[2], r[3]})
	}
	return n.encode()
}

// WholeNote is Note for a chunk that comes in so many parts.
func WholeNote(key room.Key, index, count, parts int, bytes [][]byte) []byte {
	n, _, _ := decodeNote(Note(key, index, count, bytes))
	n.Parts = uint32(parts)
	return n.encode()
}

// Unsummed is how many bytes of chunk i the decode side would have to sum if it were whole now.
func Unsummed(r transfer.Receiving, i int) (n int) {
	rec := r.(*receiving)
	rec.landing.Lock()
	defer rec.landing.Unlock()
	a, err := rec.arrival(i)
	if err != nil {
		panic(err)
	}
	for _, m := range a.sum.missing() {
		n += int(m.Len)
	}
	return n
}
