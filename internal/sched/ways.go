package sched

import (
	"sync"

	"github.com/baton-pd/baton/internal/room"
)

const (
	// keepWays is how many ended requests are told of; maxLiveWays how many live ones at most.
	keepWays    = 128
	maxLiveWays = 256
)

// Way is what is known of one request's way through a worker, for people who watch.
type Way struct {
	ID           string
	Room         uint64 // 0: none
	Phase        string
	Times        Phases
	ChunksTotal  int
	PromptTokens int
	Tokens       int // generated
	Cause        *room.Cause
}

// Teller is a scheduler that tells the ways of its requests: those that are live, and the latest that have ended. Both
// schedulers of this package are.
type Teller interface{ Ways() []Way }

// ways keeps those that have ended.
type ways struct {
	mu   sync.Mutex
	ring [keepWays]*Way
	next int
}

func (w *ways) add(one *Way) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ring[w.next] = one
	w.next = (w.next + 1) % keepWays
}

// way is the request's as it is now.
func (l *life) way(chunk int) *Way {
	l.mu.Lock()
	defer l.mu.Unlock()
	times, n := l.times, len(l.req.Prompt)
	times.Chunks = append([]ChunkTime(nil), times.Chunks...)
	return &Way{
		ID: l.req.ID, Room: l.key().Room, Phase: l.phase.String(), Times: times,
		ChunksTotal: (n - 1 + chunk - 1) / chunk, PromptTokens: n, Tokens: l.tokens, Cause: l.cause,
	}
}

// Ways implements [Teller].
func (c *core) Ways() []Way {
	c.mu.Lock()
	live := make([]*life, 0, min(len(c.live), maxLiveWays))
	for _, l := range c.live {
		if len(live) == maxLiveWays {
			break
		}
		live = append(live, l)
	}
	c.mu.Unlock()
	var out []Way
	for _, l := range live {
		out = append(out, *l.way(c.info.ChunkTokens))
	}
	c.ended.mu.Lock()
	defer c.ended.mu.Unlock()
	for i := range keepWays {
		if w := c.ended.ring[(c.ended.next+i)%keepWays]; w != nil {
			out = append(out, *w)
		}
	}
	return out
}

var (
	_ Teller = (*Prefill)(nil)
	_ Teller = (*Decode)(nil)
)
