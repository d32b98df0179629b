package wire

import (
	"bufio"
	"bytes"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// FuzzHead: what parseHead takes, net/http takes, and reads as the same.
func FuzzHead(f *testing.F) {
	for _, h := range []string{
		"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nCache-Control: no-cache\r\n\r\n",
		"HTTP/1.1 200 OK\r\ndate: x\r\ncontent-length:  12 \r\nConnection: close\r\nx_y-z: a:b\r\nempty:\r\n\r\n",
		"HTTP/1.1 503\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: Keep-Alive\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\n", "HTTP/1.1 200 OK\r\nA: b\r\n c\r\nContent-Length: 2\r\n\r\n", "HTTP/1.1 200 OK\nContent-Length: 2\n\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "HTTP/1.1 204 No\r\nContent-Length: 2\r\n\r\n", "HTTP/1.1 100 Go\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: a\r\n\r\n", "HTTP/1.1 200 OK\r\nA : b\r\nContent-Length: 2\r\n\r\n", "HTTP/1.1  200 OK\r\nContent-Length: 2\r\n\r\n",
		"HTTP/1.1 200 OK\r\nPragma: no-cache\r\nContent-Length: 2\r\n\r\n", "HTTP/1.1 200 OK\r\n Content-Length: 2\r\n\r\n", "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n",
	} {
		f.Add([]byte(h))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var got http.Response
		var fr frame
		n, v := parseHead(b, &got, &fr)
		if v != headWhole {
			return
		}
		br := bufio.NewReaderSize(bytes.NewReader(b), 16+len(b))
		want, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatalf("net/http refuses %q: %v", b, err)
		}
		if got.StatusCode != want.StatusCode || got.Status != want.Status || got.Close != want.Close || got.Proto != want.Proto || got.ContentLength != want.ContentLength || !maps.EqualFunc(got.Header, want.Header, slices.Equal) {
			t.Errorf("%q: %+v, want %+v", b, got, want)
		}
		if left := len(b) - br.Buffered(); n != left {
			t.Errorf("%q has %d bytes, want %d", b, n, left)
		}
		chunked := len(want.TransferEncoding) > 0
		if chunked != (fr.state == frameSize) || !chunked && want.ContentLength != fr.left || (fr.state == frameOver) != (want.ContentLength == 0) {
			t.Errorf("%q: %+v, want length %d, coding %v", b, fr, want.ContentLength, want.TransferEncoding)
		}
	})
}

// readAll runs a chunked body through a frame, in pieces of step bytes, with room for out bytes a time.
func readAll(b []byte, step, out int) (content []byte, used int, over bool, err error) {
	var fr frame
	fr.begin("", "chunked")
	to := make([]byte, out)
	for seen := 0; ; {
		k, n, err := fr.take(b[used:seen], to)
		used += k
		content = append(content, to[:n]...)
		switch {
		case err != nil || fr.state == frameOver:
			return content, used, err == nil, err
		case k > 0:
		case seen == len(b):
			return content, used, false, nil
		default:
			seen = min(seen+step, len(b))
		}
	}
}

// FuzzFrame: a chunked body that ends for a frame ends for net/http, at the same place and with the same content; and how it was cut on the way makes
// no difference.
func FuzzFrame(f *testing.F) {
	for _, b := range []string{
		"5\r\nhello\r\n6;a=b\r\n world\r\n0\r\n\r\n", "A\r\n0123456789\r\n0\r\nX: y\r\nZ: 1\r\n\r\nmore", "1 \t\r\nx\r\n00\r\n\r\n", "0;x\r\n\r\n", "5\nhello\r\n0\r\n\r\n", "5\r\nhello0\r\n\r\n",
		"5\r\nhelloxx0\r\n\r\n", "\r\n", "-1\r\n\r\n", "0x1\r\na\r\n0\r\n\r\n", "ffffffffffffffff\r\n", "1\r\r\n", "1;\r\r\nx\r\n0\r\n\r\n", "0\r\n\n\r\n\r\n", "0\r\n\n0", "0\r\nbad trailer\r\n\r\n", "0\r\n\n", "1 2\r\nx\r\n0\r\n\r\n",
		strings.Repeat("1;"+strings.Repeat("x", 900)+"\r\na\r\n", 30) + "0\r\n\r\n", "1;" + strings.Repeat("x", 2000) + "\r\na\r\n0\r\n\r\n", "0\r\nA: " + strings.Repeat("x", 3000) + "\r\n\r\n",
	} {
		f.Add([]byte(b), byte(3))
	}
	f.Fuzz(func(t *testing.T, b []byte, step byte) {
		content, used, over, err := readAll(b, len(b)+1, 16<<10)
		again, used2, over2, err2 := readAll(b, int(step)+1, int(step)%7+1)
		if !bytes.Equal(content, again) || used != used2 && err == nil || over != over2 || (err == nil) != (err2 == nil) {
			t.Fatalf("%q: %q, %d, %v, %v; in pieces %q, %d, %v, %v", b, content, used, over, err, again, used2, over2, err2)
		}
		br := bufio.NewReader(io.MultiReader(strings.NewReader("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"), bytes.NewReader(b)))
		resp, herr := http.ReadResponse(br, nil)
		if herr != nil {
			t.Fatal(herr)
		}
		want, herr := io.ReadAll(resp.Body)
		if over {
			rest, _ := io.ReadAll(br)
			if herr != nil || !bytes.Equal(content, want) || len(b)-len(rest) != used {
				t.Errorf("%q: %q and %d bytes; net/http %q, %d, %v", b, content, used, want, len(b)-len(rest), herr)
			}
		} else if n := min(len(content), len(want)); !bytes.Equal(content[:n], want[:n]) {
			t.Errorf("%q: %q, net/http %q", b, content, want)
		}
	})
}
