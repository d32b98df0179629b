package edge

import (
	"crypto/rand"
	"encoding/hex"
	"net/http"
)

// HeaderRequestID names a request to client, router and workers.
const HeaderRequestID = "X-Request-Id"

// maxRequestID is the longest id of a client's that is kept, in bytes.
const maxRequestID = 128

// RequestIDs has every answer, errors too, carry an id: the client's if it is sane, else a made one. One that is not is
// taken out of the request, so that nothing odd gets into logs and on to workers.
func RequestIDs(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		id := req.Header.Get(HeaderRequestID)
		if !SaneID(id) || len(req.Header[HeaderRequestID]) > 1 {
			req.Header.Del(HeaderRequestID)
			id = newID()
		}
		w.Header().Set(HeaderRequestID, id)
		next.ServeHTTP(w, req)
	})
}

// SaneID reports whether a request may be known by id: at most 128 characters of visible ASCII, none of which needs quoting in JSON or a log line.
func SaneID(id string) bool {
	if id == "" || len(id) > maxRequestID {
		return false
	}
	for i := range len(id) {
		if c := id[i]; c <= ' ' || c > '~' || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' {
			return false
		}
	}
	return true
}

func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read does not fail
	return hex.EncodeToString(b[:])
}
