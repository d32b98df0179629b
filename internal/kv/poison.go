package kv

import "bytes"

// poisonPattern fills free pages. 0xdb is in no header of ours, makes an f16 of about
// -240 and a huge negative int, so KV that is read by mistake shows too.
var poisonPattern = bytes.Repeat([]byte{0xdb}, 4096)

// poison fills a free page. Under mu, or before the pool is shared.
func (p *Pool) poison(id PageID) {
	b := p.Page(id)
	for len(b) > 0 {
		b = b[copy(b, poisonPattern):]
	}
}

// inspect reports a page that changed while it was free. Under mu.
func (p *Pool) inspect(id PageID, next string) {
	page := p.Page(id)
	for b := page; len(b) > 0; {
		n := min(len(b), len(poisonPattern))
		if bytes.Equal(b[:n], poisonPattern[:n]) {
			b = b[n:]
			continue
		}
		at := len(page) - len(b)
		for page[at] == poisonPattern[0] {
			at++
		}
		p.st.PoisonHits++
		p.cfg.Log.Error("kv: a free page was written to", "pool", p.cfg.Name, "page", id, "offset", at, "next_owner", next)
		return
	}
}

// CheckFree looks at every free and every cached page of a poisoned pool and returns how many free pages and
// entries of cached ones were written to since they became so; each is counted in Stats.PoisonHits, logged, and
// poisoned again if free. 0 if the pool does not poison.
func (p *Pool) CheckFree() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.cfg.Poison || p.mem == nil {
		return 0
	}
	before := p.st.PoisonHits
	for i := range p.cfg.Pages {
		if id := PageID(i); p.free.has(id) {
			n := p.st.PoisonHits
			p.inspect(id, "none yet")
			if p.st.PoisonHits != n {
				p.poison(id)
			}
		}
	}
	for _, b := range p.cache.entries {
		p.checkEntry(b)
	}
	return int(p.st.PoisonHits - before)
}

// checkEntry reports a cached entry that changed since it was kept. Under mu.
func (p *Pool) checkEntry(b *entry) {
	if p.crcOf(b.pages) != b.crc {
		p.st.PoisonHits++
		p.cfg.Log.Error("kv: a cached page was written to", "pool", p.cfg.Name, "pages", b.pages, "prefix_tokens", b.prefix.Tokens)
		b.crc = p.crcOf(b.pages)
	}
}
