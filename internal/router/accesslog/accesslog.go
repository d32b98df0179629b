// Package accesslog writes one JSON line for each request that a router has ended, and never makes a request wait for it: lines go
// through a bounded queue, and when the disk is slower than the requests, those that find it full are dropped and counted.
//
// The file may be renamed or removed under the router, as logrotate does: within a second of lines the name is opened
// anew, and on [Log.Reopen] at once.
package accesslog

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/router/record"
)

const (
	// defaultQueue is how many requests may wait to be written: seconds of a busy router.
	defaultQueue = 8192
	// batch is how many bytes are gathered for one write, at most a line more.
	batch = 64 << 10
	// lookEvery is the least time between two looks at what the name means.
	lookEvery = time.Second
	// farewell bounds Close: a disk that takes nothing any more must not keep a router from ending.
	farewell = 2 * time.Second
)

// Config of a log. Zero values take the defaults in brackets.
type Config struct {
	// Path of the file, which is appended to; "-" is standard output.
	Path       string
	Queue      int                   // requests that may wait [8192]
	Log        *slog.Logger          // hears of trouble, once for each different kind [discards]
	Registerer prometheus.Registerer // [none]

	// For tests: in place of a file, and of the constants.
	out                 io.Writer
	lookEvery, farewell time.Duration
}

// Log takes ended requests. Its methods are safe for concurrent use; on nil they do nothing.
type Log struct {
	cfg     Config
	queue   chan *record.Entry
	reopen  chan struct{} // buffered
	closing chan struct{}
	done    chan struct{} // closed when the writer has ended
	once    sync.Once
	lines   *prometheus.CounterVec // result

	// The rest is the writer's.
	file    *os.File // nil: out is not a file of ours
	out     io.Writer
	looked  time.Time
	torn    bool   // the last write ended inside a line
	trouble string // what was last logged
}

// Open opens the file and starts the writer; Close ends it.
func Open(c Config) (*Log, error) {
	if c.Queue <= 0 {
		c.Queue = defaultQueue
	}
	if c.lookEvery == 0 {
		c.lookEvery = lookEvery
	}
	if c.farewell == 0 {
		c.farewell = farewell
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	l := &Log{
		cfg: c, queue: make(chan *record.Entry, c.Queue), reopen: make(chan struct{}, 1), closing: make(chan struct{}), done: make(chan struct{}),
		lines: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "baton_router_access_log_lines_total", Help: "Lines of the access log: written, dropped because the queue was full, or failed to be written.",
		}, []string{"result"}),
	}
	for _, result := range []string{"written", "dropped", "failed"} {
		l.lines.WithLabelValues(result)
	}
	switch {
	case c.out != nil:
		l.out = c.out
	case c.Path == "-":
		l.out = os.Stdout
	default:
		f, err := openFile(c.Path)
		if err != nil {
			return nil, err
		}
		l.file, l.out, l.looked = f, f, time.Now()
	}
	if c.Registerer != nil {
		if err := c.Registerer.Register(l.lines); err != nil {
			return nil, errors.Join(fmt.Errorf("access log: register metrics: %w", err), l.closeFile())
		}
	}
	go l.run()
	return l, nil
}

// openFile opens a regular file: a pipe without a reader would block for ever.
func openFile(path string) (*os.File, error) {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("access log: %s is not a regular file; \"-\" is standard output", path)
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o640)
	if err != nil {
		return nil, fmt.Errorf("access log: %w", err)
	}
	return f, nil
}

// Put hands over a request that has ended. It never blocks.
func (l *Log) Put(e *record.Entry) {
	if l == nil || e == nil {
		return
	}
	select {
	case l.queue <- e:
	default:
		l.lines.WithLabelValues("dropped").Inc()
	}
}

// Reopen opens the file's name anew, before the next line.
func (l *Log) Reopen() {
	if l == nil {
		return
	}
	select {
	case l.reopen <- struct{}{}:
	default: // it will
	}
}

// Close writes what was put before it and ends the writer. If the disk takes nothing for two seconds the rest is given up, and
// the writer ends when its write does; that is an error. Idempotent.
func (l *Log) Close() error {
	if l == nil {
		return nil
	}
	l.once.Do(func() { close(l.closing) })
	t := time.NewTimer(l.cfg.farewell)
	defer t.Stop()
	select {
	case <-l.done:
		return nil
	case <-t.C:
		return fmt.Errorf("access log: %s takes nothing any more; %d lines are given up", l.cfg.Path, len(l.queue))
	}
}

// run is the writer.
func (l *Log) run() {
	defer close(l.done)
	defer func() { _ = l.closeFile() }() // every write has been answered for
	var b bytes.Buffer
	for {
		select {
		case e := <-l.queue:
			l.write(&b, e)
		case <-l.reopen:
			l.open()
		case <-l.closing:
			for {
				select {
				case e := <-l.queue:
					l.write(&b, e)
				default:
					return
				}
			}
		}
	}
}

// write gathers e and what else waits, and writes it.
func (l *Log) write(b *bytes.Buffer, e *record.Entry) {
	select { // a request of the new day must not go to the old file
	case <-l.reopen:
		l.open()
	default:
		l.look()
	}
	b.Reset()
	if l.torn {
		b.WriteByte('\n')
	}
	n := 0
	for more := true; more; {
		r := e.Snapshot()
		appendLine(b, &r)
		n++
		if b.Len() >= batch {
			break
		}
		select {
		case e = <-l.queue:
		default:
			more = false
		}
	}
	wrote, err := l.out.Write(b.Bytes())
	if err != nil {
		l.torn = wrote > 0 && b.Bytes()[wrote-1] != '\n' || l.torn && wrote == 0
		l.lines.WithLabelValues("failed").Add(float64(n)) // perhaps some of them were written
		l.complain(err)
		return
	}
	l.torn = false
	l.lines.WithLabelValues("written").Add(float64(n))
	if l.trouble != "" {
		l.cfg.Log.Info("the access log can be written again", "path", l.cfg.Path)
		l.trouble = ""
	}
}

// look opens the name anew if it does not mean our file any more.
func (l *Log) look() {
	if l.file == nil || time.Since(l.looked) < l.cfg.lookEvery {
		return
	}
	l.looked = time.Now()
	named, err := os.Stat(l.cfg.Path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return // not known; the file that is open still is good
	}
	if ours, err2 := l.file.Stat(); err == nil && err2 == nil && os.SameFile(named, ours) {
		return
	}
	l.open()
}

// open opens the name anew. If that fails the old file stays.
func (l *Log) open() {
	if l.file == nil {
		return
	}
	f, err := openFile(l.cfg.Path)
	if err != nil {
		l.complain(err)
		return
	}
	_ = l.closeFile() // every write has been answered for
	l.file, l.out, l.looked, l.torn = f, f, time.Now(), false
}

func (l *Log) closeFile() error {
	if l.file == nil {
		return nil
	}
	return l.file.Close()
}

// complain logs trouble once.
func (l *Log) complain(err error) {
	if l.trouble == err.Error() {
		return
	}
	l.trouble = err.Error()
	l.cfg.Log.Error("the access log cannot be written; its lines are lost and counted until it can", "path", l.cfg.Path, "err", err)
}
