package shm

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	socketPrefix = "kv-"
	socketSuffix = ".sock"
	// maxPath is what fits a socket address (sun_path, with its final zero).
	maxPath = 107
	// staleAge is how old a refusing socket must be, unless its process is known to be
	// dead: a young one may be about to listen.
	staleAge = time.Minute
)

// defaultDir is one directory a user.
func defaultDir() string {
	return filepath.Join(os.TempDir(), "baton-"+strconv.Itoa(os.Getuid()))
}

// openDir makes dir if it is missing and checks that no other user can put or take files
// there. The check of the mode is for the default directory, whose parent is everybody's.
func openDir(dir string, private bool) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("shm: make directory %s: %w", dir, err)
	}
	fi, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("shm: look at directory %s: %w", dir, err)
	}
	if !private {
		if fi, err = os.Stat(dir); err != nil {
			return fmt.Errorf("shm: look at directory %s: %w", dir, err)
		}
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	switch {
	case !fi.IsDir():
		return fmt.Errorf("shm: %s is not a directory", dir)
	case private && (!ok || int(st.Uid) != os.Getuid() || fi.Mode().Perm()&0o077 != 0):
		return fmt.Errorf("shm: directory %s must belong to this user alone, with mode 0700", dir)
	}
	return nil
}

// cleanDir removes the sockets in dir whose process is gone: nobody accepts, and the process
// is dead or the file older than staleAge. Anything else stays.
func cleanDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("shm: list directory %s: %w", dir, err)
	}
	for _, e := range entries {
		pid, ours := socketPID(e.Name())
		if !ours || e.Type()&fs.ModeSocket == 0 {
			continue
		}
		path := filepath.Join(dir, e.Name())
		c, err := net.Dial("unix", path)
		if err == nil {
			_ = c.Close()
			continue
		}
		if !errors.Is(err, unix.ECONNREFUSED) {
			continue
		}
		info, err := e.Info()
		if err != nil {
			continue // gone meanwhile
		}
		if !errors.Is(unix.Kill(pid, 0), unix.ESRCH) && time.Since(info.ModTime()) < staleAge {
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("shm: remove stale socket %s: %w", path, err)
		}
	}
	return nil
}

// socketName is a name that no other process or target of this directory uses.
func socketName(pid int, n uint64) string {
	return socketPrefix + strconv.Itoa(pid) + "-" + strconv.FormatUint(n, 36) + socketSuffix
}

// socketPID takes the process from a name that socketName made.
func socketPID(name string) (int, bool) {
	rest, ok := strings.CutPrefix(name, socketPrefix)
	if !ok {
		return 0, false
	}
	rest, ok = strings.CutSuffix(rest, socketSuffix)
	if !ok {
		return 0, false
	}
	digits, _, ok := strings.Cut(rest, "-")
	if !ok {
		return 0, false
	}
	pid, err := strconv.Atoi(digits)
	return pid, err == nil && pid > 0
}

// identify names the socket file at path by device and inode.
func identify(path string) (string, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return "", fmt.Errorf("shm: look at socket %s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return "", fmt.Errorf("shm: %s is not a socket", path)
	}
	return strconv.FormatUint(uint64(st.Dev), 10) + ":" + strconv.FormatUint(st.Ino, 10), nil
}

// bootID is new at each boot of the machine, and the same in all its containers.
func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("shm: read boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}
