package kv

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestMemfd: another mapping of the file sees the same bytes, and nobody can resize it
// under us.
func TestMemfd(t *testing.T) {
	p := open(t, Config{PageBytes: 4096, Pages: 4})
	mem, fd := p.Memory()
	other, err := unix.Mmap(fd, 0, len(mem), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	other[5000] = 42
	if p.Page(1)[904] != 42 {
		t.Error("a store through another mapping does not show")
	}
	if err := unix.Munmap(other); err != nil {
		t.Error(err)
	}
	for _, size := range []int64{0, 4096, 1 << 20} {
		if err := unix.Ftruncate(fd, size); err == nil {
			t.Errorf("the file was resized to %d", size)
		}
	}
}
