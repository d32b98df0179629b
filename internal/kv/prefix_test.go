package kv

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestPageEnds: a page ends where it is full, and with a full chunk; never where only a short chunk ends.
func TestPageEnds(t *testing.T) {
	for _, c := range []struct {
		page, chunk int
		bounds      []int
		want        []int
	}{
		{4, 8, []int{0, 8, 16, 19}, []int{4, 8, 12, 16}},
		{4, 8, []int{0, 8, 12}, []int{4, 8, 12}},
		{5, 8, []int{0, 8, 16, 23}, []int{5, 8, 13, 16, 21}},
		{32, 8, []int{0, 8, 16, 20}, []int{8, 16}},
		{1, 2, []int{0, 2, 3}, []int{1, 2, 3}},
		{16, 16, []int{0, 15}, nil},
		{4, 8, []int{0, 8, 13, 21}, []int{4, 8, 12}},
		{4, 8, []int{0, 8, 12, 20}, []int{4, 8, 12, 16, 20}},
		{16, 16, []int{0}, nil},
	} {
		s := Shards{Split: Split{PageTokens: c.page}}
		if got := s.PageEnds(c.bounds, c.chunk); !slices.Equal(got, c.want) {
			t.Errorf("pages of %d, chunks %v: %v, want %v", c.page, c.bounds, got, c.want)
		}
	}
}

// TestPrefixes: equal exactly for equal tokens up to there, whatever follows.
func TestPrefixes(t *testing.T) {
	ends := []int{2, 4, 6}
	a := Prefixes([]int32{1, 2, 3, 4, 5, 6, 7}, ends)
	for _, c := range []struct {
		tokens []int32
		equal  int
	}{
		{[]int32{1, 2, 3, 4, 5, 6, 9, 9}, 3}, {[]int32{1, 2, 3, 4, 5, 7}, 2}, {[]int32{1, 2, 4, 3, 5, 6}, 1}, {[]int32{0, 2, 3, 4, 5, 6}, 0},
	} {
		b := Prefixes(c.tokens, ends)
		for i := range b {
			if (a[i] == b[i]) != (i < c.equal) || b[i].Tokens != ends[i] {
				t.Errorf("%v, prefix %d: equal %v", c.tokens, i, a[i] == b[i])
			}
		}
	}
	if Prefixes([]int32{1, 2}, []int{2})[0] == Prefixes([]int32{1, 2}, []int{1, 2})[1] {
		t.Error("pages that end elsewhere have the same name")
	}
}

// prompts is a prompt whose pages hold one token each, on perPrefix ranks.
const perPrefix = 2

func prefixesOf(tokens ...int32) []Prefix {
	ends := make([]int, len(tokens))
	for i := range ends {
		ends[i] = i + 1
	}
	return Prefixes(tokens, ends)
}

// fill is what rank r's page of a prefix holds.
func fill(p *Pool, id PageID, x Prefix, r int) []byte {
	return bytes.Repeat(append(binary.LittleEndian.AppendUint32(nil, uint32(r)), x.Sum[:28]...), p.PageBytes()/32)
}

// take allocates a prompt's pages, checks what is shared and stores the rest.
func take(t *testing.T, p *Pool, tokens ...int32) *Lease {
	t.Helper()
	l, err := p.AllocPrompt(prefixesOf(tokens...), perPrefix*len(tokens), "room", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	stored(t, p, l)
	return l
}

func stored(t *testing.T, p *Pool, l *Lease) {
	t.Helper()
	for i, pages := range l.Shared() {
		for r, id := range pages {
			if !bytes.Equal(p.Page(id), fill(p, id, l.prefixes[i], r)) {
				t.Fatalf("shared page %d does not hold rank %d of prefix %d", id, r, i)
			}
		}
	}
	for i, pages := range own(l) {
		for r, id := range pages {
			copy(p.Page(id), fill(p, id, l.prefixes[len(l.Shared())+i], r))
		}
	}
}

func own(l *Lease) (out [][]PageID) {
	return slices.Collect(slices.Chunk(l.Pages(), perPrefix))
}

// end lets go of l as a room does that has succeeded.
func end(l *Lease) {
	l.Grant()
	l.Keep(own(l))
	l.ReleaseRequest()
	l.ReleaseTransfer(ProofDrained)
}

// TestPrefixIsShared: the second prompt takes only what the first did not bring, both orders of letting go keep, and an idle pool says so.
func TestPrefixIsShared(t *testing.T) {
	p := open(t, Config{Pages: 20, PrefixPages: 10, Poison: true})
	end(take(t, p, 1, 2, 3))
	if s := balanced(t, p); s.Cached != 6 || s.Free != 14 || !s.Idle() || s.PrefixKept != 6 {
		t.Fatalf("%+v", s)
	}
	a, b := take(t, p, 1, 2, 3, 4), take(t, p, 1, 2, 9)
	if len(a.Shared()) != 3 || len(a.Pages()) != 2 || len(b.Shared()) != 2 || len(b.Pages()) != 2 {
		t.Errorf("%v and %v, %v and %v", a.Shared(), a.Pages(), b.Shared(), b.Pages())
	}
	if s := balanced(t, p); s.Cached != 6 || s.Shared != 6 || s.Request != 4 || s.PrefixReused != 10 || s.Idle() {
		t.Errorf("%+v", s)
	}
	b.Grant()
	b.Keep(own(b))
	b.ReleaseTransfer(ProofDrained) // before the request
	b.ReleaseRequest()
	if s := balanced(t, p); s.Cached != 8 || s.Shared != 6 {
		t.Errorf("%+v", s)
	}
	end(a)
	if s := balanced(t, p); s.Cached != 10 || !s.Idle() || s.PrefixEvicted != 0 || p.CheckFree() != 0 {
		t.Errorf("%+v", s)
	}
	if c := take(t, p, 1, 2, 9, 5); len(c.Shared()) != 3 {
		t.Errorf("shares %v", c.Shared())
	} else {
		c.ReleaseRequest()
	}
	p.ForgetPrefixes()
	if s := balanced(t, p); s.Cached != 0 || s.Free != 20 || s.PrefixEvicted != 10 || s.Misuses != 0 {
		t.Errorf("%+v", s)
	}
}

// TestOnlyProvenPagesAreKept: a lease that nobody said is right, or whose transfer was only fenced, leaves nothing in the cache, and what it shared is
// still there.
func TestOnlyProvenPagesAreKept(t *testing.T) {
	for name, let := range map[string]func(*Lease){
		"not kept":      func(l *Lease) { l.Grant(); l.ReleaseRequest(); l.ReleaseTransfer(ProofDrained) },
		"fenced":        func(l *Lease) { l.Grant(); l.Keep(own(l)); l.ReleaseRequest(); l.ReleaseTransfer(ProofFenced) },
		"fenced first":  func(l *Lease) { l.Grant(); l.Keep(own(l)); l.ReleaseTransfer(ProofFenced); l.ReleaseRequest() },
		"never granted": func(l *Lease) { l.Keep(own(l)); l.ReleaseRequest() },
	} {
		p := open(t, Config{Pages: 20, PrefixPages: 20, Poison: true})
		end(take(t, p, 1, 2))
		let(take(t, p, 1, 2, 3, 4))
		if s := balanced(t, p); s.Cached != 4 || !s.Idle() || s.Misuses != 0 || p.CheckFree() != 0 {
			t.Errorf("%s: %+v", name, s)
		}
	}
	p := open(t, Config{Pages: 20}) // no cache
	end(take(t, p, 1, 2))
	if s := balanced(t, p); s.Cached != 0 || s.Free != 20 || s.Misuses != 0 {
		t.Errorf("without a cache: %+v", s)
	}
}

// TestQuarantineSharesNothing: what a failed request shared is free to be evicted while its own pages wait for their writer.
func TestQuarantineSharesNothing(t *testing.T) {
	p := open(t, Config{Pages: 6, PrefixPages: 6})
	end(take(t, p, 1, 2))
	l := take(t, p, 1, 2, 3)
	l.Grant()
	freed := p.Freed()
	l.ReleaseRequest()
	if s := balanced(t, p); s.Quarantine != 2 || s.Shared != 0 || s.Cached != 4 {
		t.Errorf("%+v", s)
	}
	select {
	case <-freed:
	default:
		t.Error("who waits for pages was not woken")
	}
	take(t, p, 7, 8).ReleaseRequest()
	l.ReleaseTransfer(ProofFenced)
}

// TestEvictionTakesTheEndsOfOldPrompts: least recently used first, children before parents, at once when pages are needed and never what is shared.
func TestEvictionTakesTheEndsOfOldPrompts(t *testing.T) {
	p := open(t, Config{Pages: 12, PrefixPages: 8})
	cached := func(tokens ...int32) int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.cache.match(prefixesOf(tokens...)))
	}
	end(take(t, p, 1, 2))
	end(take(t, p, 5, 6))
	end(take(t, p, 1, 3)) // over the bound: 2 of the oldest prompt goes, not its 1
	if got := [3]int{cached(1, 2), cached(5, 6), cached(1, 3)}; got != [3]int{1, 2, 2} {
		t.Errorf("cached: %v", got)
	}
	a := take(t, p, 5, 7) // shares 5; 10 of 12 pages are held now
	b, err := p.Alloc(4, "many", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	if got := [2]int{cached(5, 6), cached(1, 3)}; got != [2]int{1, 2} {
		t.Errorf("cached: %v", got)
	}
	if s := balanced(t, p); s.Shared != 2 || s.Cached != 6 || s.Free != 0 {
		t.Errorf("%+v", s)
	}
	if _, err := p.Alloc(5, "too many", time.Time{}); !errors.Is(err, ErrExhausted) {
		t.Errorf("%v", err)
	}
	if s := balanced(t, p); s.Cached != 6 {
		t.Errorf("a request that does not fit has evicted: %+v", s)
	}
	c, err := p.AllocPrompt(prefixesOf(1, 3, 9), 6, "shares what it would evict", time.Time{})
	if !errors.Is(err, ErrExhausted) {
		t.Errorf("%v, %v", c, err)
	}
	a.ReleaseRequest()
	b.ReleaseRequest()
	end(take(t, p, 8, 8, 8, 8, 8)) // longer than the bound: its beginning is kept
	if got := cached(8, 8, 8, 8, 8); got != 4 {
		t.Errorf("%d prefixes of a long prompt are kept, want 4", got)
	}
}

