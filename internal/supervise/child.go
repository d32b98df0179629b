package supervise

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// child keeps one process running. One goroutine runs it.
type child struct {
	sup     *Supervisor
	spec    Spec
	backoff backoff
	lives   int
	unready int // ends in a row without having been ready
}

// ending is how a life ended.
type ending struct {
	reason string
	tail   []string
	ready  bool
	lasted time.Duration // since it was ready, otherwise 0
}

// run starts the process again and again until ctx ends. started is closed after
// the first attempt to start.
func (c *child) run(ctx context.Context, started chan struct{}) error {
	var once sync.Once
	begun := func() { once.Do(func() { close(started) }) }
	defer begun()
	for ctx.Err() == nil {
		c.lives++
		end := c.live(ctx, begun)
		begun()
		if ctx.Err() != nil {
			return nil
		}
		if c.unready++; end.ready {
			c.unready = 0
		}
		if g := c.sup.cfg.GiveUp; g > 0 && c.unready >= g {
			return &ExitError{Name: c.spec.Name, Tries: c.unready, Reason: end.reason, Tail: end.tail}
		}
		wait := c.backoff.after(end.lasted >= c.sup.cfg.HealthyAfter)
		c.emit(Event{Kind: EventRestarting, Backoff: wait, Reason: end.reason})
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
	return nil
}

func (c *child) emit(e Event) {
	e.Name, e.Life = c.spec.Name, c.lives
	c.sup.emit(e)
}

// life is one process and the pipes to it.
type life struct {
	cmd     *exec.Cmd
	tail    tail
	outputs sync.WaitGroup // readers of stdout and stderr
	pipes   []*os.File     // our ends of stdout and stderr
	ready   *os.File       // our end of the ready pipe; nil if the child does not report
}

// live starts the process and returns when it is gone and its output is copied.
func (c *child) live(ctx context.Context, begun func()) ending {
	l, err := c.spawn()
	if err != nil {
		reason := fmt.Sprintf("start %s: %v", c.spec.Path, err)
		c.emit(Event{Kind: EventExited, Reason: reason})
		return ending{reason: reason}
	}
	pid := l.cmd.Process.Pid
	c.emit(Event{Kind: EventStarted, PID: pid})
	begun()

	watch, endWatch := context.WithCancel(ctx)
	var wg sync.WaitGroup
	ready := make(chan ReadyInfo, 1)
	stuck := make(chan string, 1)
	gone := make(chan error, 1)
	wg.Go(func() { gone <- waitExit(pid) })
	wg.Go(func() { c.watch(watch, l, ready, stuck) })

	end := c.follow(ctx, pid, ready, stuck, gone)
	endWatch()
	_ = signalGroup(pid, syscall.SIGKILL) // what the child left behind in its group
	wg.Wait()
	werr := l.cmd.Wait()
	switch {
	case end.reason != "":
	case l.cmd.ProcessState != nil:
		end.reason = l.cmd.ProcessState.String()
	default:
		end.reason = fmt.Sprintf("wait for process %d: %v", pid, werr)
	}
	l.drain()
	end.tail = l.tail.last()
	c.emit(Event{Kind: EventExited, PID: pid, Reason: end.reason, Tail: end.tail, Expected: ctx.Err() != nil})
	return end
}

// follow drives a running process to its end: killed when stuck, asked to end and then
// killed when ctx ends.
func (c *child) follow(ctx context.Context, pid int, ready <-chan ReadyInfo, stuck <-chan string, gone <-chan error) ending {
	var end ending
	var readyAt time.Time
	var kill <-chan time.Time
	done := ctx.Done()
	for {
		select {
		case err := <-gone:
			if err != nil {
				end.reason = err.Error()
			}
			if end.ready {
				end.lasted = time.Since(readyAt)
			}
			return end
		case info := <-ready:
			end.ready, readyAt = true, time.Now()
			c.emit(Event{Kind: EventReady, PID: pid, Ready: info})
		case reason := <-stuck:
			end.reason = reason
			c.emit(Event{Kind: EventStuck, PID: pid, Reason: reason})
			c.signal(pid, syscall.SIGKILL)
		case <-done:
			done = nil
			c.signal(pid, syscall.SIGTERM)
			grace := time.NewTimer(c.sup.cfg.Grace)
			defer grace.Stop()
			kill = grace.C
		case <-kill:
			end.reason = fmt.Sprintf("did not end within %v of SIGTERM and was killed", c.sup.cfg.Grace)
			c.signal(pid, syscall.SIGKILL)
		}
	}
}

func (c *child) signal(pid int, sig syscall.Signal) {
	if err := signalGroup(pid, sig); err != nil {
		c.sup.cfg.Log.Error("signal child", "child", c.spec.Name, "error", err)
	}
}

// spawn starts the process with its pipes. On an error nothing is left open.
func (c *child) spawn() (l *life, err error) {
	var open []*os.File // everything, for the error path
	var theirs []*os.File
	defer func() {
		for _, f := range theirs {
			_ = f.Close()
		}
		if err != nil {
			for _, f := range open {
				_ = f.Close()
			}
		}
	}()
	pipe := func() (r, w *os.File, err error) {
		if r, w, err = os.Pipe(); err == nil {
			open, theirs = append(open, r), append(theirs, w)
		}
		return r, w, err
	}
	outR, outW, err := pipe()
	if err != nil {
		return nil, err
	}
	errR, errW, err := pipe()
	if err != nil {
		return nil, err
	}
	l = &life{cmd: exec.Command(c.spec.Path, c.spec.Args...), pipes: []*os.File{outR, errR}}
	l.cmd.Stdout, l.cmd.Stderr = outW, errW
	l.cmd.Env = append(os.Environ(), c.spec.Env...)
	l.cmd.Env = append(l.cmd.Env, EnvLifeline+"=3")
	l.cmd.ExtraFiles = []*os.File{c.sup.life}
	if c.spec.ReportsReady {
		readyR, readyW, err := pipe()
		if err != nil {
			return nil, err
		}
		l.ready = readyR
		l.cmd.ExtraFiles = append(l.cmd.ExtraFiles, readyW)
		l.cmd.Env = append(l.cmd.Env, EnvReady+"=4")
	}
	if err := c.sup.sp.start(l.cmd); err != nil {
		return nil, err
	}
	prefix := "[" + c.spec.Name + "] "
	l.outputs.Go(func() { copyLines(&c.sup.out, prefix, outR, nil) })
	l.outputs.Go(func() { copyLines(&c.sup.out, prefix, errR, &l.tail) })
	return l, nil
}

// drain waits until the output is copied. A stranger who inherited the pipes (it left the process
// group) cannot hold us for longer than a moment.
func (l *life) drain() {
	soon := time.Now().Add(time.Second)
	for _, p := range l.pipes {
		_ = p.SetReadDeadline(soon)
	}
	l.outputs.Wait()
	for _, p := range l.pipes {
		_ = p.Close()
	}
}

// errNotReady: the ready pipe ended or carried something else.
var errNotReady = errors.New("no ready report")

// readReady waits for the child's report until ctx or limit ends, and closes the pipe.
func readReady(ctx context.Context, f *os.File, limit time.Duration) (ReadyInfo, error) {
	stop := context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Now()) })
	defer func() { stop(); _ = f.Close() }()
	if err := f.SetReadDeadline(time.Now().Add(limit)); err != nil {
		return ReadyInfo{}, err
	}
	if ctx.Err() != nil { // the deadline just set may have undone AfterFunc's
		return ReadyInfo{}, ctx.Err()
	}
	line, err := bufio.NewReaderSize(f, maxLine).ReadSlice('\n')
	if err != nil {
		return ReadyInfo{}, fmt.Errorf("%w: %w", errNotReady, err)
	}
	var info ReadyInfo
	if err := json.Unmarshal(line, &info); err != nil {
		return ReadyInfo{}, fmt.Errorf("%w: %w", errNotReady, err)
	}
	return info, nil
}
