package door

import (
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// TestErrorsAreWaitedOut: after errors in a row, each with a longer pause, a connection still gets in; a success
// makes the pause short again; a closed listener ends the loop.
func TestErrorsAreWaitedOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		var at []time.Duration
		calls := 0
		var admitted []int
		accept(func() (int, error) {
			at = append(at, time.Since(begin))
			switch calls++; calls {
			case 1, 2, 3, 5:
				return 0, syscall.EMFILE
			case 6:
				return 0, net.ErrClosed
			}
			return calls, nil
		}, nil, func(c int) { admitted = append(admitted, c) })
		if len(admitted) != 1 || admitted[0] != 4 {
			t.Errorf("admitted %v", admitted)
		}
		want := []time.Duration{0, 5, 15, 35, 35, 40}
		for i := range want {
			if at[i] != want[i]*time.Millisecond {
				t.Errorf("call %d at %v, want %v", i+1, at[i], want[i]*time.Millisecond)
			}
		}
	})
}

// TestDoneEndsAPause: who closes need not wait for the pause.
func TestDoneEndsAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		done := make(chan struct{})
		ended := make(chan struct{})
		go func() {
			accept(func() (int, error) { return 0, syscall.EMFILE }, done, func(int) {})
			close(ended)
		}()
		<-time.After(10 * time.Second) // of the bubble: pauses are at their longest
		close(done)
		begin := time.Now()
		<-ended
		if w := time.Since(begin); w != 0 {
			t.Errorf("ended %v after done", w)
		}
	})
}
