package router

import (
	"bytes"
	"fmt"
	"unicode/utf8"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
)

// maxEvent is the longest event that is waited for, in bytes.
const maxEvent = 4 << 20

// stream follows a stream of server-sent events, cut anywhere, and lets through whole events only:
// when the source breaks, the client's stream ends between two events, and an error event can follow.
// It looks into an event's JSON only where a cheap search says that it may matter.
// Not safe for concurrent use.
type stream struct {
	side room.Side
	// phase for errors; the owner may change it between calls of feed.
	phase string
	// choices must each have a finish reason before the end; 0: it does not matter.
	choices int

	buf  []byte // buf[next:] is not yet judged; what precedes it has been handed out
	next int

	events   int          // data events seen, [DONE] included
	content  bool         // some of the answer itself was seen, or a choice has ended
	finished map[int]bool // choices that ended
	done     bool         // [DONE] was seen; nothing is let through after it
	usage    usage        // told by the stream; zero: nothing
	answer   answer       // of the event being judged, kept for its room
	stale    bool         // the event just judged only repeats or adds to what has ended: it is left out

	// follow: the tokens of its text are told, and asked for. Those of the events that the last feed let through are in tokens, with over
	// if the last text was among them; head is the first event's data, last the last one's with tokens.
	follow, over bool
	keep         bool // last is wanted
	tokens       []int32
	head, last   []byte
}

// reset prepares s for another stream and keeps its buffer.
func (s *stream) reset(side room.Side, phase string, choices int) {
	s.answer.clear()
	*s = stream{side: side, phase: phase, choices: choices, buf: s.buf[:0], tokens: s.tokens[:0], answer: s.answer, head: s.head[:0], last: s.last[:0]}
}

// feed takes the next bytes and returns those that may go to the client: whole events, valid until
// the next call. e is a failure that the stream told of; err wraps errMalformed. Either is
// final, and its event is not let through, but what is returned with it still is good.
func (s *stream) feed(p []byte) (forward []byte, e *openai.Error, err error) {
	if s.next > 0 {
		s.buf = s.buf[:copy(s.buf, s.buf[s.next:])]
		s.next = 0
	}
	s.tokens = s.tokens[:0]
	scan := len(s.buf)
	s.buf = append(s.buf, p...)
	start := 0
	for !s.done {
		end := eventEnd(s.buf, s.next, scan)
		if end < 0 {
			break
		}
		var tokens []int32
		if s.follow {
			if end, tokens, err = s.cutTokens(end); err != nil {
				return s.buf[start:s.next], nil, err
			}
		}
		scan = end
		data, has := eventData(s.buf[s.next:end])
		if has {
			if e, err = s.judge(data); e != nil || err != nil {
				return s.buf[start:s.next], e, err
			}
			if s.stale {
				s.stale = false
				s.buf = append(s.buf[:s.next], s.buf[end:]...)
				scan = s.next
				continue
			}
			if s.follow {
				s.took(tokens, data)
			}
			s.events++
		} else if s.events == 0 {
			start = end // a comment before the first event must not begin the answer
		}
		s.next = end
	}
	forward = s.buf[start:s.next]
	if s.done {
		s.buf = s.buf[:s.next] // whatever follows is dropped
	} else if len(s.buf)-s.next > maxEvent {
		return forward, nil, fmt.Errorf("%w: an event is longer than %d bytes", errMalformed, maxEvent)
	}
	return forward, nil, nil
}

// eventEnd is the offset after the blank line that ends the event at start, or -1. No
// line that ends before scanned is blank.
func eventEnd(b []byte, start, scanned int) int {
	at := max(start, scanned)
	for {
		i := bytes.IndexByte(b[at:], '\n')
		if i < 0 {
			return -1
		}
		i += at
		// The line that ends at i is blank if it begins there, or there after a CR.
		begin := i
		if begin > start && b[begin-1] == '\r' {
			begin--
		}
		if begin == start || b[begin-1] == '\n' {
			return i + 1
		}
		at = i + 1
	}
}

var dataField = []byte("data:")

