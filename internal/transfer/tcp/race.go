//go:build race

package tcp

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioSync orders each readv after every writev before it, as package syscall does for read
// and write; the race detector cannot see through the socket.
var ioSync byte

func raceRead(iov []unix.Iovec, n int) {
	for _, v := range iov {
		if n <= 0 {
			break
		}
		runtime.RaceWriteRange(unsafe.Pointer(v.Base), min(n, int(v.Len)))
		n -= int(v.Len)
	}
	runtime.RaceAcquire(unsafe.Pointer(&ioSync))
}

func raceWrite(iov []unix.Iovec) {
	runtime.RaceReleaseMerge(unsafe.Pointer(&ioSync))
	for _, v := range iov {
		runtime.RaceReadRange(unsafe.Pointer(v.Base), int(v.Len))
	}
}
