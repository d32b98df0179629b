package supervise

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// spawner starts processes from one operating system thread that lives as long as
// the spawner. PR_SET_PDEATHSIG is tied to the thread that forks, not to the process: were
// a child started from an ordinary goroutine, it would be killed when the Go runtime retires
// that thread.
type spawner struct {
	jobs chan func()
	done chan struct{}
}

func newSpawner() *spawner {
	s := &spawner{jobs: make(chan func()), done: make(chan struct{})}
	go func() {
		defer close(s.done)
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		for job := range s.jobs {
			job()
		}
	}()
	return s
}

// start starts cmd so that it is killed when this process dies.
func (s *spawner) start(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	result := make(chan error, 1)
	s.jobs <- func() { result <- cmd.Start() }
	return <-result
}

// close ends the thread. Every child must have been waited for: it would be killed.
func (s *spawner) close() {
	close(s.jobs)
	<-s.done
}

// waitExit returns when process pid has ended, and leaves it to be reaped: until then neither
// the pid nor its process group can be reused, so signals cannot hit a stranger.
func waitExit(pid int) error {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("waitid", err)
		}
	}
}

// signalGroup signals the child's process group. The child must not have been reaped.
func signalGroup(pid int, sig syscall.Signal) error {
	err := syscall.Kill(-pid, sig)
	if err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("send %v to process group %d: %w", sig, pid, err)
	}
	return nil
}
