package policy

// Weights of pair-cost, in requests that wait: what is as bad as one more request before this one.
const (
	costPerSecond = 2.0 // the oldest request has been waiting for a second
	costMemory    = 8.0 // no KV memory is free; nothing while more than memoryShort is
	memoryShort   = 0.2
	costZone      = 0.25 // the other worker is on another host of the zone
	costUnknown   = 0.5  // nobody said where one of the two is
	costFar       = 2.0  // it is in another zone
)

// pairCost takes the candidate of the least cost, in turn among equals. Distance decides between workers
// with little to do; a queue, its age or a lack of memory soon weighs more.
type pairCost struct {
	unlearned
	turn  roundRobin
	costs []float64 // by candidate; reused
}

func (p *pairCost) Choose(r *Request, cands []Candidate) int {
	best := 0.0
	p.costs = p.costs[:0]
	for i := range cands {
		c := Cost(r, &cands[i])
		p.costs = append(p.costs, c)
		if i == 0 || c < best {
			best = c
		}
	}
	return p.turn.among(cands, func(i int) bool { return p.costs[i] == best })
}

// Cost is how bad pair-cost thinks of a candidate; 0 is best.
func Cost(r *Request, c *Candidate) float64 {
	// The worker's queue holds legs of this router, too; counting both would count them twice.
	cost := float64(max(c.Inflight, c.Load.Queue))
	if c.Load.Known {
		cost += costPerSecond * c.Load.Oldest.Seconds()
		if c.Load.Free < memoryShort {
			cost += costMemory * (memoryShort - max(c.Load.Free, 0)) / memoryShort
		}
	}
	return cost + distance(r.Peer, c)
}

func distance(a, b *Candidate) float64 {
	switch {
	case a == nil, a.Host != "" && a.Host == b.Host:
		return 0
	case a.Zone == "" || b.Zone == "":
		return costUnknown
	case a.Zone == b.Zone:
		return costZone
	default:
		return costFar
	}
}
