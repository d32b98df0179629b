package kv

import (
	"container/heap"
	"container/list"
	"fmt"
	"time"
)

// Lease is some pages in somebody's hold. It starts in the request's hold alone.
//
//	           Grant               ReleaseRequest            ReleaseTransfer
//	request ----------> granted -----------------> quarantine --------------> free
//	   |                   |     ReleaseTransfer                                ^
//	   |                   +----------------------> request                     |
//	   +------------------------------------------------- ReleaseRequest -------+
//
// Grant works once: after the transfer has let go there is no second one, so a
// doubled ReleaseTransfer can never take the hold of a later transfer.
type Lease struct {
	pool     *Pool
	pages    []PageID   // constant
	shared   [][]PageID // constant: cached pages that the request reads besides its own
	prefixes []Prefix   // constant
	label    string
	deadline time.Time

	// Under pool.mu.
	request  bool // held by the request
	transfer bool // held by the transfer
	granted  bool // Grant was called
	expired  bool
	refs     []*entry      // of shared, until unshare
	kept     [][]PageID    // what Keep was told
	drained  bool          // the transfer let go with ProofDrained
	dueAt    int           // index in pool.due, -1 if not there
	quar     *list.Element // in pool.quar, nil if not in quarantine
	quarAt   time.Time     // when it got there
}

// Pages of the lease in ascending order. The slice is the lease's: read only. After both
// owners have let go the pages are somebody else's.
func (l *Lease) Pages() []PageID { return l.pages }

// Shared lists the cached pages of the prompt's first prefixes, one list a prefix; none unless AllocPrompt found some. They may be
// read until ReleaseRequest, and are in no grant: nobody may write to them.
func (l *Lease) Shared() [][]PageID { return l.shared }

// Keep says that the lease's pages hold right KV: pages[i] that of prefix len(Shared)+i of those that AllocPrompt was told, one
// page of each rank. Once both owners have let go, the transfer with ProofDrained, these pages go to the cache and not to the
// free list, as far as its bound allows; pages is the pool's then. Before ReleaseRequest, by who knows that every
// byte has come and was verified.
func (l *Lease) Keep(pages [][]PageID) {
	p := l.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if !l.request || len(l.shared)+len(pages) > len(l.prefixes) {
		p.misuse("pages to be kept of a lease that was let go, or of no prefix", l)
		return
	}
	if p.cfg.PrefixPages > 0 {
		l.kept = pages
	}
}

// Label is what Alloc was told.
func (l *Lease) Label() string { return l.label }

// Deadline is what Alloc was told; zero if none.
func (l *Lease) Deadline() time.Time { return l.deadline }

// Grant makes the transfer the second owner, before a peer can learn of the pages. False: the
// request or the transfer has let go already, the pages may not be offered to
// anybody. A repeat while the transfer holds is true and changes nothing.
func (l *Lease) Grant() bool {
	p := l.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case l.transfer:
		return true
	case !l.request || l.granted:
		p.misuse("grant of a lease that was let go", l)
		return false
	}
	l.transfer, l.granted = true, true
	p.st.Request -= len(l.pages)
	p.st.Granted += len(l.pages)
	return true
}

// ReleaseRequest lets go of the request's hold. If the transfer still holds, the
// pages go to quarantine. Idempotent.
func (l *Lease) ReleaseRequest() {
	p := l.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if !l.request {
		p.st.DoubleReleases++
		return
	}
	l.request = false
	if l.kept == nil {
		p.unshare(l) // otherwise in reclaim: what is kept goes on from it
	}
	if !l.transfer {
		p.st.Request -= len(l.pages)
		if !l.granted {
			p.st.FreedNeverGranted += uint64(len(l.pages))
		}
		p.reclaim(l)
		return
	}
	p.st.Granted -= len(l.pages)
	p.st.Quarantine += len(l.pages)
	l.quarAt = p.cfg.Now()
	l.quar = p.quar.PushBack(l)
	if len(l.shared) > 0 {
		p.wake()
	}
}

// ReleaseTransfer lets go of the transfer's hold, with the reason why no late write
// can touch the pages. Pages in quarantine return to the pool. Idempotent; without a
// Grant there is nothing to let go of. An unknown proof releases nothing.
func (l *Lease) ReleaseTransfer(proof Proof) {
	p := l.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case !proof.valid():
		p.misuse(fmt.Sprintf("release of a transfer with proof %d", proof), l)
		return
	case !l.granted:
		return
	case !l.transfer:
		p.st.DoubleReleases++
		return
	}
	l.transfer = false
	n := len(l.pages)
	switch proof {
	case ProofNeverGranted:
		p.st.FreedNeverGranted += uint64(n)
	case ProofDrained:
		p.st.FreedDrained += uint64(n)
		l.drained = true
	case ProofFenced:
		p.st.FreedFenced += uint64(n)
	}
	if l.request {
		p.st.Granted -= n
		p.st.Request += n
		return
	}
	p.st.Quarantine -= n
	p.quar.Remove(l.quar)
	l.quar = nil
	p.reclaim(l)
}

// reclaim returns the pages of a lease that nobody holds. Under mu. It runs once a
// lease, because each hold ends once.
func (p *Pool) reclaim(l *Lease) {
	delete(p.live, l)
	if l.dueAt >= 0 {
		heap.Remove(&p.due, l.dueAt)
	}
	rest := l.pages
	if l.kept != nil && l.drained {
		rest = p.keep(l)
	}
	p.unshare(l)
	for _, id := range rest {
		p.putFree(id, l)
	}
	p.wake()
}

// putFree returns a page; l is its lease, if it had one. Under mu.
func (p *Pool) putFree(id PageID, l *Lease) {
	if p.cfg.Poison {
		p.poison(id)
	}
	if !p.free.put(id) {
		p.misuse(fmt.Sprintf("page %d returned while free", id), l)
	}
}

// misuse records a broken invariant; the caller has refused the act. Under mu.
func (p *Pool) misuse(what string, l *Lease) {
	p.st.Misuses++
	p.cfg.Log.Error("kv: invariant broken", "pool", p.cfg.Name, "what", what, "lease", l.stringLocked())
}

// String names the lease and its owners for logs.
func (l *Lease) String() string {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	return l.stringLocked()
}

func (l *Lease) stringLocked() string {
	if l == nil {
		return "none, pages of the cache"
	}
	owner := "free"
	switch {
	case l.request && l.transfer:
		owner = "request and transfer"
	case l.request:
		owner = "request"
	case l.transfer:
		owner = "quarantine"
	}
	return fmt.Sprintf("%s: %d pages held by %s", l.label, len(l.pages), owner)
}
