package postq

import "syscall"

// Courtesy has a thread that copies a long write without pause leave the core to others, for a while after each short
// write of somebody else: who posts or hears of one is otherwise kept off for a time slice, which is longer than
// all that waits in queues. Its owner is the goroutine that copies. The zero value is ready.
type Courtesy struct {
	// Left is how many times Give still yields, if there is no further short write.
	Left   int
	shorts uint64
}

// See notes how many short writes there have been; a new one has the next times calls of Give yield.
func (c *Courtesy) See(shorts uint64, times int) {
	if shorts != c.shorts {
		c.shorts, c.Left = shorts, times
	}
}

// Give lets the kernel run another thread, if there was a short write lately and a thread waits.
func (c *Courtesy) Give() {
	if c.Left > 0 {
		c.Left--
		_, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0)
	}
}
