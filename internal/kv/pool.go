package kv

import (
	"container/heap"
	"container/list"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"time"
)

// Config of a Pool.
type Config struct {
	Name      string // for logs and metrics
	PageBytes int    // >= 1
	Pages     int    // >= 1
	// Plain: anonymous memory instead of a memfd; peers on the same machine cannot map it.
	Plain bool
	// Huge is how the memory comes by huge pages.
	Huge HugePages
	// Poison overwrites free pages with a pattern and checks it when they are taken
	// again, which finds stores into pages that nobody holds. For tests: each
	// return and each Alloc then touches every byte.
	Poison bool
	// PrefixPages bounds the pages that stay with the KV of ended requests, see Lease.Keep; 0: none do. They
	// are given up at once when a request needs pages.
	PrefixPages int
	// Log hears of broken invariants; nil: slog.Default.
	Log *slog.Logger
	// Now is the clock of ages; nil: time.Now.
	Now func() time.Time
}

// Validate names the first field that is out of range.
func (c Config) Validate() error {
	switch {
	case c.PageBytes < 1:
		return fmt.Errorf("kv: page of %d bytes, need at least 1", c.PageBytes)
	case c.Pages < 1 || int64(c.Pages) > math.MaxUint32:
		return fmt.Errorf("kv: %d pages, need 1 to %d", c.Pages, uint32(math.MaxUint32))
	case c.PrefixPages < 0 || c.PrefixPages > c.Pages:
		return fmt.Errorf("kv: a prefix cache of %d pages, want 0 to the pool's %d", c.PrefixPages, c.Pages)
	case c.Pages > math.MaxInt/c.PageBytes:
		return fmt.Errorf("kv: %d pages of %d bytes are more than an address can name", c.Pages, c.PageBytes)
	}
	return nil
}

// Pool is a mapping cut into pages.
type Pool struct {
	cfg Config
	mem []byte // nil after Close succeeded; written only then
	fd  int
	got HugePages // what became of cfg.Huge

	mu     sync.Mutex
	free   *freeMap
	cache  prefixCache
	live   map[*Lease]struct{}
	due    dueHeap    // live leases with a deadline that Expired has not returned
	quar   *list.List // *Lease in quarantine, oldest first
	freed  chan struct{}
	closed bool // no more Alloc
	st     Stats
}

// Open maps the memory. The caller closes the pool.
func Open(c Config) (*Pool, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	mem, fd, got, err := openMapping(c.Name, c.Pages*c.PageBytes, c.Plain, c.Huge)
	if err != nil {
		return nil, fmt.Errorf("kv: open pool %s: %w", c.Name, err)
	}
	if c.Huge == HugeTLB && got != HugeTLB {
		c.Log.Warn("kv: too few reserved huge pages, the pool has ordinary ones; raise vm.nr_hugepages or use advise",
			"pool", c.Name, "bytes", len(mem), "got", got)
	}
	p := &Pool{cfg: c, mem: mem, fd: fd, got: got, free: newFreeMap(c.Pages), cache: newPrefixCache(c.PrefixPages), live: make(map[*Lease]struct{}), quar: list.New()}
	if c.Poison {
		for i := range c.Pages {
			p.poison(PageID(i))
		}
	}
	return p, nil
}

// Memory is the whole mapping and its memfd, -1 if Plain. Both stay the pool's.
func (p *Pool) Memory() (bytes []byte, fd int) { return p.mem, p.fd }

// Huge is what became of Config.Huge: HugeAdvise is advice given, which the kernel may not have followed.
func (p *Pool) Huge() HugePages { return p.got }

// Page is the bytes of one page, capped at its end; for the owners of its lease.
func (p *Pool) Page(id PageID) []byte {
	o := int(id) * p.cfg.PageBytes
	return p.mem[o : o+p.cfg.PageBytes : o+p.cfg.PageBytes]
}

// PageBytes is the size of a page.
func (p *Pool) PageBytes() int { return p.cfg.PageBytes }

// Alloc takes n pages for a request, all or none, in ascending order and in as few
// runs as there are. n may be 0. label is for people (the room). The zero deadline
// never expires. Errors: ErrExhausted, ErrNeverFits, ErrClosed.
func (p *Pool) Alloc(n int, label string, deadline time.Time) (*Lease, error) {
	return p.AllocPrompt(nil, n, label, deadline)
}

