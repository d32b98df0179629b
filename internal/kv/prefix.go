package kv

import (
	"container/list"
	"crypto/sha256"
	"encoding/binary"
	"hash/crc32"
)

// Prefix names the beginning of a prompt up to the end of one of its pages. Nobody can make two prompts
// whose prefixes are equal and whose tokens are not.
type Prefix struct {
	Tokens int               // how many, > 0
	Sum    [sha256.Size]byte // SHA-256 over the Sum before (zeros at first) and the tokens since, little-endian
}

// Prefixes names the beginnings of tokens that end at ends: ascending, each in 1 to len(tokens).
func Prefixes[T ~int32](tokens []T, ends []int) []Prefix {
	out := make([]Prefix, len(ends))
	var before Prefix
	var b []byte
	for i, end := range ends {
		b = append(b[:0], before.Sum[:]...)
		for _, t := range tokens[before.Tokens:end] {
			b = binary.LittleEndian.AppendUint32(b, uint32(t))
		}
		before = Prefix{end, sha256.Sum256(b)}
		out[i] = before
	}
	return out
}

// PageEnds lists the tokens at which pages end that hold the same in every prompt that begins with the same tokens: those
// that are full, and the last of a full chunk. Chunk i is tokens [bounds[i], bounds[i+1]) and begins a page; a full
// one has chunk tokens. Each end is that of one page of every rank.
func (s Shards) PageEnds(bounds []int, chunk int) (ends []int) {
	for i := 1; i < len(bounds); i++ {
		from, to := bounds[i-1], bounds[i]
		for end := from + s.PageTokens; end <= to; end += s.PageTokens {
			ends = append(ends, end)
		}
		switch short := (to - from) % s.PageTokens; {
		case short != 0 && to-from != chunk:
			return ends // in another prompt this page goes on, and so lies what follows elsewhere
		case short != 0:
			ends = append(ends, to)
		}
	}
	return ends
}

// prefixCache holds the pages of prompts that nobody else holds any more, for prompts that begin alike.
// Pure; under Pool.mu.
//
// An entry is found only if all before it in its prompt are there. None is ever missing: who refers to an entry refers to
// those before it, and idle lists each after all that go on from it, so what is evicted is always the
// end of a prompt.
type prefixCache struct {
	limit   int // pages
	entries map[Prefix]*entry
	pages   int        // of all entries, <= limit
	inUse   int        // of entries with refs > 0, <= pages
	idle    *list.List // *entry with refs == 0, least recently used first
}

// entry is the pages, one of each rank, whose tokens end at a prefix.
type entry struct {
	prefix Prefix
	pages  []PageID
	refs   int           // leases that share it
	at     *list.Element // in idle; nil while refs > 0
	crc    uint32        // of its bytes, if the pool poisons
}

func newPrefixCache(limit int) prefixCache {
	return prefixCache{limit: limit, entries: map[Prefix]*entry{}, idle: list.New()}
}

// match is the entries of the longest beginning that is here.
func (c *prefixCache) match(prefixes []Prefix) (found []*entry) {
	for _, x := range prefixes {
		b := c.entries[x]
		if b == nil {
			break
		}
		found = append(found, b)
	}
	return found
}

// refer makes one more lease share entries. They, and what the lease shares already, are a prompt's first.
func (c *prefixCache) refer(entries ...*entry) {
	for _, b := range entries {
		if b.refs++; b.refs == 1 {
			c.inUse += len(b.pages)
			c.idle.Remove(b.at)
			b.at = nil
		}
	}
}

// drop undoes refer of all that one lease shares, in their order.
func (c *prefixCache) drop(entries []*entry) {
	for i := len(entries) - 1; i >= 0; i-- { // the end of a prompt is evicted first
		b := entries[i]
		if b.refs--; b.refs == 0 {
			c.inUse -= len(b.pages)
			b.at = c.idle.PushBack(b)
		}
	}
}

// evictable is how many pages evict can give.
func (c *prefixCache) evictable() int { return c.pages - c.inUse }

