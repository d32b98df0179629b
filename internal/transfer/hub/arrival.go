package hub

import (
	"fmt"
	"sort"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
)

// arrival is what has come of one chunk at the decode side. The bytes of a part are summed when its notification
// comes, so that little is left to do after the last one; what is whole is compared with the chunk's notification,
// and only then delivered.
type arrival struct {
	laid   bool       // ranges, ends and sum are made
	ranges []kv.Range // of the pool's memory: what must come, in the order of the checksum
	ends   []uint64   // ends[k]: bytes of ranges[..k]
	sum    pieceSum   // of what has been summed
	budget uint64     // pieces that may still be summed as they come; a peer chooses how many there are
	seen   []uint64   // bit p: part p has landed
	parts  uint32     // bits in seen
	note   *chunkNote // has come
	over   bool       // delivered, or refused
}

// land handles a notification; runs on a transport goroutine.
func (rec *receiving) land(notify []byte) {
	rec.landing.Lock()
	defer rec.landing.Unlock()
	chunk, part, err := decodeNote(notify)
	switch {
	case err != nil:
		rec.refuse(room.CodeTransferFailed, err.Error())
	case part != nil:
		rec.landPart(part)
	default:
		rec.landChunk(&chunk)
	}
}

// refuse fails the room.
func (rec *receiving) refuse(code room.Code, detail string) {
	rec.room.Apply(room.Event{Kind: room.EvCancel, Cause: &room.Cause{Code: code, Side: room.SideReceiver,
		Phase: room.StateTransferring.String(), Key: rec.open.Key, Peer: rec.open.Addr, Retryable: code == room.CodeTransferFailed, Detail: detail}})
}

// landPart sums bytes of a chunk that is not whole. Under landing.
func (rec *receiving) landPart(n *partNote) {
	if rec.room.State().Terminal() { // its pages may be others' already
		rec.hub.m.stray.Inc()
		return
	}
	_, sizes := rec.coming()
	switch {
	case n.Key != rec.open.Key:
		rec.refuse(room.CodeTransferFailed, "part of a chunk of room "+n.Key.String())
		return
	case int64(n.Index) >= int64(len(sizes)):
		rec.refuse(room.CodeTransferFailed, fmt.Sprintf("part of chunk %d, expected %d chunks", n.Index, len(sizes)))
		return
	}
	a, err := rec.arrival(int(n.Index))
	if err != nil {
		rec.refuse(room.CodeInternal, err.Error())
		return
	}
	if a.over || !a.see(n.Part) {
		rec.refuse(room.CodeProtocol, fmt.Sprintf("part %d of chunk %d has landed before, or its chunk has", n.Part, n.Index))
		return
	}
	mem, _ := rec.hub.cfg.Pool.Memory()
	for _, r := range n.Runs {
		if !a.add(mem, r) {
			rec.refuse(room.CodeProtocol, fmt.Sprintf("part %d of chunk %d names bytes %v, which are none of the chunk's %d or have come before", n.Part, n.Index, r, a.sum.total))
			return
		}
	}
	rec.complete(int(n.Index), a)
}

// landChunk notes that all of a chunk has left. Under landing.
func (rec *receiving) landChunk(n *chunkNote) {
	_, sizes := rec.coming()
	switch {
	case n.Key != rec.open.Key:
		rec.refuse(room.CodeTransferFailed, "chunk notification of room "+n.Key.String())
		return
	case int64(n.Count) != int64(len(sizes)) || int64(n.Bytes) != int64(sizes[n.Index]):
		rec.refuse(room.CodeTransferFailed, fmt.Sprintf("chunk %d of %d with %d bytes, expected %d chunks", n.Index, n.Count, n.Bytes, len(sizes)))
		return
	}
	a, err := rec.arrival(int(n.Index))
	switch {
	case err != nil:
		rec.refuse(room.CodeInternal, err.Error())
	case a.over || rec.room.State().Terminal():
		rec.deliver(int(n.Index)) // the room says what is wrong with it
	case a.note != nil:
		rec.refuse(room.CodeProtocol, fmt.Sprintf("chunk %d was notified twice", n.Index))
	default:
		a.note = n
		rec.complete(int(n.Index), a)
	}
}

