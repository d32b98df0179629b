package shm

import (
	"sync/atomic"

	"github.com/baton-pd/baton/internal/transfer"
)

// The ring carries completions from the source to the target, in order and without a system call
// unless the target sleeps. Layout, from ringAt on:
//
//	0    completions put u64      source writes, target reads
//	64   completions taken u64    target writes, source reads
//	128  asleep u32               target sets before it waits on its socket; source clears, and wakes
//	192  letters u64              messages the source has sent, or is about to, on the socket, except wakes
//	256  ringSlots entries of ringSlotLen: a message of kindDone and its notification
//
// A source has no more unsettled writes than ringSlots, and a write is settled only by an answer that
// follows its being taken, so the ring is never full.
const (
	ringSlots   = 1024
	ringSlotLen = 320 // messageLen + MaxNotify, in whole cache lines

	ringTaken   = ringAt + 64
	ringAsleep  = ringAt + 128
	ringLetters = ringAt + 192
	ringEntries = ringAt + 256
	ringEnd     = ringEntries + ringSlots*ringSlotLen
)

var _ [ringSlotLen - messageLen - transfer.MaxNotify]struct{}

func (c control) ringPut() *atomic.Uint64 { return c.u64(ringAt) }
func (c control) taken() *atomic.Uint64   { return c.u64(ringTaken) }
func (c control) asleep() *atomic.Uint32  { return c.u32(ringAsleep) }
func (c control) letters() *atomic.Uint64 { return c.u64(ringLetters) }

// entry is the memory of the n-th completion.
func (c control) entry(n uint64) []byte {
	at := ringEntries + int(n%ringSlots)*ringSlotLen
	return c.b[at : at+ringSlotLen : at+ringSlotLen]
}

// put leaves the n-th completion, counting from 0, in the ring. Only the source, one call after the
// other. False: the ring is full, so the target breaks the rules.
func (c control) put(n uint64, m *message, notify []byte) bool {
	if n-c.taken().Load() >= ringSlots {
		return false
	}
	b := c.entry(n)
	copy(b[messageLen:], notify)
	m.append(b[:0])
	ringRelease()
	c.ringPut().Store(n + 1)
	return true
}

// sleeper reports whether the target sleeps and is now the caller's to wake. After put.
func (c control) sleeper() bool {
	w := c.asleep()
	return w.Load() != 0 && w.CompareAndSwap(1, 0)
}

// take copies the n-th completion out of the ring into buf, whose length is ringSlotLen. Only the target.
// What it gets is the source's to choose.
func (c control) take(n uint64, buf []byte) bool {
	if c.ringPut().Load() == n {
		return false
	}
	ringAcquire()
	copy(buf, c.entry(n))
	c.taken().Store(n + 1)
	return true
}
