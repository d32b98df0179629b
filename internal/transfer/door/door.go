// Package door takes a target's connections from its listener.
package door

import (
	"errors"
	"net"
	"time"
)

// The pause after an error of accept, which doubles while errors follow each other.
const (
	shortest = 5 * time.Millisecond
	longest  = time.Second
)

// Accept gives admit each connection that accept returns, one after the other, until the listener is closed or
// done is. An error such as too many open files is waited out, so that the loop never dies before its target.
func Accept[C any](accept func() (C, error), done <-chan struct{}, admit func(C)) {
	pause := shortest
	for {
		c, err := accept()
		if err == nil {
			pause = shortest
			admit(c)
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		select {
		case <-done:
			return
		case <-time.After(pause):
			pause = min(2*pause, longest)
		}
	}
}
