package policy

// prefixCache sends a prompt to the worker that was sent the longest beginning of it.
type prefixCache struct {
	o     Options
	tree  *Tree
	least leastInflight
	depth map[string]int // reused
}

func (p *prefixCache) Choose(r *Request, cands []Candidate) int {
	if len(r.Prefix) == 0 || len(cands) < 2 {
		return p.least.Choose(r, cands)
	}
	if p.depth == nil {
		p.depth = map[string]int{}
	}
	clear(p.depth)
	p.tree.Match(r.Prefix, p.depth)
	longest, load := 0, 0
	for i := range cands {
		switch d := p.depth[cands[i].ID]; {
		case d > longest, d == longest && cands[i].Inflight < load:
			longest, load = d, cands[i].Inflight
		}
	}
	if longest == 0 || float64(longest) < p.o.MinMatch*float64(len(r.Prefix)) || p.overloaded(load, fewest(cands)) {
		return p.least.Choose(r, cands)
	}
	return p.least.turn.among(cands, func(i int) bool {
		return p.depth[cands[i].ID] == longest && cands[i].Inflight == load
	})
}

// overloaded: a worker with so many legs had better not get another, whatever it has in its cache.
func (p *prefixCache) overloaded(load, least int) bool {
	return load-least >= p.o.BalanceAbs && float64(load) > p.o.BalanceRel*float64(least)
}

func (p *prefixCache) Sent(r *Request, id string) { p.tree.Insert(r.Prefix, id) }

func (p *prefixCache) Forget(id string) { p.tree.Forget(id) }

// TreeStats of a policy with a prefix tree; zero of another.
func TreeStats(p Policy) (s Stats) {
	if c, ok := p.(*prefixCache); ok {
		s = c.tree.Stats()
	}
	return s
}