// complete delivers chunk i if all of it has come and its checksum is right. Under landing.
func (rec *receiving) complete(i int, a *arrival) {
	if a.note == nil || a.parts < a.note.Parts {
		return
	}
	bad := ""
	mem, _ := rec.hub.cfg.Pool.Memory()
	switch {
	case !a.first(a.note.Parts):
		bad = fmt.Sprintf("chunk %d has landed in other parts than the %d that left", i, a.note.Parts)
	case a.rest(mem) != a.note.CRC:
		bad = fmt.Sprintf("checksum of chunk %d is wrong: its bytes were damaged on the way", i)
	}
	*a = arrival{over: true}
	if bad != "" {
		rec.refuse(room.CodeTransferFailed, bad)
		return
	}
	rec.deliver(i)
}

// deliver applies the event of chunk i, whole and right.
func (rec *receiving) deliver(i int) {
	rec.room.Apply(room.Event{Kind: room.EvLanded, Chunk: i, Last: i == len(rec.open.Chunks)-1})
}

// arrival is that of chunk i, an index of the grant's. Under landing.
func (rec *receiving) arrival(i int) (*arrival, error) {
	if rec.arrivals == nil {
		rec.arrivals = make([]arrival, len(rec.open.Chunks))
	}
	a := &rec.arrivals[i]
	if a.laid || a.over {
		return a, nil
	}
	ranges, err := rec.payload(i)
	if err != nil {
		return nil, err
	}
	*a = newArrival(ranges)
	return a, nil
}

// minPiece is the mean length in bytes below which the pieces of a long chunk are not all summed as they come. To put a
// piece's checksum in its place takes a microsecond, which is the time of some KiB of bytes.
const minPiece = 256

func newArrival(ranges []kv.Range) arrival {
	a := arrival{laid: true, ranges: ranges, ends: make([]uint64, len(ranges))}
	for k, r := range ranges {
		a.sum.total += r.Len
		a.ends[k] = a.sum.total
	}
	a.budget = maxPieces + a.sum.total/minPiece
	return a
}

// payload is where the bytes go that chunk i must bring, in the order of its checksum; what else its pages have room
// for is not KV.
func (rec *receiving) payload(i int) ([]kv.Range, error) {
	s, pool := rec.hub.cfg.Shards, rec.hub.cfg.Pool
	rec.mu.Lock()
	pages, size, have := rec.perChunk[i], rec.sizes[i], rec.have
	rec.mu.Unlock()
	if s == (kv.Shards{}) {
		ranges, err := kv.Spans(pool.PageBytes(), []int{size}, pages)
		if err != nil {
			return nil, err
		}
		return ranges[0], nil
	}
	from, to := tokensOf(rec.open.Bounds, i)
	first := min(max(from, have), to)
	return s.Payload(kv.Piece{Pages: pages, First: first}, pool.Stats().Total, first, to)
}

// see notes that part p has landed, false if it has before.
func (a *arrival) see(p uint32) bool {
	word, bit := int(p/64), uint64(1)<<(p%64)
	for len(a.seen) <= word { // p < maxParts
		a.seen = append(a.seen, 0)
	}
	if a.seen[word]&bit != 0 {
		return false
	}
	a.seen[word] |= bit
	a.parts++
	return true
}

// first reports whether exactly the parts 0..n-1 have landed.
func (a *arrival) first(n uint32) bool {
	for p := range n {
		if int(p/64) >= len(a.seen) || a.seen[p/64]&(1<<(p%64)) == 0 {
			return false
		}
	}
	return a.parts == n
}

// add sums the pieces of r, false if they can not be. Those that are too many to remember, or to be worth it, are left to rest.
func (a *arrival) add(mem []byte, r run) (ok bool) {
	if r.end() > a.sum.total {
		return false
	}
	ok = true
	r.pieces(func(p kv.Range) bool {
		if a.sum.full() || a.budget == 0 {
			return false
		}
		a.budget--
		at, fits := a.sum.fits(p)
		if ok = fits; ok {
			a.sum.insert(at, p, a.crc(mem, p))
		}
		return ok
	})
	return ok
}

// rest sums what has not been, and gives the checksum of all.
func (a *arrival) rest(mem []byte) uint32 {
	for _, p := range a.sum.missing() {
		a.sum.add(p, a.crc(mem, p))
	}
	return a.sum.sum
}

// crc is that of some of the chunk's bytes.
func (a *arrival) crc(mem []byte, p kv.Range) (crc uint32) {
	k := sort.Search(len(a.ends), func(k int) bool { return a.ends[k] > p.Off })
	for ; p.Len > 0; k++ {
		left := a.ends[k] - p.Off
		at, n := a.ranges[k].Off+a.ranges[k].Len-left, min(left, p.Len)
		crc = crcAdd(crc, mem[at:at+n])
		p.Off, p.Len = p.Off+n, p.Len-n
	}
	return crc
}
