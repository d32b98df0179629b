package policy

// prefixCache sends a prompt to the worker that was sent the longest beginning of it.
type prefixCache struct {
	o     Options
	tree  *Tree
	least leastInflight
	depth []int // by worker's id in the tree; reused
	match []int // by candidate; reused
}

func (p *prefixCache) Choose(r *Request, cands []Candidate) int {
	if len(r.Prefix) == 0 || len(cands) < 2 {
		return p.least.Choose(r, cands)
	}
	p.depth = p.tree.Match(r.Prefix, p.depth)
	p.match = p.match[:0]
	longest, load := 0, 0
	for i := range cands {
		d := 0
		if id := p.tree.ID(cands[i].ID); id >= 0 {
			d = p.depth[id]
		}
		p.match = append(p.match, d)
		switch {
		case d > longest, d == longest && cands[i].Inflight < load:
			longest, load = d, cands[i].Inflight
		}
	}
	if longest == 0 || float64(longest) < p.o.MinMatch*float64(len(r.Prefix)) || p.overloaded(load, fewest(cands)) {
		return p.least.Choose(r, cands)
	}
	return p.least.turn.among(cands, func(i int) bool {
		return p.match[i] == longest && cands[i].Inflight == load
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
