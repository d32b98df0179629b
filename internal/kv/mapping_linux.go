package kv

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// openMapping maps size zeroed bytes: anonymous (fd -1) if plain, else a memfd that a
// peer process can map too. The memfd is sealed against resizing: a peer that
// truncated it would kill this process with SIGBUS.
func openMapping(name string, size int, plain bool) (mem []byte, fd int, err error) {
	const prot = unix.PROT_READ | unix.PROT_WRITE
	if plain {
		mem, err = unix.Mmap(-1, 0, size, prot, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			return nil, -1, fmt.Errorf("map %d bytes: %w", size, err)
		}
		return mem, -1, nil
	}
	fd, err = unix.MemfdCreate("baton-kv-"+name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, -1, fmt.Errorf("create memfd: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, unix.Close(fd))
			mem, fd = nil, -1
		}
	}()
	if err = unix.Ftruncate(fd, int64(size)); err != nil {
		return nil, fd, fmt.Errorf("size memfd to %d bytes: %w", size, err)
	}
	if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return nil, fd, fmt.Errorf("seal memfd: %w", err)
	}
	if mem, err = unix.Mmap(fd, 0, size, prot, unix.MAP_SHARED); err != nil {
		return nil, fd, fmt.Errorf("map memfd of %d bytes: %w", size, err)
	}
	return mem, fd, nil
}

func closeMapping(mem []byte, fd int) error {
	err := unix.Munmap(mem)
	if fd >= 0 {
		err = errors.Join(err, unix.Close(fd))
	}
	return err
}
