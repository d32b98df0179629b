package sglang

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/transfer"
)

// Layout is how a manager's KV and aux memory are cut up: Buffers KV buffers (of dense attention K of every
// layer, then V of every layer) of Slots pages of ItemLen bytes each, and one aux buffer for each of
// AuxItemLens with AuxSlots rows.
type Layout struct {
	Buffers, Slots, ItemLen int
	PageSize                int    // tokens a page
	DType                   string // kv_cache_dtype as the release writes it, "bfloat16"
	AuxItemLens             []int
	AuxSlots                int
	// RoomBuffer is the aux buffer whose row begins with the room number once the record has
	// landed; -1: none, and a record is taken as it is.
	RoomBuffer int
}

// StandardAux is the aux record of the release for a model without extras: hidden is the bytes of its hidden_states row, top
// the entries of a top-logprobs row (128 by default). It returns the item lengths and the buffer of the room.
func StandardAux(top, hidden int) (itemLens []int, roomBuffer int) {
	itemLens = []int{64, 64, 64, 64, 4 * top, 4 * top, 64, 128, hidden, 64}
	return itemLens, len(itemLens) - 1
}

func (l Layout) validate() error {
	switch {
	case l.Buffers < 1 || l.Slots < 1 || l.ItemLen < 1 || l.PageSize < 1 || l.AuxSlots < 1 || len(l.AuxItemLens) < 1:
		return errors.New("sglang: layout: every number must be at least 1, and there must be an aux buffer")
	case l.Buffers > maxBuffers || len(l.AuxItemLens) > maxBuffers || l.Slots > math.MaxInt32 || l.AuxSlots > math.MaxInt32:
		return errors.New("sglang: layout: too many buffers or slots")
	case l.RoomBuffer >= len(l.AuxItemLens) || l.RoomBuffer >= 0 && l.AuxItemLens[l.RoomBuffer] < 8:
		return errors.New("sglang: layout: the room's aux buffer does not exist or is too small")
	case l.ItemLen > math.MaxInt/l.Buffers/l.Slots/2:
		return errors.New("sglang: layout: too large")
	}
	for _, n := range l.AuxItemLens {
		if n < 1 || n > math.MaxInt/l.AuxSlots/len(l.AuxItemLens)/4 {
			return fmt.Errorf("sglang: layout: aux rows of %d bytes", n)
		}
	}
	return nil
}

// bufferAlign is where buffers begin.
const bufferAlign = 4096

// Memory is a manager's KV and aux memory: one shared mapping, and the accounts of its page slots and aux rows.
type Memory struct {
	Layout
	kvOff, auxOff []uint64
	whole         *kv.Pool // one page: the mapping
	slots, rows   *kv.Pool // accounts only, a byte a slot
	bytes         []byte
	fd            int
}

// OpenMemory maps the memory of a layout.
func OpenMemory(l Layout) (*Memory, error) {
	if err := l.validate(); err != nil {
		return nil, err
	}
	m := &Memory{Layout: l}
	at := uint64(0)
	place := func(n int) uint64 {
		off := at
		at = (at + uint64(n) + bufferAlign - 1) &^ (bufferAlign - 1)
		return off
	}
	for range l.Buffers {
		m.kvOff = append(m.kvOff, place(l.Slots*l.ItemLen))
	}
	for _, n := range l.AuxItemLens {
		m.auxOff = append(m.auxOff, place(l.AuxSlots*n))
	}
	var err error
	if m.whole, err = kv.Open(kv.Config{Name: "sglang", PageBytes: int(at), Pages: 1}); err != nil {
		return nil, err
	}
	m.bytes, m.fd = m.whole.Memory()
	if m.slots, err = kv.Open(kv.Config{Name: "sglang-slots", PageBytes: 1, Pages: l.Slots, Plain: true}); err == nil {
		m.rows, err = kv.Open(kv.Config{Name: "sglang-aux", PageBytes: 1, Pages: l.AuxSlots, Plain: true})
	}
	return m, err
}

// Close unmaps; it is refused with kv.ErrHeld while slots are held.
func (m *Memory) Close() error { return errors.Join(m.slots.Close(), m.rows.Close(), m.whole.Close()) }

// SlotStats is the account of the page slots.
func (m *Memory) SlotStats() kv.Stats { return m.slots.Stats() }

// RowStats is the account of the aux rows.
func (m *Memory) RowStats() kv.Stats { return m.rows.Stats() }

func (m *Memory) shared() transfer.Memory { return transfer.Memory{Bytes: m.bytes, FD: m.fd} }

// KV is the bytes of a page slot in a KV buffer.
func (m *Memory) KV(buffer, slot int) []byte {
	at := m.kvOff[buffer] + uint64(slot)*uint64(m.ItemLen)
	return m.bytes[at : at+uint64(m.ItemLen)]
}

// Aux is the bytes of a row in an aux buffer.
func (m *Memory) Aux(buffer, row int) []byte {
	n := uint64(m.AuxItemLens[buffer])
	at := m.auxOff[buffer] + uint64(row)*n
	return m.bytes[at : at+n]
}

// roomOf reads the room number of an aux row, setRoom writes it; 0: the record has not landed.
func (m *Memory) roomOf(row int) uint64 { return binary.LittleEndian.Uint64(m.Aux(m.RoomBuffer, row)) }

func (m *Memory) setRoom(row int, id uint64) {
	binary.LittleEndian.PutUint64(m.Aux(m.RoomBuffer, row), id)
}

// addresses of buffers whose memory begins at base.
func addresses(base uint64, offsets []uint64) []uint64 {
	out := make([]uint64, len(offsets))
	for i, o := range offsets {
		out[i] = base + o
	}
	return out
}