// evict takes out the entry that has not been used for longest; there is one.
func (c *prefixCache) evict() *entry {
	b := c.idle.Remove(c.idle.Front()).(*entry)
	delete(c.entries, b.prefix)
	c.pages -= len(b.pages)
	b.at = nil
	return b
}

// add takes pages as an idle entry, for which evict has made room.
func (c *prefixCache) add(x Prefix, pages []PageID, crc uint32) *entry {
	b := &entry{prefix: x, pages: pages, crc: crc}
	b.at = c.idle.PushBack(b)
	c.entries[x] = b
	c.pages += len(pages)
	return b
}

// share makes l refer to the longest beginning that is cached, of at most n pages, and returns how many of the n are to
// be taken besides. Under mu.
func (p *Pool) share(l *Lease, prefixes []Prefix, n int) (own int) {
	own = n
	for _, b := range p.cache.match(prefixes) {
		if own < len(b.pages) {
			break
		}
		own -= len(b.pages)
		l.refs, l.shared = append(l.refs, b), append(l.shared, b.pages)
		p.checkEntry(b)
	}
	p.cache.refer(l.refs...)
	return own
}

// unshare ends l's references. Under mu, more than once.
func (p *Pool) unshare(l *Lease) {
	p.cache.drop(l.refs)
	l.refs = nil
}

// makeRoom evicts until n pages are free, as far as it can. Under mu.
func (p *Pool) makeRoom(n int) {
	for p.free.free < n && p.cache.evictable() > 0 {
		p.evict()
	}
}

// evict frees the pages of one entry. Under mu.
func (p *Pool) evict() {
	b := p.cache.evict()
	p.checkEntry(b)
	p.st.PrefixEvicted += uint64(len(b.pages))
	for _, id := range b.pages {
		p.putFree(id, nil)
	}
}

// keep moves pages of l, which nobody holds any more, to the cache, and returns the others. l refers to what is cached of its
// prompt then, so that making room for the end of it does not cost its beginning. Under mu.
func (p *Pool) keep(l *Lease) (rest []PageID) {
	own := make(map[PageID]bool, len(l.pages))
	for _, id := range l.pages {
		own[id] = true
	}
	for i, pages := range l.kept {
		x := l.prefixes[len(l.shared)+i]
		b := p.cache.entries[x] // not nil: another prompt has brought it meanwhile
		if b == nil {
			for p.cache.pages+len(pages) > p.cache.limit && p.cache.evictable() > 0 {
				p.evict()
			}
			if p.cache.pages+len(pages) > p.cache.limit {
				break // and what goes on from here could not be found
			}
			if !takeAll(own, pages) {
				p.misuse("pages to be kept that are not the lease's", l)
				break
			}
			b = p.cache.add(x, pages, p.crcOf(pages))
			p.st.PrefixKept += uint64(len(pages))
		}
		p.cache.refer(b)
		l.refs = append(l.refs, b)
	}
	for _, id := range l.pages {
		if own[id] {
			rest = append(rest, id)
		}
	}
	return rest
}

// takeAll removes pages from own, all or none: false if one is not there, or is named twice.
func takeAll(own map[PageID]bool, pages []PageID) bool {
	for i, id := range pages {
		if !own[id] {
			for _, id := range pages[:i] {
				own[id] = true
			}
			return false
		}
		delete(own, id)
	}
	return true
}

// ForgetPrefixes evicts every cached page that no live request shares. In-use ones stay.
func (p *Pool) ForgetPrefixes() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mem == nil {
		return
	}
	for p.cache.evictable() > 0 {
		p.evict()
	}
	p.wake()
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// crcOf is the checksum of pages, 0 if the pool does not poison. Under mu.
func (p *Pool) crcOf(pages []PageID) (crc uint32) {
	if p.cfg.Poison {
		for _, id := range pages {
			crc = crc32.Update(crc, castagnoli, p.Page(id))
		}
	}
	return crc
}
