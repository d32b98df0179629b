package tcp

import (
	"math/bits"

	"github.com/baton-pd/baton/internal/transfer"
)

// storeBuffered copies what is in the buffer to its place, at most n bytes. 0 if the grant
// is revoked.
func (c *conn) storeBuffered(w *inWrite, n uint64) uint64 {
	src := c.buf[c.r:c.w]
	src = src[:min(n, uint64(len(src)))]
	g := &w.grant.Own
	g.mu.Lock()
	revoked := g.revoked
	got := 0
	for !revoked && got < len(src) {
		k := copy(c.place(w, uint64(len(src)-got)), src[got:])
		got += k
		w.skip(uint64(k))
	}
	g.mu.Unlock()
	if revoked {
		c.refuse(w, codeGrant)
	}
	c.r += got
	return uint64(got)
}

// storeDirect reads from the socket into the granted pages, at most n bytes, and into
// the buffer what has arrived behind them. 0 if the grant is revoked.
func (c *conn) storeDirect(w *inWrite, n uint64) (uint64, error) {
	n = min(n, maxStore)
	c.iov = c.iov[:0]
	var want uint64
	var run []byte // the last piece: blocks that follow each other are one
	seg, off := w.seg, w.off
	for want < n && len(c.iov) < maxIovecs-1 {
		dst := c.place(w, n-want)
		if transfer.Follows(run, dst) {
			run = run[:len(run)+len(dst)]
			c.iov[len(c.iov)-1] = vec(run)
		} else {
			run = dst
			c.iov = append(c.iov, vec(run))
		}
		want += uint64(len(dst))
		w.skip(uint64(len(dst)))
	}
	w.seg, w.off = seg, off
	c.r, c.w = 0, 0
	if want == n { // the next header may come with the last bytes
		tail := c.buf
		if want > smallRead {
			tail = tail[:tailBytes]
		}
		c.iov = addVec(c.iov, tail)
	}
	if err := c.read(&w.grant.Own, wakeAt(n, w.left)); err != nil {
		return 0, err
	}
	if c.fenced {
		c.refuse(w, codeGrant)
		return 0, nil
	}
	got := min(uint64(c.n), want)
	c.w = c.n - int(got)
	w.skip(got)
	return got, nil
}

// wakeAt is how many bytes wake the reader that waits for n of the left bytes of a write; never more than n, as behind
// them another write's may come, or none.
func wakeAt(n, left uint64) int {
	if n < smallRead {
		return 1
	}
	quarter := uint64(1) << max(bits.Len64(left/4)-1, 0) // powers of two: fewer settings of the socket
	return int(min(n, max(leastWake, min(quarter, mostWake))))
}

// place is the memory at w's cursor, at most n bytes, never empty. The table was checked
// against the grant.
func (c *conn) place(w *inWrite, n uint64) []byte {
	w.settle()
	s := w.table[w.seg]
	at := s.Off + w.off
	return c.t.mem[at : at+min(n, s.Len-w.off)]
}

// skip moves the cursor over n bytes.
func (w *inWrite) skip(n uint64) {
	for n > 0 {
		w.settle()
		k := min(n, w.table[w.seg].Len-w.off)
		w.off += k
		n -= k
	}
}

// settle moves the cursor from the end of a segment to the next one that is not empty.
// There is one: payload is left, and the table adds up to the payload.
func (w *inWrite) settle() {
	for w.off == w.table[w.seg].Len {
		w.seg, w.off = w.seg+1, 0
	}
}
