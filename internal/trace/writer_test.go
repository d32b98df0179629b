package trace

import (
	"bytes"
	"errors"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

func config(t *testing.T, side room.Side) Config {
	return Config{Path: filepath.Join(t.TempDir(), "rooms.jsonl"), Worker: "w:1", Side: side, Log: slog.New(slog.DiscardHandler)}
}

func checkFile(t *testing.T, path string) *Report {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return check(t, b, nil)
}

// live runs n rooms of a new registry.
func live(t *testing.T, o room.Observer, from, n int) {
	t.Helper()
	g := registry(o)
	defer g.Close()
	drive(t, g, from, n)
}

func registry(o room.Observer) *room.Registry {
	return room.NewRegistry(room.Config{Side: room.SideSender, Observe: o, Log: slog.New(slog.DiscardHandler)})
}

// drive runs n rooms at once, each through events of several goroutines, to their ends.
func drive(t *testing.T, g *room.Registry, from, n int) {
	t.Helper()
	var wg sync.WaitGroup
	for i := range n {
		key := room.Key{Room: uint64(from + i)}
		if i%5 == 0 {
			g.Abort(key, &room.Cause{Code: room.CodeAborted})
		}
		r, err := g.Open(key, time.Now().Add(time.Minute), 3, nil)
		if err != nil {
			t.Error(err)
			return
		}
		wg.Go(func() { // one worker, which settles what it was allowed
			r.Apply(room.Event{Kind: room.EvGrant})
			for c := range 3 {
				if r.Apply(room.Event{Kind: room.EvBegin, Chunk: c}).Has(room.FxWrite) {
					r.Apply(room.Event{Kind: room.EvSettle, Chunk: c})
				}
			}
			r.Apply(room.Event{Kind: room.EvRelease})
		})
		wg.Go(func() {
			if rand.IntN(2) == 0 {
				r.Apply(room.Event{Kind: room.EvAbort})
			}
		})
		wg.Go(func() { r.Apply(room.Event{Kind: room.EvDeadline}) })
	}
	wg.Wait()
}

// TestRecordedRegistry: the trace of a real registry under many goroutines, over two
// processes, is valid, and has every room.
func TestRecordedRegistry(t *testing.T) {
	c := config(t, room.SideSender)
	for run := range 2 {
		w, err := Open(c)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Open(c); err == nil || !strings.Contains(err.Error(), "another process") {
			t.Errorf("two writers of one file: %v", err)
		}
		live(t, w, 1, 300)
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil { // again, as a worker's closing may
			t.Fatal(err)
		}
		if rep := checkFile(t, c.Path); !rep.OK() || rep.Incarnations != run+1 || rep.Rooms["prefill"] != 300*(run+1) || rep.Ends["prefill"]["success"]+rep.Ends["prefill"]["failed: aborted"] == 0 {
			t.Error(rep.text())
		}
	}
}

// TestKilledWriter: what a process that was killed has left, torn, is continued by the next.
func TestKilledWriter(t *testing.T) {
	c := config(t, room.SideSender)
	w, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	live(t, w, 1, 10)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(c.Path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(c.Path, st.Size()-100); err != nil { // the end record and half of the one before
		t.Fatal(err)
	}
	if w, err = Open(c); err != nil {
		t.Fatal(err)
	}
	live(t, w, 1, 10)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if rep := checkFile(t, c.Path); !rep.OK() || rep.Torn != 1 || rep.Cut != 1 || rep.Incarnations != 2 {
		t.Error(rep.text())
	}
}

// gateOut is a file that takes nothing until it is opened.
type gateOut struct {
	open chan struct{}
	buf  bytes.Buffer
	err  error
}

func (g *gateOut) Write(b []byte) (int, error) {
	<-g.open
	if g.err != nil {
		return 0, g.err
	}
	return g.buf.Write(b)
}

func (g *gateOut) Close() error { return nil }

// TestSlowFile: rooms never wait for the file. What does not fit into the buffer is dropped,
// counted, and the trace incomplete, not valid.
func TestSlowFile(t *testing.T) {
	c, out := config(t, room.SideSender), &gateOut{open: make(chan struct{}, 1)}
	out.open <- struct{}{} // the header
	c.buffer = 4096
	w, err := start(out, c, 1<<40)
	if err != nil {
		t.Fatal(err)
	}
	g := registry(w)
	defer g.Close()
	for n := 0; ; n += 500 { // until more events have come than fit, while nothing is written
		drive(t, g, 1+n, 500)
		w.mu.Lock()
		lost := w.lost
		w.mu.Unlock()
		if lost > 2000 {
			break
		}
	}
	close(out.open)
	drive(t, g, 1_000_001, 100)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	rep := check(t, out.buf.Bytes(), nil)
	if rep.Verdict != VerdictIncomplete || rep.OK() || rep.Dropped == 0 || rep.Unverified == 0 {
		t.Error(rep.text())
	}
	if rep.Rooms["prefill"] < 200 {
		t.Errorf("only %d rooms are left", rep.Rooms["prefill"])
	}
}

// TestFullFile: the file stays within its bound and says that it is not whole.
func TestFullFile(t *testing.T) {
	c := config(t, room.SideSender)
	c.MaxBytes = 64 << 10
	w, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	live(t, w, 1, 400)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(c.Path)
	if err != nil {
		t.Fatal(err)
	}
	if st.Size() > c.MaxBytes || st.Size() < c.MaxBytes-4096 {
		t.Errorf("%d bytes of %d", st.Size(), c.MaxBytes)
	}
	if rep := checkFile(t, c.Path); rep.Verdict != VerdictIncomplete || rep.Dropped < 100 || rep.Cut != 0 {
		t.Error(rep.text())
	}
	if _, err := Open(c); err == nil || !strings.Contains(err.Error(), "move it away") {
		t.Errorf("a full file was opened: %v", err)
	}
}

// TestFailingFile: a disk that fails does no harm to rooms, is told by Close, and what is on
// it is no whole trace.
func TestFailingFile(t *testing.T) {
	full := errors.New("disk full")
	c, out := config(t, room.SideSender), &gateOut{open: make(chan struct{}, 1)}
	out.open <- struct{}{}
	w, err := start(out, c, 1<<40)
	if err != nil {
		t.Fatal(err)
	}
	out.err = full // nobody writes before there is an event
	close(out.open)
	live(t, w, 1, 50)
	if err := w.Close(); !errors.Is(err, full) {
		t.Errorf("Close: %v", err)
	}
	if rep := check(t, out.buf.Bytes(), nil); rep.Cut != 1 || rep.Rooms["prefill"] != 0 {
		t.Error(rep.text())
	}
	if _, err := start(&gateOut{open: out.open, err: full}, c, 1<<40); !errors.Is(err, full) {
		t.Errorf("a header that can not be written: %v", err)
	}
	c.Path = filepath.Join(c.Path, "no", "such")
	if _, err := Open(c); err == nil {
		t.Error("a path that can not be made was opened")
	}
}

// TestBeats: an idle process says that it runs.
func TestBeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := &gateOut{open: make(chan struct{})}
		close(out.open)
		w, err := start(out, config(t, room.SideSender), 1<<40)
		if err != nil {
			t.Fatal(err)
		}
		<-time.After(10*beat + beat/2)
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(out.buf.String(), `"e":"beat"`); n != 10 {
			t.Errorf("%d beats in %v:\n%s", n, 10*beat, out.buf.String())
		}
	})
}