// eventData is the data of one event; has is false for comments and other fields alone.
// It aliases event unless the data has several lines.
func eventData(event []byte) (data []byte, has bool) {
	for len(event) > 0 {
		var line []byte
		line, event, _ = bytes.Cut(event, []byte("\n"))
		value, ok := bytes.CutPrefix(bytes.TrimSuffix(line, []byte("\r")), dataField)
		if !ok {
			continue
		}
		value = bytes.TrimPrefix(value, []byte(" "))
		if !has {
			data, has = value, true
			continue
		}
		data = append(append(data[:len(data):len(data)], '\n'), value...)
	}
	return data, has
}

// A key of an object is these bytes, quotes included: inside a string the quotes would be escaped.
var (
	keyFinish = []byte(`"finish_reason"`)
	keyError  = []byte(`"error"`)
)

// judge takes one event's data.
func (s *stream) judge(data []byte) (*openai.Error, error) {
	if string(data) == openai.DoneData {
		if len(s.finished) < s.choices {
			return nil, fmt.Errorf("%w: the end was announced although %s", errMalformed, s.unfinished())
		}
		s.done = true
		return nil, nil
	}
	if !utf8.Valid(data) {
		return nil, fmt.Errorf("%w: an event is not UTF-8", errMalformed)
	}
	look := !s.content || len(s.finished) > 0 || !likeAnswer(data) || finishKnown(data) || bytes.Contains(data, keyError)
	if !look {
		if !validJSON(data) {
			return nil, fmt.Errorf("%w: an event is not JSON: %.80q", errMalformed, data)
		}
		return nil, nil
	}
	a := &s.answer
	a.clear()
	if err := decodeAnswer(data, a); err != nil {
		return nil, fmt.Errorf("%w: an event is not what it should be: %w", errMalformed, err)
	}
	if e := a.failure(data, s.side, s.phase); e != nil {
		return e, nil
	}
	s.note(a.usage())
	ends, err := a.finishes()
	if err != nil {
		return nil, err
	}
	for _, f := range ends {
		if f.failed() {
			return f.err(s.side, s.phase), nil
		}
	}
	if len(s.finished) > 0 {
		old, fresh := a.about(s.finished)
		if s.stale = old && !fresh; s.stale {
			return nil, nil
		}
		if old {
			return nil, fmt.Errorf("%w: an event goes on with a choice that has ended, and with another", errMalformed)
		}
	}
	for _, f := range ends {
		if s.finished == nil {
			s.finished = map[int]bool{}
		}
		s.finished[f.index] = true
	}
	s.content = s.content || len(ends) > 0 || a.content()
	return nil, nil
}

// answerKeys begin what an event of an answer has, as servers write it.
var answerKeys = [][]byte{[]byte(`"choices":[`), []byte(`"choices": [`), []byte(`"meta_info":{`), []byte(`"meta_info": {`)}

// likeAnswer: data looks like an event of an answer, and not like JSON of another kind.
func likeAnswer(data []byte) bool {
	if len(data) == 0 || data[0] != '{' {
		return false
	}
	for _, k := range answerKeys {
		if bytes.Contains(data, k) {
			return true
		}
	}
	return false
}

// finishKnown reports whether data has a finish reason that is not null.
func finishKnown(data []byte) bool {
	for {
		i := bytes.Index(data, keyFinish)
		if i < 0 {
			return false
		}
		data = bytes.TrimLeft(data[i+len(keyFinish):], " \t\r\n")
		if len(data) == 0 || data[0] != ':' {
			continue
		}
		data = bytes.TrimLeft(data[1:], " \t\r\n")
		if !bytes.HasPrefix(data, []byte("null")) {
			return true
		}
	}
}

// complete: every choice has ended.
func (s *stream) complete() bool { return s.choices > 0 && len(s.finished) >= s.choices }

// cut: there is a part of an event that has not ended.
func (s *stream) cut() bool { return s.next < len(s.buf) }

// ended says nil if a stream that has come to a clean end was a whole answer: every choice
// finished. [DONE] may be missing then, nothing else.
func (s *stream) ended() error {
	switch {
	case s.done:
		return nil
	case len(s.finished) < s.choices:
		return fmt.Errorf("%w: the stream ended although %s", errMalformed, s.unfinished())
	case s.cut():
		return fmt.Errorf("%w: the stream ended inside an event", errMalformed)
	}
	return nil
}

func (s *stream) unfinished() string {
	if s.choices == 1 {
		return "the answer was not finished"
	}
	return fmt.Sprintf("only %d of %d choices were finished", len(s.finished), s.choices)
}
