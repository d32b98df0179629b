package nixl

import (
	"fmt"
	"testing"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/transfer"
)

// BenchmarkWrite is one write of 16 MiB in blocks of a size, from a registered pool, between the two helper
// processes, with notification and answer; and one block alone.
func BenchmarkWrite(b *testing.B) {
	needLibrary(b)
	const size = 16 << 20
	for _, block := range []int{4 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20} {
		for _, n := range []int{size / block, 1} {
			b.Run(fmt.Sprintf("%dx%dKiB", n, block>>10), func(b *testing.B) {
				pool, err := kv.Open(kv.Config{Name: "nixl-bench", PageBytes: block, Pages: size / block})
				if err != nil {
					b.Fatal(err)
				}
				b.Cleanup(func() { _ = pool.Close() })
				mem, fd := pool.Memory()
				target, source := New(testConfig()), New(testConfig())
				source.UsePool(transfer.Memory{Bytes: mem, FD: fd}, block)
				target.UsePool(transfer.Memory{FD: -1}, block)
				r := newRig(b, target, source, size)
				r.allow(b, 1, transfer.Span{Len: size})
				w := transfer.Write{Grant: 1, Notify: []byte("x"), Key: testKey}
				for i := range n { // scattered, so that nothing is merged
					w.Segments = append(w.Segments, transfer.Segment{Off: uint64(i * block), Src: mem[(n-1-i)*block : (n-i)*block]})
				}
				done := make(chan error, 1)
				w.Done = func(err error) { done <- err }
				b.SetBytes(int64(n * block))
				b.ReportAllocs()
				for b.Loop() {
					if err := r.peer.Post(w); err != nil {
						b.Fatal(err)
					}
					if err := <-done; err != nil {
						b.Fatal(err)
					}
					<-r.sink.landed
				}
			})
		}
	}
}
