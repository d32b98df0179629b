package room

import (
	"sync/atomic"
	"time"
)

// codes are what terminal rooms are counted by. A cause may come from a peer, so an
// unknown code is counted as "other" and cannot grow the metrics.
var codes = [...]Code{
	CodeAborted, CodeClientGone, CodeDeadline, CodePeerLost, CodeTransferFailed, CodeChunkDropped,
	CodeMismatch, CodeCapacity, CodeEngine, CodeShutdown, CodeDuplicate, CodeProtocol, CodeInvalid,
	CodeUnavailable, CodeInternal, codeOther,
}

const codeOther Code = "other"

// counters are monotonic; written by anybody, read by Stats.
type counters struct {
	opened, succeeded                      atomic.Uint64
	failed                                 [len(codes)]atomic.Uint64
	stale, duplicates, lateCauses, skipped atomic.Uint64
	evicted                                atomic.Uint64
}

func (c *counters) ended(s State, cause *Cause) {
	if s == StateSuccess {
		c.succeeded.Add(1)
		return
	}
	i := 0
	for i < len(codes)-1 && codes[i] != cause.Code {
		i++
	}
	c.failed[i].Add(1)
}

func (g *Registry) count(fx Effects) {
	if fx&(FxStale|FxDuplicate|FxLateCause|FxSkip) == 0 {
		return
	}
	c := &g.counted
	if fx&FxStale != 0 {
		c.stale.Add(1)
	}
	if fx&FxDuplicate != 0 {
		c.duplicates.Add(1)
	}
	if fx&FxLateCause != 0 {
		c.lateCauses.Add(1)
	}
	if fx&FxSkip != 0 {
		c.skipped.Add(1)
	}
}

// Stats is a snapshot. The gauges are those of no single instant while rooms move.
type Stats struct {
	// Live counts the rooms not yet forgotten, by state: terminal ones wait for their
	// drain or their owner.
	Live [StateSuccess + 1]int
	// OldestAge is the time since the oldest of them was opened.
	OldestAge [StateSuccess + 1]time.Duration
	// Undrained counts the terminal rooms for which bytes may still be stored, and
	// Outstanding the writes of all rooms (sender).
	Undrained, Outstanding int
	// Tombstones are all; AbortTombstones those that wait for their room.
	Tombstones, AbortTombstones int

	// Since the start:
	Opened, Succeeded uint64
	Failed            map[Code]uint64 // by first cause; codes of no room are absent
	Stale             uint64          // events that came too late or matched nothing
	Duplicates        uint64          // repeated events
	LateCauses        uint64          // failures of rooms that had failed before
	Skipped           uint64          // chunks not written, grants not sent
	EvictedTombstones uint64          // forgotten before their time, for want of room
}

// Rooms is the number of rooms not yet forgotten.
func (s Stats) Rooms() (n int) {
	for _, v := range s.Live {
		n += v
	}
	return n
}

// Stats looks at every room; about 20 ns each.
func (g *Registry) Stats() Stats {
	s := Stats{Failed: make(map[Code]uint64)}
	now := int64(g.now())
	for i := range g.shards {
		sh := &g.shards[i]
		sh.mu.Lock()
		for _, r := range sh.rooms {
			st := r.State()
			s.Live[st]++
			s.OldestAge[st] = max(s.OldestAge[st], time.Duration(now-r.opened))
			s.Outstanding += r.Outstanding()
			if r.Drain().Pending() {
				s.Undrained++
			}
		}
		s.AbortTombstones += len(sh.aborted.m)
		s.Tombstones += len(sh.aborted.m) + len(sh.endedAt.m)
		sh.mu.Unlock()
	}
	c := &g.counted
	s.Opened, s.Succeeded = c.opened.Load(), c.succeeded.Load()
	for i, code := range codes {
		if n := c.failed[i].Load(); n > 0 {
			s.Failed[code] = n
		}
	}
	s.Stale, s.Duplicates, s.LateCauses = c.stale.Load(), c.duplicates.Load(), c.lateCauses.Load()
	s.Skipped, s.EvictedTombstones = c.skipped.Load(), c.evicted.Load()
	return s
}
