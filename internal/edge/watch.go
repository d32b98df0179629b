package edge

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"time"
)

// maxFile is the longest file that is read, in bytes.
const maxFile = 16 << 20

// Watched is what is made of some files.
type Watched struct {
	What  string // in words, for the log
	Files []string
	// Apply takes the files' texts; on an error nothing has changed.
	Apply func(texts [][]byte) error
}

// load reads the files and applies them, for who is about to watch them.
func (w Watched) load() error {
	texts, err := readAll(w.Files)
	if err != nil {
		return err
	}
	return w.Apply(texts)
}

// readAll reads files whole.
func readAll(files []string) ([][]byte, error) {
	var out [][]byte
	for _, name := range files {
		text, err := readFile(name)
		if err != nil {
			return nil, err
		}
		out = append(out, text)
	}
	return out, nil
}

func readFile(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(text) > maxFile {
		err = fmt.Errorf("%s has more than %d bytes", name, maxFile)
	}
	return text, err
}

// Watch reads w's files every interval until ctx ends, and applies them when they are not what they were. report is told of each
// change: nil, or why it was not taken (once for each different reason); then the last good contents stay in use.
//
// Contents are compared because notices of the kernel get lost where links are swapped, as in a ConfigMap. A change is
// taken when two readings in a row have found it: of a file that is being written, half may look like a whole one, and two
// files that belong together are replaced one after the other.
func Watch(ctx context.Context, interval time.Duration, w Watched, report func(error)) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	v := view{w: w, report: report}
	for {
		v.look()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// view is what a Watch has seen.
type view struct {
	w      Watched
	report func(error)
	seen   [][]byte // the last reading; nil after one that failed
	inUse  [][]byte // nil until something has been applied
	told   string   // why the last change was not taken
}

// look reads once.
func (v *view) look() {
	texts, err := readAll(v.w.Files)
	settled := err == nil && v.seen != nil && equal(texts, v.seen)
	v.seen = texts
	switch {
	case err != nil:
	case !settled:
		return
	case v.inUse != nil && equal(texts, v.inUse):
		if v.told == "" {
			return
		}
	default:
		if err = v.w.Apply(texts); err == nil {
			first := v.inUse == nil && v.told == "" // the caller has read it before
			v.inUse = texts
			if first {
				return
			}
		}
	}
	if err == nil {
		v.told = ""
		v.report(nil)
	} else if err.Error() != v.told {
		v.told = err.Error()
		v.report(err)
	}
}

func equal(a, b [][]byte) bool {
	return slices.EqualFunc(a, b, bytes.Equal)
}
