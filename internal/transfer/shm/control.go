package shm

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// Layout of the control area, native byte order, all sizes in bytes:
//
//	0                      header: magic u64, version u32, slots u32, spans u32, zeros
//	slotsAt                slots of slotLen
//	spansAt                spans of spanLen: offset u64, length u64
//	ringAt                 the ring of completions, see ring.go
//
// A slot:
//
//	0 state u64   8 grant id u64   16 room u64   24 generation u32
//	28 number of spans u32   32 first span u32   36 zeros
//
// A state word:
//
//	bit 0 live   bit 1 revoked   bits 8..31 writers inside   bits 32..63 life of the slot
//
// Only the target changes a slot, except for the count of writers. It writes the
// other fields while the slot is not live, then stores the state with the next life
// number. A writer reads the state, then the fields, then counts itself in by
// comparing and swapping that same state: if it succeeds, the fields belong to the
// life it has entered, and stay until it has left.
//
// A grant lies in one of the window slots from id modulo slots on, so a lookup reads
// few slots and needs no order.
const (
	controlMagic = 0x4c5254434e4f5442

	slots   = 4096
	window  = 64
	slotLen = 64
	spans   = 1 << 20
	spanLen = 16

	slotsAt     = 64
	spansAt     = slotsAt + slots*slotLen
	ringAt      = spansAt + spans*spanLen
	controlSize = ringEnd // 16.6 MiB, of which only used pages exist

	stateLive    uint64 = 1 << 0
	stateRevoked uint64 = 1 << 1
	writerOne    uint64 = 1 << 8
	writerMask   uint64 = 1<<32 - writerOne
	lifeShift           = 32
)

// control is a mapped control area.
type control struct{ b []byte }

func (c control) u64(at int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&c.b[at])) }
func (c control) u32(at int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&c.b[at])) }

func (c control) state(slot int) *atomic.Uint64 { return c.u64(slotsAt + slot*slotLen) }

// slotOf is the i-th slot in which grant id may lie, 0 <= i < window.
func slotOf(id transfer.GrantID, i int) int { return int((uint64(id) + uint64(i)) % slots) }

// newControl makes and maps an empty control area and returns its descriptor.
func newControl() (control, int, error) {
	fd, err := unix.MemfdCreate("baton-control", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return control{}, -1, fmt.Errorf("shm: create control memfd: %w", err)
	}
	if err = unix.Ftruncate(fd, controlSize); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	var b []byte
	if err == nil {
		b, err = mapShared(fd, controlSize)
	}
	if err != nil {
		_ = unix.Close(fd)
		return control{}, -1, fmt.Errorf("shm: set up control memfd: %w", err)
	}
	c := control{b}
	c.u32(8).Store(version)
	c.u32(12).Store(slots)
	c.u32(16).Store(spans)
	c.u64(0).Store(controlMagic)
	return c, fd, nil
}

// check reports whether a mapped control area has the layout of this code.
func (c control) check() error {
	if c.u64(0).Load() != controlMagic || c.u32(8).Load() != version || c.u32(12).Load() != slots || c.u32(16).Load() != spans {
		return errVersion
	}
	return nil
}

// mapShared maps n bytes of fd, which must be as large. The mapping goes on up to the slice's capacity.
func mapShared(fd, n int) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("stat memory: %w", err)
	}
	if n <= 0 || st.Size < int64(n) {
		return nil, fmt.Errorf("map %d bytes of a file of %d", n, st.Size)
	}
	// Memory in reserved huge pages is mapped and unmapped in whole ones; Blksize is their size.
	unit := max(int(st.Blksize), 1)
	whole := (n + unit - 1) / unit * unit
	b, err := unix.Mmap(fd, 0, whole, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", whole, err)
	}
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE) // refused for what is in huge pages anyway, and by kernels without
	return b[:n], nil
}

// table is the target's side of a control area. What it needs to know it keeps in its
// own memory; of the shared words it reads only the count of writers. The book's lock guards it.
type table struct {
	ctl   control
	used  [slots]bool
	life  [slots]uint32
	start [slots]uint32
	count [slots]uint32
	arena arena
}

func newTable(c control) *table { return &table{ctl: c, arena: newArena(spans)} }

