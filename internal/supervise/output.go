package supervise

import (
	"bufio"
	"errors"
	"io"
	"sync"
)

const (
	maxLine   = 64 << 10 // longer lines are split
	tailLines = 8        // kept of standard error for events
)

// lineWriter writes whole lines of many children to one writer.
type lineWriter struct {
	mu  sync.Mutex
	out io.Writer
	buf []byte
}

// line writes prefix and text as one line. Errors are dropped: a broken terminal must not end children.
func (w *lineWriter) line(prefix string, text []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buf = append(append(append(w.buf[:0], prefix...), text...), '\n')
	_, _ = w.out.Write(w.buf)
}

// copyLines writes r to w line by line until r ends; each line also goes to tail, if not nil.
func copyLines(w *lineWriter, prefix string, r io.Reader, tail *tail) {
	in := bufio.NewReaderSize(r, maxLine)
	for {
		text, err := in.ReadSlice('\n')
		if n := len(text); n > 0 && text[n-1] == '\n' {
			text = text[:n-1]
		}
		if len(text) > 0 || err == nil {
			w.line(prefix, text)
			tail.add(text)
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

// tail keeps the last lines. A nil tail keeps nothing.
type tail struct {
	mu    sync.Mutex
	lines []string
}

func (t *tail) add(text []byte) {
	if t == nil {
		return
	}
	const most = 500
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.lines) == tailLines {
		copy(t.lines, t.lines[1:])
		t.lines = t.lines[:tailLines-1]
	}
	t.lines = append(t.lines, string(text[:min(len(text), most)]))
}

func (t *tail) last() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]string(nil), t.lines...)
}
