// Package httpbody reads the bodies of requests, for workers and router alike: in memory that is
// bounded by what has come, and to the end where a body is refused, so that the client
// looks at its answer.
package httpbody

import (
	"io"
	"net/http"
	"time"
)

// The pieces in which Read reads: most bodies fit the first.
const (
	firstPiece = 16 << 10
	maxPiece   = 1 << 20
)

// Read reads r to its end, holding what has come and at most one piece more, and twice
// that for the moment of joining. A buffer that grows by doubling would hold up to four times a
// body of unknown length, and one made for the announced length trusts who announces. Errors of r
// come as they are, without data.
func Read(r io.Reader) ([]byte, error) { return ReadAbout(r, firstPiece) }

// ReadAbout is Read for a body that is said to have length bytes (negative: nobody said), which makes small ones cheap and is not trusted.
func ReadAbout(r io.Reader, length int64) ([]byte, error) {
	first := int64(firstPiece)
	if length >= 0 {
		first = min(length+1, first) // one more, to find the end without another piece
	}
	var full [][]byte // pieces without room
	piece, total := make([]byte, 0, first), 0
	for {
		if len(piece) == cap(piece) {
			full = append(full, piece)
			piece = make([]byte, 0, min(max(4*cap(piece), firstPiece), maxPiece))
		}
		n, err := r.Read(piece[len(piece):cap(piece)])
		piece, total = piece[:len(piece)+n], total+n
		switch {
		case err == io.EOF && full == nil:
			return piece, nil
		case err == io.EOF:
			out := make([]byte, 0, total)
			for _, p := range append(full, piece) {
				out = append(out, p...)
			}
			return out, nil
		case err != nil:
			return nil, err
		}
	}
}

// What Drain reads at most.
const (
	drainBytes = 256 << 20
	drainTime  = 3 * time.Second
)

// Drain reads and forgets what a client still sends although its body is refused. Many clients, the
// OpenAI Python client among them, look for an answer only when they have sent everything; a
// connection that is closed under them is a network failure to them, which they repeat. A client
// that asked before it sent (Expect: 100-continue) has not sent anything. It takes 3 s at most, however slow the client is.
func Drain(w http.ResponseWriter, r *http.Request) { DrainUntil(w, r, time.Now().Add(drainTime)) }

// DrainUntil is Drain that gives up at the time end, if that is sooner.
func DrainUntil(w http.ResponseWriter, r *http.Request, end time.Time) {
	if r.Header.Get("Expect") != "" {
		return
	}
	if most := time.Now().Add(drainTime); end.After(most) {
		end = most
	}
	if http.NewResponseController(w).SetReadDeadline(end) != nil {
		return // without a deadline it might take for ever
	}
	_, _ = io.CopyN(io.Discard, r.Body, drainBytes) // however it ends, the answer comes next
}
