package accesslog

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/router/record"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var journal = record.NewJournal(0, 0)

// ended is a request that has ended, with this id.
func ended(rid string) *record.Entry {
	e := journal.Begin(time.Now(), "/generate", "10.0.0.1")
	e.Parsed(rid, "m", false, 1, 1)
	e.End(time.Now(), time.Now(), 200, record.OK, nil)
	return e
}

// rids are the ids of a file's lines.
func rids(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var out []string
	for s := bufio.NewScanner(f); s.Scan(); {
		var l struct {
			RID string `json:"rid"`
		}
		if err := json.Unmarshal(s.Bytes(), &l); err != nil {
			t.Fatalf("line %q: %v", s.Text(), err)
		}
		out = append(out, l.RID)
	}
	return strings.Join(out, " ")
}

// count is a value of the log's metric.
func count(t *testing.T, l *Log, result string) float64 {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(l.lines)
	all, err := reg.Gather()
	if err != nil || len(all) != 1 {
		t.Fatalf("%d metrics, %v", len(all), err)
	}
	for _, m := range all[0].GetMetric() {
		if m.GetLabel()[0].GetValue() == result {
			return m.GetCounter().GetValue()
		}
	}
	t.Fatalf("no result %q is counted", result)
	return 0
}

func open(t *testing.T, c Config) *Log {
	t.Helper()
	l, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func closed(t *testing.T, l *Log) {
	t.Helper()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestLine fixes the form of a line: programs read it.
func TestLine(t *testing.T) {
	start := time.Date(2026, 5, 4, 3, 2, 1, 6e6, time.UTC)
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	e := record.NewJournal(0, 0).Begin(start, "/v1/chat/completions", "10.0.0.1")
	e.SetKey("team")
	e.Named("q1")
	e.Parsed("r\"1", "m<1>", true, 1, 2)
	e.Waited(2 * time.Millisecond)
	e.Try(at(2), record.Attempt{Room: 1 << 62, Prefill: "p0:1", Decode: "d0:1"})
	e.Tried(at(5), &record.Cause{Code: "peer_lost", Side: "decode", Phase: "waiting_for_headers", Worker: "d0:1", Detail: strings.Repeat("x", maxDetail+1)})
	e.Try(at(6), record.Attempt{Room: 8, Kind: "baton", Prefill: "p0:1", Decode: "d1:1"})
	e.PrefillDone(at(10), 8)
	e.Token(at(12))
	e.Count(9)
	e.Usage(100, 20)
	e.Tried(at(30), &record.Cause{Code: "deadline", Side: "decode"})
	e.End(at(31), at(11), 200, record.StreamError, &record.Cause{Code: "deadline", Side: "decode", Phase: "streaming", Worker: "d1:1", Detail: "late"})
	var b bytes.Buffer
	r := e.Snapshot()
	appendLine(&b, &r)
	want := `{"time":"2026-05-04T03:02:01.006Z","id":1,"request_id":"q1","rid":"r\"1","key":"team","client":"10.0.0.1","path":"/v1/chat/completions","model":"m<1>","stream":true,"choices":2,` +
		`"status":200,"outcome":"stream_error","cause":"deadline","side":"decode","phase":"streaming","worker":"d1:1","detail":"late",` +
		`"room":"8","kind":"baton","prefill":"p0:1","decode":"d1:1","attempts":2,"failed_attempts":[{"room":"4611686018427387904","prefill":"p0:1","decode":"d0:1","ms":3,` +
		`"cause":"peer_lost","side":"decode","phase":"waiting_for_headers","worker":"d0:1","detail":"` + strings.Repeat("x", maxDetail) + `..."}],` +
		`"queue_ms":2,"prefill_ms":4,"first_byte_ms":11,"first_token_ms":12,"decode_ms":19,"total_ms":31,"prompt_tokens":100,"completion_tokens":20,"events":9}` + "\n"
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
	b.Reset()
	e = record.NewJournal(0, 0).Begin(start, "/generate", "10.0.0.1")
	e.End(at(1), at(1), 400, record.Refused, &record.Cause{Code: "invalid_request", Side: "router"})
	r = e.Snapshot()
	appendLine(&b, &r)
	want = `{"time":"2026-05-04T03:02:01.006Z","id":1,"client":"10.0.0.1","path":"/generate","stream":false,"status":400,"outcome":"refused","cause":"invalid_request","side":"router",` +
		`"attempts":0,"queue_ms":0,"first_byte_ms":1,"total_ms":1}` + "\n"
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
}

// TestEveryLineOnce: many writers, and a close in the end; the file is appended to.
func TestEveryLineOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "access.log")
	if err := os.WriteFile(path, []byte(`{"rid":"before"}`+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	reg := prometheus.NewRegistry()
	l := open(t, Config{Path: path, Registerer: reg})
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			for n := range 100 {
				l.Put(ended(strconv.Itoa(i) + "." + strconv.Itoa(n)))
			}
		})
	}
	wg.Wait()
	closed(t, l)
	closed(t, l) // again
	all := strings.Fields(rids(t, path))
	seen := map[string]bool{}
	for _, rid := range all {
		seen[rid] = true
	}
	if len(all) != 1001 || len(seen) != 1001 || all[0] != "before" {
		t.Errorf("%d lines, %d different ones, the first is %s", len(all), len(seen), all[0])
	}
	if n := count(t, l, "written"); n != 1000 {
		t.Errorf("%v lines are counted as written", n)
	}
}

