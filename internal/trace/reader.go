package trace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// maxLine bounds a line of a trace in bytes; the writer's are below 1 KiB.
const maxLine = 64 << 10

// line is one of a trace: exactly one of header, record, torn and err is set.
type line struct {
	n      int // from 1
	header *Header
	record *Record
	torn   bool  // where the process before was cut
	err    error // malformed
}

// scan reads lines in order. A bad line is torn if the file ends in it without a newline, or
// if it is the rest of a record before the next header. The error is the reader's.
func scan(r io.Reader, each func(line)) error {
	in := bufio.NewReaderSize(r, maxLine)
	var held *line // bad so far: what follows decides
	var heldCut bool
	give := func(l line) {
		if held != nil {
			if heldCut && l.header != nil {
				held.torn, held.err = true, nil
			}
			each(*held)
			held = nil
		}
		if l.err != nil {
			held = &l
			return
		}
		each(l)
	}
	for n := 1; ; n++ {
		text, whole, err := readLine(in)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if len(text) > 0 || whole {
			l := parse(text)
			l.n = n
			give(l)
			heldCut = l.err != nil && truncated(text)
		}
		if err != nil {
			if held != nil {
				if held.torn = !whole && truncated(text); held.torn {
					held.err = nil
				}
				each(*held)
			}
			return nil
		}
	}
}

// readLine is the next line without its end; whole says that it has one. Of a line that is
// too long only the first maxLine bytes are returned.
func readLine(in *bufio.Reader) (text []byte, whole bool, err error) {
	text, err = in.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		text = bytes.Clone(text)
		for errors.Is(err, bufio.ErrBufferFull) {
			_, err = in.ReadSlice('\n')
		}
		return text, err == nil, err
	}
	if err == nil {
		return text[:len(text)-1], true, nil
	}
	return text, false, err
}

// truncated reports whether text can be the beginning of a line that was cut: an object
// that does not end.
func truncated(text []byte) bool {
	return len(text) > 0 && text[0] == '{' && len(text) < maxLine && !json.Valid(text)
}

func parse(text []byte) (l line) {
	switch {
	case len(text) >= maxLine:
		l.err = fmt.Errorf("longer than %d bytes", maxLine)
	case bytes.HasPrefix(text, headerMark):
		h := new(Header)
		if l.err = decode(text, h); l.err != nil {
			return l
		}
		if h.Version != Version {
			l.err = fmt.Errorf("version %d of the format; this baton reads %d", h.Version, Version)
			return l
		}
		l.header = h
	default:
		r := new(Record)
		if l.err = decode(text, r); l.err == nil {
			l.err = r.shape()
		}
		if l.err == nil {
			l.record = r
		}
	}
	return l
}

// shape refuses a record with fields that its kind has not.
func (r *Record) shape() error {
	rest := *r
	rest.Mono, rest.Wall, rest.Kind = 0, 0, ""
	named := true
	switch r.Kind {
	case kindOpen:
		rest.Chunks, rest.Deadline = 0, 0
	case kindForget:
	case kindBeat, kindDropped, kindEnd:
		named, rest.Count = false, 0
	default:
		k, ok := eventKinds[r.Kind]
		if !ok {
			return fmt.Errorf("kind %q is unknown", r.Kind)
		}
		if r.Chunk != 0 && !meansChunk(k) || r.Last && !meansLast(k) || r.Seq == 0 {
			return fmt.Errorf("fields that %q has not, or no number", r.Kind)
		}
		rest = Record{Room: r.Room, Instance: r.Instance, Chunks: r.Chunks, Deadline: r.Deadline, Count: r.Count}
	}
	if named {
		if _, err := parseKey(r.Room); err != nil {
			return err
		}
		if r.Instance == 0 {
			return errors.New("a room without its instance")
		}
		rest.Room, rest.Instance = "", 0
	}
	if rest != (Record{}) {
		return fmt.Errorf("fields that %q has not", r.Kind)
	}
	return nil
}
