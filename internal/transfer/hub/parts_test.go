package hub_test

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/hub"
)

// handed is a room of the decode side whose notifications the test makes itself.
type handed struct {
	*world
	key room.Key
	r   transfer.Receiving
	s   transfer.Sending
	g   transfer.GrantID
}

// newHanded gives a function that opens one room after the other, with chunks of chunkBytes.
func newHanded(t *testing.T, o options) (*world, func(chunks int) *handed) {
	t.Helper()
	grants, id := make(chan tapped, 8), uint64(0)
	o.handler = func(h *hub.Senders) session.ServerHandler { return tap{h, grants} }
	w := newWorld(t, o)
	return w, func(chunks int) *handed {
		id++
		h := &handed{world: w, key: room.Key{Room: id}, r: w.receive(id, chunks), s: w.send(id, chunks)}
		await(t, "grant", h.s.Granted())
		h.g = await(t, "grant", grants).grant.ID
		for i := range chunks {
			for _, p := range h.r.Chunk(i) {
				for k := range p {
					p[k] = byte(uint64(k) ^ id ^ uint64(i)<<3)
				}
			}
		}
		return h
	}
}

func (h *handed) land(note []byte) { h.receivers.Landed(h.g, note) }

// whole is chunk i's notification, with that many parts.
func (h *handed) whole(i, count, parts int) []byte {
	return hub.WholeNote(h.key, i, count, parts, h.r.Chunk(i))
}

func (h *handed) end() {
	h.r.Release()
	h.s.Release()
}

// quarters are the notes of a chunk in four parts, the last of which names only some of its bytes, and that of the chunk.
func (h *handed) quarters() [][]byte {
	return [][]byte{
		hub.PartNote(h.key, 0, 0, [4]uint32{0, 1024, 0, 1}),
		hub.PartNote(h.key, 0, 1, [4]uint32{1024, 10, 20, 51}), // every other ten bytes, to 2034
		hub.PartNote(h.key, 0, 2),
		hub.PartNote(h.key, 0, 3, [4]uint32{4095, 1, 0, 1}, [4]uint32{2500, 100, 100, 2}),
		h.whole(0, 1, 4),
	}
}

// TestPartsLandInAnyOrder: the chunk lands with the last of its notifications, whichever that is, and not before.
func TestPartsLandInAnyOrder(t *testing.T) {
	w, open := newHanded(t, options{})
	var orders [][]int
	var permute func(done, left []int)
	permute = func(done, left []int) {
		if len(left) == 0 {
			orders = append(orders, append([]int(nil), done...))
		}
		for k := range left {
			rest := append(append([]int(nil), left[:k]...), left[k+1:]...)
			permute(append(done[:len(done):len(done)], left[k]), rest)
		}
	}
	permute(nil, []int{0, 1, 2, 3, 4})
	for _, order := range orders {
		h := open(1)
		notes := h.quarters()
		for k, n := range order {
			if st := h.r.State(); st != room.StateWaitingForInput {
				t.Fatalf("%v after %d notifications of %v: %v", st, k, order, h.r.Err())
			}
			h.land(notes[n])
		}
		if got, ok := <-h.r.Landed(); !ok || got != 0 || h.r.State() != room.StateSuccess {
			t.Fatalf("order %v: %v, %v", order, h.r.State(), h.r.Err())
		}
		h.end()
	}
	w.drained()
}

// TestPartsLandAtOnce: notifications from as many goroutines at the same time; the chunk lands once.
func TestPartsLandAtOnce(t *testing.T) {
	w, open := newHanded(t, options{})
	for range 50 {
		h := open(1)
		var all sync.WaitGroup
		for _, n := range h.quarters() {
			all.Go(func() { h.land(n) })
		}
		all.Wait()
		if got, ok := <-h.r.Landed(); !ok || got != 0 || h.r.State() != room.StateSuccess {
			t.Fatalf("%v, %v", h.r.State(), h.r.Err())
		}
		h.end()
	}
	w.drained()
}

// TestPartsAreSummedWhenTheyLand: bytes that were wrong when their part landed are refused, though they are right when the chunk is
// whole; and so are those that no part named and that are wrong then.
func TestPartsAreSummedWhenTheyLand(t *testing.T) {
	for name, at := range map[string]int{"named": 7, "in a run": 1024 + 20*50 + 9, "not named": 2050} {
		t.Run(name, func(t *testing.T) {
			w, open := newHanded(t, options{})
			h := open(1)
			notes := h.quarters()
			b := &h.r.Chunk(0)[at/pageBytes][at%pageBytes]
			*b ^= 1
			for _, n := range notes[:4] {
				h.land(n)
			}
			if name != "not named" {
				*b ^= 1
			}
			h.land(notes[4])
			failed(t, "receiver", h.r.State(), h.r.Err(), room.CodeTransferFailed)
			if !strings.Contains(fmt.Sprint(h.r.Err()), "checksum of chunk 0") {
				t.Error(h.r.Err())
			}
			if i, ok := <-h.r.Landed(); ok {
				t.Errorf("chunk %d was delivered", i)
			}
			h.end()
			w.drained()
		})
	}
}

