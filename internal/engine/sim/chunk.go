package sim

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/kv"
)

// Unless it is paged, a chunk is a header and then, layer after layer, the K rows of all its positions
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
	if e.cfg.paged() {
		return e.info.Shards.ChunkBytes(n)
	}
	return headerBytes + n*e.cfg.cellBytes()
}

// Export copies positions [p0,p1) into dst.
func (e *Engine) Export(s engine.Seq, p0, p1 int, dst [][]byte) error {
	e.enter()
	defer e.leave()
	_, err := e.export(s, p0, p1, 0, e.cfg.Layers, dst)
	return err
}

// export copies positions [p0,p1) of layers [from,to) to their places in dst and says where these are.
func (e *Engine) export(s engine.Seq, p0, p1, from, to int, dst [][]byte) ([]kv.Range, error) {
	if err := e.hook(OpExport, s, p0, p1-p0); err != nil {
		return nil, err
	}
	q, err := e.seq(s)
	if err != nil {
		return nil, err
	}
	cells := q.cells
	if g := &e.grow; g.q == q { // what is being computed counts as far as it is
		if to > g.layers && p1 > len(cells) {
			return nil, fmt.Errorf("sim: export layers [%d,%d) of [%d,%d) while %d are computed", from, to, p0, p1, g.layers)
		}
		cells = append(cells[:len(cells):len(cells)], g.cells...)
	}
	if p0 < 0 || p0 >= p1 || p1 > len(cells) {
		return nil, fmt.Errorf("sim: export [%d,%d) of a sequence of %d", p0, p1, len(cells))
	}
	if got, want := total(dst), e.ChunkBytes(p1-p0); got != want {
		return nil, fmt.Errorf("sim: export [%d,%d) into %d bytes, want %d", p0, p1, got, want)
	}
	_ = wait(context.Background(), e.cfg.ExportTime*time.Duration(to-from)/time.Duration(e.cfg.Layers))
	if cells = cells[p0:p1]; e.cfg.paged() {
		return e.rangesOfPages(len(cells), from, to), e.pages(cells, dst, from, to, func(page, row []byte) { copy(page, row) })
	}
	k := &e.mem.ranks[0]
	a, b := e.mem.rowsOf(k, from, to)
	r := kv.Range{Off: uint64(headerBytes + a*len(cells)*k.row), Len: uint64((b - a) * len(cells) * k.row)}
	w := parts{list: dst, skip: int(r.Off)}
	if from == 0 {
		w.skip, r = 0, kv.Range{Len: r.Len + headerBytes}
		w.write(e.header(p0, p1))
	}
	for j := a; j < b; j++ {
		for _, c := range cells {
			w.write(k.cell(j, c))
		}
	}
	return []kv.Range{r}, nil
}

// rangesOfPages says where layers [from,to) lie in the pages of n positions: in each page of a rank that
// has some of them, side by side.
func (e *Engine) rangesOfPages(n, from, to int) (out []kv.Range) {
	s := &e.info.Shards
	for i := range e.mem.ranks {
		k := &e.mem.ranks[i]
		a, b := e.mem.rowsOf(k, from, to)
		for p := range s.RankPages(n) {
			if a < b {
				page := (i*s.RankPages(n) + p) * s.PageBytes()
				out = append(out, kv.Range{Off: uint64(page + a*s.PageTokens*k.row), Len: uint64((b - a) * s.PageTokens * k.row)})
			}
		}
	}
	return out
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
	return e.place(q, p1-p0, src)
}

// verify checks what can be checked before a byte is stored.
func (e *Engine) verify(p0, p1 int, src [][]byte) error {
	if got, want := total(src), e.ChunkBytes(p1-p0); got != want {
		return fmt.Errorf("%w: %d bytes, want %d", engine.ErrBadChunk, got, want)
	}
	if e.cfg.paged() {
		return nil
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
func (e *Engine) place(q *sequence, n int, src [][]byte) error {
	cells := make([]int32, n)
	for i := range cells {
		cells[i] = e.mem.take()
	}
	if e.cfg.paged() {
		if err := e.pages(cells, src, 0, e.cfg.Layers, func(page, row []byte) { copy(row, page) }); err != nil {
			for _, c := range cells {
				e.mem.drop(c)
			}
			return err
		}
	} else {
		r, k := parts{list: src, skip: headerBytes}, &e.mem.ranks[0]
		for j := range k.rows {
			for _, c := range cells {
				r.read(k.cell(j, c))
			}
		}
	}
	q.cells = append(q.cells, cells...)
	for _, c := range cells {
		e.fold(q, c)
	}
	return nil
}

// pages walks over the rows of cells, of layers [from,to), and their places in a chunk's pages: rank after rank, token after
// token, in each page K before V, layer after layer. A row is one head's where pages are by heads, else all
// heads' of the rank.
func (e *Engine) pages(cells []int32, list [][]byte, from, to int, each func(page, row []byte)) error {
	s := &e.info.Shards
	per := s.RankPages(len(cells))
	if len(list) != s.Ranks()*per {
		return fmt.Errorf("%w: %d positions in %d pages, want %d for each of %d ranks", engine.ErrBadChunk, len(cells), len(list), per, s.Ranks())
	}
	for _, p := range list {
		if len(p) != s.PageBytes() {
			return fmt.Errorf("%w: a page of %d bytes, want %d", engine.ErrBadChunk, len(p), s.PageBytes())
		}
	}
	for i := range e.mem.ranks {
		k := &e.mem.ranks[i]
		a, b := e.mem.rowsOf(k, from, to)
		for j := a; j < b; j++ {
			for n, c := range cells {
				page, row := list[i*per+n/s.PageTokens], k.cell(j, c)
				at, slot := j*s.PageTokens*k.row, n%s.PageTokens
				if !s.HeadsFirst {
					at += slot * k.row
					each(page[at:at+k.row], row)
					continue
				}
				for h := 0; h < k.row; h += s.HeadDim {
					first := at + h*s.PageTokens + slot*s.HeadDim
					each(page[first:first+s.HeadDim], row[h:h+s.HeadDim])
				}
			}
		}
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
