package trace

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

const (
	beat      = 200 * time.Millisecond
	maxBuffer = 1 << 15 // records; about 5 MB when full
	// reserve of a bounded file, for the last records of an incarnation.
	reserve = 1 << 10
)

// Config of a [Writer].
type Config struct {
	// Path is created, or appended to after an earlier process of the same worker.
	Path string
	// MaxBytes bounds the file, with what is in it already. 0: 256 MiB.
	MaxBytes int64
	Worker   string
	Side     room.Side
	// Tombstone is the registry's TTL. 0: its default, 60 s.
	Tombstone time.Duration
	Log       *slog.Logger // nil: slog.Default()

	buffer int // records; 0: maxBuffer
}

// Writer writes the trace of one process: it is the room.Observer of its registry. Close
// must come after the registry's last event.
type Writer struct {
	out   io.WriteCloser
	log   *slog.Logger
	limit int           // records that may be pending
	kick  chan struct{} // cap 1: there is something to write
	stop  chan struct{}
	ended chan struct{}
	once  sync.Once

	mu      sync.Mutex
	pending []entry // in order of mono
	spare   []entry
	lost    uint64 // dropped since the loop last looked

	// The loop's own, and Close's after it has ended.
	buf     bytes.Buffer
	left    int64  // bytes that may still be written
	dropped uint64 // in all
	full    bool
	err     error
}

// entry is a record before it is spelled out.
type entry struct {
	mono, wall int64
	kind       string // "" for a step
	key        room.Key
	instance   uint64
	chunks     int
	deadline   int64
	step       room.Stepped
}

// Open creates or continues the file and starts the writing goroutine; Close ends it.
func Open(c Config) (*Writer, error) {
	if c.MaxBytes <= 0 {
		c.MaxBytes = 256 << 20
	}
	f, err := os.OpenFile(c.Path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open room trace: %w", err)
	}
	size, err := prepare(f)
	if err == nil && size+2*reserve > c.MaxBytes {
		err = fmt.Errorf("it has %d bytes of the %d allowed; move it away or allow more", size, c.MaxBytes)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open room trace %s: %w", c.Path, err)
	}
	return start(f, c, c.MaxBytes-size)
}

// prepare locks f and ends a line that an earlier process left torn.
func prepare(f *os.File) (size int64, err error) {
	if err := lock(f); err != nil {
		return 0, fmt.Errorf("another process writes to it: %w", err)
	}
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if size = st.Size(); size == 0 {
		return 0, nil
	}
	last := make([]byte, 1)
	if _, err := f.ReadAt(last, size-1); err != nil {
		return 0, err
	}
	if last[0] != '\n' {
		_, err = f.Write([]byte("\n"))
		size++
	}
	return size, err
}

// start writes the header and begins; out is owned, allowed is in bytes.
func start(out io.WriteCloser, c Config, allowed int64) (*Writer, error) {
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.Tombstone <= 0 {
		c.Tombstone = time.Minute
	}
	if c.buffer == 0 {
		c.buffer = maxBuffer
	}
	w := &Writer{out: out, log: c.Log, left: allowed, limit: c.buffer, kick: make(chan struct{}, 1), stop: make(chan struct{}), ended: make(chan struct{})}
	w.line(Header{
		Version: Version, Worker: c.Worker, Side: c.Side.String(), PID: os.Getpid(), Mono: monotonic(), Wall: time.Now().UnixMicro(),
		Boot: bootID(), Tombstone: int64(c.Tombstone), Beat: int64(beat),
	})
	w.flush()
	if w.err != nil {
		out.Close()
		return nil, fmt.Errorf("write the header of room trace %s: %w", c.Path, w.err)
	}
	go w.run()
	return w, nil
}

// Opened implements room.Observer.
func (w *Writer) Opened(r *room.Room, chunks int) {
	left := time.Until(r.Deadline())
	w.add(entry{kind: kindOpen, key: r.Key(), instance: r.Instance(), chunks: chunks, deadline: int64(left)})
}

// Stepped implements room.Observer.
func (w *Writer) Stepped(r *room.Room, s room.Stepped) {
	w.add(entry{key: r.Key(), instance: r.Instance(), step: s})
}

// Forgotten implements room.Observer.
func (w *Writer) Forgotten(r *room.Room) {
	w.add(entry{kind: kindForget, key: r.Key(), instance: r.Instance()})
}

// add takes the time and queues e, or counts it. Never waits for the file.
func (w *Writer) add(e entry) {
	wall := time.Now().UnixMicro()
	w.mu.Lock()
	if len(w.pending) >= w.limit {
		w.lost++
		w.mu.Unlock()
		return
	}
	e.mono, e.wall = monotonic(), wall
	if e.kind == kindOpen {
		e.deadline = addSaturated(e.mono, e.deadline)
	}
	w.pending = append(w.pending, e)
	first := len(w.pending) == 1
	w.mu.Unlock()
	if first {
		select {
		case w.kick <- struct{}{}:
		default:
		}
	}
}

// addSaturated keeps a deadline in the far future there.
func addSaturated(a, b int64) int64 {
	if b > math.MaxInt64-a {
		return math.MaxInt64
	}
	return a + b
}

// Close writes what is left and the end record, and closes the file. The error says what
// could not be written; it is no reason to think badly of the rooms.
func (w *Writer) Close() error {
	w.once.Do(func() { close(w.stop) })
	<-w.ended
	return w.err
}

// run is the one goroutine that writes.
func (w *Writer) run() {
	defer close(w.ended)
	tick := time.NewTicker(beat)
	defer tick.Stop()
	for {
		quiet := false
		select {
		case <-w.kick:
		case <-tick.C:
			quiet = true
		case <-w.stop:
			w.batch(false)
			w.end()
			return
		}
		w.batch(quiet)
	}
}

// batch writes what is pending, and a beat if that is nothing and quiet.
func (w *Writer) batch(quiet bool) {
	w.mu.Lock()
	work, lost := w.pending, w.lost
	w.pending, w.spare, w.lost = w.spare[:0], nil, 0
	now := monotonic()
	w.mu.Unlock()
	for i := range work {
		w.record(work[i].record())
		work[i] = entry{} // let go of causes
	}
	if quiet && len(work) == 0 && lost == 0 {
		w.record(Record{Mono: now, Wall: time.Now().UnixMicro(), Kind: kindBeat})
	}
	if lost > 0 {
		if w.dropped == 0 {
			w.log.Warn("room trace: the file is too slow; the trace is incomplete", "dropped", lost)
		}
		w.dropped += lost
		w.special(Record{Mono: now, Wall: time.Now().UnixMicro(), Kind: kindDropped, Count: lost})
	}
	w.flush()
	w.mu.Lock()
	w.spare = work[:0]
	w.mu.Unlock()
}

// record writes r if the file has room for it, and says so once if not.
func (w *Writer) record(r Record) {
	if w.full {
		w.dropped++
		return
	}
	before := w.buf.Len()
	w.line(r)
	if int64(w.buf.Len()) <= w.left-reserve {
		return
	}
	w.buf.Truncate(before)
	w.full = true
	w.dropped++
	w.log.Warn("room trace: the file is full; the trace is incomplete from here on")
	w.special(Record{Mono: r.Mono, Wall: r.Wall, Kind: kindDropped, Count: 1})
}

// special writes a record that the reserve is for.
func (w *Writer) special(r Record) {
	if int64(w.buf.Len())+reserve/4 <= w.left {
		w.line(r)
	}
}

// end says that the trace is whole, or how much is missing.
func (w *Writer) end() {
	w.special(Record{Mono: monotonic(), Wall: time.Now().UnixMicro(), Kind: kindEnd, Count: w.dropped})
	w.flush()
	w.err = errors.Join(w.err, w.out.Close())
}

// line appends v to the buffer.
func (w *Writer) line(v any) {
	b, err := json.Marshal(v)
	if err != nil {
		b = []byte(err.Error()) // can not happen: strings and numbers only
	}
	w.buf.Write(append(b, '\n'))
}

// flush writes the buffer out. After an error nothing is written any more.
func (w *Writer) flush() {
	if w.buf.Len() == 0 || w.err != nil {
		w.buf.Reset()
		return
	}
	n, err := w.out.Write(w.buf.Bytes())
	w.left -= int64(n)
	w.buf.Reset()
	if err != nil {
		w.err = fmt.Errorf("write room trace: %w", err)
		w.log.Warn("room trace: writing failed; the trace ends here", "err", err)
	}
}

// record spells e out.
func (e *entry) record() Record {
	r := Record{Mono: e.mono, Wall: e.wall, Kind: e.kind, Room: e.key.String(), Instance: e.instance, Chunks: e.chunks}
	if e.kind == kindOpen {
		r.Deadline = e.deadline
	}
	if e.kind != "" {
		return r
	}
	s := &e.step
	r.Kind, r.Seq, r.Why = s.Event.Kind.String(), s.Seq, code(s.Event.Cause)
	if meansChunk(s.Event.Kind) {
		r.Chunk = s.Event.Chunk
	}
	r.Last = s.Event.Last && meansLast(s.Event.Kind)
	r.From, r.To, r.Effects, r.Withheld = s.From.String(), s.To.String(), effects(s.Effects), effects(s.Withheld)
	r.Begun, r.Settled, r.Landed, r.Cause = s.Begun, s.Settled, s.Landed, code(s.Cause)
	return r
}
