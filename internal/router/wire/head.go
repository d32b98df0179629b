package wire

import (
	"bytes"
	"net/http"
	"net/textproto"
	"strings"
)

// verdict is what parseHead thinks of bytes that came.
type verdict uint8

const (
	headMore     verdict = 0 // so far a head of the common form; it is not whole
	headWhole    verdict = 1
	headUncommon verdict = 2 // net/http is to read it, and may refuse it
)

const (
	statusProto = "HTTP/1.1 "
	// maxLengthDigits bounds a Content-Length: larger ones are uncommon.
	maxLengthDigits = 15
)

// parseHead reads the head of an answer at the start of b, if it is of the common form: HTTP/1.1, a status that has a body, plain lines of printable ASCII that
// end in CRLF, and exactly one length, or chunks. What it takes net/http would take, too, and read as the same; FuzzHead compares the two.
// n is the head's length.
func parseHead(b []byte, resp *http.Response, f *frame) (n int, v verdict) {
	if k := min(len(b), len(statusProto)); string(b[:k]) != statusProto[:k] {
		return 0, headUncommon
	}
	end := bytes.Index(b, []byte("\r\n\r\n"))
	if end < 0 {
		if bareLine(b) {
			return 0, headUncommon
		}
		return 0, headMore
	}
	head := string(b[:end+2]) // all names and values are parts of it
	line, lines, _ := strings.Cut(head, "\r\n")
	status, ok := parseStatus(line)
	if !ok {
		return 0, headUncommon
	}
	count := strings.Count(lines, "\n")
	h, values := make(http.Header, count), make([]string, 0, count)
	var length, coding string
	for len(lines) > 0 {
		line, lines, _ = strings.Cut(lines, "\r\n")
		key, value, ok := parseField(line)
		if !ok || h[key] != nil {
			return 0, headUncommon
		}
		switch key {
		case "Content-Length":
			length = value
		case "Transfer-Encoding": // like Connection: close, net/http takes it out
			if coding != "" || value == "" {
				return 0, headUncommon
			}
			coding = value
			continue
		case "Connection":
			if strings.EqualFold(value, "close") && !resp.Close {
				resp.Close = true
				continue
			}
			if resp.Close || !strings.EqualFold(value, "keep-alive") {
				return 0, headUncommon
			}
		case "Trailer", "Pragma": // net/http changes the header for them
			return 0, headUncommon
		}
		values = append(values, value)
		h[key] = values[len(values)-1 : len(values) : len(values)]
	}
	if !f.begin(length, coding) {
		return 0, headUncommon
	}
	resp.Status, resp.StatusCode, resp.Header = line0(head), status, h
	if resp.ContentLength = f.left; coding != "" {
		resp.ContentLength = -1
	}
	resp.Proto, resp.ProtoMajor, resp.ProtoMinor = statusProto[:len(statusProto)-1], 1, 1
	return end + 4, headWhole
}

// bareLine: a line in b ends otherwise than in CRLF.
func bareLine(b []byte) bool {
	for i := bytes.IndexByte(b, '\n'); i >= 0; i = bytes.IndexByte(b, '\n') {
		if i == 0 || b[i-1] != '\r' {
			return true
		}
		b = b[i+1:]
	}
	return false
}

// line0 is the status of a head, code and words.
func line0(head string) string {
	return head[len(statusProto):strings.IndexByte(head, '\r')]
}

// parseStatus reads "HTTP/1.1 200 OK". Statuses without a body are uncommon.
func parseStatus(line string) (status int, ok bool) {
	rest := line[len(statusProto):]
	if len(rest) < 3 || len(rest) > 3 && rest[3] != ' ' || !printable(rest) {
		return 0, false
	}
	for _, c := range []byte(rest[:3]) {
		if c < '0' || c > '9' {
			return 0, false
		}
		status = 10*status + int(c-'0')
	}
	return status, status >= 200 && status != http.StatusNoContent && status != http.StatusNotModified
}

// parseField reads "Name: value"; key is canonical.
func parseField(line string) (key, value string, ok bool) {
	name, value, ok := strings.Cut(line, ":")
	if !ok || name == "" || !printable(value) {
		return "", "", false
	}
	for _, c := range []byte(name) {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_') {
			return "", "", false
		}
	}
	return textproto.CanonicalMIMEHeaderKey(name), strings.Trim(value, " "), true
}

// printable: s is ASCII without control characters, tabs included.
func printable(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}