// TestNotificationsThatAreWrong: of another room or life, of chunks or bytes that are none, twice, or in other numbers than were said: the room
// fails, and no chunk is delivered that was not whole.
func TestNotificationsThatAreWrong(t *testing.T) {
	quarter := [4]uint32{0, 1024, 0, 1}
	for name, c := range map[string]struct {
		notes  func(h *handed) [][]byte
		code   room.Code
		detail string
		lands  int // chunks that were delivered before
	}{
		"another room": {func(h *handed) [][]byte { return [][]byte{hub.PartNote(room.Key{Room: 99}, 0, 0, quarter)} }, room.CodeTransferFailed, "of room 99", 0},
		"another life": {func(h *handed) [][]byte {
			return [][]byte{hub.PartNote(room.Key{Room: h.key.Room, Gen: 1}, 0, 0, quarter)}
		}, room.CodeTransferFailed, "part of a chunk of room", 0},
		"no such chunk": {func(h *handed) [][]byte { return [][]byte{hub.PartNote(h.key, 2, 0, quarter)} }, room.CodeTransferFailed, "part of chunk 2, expected 2", 0},
		"far away":      {func(h *handed) [][]byte { return [][]byte{hub.PartNote(h.key, 1<<32-1, 0, quarter)} }, room.CodeTransferFailed, "expected 2", 0},
		"past the end": {func(h *handed) [][]byte {
			return [][]byte{hub.PartNote(h.key, 0, 0, [4]uint32{0, chunkBytes + 1, 0, 1})}
		}, room.CodeProtocol, "none of the chunk's 4096", 0},
		"run past it": {func(h *handed) [][]byte {
			return [][]byte{hub.PartNote(h.key, 0, 0, [4]uint32{0, 1, 1 << 31, 1<<32 - 1})}
		}, room.CodeProtocol, "none of the chunk's 4096", 0},
		"part twice": {func(h *handed) [][]byte { return [][]byte{hub.PartNote(h.key, 0, 5), hub.PartNote(h.key, 0, 5)} }, room.CodeProtocol, "part 5 of chunk 0 has landed before", 0},
		"bytes twice": {func(h *handed) [][]byte {
			return [][]byte{hub.PartNote(h.key, 0, 0, quarter), hub.PartNote(h.key, 0, 1, [4]uint32{1023, 9, 0, 1})}
		}, room.CodeProtocol, "have come before", 0},
		"twice in a note": {func(h *handed) [][]byte { return [][]byte{hub.PartNote(h.key, 0, 0, quarter, quarter)} }, room.CodeProtocol, "have come before", 0},
		"chunk twice":     {func(h *handed) [][]byte { return [][]byte{h.whole(0, 2, 1), h.whole(0, 2, 1)} }, room.CodeProtocol, "chunk 0 was notified twice", 0},
		"other parts":     {func(h *handed) [][]byte { return [][]byte{h.whole(0, 2, 1), hub.PartNote(h.key, 0, 1)} }, room.CodeTransferFailed, "other parts than the 1", 0},
		"more parts": {func(h *handed) [][]byte {
			return [][]byte{hub.PartNote(h.key, 0, 0), hub.PartNote(h.key, 0, 1), h.whole(0, 2, 1)}
		}, room.CodeTransferFailed, "other parts than the 1", 0},
		"late part":    {func(h *handed) [][]byte { return [][]byte{h.whole(0, 2, 0), hub.PartNote(h.key, 0, 0)} }, room.CodeProtocol, "or its chunk has", 1},
		"landed again": {func(h *handed) [][]byte { return [][]byte{h.whole(0, 2, 0), h.whole(0, 2, 0)} }, room.CodeProtocol, "", 1},
		"out of order": {func(h *handed) [][]byte { return [][]byte{hub.PartNote(h.key, 0, 0, quarter), h.whole(1, 2, 0)} }, room.CodeProtocol, "", 0},
		"wrong count":  {func(h *handed) [][]byte { return [][]byte{h.whole(0, 3, 0)} }, room.CodeTransferFailed, "expected 2 chunks", 0},
		"cut off":      {func(h *handed) [][]byte { n := hub.PartNote(h.key, 0, 0, quarter); return [][]byte{n[:len(n)-1]} }, room.CodeTransferFailed, "malformed", 0},
		"first version": {func(h *handed) [][]byte {
			n := bytes.Replace(h.whole(0, 2, 0), []byte("BNK2"), []byte("BNK1"), 1)
			return [][]byte{n[:len(n)-4]}
		}, room.CodeTransferFailed, "malformed", 0},
	} {
		t.Run(name, func(t *testing.T) {
			w, open := newHanded(t, options{})
			h := open(2)
			for _, n := range c.notes(h) {
				h.land(n)
			}
			failed(t, "receiver", h.r.State(), h.r.Err(), c.code)
			if !strings.Contains(fmt.Sprint(h.r.Err()), c.detail) {
				t.Errorf("%v does not tell %q", h.r.Err(), c.detail)
			}
			n := 0
			for i := range h.r.Landed() {
				if i != n {
					t.Errorf("chunk %d was delivered after %d others", i, n)
				}
				n++
			}
			if n != c.lands {
				t.Errorf("%d chunks were delivered, want %d", n, c.lands)
			}
			h.end()
			w.drained()
		})
	}
}

// TestPartsOfAnEndedRoom are counted and change nothing: before its grant is revoked everywhere, and after.
func TestPartsOfAnEndedRoom(t *testing.T) {
	reg := prometheus.NewRegistry()
	w, open := newHanded(t, options{metrics: reg})
	h := open(1)
	stray := func() float64 { return counted(t, reg, "baton_stray_messages_total") }
	h.r.Cancel(gone())
	before := stray()
	h.land(hub.PartNote(h.key, 0, 0, [4]uint32{0, 1024, 0, 1}))
	h.land(hub.PartNote(h.key, 7, 0)) // would be refused in a room that lives
	if n := stray(); n < before+2 {
		t.Errorf("%v strays, want 2 more than %v", n, before)
	}
	h.end()
	w.drained()
	w.receivers.Flush()
	before = stray()
	h.land(hub.PartNote(h.key, 0, 0))
	if n := stray(); n < before+1 {
		t.Errorf("%v strays, want 1 more than %v", n, before)
	}
	failed(t, "receiver", h.r.State(), h.r.Err(), room.CodeClientGone)
}

// TestManyPieces: a peer that names single bytes costs no more than it may; the chunk is right all the same.
func TestManyPieces(t *testing.T) {
	const chunk = 32 * pageBytes
	grants := make(chan tapped, 8)
	w := newWorld(t, options{handler: func(h *hub.Senders) session.ServerHandler { return tap{h, grants} }})
	key := room.Key{Room: 1}
	r, s := w.receiveSizes(key.Room, time.Minute, chunk), w.sendSizes(key.Room, time.Minute, chunk)
	await(t, "grant", s.Granted())
	g := await(t, "grant", grants).grant.ID
	w.receivers.Landed(g, hub.PartNote(key, 0, 0, [4]uint32{0, 1, 2, chunk / 2}))
	if left := hub.Unsummed(r, 0); left != chunk-hub.MaxPieces {
		t.Errorf("%d bytes are not summed, want all but %d", left, hub.MaxPieces)
	}
	w.receivers.Landed(g, hub.WholeNote(key, 0, 1, 1, r.Chunk(0)))
	if i, ok := <-r.Landed(); !ok || i != 0 {
		t.Errorf("%v, %v", r.State(), r.Err())
	}
	r.Release()
	s.Release()
	w.drained()
}

// TestTooManyParts: a chunk can leave byte by byte, but not in more parts than the decode side tells apart.
func TestTooManyParts(t *testing.T) {
	for _, size := range []int{hub.MaxParts, hub.MaxParts + 1} {
		w := newWorld(t, options{})
		r, s := w.receiveSizes(1, time.Minute, size), w.sendSizes(1, time.Minute, size)
		await(t, "grant", s.Granted())
		w.fill(s, 1, 0)
		for k := range size {
			s.SendPart(0, []transfer.Span{{Off: uint64(k), Len: 1}}, k == size-1)
		}
		await(t, "receiver's end", r.Done())
		await(t, "sender's end", s.Done())
		if size > hub.MaxParts {
			failed(t, "sender", s.State(), s.Err(), room.CodeInternal)
			if !strings.Contains(s.Err().Error(), "more than 4096 parts") {
				t.Error(s.Err())
			}
		} else if r.Err() != nil || s.Err() != nil {
			t.Errorf("%v, %v", s.Err(), r.Err())
		} else {
			holds(t, r, 0, 1)
		}
		r.Release()
		s.Release()
		w.drained()
		if st := w.staging.Stats(); !st.Idle() {
			t.Errorf("staging: %+v", st)
		}
	}
}
