package openai

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strconv"
)

// DoneData is the data of the event that ends a stream that succeeded, and only such a one.
const DoneData = "[DONE]"

// ErrEventTooLarge: an event is longer than the reader's bound.
var ErrEventTooLarge = errors.New("openai: server-sent event too large")

// AppendEvent appends one server-sent event. data must be one line, as JSON from [Marshal] is.
func AppendEvent(dst, data []byte) []byte {
	dst = append(dst, "data: "...)
	dst = append(dst, data...)
	return append(dst, "\n\n"...)
}

// tokensLine begins the comment with an event's tokens.
const tokensLine = ": baton-tokens "

// AppendTokens appends the comment that begins an event, by which a router learns the tokens of its text. end: it is the last text,
// after which no other worker can go on.
func AppendTokens[T ~int32](dst []byte, tokens []T, end bool) []byte {
	dst = append(dst, tokensLine...)
	for i, t := range tokens {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, int64(t), 10)
	}
	if end {
		dst = append(dst, " end"...)
	}
	return append(dst, '\n')
}

// CutTokens takes the comment off an event and appends its tokens to dst. ok is false if the event does not begin with
// a sound one; then nothing changes.
func CutTokens[T ~int32](dst []T, event []byte) (tokens []T, end bool, rest []byte, ok bool) {
	line, rest, found := bytes.Cut(event, []byte("\n"))
	line, is := bytes.CutPrefix(line, []byte(tokensLine))
	if !found || !is {
		return dst, false, event, false
	}
	line, end = bytes.CutSuffix(line, []byte(" end"))
	tokens = dst
	for len(line) > 0 {
		var one []byte
		one, line, _ = bytes.Cut(line, []byte(","))
		n, err := strconv.ParseUint(string(one), 10, 31)
		if err != nil {
			return dst, false, event, false
		}
		tokens = append(tokens, T(n))
	}
	return tokens, end, rest, true
}

// EventReader reads the data of server-sent events. Not safe for concurrent use.
type EventReader struct {
	r    *bufio.Reader
	most int
	data []byte
}

// NewEventReader reads from r; an event's data may have up to most bytes (0: 4 MiB).
func NewEventReader(r io.Reader, most int) *EventReader {
	if most <= 0 {
		most = 4 << 20
	}
	return &EventReader{r: bufio.NewReaderSize(r, 8<<10), most: most}
}

// Next returns the data of the next event, valid until the following call. io.EOF: the stream
// ended between events. io.ErrUnexpectedEOF: it ended inside one. Other errors are the reader's. Whether
// the stream was complete is told by [DoneData], never by io.EOF.
func (e *EventReader) Next() ([]byte, error) {
	e.data = e.data[:0]
	have := false
	for {
		line, err := e.line()
		if err != nil {
			if err == io.EOF && have {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		switch {
		case len(line) == 0 && have:
			return e.data, nil
		case len(line) == 0 || line[0] == ':':
			continue
		}
		value, ok := bytes.CutPrefix(line, []byte("data:"))
		if !ok {
			continue // event:, id:, retry: and unknown fields carry nothing of ours
		}
		if have {
			e.data = append(e.data, '\n')
		}
		have = true
		e.data = append(e.data, bytes.TrimPrefix(value, []byte(" "))...)
		if len(e.data) > e.most {
			return nil, ErrEventTooLarge
		}
	}
}

// line reads one line without its end; the bound holds for it too.
func (e *EventReader) line() ([]byte, error) {
	var long []byte
	for {
		part, err := e.r.ReadSlice('\n')
		switch {
		case err == nil:
			if long != nil {
				part = append(long, part...)
			}
			return bytes.TrimSuffix(bytes.TrimSuffix(part, []byte("\n")), []byte("\r")), nil
		case errors.Is(err, bufio.ErrBufferFull):
			if long = append(long, part...); len(long) > e.most {
				return nil, ErrEventTooLarge
			}
		case err == io.EOF && len(part)+len(long) > 0:
			return nil, io.ErrUnexpectedEOF
		default:
			return nil, err
		}
	}
}
