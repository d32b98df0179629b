package tcp

import (
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// How long a lookout looks before its owner sleeps: spinFor, or spinLong for many bytes that are on their way: [mostWake] at 2 GB/s.
const spinFor, spinLong = 100 * time.Microsecond, 500 * time.Microsecond

// lookout saves a connection's reader the sleep where bytes follow each other closely, since to be
// woken takes as long. A reader that waited shorter than it would look now looks for the next bytes; so
// the last bytes of a row cost one spin and lonely ones none. Owned by the reader.
type lookout struct {
	raw   syscall.RawConn
	began time.Time
	last  time.Duration // of the last wait
	look  func(fd uintptr)
	poll  [1]unix.PollFd // argument and result of look
}

func newLookout(raw syscall.RawConn) *lookout {
	l := &lookout{raw: raw, last: time.Hour}
	l.look = l.ask
	return l
}

// begin is called before each wait for bytes, and looks for them up to long while may says so.
func (l *lookout) begin(long time.Duration, may func() bool) {
	l.began = time.Now()
	if l.last >= long {
		return
	}
	if _, own := l.raw.(*line); !own {
		runtime.Gosched() // those whom the last bytes have woken go first
	}
	for may() && time.Since(l.began) < long {
		if l.raw.Control(l.look) != nil || l.poll[0].Revents != 0 {
			return
		}
	}
}

// end is called after the wait.
func (l *lookout) end() { l.last = time.Since(l.began) }

// ask asks whether there is something to read, without the socket's lock.
func (l *lookout) ask(fd uintptr) {
	l.poll[0] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
	_, _ = unix.Poll(l.poll[:], 0) // an error leaves Revents 0
}
