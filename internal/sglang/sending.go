package sglang

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer/nixl"
)

// Sending is one room of a [Prefill]. Its owner must call Release.
type Sending struct {
	p     *Prefill
	open  OpenSend
	total int // pages of all chunks
	room  atomic.Pointer[room.Room]

	mu      sync.Mutex
	a       *decodeAgent // set by bind, once, with meta
	meta    *Metadata
	offset  []int // page number of each chunk's first page, with meta
	ackTo   Abort // of the latest abort
	owes    bool  // the decode manager must hear of the failure
	watch   *time.Timer
	skipped int // pages of the prefix, with meta
}

// mismatch compares an offer with the request.
func (s *Sending) mismatch(m *Metadata) *room.Cause {
	size := s.p.mem.PageSize
	skip := m.Prefix / size
	if m.Prefix%size != 0 || skip > s.total || len(m.Pages) != s.total-skip {
		return &room.Cause{Code: room.CodeMismatch, Side: room.SideSender, Key: room.Key{Room: s.open.Room}, Detail: fmt.Sprintf(
			"the decode worker offers %d pages after a prefix of %d tokens, the prompt has %d pages of %d tokens: both sides must see the same prompt", len(m.Pages), m.Prefix, s.total, size)}
	}
	return nil
}

// bind takes the first offer; false if there is one already.
func (s *Sending) bind(a *decodeAgent, m *Metadata) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.a != nil {
		return false
	}
	s.a, s.meta, s.skipped = a, m, m.Prefix/s.p.mem.PageSize
	at := 0
	for _, n := range s.open.Chunks {
		s.offset = append(s.offset, at)
		at += n
	}
	return true
}

func (s *Sending) boundToOther(a *decodeAgent) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.a != nil && s.a != a
}

func (s *Sending) peer() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.a == nil {
		return ""
	}
	return s.a.at.Addr()
}

// Send hands over the next chunk: its page slots, as many as Open said, computed and not changed until the room has
// drained. It never blocks. false: the chunk is not sent, because the room has ended.
func (s *Sending) Send(chunk int, pages []int) bool {
	r := s.room.Load()
	if chunk < 0 || chunk >= len(s.open.Chunks) || len(pages) != s.open.Chunks[chunk] {
		s.Cancel(&room.Cause{Code: room.CodeInternal, Detail: fmt.Sprintf("chunk %d of %d with %d pages", chunk, len(s.open.Chunks), len(pages))})
		return false
	}
	for _, page := range pages {
		if page < 0 || page >= s.p.mem.Slots {
			s.Cancel(&room.Cause{Code: room.CodeInternal, Detail: fmt.Sprintf("chunk %d names page %d of %d", chunk, page, s.p.mem.Slots)})
			return false
		}
	}
	if !r.Apply(room.Event{Kind: room.EvBegin, Chunk: chunk}).Has(room.FxWrite) {
		return false
	}
	if !s.a.post(&write{s: s, chunk: chunk, blocks: s.blocks(chunk, pages)}) {
		s.over(room.Event{Kind: room.EvSettleError, Chunk: chunk, Cause: lost(s.peer(), errAgentEnded)})
		return false
	}
	return true
}

// blocks of one chunk: its pages behind the prefix in every KV buffer, and with the last chunk the aux record. The grant is there.
func (s *Sending) blocks(chunk int, pages []int) []nixl.Block {
	m, reg := s.p.mem, s.a.reg
	item := uint64(m.ItemLen)
	var out []nixl.Block
	for b := range m.Buffers {
		for i, page := range pages {
			at := s.offset[chunk] + i - s.skipped
			if at < 0 {
				continue
			}
			out = append(out, nixl.Block{From: m.kvOff[b] + uint64(page)*item, To: reg.KV[b] + uint64(s.meta.Pages[at])*item, Len: item})
		}
	}
	if chunk == len(s.open.Chunks)-1 {
		if m.RoomBuffer >= 0 {
			m.setRoom(s.open.Row, s.open.Room)
		}
		for b, n := range m.AuxItemLens {
			out = append(out, nixl.Block{From: m.auxOff[b] + uint64(s.open.Row*n), To: reg.Aux[b] + uint64(s.meta.Aux)*uint64(n), Len: uint64(n)})
		}
	}
	return out
}

