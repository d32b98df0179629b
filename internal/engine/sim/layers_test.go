package sim

import (
	"bytes"
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/engine"
)

// layered are engines whose chunks come in groups: blocks, pages of ranks by head and by position, one vector a position, and
// a number of layers that the groups do not divide.
var layered = map[string]Config{
	"block":          {Layers: 5, LayerGroup: 2},
	"one layer each": {Layers: 4, LayerGroup: 1},
	"one group":      {Layers: 4, LayerGroup: 9},
	"pages":          {Layers: 6, LayerGroup: 1, TP: 2, PP: 2, PageTokens: 3},
	"uneven ranks":   {Layers: 7, LayerGroup: 3, TP: 4, PP: 2, PageTokens: 5, HeadsFirst: true}, // 2 heads on 4 ranks
	"latent":         {Layers: 3, LayerGroup: 2, Latent: true},
}

// inPages is memory for a chunk of n positions, in as many parts as the engine wants.
func inPages(e *Engine, n int) [][]byte {
	size := e.ChunkBytes(n)
	per := max(size/3, 1)
	if e.cfg.paged() {
		per = e.info.Shards.PageBytes()
	}
	var out [][]byte
	for ; size > 0; size -= per {
		out = append(out, bytes.Repeat([]byte{0xaa}, min(per, size)))
	}
	return out
}

// TestLayersTogetherAreTheChunk: what each group stores is what it says it stores, all groups make what Export makes,
// and the KV of the sequence is that of Prefill.
func TestLayersTogetherAreTheChunk(t *testing.T) {
	for name, cfg := range layered {
		t.Run(name, func(t *testing.T) {
			cfg.ChunkTokens = 8
			whole, e := open(t, cfg), open(t, cfg)
			p := prompt(t, "the layers of a chunk")
			for a := 0; a < len(p)-1; a += 8 {
				b := min(a+8, len(p)-1)
				must(t, whole.Prefill(t.Context(), 0, p[a:b], a))
				want, got := inPages(whole, b-a), inPages(e, b-a)
				must(t, whole.Export(0, a, b, want))
				next := 0
				must(t, e.PrefillLayers(t.Context(), 0, p[a:b], a, func(g int) error {
					if g != next {
						t.Errorf("group %d, want %d", g, next)
					}
					next++
					before := bytes.Join(got, nil)
					ranges, err := e.ExportLayers(0, a, b, g, got)
					must(t, err)
					after := bytes.Join(got, nil)
					at := 0
					for _, r := range ranges {
						if int(r.Off) < at || r.Len == 0 {
							t.Errorf("group %d: ranges %v are not ascending", g, ranges)
						}
						if at = int(r.Off + r.Len); !bytes.Equal(after[r.Off:at], bytes.Join(want, nil)[r.Off:at]) {
							t.Errorf("group %d: wrong bytes in %v", g, r)
						}
						copy(before[r.Off:at], after[r.Off:at])
					}
					if !bytes.Equal(before, after) {
						t.Errorf("group %d stored outside of %v", g, ranges)
					}
					return nil
				}))
				if next != e.LayerGroups() {
					t.Errorf("%d groups, want %d", next, e.LayerGroups())
				}
				if !reflect.DeepEqual(got, want) {
					t.Error("the groups do not make the chunk")
				}
			}
			want := Expected(cfg, p, 12)
			if got := generate(t, e, 0, p, 12, engine.Sampling{}); !reflect.DeepEqual(got, want) {
				t.Errorf("got %v want %v", got, want)
			}
		})
	}
}

