package sim

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/baton-pd/baton/internal/engine"
)

// memory is the KV memory: per layer one array of K rows and one of V rows, a row a
// cell. A cell is a page of one position, shared by the sequences that count in refs,
// and is never written while anybody holds it.
type memory struct {
	row  int      // bytes of one K (or V) row
	k, v [][]byte // [layer][cell*row ...]
	refs []int32  // holders of each cell; 0: free
	free []int32  // stack of free cells
}

func newMemory(c *Config) *memory {
	m := &memory{row: c.rowBytes(), refs: make([]int32, c.KVCells), free: make([]int32, c.KVCells)}
	for range c.Layers {
		m.k = append(m.k, make([]byte, c.KVCells*m.row))
		m.v = append(m.v, make([]byte, c.KVCells*m.row))
	}
	for i := range m.free {
		m.free[i] = int32(c.KVCells - 1 - i)
	}
	return m
}

func (m *memory) freeCells() int { return len(m.free) }

// take hands out a free cell; the caller has checked that there is one.
func (m *memory) take() int32 {
	c := m.free[len(m.free)-1]
	m.free = m.free[:len(m.free)-1]
	m.refs[c] = 1
	return c
}

// drop lets go of one hold. A cell without holders is scribbled over, so that a
// reader of freed memory is found.
func (m *memory) drop(c int32) {
	if m.refs[c]--; m.refs[c] > 0 {
		return
	}
	for l := range m.k {
		for i := range m.row {
			m.k[l][int(c)*m.row+i], m.v[l][int(c)*m.row+i] = 0xdd, 0xdd
		}
	}
	m.free = append(m.free, c)
}

// store writes a position's bytes (K then V, layer after layer) into cell c.
func (m *memory) store(c int32, cell []byte) {
	at := int(c) * m.row
	for l := range m.k {
		cell = cell[copy(m.k[l][at:at+m.row], cell):]
		cell = cell[copy(m.v[l][at:at+m.row], cell):]
	}
}

// load reads a position's bytes from cell c.
func (m *memory) load(c int32, cell []byte) {
	at := int(c) * m.row
	for l := range m.k {
		cell = cell[copy(cell, m.k[l][at:at+m.row]):]
		cell = cell[copy(cell, m.v[l][at:at+m.row]):]
	}
}

// A chunk is a header and then, layer after layer, the K rows of all its positions
// and the V rows of all its positions.
const (
	chunkMagic  = 0x314d4953 // "SIM1"
	headerBytes = 16         // magic, count, first position, bytes a position; u32 little-endian
)

// ChunkBytes is the exported size of n positions; 0 for none.
func (e *Engine) ChunkBytes(n int) int {
	if n <= 0 {
		return 0
	}
	return headerBytes + n*e.cfg.cellBytes()
}

// Export copies positions [p0,p1) into dst.
func (e *Engine) Export(s engine.Seq, p0, p1 int, dst [][]byte) error {
	e.enter()
	defer e.leave()
	if err := e.hook(OpExport, s, p0, p1-p0); err != nil {
		return err
	}
	q, err := e.seq(s)
	if err != nil {
		return err
	}
	if p0 < 0 || p0 >= p1 || p1 > len(q.cells) {
		return fmt.Errorf("sim: export [%d,%d) of a sequence of %d", p0, p1, len(q.cells))
	}
	if got, want := total(dst), e.ChunkBytes(p1-p0); got != want {
		return fmt.Errorf("sim: export [%d,%d) into %d bytes, want %d", p0, p1, got, want)
	}
	_ = wait(context.Background(), e.cfg.ExportTime)
	w := parts{list: dst}
	w.write(e.header(p0, p1))
	for l := range e.mem.k {
		for _, rows := range [][]byte{e.mem.k[l], e.mem.v[l]} {
			for _, c := range q.cells[p0:p1] {
				w.write(rows[int(c)*e.mem.row : (int(c)+1)*e.mem.row])
			}
		}
	}
	return nil
}

func (e *Engine) header(p0, p1 int) []byte {
	h := make([]byte, 0, headerBytes)
	for _, v := range []int{chunkMagic, p1 - p0, p0, e.cfg.cellBytes()} {
		h = binary.LittleEndian.AppendUint32(h, uint32(v))
	}
	return h
}