// AllocPrompt is Alloc for a prompt that has these prefixes, in order, one page of each rank to each: of its n pages
// those of the longest cached beginning are shared (Lease.Shared) and only the rest is taken, from the free pages and
// then from what is cached and nobody shares. All or none, in one act: who waits for pages holds none.
func (p *Pool) AllocPrompt(prefixes []Prefix, n int, label string, deadline time.Time) (*Lease, error) {
	if n < 0 || n > p.cfg.Pages {
		return nil, fmt.Errorf("%w: %s needs %d pages, pool %s has %d", ErrNeverFits, label, n, p.cfg.Name, p.cfg.Pages)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, fmt.Errorf("%w: %s", ErrClosed, p.cfg.Name)
	}
	l := &Lease{pool: p, prefixes: prefixes, label: label, deadline: deadline, request: true, dueAt: -1}
	n = p.share(l, prefixes, n)
	if n > p.free.free+p.cache.evictable() {
		p.unshare(l)
		p.st.Exhausted++
		return nil, fmt.Errorf("%w: %s needs %d, pool %s has %d of %d", ErrExhausted, label, n, p.cfg.Name, p.free.free, p.cfg.Pages)
	}
	p.makeRoom(n)
	ids, _ := p.free.take(n)
	for _, b := range l.refs {
		p.st.PrefixReused += uint64(len(b.pages))
	}
	if p.cfg.Poison {
		for _, id := range ids {
			p.inspect(id, label)
		}
	}
	l.pages = ids
	p.live[l] = struct{}{}
	p.st.Allocs++
	p.st.Request += n
	if !deadline.IsZero() {
		heap.Push(&p.due, l)
	}
	return l, nil
}

// Freed is closed at the next return of pages, and when the pool closes. Get it
// before Alloc, else a return in between is missed.
func (p *Pool) Freed() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.freed == nil {
		p.freed = make(chan struct{})
		if p.closed {
			close(p.freed)
		}
	}
	return p.freed
}

// wake tells those who wait for Freed. Under mu.
func (p *Pool) wake() {
	if p.freed != nil && !p.closed {
		close(p.freed)
		p.freed = nil
	}
}

// Expired returns the live leases whose deadline is not after now and that it has
// not returned before, earliest first. It frees nothing: the caller must get the
// request to let go and the transfer to prove that it may.
func (p *Pool) Expired(now time.Time) []*Lease {
	p.mu.Lock()
	defer p.mu.Unlock()
	var ls []*Lease
	for len(p.due) > 0 && !p.due[0].deadline.After(now) {
		l := heap.Pop(&p.due).(*Lease)
		l.expired = true
		p.st.Expired++
		ls = append(ls, l)
	}
	return ls
}

// NextExpiry is the earliest deadline that Expired has yet to report; false if none.
func (p *Pool) NextExpiry() (time.Time, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.due) == 0 {
		return time.Time{}, false
	}
	return p.due[0].deadline, true
}

// Close ends Alloc at once and unmaps the memory. While leases are live it refuses with
// ErrHeld, naming some, and the memory stays mapped: a late write must hit
// memory that is still ours. It may be called again.
func (p *Pool) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.wake()
		p.closed = true
	}
	if len(p.live) > 0 {
		return p.heldLocked()
	}
	if p.mem == nil {
		return nil
	}
	mem, fd := p.mem, p.fd
	p.mem, p.fd = nil, -1
	if err := closeMapping(mem, fd); err != nil {
		return fmt.Errorf("kv: close pool %s: %w", p.cfg.Name, err)
	}
	return nil
}

func (p *Pool) heldLocked() error {
	err := fmt.Errorf("%w: pool %s, %d leases", ErrHeld, p.cfg.Name, len(p.live))
	shown := 0
	for l := range p.live {
		if shown++; shown > 4 {
			break
		}
		err = errors.Join(err, errors.New("  "+l.stringLocked()))
	}
	return err
}

// dueHeap is a container/heap of leases by deadline; Lease.dueAt is the index.
type dueHeap []*Lease

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].deadline.Before(h[j].deadline) }
func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].dueAt, h[j].dueAt = i, j
}

// Push is heap.Interface's.
func (h *dueHeap) Push(x any) {
	l := x.(*Lease)
	l.dueAt = len(*h)
	*h = append(*h, l)
}

// Pop is heap.Interface's.
func (h *dueHeap) Pop() any {
	old := *h
	l := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	l.dueAt = -1
	return l
}
