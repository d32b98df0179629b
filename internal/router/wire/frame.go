package wire

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net/textproto"
	"strconv"
	"strings"
)

// frame is how far the body of an answer has been read: it tells content from framing. It is pure; FuzzFrame compares it with net/http.
type frame struct {
	state frameState
	left  int64 // bytes of content still to come, of the body or of the present chunk
	junk  int   // bytes of chunks' heads beyond what their content is worth
}

// frameState is what comes next.
type frameState uint8

const (
	frameOver    frameState = 0 // nothing
	frameLength  frameState = 1 // content, then nothing
	frameSize    frameState = 2 // a chunk's head
	frameContent frameState = 3 // a chunk's content
	frameTail    frameState = 4 // the line's end after it
	frameTrailer frameState = 5 // a trailer, or the blank line that ends the body
)

const (
	maxChunkLine = 1 << 10 // bytes of a chunk's head, extensions included
	maxTrailer   = 2 << 10 // bytes of a trailer
	maxJunk      = 8 << 10
	chunkWorth   = 16 // bytes of head that a chunk may have in any case
)

// Errors of chunked bodies.
var (
	errChunk   = errors.New("malformed chunked encoding")
	errJunk    = errors.New("chunked encoding with too much beside the content")
	errTrailer = errors.New("a trailer that is too long")
)

// begin takes the header's Content-Length and Transfer-Encoding. It knows only one of them, and no other form than digits and chunked.
func (f *frame) begin(length, coding string) bool {
	*f = frame{}
	switch {
	case coding != "":
		f.state = frameSize
		return length == "" && strings.EqualFold(coding, "chunked")
	case length == "" || len(length) > maxLengthDigits || strings.Trim(length, "0123456789") != "":
		return false
	}
	f.left, _ = strconv.ParseInt(length, 10, 64) // digits, and few
	if f.left > 0 {
		f.state = frameLength
	}
	return true
}

// take moves content from in, which has come, to out, until either is at its end or the body is. used is how much of in it has passed: content and
// framing. An error is final; what was moved before it is good.
func (f *frame) take(in, out []byte) (used, n int, err error) {
	for f.state != frameOver {
		rest := in[used:]
		switch f.state {
		case frameLength, frameContent:
			k := copy(out[n:], rest[:min(int64(len(rest)), f.left)])
			f.took(k)
			used, n = used+k, n+k
			if f.left > 0 {
				return used, n, nil
			}
			continue
		case frameTail:
			if len(rest) > 0 && rest[0] != '\r' || len(rest) > 1 && rest[1] != '\n' {
				return used, n, errChunk
			}
			if len(rest) < 2 {
				return used, n, nil
			}
			f.state, used = frameSize, used+2
			continue
		}
		k := 0
		if f.state == frameSize {
			k, err = f.size(rest)
		} else {
			k, err = f.trailer(rest)
		}
		if k == 0 || err != nil {
			return used, n, err
		}
		used += k
	}
	return used, n, nil
}

// took notes k bytes of content.
func (f *frame) took(k int) {
	if f.left -= int64(k); f.left > 0 {
		return
	}
	if f.state == frameLength {
		f.state = frameOver
	} else {
		f.state = frameTail
	}
}

// size passes a chunk's head: hexadecimal digits, perhaps an extension, CRLF. 0: it is not whole.
func (f *frame) size(b []byte) (int, error) {
	i := bytes.IndexByte(b[:min(len(b), maxChunkLine)], '\n')
	switch {
	case i < 0 && len(b) >= maxChunkLine:
		return 0, fmt.Errorf("%w: the head of a chunk is too long", errChunk)
	case i < 0:
		return 0, nil
	case i == 0 || bytes.IndexByte(b, '\r') != i-1:
		return 0, fmt.Errorf("%w: the head of a chunk ends in no CRLF", errChunk)
	}
	line := b[:i-1]
	digits, size := 0, int64(0)
	for digits < len(line) {
		c := unhex(line[digits])
		if c < 0 {
			break
		}
		size = size<<4 | c
		if digits++; digits > maxLengthDigits {
			break
		}
	}
	// An extension may follow, or blanks.
	if more := line[digits:]; digits == 0 || digits > maxLengthDigits || len(more) > 0 && more[0] != ';' && len(bytes.Trim(more, " \t")) > 0 {
		return 0, fmt.Errorf("%w: the length of a chunk: %.32q", errChunk, line)
	}
	f.junk = max(0, f.junk+i+1-chunkWorth-2*int(min(size, maxJunk)))
	if f.junk > maxJunk {
		return 0, errJunk
	}
	f.left, f.state = size, frameContent
	if size == 0 {
		f.state = frameTrailer
	}
	return i + 1, nil
}

// unhex is the value of a hexadecimal digit, -1 for none.
func unhex(c byte) int64 {
	switch {
	case c >= '0' && c <= '9':
		return int64(c - '0')
	case c >= 'a' && c <= 'f':
		return int64(c-'a') + 10
	case c >= 'A' && c <= 'F':
		return int64(c-'A') + 10
	}
	return -1
}

// trailer passes what ends a chunked body: a blank line, perhaps after fields, which are dropped. 0: it is not whole.
func (f *frame) trailer(b []byte) (int, error) {
	switch {
	case len(b) > 0 && b[0] == '\n':
		return 0, errChunk
	case len(b) < 2:
		return 0, nil
	}
	n := 2
	if b[0] != '\r' || b[1] != '\n' {
		end := bytes.Index(b[:min(len(b), maxTrailer)], []byte("\r\n\r\n"))
		switch {
		case end < 0 && len(b) >= maxTrailer:
			return 0, errTrailer
		case end < 0:
			return 0, nil
		}
		n = end + 4
		if bareLine(b[:n]) {
			return 0, errChunk
		}
		if _, err := textproto.NewReader(bufio.NewReader(bytes.NewReader(b[:n]))).ReadMIMEHeader(); err != nil {
			return 0, err
		}
	}
	f.state = frameOver
	return n, nil
}
