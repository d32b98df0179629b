//go:build !linux

package transfertest

import "os/exec"

// setDeathSignal: nothing of the kind here.
func setDeathSignal(*exec.Cmd) {}
