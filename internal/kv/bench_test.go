package kv

import (
	"testing"
	"time"
)

// BenchmarkAlloc takes and returns 24 pages of a pool that is half full and badly
// fragmented, the worst case of a busy decode worker.
func BenchmarkAlloc(b *testing.B) {
	for _, c := range []struct {
		name  string
		pages int
	}{{"4096", 4096}, {"65536", 65536}} {
		b.Run(c.name, func(b *testing.B) {
			p, err := Open(Config{Name: "bench", PageBytes: 1, Pages: c.pages, Plain: true})
			if err != nil {
				b.Fatal(err)
			}
			var odd []*Lease
			for i := range c.pages {
				l, err := p.Alloc(1, "x", time.Time{})
				if err != nil {
					b.Fatal(err)
				}
				if i%2 == 0 {
					odd = append(odd, l)
				}
			}
			for _, l := range odd {
				l.ReleaseRequest()
			}
			b.ReportAllocs()
			for b.Loop() {
				l, err := p.Alloc(24, "x", time.Time{})
				if err != nil {
					b.Fatal(err)
				}
				l.Grant()
				l.ReleaseTransfer(ProofDrained)
				l.ReleaseRequest()
			}
		})
	}
}