// TestKeepRefuses: pages of others never get into the cache.
func TestKeepRefuses(t *testing.T) {
	p := open(t, Config{Pages: 12, PrefixPages: 12, Log: quiet()})
	other := alloc(t, p, 2)
	l := take(t, p, 1, 2, 3)
	l.Grant()
	l.Keep([][]PageID{l.Pages()[:2], {l.Pages()[2], other.Pages()[0]}, l.Pages()[4:]})
	l.ReleaseRequest()
	l.ReleaseTransfer(ProofDrained)
	if s := balanced(t, p); s.Cached != 2 || s.Misuses != 1 || s.Free != 8 {
		t.Errorf("%+v", s)
	}
	l.Keep(nil)
	m := take(t, p, 5)
	m.Keep([][]PageID{m.Pages(), m.Pages()})
	m.ReleaseRequest()
	if s := balanced(t, p); s.Cached != 2 || s.Misuses != 3 {
		t.Errorf("%+v", s)
	}
	other.ReleaseRequest()
}

// TestPoisonFindsStoresIntoTheCache: at the next use, at eviction and when asked.
func TestPoisonFindsStoresIntoTheCache(t *testing.T) {
	p := open(t, Config{Pages: 8, PrefixPages: 8, Poison: true, Log: quiet()})
	end(take(t, p, 1, 2))
	damage := func() {
		l, err := p.AllocPrompt(prefixesOf(1), perPrefix, "writer", time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		p.Page(l.Shared()[0][1])[7] ^= 1
		l.ReleaseRequest()
	}
	damage()
	if n := p.CheckFree(); n != 1 {
		t.Errorf("asked: %d", n)
	}
	damage()
	if s := p.Stats(); s.PoisonHits != 1 {
		t.Fatalf("%+v", s)
	}
	damage() // uses it
	if s := p.Stats(); s.PoisonHits != 2 {
		t.Errorf("next use: %+v", s)
	}
	p.ForgetPrefixes()
	if s := p.Stats(); s.PoisonHits != 3 {
		t.Errorf("eviction: %+v", s)
	}
	if p.CheckFree() != 0 {
		t.Error("evicted pages are not poisoned")
	}
}

// TestPrefixesRandomly: whatever requests come, fail and end, each page has one owner, what is shared holds what it must, no
// entry is without those before it, and pages are refused only when there are none.
func TestPrefixesRandomly(t *testing.T) {
	for range 60 {
		seed := rand.Uint64()
		r := rand.New(rand.NewPCG(seed, 1))
		p := open(t, Config{Pages: 24 + r.IntN(20), PrefixPages: 2 + r.IntN(20), Poison: true})
		parent := map[Prefix]Prefix{}
		var live []*Lease
		for step := range 300 {
			switch {
			case r.IntN(40) == 0:
				p.ForgetPrefixes()
			case len(live) < 4 && r.IntN(2) == 0:
				live = append(live, randomPrompt(t, p, r, parent)...)
			case len(live) > 0:
				i := r.IntN(len(live))
				letGo(live[i], r)
				live = slices.Delete(live, i, i+1)
			}
			if oneOwner(t, p, live, parent); t.Failed() {
				t.Fatalf("seed %d, step %d", seed, step)
			}
		}
		for _, l := range live {
			end(l)
		}
		if s := balanced(t, p); !s.Idle() || s.Misuses != 0 || p.CheckFree() != 0 {
			t.Fatalf("seed %d: %+v", seed, s)
		}
	}
}

func randomPrompt(t *testing.T, p *Pool, r *rand.Rand, parent map[Prefix]Prefix) []*Lease {
	tokens := make([]int32, 1+r.IntN(7))
	for i := range tokens {
		tokens[i] = int32(r.IntN(2))
	}
	prefixes := prefixesOf(tokens...)
	for i := 1; i < len(prefixes); i++ {
		parent[prefixes[i]] = prefixes[i-1]
	}
	s := p.Stats()
	hits := len(p.cache.match(prefixes))
	need := perPrefix * (len(tokens) - hits)
	idle := s.Cached - s.Shared
	for _, b := range p.cache.match(prefixes) {
		if b.refs == 0 {
			idle -= len(b.pages)
		}
	}
	l, err := p.AllocPrompt(prefixes, perPrefix*len(tokens), "room", time.Time{})
	if err != nil {
		if !errors.Is(err, ErrExhausted) || need <= s.Free+idle {
			t.Errorf("%v with %d needed, %+v", err, need, s)
		}
		return nil
	}
	after := p.Stats()
	if len(l.Shared()) != hits || need > s.Free+idle {
		t.Errorf("shares %d of %d that are there", len(l.Shared()), hits)
	}
	if gone := int(after.PrefixEvicted - s.PrefixEvicted); gone >= max(need-s.Free, 0)+perPrefix {
		t.Errorf("%d pages evicted for %d with %d free", gone, need, s.Free)
	}
	stored(t, p, l)
	return []*Lease{l}
}

// letGo ends l in one of the ways there are.
func letGo(l *Lease, r *rand.Rand) {
	if r.IntN(8) > 0 {
		l.Grant()
	}
	if r.IntN(3) > 0 {
		l.Keep(own(l)[:r.IntN(len(own(l))+1)])
	}
	acts := []func(){l.ReleaseRequest, func() { l.ReleaseTransfer(ProofDrained) }}
	if r.IntN(4) == 0 {
		acts[1] = func() { l.ReleaseTransfer(ProofFenced) }
	}
	first := r.IntN(2)
	acts[first]()
	acts[1-first]()
}

// oneOwner checks the pool as a whole.
func oneOwner(t *testing.T, p *Pool, live []*Lease, parent map[Prefix]Prefix) {
	t.Helper()
	s := balanced(t, p)
	if s.Cached > p.cfg.PrefixPages || s.Misuses+uint64(p.CheckFree()) != 0 {
		t.Errorf("%+v", s)
	}
	owner := map[PageID]string{}
	claim := func(id PageID, who string) {
		if o := owner[id]; o != "" || p.free.has(id) {
			t.Errorf("page %d of %s is also of %q, free %v", id, who, o, p.free.has(id))
		}
		owner[id] = who
	}
	for _, l := range live {
		for _, id := range l.Pages() {
			claim(id, "a lease")
		}
	}
	idle := 0
	for x, b := range p.cache.entries {
		for _, id := range b.pages {
			claim(id, "the cache")
		}
		if before, ok := parent[x]; ok && p.cache.entries[before] == nil {
			t.Errorf("an entry of %d tokens is there without the one before it", x.Tokens)
		}
		if (b.refs == 0) != (b.at != nil) {
			t.Errorf("an entry with %d references, idle %v", b.refs, b.at != nil)
		}
		if b.refs == 0 {
			idle += len(b.pages)
		}
	}
	if idle != s.Cached-s.Shared || len(owner)+s.Free != s.Total {
		t.Errorf("%d pages idle in the cache, %d owned: %+v", idle, len(owner), s)
	}
}
