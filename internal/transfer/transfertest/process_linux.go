package transfertest

import (
	"os/exec"
	"syscall"
)

// setDeathSignal makes the kernel kill the process with the test's, so that a stopped
// writer does not outlive a test binary that was killed.
func setDeathSignal(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
