package trace

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// monotonic is CLOCK_MONOTONIC itself, in nanoseconds: Go's own reading of it counts from
// the start of the process.
func monotonic() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0 // can not happen: the clock always exists
	}
	return ts.Nano()
}

// bootID names this boot of the machine, "" if unknown.
func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// lock refuses a file that another process writes to. It ends with the file's closing.
func lock(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }
