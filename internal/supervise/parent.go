package supervise

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// Environment of a supervised child: numbers of inherited file descriptors.
const (
	// EnvLifeline is the read end of a pipe that ends when the supervisor dies.
	EnvLifeline = "BATON_LIFELINE_FD"
	// EnvReady is the write end of a pipe for one JSON line, see [Ready].
	EnvReady = "BATON_READY_FD"
)

// ErrParentGone is the cause of a context from [WatchParent] whose supervisor died.
var ErrParentGone = errors.New("the supervisor is gone")

// exitAfter is how long a child may tidy up after its parent died, and exitStatus
// how it ends if it does not.
const (
	exitAfter  = 3 * time.Second
	exitStatus = 3
)

// ReadyInfo is what a child tells when it serves. Empty fields do not apply to its role.
type ReadyInfo struct {
	Role      string `json:"role"`                // prefill, decode or router
	HTTP      string `json:"http"`                // host:port of its HTTP side
	Bootstrap string `json:"bootstrap,omitempty"` // host:port of a prefill worker's session port
	Model     string `json:"model,omitempty"`     // name in the API
	Note      string `json:"note,omitempty"`      // for people
}

// inherited opens the descriptor named by an environment variable, which is
// removed so that no child of ours takes it for its own. nil if there is none.
func inherited(env string) (*os.File, error) {
	v := os.Getenv(env)
	if v == "" {
		return nil, nil
	}
	fd, err := strconv.Atoi(v)
	if err != nil || fd < 3 {
		return nil, fmt.Errorf("supervise: %s=%q is not a file descriptor", env, v)
	}
	if err := os.Unsetenv(env); err != nil {
		return nil, fmt.Errorf("supervise: unset %s: %w", env, err)
	}
	syscall.CloseOnExec(fd)
	if err := syscall.SetNonblock(fd, true); err != nil {
		return nil, fmt.Errorf("supervise: descriptor %d of %s: %w", fd, env, err)
	}
	return os.NewFile(uintptr(fd), env), nil
}

// Ready tells the supervisor, once, that this process serves. Without a supervisor
// it does nothing.
func Ready(info ReadyInfo) error {
	f, err := inherited(EnvReady)
	if f == nil {
		return err
	}
	line, err := json.Marshal(info)
	if err == nil {
		_, err = f.Write(append(line, '\n'))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("supervise: report ready: %w", err)
	}
	return nil
}

// WatchParent returns a context that ends with [ErrParentGone] when the supervisor's
// process dies, however it dies. A process that has not ended a few seconds later is ended
// by force. Without a supervisor only ctx counts; with a broken environment the context has
// ended already, its cause says why. stop ends the watch and the context, and waits.
func WatchParent(ctx context.Context) (watched context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	f, err := inherited(EnvLifeline)
	if err != nil {
		cancel(err)
	}
	if f == nil {
		return ctx, func() { cancel(context.Canceled) }
	}
	var wg sync.WaitGroup
	stopped := make(chan struct{})
	wg.Go(func() {
		// Nobody ever writes: a read ends by the parent's death or by stop.
		var b [1]byte
		_, err := f.Read(b[:])
		if errors.Is(err, os.ErrClosed) {
			return
		}
		cancel(ErrParentGone)
		select {
		case <-stopped:
		case <-time.After(exitAfter):
			os.Exit(exitStatus)
		}
	})
	var once sync.Once
	return ctx, func() {
		once.Do(func() {
			close(stopped)
			_ = f.Close() // wakes the reader; the descriptor has no other use
			wg.Wait()
			cancel(context.Canceled)
		})
	}
}