// put makes a grant live. list is sorted and disjoint. False: the table is full.
func (t *table) put(id transfer.GrantID, key room.Key, list []transfer.Span) (int, bool) {
	slot := -1
	for i := range window {
		if s := slotOf(id, i); !t.used[s] {
			slot = s
			break
		}
	}
	if slot < 0 {
		return 0, false
	}
	first, ok := t.arena.take(uint32(len(list)))
	if !ok {
		return 0, false
	}
	for i, s := range list {
		at := spansAt + (int(first)+i)*spanLen
		t.ctl.u64(at).Store(s.Off)
		t.ctl.u64(at + 8).Store(s.Len)
	}
	t.used[slot], t.start[slot], t.count[slot] = true, first, uint32(len(list))
	t.life[slot]++
	at := slotsAt + slot*slotLen
	t.ctl.u64(at + 8).Store(uint64(id))
	t.ctl.u64(at + 16).Store(key.Room)
	t.ctl.u32(at + 24).Store(key.Gen)
	t.ctl.u32(at + 28).Store(uint32(len(list)))
	t.ctl.u32(at + 32).Store(first)
	t.ctl.state(slot).Store(uint64(t.life[slot])<<lifeShift | stateLive)
	return slot, true
}

// revoke lets no writer in any more and reports whether none is inside; then the slot is
// free again.
func (t *table) revoke(slot int) bool {
	if t.ctl.state(slot).Or(stateRevoked)&writerMask != 0 {
		return false
	}
	t.free(slot)
	return true
}

// quiet frees a revoked slot if no writer is inside any more.
func (t *table) quiet(slot int) bool {
	if t.ctl.state(slot).Load()&writerMask != 0 {
		return false
	}
	t.free(slot)
	return true
}

func (t *table) free(slot int) {
	t.ctl.state(slot).Store(uint64(t.life[slot]) << lifeShift)
	t.arena.give(t.start[slot], t.count[slot])
	t.used[slot] = false
}

// place is where a writer found a grant: slot and life.
type place struct {
	slot int
	life uint64
}

// find looks a grant up for a writer and counts the writer in. False: unknown, revoked or
// another room's.
func (c control) find(id transfer.GrantID, key room.Key) (place, bool) {
	for i := range window {
		p := place{slot: slotOf(id, i)}
		at := slotsAt + p.slot*slotLen
		st := c.state(p.slot).Load()
		if st&stateLive == 0 || transfer.GrantID(c.u64(at+8).Load()) != id {
			continue
		}
		if c.u64(at+16).Load() != key.Room || c.u32(at+24).Load() != key.Gen {
			return place{}, false
		}
		p.life = st >> lifeShift
		if c.enter(p) {
			return p, true
		} // else revoked meanwhile
	}
	return place{}, false
}

// enter counts a writer in unless the grant is revoked or gone.
func (c control) enter(p place) bool {
	w := c.state(p.slot)
	for {
		st := w.Load()
		if st>>lifeShift != p.life || st&stateLive == 0 || st&stateRevoked != 0 || st&writerMask == writerMask {
			return false
		}
		if w.CompareAndSwap(st, st+writerOne) {
			return true
		}
	}
}

// leave counts a writer out. True: the grant was revoked meanwhile and this was the last
// writer, so the target must be told.
func (c control) leave(p place) bool {
	st := c.state(p.slot).Add(^(writerOne - 1))
	return st&stateRevoked != 0 && st&writerMask == 0
}

// allowed reports whether n bytes at off lie wholly inside one span of the grant that
// the writer has entered, and inside a memory of size bytes. An empty range may also
// stand at a span's end.
func (c control) allowed(p place, off, n, size uint64) bool {
	if off > size || n > size-off {
		return false
	}
	at := slotsAt + p.slot*slotLen
	count, first := int(c.u32(at+28).Load()), int(c.u32(at+32).Load())
	if count > spans || first > spans-count {
		return false // a broken target
	}
	base := spansAt + first*spanLen
	lo, hi := 0, count // the first span that starts behind off
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if c.u64(base+mid*spanLen).Load() > off {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	if lo == 0 {
		return false
	}
	start, length := c.u64(base+(lo-1)*spanLen).Load(), c.u64(base+(lo-1)*spanLen+8).Load()
	rel := off - start
	return rel <= length && n <= length-rel
}
