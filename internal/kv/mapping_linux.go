package kv

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// hugeBytes is the size of a huge page on the machines that have them by that size; elsewhere the kernel
// refuses, and the fallback serves.
const hugeBytes = 2 << 20

// openMapping maps size zeroed bytes: anonymous (fd -1) if plain, else a memfd that a
// peer process can map too. The memfd is sealed against resizing: a peer that
// truncated it would kill this process with SIGBUS. The mapping may go on behind the slice's end, up to
// its capacity. got is what became of huge.
func openMapping(name string, size int, plain bool, huge HugePages) (mem []byte, fd int, got HugePages, err error) {
	if huge == HugeTLB {
		if mem, fd, err = mapNew(name, size, plain, true); err == nil {
			return mem, fd, HugeTLB, nil
		}
		huge = HugeAdvise // the caller compares
	}
	if mem, fd, err = mapNew(name, size, plain, false); err != nil || huge == HugeOff {
		return mem, fd, HugeOff, err
	}
	if unix.Madvise(mem, unix.MADV_HUGEPAGE) != nil { // a kernel without them
		return mem, fd, HugeOff, nil
	}
	return mem, fd, HugeAdvise, nil
}

// mapNew is one try of openMapping, with reserved huge pages if tlb.
func mapNew(name string, size int, plain, tlb bool) (mem []byte, fd int, err error) {
	const prot = unix.PROT_READ | unix.PROT_WRITE
	whole, flags, mfd := size, unix.MAP_PRIVATE|unix.MAP_ANON, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING
	if tlb {
		whole = (size + hugeBytes - 1) &^ (hugeBytes - 1)
		flags |= unix.MAP_HUGETLB | unix.MAP_HUGE_2MB
		mfd |= unix.MFD_HUGETLB | unix.MFD_HUGE_2MB
	}
	if plain {
		if mem, err = unix.Mmap(-1, 0, whole, prot, flags); err != nil {
			return nil, -1, fmt.Errorf("map %d bytes: %w", whole, err)
		}
		return mem[:size], -1, nil
	}
	fd, err = unix.MemfdCreate("baton-kv-"+name, mfd)
	if err != nil {
		return nil, -1, fmt.Errorf("create memfd: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, unix.Close(fd))
			mem, fd = nil, -1
		}
	}()
	if err = unix.Ftruncate(fd, int64(whole)); err != nil {
		return nil, fd, fmt.Errorf("size memfd to %d bytes: %w", whole, err)
	}
	if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return nil, fd, fmt.Errorf("seal memfd: %w", err)
	}
	// Maps and, with tlb, reserves: a page that is not there would be a SIGBUS later.
	if mem, err = unix.Mmap(fd, 0, whole, prot, unix.MAP_SHARED); err != nil {
		return nil, fd, fmt.Errorf("map memfd of %d bytes: %w", whole, err)
	}
	return mem[:size], fd, nil
}

func closeMapping(mem []byte, fd int) error {
	err := unix.Munmap(mem[:cap(mem)])
	if fd >= 0 {
		err = errors.Join(err, unix.Close(fd))
	}
	return err
}
