package sim

import (
	"bytes"
	"math"

	"github.com/baton-pd/baton/internal/kv"
)

// memory is the KV memory of all ranks: each has one array of rows for the K, and one for the V, of each of
// its layers, a row a cell, with the heads that are the rank's own. A cell is a page of one
// position, shared by the sequences that count in refs, and is never written while anybody holds it.
type memory struct {
	ranks []rank
	parts int     // row arrays a layer: K and V, or the latent
	model int     // bytes of one position's K (or V, or latent) in one layer, all heads
	refs  []int32 // holders of each cell; 0: free
	free  []int32 // stack of free cells
}

// rank is one device's share.
type rank struct {
	layer int      // its first
	at    int      // its heads begin at this byte of a model row
	row   int      // and have so many
	rows  [][]byte // [(layer-first)*parts+part][cell*row ...]
	first bool     // of the ranks that hold the same rows
}

func newMemory(c *Config) *memory {
	s := c.shards()
	m := &memory{parts: len(s.Parts()), model: c.rowBytes(), refs: make([]int32, c.KVCells), free: make([]int32, c.KVCells)}
	for r := range s.Ranks() {
		a, b := s.LayersOf(r / s.TP)
		h0, h1 := s.HeadsOf(r % s.TP)
		k := rank{layer: a, at: h0 * c.HeadDim, row: (h1 - h0) * c.HeadDim, first: (r%s.TP)%s.Replicas() == 0}
		for range (b - a) * m.parts {
			k.rows = append(k.rows, make([]byte, c.KVCells*k.row))
		}
		m.ranks = append(m.ranks, k)
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
	for i := range m.ranks {
		for j := range m.ranks[i].rows {
			b := m.ranks[i].cell(j, c)
			for k := range b {
				b[k] = 0xdd
			}
		}
	}
	m.free = append(m.free, c)
}

// cell is row array j's row of a cell.
func (k *rank) cell(j int, c int32) []byte { return k.rows[j][int(c)*k.row : (int(c)+1)*k.row] }

// place is where row array j of rank k lies in the bytes of one position.
func (m *memory) place(k *rank, j int) int { return (k.layer*m.parts+j)*m.model + k.at }

// store writes a position's bytes (K then V of all heads, layer after layer) into cell c of every rank.
func (m *memory) store(c int32, cell []byte) { m.storeLayers(c, cell, 0, math.MaxInt) }

// storeLayers does so for layers [from,to).
func (m *memory) storeLayers(c int32, cell []byte, from, to int) {
	for i := range m.ranks {
		k := &m.ranks[i]
		a, b := m.rowsOf(k, from, to)
		for j := a; j < b; j++ {
			copy(k.cell(j, c), cell[m.place(k, j):])
		}
	}
}

// rowsOf gives the row arrays of rank k for layers [from,to) of the model: those from a up to b.
func (m *memory) rowsOf(k *rank, from, to int) (a, b int) {
	layers := len(k.rows) / m.parts
	a, b = min(max(from-k.layer, 0), layers), min(max(to-k.layer, 0), layers)
	return a * m.parts, b * m.parts
}

// load reads a position's bytes from cell c. false: ranks that hold the same heads hold different bytes.
func (m *memory) load(c int32, cell []byte) (same bool) {
	same = true
	for i := range m.ranks {
		k := &m.ranks[i]
		for j := range k.rows {
			b, at := k.cell(j, c), m.place(k, j)
			if k.first {
				copy(cell[at:], b)
			} else if !bytes.Equal(cell[at:at+k.row], b) {
				same = false
			}
		}
	}
	return same
}

// shards is how the configuration cuts up the KV; without Paged one rank holds all.
func (c *Config) shards() kv.Shards {
	m := kv.Model{Layers: c.Layers, KVHeads: c.KVHeads, HeadDim: c.HeadDim, ElemBytes: 1, Latent: c.Latent}
	if !c.paged() {
		return kv.Shards{Model: m, Split: kv.Split{TP: 1, PP: 1, PageTokens: 1}}
	}
	return kv.Shards{Model: m, Split: kv.Split{TP: c.TP, PP: c.PP, PageTokens: c.PageTokens, HeadsFirst: c.HeadsFirst}}
}