// Import verifies length and header and appends the chunk to seq. The KV bytes
// are taken as they are: a wrong one shows in the tokens.
func (e *Engine) Import(s engine.Seq, p0, p1 int, src [][]byte) error {
	e.enter()
	defer e.leave()
	if err := e.hook(OpImport, s, p0, p1-p0); err != nil {
		return err
	}
	q, err := e.seq(s)
	if err != nil {
		return err
	}
	if p0 != len(q.cells) || p0 >= p1 || p1 > e.cfg.ContextLen {
		return fmt.Errorf("sim: import [%d,%d) into a sequence of %d", p0, p1, len(q.cells))
	}
	if err := e.verify(p0, p1, src); err != nil {
		return fmt.Errorf("sim: import [%d,%d): %w", p0, p1, err)
	}
	if n := p1 - p0; n > e.mem.freeCells() {
		return fmt.Errorf("sim: import %d positions with %d cells free: %w", n, e.mem.freeCells(), engine.ErrNoCells)
	}
	_ = wait(context.Background(), e.cfg.ImportTime)
	e.place(q, p1-p0, &parts{list: src, skip: headerBytes})
	return nil
}

// verify checks what can be checked before a byte is stored.
func (e *Engine) verify(p0, p1 int, src [][]byte) error {
	if got, want := total(src), e.ChunkBytes(p1-p0); got != want {
		return fmt.Errorf("%w: %d bytes, want %d", engine.ErrBadChunk, got, want)
	}
	var h [headerBytes]byte
	(&parts{list: src}).read(h[:])
	for i, f := range []struct {
		name string
		want int
	}{{"magic", chunkMagic}, {"count", p1 - p0}, {"first position", p0}, {"bytes a position", e.cfg.cellBytes()}} {
		if got := binary.LittleEndian.Uint32(h[4*i:]); got != uint32(f.want) {
			return fmt.Errorf("%w: %s is %d, want %d", engine.ErrBadChunk, f.name, got, f.want)
		}
	}
	return nil
}

// place stores n positions that come as rows, then folds them in from the memory.
func (e *Engine) place(q *sequence, n int, r *parts) {
	first := len(q.cells)
	for range n {
		q.cells = append(q.cells, e.mem.take())
	}
	for l := range e.mem.k {
		for _, rows := range [][]byte{e.mem.k[l], e.mem.v[l]} {
			for _, c := range q.cells[first:] {
				r.read(rows[int(c)*e.mem.row : (int(c)+1)*e.mem.row])
			}
		}
	}
	for _, c := range q.cells[first:] {
		e.mem.load(c, e.cell)
		q.chain = foldCell(q.chain, e.cell)
	}
}

// SwapOut copies seq's KV to host memory; seq keeps it.
func (e *Engine) SwapOut(s engine.Seq) ([]byte, error) {
	e.enter()
	defer e.leave()
	if err := e.hook(OpSwapOut, s, 0, 0); err != nil {
		return nil, err
	}
	q, err := e.seq(s)
	if err != nil {
		return nil, err
	}
	_ = wait(context.Background(), e.cfg.SwapTime)
	cb := e.cfg.cellBytes()
	out := make([]byte, len(q.cells)*cb)
	for i, c := range q.cells {
		e.mem.load(c, out[i*cb:(i+1)*cb])
	}
	return out, nil
}

// SwapIn brings saved KV back to an empty seq.
func (e *Engine) SwapIn(s engine.Seq, saved []byte) error {
	e.enter()
	defer e.leave()
	cb := e.cfg.cellBytes()
	if err := e.hook(OpSwapIn, s, 0, len(saved)/cb); err != nil {
		return err
	}
	q, err := e.seq(s)
	if err != nil {
		return err
	}
	switch {
	case len(q.cells) > 0:
		return fmt.Errorf("sim: swap in to sequence %d, which holds %d positions", s, len(q.cells))
	case len(saved)%cb != 0:
		return fmt.Errorf("sim: swap in %d bytes, want a multiple of %d", len(saved), cb)
	case len(saved)/cb > e.mem.freeCells():
		return fmt.Errorf("sim: swap in %d positions with %d cells free: %w", len(saved)/cb, e.mem.freeCells(), engine.ErrNoCells)
	}
	_ = wait(context.Background(), e.cfg.SwapTime)
	for ; len(saved) > 0; saved = saved[cb:] {
		e.append(q, saved[:cb])
	}
	return nil
}

// parts reads or writes a list of slices as one run of bytes.
type parts struct {
	list [][]byte
	skip int // bytes of list[0] and on that come before
}

func total(list [][]byte) int {
	n := 0
	for _, p := range list {
		n += len(p)
	}
	return n
}

// next is the rest of the current part; the caller never asks past the end.
func (p *parts) next() []byte {
	for p.skip >= len(p.list[0]) {
		p.skip -= len(p.list[0])
		p.list = p.list[1:]
	}
	return p.list[0][p.skip:]
}

func (p *parts) write(b []byte) {
	for len(b) > 0 {
		n := copy(p.next(), b)
		p.skip += n
		b = b[n:]
	}
}

func (p *parts) read(b []byte) {
	for len(b) > 0 {
		n := copy(b, p.next())
		p.skip += n
		b = b[n:]
	}
}