// TestLayersInTheWrongOrderAreRefused: a group cannot be exported before it is computed, its bytes are not there either,
// and no other call may come in between.
func TestLayersInTheWrongOrderAreRefused(t *testing.T) {
	cfg := Config{Layers: 4, LayerGroup: 2, ChunkTokens: 8}
	e := open(t, cfg)
	p := prompt(t, "0123456") // and BOS
	dst := inPages(e, 8)
	must(t, e.PrefillLayers(t.Context(), 0, p, 0, func(g int) error {
		_, err := e.ExportLayers(0, 0, 8, 1, dst)
		if early := g == 0; early != (err != nil) {
			t.Errorf("group 1 after group %d: %v", g, err)
		}
		if g == 0 {
			row := e.mem.ranks[0].cell(7, e.grow.cells[0])
			for _, b := range row {
				if b != 0 {
					t.Errorf("layer 3 is in the memory while layer 1 is computed: %x", row)
				}
			}
			func() {
				defer func() {
					if recover() == nil {
						t.Error("another call was taken")
					}
				}()
				e.FreeSeq(0)
			}()
		}
		return nil
	}))
	for _, g := range []int{-1, 2} {
		if _, err := e.ExportLayers(0, 0, 8, g, dst); err == nil || !strings.Contains(err.Error(), "does not exist") {
			t.Errorf("group %d: %v", g, err)
		}
	}
}

// TestLayersInterrupted: an error or the end of ctx between two groups leaves no trace, and the costs are the chunk's.
func TestLayersInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := Config{Layers: 3, LayerGroup: 1, ChunkTokens: 8, PrefillChunkTime: 70 * time.Millisecond, PrefillTokenTime: 10 * time.Millisecond}
		e := open(t, cfg)
		p := prompt(t, "0123456") // and BOS
		stop := errors.New("stop")
		if err := e.PrefillLayers(t.Context(), 0, p, 0, func(int) error { return stop }); !errors.Is(err, stop) {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 60*time.Millisecond)
		defer cancel()
		groups := 0
		err := e.PrefillLayers(ctx, 0, p, 0, func(int) error { groups++; return nil })
		if !errors.Is(err, engine.ErrInterrupted) || groups != 1 {
			t.Errorf("%v after %d groups", err, groups)
		}
		if n := e.UsedCells(); n != 0 {
			t.Errorf("%d cells used", n)
		}
		began := time.Now()
		var at []time.Duration
		must(t, e.PrefillLayers(t.Context(), 0, p, 0, func(int) error { at = append(at, time.Since(began)); return nil }))
		if want := []time.Duration{50 * time.Millisecond, 100 * time.Millisecond, 150 * time.Millisecond}; !reflect.DeepEqual(at, want) {
			t.Errorf("groups after %v, want %v", at, want)
		}
		if got, want := generate(t, e, 0, append(p, 40), 5, engine.Sampling{}), Expected(cfg, append(p, 40), 5); !reflect.DeepEqual(got, want) {
			t.Errorf("got %v want %v", got, want)
		}
	})
}

// TestOneWrongByteOfALayerChangesTheAnswer: a byte that a group stores wrong, in any layer, is found by the hash.
func TestOneWrongByteOfALayerChangesTheAnswer(t *testing.T) {
	for _, name := range []string{"block", "pages"} {
		t.Run(name, func(t *testing.T) {
			cfg := layered[name]
			cfg.ChunkTokens = 6 // whole pages: no padding
			a, b := open(t, cfg), open(t, cfg)
			p := prompt(t, "012345") // and BOS
			list := inPages(a, 6)
			var groups [][2]int // a byte of each range of each group
			must(t, a.PrefillLayers(t.Context(), 0, p[:6], 0, func(g int) error {
				ranges, err := a.ExportLayers(0, 0, 6, g, list)
				for i, r := range ranges {
					groups = append(groups, [2]int{g, int(r.Off+r.Len) - 1 - i%int(r.Len)})
				}
				return err
			}))
			want := Expected(cfg, p, 12)
			try := func() []engine.Token {
				must(t, b.Import(0, 0, 6, list))
				defer b.FreeSeq(0)
				return generate(t, b, 0, p, 12, engine.Sampling{})
			}
			for _, at := range groups {
				flip(list, at[1])
				if reflect.DeepEqual(try(), want) {
					t.Errorf("a wrong byte %d of group %d was not seen", at[1], at[0])
				}
				flip(list, at[1])
			}
			if got := try(); !reflect.DeepEqual(got, want) {
				t.Errorf("unharmed: got %v want %v", got, want)
			}
		})
	}
}