// FuzzCheck: whatever is in a file, reading ends, and only what the writer could have written
// is valid.
func FuzzCheck(f *testing.F) {
	h := Header{Version: Version, Worker: "p:1", Side: "prefill", PID: 1, Mono: 1, Wall: 1, Boot: "b", Tombstone: 1, Beat: 1}
	open := Record{Mono: 2, Wall: 1, Kind: kindOpen, Room: "1#2", Instance: 1, Chunks: 1, Deadline: 9}
	gone := Record{Mono: 3, Wall: 1, Kind: "abort", Room: "1#2", Instance: 1, Seq: 1, From: "bootstrapping", To: "failed/done", Effects: "terminal", Withheld: "send_ack", Cause: "aborted"}
	f.Add(lines(h, []Record{open, gone, {Mono: 4, Wall: 1, Kind: kindEnd}}))
	f.Add(lines(h, []Record{{Mono: 4, Wall: 1, Kind: kindDropped, Count: 3}}))
	f.Add([]byte("{\"baton_trace\":1\n\n{}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		n := 0
		if err := scan(bytes.NewReader(b), func(l line) {
			set := 0
			for _, is := range []bool{l.header != nil, l.record != nil, l.torn, l.err != nil} {
				if is {
					set++
				}
			}
			if n++; set != 1 || l.n != n {
				t.Fatalf("line %d: %+v", n, l)
			}
		}); err != nil {
			t.Fatal(err)
		}
		rep := check(t, b, nil)
		if rep.OK() && rep.Torn == 0 && !bytes.HasPrefix(b, headerMark) {
			t.Fatalf("valid without a header:\n%s", rep.text())
		}
	})
}
