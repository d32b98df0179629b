package setup

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// fetch lets the artifact's client put the archive into dir. tmp is for the client's
// own temporary files: it lies in the cache, so it is on the same file system and
// is removed with the rest.
func fetch(ctx context.Context, a artifact, dir, tmp string, out io.Writer) error {
	argv, err := command(a, dir)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s: fetching %s with %s (%.0f MB)\n", a.what, a.spec, a.client, float64(a.size)/1e6)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp, "NO_UPDATE_NOTIFIER=1", "PIP_DISABLE_PIP_VERSION_CHECK=1", "PIP_NO_INPUT=1")
	// A group of its own, so that cancelling ends the client's children as well.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 2 * time.Second
	var said tail
	cmd.Stdout, cmd.Stderr = &said, &said

	stop := showProgress(a, filepath.Dir(dir), out)
	err = cmd.Run()
	stop()
	if ctx.Err() != nil {
		return fmt.Errorf("fetch %s: %w", a.spec, context.Cause(ctx))
	}
	if err != nil {
		return &FetchError{Client: a.client, Spec: a.spec, Kind: kindOf(said.String()), Detail: said.last(8), Err: err}
	}
	if _, err := os.Stat(filepath.Join(dir, a.archive)); err != nil {
		return &FetchError{Client: a.client, Spec: a.spec, Detail: said.last(8),
			Err: fmt.Errorf("it ended without an error but left no %s", a.archive)}
	}
	return nil
}

// command is the client's command line.
func command(a artifact, dir string) ([]string, error) {
	missing := func(err error) error {
		return &FetchError{Client: a.client, Spec: a.spec, Kind: ErrClientMissing, Err: err}
	}
	switch a.client {
	case "npm":
		npm, err := exec.LookPath("npm")
		if err != nil {
			return nil, missing(err)
		}
		return []string{npm, "pack", a.spec, "--pack-destination", dir, "--ignore-scripts",
			"--no-audit", "--no-fund", "--loglevel=error"}, nil
	case "pip":
		python, err := exec.LookPath("python3")
		if err != nil {
			if python, err = exec.LookPath("python"); err != nil {
				return nil, missing(err)
			}
		}
		argv := []string{python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
			"--progress-bar", "off", "-q", "-d", dir}
		return append(append(argv, a.args...), a.spec), nil
	}
	return nil, fmt.Errorf("no client called %s", a.client)
}

// progressEvery is the time between two progress lines.
const progressEvery = 2 * time.Second

// showProgress writes how much of the artifact has arrived below dir, every two
// seconds, until stop is called; stop waits for the writer to end. On a terminal
// the line is overwritten, elsewhere each is a line of its own.
func showProgress(a artifact, dir string, out io.Writer) (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tty := isTerminal(out)
		every := progressEvery
		if tty {
			every = 500 * time.Millisecond
		}
		tick := time.NewTicker(every)
		defer tick.Stop()
		start := time.Now()
		for {
			select {
			case <-done:
				if tty {
					fmt.Fprint(out, "\r\x1b[K")
				}
				return
			case <-tick.C:
				line := fmt.Sprintf("%s: %.1f of %.0f MB, %.0f s", a.what,
					float64(min(treeSize(dir), a.size))/1e6, float64(a.size)/1e6, time.Since(start).Seconds())
				if tty {
					fmt.Fprintf(out, "\r\x1b[K%s", line)
				} else {
					fmt.Fprintln(out, line)
				}
			}
		}
	})
	return func() { close(done); wg.Wait() }
}

// treeSize adds up the files below dir; what vanishes meanwhile counts as nothing.
func treeSize(dir string) (total int64) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if info, err := d.Info(); err == nil {
				total += info.Size()
			}
		}
		return nil
	})
	return total
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0 && os.Getenv("TERM") != "dumb"
}

// tail keeps the end of what a child writes. exec copies both streams in one
// goroutine because they are the same writer.
type tail struct{ buf bytes.Buffer }

// tailMax bounds the memory that a talkative child takes.
const tailMax = 64 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.buf.Write(p)
	if over := t.buf.Len() - tailMax; over > 0 {
		t.buf.Next(over)
	}
	return len(p), nil
}

func (t *tail) String() string { return t.buf.String() }

func (t *tail) last(lines int) string {
	all := strings.Split(strings.TrimSpace(t.buf.String()), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
