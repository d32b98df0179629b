package kv

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Stats is the exact accounting of a pool at one moment.
// Free + Request + Granted + Quarantine + Cached == Total, always.
type Stats struct {
	Total      int // pages
	Free       int // pages held by nobody
	Request    int // pages held by a request alone
	Granted    int // pages held by a request and a transfer
	Quarantine int // pages held by a transfer alone
	Cached     int // pages kept with the KV of ended requests, also while live ones share them
	Shared     int // of those, pages that live requests share; 0 <= Shared <= Cached

	Leases           int           // live leases, also those of 0 pages
	OldestQuarantine time.Duration // how long the oldest lease is in quarantine; 0 if none is

	Allocs    uint64 // leases given
	Exhausted uint64 // Alloc calls refused with ErrExhausted
	Expired   uint64 // leases that Expired returned
	// Pages by the proof with which the transfer let go of them; NeverGranted
	// includes those that never had a transfer.
	FreedNeverGranted, FreedDrained, FreedFenced uint64
	// Pages that went to the cache, were shared instead of taken, and were evicted.
	PrefixKept, PrefixReused, PrefixEvicted uint64
	// DoubleReleases counts repeats of a release; they change nothing.
	DoubleReleases uint64
	// Misuses counts acts that were refused because they would break an invariant; a bug
	// of the caller if not 0.
	Misuses uint64
	// PoisonHits counts pages found changed while free or cached; a bug if not 0.
	PoisonHits uint64
}

// Idle reports whether every page is free, or cached and shared by nobody, and no lease is live.
func (s Stats) Idle() bool { return s.Free+s.Cached == s.Total && s.Shared == 0 && s.Leases == 0 }

// Stats takes the accounting.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.st
	s.Total, s.Free, s.Leases = p.cfg.Pages, p.free.free, len(p.live)
	s.Cached, s.Shared = p.cache.pages, p.cache.inUse
	if e := p.quar.Front(); e != nil {
		s.OldestQuarantine = p.cfg.Now().Sub(e.Value.(*Lease).quarAt)
	}
	return s
}

// Collector shows the accounting to Prometheus under baton_kv_*, labelled with the
// pool's name.
func (p *Pool) Collector() prometheus.Collector {
	desc := func(name, help string, vars ...string) *prometheus.Desc {
		return prometheus.NewDesc("baton_kv_"+name, help, vars, prometheus.Labels{"pool": p.cfg.Name})
	}
	return &collector{
		pool:       p,
		pages:      desc("pages", "Pages by owner.", "owner"),
		pageBytes:  desc("page_bytes", "Size of a page."),
		leases:     desc("leases", "Live leases."),
		quarantine: desc("quarantine_oldest_seconds", "Age of the oldest lease in quarantine, 0 if there is none."),
		freed:      desc("pages_freed_total", "Pages the transfer let go of, by proof.", "proof"),
		allocs:     desc("leases_total", "Leases given."),
		exhausted:  desc("alloc_exhausted_total", "Allocations refused because too few pages were free."),
		expired:    desc("leases_expired_total", "Leases that outlived their deadline."),
		prefix:     desc("prefix_pages_total", "Pages of the prefix cache: kept after their request, reused by another in place of new ones, evicted.", "act"),
		faults:     desc("invariant_faults_total", "Broken invariants: refused misuse, or a free page found written.", "kind"),
	}
}

type collector struct {
	pool                                              *Pool
	pages, pageBytes, leases, quarantine              *prometheus.Desc
	freed, allocs, exhausted, expired, prefix, faults *prometheus.Desc
}

// Describe is prometheus.Collector's.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.pages, c.pageBytes, c.leases, c.quarantine, c.freed, c.allocs, c.exhausted, c.expired, c.prefix, c.faults} {
		ch <- d
	}
}

// Collect is prometheus.Collector's.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	s := c.pool.Stats()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	gauge(c.pages, float64(s.Free), "free")
	gauge(c.pages, float64(s.Request), "request")
	gauge(c.pages, float64(s.Granted), "granted")
	gauge(c.pages, float64(s.Quarantine), "quarantine")
	gauge(c.pages, float64(s.Cached), "cached")
	gauge(c.pageBytes, float64(c.pool.cfg.PageBytes))
	gauge(c.leases, float64(s.Leases))
	gauge(c.quarantine, s.OldestQuarantine.Seconds())
	count(c.freed, s.FreedNeverGranted, ProofNeverGranted.String())
	count(c.freed, s.FreedDrained, ProofDrained.String())
	count(c.freed, s.FreedFenced, ProofFenced.String())
	count(c.allocs, s.Allocs)
	count(c.exhausted, s.Exhausted)
	count(c.expired, s.Expired)
	count(c.prefix, s.PrefixKept, "kept")
	count(c.prefix, s.PrefixReused, "reused")
	count(c.prefix, s.PrefixEvicted, "evicted")
	count(c.faults, s.Misuses, "misuse")
	count(c.faults, s.PoisonHits, "poison")
}