// TestReopen: after a rename, lines go to the old file until Reopen, and to the new one afterwards.
func TestReopen(t *testing.T) {
	dir := t.TempDir()
	path, old := filepath.Join(dir, "a"), filepath.Join(dir, "a.1")
	l := open(t, Config{Path: path})
	l.Put(ended("1"))
	awaitWritten(t, l, 1)
	if err := os.Rename(path, old); err != nil {
		t.Fatal(err)
	}
	l.Reopen()
	l.Put(ended("2"))
	closed(t, l)
	if a, b := rids(t, old), rids(t, path); a != "1" || b != "2" {
		t.Errorf("old file %q, new file %q", a, b)
	}
}

// TestRename: nobody has to tell.
func TestRename(t *testing.T) {
	for name, rotate := range map[string]func(path, old string) error{
		"renamed":  os.Rename,
		"replaced": func(path, old string) error { return errors.Join(os.Rename(path, old), os.WriteFile(path, nil, 0o600)) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path, old := filepath.Join(dir, "a"), filepath.Join(dir, "a.1")
			l := open(t, Config{Path: path, lookEvery: 10 * time.Millisecond})
			l.Put(ended("1"))
			awaitWritten(t, l, 1)
			if err := rotate(path, old); err != nil {
				t.Fatal(err)
			}
			// A line a moment until one has gone to the new file; the lines between are in the old one.
			n := 1
			for size := int64(0); size == 0; {
				n++
				l.Put(ended(strconv.Itoa(n)))
				awaitWritten(t, l, n)
				if info, err := os.Stat(path); err == nil {
					size = info.Size()
				}
			}
			closed(t, l)
			if got := len(strings.Fields(rids(t, old) + " " + rids(t, path))); got != n {
				t.Errorf("%d lines in both files, want %d", got, n)
			}
		})
	}
}

// awaitWritten waits until n lines are written.
func awaitWritten(t *testing.T, l *Log, n int) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	late := time.After(30 * time.Second)
	for count(t, l, "written") < float64(n) {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("%d lines are not written within 30 s", n)
		}
	}
}

// disk takes what it is allowed to, and fails as told.
type disk struct {
	in   chan struct{} // told of each write, unless it is nil
	gate chan error    // each write waits for one: nil lets it through
	buf  bytes.Buffer
	part int // bytes that a failing write takes
}

func (d *disk) Write(p []byte) (int, error) {
	if d.in != nil {
		d.in <- struct{}{}
	}
	if err := <-d.gate; err != nil {
		n := min(d.part, len(p))
		d.buf.Write(p[:n])
		return n, err
	}
	return d.buf.Write(p)
}

// TestStalledDisk: requests go on, what finds the queue full is counted, and Close does not hang.
func TestStalledDisk(t *testing.T) {
	d := &disk{in: make(chan struct{}, 100), gate: make(chan error)}
	l := open(t, Config{Queue: 3, out: d, farewell: 50 * time.Millisecond})
	l.Put(ended("0"))
	<-d.in // and there it stays
	for i := range 20 {
		l.Put(ended(strconv.Itoa(i))) // returns, or the test hangs
	}
	if n := count(t, l, "dropped"); n != 17 {
		t.Errorf("%v lines are counted as dropped, want 17", n)
	}
	if err := l.Close(); err == nil || !strings.Contains(err.Error(), "takes nothing") {
		t.Errorf("Close said %v", err)
	}
	close(d.gate) // the disk is back: the writer ends
	<-l.done
	if n := strings.Count(d.buf.String(), "\n"); n != 4 {
		t.Errorf("%d lines came through, want 4", n)
	}
}

// TestFullDisk: lines that fail are counted, half a line does not spoil the next, and trouble is logged once.
func TestFullDisk(t *testing.T) {
	d := &disk{gate: make(chan error, 8), part: 10}
	l := open(t, Config{out: d})
	full := errors.New("no space left on device")
	for i, err := range []error{nil, full, full, nil} {
		d.gate <- err
		l.Put(ended(strconv.Itoa(i)))
		awaitHandled(t, l, i+1)
	}
	closed(t, l)
	lines := strings.Split(strings.TrimSuffix(d.buf.String(), "\n"), "\n")
	good := 0
	for _, s := range lines {
		if json.Valid([]byte(s)) {
			good++
		}
	}
	if good != 2 || !json.Valid([]byte(lines[len(lines)-1])) {
		t.Errorf("%d good lines in %q", good, lines)
	}
	if n := count(t, l, "failed"); n != 2 {
		t.Errorf("%v lines are counted as failed", n)
	}
}

// awaitHandled waits until n lines are written or failed.
func awaitHandled(t *testing.T, l *Log, n int) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	late := time.After(30 * time.Second)
	for count(t, l, "written")+count(t, l, "failed") < float64(n) {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("%d lines are not handled within 30 s", n)
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{dir, filepath.Join(dir, "none", "log"), os.DevNull} {
		if l, err := Open(Config{Path: path}); err == nil {
			closed(t, l)
			t.Errorf("%s was opened", path)
		}
	}
	var none *Log
	none.Put(ended("x"))
	none.Reopen()
	closed(t, none)
}