// settled: every byte of the chunk is at the decode worker.
func (s *Sending) settled(chunk int) {
	s.over(room.Event{Kind: room.EvSettle, Chunk: chunk})
}

// over applies the end of a write; a failure that waited for it is told.
func (s *Sending) over(e room.Event) {
	r := s.room.Load()
	r.Apply(e)
	s.tellFailed(r)
}

// expectAck notes who asks for an ack; false if the room belongs to another decode manager.
func (s *Sending) expectAck(v *Abort) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.a != nil && s.a.at != v.Endpoint {
		return false
	}
	s.ackTo = *v
	return true
}

// sendAck runs under the room's lock.
func (s *Sending) sendAck(r *room.Room) {
	s.mu.Lock()
	v := s.ackTo
	s.mu.Unlock()
	s.p.ack(v.Endpoint, r.Key().Room, v.Gen, v.HasGen)
}

func (s *Sending) oweFailed() {
	s.mu.Lock()
	s.owes = true
	s.mu.Unlock()
}

// tellFailed sends the failure that is owed, once, if somebody is known to hear it. A decode worker may take it for the
// permission to reuse its pages, so it hears of it when nothing is outstanding any more.
func (s *Sending) tellFailed(r *room.Room) {
	if r.State() != room.StateFailed || r.Drain().Pending() {
		return
	}
	s.mu.Lock()
	owes, a := s.owes, s.a
	if a != nil {
		s.owes = false
	}
	s.mu.Unlock()
	if owes && a != nil {
		a.say((&Status{Room: r.Key().Room, Status: int(room.StateFailed), Reason: r.Cause().Error()}).Encode())
	}
}

func (s *Sending) tell(v *Status) {
	s.mu.Lock()
	a := s.a
	s.mu.Unlock()
	if a != nil {
		a.say(v.Encode())
	}
}

// ended bounds the wait for writes that are still outstanding: a decode worker that is stopped would never take them.
// Under the room's lock.
func (s *Sending) ended(r *room.Room) {
	if !r.Drain().Pending() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.a
	s.watch = time.AfterFunc(s.p.cfg.Stall, func() {
		if r.Drain().Pending() {
			a.fail(fmt.Errorf("a write of a failed room has not ended within %v: the decode worker is stopped or cut off", s.p.cfg.Stall))
		}
	})
}

// forget takes the room out of its agent. Under the room's lock.
func (s *Sending) forget() {
	s.mu.Lock()
	a := s.a
	if s.watch != nil {
		s.watch.Stop()
	}
	s.mu.Unlock()
	if a != nil {
		a.remove(s)
	}
}

// Granted is closed when a decode worker has offered its pages, or the room has ended.
func (s *Sending) Granted() <-chan struct{} { return s.room.Load().Granted() }

// Done is closed when the room has ended.
func (s *Sending) Done() <-chan struct{} { return s.room.Load().Done() }

// State of the room.
func (s *Sending) State() room.State { return s.room.Load().State() }

// Drained reports that no write of the room is outstanding: its pages may be computed anew.
func (s *Sending) Drained() bool {
	r := s.room.Load()
	return r.State().Terminal() && !r.Drain().Pending()
}

// Prefix is the number of leading pages that the decode worker has already; 0 before Granted.
func (s *Sending) Prefix() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.skipped
}

// Err is the cause of a room that failed, else nil.
func (s *Sending) Err() error {
	if c := s.room.Load().Cause(); c != nil {
		return c
	}
	return nil
}

// Cancel ends the room from this side; the decode worker is told.
func (s *Sending) Cancel(c *room.Cause) {
	s.room.Load().Apply(room.Event{Kind: room.EvCancel, Cause: c})
}

// Release lets go of the room: the last call. Writes that are outstanding go on; see Drained.
func (s *Sending) Release() { s.room.Load().Apply(room.Event{Kind: room.EvRelease}) }
