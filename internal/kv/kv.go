// Package kv owns KV memory outside the engine: fixed-size pages in one
// registered mapping ([Pool]), leases with two owners a page, quarantine, and
// exact accounting.
//
// A page is held by a request, by a transfer, or by both, and returns to the free
// list only when both have let go. The request lets go whenever it likes. The
// transfer lets go only with a [Proof]: the writer has drained, a fence has been
// put up, or no grant was ever sent. A timeout is never proof.
package kv

import "errors"

// PageID is an index into the pool, 0 <= PageID < Config.Pages.
type PageID uint32

// Proof says why no late write can touch the pages.
type Proof uint8

const (
	ProofNeverGranted Proof = 1 // no peer ever learned of these pages
	ProofDrained      Proof = 2 // the writer said that nothing is outstanding (success, or abort ack)
	ProofFenced       Proof = 3 // a late write cannot land any more
)

var (
	// ErrExhausted: not enough free pages now; wait for Pool.Freed.
	ErrExhausted = errors.New("kv: no free pages")
	// ErrNeverFits: more pages than the pool has.
	ErrNeverFits = errors.New("kv: request is larger than the pool")
	// ErrClosed: the pool is closed.
	ErrClosed = errors.New("kv: pool closed")
)

// Planned API (implemented in pool.go):
//
//	func Open(c Config) (*Pool, error)              // Config{Name string, PageBytes, Pages int, Plain bool}
//	func (p *Pool) Memory() (bytes []byte, fd int)  // memfd mapping; fd -1 if Plain
//	func (p *Pool) Page(id PageID) []byte
//	func (p *Pool) PageBytes() int
//	func (p *Pool) Alloc(n int, label string, deadline time.Time) (*Lease, error)
//	func (p *Pool) Freed() <-chan struct{}          // closed at the next return of a page; get it before Alloc
//	func (p *Pool) Expired(now time.Time) []*Lease  // by a deadline heap; marks, never frees
//	func (p *Pool) NextExpiry() (time.Time, bool)
//	func (p *Pool) Stats() Stats
//	func (p *Pool) Close() error                    // refuses while a transfer holds pages: they stay mapped
//	func (l *Lease) Pages() []PageID
//	func (l *Lease) Grant()                         // the transfer becomes the second owner
//	func (l *Lease) ReleaseRequest()                // idempotent
//	func (l *Lease) ReleaseTransfer(p Proof)        // idempotent; pages in quarantine return
