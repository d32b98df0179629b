// Package kv owns KV memory outside the engine: fixed-size pages in one
// registered mapping ([Pool]), leases with two owners a page ([Lease]),
// quarantine, and exact accounting ([Stats]).
//
// # Two owners
//
// A page is held by a request, by a transfer, or by both, and returns to the free
// list only when both have let go. The request lets go whenever it likes. The
// transfer lets go only with a [Proof]: the writer has drained, a fence has been
// put up, or no grant was ever sent. A timeout is never proof: [Pool.Expired]
// tells which leases are late and frees nothing. Pages in the transfer's hold
// alone are in quarantine.
//
// # Prefix cache
//
// With Config.PrefixPages, pages that hold the KV of an ended request's prompt may stay as the cache's ([Lease.Keep]), found again
// by the prompt's first tokens ([Prefix]). The cache is an owner of its own: its pages are neither free nor any lease's,
// and no grant names them, so the rules above do not know them. A request that begins alike shares them by
// reference ([Pool.AllocPrompt]); what nobody shares is given up as soon as pages are needed, least recently used first.
//
// # Layouts
//
// [Shards] and [Layout] say how a worker cuts KV up among ranks and pages; [Plan] and [Exchange] list
// the copies that bring it from one cut to another. Pure; docs/layouts.md has the whole picture.
//
// # Concurrency
//
// All methods may be called from any goroutine. One mutex guards a pool; it is held
// for microseconds and never across anything that blocks. The bytes of a page
// belong to the owners of its lease; the pool touches them only while the page is
// free, and only if it poisons.
//
// # What it does not promise
//
// No fairness between waiters: Freed wakes all of them and the first Alloc wins.
// Who must keep an order queues before Alloc.
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

// String is the metric label; it survives unknown values.
func (p Proof) String() string {
	switch p {
	case ProofNeverGranted:
		return "never_granted"
	case ProofDrained:
		return "drained"
	case ProofFenced:
		return "fenced"
	default:
		return "unknown"
	}
}

func (p Proof) valid() bool { return p >= ProofNeverGranted && p <= ProofFenced }

var (
	// ErrExhausted: not enough free pages now; wait for Pool.Freed.
	ErrExhausted = errors.New("kv: no free pages")
	// ErrNeverFits: more pages than the pool has.
	ErrNeverFits = errors.New("kv: request is larger than the pool")
	// ErrClosed: the pool is closed.
	ErrClosed = errors.New("kv: pool closed")
	// ErrHeld: Close was refused because leases are live; the memory stays mapped.
	ErrHeld = errors.New("kv: pages still held")
	// ErrLayout: chunks, pages and page size do not fit together.
	ErrLayout = errors.New("kv: chunks do not fit their pages")
)
