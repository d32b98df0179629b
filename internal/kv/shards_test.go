package kv

import (
	"errors"
	"strings"
	"testing"
)

func TestValidateNamesTheField(t *testing.T) {
	good := Shards{Model{Layers: 4, KVHeads: 4, HeadDim: 8, ElemBytes: 2}, Split{TP: 2, PP: 2, PageTokens: 16}}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for field, change := range map[string]func(*Shards){
		"layers":      func(s *Shards) { s.Layers = 0 },
		"kv_heads":    func(s *Shards) { s.Latent = true },
		"head_dim":    func(s *Shards) { s.HeadDim = 1 << 30 },
		"elem_bytes":  func(s *Shards) { s.ElemBytes = -1 },
		"tp":          func(s *Shards) { s.TP = 3 },
		"pp":          func(s *Shards) { s.PP = 5 },
		"page_tokens": func(s *Shards) { s.PageTokens, s.HeadDim, s.KVHeads, s.Layers = 1<<20, 1<<20, 1<<16, 4096 },
	} {
		s := good
		change(&s)
		var e *LayoutError
		if err := s.Validate(); !errors.As(err, &e) || !errors.Is(err, ErrLayout) || e.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func TestCompatibleNamesTheField(t *testing.T) {
	base := Shards{Model{Layers: 6, KVHeads: 6, HeadDim: 8, ElemBytes: 2}, Split{TP: 2, PP: 2, PageTokens: 16}}
	for field, change := range map[string]func(*Shards){
		"":           func(s *Shards) { s.TP, s.PP, s.PageTokens, s.HeadsFirst = 6, 3, 7, true },
		"tp":         func(s *Shards) { s.TP = 3 },
		"layers":     func(s *Shards) { s.Layers = 7 },
		"kv_heads":   func(s *Shards) { s.KVHeads = 12 },
		"head_dim":   func(s *Shards) { s.HeadDim = 9 },
		"elem_bytes": func(s *Shards) { s.ElemBytes = 1 },
		"latent":     func(s *Shards) { s.Latent = true },
	} {
		other := base
		change(&other)
		err := Compatible(base, other)
		var e *LayoutError
		switch {
		case field == "" && err != nil:
			t.Errorf("refused: %v", err)
		case field != "" && (!errors.As(err, &e) || e.Field != field):
			t.Errorf("%s: %v", field, err)
		}
		if field == "tp" && !strings.Contains(err.Error(), "tp is 2 at the source and 3 at the destination") {
			t.Errorf("the error does not name the values: %v", err)
		}
	}
}

// TestExchangeRefuses: what a peer says of itself is checked before anything is planned for it.
func TestExchangeRefuses(t *testing.T) {
	good := Shards{Model{Layers: 2, KVHeads: 4, HeadDim: 8, ElemBytes: 2}, Split{TP: 2, PP: 2, PageTokens: 16}}
	three, big, none := good, good, Shards{}
	three.TP = 3
	big.PageTokens, big.HeadDim = 1<<20, 1<<10
	huge := big // the page could be, but not so many of them
	for name, c := range map[string][2]Shards{"tp": {good, three}, "other model": {good, big}, "none": {good, none}, "too many bytes": {huge, big}} {
		if _, err := NewExchange(c[0], c[1], 10, 1<<32-1); !errors.Is(err, ErrLayout) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := NewExchange(good, good, 10, 1<<32-1); err != nil {
		t.Error(err)
	}
}

// TestRankLayoutRefuses: whatever a peer could describe that would let two things lie in one place, or nowhere.
func TestRankLayoutRefuses(t *testing.T) {
	s := Shards{Model{Layers: 4, KVHeads: 4, HeadDim: 8, ElemBytes: 2}, Split{TP: 2, PP: 2, PageTokens: 16}}
	for field, change := range map[string]func(*Layout){
		"tp_rank":      func(l *Layout) { l.TPRank = 2 },
		"pp_rank":      func(l *Layout) { l.PPRank = -1 },
		"pages":        func(l *Layout) { l.Pages = 0 },
		"buffer layer": func(l *Layout) { l.Buffers[0].Layer = 4 },
		"buffer part":  func(l *Layout) { l.Buffers[0].Part = PartLatent },
		"item_bytes":   func(l *Layout) { l.Buffers[1].ItemBytes = 8 },
		"buffer base":  func(l *Layout) { l.Buffers[1].Base-- },
	} {
		l := s.Layout(1, 10)
		if err := l.Validate(); err != nil {
			t.Fatal(err)
		}
		change(&l)
		var e *LayoutError
		if err := l.Validate(); !errors.As(err, &e) || e.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
	twice, half, wide := s.Layout(0, 10), s.Layout(0, 10), s.Layout(0, 10)
	twice.Buffers = append(twice.Buffers, Buffer{Region: 9, ItemBytes: 1 << 20, Part: PartK})
	half.Buffers = half.Buffers[1:]
	wide.Buffers[0].ItemBytes = 1 << 62
	for name, l := range map[string]*Layout{"a row in two buffers": &twice, "K without V": &half, "more than an address": &wide} {
		if err := l.Validate(); !errors.Is(err, ErrLayout) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPlanRefusesPages(t *testing.T) {
	s := Shards{Model{Layers: 1, KVHeads: 2, HeadDim: 8, ElemBytes: 1}, Split{TP: 1, PP: 1, PageTokens: 4}}
	l := s.Layout(0, 8)
	side := func(first int, pages ...PageID) Side { return Side{Layout: &l, Pages: pages, First: first} }
	good := side(0, 1, 2)
	for name, c := range map[string]struct {
		src, dst Side
		from, to int
	}{
		"too few source pages":      {side(0, 1), good, 0, 8},
		"too few destination pages": {good, side(0, 1), 0, 5},
		"before the first token":    {good, side(4, 1), 3, 4},
		"backwards":                 {good, good, 4, 3},
		"source page outside":       {side(0, 1, 8), good, 0, 8},
		"destination page outside":  {good, side(0, 9, 1), 0, 8},
		"destination page twice":    {good, side(0, 5, 5), 0, 8},
	} {
		if got, err := Plan(c.src, c.dst, c.from, c.to); !errors.Is(err, ErrLayout) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	if got, err := Plan(good, good, 3, 3); len(got) != 0 || err != nil {
		t.Errorf("no tokens: %v, %v", got, err)
	}
}

// TestPeers: who talks to whom, and that one writer is chosen among ranks that hold the same heads.
func TestPeers(t *testing.T) {
	for _, c := range []struct {
		name           string
		heads          int
		latent         bool
		stp, spp       int
		dtp, dpp, rank int
		want           []int
	}{
		{"1 to 4", 4, false, 1, 1, 4, 1, 3, []int{0}},
		{"4 to 1", 4, false, 4, 1, 1, 1, 0, []int{0, 1, 2, 3}},
		{"4 to 2", 4, false, 4, 1, 2, 1, 1, []int{2, 3}},
		{"8 ranks of 2 heads to 1", 2, false, 8, 1, 1, 1, 0, []int{0, 4}},
		{"8 ranks of 2 heads to 2", 2, false, 8, 1, 2, 1, 1, []int{5}}, // the load is shared among 4..7
		{"latent 4 to 2", 1, true, 4, 1, 2, 1, 1, []int{1}},
		{"pp 2 to 1", 4, false, 1, 2, 1, 1, 0, []int{0, 1}},
		{"pp 1 to 2", 4, false, 2, 1, 2, 2, 3, []int{1}},
	} {
		m := Model{Layers: 4, KVHeads: c.heads, HeadDim: 2, ElemBytes: 1, Latent: c.latent}
		src, dst := Shards{m, Split{TP: c.stp, PP: c.spp, PageTokens: 4}}, Shards{m, Split{TP: c.dtp, PP: c.dpp, PageTokens: 8}}
		var srcs []*Layout
		for r := range src.Ranks() {
			l := src.Layout(r, 4)
			srcs = append(srcs, &l)
		}
		d := dst.Layout(c.rank, 4)
		got, err := Peers(srcs, &d)
		if err != nil || len(got) != len(c.want) {
			t.Errorf("%s: %v, %v; want %v", c.name, got, err, c.want)
			continue
		}
		for i := range got {
			if got[i] != c.want[i] {
				t.Errorf("%s: %v, want %v", c.name, got, c.want)
			}
		}
		if _, err := Peers(srcs[1:], &d); (err == nil) != (c.want[0] != 0) {
			t.Errorf("%s without rank 0: %v", c.name, err)
		}
	}
}
